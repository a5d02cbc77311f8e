"""What the saver wants copied out of libllama, done by the engine's thread between two steps.

A context may be asked by one thread alone, and copying a long prompt takes as long as some steps. So the saver, which writes
behind anyway, asks for a few pieces at a time and waits; the engine serves it for some milliseconds of each round, and wholly
when nothing else is to do. Only what some tier lacks is ever asked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

from headstart.block.keys import BLOCK_TOKENS
from headstart.engine.llama.cells import SequenceKV
from headstart.engine.llama.context import Context
from headstart.errors import HeadstartError

_AT_ONCE_BYTES = 4 << 20
_PATIENCE_S = 600.0  # of the saver; a step of a large model on a small machine takes long, but not this long


class Copies:
    """`piece_bytes`: of every piece; one that comes out otherwise is an error. `wake`: of the engine's thread."""

    def __init__(self, context: Context, *, piece_bytes: int, wake: Callable[[], None]) -> None:
        self._context = context
        self._piece_bytes = piece_bytes
        self._wake = wake
        self._lock = Lock()
        self._asked: deque[tuple[SequenceKV, range, Future[list[memoryview]]]] = deque()
        self._closed = False

    def copy_out(self, kv: SequenceKV, first: int, pieces: int) -> list[memoryview]:
        """Return those pieces of a request's KV, once the engine's thread has copied them. Not from that thread."""
        found: list[memoryview] = []
        step = max(1, _AT_ONCE_BYTES // self._piece_bytes)
        for at in range(first, first + pieces, step):
            future: Future[list[memoryview]] = Future()
            with self._lock:
                if self._closed:
                    raise HeadstartError("the engine has closed; what was not saved is lost")
                self._asked.append((kv, range(at, min(at + step, first + pieces)), future))
            self._wake()
            found += future.result(_PATIENCE_S)
        return found

    def serve(self, *, budget_s: float) -> bool:
        """On the engine's thread: copy what is asked for, for about so long; return whether there was anything."""
        until = time.monotonic() + budget_s
        served = False
        while not served or time.monotonic() < until:
            with self._lock:
                if not self._asked:
                    break
                kv, pieces, future = self._asked.popleft()
            served = True
            try:
                future.set_result([self._copy(kv, piece) for piece in pieces])
            except Exception as error:  # noqa: BLE001 - it is the saver's, which counts it
                future.set_exception(error)
        return served

    def close(self) -> None:
        """Refuse whoever still asks. Twice is fine."""
        with self._lock:
            self._closed = True
            asked = list(self._asked)
            self._asked.clear()
        for _, _, future in asked:
            future.set_exception(HeadstartError("the engine has closed; what was not saved is lost"))

    def _copy(self, kv: SequenceKV, piece: int) -> memoryview:
        data = self._context.copy_out(kv.number, piece * BLOCK_TOKENS, (piece + 1) * BLOCK_TOKENS)
        if len(data) != self._piece_bytes:
            raise HeadstartError(f"a piece has {len(data)} bytes where all have {self._piece_bytes}")
        return data
