"""Taking extents away, in the order that survives a crash and that readers elsewhere notice.

    lock its bytes against readers of other processes → journal → no longer found → space given back

What is corrupt is no longer found even while it is under a lease; its space then waits for the last release. Everything here is
called in the store's turn.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headstart.errors import ExtentCorrupt
from headstart.policy.eviction import Worth, choose_victims, most_of_descendants, worth_of
from headstart.policy.retention import FOREVER_MS
from headstart.tier.base import ExtentId
from headstart.tier.disk.books import CONDEMNED, ROW_MASK, Segment
from headstart.tier.disk.door import Handle
from headstart.tier.disk.records import PREFIX_BYTES, ExtentName, removed_records

if TYPE_CHECKING:
    from headstart.tier.disk.store import Store

QUARANTINE = "corrupt"
_SHARE = 64  # such a part of the capacity is freed at once: a full cache does not choose anew for every extent
_REMOVAL_BYTES = 64  # that a removal takes in a journal, beside its blocks' prefixes
_BATCH = 64  # extents removed at once: what a lookup may have to wait for
EXPIRE_INTERVAL_S = 10.0
_EXPIRE_SHARE = 1 / 50  # of the time at most, where there are very many
PINNED_SHARE = 2  # pins take at most such a part of the capacity, all together
_PART = 4096  # parents looked up at once, for the same reason
_SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_NO_FILE = Handle(-1)


def evict(store: Store, needed_bytes: int, reason: str) -> bool:
    """Free at least so many bytes, the least worthy first. False where what may not go leaves too little, or where the medium
    gives nothing back."""
    start = store.allocated_bytes
    give_back_waiting(store)
    give_back_empty(store)
    trim_tenants(store)
    refused: set[ExtentId] = set()  # leased by other processes
    while (missing := needed_bytes - (start - store.allocated_bytes)) > 0:
        by_segment, before = not store.holes, store.allocated_bytes
        candidates = weigh(store, refused)
        chosen = _by_segment(store, candidates, missing) if by_segment else _by_extent(store, candidates, missing)
        if chosen is None:
            return False
        gone = remove_chosen(store, candidates, chosen, reason=reason, refused=refused)
        if by_segment and gone == len(chosen) and store.allocated_bytes >= before:
            # Files cannot be removed either: going on would lose everything and gain nothing.
            store.pause("space that was given back is still charged")
            return False
    return True


def trim_tenants(store: Store) -> None:
    """Bring tenants down to their quotas, which may have been lowered since: others' extents shall not go for theirs."""
    with store.lock:
        tenants = list(store.books.bytes_by_tenant())
    for tenant in tenants:
        keep_within_quota(store, tenant, 0)


def keep_within_quota(store: Store, tenant: str, nbytes: int) -> bool:
    """Remove what a tenant has, the least worthy first, until `nbytes` more are within its quota. False, and nothing is
    removed, where what may go of it is not enough."""
    quota = store.retention.quota_bytes(tenant, capacity_bytes=store.capacity_bytes, whole_bytes=store.whole_bytes)
    if quota is None:
        return True
    refused: set[ExtentId] = set()
    while True:
        with store.lock:
            over = store.books.bytes_by_tenant().get(tenant, 0) + nbytes - quota
        if over <= 0:
            return True
        if nbytes > quota:
            return False
        candidates = weigh(store, refused, tenant=tenant)
        chosen = choose_victims(
            worth=candidates.worth, nbytes=candidates.nbytes, needed_bytes=over, wanted_bytes=quota // _SHARE
        )
        if candidates.nbytes[chosen].sum() < over:
            return False
        remove_chosen(store, candidates, chosen, reason="quota", refused=refused)


def expire(store: Store) -> bool:
    """Remove some of the extents that are older than their classes may grow, room or not; True while there are more. One that a
    younger one continues stays as long as that: what is in it is in a younger prompt too. Looks at all of them, so it does that
    now and then only."""
    begun = store.clock()
    if begun < store.promises.expire_due:
        return False
    with store.lock:
        over = np.array(store.books.expired(store.now_ms()), np.int64)
    removed = remove(store, _not_continued(store, over)[:_BATCH], reason="expired") if len(over) else []
    store.counters.add("evicted_expired", len(removed))
    more, now = len(removed) == _BATCH, store.clock()
    store.promises.expire_due = now + (0 if more else max(EXPIRE_INTERVAL_S, (now - begun) / _EXPIRE_SHARE))
    return more


def _not_continued(store: Store, over: npt.NDArray[np.int64]) -> list[ExtentId]:
    """Return those of extents that no other ones continue."""
    with store.lock:
        living = store.books.living_ids()
    stays = (~np.isin(living, over)).astype(np.int64)
    most_of_descendants([stays], _parents(store, living))
    return [ExtentId(extent) for extent in living[stays == 0].tolist()]


@dataclass(frozen=True, slots=True)
class _Weighed:
    """Living extents, or a tenant's, and what they are worth."""

    ids: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32]
    nbytes: npt.NDArray[np.int64]
    worth: Worth


def weigh(store: Store, refused: set[ExtentId], *, tenant: str | None = None) -> _Weighed:
    """Weigh what is alive; `refused` may not go. With `tenant` none but its own may, and none that another's continue. The
    lock is held for a copy and for a part of the parents at a time: the rest takes long."""
    now_ms, books = store.now_ms(), store.books
    with store.lock:
        candidates = books.candidates(now_ms)
        pinned_bytes = books.pinned_bytes(now_ms)
    held = candidates.leased | np.isin(candidates.ids, np.array(sorted(refused), np.int64))
    # Pins that take more than they may, as after the capacity was lowered, only go last.
    pinned = candidates.pinned
    if pinned_bytes <= store.capacity_bytes // PINNED_SHARE:
        held |= pinned
    promised_ms = np.where(pinned, FOREVER_MS, candidates.promised_ms)
    parents = _parents(store, candidates.ids)
    if tenant is not None:
        foreign = (candidates.tenants != books.tenant_number(tenant)).astype(np.int64)
        most_of_descendants([foreign], parents)
        held |= foreign != 0
    worth = worth_of(last_used=candidates.last_used, promised_ms=promised_ms, held=held, parents=parents, now_ms=now_ms)
    return _Weighed(candidates.ids, candidates.segments, candidates.nbytes, worth)


def _parents(store: Store, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each extent the place among them of the one that it continues, or -1. The lock is held for some at a time."""
    parents = np.full(len(ids), -1, np.int64)
    for first in range(0, len(parents), _PART):
        with store.lock:
            parents[first : first + _PART] = store.books.parents(ids[first : first + _PART])
    # From rows to places; what came or went meanwhile is not among them.
    rows = ids & ROW_MASK
    place = np.full(max(int(rows.max(initial=-1)), int(parents.max(initial=-1))) + 1, -1, np.int64)
    place[rows] = np.arange(len(rows))
    return np.where(parents >= 0, place[parents], -1)


def _by_extent(store: Store, weighed: _Weighed, needed_bytes: int) -> npt.NDArray[np.int64] | None:
    """Return what to remove, None where everything that may go is not enough."""
    wanted = store.capacity_bytes // _SHARE
    chosen = choose_victims(worth=weighed.worth, nbytes=weighed.nbytes, needed_bytes=needed_bytes, wanted_bytes=wanted)
    return chosen if weighed.nbytes[chosen].sum() >= needed_bytes else None


def _by_segment(store: Store, weighed: _Weighed, needed_bytes: int) -> npt.NDArray[np.int64] | None:
    """The same where no holes can be made: space comes back segment by segment, each worth as much as what is best in it."""
    files = _files_of(store, weighed)
    chosen = choose_victims(worth=files.worth, nbytes=files.charged, needed_bytes=needed_bytes)
    return np.flatnonzero(np.isin(files.member, chosen)) if files.charged[chosen].sum() >= needed_bytes else None


@dataclass(frozen=True, slots=True)
class _Files:
    """The files that weighed extents lie in, each worth as much as what is best in it; extent i lies in file `member[i]`."""

    segments: list[Segment]
    worth: Worth
    charged: npt.NDArray[np.int64]
    member: npt.NDArray[np.intp]


def _files_of(store: Store, weighed: _Weighed) -> _Files:
    numbers, member = np.unique(weighed.segments, return_inverse=True)
    worth = weighed.worth.of_groups(member, len(numbers))
    segments = [store.books.numbered(int(number)) for number in numbers]
    waiting = {segment.number for segment, _, _ in store.waiting}
    stays = np.array([not segment.settled or segment.number in waiting for segment in segments], np.bool_)
    charged = np.array([segment.allocated_bytes for segment in segments], np.int64)
    return _Files(segments, replace(worth, held=worth.held | stays), charged, member)


def remove_chosen(
    store: Store, weighed: _Weighed, chosen: npt.NDArray[np.int64], *, reason: str, refused: set[ExtentId]
) -> int:
    """Remove victims in their order; what another process leases is added to `refused`. Says which promises were broken.
    Returns how many went."""
    promised = chosen[weighed.worth.promised_ms[chosen] > store.now_ms()]
    broken = dict(zip(weighed.ids[promised].tolist(), weighed.nbytes[promised].tolist(), strict=True))
    victims = [ExtentId(extent) for extent in weighed.ids[chosen].tolist()]
    by_segment, gone = not store.holes, 0
    for batch in _batches(store, victims):
        removed = remove(store, batch, reason=reason)
        gone += len(removed)
        refused.update(set(batch).difference(removed))
        store.promises.broken([broken[extent] for extent in removed if extent in broken])
        if not (by_segment or store.holes):  # a hole could not be made: from now on by segments
            break
    store.counters.add(f"evicted_{reason}", gone)
    return gone


def _batches(store: Store, extents: Sequence[ExtentId]) -> Iterator[list[ExtentId]]:
    """Yield extents in parts whose removal fits into what the journal has reserved: a full cache has nothing else for it."""
    batch: list[ExtentId] = []
    nbytes = 0
    for extent in extents:
        with store.lock:
            row = store.books.row(extent)
            blocks = 0 if row is None else len(store.books.prefixes(row)) // PREFIX_BYTES
        size = _REMOVAL_BYTES + blocks * PREFIX_BYTES
        if batch and (len(batch) == _BATCH or nbytes + size > store.upkeep.journal.room_bytes):
            yield batch
            batch, nbytes = [], 0
        batch.append(extent)
        nbytes += size
    if batch:
        yield batch


def drop_files(store: Store, needed_bytes: int) -> None:
    """Remove whole segment files, the least worthy first, until so many bytes are free: the way to make room without a byte
    for the journal. What was in a file that is gone is gone, whatever journals say."""
    start = store.allocated_bytes
    give_back_empty(store)
    weighed = weigh(store, set())
    files = _files_of(store, weighed)
    promised = weighed.worth.promised_ms > store.now_ms()
    for place in choose_victims(worth=files.worth, nbytes=files.charged, needed_bytes=1 + int(files.charged.sum())).tolist():
        if start - store.allocated_bytes >= needed_bytes:
            return
        segment, inside = files.segments[place], files.member == place
        with alone(store, segment, segment.header_bytes, max(segment.end - segment.header_bytes, 1)) as handle:
            if handle is None:
                continue
            with contextlib.suppress(OSError):
                store.disk.truncate(handle, 0)  # as `_empty` does
            unlink(store, segment)  # whoever appends to it finds it gone, and begins another
        if segment.gone:
            store.counters.add("evicted_capacity", int(np.count_nonzero(inside)))
            store.promises.broken(weighed.nbytes[inside & promised].tolist())


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
    locks: dict[ExtentId, Handle] = {}
    try:
        for extent in free:
            if (handle := _lock_bytes(store, *places[extent])) is not None:
                locks[extent] = handle
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


def give_back_empty(store: Store) -> None:
    """Remove files that could not be removed when they became empty."""
    with store.lock:
        empty = [s for s in store.books.segments.values() if s.opened and not s.gone and not s.rows]
    _settle(store, empty)


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
        if not segment.settled:  # it may have grown: too high rather than too low
            most = segment.capacity_bytes or store.capacity_bytes // 4
            with store.lock:
                store.books.charge(segment, max(segment.allocated_bytes, most))
        segment.stale = True
    else:
        with store.lock:
            store.books.charge(segment, facts.allocated_bytes)
