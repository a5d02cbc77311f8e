"""Leases and reads in a pool, where nobody can keep another machine from removing anything.

    journals were read at t0 → lease → … t0 + lease_s: reads are refused from here …   bytes go a grace after they were removed

So a lease is a promise of time, kept by the removers' grace. It costs no I/O. What is read late, cut or as zeros is found by
its checks; whether it is wrong or only not there yet is looked at before anything is said to be corrupt.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from headstart.block.representation import Representation
from headstart.block.whole import aligned, examine
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.base import ExtentId, RawExtents, ReadRange, Shape
from headstart.tier.disk.pause import LOST
from headstart.tier.disk.scrub import require_same
from headstart.tier.disk.table import Segment
from headstart.tier.pool.shared_disk import SharedDisk

if TYPE_CHECKING:
    from headstart.tier.pool.store import PoolStore


@dataclass(slots=True)
class _Held:
    """An extent under `count` leases, which read until `deadline`. It may be removed by now."""

    segment: Segment
    offset: int
    nbytes: int
    shape: Shape
    deadline: float
    count: int = 0


class PoolReading:
    """Safe from many threads."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self._tier = store.tier
        self._held: dict[ExtentId, _Held] = {}
        self._lock = Lock()
        self._missing: dict[int, float] = {}  # segments by number: since when their file was not found

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        store = self._store
        if store.forked or not store.fresh:
            store.counters.add("lease_refused_silent", len(extents))
            return [False] * len(extents)
        deadline = store.followed_at + store.timing.lease_s
        with self._lock, store.lock:
            return [self._lease(extent, deadline) for extent in extents]

    def release(self, extents: Sequence[ExtentId]) -> None:
        store = self._store
        with self._lock, store.lock:
            for extent in extents:
                held = self._held.get(extent)
                if held is None:
                    if store.books.row(extent) is not None:
                        raise ValueError(f"{self._tier} tier: extent {extent} was released more often than leased")
                    continue
                held.count -= 1
                if not held.count:
                    del self._held[extent]
                self._count(extent, held.count)

    def shape(self, extent: ExtentId) -> Shape | None:
        held = self._held.get(extent)
        return None if held is None else held.shape

    def forget(self, extents: Sequence[ExtentId]) -> None:
        """Read these no more, leased or not: their bytes are wrong."""
        with self._lock:
            for extent in extents:
                if (held := self._held.get(extent)) is not None:
                    held.deadline = float("-inf")

    def read(self, reads: Sequence[ReadRange]) -> int:
        total = sum(map(self._read, reads))
        self._store.counters.add("bytes_read", total)
        return total

    def raw(self, extents: Sequence[ExtentId]) -> RawExtents | None:
        """See `RawTier`. Where checks have a key, none: the C reader makes no such checks."""
        store = self._store
        if store.sealing.has_key or not isinstance(store.disk, SharedDisk):
            return None
        found = [self._held.get(extent) for extent in extents]
        places = [one for one in found if one is not None]
        left_s = min((one.deadline for one in places), default=0.0) - store.clock()
        if len(places) < len(found) or left_s <= 0:
            return None
        segments = {one.segment.number: one.segment for one in places}
        descriptors = store.files.hold_raw(segments.values(), store.disk.direct_descriptor)
        if descriptors is None:
            return None
        of = dict(zip(segments, descriptors, strict=True))
        return RawExtents(
            np.array([of[one.segment.number] for one in places], np.int64),
            np.array([one.offset for one in places], np.int64),
            np.array([one.nbytes for one in places], np.int64),
            np.array([one.shape.header_bytes for one in places], np.int64),
            np.array([one.shape.blocks for one in places], np.int64),
            list(segments.values()),
            until_s=time.monotonic() + left_s,
        )

    def let_go_raw(self, raw: RawExtents, *, bytes_read: int) -> None:
        assert isinstance(raw.files, list)
        for segment in raw.files:
            self._store.files.let_go(segment)
        self._store.counters.add("bytes_read", bytes_read)

    def is_right(self, extent: ExtentId) -> bool | None:
        """Whether an extent's bytes are what was written, read anew from a file that is opened anew; None where that cannot be
        told, because it is gone or cannot be read. Raises OSError."""
        store = self._store
        with store.lock:
            row = store.books.row(extent)
            if row is None:
                return None
            info, (segment, offset, nbytes) = store.books.info(row), store.books.place(row)
            encoded = store.books.representations.get(segment.representation)
        if encoded is None or segment.hidden:
            return None
        image = aligned(nbytes)
        store.files.discard(segment)
        try:
            with store.files.held(segment) as handle:
                store.disk.read(handle, [image], offset)
            require_same(examine(image, Representation.decode(encoded), store.sealing), info)
        except ExtentCorrupt:
            return False
        except StoreError as error:
            return None if self._store.late or error.facts.get("reason") != "short-read" else False
        return True

    def _lease(self, extent: ExtentId, deadline: float) -> bool:
        books = self._store.books
        row = books.row(extent)
        if row is None:
            return False
        held = self._held.get(extent)
        if held is None:
            held = self._held[extent] = _Held(*books.place(row), books.shape(row), deadline)
        held.deadline = max(held.deadline, deadline)
        held.count += 1
        self._count(extent, held.count)
        return True

    def _count(self, extent: ExtentId, leases: int) -> None:
        row = self._store.books.row(extent)
        if row is not None:
            self._store.books.set_leases(row, leases)

    def _held_for(self, extent: ExtentId, offset: int, nbytes: int) -> _Held:
        """Return where an extent lies of which so much is to be read now. Raises StoreError."""
        held = self._held.get(extent)
        if held is None:
            self._store.counters.add("read_failed_gone")
            raise StoreError("the extent is not leased, or was removed", reason="gone", tier=self._tier, extent=extent)
        self._require_time(held, extent)
        if offset < 0 or offset + nbytes > held.nbytes:
            raise StoreError(
                f"{self._tier} tier: bytes {offset} to {offset + nbytes} of an extent of {held.nbytes} were asked for",
                reason="range",
                tier=self._tier,
                extent=extent,
            )
        return held

    def _read(self, read: ReadRange) -> int:
        held = self._held_for(read.extent, read.offset, sum(buffer.nbytes for buffer in read.buffers))
        try:
            got = self._read_held(held, read)
        except ExtentCorrupt as error:  # the file's header is not what it was, or not there yet
            raise self._late(read.extent, error) from error
        except StoreError as error:
            if error.facts.get("reason") != "short-read":
                raise
            # The length that this machine knows may be an old one; a file that is opened anew has the right one.
            self._store.counters.add("read_again_late")
            self._store.files.discard(held.segment)
            try:
                got = self._read_held(held, read)
            except StoreError as again:
                if not self._store.late and again.facts.get("reason") == "short-read":
                    raise ExtentCorrupt("the extent has been cut", reason="truncated", extent=read.extent) from again
                raise self._late(read.extent, again) from again
        self._require_time(held, read.extent)
        return got

    def _read_held(self, held: _Held, read: ReadRange) -> int:
        store = self._store
        try:
            with store.files.held(held.segment) as handle:
                return store.disk.read(handle, read.buffers, held.offset + read.offset)
        except OSError as error:
            store.counters.add(f"read_failed_{errno.errorcode.get(error.errno or 0, 'other').lower()}")
            if error.errno == errno.ESTALE:
                store.files.discard(held.segment)
            elif error.errno in LOST:
                self._note_missing(held.segment)
            raise

    def _note_missing(self, segment: Segment) -> None:
        """A file that is not there may not be there yet: names come late as well. One that is missing still, after that, is
        gone. Raises OSError."""
        store, now = self._store, self._store.clock()
        if now - self._missing.setdefault(segment.number, now) > 2 * store.timing.visible_s:
            del self._missing[segment.number]
            store.lost([segment])

    def _require_time(self, held: _Held, extent: ExtentId) -> None:
        if self._store.clock() > held.deadline:
            self._store.counters.add("lease_outlived")
            raise StoreError("the lease was outlived", reason="lease", tier=self._tier, extent=extent)

    def _late(self, extent: ExtentId, error: StoreError) -> StoreError:
        self._store.counters.add("read_failed_late")
        return StoreError(f"not all of the extent is there yet: {error.message}", reason="late", tier=self._tier, extent=extent)
