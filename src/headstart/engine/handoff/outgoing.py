"""KV on its way out: the engine's thread says what is computed, and the thread of a connection takes it from here and sends it.

Nothing is copied here and nothing waits: what is to be sent is remembered, with a reference to the KV that it lies in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition

import numpy as np
import numpy.typing as npt

from headstart.block.representation import Representation
from headstart.engine.base import CountedKV, TokenEvent
from headstart.transfer.wire.messages import MOST_RUN_BYTES


@dataclass(slots=True)
class Part:
    """Pieces `first` … `first+count-1` of `layer`, to be sent; `kv` begins with piece `offset` of the prompt."""

    layer: int
    first: int
    count: int
    kv: CountedKV
    offset: int

    def bytes_of(self, representation: Representation) -> npt.NDArray[np.uint8]:
        """Return the pieces side by side, copied where they do not lie so."""
        piece_bytes = representation.layer_bytes[self.layer]
        assert piece_bytes is not None
        buffers = self.kv.buffers(self.layer, self.first - self.offset, [piece_bytes] * self.count)
        if isinstance(buffers, np.ndarray):
            return np.ascontiguousarray(buffers).reshape(-1)
        return np.concatenate([np.frombuffer(one, np.uint8) for one in buffers])


class Outgoing:
    """A `KVSink` for a prompt of which `pieces` pieces are of use to the other worker, and the first `have` are there already.
    `wake`: called when KV was let go of."""

    def __init__(self, representation: Representation, *, have: int, pieces: int, wake: Callable[[], None]) -> None:
        self._representation = representation
        self._pieces = pieces
        self._wake = wake
        self._whole = min(have, pieces)  # pieces of which every layer is queued, or need not be
        self._end = self._whole  # of the runs that are open
        self._layers = 0  # of those that are queued
        self._condition = Condition()
        self._parts: deque[Part] = deque()
        self._events: deque[TokenEvent] = deque()
        self._held = 0
        self._closed = False
        self._run_pieces = max(1, MOST_RUN_BYTES // max(1, sum(filter(None, representation.layer_bytes))))

    # The engine's thread.

    @property
    def done(self) -> bool:
        return not self._held

    def begins_at(self) -> int:
        return self._whole * self._representation.piece_tokens

    def computed(self, kv: CountedKV, *, layers: int, tokens: int, first_tokens: int = 0) -> None:
        """See `KVSink`."""
        step = self._representation.piece_tokens
        end = max(self._whole, min(self._pieces, tokens // step))  # who gave way begins anew, and what was sent stays sent
        if end != self._end:
            self._end, self._layers = end, 0  # another pass than the one that was under way
        if end > self._whole and layers > self._layers:
            with self._condition:
                for layer in range(self._layers, layers):
                    for first in range(self._whole, end, self._run_pieces):
                        self._queue(Part(layer, first, min(self._run_pieces, end - first), kv, first_tokens // step))
                self._condition.notify()
            self._layers = layers
        if self._layers == self._representation.layers:
            self._whole, self._layers = self._end, 0

    def _queue(self, part: Part) -> None:
        if not self._closed:
            part.kv.retain()
            self._held += 1
            self._parts.append(part)

    def told(self, event: TokenEvent) -> None:
        """What the engine tells of the request."""
        with self._condition:
            self._events.append(event)
            self._condition.notify()

    # Whoever sends.

    def next(self, timeout_s: float) -> Part | TokenEvent | None:
        """Return what is to be sent next, what the engine told before everything else; None when nothing has come in time. A
        part is given back with `sent`."""
        with self._condition:
            self._condition.wait_for(lambda: self._events or self._parts, timeout_s)
            if self._events:
                return self._events.popleft()
            return self._parts.popleft() if self._parts else None

    @property
    def empty(self) -> bool:
        with self._condition:
            return not self._parts and not self._events

    def sent(self, part: Part) -> None:
        part.kv.release()
        with self._condition:
            self._held -= 1
        self._wake()

    def close(self) -> None:
        """Let go of all that was not sent, and take nothing more."""
        with self._condition:
            self._closed = True
            parts = list(self._parts)
            self._parts.clear()
        for part in parts:
            self.sent(part)
