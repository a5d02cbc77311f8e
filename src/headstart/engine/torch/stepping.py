"""One step: a forward pass over all that the plan names, and a token to each whose prompt is through."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial

from headstart.engine.base import KVSink
from headstart.engine.serving.boundaries import Boundaries
from headstart.engine.serving.ending import Endings
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.scheduler import Work
from headstart.engine.serving.stepping import Steps
from headstart.engine.torch import deterministic
from headstart.engine.torch.attention import Step
from headstart.engine.torch.kv_memory import DeviceKV, KVMemory
from headstart.engine.torch.loading import Loads
from headstart.engine.torch.meeting import Meeting
from headstart.engine.torch.model import Model
from headstart.engine.torch.prefix_load import PrefixLoad
from headstart.engine.torch.sampler import choose
from headstart.engine.torch.sequence import Sequence
from headstart.errors import LoadFailed
from headstart.metrics import Counters

_log = logging.getLogger(__name__)

_PATIENCE_S = 0.02  # how long a step waits for a layer before it looks whether other work has come


class _Abandoned(Exception):
    """The step in progress is given up; its requests stay as they were before it."""


class Stepper(Steps[Sequence]):
    """`alone`: each request in a pass of its own, in the chunks of `deterministic`."""

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
        memory: KVMemory,
    ) -> None:
        super().__init__(roster, loads, boundaries, endings, counters)
        self._memory = memory
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._loads = loads
        self._alone = alone

    @property
    def chunk_tokens(self) -> int:
        return self._chunk_tokens

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
            self._failed(work, error)
            return
        seconds = time.monotonic() - started
        if not any(isinstance(item.sequence.load, PrefixLoad) for item in work):  # else it waited
            on_cpu = self._model.device.type == "cpu"  # elsewhere a pass is over only when something of it was asked for
            self._measure(work, seconds, settled=bool(rows) or on_cpu)
        self._passed(work, complete, chosen)

    def _reached(self, item: Work[Sequence]) -> int:
        sequence = item.sequence
        return deterministic.reached(computed=sequence.computed, count=item.count) if self._alone else super()._reached(item)

    def _advance(self, item: Work[Sequence]) -> int:
        load = item.sequence.load
        if isinstance(load, PrefixLoad):  # every layer of it was waited for, so all of it is good
            self._loads.adopt(item.sequence, load.outcome())
        before = super()._advance(item)
        self._hand_over(item.sequence, layers=len(self._memory.shape.layers), tokens=item.sequence.computed)
        return before

    def _before_layer(self, work: Several[Work[Sequence]], layer: int) -> None:
        """Wait until the layer is there for all of the step, or give the step up: when nobody is left who wants it, or not
        the prompt that is most of its work. An aborted stream alone would cost the others more than its row."""
        over = [item for item in work if item.sequence.over]
        if self._roster.closing or len(over) == len(work) or any(not item.sequence.decoding for item in over):
            raise _Abandoned
        for item in work:
            if isinstance(item.sequence.load, PrefixLoad):
                self._wait(item.sequence, partial(item.sequence.load.wait, layer))
            if item.sequence.request.sink is not None:
                self._hand_over(item.sequence, layers=self._memory.shape.place(layer), tokens=self._reached(item))

    def _hand_over(self, sequence: Sequence, *, layers: int, tokens: int) -> None:
        """Tell who asked for it that so many layers of so many tokens are there; a receiver that fails ends its own request."""
        sink, kv = sequence.request.sink, sequence.kv
        if sink is None or kv is None:
            return
        try:
            if isinstance(kv, DeviceKV):
                self._hand_down(sink, kv, layers=layers, tokens=tokens)
            else:
                sink.computed(kv, layers=layers, tokens=tokens)
        except Exception:  # noqa: BLE001 - the edge to whoever asked
            self._counters.add("callback_faults")
            _log.exception("the receiver of the KV of request %s failed; the request is ended", sequence.request.id)
            sequence.aborted = True
            self._roster.wake.set()

    def _hand_down(self, sink: KVSink, kv: DeviceKV, *, layers: int, tokens: int) -> None:
        """Copy from the device to the host what a pass has computed, once it is over, and tell of that. Where there is no
        memory for it now, it goes with the next pass, or not at all."""
        if layers < len(self._memory.shape.layers):
            return
        first = sink.begins_at()
        host = self._memory.allocate_host(tokens - first) if tokens > first else None
        if host is not None:
            host.begin_with(kv, first=first, tokens=tokens - first)
            sink.computed(host, layers=layers, tokens=tokens, first_tokens=first)
            host.release()

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
