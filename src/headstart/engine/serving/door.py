"""An engine's door and its one thread: requests in, rounds over all of them, tokens out.

    submit ─▶ mail ─▶ waiting ─(its turn, a place, KV memory)─▶ running: match, load ─▶ steps ─▶ save ─▶ last event
    abort  ─▶ flag       ▲                                         │      each step: a token of every answer
                         └──── gave way to another: saved, freed ──┘                 + chunks of prompts, in turn

Nothing here waits without a bound, and nothing that goes wrong with one request ends another: an exception in a round ends the
requests, and the thread goes on. An engine says what a round is, and what a moment without work is good for.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, Generic, Self, TypeVar

from headstart.engine.base import EngineInfo, EngineLoad, GenerationRequest, TokenEvent
from headstart.engine.serving.ending import Endings
from headstart.engine.serving.limits import refuse_impossible
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.sequence import S
from headstart.engine.speeds import Speeds
from headstart.errors import RequestError
from headstart.metrics import Counters

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_IDLE_S = 1.0  # a wake-up that was missed costs this much, never a hang
_CLOSE_S = 60.0


class ServingEngine(ABC, Generic[S]):
    """See `engine.base.Engine`. A subclass sets up what it has, then calls `_start`."""

    _endings: Endings[S]

    def __init__(self, info: EngineInfo, counters: Counters, roster: Roster[S]) -> None:
        self.info = info
        self.failed: str | None = None  # one sentence once the engine's thread has died; it then serves nothing any more
        self._counters = counters
        self._roster = roster
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # under the roster's lock, too
        self._thread = Thread(target=self._serve, name="headstart-engine", daemon=True)

    # What an engine is asked.

    @abstractmethod
    def _sequence(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None], max_tokens: int) -> S:
        """Return a request as it begins."""

    @abstractmethod
    def _round(self) -> bool:
        """Take in what is new and run a step; return whether there was one."""

    @abstractmethod
    def _use_idle_moment(self) -> bool:
        """Nothing is known to run: do a little for later requests; return whether there is more to do at once."""

    @abstractmethod
    def _kv_bytes(self) -> tuple[int, int]:
        """Return the KV memory used and what there is of it."""

    # The door; any thread.

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        """See `Engine.submit`. `max_tokens` beyond the context is cut to what fits; the answer then ends with "length"."""
        refuse_impossible(request, self.info)
        max_tokens = min(request.max_tokens, self.info.context_tokens - len(request.prompt))
        sequence = self._sequence(request, on_event, max_tokens)
        try:
            with self._roster.lock:
                self._refuse_if_over()
                if request.id in self._roster.known:
                    raise RequestError(f"a request with id {request.id!r} is still running; use another id", param="id")
                self._roster.post(sequence)
        except RequestError:
            sequence.close()
            raise
        self._roster.wake.set()

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        with self._roster.lock:
            sequence = self._roster.known.get(request_id)
            if sequence is not None:
                sequence.aborted = True
        self._roster.wake.set()

    def wake(self) -> None:
        """Have the engine look again what can run: memory has come free."""
        self._roster.wake.set()

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        with self._roster.lock:
            known = len(self._roster.known)
        running = min(known, len(self._roster.running))
        used, capacity = self._kv_bytes()
        return EngineLoad(
            running=running,
            waiting=known - running,
            kv_used_bytes=used,
            kv_capacity_bytes=capacity,
            counters=self._counters.snapshot(),
        )

    @property
    @abstractmethod
    def speeds(self) -> Speeds:
        """See `PacedEngine`."""

    def waiting_tokens(self) -> int:
        """See `PacedEngine`. Reads what the engine's thread writes, so it may be a pass behind."""
        return sum(max(0, one.prompt_tokens - one.computed) for one in self._roster.all() if one.first_token_s is None)

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

    def _start(self) -> None:
        self._thread.start()

    def _stop(self) -> None:
        """End the thread. Returns within a bound even if it is stuck in the middle of a step."""
        with self._roster.lock:
            self._roster.closing = True
        self._roster.wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.error("the engine's thread did not end within %.0f s of closing; its step is left behind", _CLOSE_S)

    # The engine's thread.

    def _serve(self) -> None:
        try:
            while not self._roster.closing:
                self._roster.wake.clear()
                try:
                    busy = self._round()
                    if not busy and (self._roster.running or not self._use_idle_moment()):
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

    @abstractmethod
    def close(self) -> None:
        """See `Engine.close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
