"""Stored prefixes of the llama engine's requests: what is decided, their reads from start to end, and what came of them."""

from __future__ import annotations

from headstart.engine.llama.bridge import CacheBridge
from headstart.engine.llama.cells import Cells, SequenceKV
from headstart.engine.llama.reading import PrefixRead
from headstart.engine.llama.sequence import LlamaSequence
from headstart.engine.serving.bridge import Started
from headstart.engine.serving.loading import LoadBooks
from headstart.engine.serving.roster import Roster
from headstart.engine.speeds import Speeds
from headstart.metrics import Counters


class LlamaLoads(LoadBooks[LlamaSequence]):
    """For the engine's thread."""

    def __init__(
        self, roster: Roster[LlamaSequence], cells: Cells, bridge: CacheBridge | None, speeds: Speeds, counters: Counters
    ) -> None:
        super().__init__(roster, bridge, speeds, counters)
        self._cells = cells
        self._bridge = bridge

    def _begin(self, sequence: LlamaSequence) -> Started[PrefixRead]:
        assert self._bridge is not None
        return self._bridge.start_read(
            sequence.tokens,
            salt=sequence.request.salt,
            shared_tokens=sequence.request.shared_tokens,
            identity=sequence.identity,
            ahead_s=self._ahead_s(sequence),
        )

    def settle(self) -> bool:
        """Set what has landed, take over what is done, and give up or turn round what takes too long. Returns whether
        something was set."""
        moved = False
        for sequence in [*self._roster.running, *self._roster.waiting]:
            read = sequence.load
            if read is None:
                continue
            before, kv = sequence.computed, self._kv(sequence)
            sequence.computed = read.set_into(self._cells.context, kv.number, before)
            moved |= sequence.computed > before
            if read.over(sequence.computed):
                self._adopt(sequence)
            elif read.overdue:
                self._counters.add("loads_timed_out")
                sequence.notes.append("the load took too long; the rest was computed instead")
                self._adopt(sequence)
            elif read.slow:
                self._counters.add("load_waits_cut_short")
                if self._bridge is not None and self._bridge.in_parts:
                    sequence.notes.append("reading was slower than computing would be: its rest is computed meanwhile")
                    read.turn_round()
                else:
                    sequence.notes.append("reading was slower than computing would be")
                    self._adopt(sequence)
        return moved

    def drop(self, sequence: LlamaSequence) -> None:
        """The engine is through with its load, whatever became of it; reads under way keep the memory that they touch."""
        read, sequence.load = sequence.load, None
        if read is not None:
            read.end()

    def _adopt(self, sequence: LlamaSequence) -> None:
        """The read is over: what it brought counts, what it did not is computed."""
        read = sequence.load
        assert read is not None
        outcome = read.outcome()
        if not sequence.computed:  # of a recurrent model a part may have been set, and is of no use
            self._cells.context.remove(self._kv(sequence).number)
        self._count(sequence, outcome)
        missing = read.tokens - outcome.tokens
        if read.plan.choice == "compute":
            missing = read.plan.at_once_tokens - outcome.tokens  # the rest was counted when that was decided
        if missing > 0:
            self._counters.add("stored_tokens_computed", missing)
            if read.mixed and sequence.computed >= read.tokens:
                sequence.notes.append(f"{missing} stored tokens were computed while {outcome.tokens} were read")
            else:
                sequence.notes.append(f"loaded {outcome.tokens} of {read.tokens} matched tokens; the rest was computed")
                self._counters.add("loads_cut_short")
        elif read.plan.load_s is not None:
            self.speeds.loaded(outcome.seconds, estimate_s=read.plan.load_s)
        self.drop(sequence)

    @staticmethod
    def _kv(sequence: LlamaSequence) -> SequenceKV:
        assert sequence.kv is not None
        return sequence.kv
