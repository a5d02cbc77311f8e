"""What one process at a time does for all: decide what goes, give its space back after the grace, keep journals few.

    chosen → tombstones in the collector's journal → … a grace, by its own clock … → the file is unlinked
    dead writer's journal → what it says is in the collector's own → unlinked

Space comes back with whole files: a segment goes once it is sealed and nothing in it lives. What is worth more than the rest
of a file that goes is written anew first. A new collector begins to count each grace anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headstart.block.representation import Representation
from headstart.block.whole import aligned, examine
from headstart.errors import StoreError
from headstart.policy.eviction import Emptying, Files, choose_emptying, choose_victims
from headstart.tier.base import MOVED, ExtentId
from headstart.tier.disk.directory import Listing
from headstart.tier.disk.evicting import Weighed, not_continued, weigh
from headstart.tier.disk.records import ClassRaised, ExtentName, Pin, Pinned, Raise, Record, SegmentName, SegmentSealed
from headstart.tier.disk.removal import unlink
from headstart.tier.disk.scrub import require_same
from headstart.tier.disk.table import Segment
from headstart.tier.pool.room import reserved
from headstart.tier.pool.store import Around, Attempt, PoolStore
from headstart.tier.pool.terms import Election

CLOCKS_APART_MS = 15 * 60_000  # clocks may differ by so much: no promise is over before it is over by all of them
_HEADROOM_SHARE = 16  # such a part of the capacity is kept free, for what is written within the grace
_QUOTA_SHARE = 8  # of a tenant's quota, for the same
_COLD_SHARE = 40
_MOVED_SHARE = 1 / 8  # of what is saved, at most, is written anew
_EXPIRE_S = 10.0
_BATCH = 256
_TRIES = 4

log = logging.getLogger(__name__)


class Collector:
    """One of a pool; `step` and `make_room` do something only in the process that holds the newest term. Called in turn."""

    def __init__(self, store: PoolStore, terms: Election) -> None:
        self.holds = False
        self._store = store
        self._terms = terms
        self._dead_since: dict[SegmentName, float] = {}
        self._unknown_since: dict[Path, float] = {}  # files that no journal speaks of, and temporary ones
        self._expire_due = self._list_due = store.clock()

    @property
    def wants_listing(self) -> bool:
        """Whether `step` has use for what stands there."""
        return self.holds and self._store.clock() >= self._list_due

    def step(self, around: Around | None) -> None:
        """Do what is due; `around`: what stands there, if that was looked at. Raises OSError, StoreError."""
        store = self._store
        if not self._elected():
            return
        self._unlink_dead()  # first: a full file system has no room for what is said of others
        self._trim_tenants()
        self._expire()
        segment_bytes = self._largest_segment_bytes()
        # One for what is written anew, and with a grace more for what is written until space comes back.
        headroom = segment_bytes if store.empties else 0
        headroom += max(store.capacity_bytes // _HEADROOM_SHARE, segment_bytes) if store.timing.grace_s else 0
        self._free(store.room.reserved_bytes() - self._on_their_way_bytes() + headroom - store.capacity_bytes)
        if around is not None:
            self._list_due = store.clock() + min(store.timing.list_s, max(store.timing.dead_s / 4, store.timing.collect_s))
            self._tidy(around.listing)

    def make_room(self, nbytes: int) -> bool:
        """Free so many bytes at once, for a write that waits; False where this process is not the collector, or where bytes
        have to stay for a grace yet. Raises OSError, StoreError."""
        store = self._store
        if not self.holds:
            return False
        for _ in range(_TRIES):  # what is said of the removed takes some room as well
            self._unlink_dead()
            missing = store.room.reserved_bytes() + nbytes - store.capacity_bytes
            if missing <= 0:
                return True
            self._free(missing - self._on_their_way_bytes())
        return False

    def resign(self) -> None:
        """Let the next one begin at once. Raises OSError."""
        if self.holds:
            self.holds = False
            self._terms.resign(self._store.writer)

    def _elected(self) -> bool:
        held, self.holds = self.holds, self._terms.hold(self._store.writer)
        if self.holds and not held:
            self._dead_since.clear()
            self._unknown_since.clear()
            log.info("%s %s: this process collects from now on", self._store.tier, self._store.directory.root)
            self._store.counters.add("terms_begun")
        return self.holds

    # What goes.

    def _trim_tenants(self) -> None:
        store = self._store
        with store.lock:
            tenants = store.books.bytes_by_tenant()
        for tenant, nbytes in tenants.items():
            quota = store.retention.quota_bytes(tenant, capacity_bytes=store.capacity_bytes, whole_bytes=None)
            if quota is None or nbytes <= quota - quota // _QUOTA_SHARE:
                continue
            weighed = weigh(store, set(), tenant=tenant, early_ms=CLOCKS_APART_MS)
            over = nbytes - (quota - quota // _QUOTA_SHARE)
            chosen = choose_victims(worth=weighed.worth, nbytes=weighed.nbytes, needed_bytes=over)
            self._remove(weighed, chosen, "quota")

    def _expire(self) -> None:
        store = self._store
        if store.clock() < self._expire_due:
            return
        self._expire_due = store.clock() + _EXPIRE_S
        with store.lock:
            over = np.array(store.books.expired(store.now_ms() - CLOCKS_APART_MS), np.int64)
        if len(over):
            gone = store.remove(not_continued(store, over), reason="expired")
            store.counters.add("evicted_expired", len(gone))

    def _free(self, needed_bytes: int) -> None:
        """Have files of so many bytes go, as soon as their grace is over."""
        store, refused = self._store, set[ExtentId]()
        while needed_bytes > 0:
            weighed = weigh(store, refused, early_ms=CLOCKS_APART_MS)
            if not len(weighed.ids):
                return
            segments, chosen = self._choose(weighed, needed_bytes)
            if chosen is None:
                return
            carried = [ExtentId(extent) for extent in weighed.ids[chosen.carried].tolist()]
            touched = weighed.segments[np.concatenate([chosen.gone, chosen.carried])]
            going = [segments[n] for n in np.unique(np.searchsorted(_numbers(weighed), touched)).tolist()]
            if any(not self._carry(extent) for extent in carried):
                refused.update(carried)
                continue
            store.seal([s for s in going if not s.sealed])
            self._remove(weighed, chosen.gone, "capacity")
            with store.lock:
                needed_bytes -= sum(reserved(s) for s in going if not s.rows)
                refused.update(
                    ExtentId(extent)
                    for extent in weighed.ids[chosen.gone].tolist()
                    if store.books.row(ExtentId(extent)) is not None
                )

    def _choose(self, weighed: Weighed, needed_bytes: int) -> tuple[list[Segment], Emptying | None]:
        """Return the files that extents lie in, and what is to go of one or more of them."""
        store = self._store
        numbers = _numbers(weighed)
        member = np.searchsorted(numbers, weighed.segments)
        segments = [store.books.numbered(int(number)) for number in numbers]
        charged = np.array([reserved(segment) for segment in segments], np.int64)
        # What another writer still appends to cannot go; what this one does is sealed first.
        stays = np.array([not (s.sealed or s.recorded) for s in segments], np.bool_)
        stays[member[weighed.worth.held]] = True
        moved = store.counters.get("moved_bytes")
        carrying = {segment.number for (*_, replacing), segment in store.appending.items() if replacing}
        chosen = choose_emptying(
            worth=weighed.worth,
            nbytes=weighed.nbytes,
            files=Files(member, charged, stays | np.array([s.number in carrying for s in segments], np.bool_)),
            needed_bytes=needed_bytes,
            cold_bytes=store.capacity_bytes // _COLD_SHARE,
            room_bytes=self._carrying_room(),
            budget_bytes=max(0, int(_MOVED_SHARE * (store.counters.get("bytes_written") - moved)) - moved),
        )
        if chosen is None:  # whole files, each worth as much as what is best in it
            worth = weighed.worth.of_groups(member, len(segments))
            going = choose_victims(worth=replace(worth, held=worth.held | stays), nbytes=charged, needed_bytes=needed_bytes)
            if len(going):
                chosen = Emptying(gone=np.flatnonzero(np.isin(member, going)), carried=np.empty(0, np.int64))
        return segments, chosen

    def _remove(self, weighed: Weighed, chosen: npt.NDArray[np.int64], reason: str) -> None:
        store = self._store
        promised = {int(i) for i in chosen[weighed.worth.promised_ms[chosen] > store.now_ms() - CLOCKS_APART_MS]}
        for first in range(0, len(chosen), _BATCH):
            part = chosen[first : first + _BATCH]
            gone = set(store.remove([ExtentId(extent) for extent in weighed.ids[part].tolist()], reason=reason))
            store.counters.add(f"evicted_{reason}", len(gone))
            store.promises.broken([int(weighed.nbytes[i]) for i in part if int(i) in promised and int(weighed.ids[i]) in gone])

    # What is worth keeping in a file that goes.

    def _carrying_room(self) -> int:
        """Return what can be carried now: what is left in the file that takes it, or a file's worth where one may be begun."""
        store = self._store
        left = [s.capacity_bytes - s.end for (*_, replacing), s in store.appending.items() if replacing and not s.gone]
        free = store.capacity_bytes - store.room.reserved_bytes()
        segment_bytes = self._largest_segment_bytes()
        return max([*left, segment_bytes // 2 if free >= segment_bytes else 0])

    def _carry(self, extent: ExtentId) -> bool:
        """Write an extent anew and remove the old one. False where there is no room; what is corrupt only goes."""
        store, books = self._store, self._store.books
        with store.lock:
            row = books.row(extent)
            if row is None:
                return True
            record, info, (segment, offset, nbytes) = books.added_record(row), books.info(row), books.place(row)
            kept = books.terms_records([row], now_ms=store.now_ms())
            encoded = books.representations.get(segment.representation)
        if encoded is None:
            return False
        try:
            representation, image = Representation.decode(encoded), aligned(nbytes)
            with store.files.held(segment) as handle:
                store.disk.read(handle, [image], offset)
            if not segment.hidden:  # else whoever has its key verifies it, there as here
                require_same(examine(image, representation, store.sealing), info)
        except (StoreError, MemoryError, ValueError):  # no memory: a length that somebody made up
            store.counters.add("carry_failed")
            return bool(store.remove([extent], reason="corrupt"))
        place = store.write_extent([image], representation, record, attempt=Attempt(), replacing=True)
        if place is None:
            return False
        said = list(map(_renamed, kept, [place] * len(kept)))
        store.append(said)
        with store.lock:
            books.apply(said, own=True)
        store.counters.add("moved_bytes", nbytes)
        return bool(store.remove([extent], reason=MOVED))

    # Space comes back.

    def _on_their_way_bytes(self) -> int:
        """Return what is given back when all graces are over."""
        with self._store.lock:
            return sum(s.end for s in self._dead())

    def _dead(self) -> list[Segment]:
        segments = self._store.books.segments.values()
        return [s for s in segments if s.opened and s.sealed and not s.rows and not s.gone]

    def _unlink_dead(self) -> None:
        store, now = self._store, self._store.clock()
        with store.lock:
            idle = [s for s in store.appending.values() if not s.rows and s.dead]
        store.seal(idle)
        with store.lock:
            dead = self._dead()
        self._dead_since = {s.name: self._dead_since.get(s.name, now) for s in dead}
        due = [s for s in dead if now - self._dead_since[s.name] >= store.timing.grace_s]
        if due and not self._elected():
            return  # it took long since this process last looked
        self._unlink(due)

    def _unlink(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if unlink(self._store, segment):
                self._store.counters.add("segments_collected")

    # What dead writers left.

    def _tidy(self, listing: Listing) -> None:
        store = self._store
        dead = [w for w in list(store.writers.said_at) if self._is_dead(w)]
        if dead:
            self._take_in(dead)
        with store.lock:
            known = {s.name for s in store.books.segments.values() if s.opened}
        strange = [store.directory.segment_path(n) for n in listing.segments - known if n.writer not in listing.journals]
        old = [store.directory.journal_path(w, g) for w, all_of in listing.journals.items() for g in all_of[:-1]]
        self._unlink_after([*strange, *old, *listing.temporary, *self._unreadable()])

    def _unreadable(self) -> Sequence[Path]:
        """Return files that were something once and can never be read again."""
        return ()

    def _is_dead(self, writer: bytes) -> bool:
        silent_s, timing = self._store.writers.silent_s(writer), self._store.timing
        return silent_s is not None and silent_s >= (timing.grace_s if writer in self._store.writers.left else timing.dead_s)

    def _take_in(self, dead: Sequence[bytes]) -> None:
        """Say in the own journal what dead writers' say, and remove theirs."""
        store = self._store
        generations = {writer: store.writers.generation(writer) for writer in dead}
        with store.lock:
            segments = [s for s in store.books.segments.values() if s.opened and not s.gone]
            # Also what journals say that were taken in by a collector that is dead now.
            living = {store.writer, *store.writers.said_at} - set(dead)
            orphaned = [s for s in segments if s.name.writer not in living]
            for segment in orphaned:
                segment.recorded = True
            open_ones = [s for s in orphaned if not s.sealed]
            store.books.apply([SegmentSealed(s.name, s.end) for s in open_ones], own=True)
        store.renew()
        for writer, generation in generations.items():
            if generation is not None:
                with suppress(FileNotFoundError):
                    store.disk.unlink(store.directory.journal_path(writer, generation))
        store.counters.add("journals_taken_in", len(dead))

    def _unlink_after(self, paths: Sequence[Path]) -> None:
        """Remove files that nobody explained for as long as it takes to be taken for dead."""
        store, now = self._store, self._store.clock()
        self._unknown_since = {path: self._unknown_since.get(path, now) for path in paths}
        for path, since in self._unknown_since.items():
            if now - since >= store.timing.dead_s:
                self._end_unexplained(path)

    def _end_unexplained(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            self._store.disk.unlink(path)
        self._store.counters.add("litter_removed")

    def _largest_segment_bytes(self) -> int:
        with self._store.lock:
            return max((s.capacity_bytes for s in self._store.books.segments.values() if s.opened and not s.gone), default=0)


def _numbers(weighed: Weighed) -> npt.NDArray[np.int32]:
    return np.unique(weighed.segments)


def _renamed(record: Record, place: ExtentName) -> Record:
    """Return what was promised of an extent, as of the one that it lies in now."""
    match record:
        case ClassRaised(time_ms, raises):
            return ClassRaised(time_ms, tuple(Raise(place, r.until_ms, r.retention) for r in raises))
        case Pinned(pins):
            return Pinned(tuple(Pin(place, pin.until_ms, pin.counter) for pin in pins))
    return record
