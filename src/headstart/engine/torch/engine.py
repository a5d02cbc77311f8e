"""The torch engine: one thread that takes requests in, runs steps over all of them, and hands tokens out.

    submit ─▶ mail ─▶ waiting ─(its turn, a place, KV memory)─▶ running: match, load ─▶ steps ─▶ save ─▶ last event
    abort  ─▶ flag       ▲                                         │      each step: a token of every answer
                         └──── gave way to another: saved, freed ──┘                 + chunks of prompts, in turn

Nothing here waits without a bound, and nothing that goes wrong with one request ends another: a load that fails is computed
instead, an exception in a step ends the requests of that step with finish="error", and the thread goes on.

This file is the door and the thread's life. Whose turn it is: `admission` and `scheduler`; who gives way: `preempting`; KV
that grows: `room`; what a step does: `stepping`; stored prefixes: `loading`; how a request ends: `ending`; where all of them
stand: `roster`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import Any, TypeVar

from torch import Tensor

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import EngineInfo, EngineLoad, GenerationRequest, TokenEvent
from headstart.engine.speeds import Speeds
from headstart.engine.torch.admission import Admission
from headstart.engine.torch.boundaries import Boundaries
from headstart.engine.torch.deterministic import CHUNK_TOKENS
from headstart.engine.torch.ending import Endings
from headstart.engine.torch.floor import measure_floor, warm_up
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.limits import refuse_impossible
from headstart.engine.torch.loading import Loads
from headstart.engine.torch.model import Model, TorchModel
from headstart.engine.torch.preempting import Preemption
from headstart.engine.torch.prefix import PrefixBridge
from headstart.engine.torch.room import Rooms
from headstart.engine.torch.roster import Roster
from headstart.engine.torch.sampler import Sampler
from headstart.engine.torch.sequence import Sequence
from headstart.engine.torch.stepping import Stepper
from headstart.errors import RequestError
from headstart.metrics import Counters

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_IDLE_S = 1.0  # a wake-up that was missed costs this much, never a hang
_CLOSE_S = 60.0
_TOUCH_TOKENS = 256  # KV memory that one idle moment backs with pages, …
_TOUCH_AFTER_S = 1.0  # … so long after the last work: the first request often comes as soon as the server is ready


class TorchEngine:
    """See `engine.base.Engine`. Takes over `cache` and `memory` and closes them."""

    def __init__(
        self,
        model: Model,
        memory: KVMemory,
        *,
        info: EngineInfo,
        cache: PrefixCache | None = None,
        max_running: int = 8,
        chunk_tokens: int = 1024,
        load_timeout_s: float = 30.0,
        hedge_after_s: float = 0.25,
        speeds: Speeds | None = None,
        deterministic: bool = False,
        save_every: int = 2048,
        room_tokens: int = 128,
        patience_s: float = 30.0,
    ) -> None:
        """`hedge_after_s`: how late a layer of a stored prefix may be at least, before the prompt is computed meanwhile.
        `speeds`: what is known of computing and reading already. `deterministic`: for a model that was made so; see there.
        `save_every`: tokens of a long prompt after which it is saved so far; `room_tokens`: the least room for the answer that
        a request gets at a time; `patience_s`: how long a request waits before an equal one gives its place to it."""
        self.info = info
        self.failed: str | None = None  # one sentence once the engine's thread has died; it then serves nothing any more
        self.model = model
        self.cache = cache
        self._memory = memory
        self._chunk_tokens = CHUNK_TOKENS if deterministic else chunk_tokens
        self._counters = Counters()
        self._speeds = speeds or Speeds(self._counters, chunk_tokens=self._chunk_tokens)
        self._roster = roster = Roster()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # under the roster's lock, too
        self._bridge = None
        if cache is not None:
            self._bridge = PrefixBridge(
                cache,
                memory,
                speeds=self._speeds,
                timeout_s=load_timeout_s,
                hedge_after_s=hedge_after_s,
                wake=roster.wake.set,
            )
        rooms = Rooms(memory, self._counters, least_tokens=room_tokens, patience_s=load_timeout_s)
        self._loads = Loads(roster, rooms, self._bridge, self._speeds, self._counters)
        self._endings = Endings(
            roster,
            rooms,
            self._loads,
            self._bridge,
            self._counters,
            piece_tokens=memory.shape.piece_tokens,
            save_every=save_every,
        )
        self._stepper = Stepper(
            model,
            roster,
            self._loads,
            Boundaries(memory, self._counters, every=save_every),
            self._endings,
            self._counters,
            chunk_tokens=self._chunk_tokens,
            alone=deterministic,
        )
        self._preemption = Preemption(roster, rooms, self._loads, self._endings, self._counters, patience_s=patience_s)
        self._admission = Admission(
            roster,
            rooms,
            self._preemption,
            self._loads,
            self._endings,
            self._bridge,
            self._counters,
            max_running=max_running,
            patience_s=load_timeout_s,
            share=not deterministic,
        )
        self._worked_s = time.monotonic()  # when the thread last had something to do
        self._thread = Thread(target=self._serve, name="headstart-engine", daemon=True)
        self._thread.start()

    # The door; any thread.

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        """See `Engine.submit`. `max_tokens` beyond the context is cut to what fits; the answer then ends with "length"."""
        refuse_impossible(request, self.info)
        sequence = Sequence(
            request=request,
            on_event=on_event,
            submitted_s=time.monotonic(),
            max_tokens=min(request.max_tokens, self.info.context_tokens - len(request.prompt)),
            tokens=list(request.prompt),
            sampler=Sampler(
                request.sampling,
                prompt=request.prompt,
                logprobs=request.logprobs,
                min_tokens=request.min_tokens,
                stop_ids=request.stop_ids,
            ),
            use_cache=request.use_cache and self._bridge is not None,
            identity=self._identity(request.adapter),
        )
        with self._roster.lock:
            self._refuse_if_over()
            if request.id in self._roster.known:
                raise RequestError(f"a request with id {request.id!r} is still running; use another id", param="id")
            self._roster.post(sequence)
        self._roster.wake.set()

    def _identity(self, adapter: str | None) -> Identity | None:
        if adapter is None or self.cache is None:
            return None
        assert isinstance(self.model, TorchModel)
        assert self.model.adapters is not None
        return replace(self.cache.identity, adapters=(self.model.adapters.digests[adapter],))

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        with self._roster.lock:
            sequence = self._roster.known.get(request_id)
            if sequence is not None:
                sequence.aborted = True
        self._roster.wake.set()

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        with self._roster.lock:
            known = len(self._roster.known)
        running = min(known, len(self._roster.running))
        return EngineLoad(
            running=running,
            waiting=known - running,
            kv_used_bytes=self._memory.used_bytes,
            kv_capacity_bytes=self._memory.capacity_bytes,
            counters=self._counters.snapshot(),
        )

    def close(self) -> None:
        """See `Engine.close`. Returns within a bound even if the thread is stuck in the middle of a step."""
        with self._roster.lock:
            self._roster.closing = True
        self._roster.wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.error("the engine's thread did not end within %.0f s of closing; its step is left behind", _CLOSE_S)
        if self.cache is not None:
            self.cache.close()
        self._memory.close()

    def measure_floor(self, prompt: Several[int], cached_tokens: int, rounds: int) -> list[float]:
        """Return, for each round, the seconds from a prompt to its first token when the KV of the first `cached_tokens`
        already lies in the request's memory: what no cache can beat. For an engine that is otherwise idle."""
        return self._call(
            lambda: measure_floor(
                self.model,
                self._memory,
                self._bridge,
                prompt,
                cached_tokens=cached_tokens,
                rounds=rounds,
                chunk_tokens=self._chunk_tokens,
            )
        )

    def next_logits(self, tokens: Several[int]) -> Tensor:
        """Return float32 logits [vocabulary] for the token after `tokens`, computed without the cache: the reference."""
        return self._call(lambda: self.model.next_logits(tokens, chunk_tokens=self._chunk_tokens))

    def warm_up(self) -> None:
        """Run a short prefill and a decoding step, so that the first request does not pay for what is made on first use; and
        learn how fast prompts are computed, without and behind a prefix."""

        def run() -> None:
            for rows, row_keys, seconds in warm_up(self.model, self._memory, context_tokens=self.info.context_tokens):
                self._speeds.passed(rows, row_keys, seconds, first=True)

        self._call(run)

    def _call(self, function: Callable[[], _T]) -> _T:
        """Run `function` on the engine's thread, between two steps."""
        future: Future[_T] = Future()
        with self._roster.lock:
            self._refuse_if_over()
            self._calls.append((function, future))
        self._roster.wake.set()
        return future.result()

    def _refuse_if_over(self) -> None:
        if self.failed is not None:
            raise RequestError(self.failed, code="engine_failed")
        if self._roster.closing:
            raise RequestError("the engine is shutting down; send the request again later", code="shutting_down")

    # The engine's thread.

    def _serve(self) -> None:
        try:
            while not self._roster.closing:
                self._roster.wake.clear()
                try:
                    busy = self._round()
                    if busy:
                        self._worked_s = time.monotonic()
                    if not busy and (self._roster.running or not self._touch_more()):
                        self._roster.wake.wait(self._idle_s())
                except Exception:  # noqa: BLE001 - the thread's outer edge
                    self._counters.add("engine_faults")
                    _log.exception("the engine failed outside of a step; its requests are ended")
                    self._endings.end_all("error", "an internal error ended this request; the server's log has the details")
                    self._roster.wake.wait(_IDLE_S)  # what fails at every round must not take a whole core
        except BaseException:  # noqa: BLE001 - the thread's last edge: nothing ends it unseen
            self._counters.add("engine_faults")
            _log.critical("the engine's thread failed", exc_info=True)
        finally:
            self._leave()

    def _leave(self) -> None:
        """The thread ends, as it was asked to or not: nobody waits for it any longer."""
        with self._roster.lock:
            if not self._roster.closing:
                self.failed = "the engine stopped after an internal error; restart the server, its log has the details"
            calls = list(self._calls)
            self._calls.clear()
        for _, future in calls:
            future.set_exception(RequestError(self.failed or "the engine is shutting down", code="shutting_down"))
        self._endings.end_all("abort" if self.failed is None else "error", self.failed)

    def _round(self) -> bool:
        """Take in what is new and run a step; return whether there was one."""
        self._take_mail()
        self._loads.settle()
        self._preemption.make_room()
        self._admission.admit()
        work = self._stepper.plan()
        if work:
            self._stepper.step(work)
        return bool(work)

    def _touch_more(self) -> bool:
        """Use an idle moment to back KV memory for later requests, and to look ahead when that is done; a request that arrives
        waits some 10 ms at most. Returns whether there is more to back."""
        if self._roster.wake.is_set():
            return True
        if time.monotonic() - self._worked_s >= _TOUCH_AFTER_S and self._memory.touch(_TOUCH_TOKENS):
            return True
        self._loads.look_ahead()
        return False

    def _idle_s(self) -> float:
        ends = [one.load.deadline_s for one in [*self._roster.running, *self._roster.waiting] if one.load is not None]
        ends += [one.deadline_s for one in self._roster.all() if one.deadline_s is not None]
        now = time.monotonic()
        return max(0.0, min([_IDLE_S, *(end - now for end in ends)]))

    def _take_mail(self) -> None:
        with self._roster.lock:
            calls = list(self._calls)
            self._calls.clear()
        for sequence in self._roster.take_mail():
            self._endings.end(sequence, "abort")
        for function, future in calls:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)
            self._worked_s = time.monotonic()

    def __enter__(self) -> TorchEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
