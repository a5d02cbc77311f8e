"""The torch engine: one thread that takes requests in, runs steps over all of them, and hands tokens out.

    submit ─▶ mail ─▶ waiting ─(KV memory is free)─▶ running: match, load ─▶ steps ─▶ save ─▶ last event
    abort  ─▶ flag                                    each step: all decoding requests + a chunk of one prompt

Nothing here waits without a bound, and nothing that goes wrong with one request ends another: a load that fails is computed
instead, an exception in a step ends the requests of that step with finish="error", and the thread goes on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from concurrent.futures import Future
from threading import Event, Lock, Thread
from typing import Any, TypeVar

from torch import Tensor

from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import EngineInfo, EngineLoad, FinishReason, GenerationRequest, TokenEvent
from headstart.engine.torch.attention import Step
from headstart.engine.torch.floor import measure_floor
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory
from headstart.engine.torch.limits import refuse_impossible
from headstart.engine.torch.model import TorchModel
from headstart.engine.torch.prefix import Outcome, PrefixBridge
from headstart.engine.torch.sampler import Choice, Sampler, choose
from headstart.engine.torch.scheduler import Work, plan_step
from headstart.engine.torch.sequence import Sequence
from headstart.engine.torch.sharing import BranchKV, Offer, best_offer
from headstart.errors import LoadFailed, RequestError
from headstart.metrics import Counters

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_IDLE_S = 1.0  # a wake-up that was missed costs this much, never a hang
_PATIENCE_S = 0.02  # how long a step waits for a layer before it looks whether other work has come
_CLOSE_S = 60.0
_TOUCH_TOKENS = 256  # KV memory that one idle moment backs with pages


class _Abandoned(Exception):
    """The step in progress is given up; its requests stay as they were before it."""


class TorchEngine:
    """See `engine.base.Engine`. Takes over `cache` and `memory` and closes them."""

    def __init__(
        self,
        model: TorchModel,
        memory: KVMemory,
        *,
        info: EngineInfo,
        cache: PrefixCache | None = None,
        max_running: int = 8,
        chunk_tokens: int = 1024,
        load_timeout_s: float = 30.0,
    ) -> None:
        self.info = info
        self.failed: str | None = None  # one sentence once the engine's thread has died; it then serves nothing any more
        self.model = model
        self.cache = cache
        self._memory = memory
        self._max_running = max_running
        self._chunk_tokens = chunk_tokens
        self._wake = Event()
        self._bridge = None if cache is None else PrefixBridge(cache, memory, timeout_s=load_timeout_s, wake=self._wake.set)
        self._counters = Counters()
        self._lock = Lock()  # guards the next four
        self._mail: deque[Sequence] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._known: dict[str, Sequence] = {}
        self._closing = False
        # The engine's thread alone:
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in order of arrival
        self._starved_s: float | None = None  # since when nothing runs and the next one finds no memory
        self._patience_s = load_timeout_s
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
        )
        with self._lock:
            self._refuse_if_over()
            if request.id in self._known:
                raise RequestError(f"a request with id {request.id!r} is still running; use another id", param="id")
            self._known[request.id] = sequence
            self._mail.append(sequence)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        with self._lock:
            sequence = self._known.get(request_id)
            if sequence is not None:
                sequence.aborted = True
        self._wake.set()

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        with self._lock:
            known = len(self._known)
        running = min(known, len(self._running))
        return EngineLoad(
            running=running,
            waiting=known - running,
            kv_used_bytes=self._memory.used_bytes,
            kv_capacity_bytes=self._memory.capacity_bytes,
            counters=self._counters.snapshot(),
        )

    def close(self) -> None:
        """See `Engine.close`. Returns within a bound even if the thread is stuck in the middle of a step."""
        with self._lock:
            self._closing = True
        self._wake.set()
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
        """Run a short prefill and a decoding step, so that the first request does not pay for what is made on first use."""
        tokens = [1] * min(65, self.info.context_tokens)
        self._call(
            lambda: measure_floor(
                self.model, self._memory, None, tokens, cached_tokens=len(tokens) - 1, rounds=1, chunk_tokens=64
            )
        )

    def _call(self, function: Callable[[], _T]) -> _T:
        """Run `function` on the engine's thread, between two steps."""
        future: Future[_T] = Future()
        with self._lock:
            self._refuse_if_over()
            self._calls.append((function, future))
        self._wake.set()
        return future.result()

    def _refuse_if_over(self) -> None:
        if self.failed is not None:
            raise RequestError(self.failed, code="engine_failed")
        if self._closing:
            raise RequestError("the engine is shutting down; send the request again later", code="shutting_down")

    # The engine's thread.

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._wake.clear()
                try:
                    busy = self._round()
                    if not busy and (self._running or not self._touch_more()):
                        self._wake.wait(self._idle_s())
                except Exception:  # noqa: BLE001 - the thread's outer edge
                    self._counters.add("engine_faults")
                    _log.exception("the engine failed outside of a step; its requests are ended")
                    self._end_all("error", "an internal error ended this request; the server's log has the details")
                    self._wake.wait(_IDLE_S)  # what fails at every round must not take a whole core
        except BaseException:  # noqa: BLE001 - the thread's last edge: nothing ends it unseen
            self._counters.add("engine_faults")
            _log.critical("the engine's thread failed", exc_info=True)
        finally:
            self._leave()

    def _leave(self) -> None:
        """The thread ends, as it was asked to or not: nobody waits for it any longer."""
        with self._lock:
            if not self._closing:
                self.failed = "the engine stopped after an internal error; restart the server, its log has the details"
            calls = list(self._calls)
            self._calls.clear()
        for _, future in calls:
            future.set_exception(RequestError(self.failed or "the engine is shutting down", code="shutting_down"))
        self._end_all("abort" if self.failed is None else "error", self.failed)

    def _round(self) -> bool:
        """Take in what is new and run a step; return whether there was one."""
        self._take_mail()
        self._settle_loads()
        self._admit()
        work = plan_step(self._running, chunk_tokens=self._chunk_tokens)
        if work:
            self._step(work)
        return bool(work)

    def _touch_more(self) -> bool:
        """Use an idle moment to back KV memory for later requests; a request that arrives waits some 10 ms at most."""
        return self._wake.is_set() or self._memory.touch(_TOUCH_TOKENS)

    def _idle_s(self) -> float:
        now = time.monotonic()
        return max(0.0, min([_IDLE_S, *(one.load.deadline_s - now for one in self._running if one.load is not None)]))

    def _take_mail(self) -> None:
        with self._lock:
            self._waiting.extend(sequence for sequence in self._mail if not sequence.ended)
            self._mail.clear()
            calls = list(self._calls)
            self._calls.clear()
            aborted = [sequence for sequence in self._known.values() if sequence.aborted]
        for sequence in aborted:
            self._end(sequence, "abort")
        for function, future in calls:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)

    def _settle_loads(self) -> None:
        for sequence in list(self._running):
            load = sequence.load
            if load is None:
                continue
            if load.done:
                self._adopt(sequence, load.outcome())
            elif load.overdue:
                # Bytes may still land in its KV, so it gets fresh KV, at its place in the queue, and computes everything.
                load.cancel()
                self._drop_load(sequence)
                sequence.release_kv()
                sequence.computed = 0
                sequence.reload = False
                sequence.notes.append("the load took too long; computed instead")
                self._counters.add("loads_timed_out")
                self._running.remove(sequence)
                self._waiting.appendleft(sequence)

    def _adopt(self, sequence: Sequence, outcome: Outcome) -> None:
        """The load is over: what it brought counts, what it did not is computed."""
        assert sequence.load is not None
        if outcome.tokens < sequence.load.tokens:
            sequence.notes.append(f"loaded {outcome.tokens} of {sequence.load.tokens} matched tokens; the rest was computed")
            self._counters.add("loads_cut_short")
        sequence.computed = outcome.tokens
        sequence.cached_memory_tokens = outcome.memory_tokens
        sequence.cached_disk_tokens = outcome.disk_tokens
        sequence.bytes_read = outcome.bytes_read
        sequence.load_s = outcome.seconds
        self._counters.add("cached_memory_tokens", outcome.memory_tokens)
        self._counters.add("cached_disk_tokens", outcome.disk_tokens)
        self._drop_load(sequence)

    def _drop_load(self, sequence: Sequence) -> None:
        load, sequence.load = sequence.load, None
        if load is not None:
            load.release()

    def _admit(self) -> None:
        """Give KV to those who wait, first come first served, and start their loads. Who will share what another one is still
        loading or computing stays until it is there, and holds up nobody."""
        for sequence in list(self._waiting):
            if len(self._running) >= self._max_running:
                return
            offer = self._offer(sequence)
            if offer is not None and not offer.ready:
                continue
            kv = self._allocate(sequence, offer)
            if kv is not None:
                self._starved_s = None
            elif (kv := self._spare_for(sequence)) is None:
                return
            self._waiting.remove(sequence)
            self._running.append(sequence)
            sequence.kv = kv
            started = time.monotonic()
            if sequence.admitted_s is None:
                sequence.admitted_s = started
                self._counters.add("prompt_tokens", sequence.prompt_tokens)
            if isinstance(kv, BranchKV):
                sequence.computed = sequence.cached_memory_tokens = kv.prefix.tokens
                self._counters.add("cached_memory_tokens", kv.prefix.tokens)
                self._counters.add("prefixes_shared")
                continue
            if self._bridge is None or not sequence.use_cache or not sequence.reload:
                continue
            try:
                sequence.load = self._bridge.start_load(sequence.request.prompt, kv, salt=sequence.request.salt)
            except Exception:  # noqa: BLE001 - a request's outer edge: without the cache it can still be answered
                self._counters.add("match_faults")
                _log.exception("matching request %s failed; it is computed", sequence.request.id)
            sequence.match_s = time.monotonic() - started
            if sequence.load is not None:
                sequence.computed = sequence.load.tokens

    def _offer(self, sequence: Sequence) -> Offer | None:
        """Return what a running request has of this one's prompt, unless the cache has more."""
        if self._bridge is None or not sequence.use_cache:
            return None
        offer = best_offer(sequence, self._running)
        if offer is None:
            return None
        if sequence.stored is None:
            try:
                sequence.stored = self._bridge.stored_tokens(sequence.request.prompt, salt=sequence.request.salt)
            except Exception:  # noqa: BLE001 - as where it is loaded, which will fail, be counted and logged again
                sequence.stored = 0
        return offer if offer.tokens >= sequence.stored else None

    def _allocate(self, sequence: Sequence, offer: Offer | None) -> HostKV | DeviceKV | BranchKV | None:
        if offer is None:
            return self._memory.allocate(sequence.kv_tokens)
        own = self._memory.allocate_host(sequence.kv_tokens - offer.tokens)
        return None if own is None else offer.accept(own)

    def _spare_for(self, sequence: Sequence) -> HostKV | None:
        """Return memory beyond the capacity once nothing runs and still none comes free: reads or writes that never end hold
        it. One request at a time then goes on without the cache, whose reads could take this memory, too. Where there is no
        such memory either, end the request: nobody waits for ever."""
        if self._running:
            return None
        now = time.monotonic()
        if self._starved_s is None:
            self._starved_s = now
        if sequence.reload and now < self._starved_s + self._patience_s:  # without `reload`, its load was waited for already
            return None
        kv = self._memory.allocate_spare(sequence.kv_tokens)
        if kv is None:
            self._counters.add("requests_starved")
            self._end(sequence, "error", error="there was no memory for this request's KV for too long; send it again later")
            self._wake.set()  # for those behind it
            return None
        sequence.use_cache = False
        sequence.notes.append("reads or writes that do not end hold the KV memory; computed beside it, without the cache")
        self._counters.add("spare_memory_used")
        return kv

    def _step(self, work: Several[Work]) -> None:
        tokens: list[int] = []
        segments, rows, complete = [], [], []
        for item in work:
            sequence = item.sequence
            segments.append(sequence.segment(len(tokens), item.count))
            tokens += sequence.tokens[sequence.computed : sequence.computed + item.count]
            if item.count == sequence.pending:
                rows.append(len(tokens) - 1)
                complete.append(sequence)
        try:
            logits = self.model.forward(tokens, Step(segments, lambda layer: self._before_layer(work, layer)), rows=rows)
            chosen = choose(logits, [sequence.sampler for sequence in complete])
        except _Abandoned:
            self._counters.add("steps_abandoned")
            return
        except Exception as error:  # noqa: BLE001 - a step's outer edge
            self._counters.add("step_faults")
            _log.exception("a step over %d tokens failed; its %d requests are ended", len(tokens), len(work))
            for item in work:
                self._end(
                    item.sequence, "error", error=f"computing failed ({type(error).__name__}); the server's log has the details"
                )
            return
        self._counters.add("steps")
        for item in work:
            if item.sequence.load is not None:  # every layer of it was waited for, so all of it is good
                self._adopt(item.sequence, item.sequence.load.outcome())
            item.sequence.computed += item.count
        for sequence, choice in zip(complete, chosen, strict=True):
            if sequence.aborted:
                continue  # its last event comes before the next step
            self._deliver(sequence, choice)
            if sequence.generated == 1 and not sequence.ended:
                self._save(sequence)  # the prompt; only now, so that the first token does not wait for it

    def _before_layer(self, work: Several[Work], layer: int) -> None:
        """Wait until the layer is there for all of the step, or give the step up: when nobody is left who wants it, or not
        the prompt that is most of its work. An aborted stream alone would cost the others more than its row."""
        wanted = [item for item in work if not item.sequence.aborted]
        if self._closing or not wanted or any(item.sequence.aborted and not item.sequence.decoding for item in work):
            raise _Abandoned
        for item in work:
            load = item.sequence.load
            while load is not None:
                try:
                    load.wait(layer, _PATIENCE_S)
                    break
                except LoadFailed as error:
                    if not error.facts.get("timed_out"):
                        load.failed = True  # `_settle_loads` keeps the good part once the last read has ended
                        raise _Abandoned from error
                    if load.overdue or self._closing or self._mail:
                        raise _Abandoned from error

    def _deliver(self, sequence: Sequence, choice: Choice | str) -> None:
        if isinstance(choice, str):
            self._counters.add("choice_faults")
            self._end(sequence, "error", error=choice)
            return
        token = choice.token
        if sequence.first_token_s is None:
            sequence.first_token_s = time.monotonic()
        if token in sequence.request.stop_ids:
            self._end(sequence, "stop")
            return
        sequence.tokens.append(token)
        self._counters.add("generated_tokens")
        if sequence.generated == sequence.max_tokens:
            self._end(sequence, "length", last=choice)
        else:
            self._emit(sequence, TokenEvent(token, logprobs=choice.logprobs))

    def _save(self, sequence: Sequence) -> None:
        """Give what is computed to the cache, if it is more full blocks than were given before."""
        whole = sequence.computed // 64 * 64
        if self._bridge is None or not sequence.use_cache or sequence.kv is None or whole <= sequence.saved:
            return
        sequence.saved = whole
        try:
            self._bridge.save(sequence.tokens[: sequence.computed], sequence.kv, salt=sequence.request.salt)
        except Exception:  # noqa: BLE001 - a request's outer edge: an answer is worth more than its cache entry
            self._counters.add("save_faults")
            _log.exception("saving request %s failed", sequence.request.id)

    def _end(self, sequence: Sequence, finish: FinishReason, *, last: Choice | None = None, error: str | None = None) -> None:
        """Save what is good, free everything, send the last event, with a `last` token or none. Once, from any state."""
        if sequence.ended:
            return
        sequence.ended = True
        for queue in (self._running, self._waiting):
            if sequence in queue:
                queue.remove(sequence)
        try:
            if sequence.load is not None:  # not all of its KV is known to be good: nothing to save
                sequence.load.cancel()
                self._drop_load(sequence)
            elif finish != "error":
                self._save(sequence)
            sequence.release_kv()
        finally:
            with self._lock:
                self._known.pop(sequence.request.id, None)
            self._counters.add(f"finished_{finish}")
            token, logprobs = (None, None) if last is None else (last.token, last.logprobs)
            self._emit(sequence, TokenEvent(token, finish, sequence.receipt(time.monotonic()), error, logprobs))

    def _end_all(self, finish: FinishReason, error: str | None) -> None:
        with self._lock:
            known = list(self._known.values())
        for sequence in known:
            try:
                self._end(sequence, finish, error=error)
            except Exception:  # noqa: BLE001 - a request's outer edge: the others are ended all the same
                self._counters.add("engine_faults")
                _log.exception("request %s could not give back what it held", sequence.request.id)

    def _emit(self, sequence: Sequence, event: TokenEvent) -> None:
        try:
            sequence.on_event(event)
        except Exception:  # noqa: BLE001 - the edge to whoever asked
            self._counters.add("callback_faults")
            _log.exception("the receiver of request %s failed; the request is ended", sequence.request.id)
            sequence.aborted = True
            self._wake.set()

    def __enter__(self) -> TorchEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
