"""The disk tier: a directory of segments and journals behind the verbs of `tier.base`.

Lookups are in memory. Writing is `store`, opening is `recovery`; here are leases, reads, and what other processes on the same
directory did meanwhile. Verification is not: bytes are handed out as they lie, and whoever reads them checks them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Literal, Self

from headstart.block.checks import PLAIN
from headstart.block.extent import decode_header
from headstart.block.representation import Representation
from headstart.errors import HeadstartError, StoreError, TierUnavailable
from headstart.metrics import Counters
from headstart.policy.retention import Retention
from headstart.tier.base import (
    DEFAULT_TERMS,
    MOVED,
    ExtentId,
    ExtentInfo,
    Gone,
    OnChange,
    Placement,
    Problem,
    RawExtents,
    ReadRange,
    Shape,
    Terms,
    TierStatistics,
    WriteOutcome,
)
from headstart.tier.disk.books import Removal
from headstart.tier.disk.check import check_files, check_store
from headstart.tier.disk.directory import MARKER, Directory, unavailable
from headstart.tier.disk.door import Disk, RealDisk
from headstart.tier.disk.doubles import JOINED
from headstart.tier.disk.follow import Others
from headstart.tier.disk.new_record import UNPLACED, record_of, require_short
from headstart.tier.disk.only_read import open_to_read
from headstart.tier.disk.pause import FULL, ONLY_READABLE
from headstart.tier.disk.reading import Reading
from headstart.tier.disk.records import (
    PREFIX_BYTES,
    USES,
    Record,
    SegmentName,
)
from headstart.tier.disk.recovery import recover
from headstart.tier.disk.removal import QUARANTINE
from headstart.tier.disk.segment import SegmentHeader, segment_capacity
from headstart.tier.disk.store import Store
from headstart.tier.disk.table import Segment
from headstart.tier.disk.tending import Tending
from headstart.tier.surveying import ROWS, Survey

DAY_MS = 86_400_000
MIN_CAPACITY_BYTES = 1 << 20
REFRESH_INTERVAL_S = 0.05
_SCAN_ROWS = 2048  # some milliseconds
_MOVING_AT = 1 << 40  # a byte of the marker that never is: whoever moves extents to another tier locks it
FOLLOW_S = 1.0  # how long a lease waits for its look at what other processes did
CHANGE_FOLLOW_S = 5.0  # and a change: where the disk is slow, too, something must get stored
ELSEWHERE = (JOINED, MOVED)  # why extents went whose blocks are still there


class DiskTier:
    """Use `DiskTier.open`. Safe from many threads; several processes may have the same directory open."""

    name = "disk"
    trusted = False
    sealing = PLAIN
    in_memory = False
    refresh_interval_s = REFRESH_INTERVAL_S  # how long what is not found counts as not there
    refresh_wait_s = 0.0  # how long another thread's look at the others' journals is waited for

    def __init__(self, store: Store, others: Others, *, bypasses_page_cache: bool, clock: Callable[[], float]) -> None:
        self.bypasses_page_cache = bypasses_page_cache
        self._store = store
        self._others = others
        self._clock = clock
        self._counters = store.counters
        self._closed = False
        self._refreshing = Lock()  # one thread follows the other journals at a time
        self._known = 0  # records of other processes that were taken over
        self._look_due = clock() + self.refresh_interval_s
        self._reading = Reading(store, follow=lambda: self._follow(wait_s=FOLLOW_S))
        self._tending = Tending(store, self)
        store.follow = lambda: self._follow(wait_s=CHANGE_FOLLOW_S)
        store.sync_others = self._sync_others

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        capacity_bytes: int,
        min_free_bytes: int = 0,
        durability: Literal["none", "data"] = "none",
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        retention: Retention | None = None,
    ) -> Self:
        """Open or create a cache directory and find again what it holds. Nothing is stored that would leave less than
        `min_free_bytes` to others on its file system, and nothing at all where there is a cache that may only be read. Raises
        FormatMismatch, TierUnavailable."""
        if capacity_bytes < MIN_CAPACITY_BYTES:
            raise ValueError(f"a disk tier of {capacity_bytes} bytes holds nothing; give at least {MIN_CAPACITY_BYTES}")
        disk = RealDisk() if disk is None else disk
        place, counters = Directory(disk, directory), Counters()
        retention = Retention() if retention is None else retention
        try:
            place.prepare()
            direct = _probe(disk, place)
            store, others = recover(
                disk,
                place,
                capacity_bytes=capacity_bytes,
                min_free_bytes=min_free_bytes,
                sync=durability == "data",
                clock=clock,
                wall_clock=wall_clock,
                counters=counters,
                retention=retention,
            )
        except (OSError, TierUnavailable) as error:
            refused = unavailable(directory, error) if isinstance(error, OSError) else error
            if refused.facts.get("errno") not in ONLY_READABLE:
                raise refused from error
            try:
                store, others = open_to_read(
                    disk,
                    place,
                    why=os.strerror(refused.errno),
                    capacity_bytes=capacity_bytes,
                    clock=clock,
                    wall_clock=wall_clock,
                    counters=counters,
                    retention=retention,
                )
            except (OSError, HeadstartError):  # there is none, or it may not be read either
                raise refused from error
            return cls(store, others, bypasses_page_cache=False, clock=clock)
        except StoreError as error:
            message = f"cache directory {directory} cannot be used ({error}); try again, or choose another directory"
            facts = {"reason": error.facts.get("reason"), "why": error.message}
            raise TierUnavailable(message, tier=cls.name, path=directory, **facts) from error
        tier = cls(store, others, bypasses_page_cache=direct, clock=clock)
        store.counters.add("marker_rewritten", place.rewritten)
        store.make_room()
        return tier

    def max_extent_bytes(self, representation: Representation, *, state_bytes: int = 0) -> int:
        """Return the largest image that `write` takes: an extent never spans segments."""
        capacity = segment_capacity(representation, capacity_bytes=self._store.capacity_bytes)
        header = SegmentHeader(UNPLACED.segment, capacity, 0, representation.encode(), representation.digest)
        return capacity - header.header_bytes

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> Placement:
        self._require_open()
        known, found = self._known, self._located(representation, keys)
        if self._clock() >= self._look_due and not found.holds(state=found.states is not None and bool(keys)):
            self.refresh()
            if self._known != known:
                found = self._located(representation, keys)
        return found

    def info(self, extent: ExtentId) -> ExtentInfo | None:
        self._require_open()
        with self._store.lock:
            row = self._store.books.row(extent)
            return None if row is None else self._store.books.info(row, now_ms=self._store.now_ms())

    def shape(self, extent: ExtentId) -> Shape | None:
        self._require_open()
        with self._store.lock:
            row = self._store.books.row(extent)
            return None if row is None else self._store.books.shape(row)

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        self._require_open()
        return self._reading.lease(extents)

    def release(self, extents: Sequence[ExtentId]) -> None:
        self._reading.release(extents)

    def read(self, reads: Sequence[ReadRange]) -> int:
        self._require_open()
        return self._reading.read(reads)

    def raw(self, extents: Sequence[ExtentId]) -> RawExtents | None:
        return None if self._closed else self._reading.raw(extents)

    def let_go_raw(self, raw: RawExtents, *, bytes_read: int) -> None:
        self._reading.let_go_raw(raw, bytes_read=bytes_read)

    def write(self, image: memoryview, representation: Representation, *, terms: Terms = DEFAULT_TERMS) -> WriteOutcome:
        self._require_open()
        require_short(terms.retention)
        header = decode_header(image, representation)
        if image.nbytes > self.max_extent_bytes(representation):
            self._counters.add("write_failed_too-large")
            return WriteOutcome(stored=False, reason="too-large")
        if self._clock() >= self._look_due:
            self.refresh()
        added = record_of(image, header, representation, terms, steady_ms=self._store.steady_ms)
        outcome = self._store.add(image, representation, added, keys=header.keys)
        if outcome.stored:
            self.keep(self.locate(representation.digest, header.keys).ids(), terms)
        return outcome

    def touch(self, extents: Sequence[ExtentId]) -> None:
        self._require_open()
        if self._store.only_read:
            return
        self._store.touch(extents)
        self._tending.joiner.note_use(extents)

    @property
    def uses(self) -> int:
        """The counter of uses. It may be raised: directories that are one tier count together."""
        return self._store.books.counter

    def count_uses_from(self, uses: int) -> None:
        with self._store.lock:
            self._store.books.counter = max(self._store.books.counter, min(uses, USES - 2))

    def removed(self, representation: bytes, keys: Sequence[bytes], *, before_ms: int) -> list[Gone | None]:
        self.refresh()
        books = self._store.books
        with self._store.lock:  # a copy: what is looked through may be a million blocks
            removals = [one for one in books.removals if one.time_ms <= before_ms and one.reason not in ELSEWHERE]
            of = {segment: books.segments.get(segment) for segment in {one.extent.segment for one in removals}}
        return gone_of(removals, of, representation, keys)

    def representations(self) -> list[bytes]:
        with self._store.lock:
            return list(self._store.books.representations)

    def representation(self, digest: bytes) -> Representation | None:
        """Return the representation of which extents are or were here."""
        with self._store.lock:
            encoded = self._store.books.representations.get(digest)
        return None if encoded is None else Representation.decode(encoded)

    def resize(self, capacity_bytes: int, *, whole_bytes: int | None = None) -> None:
        """Keep to another capacity from now on. `whole_bytes`: what the tier may hold that this directory is a part of; quotas
        are meant of all of it."""
        self._store.capacity_bytes, self._store.whole_bytes = capacity_bytes, whole_bytes
        self._store.make_room()

    @property
    def only_read(self) -> bool:
        """Whether it was opened where nothing may be changed."""
        return self._store.only_read

    @property
    def room_bytes(self) -> int:
        """How much could be written without evicting anything."""
        return max(0, self._store.capacity_bytes - self._store.allocated_bytes)

    def probe(self) -> None:
        """Write, read back and remove a block. Raises OSError where the medium refuses."""
        self._store.disk.probe(self._store.directory.journals)

    def keep(self, extents: Sequence[ExtentId], terms: Terms) -> None:
        self._require_open()
        require_short(terms.retention)
        if not self._store.only_read:
            self._store.promises.keep(extents, terms)

    def settle(self) -> None:
        """Return when all that was promised is written down. Raises StoreError, OSError where it is not."""
        self._require_open()
        with self._store.turn() as mine:
            if not mine:
                raise StoreError(
                    f"disk tier {self._store.directory.root} cannot be written to now", reason="stopped", tier=self.name
                )
            self._store.promises.flush(at_last=True)

    def pin(self, extents: Sequence[ExtentId], *, until_ms: int | None) -> list[bool]:
        self._require_open()
        return self._store.promises.pin(extents, until_ms)

    def unpin(self, extents: Sequence[ExtentId]) -> None:
        self._require_open()
        self._store.promises.pin(extents, 0)

    def watch(self, on_change: OnChange) -> None:
        with self._store.lock:
            self._store.books.on_change = on_change

    def take_up_all(self) -> None:
        """Have `tend` join whatever is short, and not only what this process has seen used."""
        self._require_open()
        self._tending.joiner.take_up_all()

    def tend(self) -> bool:
        self._require_open()
        if self._clock() >= self._look_due:
            self.refresh()
        return self._tending.step()

    @contextmanager
    def moving(self) -> Iterator[bool]:
        """Keep other processes from moving extents to another tier; False where one is at it. Raises OSError."""
        disk = self._store.disk
        handle = disk.open(self._store.directory.root / MARKER, "write")
        try:
            yield disk.lock_range(handle, _MOVING_AT, 1, exclusive=True)
        finally:
            with suppress(OSError):  # the lock ends with it
                disk.close(handle)

    def delete(self, extents: Sequence[ExtentId], *, reason: str) -> int:
        self._require_open()
        require_short(reason)
        self.refresh()  # what another process removed meanwhile is gone, and what it pinned stays
        if reason != QUARANTINE:
            extents = self._store.promises.unpinned(extents)
        return self._store.remove(extents, reason=reason)

    def refresh(self) -> None:
        """Take over what other processes did to the directory since the last look, removing it included."""
        self._look_due = self._clock() + self.refresh_interval_s
        self._store.recreate_if_lost()
        self._follow(wait_s=self.refresh_wait_s)

    def survey(self) -> Iterator[Survey]:
        self._require_open()
        store = self._store
        yield from store.books.in_steps(
            store.lock, ROWS, lambda rows: store.books.survey(rows, self.name, now_ms=store.now_ms())
        )

    def scan(self) -> Iterator[ExtentInfo]:
        self._require_open()
        store = self._store
        steps = store.books.in_steps(store.lock, _SCAN_ROWS, lambda rows: store.books.infos(rows, now_ms=store.now_ms()))
        return iter([info for step in steps for info in step])

    def removals(self) -> list[Removal]:
        """Return the latest removals that are remembered, oldest first: evicted is not the same as never written."""
        with self._store.lock:
            return sorted(self._store.books.removals, key=lambda removal: removal.time_ms)

    def statistics(self) -> TierStatistics:
        store = self._store
        with store.lock:
            return TierStatistics(
                name=self.name,
                capacity_bytes=store.capacity_bytes,
                allocated_bytes=store.allocated_bytes,
                live_bytes=store.books.live_bytes,
                extents=store.books.extents,
                blocks=store.books.blocks,
                written_day_bytes=store.books.bytes_since(store.now_ms() - DAY_MS),
                counters=self._counters.snapshot(),
                live_bytes_by_class=store.books.bytes_by_class(),
                live_bytes_by_tenant=store.books.bytes_by_tenant(),
                paused=store.paused,
            )

    def check(self) -> list[Problem]:
        self._require_open()
        self.refresh()
        if self._store.only_read:
            return check_files(self._store)
        root = self._store.directory.root
        try:
            with self._store.turn() as mine, self._store.alone() as alone:  # nothing is added or evicted meanwhile
                if mine and alone and self._follow(wait_s=FOLLOW_S):
                    return check_store(self._store)
        except OSError as error:
            return [Problem(str(root), f"the directory cannot be read: {error}")]
        return [Problem(str(root), "a write did not end in time; nothing was compared")]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._reading.close()
        self._store.close()
        self._tending.close()
        with self._refreshing:
            self._others.close()

    def __repr__(self) -> str:
        return f"<DiskTier {self._store.directory.root} of {self._store.capacity_bytes} bytes>"

    def _located(self, representation: bytes, keys: Sequence[bytes]) -> Placement:
        with self._store.lock:
            extents, positions = self._store.books.locate(representation, keys)
            return Placement(extents, positions, self._store.books.states(representation, keys))

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"disk tier {self._store.directory.root} is closed", reason="closed", tier=self.name)

    def _follow(self, *, wait_s: float = 0) -> bool:
        """Take over what other processes journalled up to now. False where that could not be read, or another thread was at
        it for too long."""
        if not (self._refreshing.acquire(timeout=wait_s) if wait_s else self._refreshing.acquire(blocking=False)):
            return False
        try:
            if self._closed:
                return False
            self._take_over(self._others.poll())
            self._take_over(self._others.look_for_new())
        except OSError:
            self._counters.add("refresh_failed")
            return False
        finally:
            self._refreshing.release()
        return True

    def _sync_others(self) -> bool:
        """Sync the journals of other processes. False where another thread was at them for too long. Raises OSError."""
        if not self._refreshing.acquire(timeout=FOLLOW_S):
            return False
        try:
            self._others.sync()
        finally:
            self._refreshing.release()
        return True

    def _take_over(self, records: Sequence[Record]) -> None:
        with self._store.lock:
            self._store.books.apply(records, own=False, now_ms=self._store.now_ms())
            self._known += len(records)
            self._store.other_journals_bytes = self._others.allocated_bytes
            self._store.incomplete = self._others.incomplete


def _probe(disk: Disk, place: Directory) -> bool:
    try:
        return disk.probe(place.journals)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return False  # a full disk can still be read, if what is there can be taken over without a byte more


def gone_of(
    removals: Iterable[Removal], of: Mapping[SegmentName, Segment | None], representation: bytes, keys: Sequence[bytes]
) -> list[Gone | None]:
    """Return for each key which of `removals` took it away last. `of`: the segments that they were in."""
    wanted = {key[:PREFIX_BYTES] for key in keys}
    gone: dict[bytes, Gone] = {}
    for one in sorted(removals, key=lambda removal: removal.time_ms):
        segment = of[one.extent.segment]
        if segment is None or segment.representation in (b"", representation):
            found = wanted.intersection(_prefixes(one.prefixes))
            gone.update(dict.fromkeys(found, Gone(one.time_ms, one.reason)))
    return [gone.get(key[:PREFIX_BYTES]) for key in keys]


def _prefixes(joined: bytes) -> Iterator[bytes]:
    return (joined[at : at + PREFIX_BYTES] for at in range(0, len(joined), PREFIX_BYTES))
