"""Taking extents away, in the order that survives a crash and that readers elsewhere notice.

    lock its bytes against readers of other processes → journal → no longer found → space given back

What is corrupt is no longer found even while it is under a lease; its space then waits for the last release. A process that
dies before the last step leaves dead bytes, in files of the living too: whoever meets them gives them back. Everything here is
called in the store's turn.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headstart.errors import ExtentCorrupt
from headstart.tier.base import ExtentId
from headstart.tier.disk.door import Handle
from headstart.tier.disk.records import ExtentName, removed_records
from headstart.tier.disk.table import CONDEMNED, Segment

if TYPE_CHECKING:
    from headstart.tier.disk.owner import Owner
    from headstart.tier.disk.store import Store

QUARANTINE = "corrupt"
METADATA_BYTES = 32 << 10  # file systems charge a file for blocks of their own, and move them about later
_AT_ONCE = 64  # extents forgotten under one hold of the books' lock
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_NO_FILE = Handle(-1)


def remove(store: Store, extents: Iterable[ExtentId], *, reason: str) -> list[ExtentId]:
    """Remove those extents that are not leased here or elsewhere, or, where they are corrupt, all; returns which they were.
    Raises OSError where it cannot be journalled, and then all of them stay; what is corrupt goes even so."""
    books, corrupt = store.books, reason == QUARANTINE
    places: dict[ExtentId, tuple[Segment, int, int]] = {}
    names: dict[ExtentId, tuple[ExtentName, bytes]] = {}
    free: list[ExtentId] = []
    for extent in extents:
        with store.lock:
            row = books.row(extent)
            if row is None or (books.leases(row) and not corrupt):
                continue
            places[extent] = books.place(row)
            names[extent] = (books.name(row), books.prefixes(row))
            if not books.leases(row):
                books.set_leases(row, CONDEMNED)
                free.append(extent)
    locks: dict[ExtentId, Handle] = {}
    try:
        for extent in free:
            if (handle := _lock_bytes(store, *places[extent])) is not None:
                locks[extent] = handle
        going = list(places if corrupt else locks)
        now_ms = store.now_ms()
        records = removed_records(now_ms, reason, [names[extent] for extent in going], quarantined=corrupt)
        try:
            store.append(records)
        except OSError:
            if not corrupt:
                raise
            store.counters.add("remove_failed")
        for first in range(0, len(going), _AT_ONCE):
            part = [names[extent] for extent in going[first : first + _AT_ONCE]]
            with store.lock:  # a few at a time: lookups wait for it
                books.apply(removed_records(now_ms, reason, part, quarantined=corrupt), own=True)
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


def give_back_left(store: Store) -> None:
    """Give back what a removal left, because the medium refused or because the process died over it: files in which nothing is
    alive, and gaps between what lives, though not in a file that is added to here: in that one an extent may stand whose record
    is just being written."""
    with store.lock:
        segments = list(store.books.segments.values())
    _settle(store, [s for s in segments if s.opened and not s.rows])
    appending = set(store.appending.values())
    for segment in segments:
        if store.holes and segment.rows and segment not in appending and _is_gaping(segment):
            _close_up(store, segment)


def _is_gaping(segment: Segment) -> bool:
    """Whether more is charged for a segment than what lives in it explains, and all that lives in it is known."""
    return segment.settled and not segment.gone and segment.idle_bytes > segment.overhead_bytes + METADATA_BYTES


def _close_up(store: Store, segment: Segment) -> None:
    """Punch out what lies between a segment's living extents. Where somebody reads or is removing now, a later call does."""
    if segment.stale:
        measure(store, segment)
        if segment.stale or not _is_gaping(segment):
            return
    with store.lock:
        extents = sorted(store.books.place(row)[1:] for row in segment.rows.values())
    last, busy = segment.header_bytes, False
    for start, nbytes in [*extents, (segment.end, 0)]:
        if start > last:
            with alone(store, segment, last, start - last) as handle:
                if handle is None:
                    busy = True
                else:
                    _punch(store, handle, last, start - last)
        last = max(last, start + nbytes)
    measure(store, segment)
    if busy:
        segment.stale = True  # whoever is at it says no more when it is done
    else:
        segment.overhead_bytes = segment.idle_bytes


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
        if _is_done(store, segment) and _empty(store, segment):
            unlink(store, segment)
        else:
            measure(store, segment)


def _empty(store: Store, segment: Segment) -> bool:
    """Cut a file that goes to nothing: other processes may have it open for a while, and its bytes would be charged as long.
    False where that failed."""
    try:
        handle = store.disk.open(store.directory.segment_path(segment.name), "write")
        try:
            store.disk.truncate(handle, 0)
        finally:
            store.disk.close(handle)
    except FileNotFoundError:
        return True
    except OSError:
        store.counters.add("unlink_failed")
        return False
    return True


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


def unlink(store: Owner, segment: Segment) -> bool:
    """Remove a segment's file; what is still alive in it is forgotten. Return whether the file is gone."""
    try:
        store.disk.unlink(store.directory.segment_path(segment.name))
    except FileNotFoundError:
        pass
    except OSError:
        store.counters.add("unlink_failed")
        return False
    with store.lock:
        store.books.forget_segment(segment)
    store.files.discard(segment)
    return True


def measure_stale(store: Store) -> None:
    """Measure the segments that other processes changed, or may be changing."""
    with store.lock:
        segments = [s for s in store.books.segments.values() if (s.opened and not s.gone) or s.allocated_bytes]
    for segment in segments:
        if (
            segment.stale or not segment.settled or not segment.opened
        ):  # its writer may have died before it could say what it wrote
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
        with store.lock:
            store.books.charge(segment, 0)
    except OSError:
        store.counters.add("stat_failed")
        if segment.stale or not segment.settled:  # it may have grown: too high rather than too low
            most = segment.end if segment.settled else segment.capacity_bytes or store.capacity_bytes // 4
            with store.lock:
                store.books.charge(segment, max(segment.allocated_bytes, most))
        segment.stale = True
    else:
        with store.lock:
            store.books.charge(segment, facts.allocated_bytes)
