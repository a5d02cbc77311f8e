"""One thread that asks a tier what may take long, for callers who wait only so long: a hung medium never holds an engine up.

Work is done in the order in which it was handed over, and all of it, also when nobody waits for it any more; what such work
brought is then undone. While any of it is under way the thread is `stuck`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Late(Exception):
    """No answer within the caller's patience."""


class LookupThread:
    """A daemon thread named after its tier. Safe from many threads; `close` twice is fine."""

    def __init__(self, name: str) -> None:
        self._lock = Lock()
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._late = 0  # pieces of work that nobody waits for any more and that have not ended
        self._ended = False
        self._thread = Thread(target=self._run, name=f"{name}-lookup", daemon=True)
        self._thread.start()

    @property
    def stuck(self) -> bool:
        return self._late > 0

    def ask(self, work: Callable[[], T], *, patience_s: float, undo: Callable[[T], None] | None = None) -> T:
        """Return what `work` returns, or raise what it raises. Raises Late after `patience_s`, at once while the thread is
        stuck; what late work returns goes to `undo`. After `close` the caller's own thread does the work."""
        return self.answer(self.hand_over(work), patience_s=patience_s, undo=undo)

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

    def answer(self, future: Future[T], *, patience_s: float, undo: Callable[[T], None] | None = None) -> T:
        """Return what handed-over work brings, as `ask` does."""
        try:
            return future.result(0.0 if self.stuck else max(0.0, patience_s))
        except TimeoutError:
            if future.done():  # the error is the work's own, or it ended just now
                return future.result()
        with self._lock:
            self._late += 1
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


def ask_apart(work: Mapping[K, Callable[[], T]], *, patience_s: float) -> dict[K, T | Exception]:
    """Have work done side by side, each piece on a thread of its own, once: return what it brought, or what it raised; Late for
    what took longer, whose thread is left behind. For whoever has no threads of their own yet."""
    threads = {key: LookupThread("once") for key in work}
    futures = {key: threads[key].hand_over(one) for key, one in work.items()}
    deadline = time.monotonic() + patience_s
    answers: dict[K, T | Exception] = {}
    for key, future in futures.items():
        try:
            answers[key] = threads[key].answer(future, patience_s=deadline - time.monotonic())
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
