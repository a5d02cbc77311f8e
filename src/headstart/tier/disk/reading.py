"""Leases and reads: what is handed out of a directory's files, and how it is kept from being removed meanwhile.

    count in the books → shared lock on the bytes → journals read on: nobody has removed it → held until the last release

Nothing here writes to a file or takes a turn, so no reader waits for a disk that writes.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from headstart.block.whole import aligned
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.arena import ALIGNMENT
from headstart.tier.base import ExtentId, RawExtents, ReadRange
from headstart.tier.disk.door import Handle, RealDisk
from headstart.tier.disk.pause import LOST
from headstart.tier.disk.store import Store
from headstart.tier.disk.table import Segment

_TIER = "disk"


@dataclass(slots=True)
class _Held:
    """An extent under `count` leases: its bytes are locked in the file, which is kept open. The extent may be gone by now."""

    segment: Segment
    offset: int
    nbytes: int
    handle: Handle
    count: int = 0


class Reading:
    """Safe from many threads. `follow` takes over what other processes journalled up to now; False where it could not."""

    def __init__(self, store: Store, *, follow: Callable[[], bool]) -> None:
        self._store = store
        self._counters = store.counters
        self._follow = follow
        self._closed = False
        self._leasing = Lock()  # first and last lease of an extent, so that its lock in the file is there when the count is
        self._held: dict[ExtentId, _Held] = {}

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        if self._store.forked:  # locks are the parent's
            return [False] * len(extents)
        segments = self._segments(extents)
        # Each segment's file is looked at once, not for every extent in it: a long prompt has some hundred.
        handles = {segment: self._hold(segment) for segment in dict.fromkeys(segments) if segment is not None}
        try:
            leased = self._lease(extents, [None if segment is None else handles[segment] for segment in segments])
        finally:
            for segment, handle in handles.items():
                if handle is not None:
                    self._store.files.let_go(segment)
        if any(leased):
            # Another process may have removed an extent before its bytes were locked; then its journal says so by now.
            followed = self._follow()
            with self._store.lock:
                alive = [followed and row >= 0 for row in self._store.books.rows(extents)]
            self.release([extent for extent, ok, here in zip(extents, leased, alive, strict=True) if ok and not here])
            leased = [ok and here for ok, here in zip(leased, alive, strict=True)]
        return leased

    def release(self, extents: Sequence[ExtentId]) -> None:
        ended: Counter[Segment] = Counter()
        try:
            for extent in extents:
                with self._leasing:
                    held = self._release(extent)
                if held is not None:
                    ended[held.segment] += 1
        finally:
            for segment, times in ended.items():
                self._store.files.let_go(segment, times)

    def read(self, reads: Sequence[ReadRange]) -> int:
        total = sum(self._read(read) for read in reads)
        self._counters.add("bytes_read", total)
        return total

    def raw(self, extents: Sequence[ExtentId]) -> RawExtents | None:
        store = self._store
        if not isinstance(store.disk, RealDisk):
            return None
        with store.lock:
            places = store.books.places(extents)
        if places is None:
            return None
        descriptors = store.files.hold_raw(places.segments, store.disk.direct_descriptor)
        if descriptors is None:
            return None
        return RawExtents(
            np.array(descriptors, np.int64)[places.segment],
            places.offsets,
            places.extent_bytes,
            places.header_bytes,
            places.blocks,
            list(places.segments),
        )

    def let_go_raw(self, raw: RawExtents, *, bytes_read: int) -> None:
        assert isinstance(raw.files, list)
        for segment in raw.files:
            self._store.files.let_go(segment)
        self._counters.add("bytes_read", bytes_read)

    def close(self) -> None:
        """Give every lease up."""
        self._closed = True
        with self._leasing:
            for held in self._held.values():
                self._unlock(held)
                self._store.files.let_go(held.segment)
            self._held.clear()

    def _segments(self, extents: Sequence[ExtentId]) -> list[Segment | None]:
        """Return the segment that each extent lies in, None where it is gone or being removed."""
        books = self._store.books
        with self._store.lock:
            return [None if row < 0 or books.leases(row) < 0 else books.segment_of(row) for row in books.rows(extents)]

    def _lease(self, extents: Sequence[ExtentId], handles: Sequence[Handle | None]) -> list[bool]:
        """Lease extents whose files are held meanwhile, as far as there is a handle."""
        books, first, leased = self._store.books, dict[ExtentId, _Held](), [False] * len(extents)
        with self._leasing:
            with self._store.lock:
                for at, (extent, handle, row) in enumerate(zip(extents, handles, books.rows(extents), strict=True)):
                    if handle is None or row < 0 or books.leases(row) < 0:
                        continue
                    held = self._held.get(extent)
                    if held is None:
                        held = self._held[extent] = first[extent] = _Held(*books.place(row), handle)
                    held.count += 1
                    books.set_leases(row, held.count)
                    leased[at] = True
            # They count as leased already: the evictor of this process locks by the same handle, and leaves them alone.
            refused = self._lock(first)
            for extent in refused:
                del self._held[extent]
                self._count(extent, 0)
        return [ok and extent not in refused for ok, extent in zip(leased, extents, strict=True)] if refused else leased

    def _lock(self, wanted: Mapping[ExtentId, _Held]) -> set[ExtentId]:
        """Hold the files of extents until the last lease of each ends, and their bytes against other processes. Returns those
        that somebody is removing; all, when the tier closes."""
        refused = set()
        locked: dict[Segment, list[ExtentId]] = {}
        for extent, held in wanted.items():
            if self._lock_range(held.handle, held.offset, held.nbytes):
                locked.setdefault(held.segment, []).append(extent)
            else:
                refused.add(extent)
        for segment, extents in locked.items():
            if not self._store.files.hold_again(segment, len(extents)):
                for extent in extents:
                    self._unlock(wanted[extent])
                refused |= set(extents)
        return refused

    def _count(self, extent: ExtentId, leases: int) -> None:
        """Tell the books how many leases an extent has, unless it is gone or being removed."""
        books = self._store.books
        with self._store.lock:
            row = books.row(extent)
            if row is not None and books.leases(row) >= 0:
                books.set_leases(row, leases)

    def _hold(self, segment: Segment) -> Handle | None:
        """Hold a segment's file. None, and its extents are forgotten, where it is gone or is not what it was."""
        store = self._store
        try:
            with store.files.held(segment) as handle:
                if store.disk.facts(handle).links:
                    return store.files.hold(segment)
            store.lost_segment(segment)  # it could still be read, but nobody would ever find it again
        except ExtentCorrupt as error:
            self._counters.add(f"read_failed_{error.reason}")
            self._store.drop_segment(segment)
        except OSError as error:
            self._failed(error, segment)
        except StoreError:
            pass  # closed meanwhile
        return None

    def _lock_range(self, handle: Handle, offset: int, nbytes: int) -> bool:
        try:
            return self._store.disk.lock_range(handle, offset, nbytes, exclusive=False)
        except OSError:
            self._counters.add("lock_failed")
            return False

    def _release(self, extent: ExtentId) -> _Held | None:
        """Count one lease less; returns what the last one held."""
        held = self._held.get(extent)
        if held is None:
            with self._store.lock:
                alive = self._store.books.row(extent) is not None
            if alive and not self._closed:
                raise ValueError(f"disk tier: extent {extent} was released more often than leased")
            return None
        held.count -= 1
        if held.count:
            self._count(extent, held.count)
            return None
        # While it still counts as leased: the evictor of this process locks by the same handle, and would lose its lock here.
        self._unlock(held)
        del self._held[extent]
        self._count(extent, 0)
        return held

    def _unlock(self, held: _Held) -> None:
        if self._store.forked:
            return
        try:
            self._store.disk.unlock_range(held.handle, held.offset, held.nbytes)
        except OSError:
            self._counters.add("lock_failed")

    def _read(self, read: ReadRange) -> int:
        store = self._store
        with store.lock:
            row = store.books.row(read.extent)
            place = None if row is None else store.books.place(row)
        if place is None:
            self._counters.add("read_failed_gone")
            raise StoreError("the extent was removed meanwhile", reason="gone", tier=_TIER, extent=read.extent)
        segment, offset, nbytes = place
        wanted = sum(buffer.nbytes for buffer in read.buffers)
        if read.offset < 0 or read.offset + wanted > nbytes:
            raise StoreError(
                f"disk tier: bytes {read.offset} to {read.offset + wanted} of an extent of {nbytes} were asked for",
                reason="range",
                tier=_TIER,
                extent=read.extent,
            )
        try:
            handle = store.files.hold(segment)
            try:
                return store.disk.read(handle, read.buffers, offset + read.offset)
            finally:
                store.files.let_go(segment)
        except ExtentCorrupt as error:
            self._counters.add(f"read_failed_{error.reason}")
            store.drop_segment(segment)
            raise
        except StoreError as error:
            if error.facts.get("reason") != "short-read":
                raise
            self._counters.add("read_failed_short-read")
            path = store.directory.segment_path(segment.name)
            raise ExtentCorrupt(f"{path}: {error}", reason="short-read", tier=_TIER, extent=read.extent) from error
        except OSError as error:
            self._failed(error, segment)
            if error.errno == errno.EIO and self._is_bad_sector(segment, offset + read.offset, wanted):
                path = store.directory.segment_path(segment.name)
                message = f"{path}: bytes {offset + read.offset} and on cannot be read, what lies around them can"
                raise ExtentCorrupt(message, reason="unreadable", tier=_TIER, extent=read.extent) from error
            raise

    def _is_bad_sector(self, segment: Segment, offset: int, nbytes: int) -> bool:
        """Whether a range cannot be read that could not be before, though the file's header can: the medium has lost the range,
        and not gone away."""
        store = self._store
        memory = aligned(ALIGNMENT)
        try:
            with store.files.held(segment) as handle:
                store.disk.read(handle, [memory], 0)
                for at in range(offset, offset + nbytes, memory.nbytes):
                    try:
                        store.disk.read(handle, [memory[: min(memory.nbytes, offset + nbytes - at)]], at)
                    except OSError as error:
                        return error.errno == errno.EIO
        except (OSError, StoreError):
            return False
        return False

    def _failed(self, error: OSError, segment: Segment) -> None:
        """Count a failed access; a file that is gone takes its extents along."""
        self._counters.add(f"read_failed_{errno.errorcode.get(error.errno or 0, 'other').lower()}")
        if error.errno == errno.ESTALE and self._may_be_there(segment):
            self._store.files.discard(segment)  # what was open may be of a mount that went; the next read opens it anew
        elif error.errno in LOST:
            self._store.lost_segment(segment)

    def _may_be_there(self, segment: Segment) -> bool:
        """Whether a file may stand under a segment's name: where it does, forgetting it would leave what nobody finds."""
        try:
            self._store.disk.stat(self._store.directory.segment_path(segment.name))
        except OSError as error:
            return error.errno not in LOST - {errno.ESTALE}
        return True
