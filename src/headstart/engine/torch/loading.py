"""Stored prefixes of requests: what is decided about them, their loads from start to end, and what came of them."""

from __future__ import annotations

from headstart.engine.serving.bridge import Started
from headstart.engine.serving.loading import LoadBooks, Outcome
from headstart.engine.serving.roster import Roster
from headstart.engine.speeds import Speeds
from headstart.engine.torch.kv_memory import DeviceKV, HostKV
from headstart.engine.torch.meeting import Meeting
from headstart.engine.torch.prefix import PrefixBridge
from headstart.engine.torch.prefix_load import PrefixLoad
from headstart.engine.torch.room import Rooms
from headstart.engine.torch.sequence import Sequence
from headstart.metrics import Counters


class Loads(LoadBooks[Sequence]):
    """For the engine's thread."""

    def __init__(
        self, roster: Roster[Sequence], rooms: Rooms, bridge: PrefixBridge | None, speeds: Speeds, counters: Counters
    ) -> None:
        super().__init__(roster, bridge, speeds, counters)
        self._rooms = rooms
        self._bridge = bridge

    def start(self, sequence: Sequence) -> None:
        super().start(sequence)
        if isinstance(sequence.load, PrefixLoad):
            sequence.computed = sequence.load.tokens

    def _begin(self, sequence: Sequence) -> Started[PrefixLoad | Meeting]:
        assert self._bridge is not None
        assert isinstance(sequence.kv, HostKV | DeviceKV)
        return self._bridge.start_load(
            sequence.tokens,
            sequence.kv,
            salt=sequence.request.salt,
            shared_tokens=sequence.request.shared_tokens,
            identity=sequence.identity,
            ahead_s=self._ahead_s(sequence),
            mix=sequence.mix,
        )

    def settle(self) -> None:
        """Take over what is done, go on with what meets, and give up what takes too long."""
        for sequence in [*self._roster.running, *self._roster.waiting]:
            load = sequence.load
            if isinstance(load, Meeting):
                self._settle_meeting(sequence, load)
            elif load is None:
                continue
            elif load.done:
                self.adopt(sequence, load.outcome())
            elif load.overdue:
                self._counters.add("loads_timed_out")
                sequence.reload = False
                self._start_again(sequence, "the load took too long; computed instead")
            elif load.slow:
                assert self._bridge is not None
                self._counters.add("load_waits_cut_short")
                sequence.reload = self._bridge.in_parts and not sequence.mix  # what is slow twice is not tried for ever
                sequence.mix = self._bridge.in_parts
                load.give_up()
                self._start_again(
                    sequence, "reading was slower than computing would be: it is computed from the start meanwhile"
                )

    def adopt(self, sequence: Sequence, outcome: Outcome) -> None:
        """The load is over: what it brought counts, what it did not is computed."""
        load = sequence.load
        assert load is not None
        self._count(sequence, outcome)
        missing = load.tokens - outcome.tokens
        if isinstance(load, Meeting):
            sequence.computed = load.tokens
            sequence.notes.append(f"{missing} stored tokens were computed while {outcome.tokens} were read")
            self._counters.add("stored_tokens_computed", missing)
        else:
            sequence.computed = outcome.tokens
            if missing:
                sequence.notes.append(f"loaded {outcome.tokens} of {load.tokens} matched tokens; the rest was computed")
                self._counters.add("loads_cut_short")
                self._counters.add("stored_tokens_computed", missing)
            elif load.plan.load_s is not None:
                self.speeds.loaded(outcome.seconds, estimate_s=load.plan.load_s)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """The engine is through with its load, whatever became of it; reads under way keep the memory that they touch."""
        load, sequence.load = sequence.load, None
        if load is None:
            return
        if isinstance(load, Meeting):
            load.end()
        else:
            if not load.done:
                load.cancel()
            load.release()
        self._rooms.leaves(load)

    def _settle_meeting(self, sequence: Sequence, load: Meeting) -> None:
        lead = load.lead
        if lead is not None:
            if lead.done:
                sequence.computed = load.take_lead()
            elif lead.overdue:
                self._counters.add("loads_timed_out")
                sequence.reload = False
                self._start_again(sequence, "the load took too long; computed instead")
                return
        load.go_on()
        if load.met(sequence.computed):
            self.adopt(sequence, load.outcome())

    def _start_again(self, sequence: Sequence, why: str) -> None:
        """Bytes may still land in its KV, so it gets fresh KV, at its place in the queue."""
        self.drop(sequence)
        self._rooms.give_back(sequence)
        sequence.computed = 0
        sequence.notes.append(why)
        if sequence in self._roster.running:
            self._roster.put_back(sequence)
