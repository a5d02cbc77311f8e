"""Prefixes on slower tiers are brought to memory before they are asked for, behind every read that somebody waits for.

    disk ─▶ a part's memory, verified ─▶ a save, of which memory alone lacks anything ─▶ the next part

One prefix at a time, a part after the other, head first: what is there when the request comes is of use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt

from headstart.block.representation import Representation
from headstart.cache.lease import Lease
from headstart.cache.ticket import Ticket
from headstart.metrics import Counters
from headstart.tier.arena import Arena
from headstart.transfer.load import KVView, Load

_PART_BYTES = 32 << 20


class Promoter:
    """`memory`: the name of the tier that is brought to, which comes first. Safe from many threads; `close` twice is fine."""

    def __init__(self, memory: str, representation: Representation, counters: Counters) -> None:
        self._memory = memory
        self._representation = representation
        self._counters = counters
        self._lock = Lock()
        self._busy = False
        self._closed = False
        self._arena: Arena | None = None

    @property
    def busy(self) -> bool:
        return self._busy

    def start(self, lease: Lease, save: Callable[[int, KVView], Ticket], *, most_bytes: int) -> bool:
        """Bring what matched as far as memory lacks it, up to `most_bytes`; takes over the lease. `save(n, source)` saves the
        first n tokens of it. False: not now, or there is nothing to bring. Returns at once."""
        there = lease.stretches[0].tokens if lease.stretches and lease.stretches[0].tier == self._memory else 0
        token_bytes = self._representation.bytes_per_token
        step = self._representation.piece_tokens
        if not token_bytes:
            lease.release()
            return False  # sizes vary: nobody knows what a part takes
        end = min(lease.tokens, there + most_bytes // token_bytes // step * step)
        part_tokens = max(1, _PART_BYTES // token_bytes // step) * step
        with self._lock:
            wanted = there < end and not self._busy and not self._closed
            if wanted:
                self._busy = True
                if self._arena is None or self._arena.capacity_bytes < part_tokens * token_bytes:
                    self._arena = Arena(part_tokens * token_bytes, name="promotion")
        if not wanted:
            lease.release()
            return False
        assert self._arena is not None
        _Run(self, lease, save, self._arena, self._representation, there, end, part_tokens).go_on()
        return True

    def close(self) -> None:
        """Start nothing more. What is under way ends with its part."""
        with self._lock:
            self._closed = True

    def _ended(self, lease: Lease, tokens: int) -> None:
        lease.release()
        self._counters.add("promoted_tokens", tokens)
        with self._lock:
            self._busy = False


class _Run:
    """One prefix on its way. A part is read, then saved, then the next: never two at once."""

    def __init__(
        self,
        promoter: Promoter,
        lease: Lease,
        save: Callable[[int, KVView], Ticket],
        arena: Arena,
        representation: Representation,
        first: int,
        end: int,
        part_tokens: int,
    ) -> None:
        self._promoter = promoter
        self._lease = lease
        self._save = save
        self._arena = arena
        self._representation = representation
        self._begun = self._first = first
        self._end = end
        self._part_tokens = part_tokens

    def go_on(self) -> None:
        """Read the next part, or end."""
        if self._first >= self._end or self._promoter._closed:
            self._promoter._ended(self._lease, self._first - self._begun)
            return
        end = min(self._end, self._first + self._part_tokens)
        region = self._arena.allocate(self._arena.capacity_bytes)
        assert region is not None  # one part at a time has all of it
        part = _Part(region.view, self._representation, self._first, end)

        def saved(ticket: Ticket) -> None:
            region.release()
            if ticket.wait(0.0).reason is not None:  # not now: what is queued is worth more
                self._end = self._first
            else:
                self._first = end
            self.go_on()

        def read(load: Load) -> None:
            if load.usable_tokens < end - self._first:
                region.release()
                self._promoter._ended(self._lease, self._first - self._begun)
                return
            self._save(end, part).add_done_callback(saved)

        try:
            load = self._lease.load(part, self._first, end, behind=True)
        except BaseException:  # or the extents would be leased for ever
            region.release()
            self._promoter._ended(self._lease, self._first - self._begun)
            raise
        load.add_done_callback(read)


class _Part:
    """Tokens `first` … `end`-1 of a prompt in plain memory, layer after layer: a `KVView` of them alone."""

    def __init__(self, view: memoryview, representation: Representation, first: int, end: int) -> None:
        self._first = first // representation.piece_tokens
        self._pieces = (end - first) // representation.piece_tokens
        self._layers: list[npt.NDArray[np.uint8]] = []
        at = 0
        for size in representation.layer_bytes:
            assert size is not None
            nbytes = size * self._pieces
            self._layers.append(np.frombuffer(view, np.uint8, nbytes, at).reshape(self._pieces, size))
            at += nbytes

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:
        """See `KVView`."""
        begin = first - self._first
        if begin < 0 or begin + len(sizes) > self._pieces:
            raise ValueError(f"pieces {first} to {first + len(sizes)} are not in this part")
        return self._layers[layer][begin : begin + len(sizes)]
