"""Objects that were fetched whole because that is no slower than a part of them, for the reads that follow at once.

A load asks for one layer after the other. The first read of a small object fetches all of it, the others take what they need
from memory. What was taken once goes, and so does what nobody asked for within seconds; where that leaves no room, objects are
read in parts again, so nothing is ever fetched twice for want of room.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

_KEPT_S = 5.0
_HEADER_BYTES = 4096  # of a segment, which nobody asks for
_WAIT_S = 120.0  # for another thread that fetches; its own deadline is shorter


class Whole:
    """Safe from many threads. `most_bytes`: held at once."""

    def __init__(self, most_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = most_bytes
        self._clock = clock
        self._lock = Lock()
        self._held: dict[str, _Fetched] = {}
        self._held_bytes = 0

    def get(self, key: str, nbytes: int, fetch: Callable[[], memoryview], *, wanted: int) -> memoryview | None:
        """Return an object of `nbytes`, fetched by whoever asks first, for so many of its bytes that are `wanted`; None where
        there is no room for it. Raises what `fetch` raises, to all who wait for it."""
        self.let_go()
        with self._lock:
            held, mine = self._held.get(key), False
            if held is None:
                if self._held_bytes + nbytes > self._most_bytes:
                    return None
                held, mine = _Fetched(nbytes), True
                self._held[key] = held
                self._held_bytes += nbytes
            held.used_at = self._clock()
            held.left -= wanted
            if held.left <= 0:
                self._drop(key)
        if mine:
            try:
                held.future.set_result(fetch())
            except BaseException as error:
                self.forget(key)
                held.future.set_exception(error)
                raise
        return held.future.result(_WAIT_S)

    def forget(self, key: str) -> None:
        """Fetch an object anew when it is asked for next."""
        with self._lock:
            self._drop(key)

    def let_go(self) -> None:
        """Forget what nobody asked for within seconds."""
        with self._lock:
            since = self._clock() - _KEPT_S
            for key in [key for key, held in self._held.items() if held.used_at < since and held.future.done()]:
                self._drop(key)

    def _drop(self, key: str) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._held_bytes -= held.nbytes


class _Fetched:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.left = nbytes - _HEADER_BYTES  # until everything was taken
        self.used_at = 0.0
        self.future: Future[memoryview] = Future()
