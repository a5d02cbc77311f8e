"""One step: a forward pass over all that the plan names, and a token to each whose prompt is through."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial

from headstart.engine.serving.boundaries import Boundaries
from headstart.engine.serving.ending import Endings
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.scheduler import Work, note_turns, plan_step
from headstart.engine.torch import deterministic
from headstart.engine.torch.attention import Step
from headstart.engine.torch.loading import Loads
from headstart.engine.torch.meeting import Meeting
from headstart.engine.torch.model import Model
from headstart.engine.torch.prefix_load import PrefixLoad
from headstart.engine.torch.sampler import choose
from headstart.engine.torch.sequence import Sequence
from headstart.errors import LoadFailed
from headstart.metrics import Counters
from headstart.policy.pacing import Pace

_log = logging.getLogger(__name__)

_LEAST_BESIDE = 32  # tokens of prompts beside answers: fewer cost nearly as much
_TELLING_ROWS = 16  # of prompts
_PATIENCE_S = 0.02  # how long a step waits for a layer before it looks whether other work has come


class _Abandoned(Exception):
    """The step in progress is given up; its requests stay as they were before it."""


class Stepper:
    """For the engine's thread. `alone`: each request in a pass of its own, in the chunks of `deterministic`."""

    def __init__(
        self,
        model: Model,
        roster: Roster[Sequence],
        loads: Loads,
        boundaries: Boundaries[Sequence],
        endings: Endings[Sequence],
        counters: Counters,
        *,
        chunk_tokens: int,
        alone: bool,
    ) -> None:
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._pace = Pace()
        self._roster = roster
        self._loads = loads
        self._boundaries = boundaries
        self._endings = endings
        self._counters = counters
        self._alone = alone

    def plan(self) -> list[Work[Sequence]]:
        """Return what the next step computes; see `scheduler`."""
        work = plan_step(
            self._roster.running,
            shares=self._roster.shares,
            chunk_tokens=self._chunk_tokens,
            beside_tokens=self._pace.beside_tokens(least=min(_LEAST_BESIDE, self._chunk_tokens), most=self._chunk_tokens),
        )
        return self._boundaries.cut(work)

    def step(self, work: Several[Work[Sequence]]) -> None:
        """Compute `work`, or give it up. What fails ends the requests of its pass, and nothing else."""
        if not self._alone:
            self._pass(work)
            return
        for one in [item.sequence for item in work]:
            count = deterministic.next_count(
                computed=one.computed, prompt_tokens=one.prompt_tokens, known_tokens=len(one.tokens)
            )
            self._pass([Work(one, count)])

    def _pass(self, work: Several[Work[Sequence]]) -> None:
        tokens: list[int] = []
        segments, rows, complete, adapted = [], [], [], []
        for item in work:
            sequence = item.sequence
            if isinstance(sequence.load, Meeting):
                sequence.load.claim(sequence.computed + item.count)
            segments.append(sequence.segment(len(tokens), item.count))
            if sequence.request.adapter is not None:
                adapted.append((segments[-1].rows, sequence.request.adapter))
            tokens += sequence.tokens[sequence.computed : sequence.computed + item.count]
            if item.count == sequence.pending:
                rows.append(len(tokens) - 1)
                complete.append(sequence)
        prompt_tokens = sum(item.count for item in work if not item.sequence.decoding)
        started = time.monotonic()
        try:
            self._take_states(work)
            step = Step(segments, lambda layer: self._before_layer(work, layer), adapted=adapted)
            logits = self._model.forward(tokens, step, rows=rows)
            chosen = choose(logits, [sequence.sampler for sequence in complete])
        except _Abandoned:
            self._counters.add("steps_abandoned")
            return
        except Exception as error:  # noqa: BLE001 - a step's outer edge
            self._counters.add("step_faults")
            _log.exception("a step over %d tokens failed; its %d requests are ended", len(tokens), len(work))
            for item in work:
                self._endings.end(
                    item.sequence, "error", error=f"computing failed ({type(error).__name__}); the server's log has the details"
                )
            return
        self._counters.add("steps")
        seconds = time.monotonic() - started
        self._measure(work, seconds, settled=bool(rows))
        if not any(isinstance(item.sequence.load, PrefixLoad) for item in work):  # else it waited
            decoding = any(item.sequence.decoding for item in work)
            self._pace = self._pace.after(seconds=seconds, decoding=decoding, prompt_tokens=prompt_tokens)
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

    def _advance(self, item: Work[Sequence]) -> int:
        """Count what was computed; return how much was before."""
        sequence = item.sequence
        if isinstance(sequence.load, PrefixLoad):  # every layer of it was waited for, so all of it is good
            self._loads.adopt(sequence, sequence.load.outcome())
        before, end = sequence.computed, sequence.computed + item.count
        sequence.computed = deterministic.reached(computed=before, count=item.count) if self._alone else end
        again = max(0, min(sequence.reached, end) - before)
        if again:
            self._counters.add("recomputed_tokens", again)
        generated = 1 if end == len(sequence.tokens) else 0
        self._roster.shares.charge(sequence.request.tenant, computed=item.count - again, generated=generated)
        self._boundaries.passed(sequence)
        return before

    def _measure(self, work: Several[Work[Sequence]], seconds: float, *, settled: bool) -> None:
        """Learn how fast prompts are computed, from steps that are mostly of prompts and waited for no read."""
        rows = sum(item.count for item in work)
        if rows - len(work) < _TELLING_ROWS or any(isinstance(item.sequence.load, PrefixLoad) for item in work):
            return
        spans = [(item.sequence.computed, item.sequence.computed + item.count) for item in work]
        row_keys = sum(end * end - first * first for first, end in spans) / 2
        on_cpu = self._model.device.type == "cpu"  # elsewhere a pass is over only when something of it was asked for
        self._loads.speeds.passed(rows, row_keys, seconds, settled=settled or on_cpu)

    def _before_layer(self, work: Several[Work[Sequence]], layer: int) -> None:
        """Wait until the layer is there for all of the step, or give the step up: when nobody is left who wants it, or not
        the prompt that is most of its work. An aborted stream alone would cost the others more than its row."""
        over = [item for item in work if item.sequence.over]
        if self._roster.closing or len(over) == len(work) or any(not item.sequence.decoding for item in over):
            raise _Abandoned
        for item in work:
            if isinstance(item.sequence.load, PrefixLoad):
                self._wait(item.sequence, partial(item.sequence.load.wait, layer))

    def _take_states(self, work: Several[Work[Sequence]]) -> None:
        """Wait until recurrent layers of those whose prefix is loaded stand behind it."""
        for item in work:
            if isinstance(item.sequence.load, PrefixLoad):
                self._wait(item.sequence, item.sequence.load.take_state)
            self._boundaries.entered(item.sequence)

    def _wait(self, sequence: Sequence, what: Callable[[float], None]) -> None:
        """Wait for something of a request's load, or give the step up."""
        load = sequence.load
        assert isinstance(load, PrefixLoad)
        while True:
            try:
                what(_PATIENCE_S)
                return
            except LoadFailed as error:
                if not error.facts.get("timed_out"):
                    load.failed = True  # `Loads.settle` keeps the good part once the last read has ended
                    raise _Abandoned from error
                if load.overdue or load.slow or sequence.over or self._roster.closing or self._roster.mail:
                    raise _Abandoned from error
