"""One step: a forward pass over all that the plan names, and a token to each whose prompt is through."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Several

from headstart.engine.base import TokenEvent
from headstart.engine.torch import deterministic
from headstart.engine.torch.attention import Step
from headstart.engine.torch.ending import Endings
from headstart.engine.torch.loading import Loads
from headstart.engine.torch.meeting import Meeting
from headstart.engine.torch.model import Model
from headstart.engine.torch.prefix_load import PrefixLoad
from headstart.engine.torch.roster import Roster
from headstart.engine.torch.sampler import Choice, choose
from headstart.engine.torch.scheduler import Work
from headstart.engine.torch.sequence import Sequence
from headstart.errors import LoadFailed
from headstart.metrics import Counters

_log = logging.getLogger(__name__)

_TELLING_ROWS = 16  # of prompts
_PATIENCE_S = 0.02  # how long a step waits for a layer before it looks whether other work has come


class _Abandoned(Exception):
    """The step in progress is given up; its requests stay as they were before it."""


class Stepper:
    """For the engine's thread. `alone`: each request in a pass of its own, in the chunks of `deterministic`."""

    def __init__(
        self, model: Model, roster: Roster, loads: Loads, endings: Endings, counters: Counters, *, alone: bool
    ) -> None:
        self._model = model
        self._roster = roster
        self._loads = loads
        self._endings = endings
        self._counters = counters
        self._alone = alone

    def step(self, work: Several[Work]) -> None:
        """Compute `work`, or give it up. What fails ends the requests of its pass, and nothing else."""
        if not self._alone:
            self._pass(work)
            return
        for one in [item.sequence for item in work]:
            count = deterministic.next_count(
                computed=one.computed, prompt_tokens=one.prompt_tokens, known_tokens=len(one.tokens)
            )
            self._pass([Work(one, count)])

    def _pass(self, work: Several[Work]) -> None:
        tokens: list[int] = []
        segments, rows, complete = [], [], []
        for item in work:
            sequence = item.sequence
            if isinstance(sequence.load, Meeting):
                sequence.load.claim(sequence.computed + item.count)
            segments.append(sequence.segment(len(tokens), item.count))
            tokens += sequence.tokens[sequence.computed : sequence.computed + item.count]
            if item.count == sequence.pending:
                rows.append(len(tokens) - 1)
                complete.append(sequence)
        started = time.monotonic()
        try:
            logits = self._model.forward(tokens, Step(segments, lambda layer: self._before_layer(work, layer)), rows=rows)
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
        self._measure(work, time.monotonic() - started, settled=bool(rows))
        for item in work:
            if isinstance(item.sequence.load, PrefixLoad):  # every layer of it was waited for, so all of it is good
                self._loads.adopt(item.sequence, item.sequence.load.outcome())
            self._advance(item)
        for sequence, choice in zip(complete, chosen, strict=True):
            if sequence.aborted:
                continue  # its last event comes before the next step
            self._deliver(sequence, choice)
            if sequence.generated == 1 and not sequence.ended:
                self._endings.save(sequence)  # the prompt; only now, so that the first token does not wait for it

    def _advance(self, item: Work) -> None:
        one = item.sequence
        one.computed = (
            deterministic.reached(computed=one.computed, count=item.count) if self._alone else one.computed + item.count
        )

    def _measure(self, work: Several[Work], seconds: float, *, settled: bool) -> None:
        """Learn how fast prompts are computed, from steps that are mostly of prompts and waited for no read."""
        rows = sum(item.count for item in work)
        if rows - len(work) < _TELLING_ROWS or any(isinstance(item.sequence.load, PrefixLoad) for item in work):
            return
        spans = [(item.sequence.computed, item.sequence.computed + item.count) for item in work]
        row_keys = sum(end * end - first * first for first, end in spans) / 2
        on_cpu = self._model.device.type == "cpu"  # elsewhere a pass is over only when something of it was asked for
        self._loads.speeds.passed(rows, row_keys, seconds, settled=settled or on_cpu)

    def _before_layer(self, work: Several[Work], layer: int) -> None:
        """Wait until the layer is there for all of the step, or give the step up: when nobody is left who wants it, or not
        the prompt that is most of its work. An aborted stream alone would cost the others more than its row."""
        wanted = [item for item in work if not item.sequence.aborted]
        if self._roster.closing or not wanted or any(item.sequence.aborted and not item.sequence.decoding for item in work):
            raise _Abandoned
        for item in work:
            load = item.sequence.load
            while isinstance(load, PrefixLoad):
                try:
                    load.wait(layer, _PATIENCE_S)
                    break
                except LoadFailed as error:
                    if not error.facts.get("timed_out"):
                        load.failed = True  # `Loads.settle` keeps the good part once the last read has ended
                        raise _Abandoned from error
                    if load.overdue or load.slow or self._roster.closing or self._roster.mail:
                        raise _Abandoned from error

    def _deliver(self, sequence: Sequence, choice: Choice | str) -> None:
        if isinstance(choice, str):
            self._counters.add("choice_faults")
            self._endings.end(sequence, "error", error=choice)
            return
        if sequence.first_token_s is None:
            sequence.first_token_s = time.monotonic()
        if choice.token in sequence.request.stop_ids:
            self._endings.end(sequence, "stop")
            return
        sequence.tokens.append(choice.token)
        self._counters.add("generated_tokens")
        if sequence.generated == sequence.max_tokens:
            self._endings.end(sequence, "length", last=choice)
        else:
            self._endings.emit(sequence, TokenEvent(choice.token, logprobs=choice.logprobs))
