"""Taking extents away, in the order that survives a crash and that readers elsewhere notice.

    lock its bytes against readers of other processes → journal → no longer found → space given back

What is corrupt is no longer found even while it is under a lease; its space then waits for the last release. Everything here is
called in the store's turn.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from headstart.errors import ExtentCorrupt
from headstart.policy.eviction import choose_victims
from headstart.tier.base import ExtentId
from headstart.tier.disk.books import CONDEMNED, Candidates, Segment
from headstart.tier.disk.door import Handle
from headstart.tier.disk.records import ExtentName, removed_records

if TYPE_CHECKING:
    from headstart.tier.disk.store import Store

QUARANTINE = "corrupt"
_SHARE = 64  # such a part of the capacity is freed at once: a full cache does not choose anew for every extent
_BATCH = 64  # extents removed at once: what a lookup may have to wait for
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_NO_FILE = Handle(-1)


def evict(store: Store, needed_bytes: int, reason: str) -> bool:
    """Free at least so many bytes, least recently used first. False where leases leave too little, or where the medium gives
    nothing back."""
    start = store.allocated_bytes
    give_back_waiting(store)
    with store.lock:
        empty = [s for s in store.books.segments.values() if s.opened and not s.gone and not s.rows]
    _settle(store, empty)  # files that could not be removed when they became empty
    refused: set[ExtentId] = set()  # leased by other processes
    while (missing := needed_bytes - (start - store.allocated_bytes)) > 0:
        by_segment, before = not store.holes, store.allocated_bytes
        with store.lock:
            candidates = store.books.candidates()
        victims = _victims(store, candidates, missing, refused)
        if victims is None:
            return False
        gone = 0
        for first in range(0, len(victims), _BATCH):
            batch = victims[first : first + _BATCH]
            removed = remove(store, batch, reason=reason)
            gone += len(removed)
            refused.update(set(batch).difference(removed))
            if not (by_segment or store.holes):  # a hole could not be made: from now on by segments
                break
        store.counters.add(f"evicted_{reason}", gone)
        if by_segment and gone == len(victims) and store.allocated_bytes >= before:
            # Files cannot be removed either: going on would lose everything and gain nothing.
            store.pause("space that was given back is still charged")
            return False
    return True


def _victims(store: Store, candidates: Candidates, needed_bytes: int, refused: set[ExtentId]) -> list[ExtentId] | None:
    """Return what to remove, None where everything that may go is not enough. Sorting takes long: without the lock."""
    leased = candidates.leased | np.isin(candidates.ids, np.array(sorted(refused), np.int64))
    last_used, nbytes = candidates.last_used, candidates.nbytes
    if store.holes:
        wanted = max(needed_bytes, store.capacity_bytes // _SHARE)
        chosen = choose_victims(last_used=last_used, nbytes=nbytes, leased=leased, needed_bytes=wanted)
        return [ExtentId(i) for i in candidates.ids[chosen].tolist()] if nbytes[chosen].sum() >= needed_bytes else None
    # No holes here: space comes back segment by segment, the one first whose latest use is longest ago.
    numbers, member = np.unique(candidates.segments, return_inverse=True)
    used = np.zeros(len(numbers), np.int64)
    np.maximum.at(used, member, last_used)
    taken = np.zeros(len(numbers), np.bool_)
    np.logical_or.at(taken, member, leased)
    files = [store.books.numbered(int(number)) for number in numbers]
    waiting = {segment.number for segment, _, _ in store.waiting}
    taken |= np.array([not segment.settled or segment.number in waiting for segment in files], np.bool_)
    charged = np.array([segment.allocated_bytes for segment in files], np.int64)
    chosen = choose_victims(last_used=used, nbytes=charged, leased=taken, needed_bytes=needed_bytes)
    if charged[chosen].sum() < needed_bytes:
        return None
    return [ExtentId(i) for i in candidates.ids[np.isin(member, chosen)].tolist()]


def remove(store: Store, extents: Iterable[ExtentId], *, reason: str) -> list[ExtentId]:
    """Remove those extents that are not leased here or elsewhere, or, where they are corrupt, all; returns which they were.
    Raises OSError where it cannot be journalled, and then all of them stay; what is corrupt goes even so."""
    books, corrupt = store.books, reason == QUARANTINE
    places: dict[ExtentId, tuple[Segment, int, int]] = {}
    names: dict[ExtentId, tuple[ExtentName, bytes]] = {}
    free: list[ExtentId] = []
    with store.lock:
        for extent in extents:
            row = books.row(extent)
            if row is None or (books.leases(row) and not corrupt):
                continue
            places[extent] = books.place(row)
            names[extent] = (books.name(row), books.prefixes(row))
            if not books.leases(row):
                books.set_leases(row, CONDEMNED)
                free.append(extent)
    locks = {extent: handle for extent in free if (handle := _lock_bytes(store, *places[extent])) is not None}
    try:
        going = list(places if corrupt else locks)
        records = removed_records(store.now_ms(), reason, [names[extent] for extent in going], quarantined=corrupt)
        try:
            store.append(records)
        except OSError:
            if not corrupt:
                raise
            store.counters.add("remove_failed")
        with store.lock:
            books.apply(records, own=True)
        store.waiting += [places[extent] for extent in going if extent not in locks]
        for extent, handle in locks.items():
            segment, offset, nbytes = places[extent]
            if handle != _NO_FILE and not _is_done(store, segment):
                _punch(store, handle, offset, nbytes)
    finally:
        with store.lock:
            for extent in free:
                if (row := books.row(extent)) is not None:
                    books.set_leases(row, 0)
        for extent, handle in locks.items():
            segment, offset, nbytes = places[extent]
            if handle != _NO_FILE:
                with contextlib.suppress(OSError):  # it ends with the handle at the latest
                    store.disk.unlock_range(handle, offset, nbytes)
                store.files.let_go(segment)
    _settle(store, [places[extent][0] for extent in going])
    return going


def give_back_waiting(store: Store) -> None:
    """Give back the space of corrupt extents that nobody reads any more."""
    if not store.waiting:
        return
    waiting, store.waiting = [place for place in store.waiting if not place[0].gone], []
    for segment, offset, nbytes in waiting:
        with alone(store, segment, offset, nbytes) as handle:
            if handle is None:
                store.waiting.append((segment, offset, nbytes))
            else:
                _punch(store, handle, offset, nbytes)
    _settle(store, [segment for segment, _, _ in waiting])


@contextmanager
def alone(store: Store, segment: Segment, offset: int, nbytes: int) -> Iterator[Handle | None]:
    """Keep readers away from bytes of a segment, those of this process too. None: somebody reads there, or the file is gone."""
    try:
        # A handle of its own: locks of one handle do not refuse each other.
        handle = store.disk.open(store.directory.segment_path(segment.name), "write")
    except OSError:
        yield None
        return
    try:
        try:
            locked = store.disk.lock_range(handle, offset, nbytes, exclusive=True)
        except OSError:
            store.counters.add("lock_failed")
            locked = False
        yield handle if locked else None
    finally:
        with contextlib.suppress(OSError):
            store.disk.close(handle)


def _is_done(store: Store, segment: Segment) -> bool:
    """Whether a segment's file may go: nothing is alive in it, nobody reads there, and nobody will add to it."""
    return segment.settled and not segment.rows and all(place[0] is not segment for place in store.waiting)


def _settle(store: Store, segments: Iterable[Segment]) -> None:
    for segment in {segment.number: segment for segment in segments if not segment.gone}.values():
        if _is_done(store, segment):
            unlink(store, segment)
        else:
            measure(store, segment)


def _lock_bytes(store: Store, segment: Segment, offset: int, nbytes: int) -> Handle | None:
    """Keep readers of other processes away from an extent and hold its file. None: somebody reads there."""
    try:
        handle = store.files.hold(segment)
    except ExtentCorrupt:
        return _NO_FILE  # nothing can be read there, here or elsewhere
    except OSError as error:
        return None if error.errno in _SHORTAGE else _NO_FILE
    try:
        if store.disk.lock_range(handle, offset, nbytes, exclusive=True):
            return handle
    except OSError:
        store.counters.add("lock_failed")
    store.files.let_go(segment)
    return None


def _punch(store: Store, handle: Handle, offset: int, nbytes: int) -> None:
    if not store.holes:
        return
    try:
        store.holes = store.disk.punch(handle, offset, nbytes)
    except OSError:
        store.holes = False  # a failure is no progress either: space comes back by whole files from now on
        store.counters.add("punch_failed")


def unlink(store: Store, segment: Segment) -> None:
    """Remove a segment's file; what is still alive in it is forgotten."""
    try:
        store.disk.unlink(store.directory.segment_path(segment.name))
    except FileNotFoundError:
        pass
    except OSError:
        store.counters.add("unlink_failed")
        return
    with store.lock:
        store.books.forget_segment(segment)
    store.files.discard(segment)


def measure_stale(store: Store) -> None:
    """Measure the segments that other processes changed, or may be changing."""
    with store.lock:
        segments = [s for s in store.books.segments.values() if s.opened and not s.gone]
    for segment in segments:
        if segment.stale or not segment.settled:  # its writer may have died before it could say what it wrote
            measure(store, segment)


def measure_unexplained(store: Store) -> None:
    """Charge what stands there and no journal explains: the journal of a living writer may be damaged. Raises OSError."""
    names = store.directory.list_segments()
    with store.lock:
        segments = store.books.segments
        names |= {name for name, segment in segments.items() if segment.allocated_bytes}  # also those that went since
        unexplained = [s for s in map(store.books.segment, names) if not s.opened and not s.gone]
    for segment in unexplained:
        measure(store, segment)


def measure(store: Store, segment: Segment) -> None:
    """Ask the file system what it charges for a segment. Needs no turn."""
    try:
        facts = store.disk.stat(store.directory.segment_path(segment.name))
    except FileNotFoundError:
        store.lost_segment(segment)
    except OSError:
        store.counters.add("stat_failed")  # the old figure stands: too high rather than too low
    else:
        with store.lock:
            store.books.charge(segment, facts.allocated_bytes)
