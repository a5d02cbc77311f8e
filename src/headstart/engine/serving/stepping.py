"""What a step is besides its pass, for every engine alike: what is planned, learned from it, counted, told and saved."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence as Several
from typing import Generic

from headstart.engine.serving.boundaries import Boundaries
from headstart.engine.serving.ending import Endings
from headstart.engine.serving.loading import LoadBooks
from headstart.engine.serving.parts import Choice
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.scheduler import Work, note_turns, plan_step
from headstart.engine.serving.sequence import S
from headstart.metrics import Counters
from headstart.policy.pacing import Pace

_log = logging.getLogger(__name__)

_LEAST_BESIDE = 32  # tokens of prompts beside answers: fewer cost nearly as much
_TELLING_ROWS = 16  # of prompts


class Steps(ABC, Generic[S]):
    """For the engine's thread."""

    def __init__(
        self, roster: Roster[S], loads: LoadBooks[S], boundaries: Boundaries[S], endings: Endings[S], counters: Counters
    ) -> None:
        self._roster = roster
        self._books = loads
        self._boundaries = boundaries
        self._endings = endings
        self._counters = counters
        self._pace = Pace()

    @property
    @abstractmethod
    def chunk_tokens(self) -> int:
        """How many tokens of prompts a pass computes at most."""

    def plan(self) -> list[Work[S]]:
        """Return what the next step computes; see `scheduler`."""
        chunk = self.chunk_tokens
        work = plan_step(
            self._roster.running,
            shares=self._roster.shares,
            chunk_tokens=chunk,
            beside_tokens=self._pace.beside_tokens(least=min(_LEAST_BESIDE, chunk), most=chunk),
        )
        return self._boundaries.cut(work)

    def _failed(self, work: Several[Work[S]], error: Exception) -> None:
        """A pass failed, in an exception handler: end its requests, and nothing else."""
        self._counters.add("step_faults")
        _log.exception("a pass over %d tokens failed; its %d requests are ended", sum(one.count for one in work), len(work))
        for item in work:
            self._endings.end(
                item.sequence, "error", error=f"computing failed ({type(error).__name__}); the server's log has the details"
            )

    def _measure(self, work: Several[Work[S]], seconds: float, *, settled: bool) -> None:
        """Learn, before it is counted, from a pass that waited for no read how long passes take; and how fast prompts are
        computed, if it was mostly of prompts. `settled`: it was over after `seconds`."""
        decoding = any(item.sequence.decoding for item in work)
        prompt_tokens = sum(item.count for item in work if not item.sequence.decoding)
        self._pace = self._pace.after(seconds=seconds, decoding=decoding, prompt_tokens=prompt_tokens)
        rows = sum(item.count for item in work)
        if rows - len(work) < _TELLING_ROWS:
            return
        spans = [(item.sequence.computed, item.sequence.computed + item.count) for item in work]
        row_keys = sum(end * end - first * first for first, end in spans) / 2
        self._books.speeds.passed(rows, row_keys, seconds, settled=settled)

    def _passed(self, work: Several[Work[S]], complete: Several[S], chosen: Several[Choice | str]) -> None:
        """A pass is over: count it, and hand out what was chosen for those that it completes."""
        self._counters.add("steps")
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

    def _advance(self, item: Work[S]) -> int:
        """Count what was computed; return how much was before."""
        sequence = item.sequence
        before, end = sequence.computed, sequence.computed + item.count
        sequence.computed = self._reached(item)
        again = max(0, min(sequence.reached, end) - before)
        if again:
            self._counters.add("recomputed_tokens", again)
        generated = 1 if end == len(sequence.tokens) else 0
        self._roster.shares.charge(sequence.request.tenant, computed=item.count - again, generated=generated)
        self._boundaries.passed(sequence)
        return before

    def _reached(self, item: Work[S]) -> int:
        """Return how many tokens of a request's KV stand for good behind a pass."""
        return item.sequence.computed + item.count
