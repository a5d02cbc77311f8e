"""The llama engine: GGUF models at libllama's speed, many requests in one unified KV memory, over headstart's store.

What it does with requests is `engine.serving`'s. This file puts the parts together: what libllama holds: `context` and `cells`;
stored prefixes: `bridge`, `reading` and `loading`; what a step does: `stepping`; what the saver gets: `copying`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial
from threading import Event
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headstart.block.keys import BLOCK_TOKENS
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import EngineInfo, GenerationRequest, TokenEvent
from headstart.engine.llama.bridge import CacheBridge
from headstart.engine.llama.cells import Cells, SequenceKV
from headstart.engine.llama.context import Context, Row
from headstart.engine.llama.copying import Copies
from headstart.engine.llama.loading import LlamaLoads
from headstart.engine.llama.room import Rooms
from headstart.engine.llama.sampler import Sampler
from headstart.engine.llama.sequence import CopiedStates, LlamaSequence
from headstart.engine.llama.stepping import Stepper
from headstart.engine.llama.weights import Weights
from headstart.engine.serving.admission import Admission
from headstart.engine.serving.boundaries import Boundaries
from headstart.engine.serving.door import ServingEngine
from headstart.engine.serving.ending import Endings
from headstart.engine.serving.preempting import Preemption
from headstart.engine.serving.roster import Roster
from headstart.engine.speeds import Speeds
from headstart.errors import RequestError
from headstart.metrics import Counters
from headstart.tier.arena import Arena

_COPY_S = 0.01  # of each round for what is saved, while others wait
_IDLE_COPY_S = 0.05
_CLOSE_S = 60.0
_T = TypeVar("_T")


class LlamaEngine(ServingEngine[LlamaSequence]):
    """See `engine.base.Engine`. Takes over `weights`, `context`, `cache` and `passage` and closes them."""

    def __init__(
        self,
        weights: Weights,
        context: Context,
        *,
        info: EngineInfo,
        cells: int,
        sequences: int,
        piece_bytes: int,
        cache: PrefixCache | None = None,
        passage: Arena | None = None,
        max_running: int = 8,
        chunk_tokens: int = 512,
        load_timeout_s: float = 30.0,
        hedge_after_s: float = 0.25,
        speeds: Speeds | None = None,
        save_every: int = 2048,
        room_tokens: int = 128,
        patience_s: float = 30.0,
    ) -> None:
        """`cells`: tokens that all requests hold together; `sequences`: how many may be held at once, those that are only
        being saved among them. The others are as of the torch engine."""
        super().__init__(info, Counters(), Roster())
        self.cache = cache
        self.weights = weights
        self._context = context
        self._passage = passage
        self._left = Event()  # no request runs any more; what is saved is still served
        self._saved = Event()
        counters, roster, wake = self._counters, self._roster, self._roster.wake.set
        self._speeds = speeds or Speeds(counters, chunk_tokens=chunk_tokens)
        self._copies = Copies(context, piece_bytes=piece_bytes, wake=wake)
        self._cells = Cells(context, capacity_tokens=cells, sequences=sequences, copy_out=self._copies.copy_out, wake=wake)
        self._bridge = None
        if cache is not None and passage is not None:
            self._bridge = CacheBridge(
                cache, passage, speeds=self._speeds, timeout_s=load_timeout_s, hedge_after_s=hedge_after_s, wake=wake
            )
        rooms = Rooms(self._cells, counters, least_tokens=room_tokens, patience_s=load_timeout_s)
        self._loads = LlamaLoads(roster, self._cells, self._bridge, self._speeds, counters)
        self._endings = Endings(
            roster, rooms, self._loads, self._bridge, counters, piece_tokens=BLOCK_TOKENS, save_every=save_every
        )
        boundaries: Boundaries[LlamaSequence] = Boundaries(CopiedStates(context), counters, every=save_every)
        self._stepper = Stepper(
            context,
            roster,
            self._loads,
            boundaries,
            self._endings,
            counters,
            chunk_tokens=chunk_tokens,
            waits=info.device == "cpu",
        )
        self._preemption = Preemption(roster, rooms, self._loads, self._endings, counters, patience_s=patience_s)
        self._admission = Admission(
            roster,
            rooms,
            self._preemption,
            self._loads,
            self._endings,
            self._bridge,
            counters,
            max_running=max_running,
            patience_s=load_timeout_s,
            gives=self._shareable,
        )
        self._start()

    # The door; any thread.

    def close(self) -> None:
        """See `Engine.close`. Returns within a bound even if the thread is stuck in the middle of a step."""
        with self._roster.lock:
            self._roster.closing = True
        self._roster.wake.set()
        self._left.wait(_CLOSE_S)
        if self.cache is not None:
            self.cache.close()
        self._copies.close()
        self._saved.set()
        self._stop()
        if not self._thread.is_alive():  # else it is in the middle of a pass, and what it computes with stays
            self._context.close()
            self.weights.close()
        if self._passage is not None:
            self._passage.close()

    def measure_floor(self, prompt: Several[int], cached_tokens: int, rounds: int) -> list[float]:
        """Return, for each round, the seconds from a prompt to its first token when the KV of the first `cached_tokens`
        already lies in memory: what no cache can beat. For an engine that is otherwise idle."""
        return self._call(lambda: self._measure_floor(prompt, cached_tokens, rounds))

    def next_logits(self, tokens: Several[int]) -> npt.NDArray[np.float32]:
        """Return float32 logits [vocabulary] for the token after `tokens`, computed without the cache: the reference."""
        return self._call(lambda: self._with_sequence(len(tokens), lambda kv: self._compute(kv, tokens, 0)))

    def warm_up(self) -> None:
        """Run some passes, so that the first request does not pay for what is made on first use; and learn how fast prompts
        are computed."""
        rows = max(1, min(BLOCK_TOKENS, self.info.context_tokens // 2))

        def run(kv: SequenceKV) -> None:
            for first in range(2):
                started = time.perf_counter()
                self._compute(kv, [1] * (rows * (first + 1)), rows * first)
                seconds = time.perf_counter() - started
                if first:
                    self._speeds.passed(rows, rows * rows * (first + 0.5), seconds, first=True)

        self._call(lambda: self._with_sequence(2 * rows, run))

    def _sequence(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None], max_tokens: int) -> LlamaSequence:
        return LlamaSequence(
            request=request,
            on_event=on_event,
            submitted_s=time.monotonic(),
            max_tokens=max_tokens,
            tokens=list(request.prompt),
            sampler=Sampler(
                self.weights.library,
                request.sampling,
                prompt=request.prompt,
                context_tokens=self.info.context_tokens,
                vocabulary=self.info.vocabulary,
                logprobs=request.logprobs,
                min_tokens=request.min_tokens,
                stop_ids=request.stop_ids,
                constraint=request.constraint,
            ),
            use_cache=request.use_cache and self._bridge is not None,
            has_state=self._context.recurrent,
        )

    def _shareable(self, sequence: LlamaSequence) -> int:
        """Return how many tokens of a request's beginning others may hold with it. What lies before a sliding window libllama
        writes over once its own sequence needs it no more, and a recurrent state is its own."""
        tokens = len(sequence.tokens)
        apart = sequence.kv is None or sequence.recurrent or tokens > (self.weights.window or tokens)
        return 0 if apart else tokens

    @property
    def speeds(self) -> Speeds:
        """See `PacedEngine`."""
        return self._speeds

    def _kv_bytes(self) -> tuple[int, int]:
        each = self.info.kv_bytes_per_token
        return self._cells.used_tokens * each, self._cells.capacity_tokens * each

    # The engine's thread.

    def _round(self) -> bool:
        self._take_mail()
        self._cells.take_back()
        moved = self._loads.settle()
        self._preemption.make_room()
        self._admission.admit()
        work = self._stepper.plan()
        if work:
            self._stepper.step(work)
        served = self._copies.serve(budget_s=_COPY_S if work else _IDLE_COPY_S)
        return bool(work) or moved or served

    def _use_idle_moment(self) -> bool:
        if self._roster.wake.is_set():
            return True
        self._loads.look_ahead()
        return False

    def _leave(self) -> None:
        """Every request ends; then the saver is served until it has all that it asks for."""
        super()._leave()
        self._left.set()
        while not self._saved.is_set():
            self._roster.wake.clear()
            self._cells.take_back()
            if not self._copies.serve(budget_s=_IDLE_COPY_S):
                self._roster.wake.wait(_IDLE_COPY_S)

    def _with_sequence(self, tokens: int, function: Callable[[SequenceKV], _T]) -> _T:
        kv = self._cells.allocate(tokens)
        if kv is None:
            raise RequestError("this cannot be measured while running requests hold the KV memory; try again when idle")
        try:
            return function(kv)
        finally:
            kv.release()
            self._cells.take_back()

    def _compute(self, kv: SequenceKV, tokens: Several[int], first: int) -> npt.NDArray[np.float32]:
        """Compute tokens[first:] in chunks; return a copy of the logits behind the last."""
        output = 0
        while first < len(tokens):
            chunk = tokens[first : first + self._stepper.chunk_tokens]
            (output,) = self._context.compute([Row(kv.number, chunk, first, wanted=True)])
            first += len(chunk)
        return self._context.logits(output).copy()

    def _measure_floor(self, prompt: Several[int], cached_tokens: int, rounds: int) -> list[float]:
        if not 0 <= cached_tokens < len(prompt):
            raise ValueError(f"cached_tokens must lie in 0 … {len(prompt) - 1}, got {cached_tokens}")

        def run(kv: SequenceKV) -> list[float]:
            if cached_tokens:
                self._compute(kv, prompt[:cached_tokens], 0)
            return [self._with_sequence(len(prompt), partial(self._timed, prompt, kv, cached_tokens)) for _ in range(rounds)]

        return self._with_sequence(cached_tokens, run)

    def _timed(self, prompt: Several[int], begin: SequenceKV, cached_tokens: int, kv: SequenceKV) -> float:
        self._context.share(begin.number, kv.number, cached_tokens)
        started = time.perf_counter()
        self._compute(kv, prompt, cached_tokens)
        return time.perf_counter() - started
