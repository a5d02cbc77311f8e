"""One step: a pass of libllama over all that the plan names, and a token to each whose prompt is through."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Several

from headstart.block.keys import BLOCK_TOKENS
from headstart.engine.llama.context import Context, Row
from headstart.engine.llama.loading import LlamaLoads
from headstart.engine.llama.sequence import LlamaSequence
from headstart.engine.serving.boundaries import Boundaries
from headstart.engine.serving.ending import Endings
from headstart.engine.serving.parts import Choice
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.scheduler import Work, note_turns, plan_step
from headstart.metrics import Counters
from headstart.policy.pacing import Pace

_log = logging.getLogger(__name__)

_LEAST_BESIDE = 32  # tokens of prompts beside answers: fewer cost nearly as much
_TELLING_ROWS = 16  # of prompts
_PASS_S = 2.0  # how long one pass over prompts may take: nobody is let in, aborted or answered meanwhile


class Stepper:
    """For the engine's thread. `waits`: whether a pass is over when libllama comes back from it, as it is on CPUs."""

    def __init__(
        self,
        context: Context,
        roster: Roster[LlamaSequence],
        loads: LlamaLoads,
        boundaries: Boundaries[LlamaSequence],
        endings: Endings[LlamaSequence],
        counters: Counters,
        *,
        chunk_tokens: int,
        waits: bool,
    ) -> None:
        self._context = context
        self._roster = roster
        self._loads = loads
        self._boundaries = boundaries
        self._endings = endings
        self._counters = counters
        self._most_tokens = chunk_tokens
        self._waits = waits
        self._pace = Pace()

    @property
    def chunk_tokens(self) -> int:
        """How many tokens of prompts a pass computes at most, by what they were measured to take."""
        token_s = self._pace.token_s
        if not token_s:
            return min(self._most_tokens, 4 * BLOCK_TOKENS)
        return min(self._most_tokens, max(1, int(_PASS_S / token_s) // BLOCK_TOKENS) * BLOCK_TOKENS)

    def plan(self) -> list[Work[LlamaSequence]]:
        """Return what the next step computes; see `serving.scheduler`."""
        chunk = self.chunk_tokens
        work = plan_step(
            self._roster.running,
            shares=self._roster.shares,
            chunk_tokens=chunk,
            beside_tokens=self._pace.beside_tokens(least=min(_LEAST_BESIDE, chunk), most=chunk),
        )
        return self._boundaries.cut(work)

    def step(self, work: Several[Work[LlamaSequence]]) -> None:
        """Compute `work`. What fails ends the requests of this step, and nothing else."""
        rows = []
        for item in work:
            sequence, end = item.sequence, item.sequence.computed + item.count
            assert sequence.kv is not None
            if sequence.load is not None:
                sequence.load.claim(end)
            self._boundaries.entered(sequence)
            tokens = sequence.tokens[sequence.computed : end]
            rows.append(Row(sequence.kv.number, tokens, sequence.computed, wanted=item.count == sequence.pending))
        complete = [item.sequence for item, row in zip(work, rows, strict=True) if row.wanted]
        started = time.monotonic()
        try:
            outputs = self._context.compute(rows)
            chosen = [self._choose(one, output) for one, output in zip(complete, outputs, strict=True)]
        except Exception as error:  # noqa: BLE001 - a step's outer edge
            self._counters.add("step_faults")
            _log.exception("a step failed; its %d requests are ended", len(work))
            for item in work:
                self._endings.end(
                    item.sequence, "error", error=f"computing failed ({type(error).__name__}); the server's log has the details"
                )
            return
        self._counters.add("steps")
        self._measure(work, time.monotonic() - started, settled=self._waits or bool(outputs))
        note_turns(self._roster.running, work)
        before = [self._advance(item) for item in work]
        for item, computed in zip(work, before, strict=True):
            self._endings.tell_progress(item.sequence, before=computed)
        for sequence, choice in zip(complete, chosen, strict=True):
            if not sequence.over:  # else its last event comes before the next step
                self._endings.deliver(sequence, choice)
        for item, computed in zip(work, before, strict=True):
            if not item.sequence.ended:  # only now, so that no token waits for it
                self._endings.save_progress(item.sequence, before=computed)

    def _choose(self, sequence: LlamaSequence, output: int) -> Choice | str:
        try:
            return sequence.sampler.choose(self._context, output)
        except Exception as error:  # noqa: BLE001 - a request's outer edge; the engine counts it
            _log.exception("choosing a token failed; its request is ended")
            return f"choosing a token failed ({type(error).__name__}); the server's log has the details"

    def _advance(self, item: Work[LlamaSequence]) -> int:
        """Count what was computed; return how much was before."""
        sequence = item.sequence
        before, sequence.computed = sequence.computed, sequence.computed + item.count
        again = max(0, min(sequence.reached, sequence.computed) - before)
        if again:
            self._counters.add("recomputed_tokens", again)
        generated = 1 if sequence.computed == len(sequence.tokens) else 0
        self._roster.shares.charge(sequence.request.tenant, computed=item.count - again, generated=generated)
        self._boundaries.passed(sequence)
        return before

    def _measure(self, work: Several[Work[LlamaSequence]], seconds: float, *, settled: bool) -> None:
        """Learn how long passes take, and how fast prompts are computed from those that are mostly of prompts."""
        decoding = any(item.sequence.decoding for item in work)
        prompt_tokens = sum(item.count for item in work if not item.sequence.decoding)
        self._pace = self._pace.after(seconds=seconds, decoding=decoding, prompt_tokens=prompt_tokens)
        rows = sum(item.count for item in work)
        if rows - len(work) < _TELLING_ROWS:
            return
        spans = [(item.sequence.computed, item.sequence.computed + item.count) for item in work]
        row_keys = sum(end * end - first * first for first, end in spans) / 2
        self._loads.speeds.passed(rows, row_keys, seconds, settled=settled)
