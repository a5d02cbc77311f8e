"""What goes when room is needed, when a tenant is over its quota, and when its time is over.

`policy.eviction` decides, `removal` does it. Everything here is called in the store's turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headstart.policy.eviction import Emptying, Files, Worth, choose_emptying, choose_victims, most_of_descendants, worth_of
from headstart.policy.retention import FOREVER_MS
from headstart.tier.base import ExtentId
from headstart.tier.disk.records import PREFIX_BYTES
from headstart.tier.disk.removal import alone, give_back_left, give_back_waiting, remove, unlink
from headstart.tier.disk.table import ROW_MASK, Segment

if TYPE_CHECKING:
    from headstart.tier.disk.owner import Owner
    from headstart.tier.disk.store import Store

PINNED_SHARE = 2  # pins take at most such a part of the capacity, all together
EXPIRE_INTERVAL_S = 10.0
_EXPIRE_SHARE = 1 / 50  # of the time at most, where there are very many
_COLD_SHARE = 40  # such a part of the capacity is what would go next, where only whole files go
_AHEAD_SHARE = 32  # there at most such a part, and half a file, is kept free for what is written anew
_MOVED_SHARE = 1 / 8  # of what saves write, at most, is written anew for that
_SHARE = 64  # such a part of the capacity is freed at once: a full cache does not choose anew for every extent
_REMOVAL_BYTES = 64  # that a removal takes in a journal, beside its blocks' prefixes
_BATCH = 64  # extents removed at once: what a lookup may have to wait for
_PART = 4096  # parents looked up at once, for the same reason


def evict(store: Store, needed_bytes: int, reason: str) -> bool:
    """Free at least so many bytes, the least worthy first. False where what may not go leaves too little, or where the medium
    gives nothing back."""
    start = store.allocated_bytes
    give_back_waiting(store)
    give_back_left(store)
    _trim_tenants(store)
    refused: set[ExtentId] = set()  # leased by other processes, or cannot be written anew
    while (missing := needed_bytes - (start - store.allocated_bytes)) > 0:
        by_file, before, stay = not store.holes, store.allocated_bytes, len(refused)
        candidates = weigh(store, refused)
        if by_file:
            went = _empty_a_file(store, candidates, missing, reason=reason, refused=refused)
        else:
            went = _evict_each(store, candidates, missing, reason=reason, refused=refused)
        if not went:
            return False
        if by_file and len(refused) == stay and store.allocated_bytes >= before:
            # Files cannot be removed either: going on would lose everything and gain nothing.
            store.pause("space that was given back is still charged")
            return False
    return True


def _trim_tenants(store: Store) -> None:
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
        _remove_chosen(store, candidates, chosen, reason="quota", refused=refused)


def expire(store: Store) -> bool:
    """Remove some of the extents that are older than their classes may grow, room or not; True while there are more. One that a
    younger one continues stays as long as that: what is in it is in a younger prompt too. Looks at all of them, so it does that
    now and then only."""
    begun = store.clock()
    if begun < store.promises.expire_due:
        return False
    with store.lock:
        over = np.array(store.books.expired(store.now_ms()), np.int64)
    removed = remove(store, not_continued(store, over)[:_BATCH], reason="expired") if len(over) else []
    store.counters.add("evicted_expired", len(removed))
    more, now = len(removed) == _BATCH, store.clock()
    store.promises.expire_due = now + (0 if more else max(EXPIRE_INTERVAL_S, (now - begun) / _EXPIRE_SHARE))
    return more


def not_continued(store: Owner, over: npt.NDArray[np.int64]) -> list[ExtentId]:
    """Return those of extents that no other ones continue."""
    with store.lock:
        living = store.books.living_ids()
    stays = (~np.isin(living, over)).astype(np.int64)
    most_of_descendants([stays], _parents(store, living))
    return [ExtentId(extent) for extent in living[stays == 0].tolist()]


@dataclass(frozen=True, slots=True)
class Weighed:
    """Living extents, or a tenant's, and what they are worth."""

    ids: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32]
    nbytes: npt.NDArray[np.int64]
    worth: Worth


def weigh(store: Owner, refused: set[ExtentId], *, tenant: str | None = None, early_ms: int = 0) -> Weighed:
    """Weigh what is alive; `refused` may not go. With `tenant` none but its own may, and none that another's continue. The
    lock is held for a copy and for a part of the parents at a time: the rest takes long. `early_ms`: by how
    much promises count as longer, for clocks that are apart."""
    now_ms, books = store.now_ms() - early_ms, store.books
    with store.lock:
        candidates = books.candidates(now_ms)
        pinned_bytes = books.pinned_bytes(now_ms)
    held = candidates.leased | np.isin(candidates.ids, np.array(sorted(refused), np.int64))
    # Pins that take more than they may, as after the capacity was lowered, only go last.
    pinned = candidates.pinned
    if pinned_bytes <= store.capacity_bytes // PINNED_SHARE:
        held |= pinned
    nothing_ms = candidates.created_ms if early_ms else 0  # what is promised until it was written is promised nothing
    promised_ms = np.where(candidates.promised_ms <= nothing_ms, 0, candidates.promised_ms)
    promised_ms = np.where(pinned, FOREVER_MS, promised_ms)
    parents = _parents(store, candidates.ids)
    if tenant is not None:
        foreign = (candidates.tenants != books.tenant_number(tenant)).astype(np.int64)
        most_of_descendants([foreign], parents)
        held |= foreign != 0
    worth = worth_of(last_used=candidates.last_used, promised_ms=promised_ms, held=held, parents=parents, now_ms=now_ms)
    return Weighed(candidates.ids, candidates.segments, candidates.nbytes, worth)


def _parents(store: Owner, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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


def _evict_each(store: Store, weighed: Weighed, needed_bytes: int, *, reason: str, refused: set[ExtentId]) -> bool:
    """Remove the least worthy extents. False where everything that may go is not enough; then nothing went."""
    wanted = store.capacity_bytes // _SHARE
    chosen = choose_victims(worth=weighed.worth, nbytes=weighed.nbytes, needed_bytes=needed_bytes, wanted_bytes=wanted)
    if weighed.nbytes[chosen].sum() < needed_bytes:
        return False
    _remove_chosen(store, weighed, chosen, reason=reason, refused=refused)
    return True


def _empty_a_file(store: Store, weighed: Weighed, needed_bytes: int, *, reason: str, refused: set[ExtentId]) -> bool:
    """Where no holes can be made: remove all that is in one file, and write anew before what is worth that. False where no
    file may go; True also where one was found to stay, whose extents are then in `refused`."""
    files = _files_of(store, weighed)
    room_bytes = store.capacity_bytes - store.allocated_bytes - store.slack_bytes if store.marker.held else 0
    chosen = _worth_emptying(store, weighed, files, needed_bytes, room_bytes)
    if chosen is None:  # whole files, each worth as much as what is best in it
        worth = _worth_of_files(weighed, files)
        going = choose_victims(worth=worth, nbytes=files.facts.charged, needed_bytes=needed_bytes)
        if files.facts.charged[going].sum() < needed_bytes:
            return False
        chosen = Emptying(gone=np.flatnonzero(np.isin(files.facts.member, going)), carried=np.empty(0, np.int64))
    carried = [ExtentId(extent) for extent in weighed.ids[chosen.carried].tolist()]
    left = set(carried).difference(store.carry(carried)) if carried else set()
    if left:
        refused |= left
    else:
        _remove_chosen(store, weighed, chosen.gone, reason=reason, refused=refused)
    return True


def _worth_emptying(store: Store, weighed: Weighed, files: _Files, needed_bytes: int, room_bytes: int) -> Emptying | None:
    """Return what is in a file that may go, and what of it is carried elsewhere; None where there is no room for that."""
    if room_bytes < ahead_bytes(store) * 7 // 8:  # journal and folders grow, too
        return None
    appending = {segment.number for segment in store.appending.values()}  # where what is carried is written
    appended = np.array([segment.number in appending for segment in files.segments], np.bool_)
    moved = store.counters.get("moved_bytes")
    saved = store.counters.get("bytes_written") - moved - store.counters.get("joined_bytes")
    return choose_emptying(
        worth=weighed.worth,
        nbytes=weighed.nbytes,
        files=replace(files.facts, stays=files.facts.stays | appended),
        needed_bytes=needed_bytes,
        cold_bytes=store.capacity_bytes // _COLD_SHARE,
        room_bytes=room_bytes,
        budget_bytes=max(0, int(_MOVED_SHARE * saved) - moved),
    )


def _worth_of_files(weighed: Weighed, files: _Files) -> Worth:
    worth = weighed.worth.of_groups(files.facts.member, len(files.segments))
    return replace(worth, held=worth.held | files.facts.stays)


def ahead_bytes(store: Store) -> int:
    """Return how much is kept free beside what is needed: where no holes can be made, to write anew what is worth it before
    its file goes."""
    if store.holes:
        return 0
    with store.lock:
        largest = max((segment.capacity_bytes for segment in store.books.segments.values()), default=0)
    return min(largest // 2, store.capacity_bytes // _AHEAD_SHARE)


@dataclass(frozen=True, slots=True)
class _Files:
    """The files that weighed extents lie in. Those stay that are appended to, or hold what may not go."""

    segments: list[Segment]
    facts: Files


def _files_of(store: Store, weighed: Weighed) -> _Files:
    numbers, member = np.unique(weighed.segments, return_inverse=True)
    segments = [store.books.numbered(int(number)) for number in numbers]
    waiting = {segment.number for segment, _, _ in store.waiting}
    stays = np.array([not segment.settled or segment.number in waiting for segment in segments], np.bool_)
    stays[member[weighed.worth.held]] = True
    charged = np.array([segment.allocated_bytes for segment in segments], np.int64)
    return _Files(segments, Files(member, charged, stays))


def _remove_chosen(
    store: Store, weighed: Weighed, chosen: npt.NDArray[np.int64], *, reason: str, refused: set[ExtentId]
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
    give_back_left(store)
    weighed = weigh(store, set())
    files = _files_of(store, weighed)
    promised = weighed.worth.promised_ms > store.now_ms()
    worth = _worth_of_files(weighed, files)
    for place in choose_victims(
        worth=worth, nbytes=files.facts.charged, needed_bytes=1 + int(files.facts.charged.sum())
    ).tolist():
        if start - store.allocated_bytes >= needed_bytes:
            return
        segment, inside = files.segments[place], files.facts.member == place
        with alone(store, segment, segment.header_bytes, max(segment.end - segment.header_bytes, 1)) as handle:
            if handle is None:
                continue
            with contextlib.suppress(OSError):
                store.disk.truncate(handle, 0)  # as `_empty` does
            unlink(store, segment)  # whoever appends to it finds it gone, and begins another
        if segment.gone:
            store.counters.add("evicted_capacity", int(np.count_nonzero(inside)))
            store.promises.broken(weighed.nbytes[inside & promised].tolist())
