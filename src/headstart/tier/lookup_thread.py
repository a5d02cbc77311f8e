"""One thread that asks a tier what may take long, for callers who wait only so long: a hung medium never holds an engine up.

Work is done in the order in which it was handed over, and all of it, also when nobody waits for it any more; what such work
brought is then undone. While any of it is under way the thread is `stuck`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

_STEPS = 32  # a pause costs such a part of all patience at most

K = TypeVar("K")
T = TypeVar("T")


class Late(Exception):
    """No answer within the caller's patience."""


class Patience:
    """How long somebody waits for answers, for all of them together.

    It runs out by short waits, each of which counts as what it was meant to take: where the processors are all taken, whoever
    waits is woken late, and whoever is asked cannot run either. A busy machine is no silent medium."""

    def __init__(self, seconds: float) -> None:
        self._left_s = max(0.0, seconds)
        self._step_s = self._left_s / _STEPS

    def wait(self, future: Future[T]) -> T:
        """Return what a future brings, or raise what it raises; TimeoutError once patience has run out."""
        while not future.done() and self._left_s > 0.0:
            step_s, begun_s = min(self._step_s, self._left_s), time.monotonic()
            try:
                future.exception(step_s)
            except TimeoutError:
                self._left_s -= step_s
            else:
                self._left_s -= min(step_s, time.monotonic() - begun_s)
        return future.result(0.0)


class LookupThread:
    """A daemon thread named after its tier. Safe from many threads; `close` twice is fine."""

    def __init__(self, name: str) -> None:
        self._lock = Lock()
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._late = 0  # pieces of work that nobody waits for any more and that have not ended
        self._late_since_s = math.inf  # when the first of them was given up
        self._ended = False
        self._thread = Thread(target=self._run, name=f"{name}-lookup", daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        return self._late > 0

    @property
    def stuck_s(self) -> float:
        """For how long it has been stuck; 0 where it is not."""
        with self._lock:
            return max(0.0, time.monotonic() - self._late_since_s)

    def ask(self, work: Callable[[], T], *, patience_s: float, undo: Callable[[T], None] | None = None) -> T:
        """Return what `work` returns, or raise what it raises. Raises Late when patience runs out, at once while the thread is
        stuck; what late work returns goes to `undo`. After `close` the caller's own thread does the work."""
        return self.answer(self.hand_over(work), Patience(patience_s), undo=undo)

    def hand_over(self, work: Callable[[], T]) -> Future[T]:
        """Have work done without waiting for it; `answer` waits."""
        future: Future[T] = Future()
        with self._lock:
            ended = self._ended
            if not ended:
                self._queue.put((future, work))
        if ended:
            _do(future, work)
        return future

    def answer(self, future: Future[T], patience: Patience, *, undo: Callable[[T], None] | None = None) -> T:
        """Return what handed-over work brings, as `ask` does."""
        try:
            return (_NONE if self.stuck else patience).wait(future)
        except TimeoutError:
            if future.done():  # the error is the work's own, or it ended just now
                return future.result()
        with self._lock:
            self._late += 1
            self._late_since_s = min(self._late_since_s, time.monotonic())
        future.add_done_callback(partial(self._came_late, undo))
        raise Late

    def close(self, timeout_s: float) -> bool:
        """Do what was handed over and end; False if that takes longer and the thread is left behind."""
        self._queue.put(None)
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        closing = False
        while True:
            with self._lock:
                if closing and self._queue.empty():
                    self._ended = True
                    return
            handed = self._queue.get()  # idle: bounded by close(), which the owner calls
            if handed is None:
                closing = True
            else:
                _do(*handed)
            del handed  # an idle thread keeps nothing alive

    def _came_late(self, undo: Callable[[T], None] | None, future: Future[T]) -> None:
        if undo is not None and future.exception() is None:
            undo(future.result())
        with self._lock:
            self._late -= 1
            if not self._late:
                self._late_since_s = math.inf


_NONE = Patience(0.0)


def ask_apart(work: Mapping[K, Callable[[], T]], *, patience_s: float) -> dict[K, T | Exception]:
    """Have work done side by side, each piece on a thread of its own, once: return what it brought, or what it raised; Late for
    what took longer, whose thread is left behind. For whoever has no threads of their own yet."""
    threads = {key: LookupThread("once") for key in work}
    futures = {key: threads[key].hand_over(one) for key, one in work.items()}
    patience = Patience(patience_s)
    answers: dict[K, T | Exception] = {}
    for key, future in futures.items():
        try:
            answers[key] = threads[key].answer(future, patience)
        except Exception as error:  # noqa: BLE001 - whoever asked says which of them it can answer
            answers[key] = error
        threads[key].close(0.0)
    return answers


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - the thread's outer edge: whoever asked gets it raised
        future.set_exception(error)
    else:
        future.set_result(result)
