"""Taking extents away, in the order that survives a crash and that readers elsewhere notice.

    lock its bytes against readers of other processes → journal → no longer found → space given back

Everything here is called in the store's turn.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from headstart.errors import ExtentCorrupt
from headstart.policy.eviction import choose_victims
from headstart.tier.base import ExtentId
from headstart.tier.disk.books import CONDEMNED, Segment
from headstart.tier.disk.door import Handle
from headstart.tier.disk.records import ExtentName, removed_records

if TYPE_CHECKING:
    from headstart.tier.disk.store import Store

QUARANTINE = "corrupt"
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_NO_FILE = Handle(-1)


def evict(store: Store, needed_bytes: int, reason: str) -> bool:
    """Free at least so many bytes, least recently used first. False where leases leave too little."""
    freed = 0
    refused: set[ExtentId] = set()  # leased by other processes
    while freed < needed_bytes:
        with store.lock:
            victims = _victims(store, needed_bytes - freed, refused)
        if victims is None:
            return False
        before = store.allocated_bytes
        removed = remove(store, victims, reason=reason)
        store.counters.add(f"evicted_{reason}", len(removed))
        freed += before - store.allocated_bytes
        refused.update(set(victims).difference(removed))
    return True


def _victims(store: Store, needed_bytes: int, refused: set[ExtentId]) -> list[ExtentId] | None:
    books = store.books
    rows = books.living()
    segments, last_used, nbytes, leased = books.columns(rows)
    kept = [row for extent in refused if (row := books.row(extent)) is not None]
    leased = leased | np.isin(rows, np.array(kept, np.int64))
    if store.holes:
        chosen = choose_victims(last_used=last_used, nbytes=nbytes, leased=leased, needed_bytes=needed_bytes)
        return [books.id_of(row) for row in rows[chosen].tolist()] if nbytes[chosen].sum() >= needed_bytes else None
    # No holes here: space comes back segment by segment, the one first whose latest use is longest ago.
    numbers, member = np.unique(segments, return_inverse=True)
    used = np.zeros(len(numbers), np.int64)
    np.maximum.at(used, member, last_used)
    taken = np.zeros(len(numbers), np.bool_)
    np.logical_or.at(taken, member, leased)
    files = [books.numbered(int(number)) for number in numbers]
    taken |= np.array([not segment.settled for segment in files], np.bool_)
    charged = np.array([segment.allocated_bytes for segment in files], np.int64)
    chosen = choose_victims(last_used=used, nbytes=charged, leased=taken, needed_bytes=needed_bytes)
    if charged[chosen].sum() < needed_bytes:
        return None
    return [books.id_of(row) for row in rows[np.isin(member, chosen)].tolist()]


def remove(store: Store, extents: Iterable[ExtentId], *, reason: str) -> list[ExtentId]:
    """Remove those extents that are not leased here or elsewhere; returns which they were. Raises OSError where it cannot be
    journalled; then all of them stay."""
    books = store.books
    places: dict[ExtentId, tuple[Segment, int, int]] = {}
    names: dict[ExtentId, tuple[ExtentName, bytes]] = {}
    with store.lock:
        for extent in extents:
            row = books.row(extent)
            if row is not None and books.leases(row) == 0:
                books.set_leases(row, CONDEMNED)
                places[extent] = books.place(row)
                names[extent] = (books.name(row), books.prefixes(row))
    locks = {extent: handle for extent, place in places.items() if (handle := _lock_bytes(store, *place)) is not None}
    records = removed_records(store.now_ms(), reason, [names[extent] for extent in locks], quarantined=reason == QUARANTINE)
    removed = False
    try:
        store.append(records)
        removed = True
    finally:
        # What is known to be corrupt is not found again even if that cannot be written down.
        with store.lock:
            for extent in places:
                if (row := books.row(extent)) is not None:
                    books.set_leases(row, 0)
            books.apply(records if removed or reason == QUARANTINE else [], own=True)
        for extent, handle in locks.items():
            segment, offset, nbytes = places[extent]
            if handle != _NO_FILE:
                if removed and segment.rows:
                    _punch(store, handle, offset, nbytes)
                with contextlib.suppress(OSError):  # it ends with the handle at the latest
                    store.disk.unlock_range(handle, offset, nbytes)
                store.files.let_go(segment)
    for segment in {places[extent][0].number: places[extent][0] for extent in locks}.values():
        if not segment.rows and segment.settled:
            unlink(store, segment)
        else:
            measure(store, segment)
    return list(locks)


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
    """Measure the segments that other processes changed."""
    with store.lock:
        stale = [s for s in store.books.segments.values() if s.stale and s.opened and not s.gone]
    for segment in stale:
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
