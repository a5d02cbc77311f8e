"""The pool tier: a directory on a shared file system behind the verbs of `tier.base`.

Lookups and leases are in memory. Reads go to the file system on the caller's thread; all else that touches it is done by three
threads of the tier's own: one follows the other machines, one looks after the pool, one changes what it is asked to. So a mount
that hangs costs a miss and a counter, and what one machine saved is found in time however long collecting takes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import TypeVar

import numpy as np

from headstart.block.checks import PLAIN, Sealing
from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.representation import Representation
from headstart.block.whole import resealed
from headstart.errors import StoreError, TierUnavailable
from headstart.metrics import Counters
from headstart.policy.retention import Retention
from headstart.tier.base import (
    DEFAULT_TERMS,
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
from headstart.tier.disk.directory import KEYED, POOL, Directory, unavailable
from headstart.tier.disk.door import Disk, RealDisk
from headstart.tier.disk.new_record import UNPLACED, record_of, require_short
from headstart.tier.disk.pause import ONLY_READABLE
from headstart.tier.disk.records import ExtentAdded
from headstart.tier.disk.removal import QUARANTINE
from headstart.tier.disk.segment import SegmentHeader
from headstart.tier.disk.tier import DAY_MS, ELSEWHERE, MIN_CAPACITY_BYTES, gone_of
from headstart.tier.lookup_thread import Late, LookupThread
from headstart.tier.pool.check import check_pool
from headstart.tier.pool.collecting import Collector
from headstart.tier.pool.reading import PoolReading
from headstart.tier.pool.room import pool_segment_capacity
from headstart.tier.pool.shared_disk import SharedDisk
from headstart.tier.pool.store import Around, Attempt, Image, PoolStore
from headstart.tier.pool.terms import Election
from headstart.tier.pool.terms import Terms as CollectorTerms
from headstart.tier.pool.timing import Timing
from headstart.tier.surveying import ROWS, Survey

T = TypeVar("T")
_SCAN_ROWS = 2048
_TURN_S = 0.3  # how long following waits for a write

log = logging.getLogger(__name__)


class PoolTier:
    """Use `PoolTier.open`. Safe from many threads; any number of processes, on any number of machines, may have it open."""

    name = "pool"
    trusted = False
    in_memory = False
    # What it is called, and what to do where it is not there or silent: told in messages.
    _called, _medium = "pool", "file system"
    _opens_within = 1  # times what an answer takes
    _slowest_bytes_s = 4 << 20  # what writes slower than that hangs
    _to_make, _to_mend = "mount its file system, or make the directory", "look after its mount"

    def __init__(self, store: PoolStore, terms: Election, collector: Collector) -> None:
        self.path = store.directory.root
        self.sealing = store.sealing
        self._store = store
        self._terms = terms
        self._collector = collector
        self._counters = store.counters
        self._reading = PoolReading(store)
        self._changes = LookupThread(f"{self.name}-changes")
        self._ending = Event()
        self._background: list[Thread] = []
        self._looked = False  # the last look at the others' journals succeeded
        self._collect_due = store.clock()
        self._around: Around | None = None  # as listed, until a turn comes that uses it
        self._said_silent = self._said_hidden = False
        self._closed = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        capacity_bytes: int,
        timing: Timing | None = None,
        read_only: bool = False,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        retention: Retention | None = None,
        sealing: Sealing = PLAIN,
        background: bool = True,
    ) -> PoolTier:
        """Open a pool, or begin one in a directory that is there. `background`: follow the others, and collect where that is
        this process's turn, in a thread; without it whoever owns the tier calls `step`. `sealing`: whose checks are
        believed, and which are made. Raises TierUnavailable, FormatMismatch; where the mount does not answer, after
        `timing.answer_s`."""
        if capacity_bytes < MIN_CAPACITY_BYTES:
            raise ValueError(f"a pool of {capacity_bytes} bytes holds nothing; give at least {MIN_CAPACITY_BYTES}")
        timing = Timing() if timing is None else timing
        shared = SharedDisk(RealDisk() if disk is None else disk)
        directory = Directory(shared, path, features=frozenset({POOL}))
        store = PoolStore(
            shared,
            directory,
            capacity_bytes=capacity_bytes,
            timing=timing,
            clock=clock,
            wall_clock=wall_clock,
            counters=Counters(),
            retention=Retention() if retention is None else retention,
            read_only=read_only,
            sealing=sealing,
        )
        terms = CollectorTerms(shared, directory, silent_s=store.writers.silent_s, term_s=timing.term_s, clock=clock)
        tier = cls(store, terms, Collector(store, terms))
        tier._begin(background=background)
        return tier

    def _begin(self, *, background: bool) -> None:
        """Take part, with threads if so wished. Raises TierUnavailable, FormatMismatch."""
        try:
            self._ask(self._open, patience_s=self._opens_within * self._store.timing.answer_s, late="open_timed_out")
        except OSError as error:
            self._end_threads(0.0)
            raise self._unavailable(error) from error
        except BaseException:
            self._end_threads(0.0)
            raise
        if background:
            for name, act in (("follow", self._look), ("collect", self._look_after)):
                self._background.append(Thread(target=self._work, args=(act,), name=f"{self.name}-{name}", daemon=True))
                self._background[-1].start()

    def _unavailable(self, error: OSError) -> TierUnavailable:
        return unavailable(self.path, error)

    def _open(self) -> None:
        store = self._store
        try:
            store.disk.entries(self.path)
        except FileNotFoundError:
            raise TierUnavailable(
                f"{self._called} {self.path} is not there; {self._to_make}", tier=self.name, path=self.path
            ) from None
        if not store.read_only:
            try:
                store.directory.prepare()
                if store.sealing.has_key:
                    store.directory.mark(KEYED)
                self._terms.prepare()
                store.register()
            except (OSError, TierUnavailable) as error:
                number = error.errno if isinstance(error, OSError) else error.facts.get("errno")
                if number not in ONLY_READABLE:
                    raise
                log.warning("%s %s may only be read (%s)", self._called, self.path, os.strerror(number))
                store.read_only = True
        if store.read_only:
            store.directory.require()
            store.files.only_read()
            store.pauses.begin_for_good("it may only be read")
        store.load()
        self._say_hidden()
        if not store.read_only:
            store.make_room = self._collector.make_room
            self._collect(wait=True)

    # The verbs of a tier.

    def max_extent_bytes(self, representation: Representation, *, state_bytes: int = 0) -> int:
        """Return the largest image that `write` takes: an extent never spans segments."""
        capacity = pool_segment_capacity(representation, capacity_bytes=self._store.capacity_bytes)
        return (
            capacity - SegmentHeader(UNPLACED.segment, capacity, 0, representation.encode(), representation.digest).header_bytes
        )

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> Placement:
        self._require_open()
        store = self._store
        if not store.fresh:  # nothing could be leased
            self._counters.add("locate_refused_silent")
            return Placement(np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.int32))
        with store.lock:
            extents, positions = store.books.locate(representation, keys)
            states, refused = store.books.states(representation, keys), 0
            if store.books.any_hidden:
                refused = store.books.hidden(representation, [keys[i] for i in np.flatnonzero(extents < 0).tolist()])
        if refused:
            self._counters.add("locate_refused_key", refused)
        return Placement(extents, positions, states)

    def hidden_since(self, representation: bytes, keys: Sequence[bytes]) -> list[int | None]:
        """See `KeyedTier`."""
        self._require_open()
        with self._store.lock:
            return self._store.books.hidden_since(representation, keys)

    def info(self, extent: ExtentId) -> ExtentInfo | None:
        self._require_open()
        with self._store.lock:
            row = self._store.books.row(extent)
            return None if row is None else self._store.books.info(row, now_ms=self._store.now_ms())

    def shape(self, extent: ExtentId) -> Shape | None:
        self._require_open()
        held = self._reading.shape(extent)
        if held is not None:
            return held
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
        """See `RawTier`."""
        return None if self._closed else self._reading.raw(extents)

    def let_go_raw(self, raw: RawExtents, *, bytes_read: int) -> None:
        """See `RawTier`."""
        self._reading.let_go_raw(raw, bytes_read=bytes_read)

    def write(self, image: memoryview, representation: Representation, *, terms: Terms = DEFAULT_TERMS) -> WriteOutcome:
        self._require_open()
        require_short(terms.retention)
        store = self._store
        header = decode_header(image, representation, store.sealing.at_the_door())
        if image.nbytes > self.max_extent_bytes(representation):
            self._counters.add("write_failed_too-large")
            return WriteOutcome(stored=False, reason="too-large")
        added = record_of(image, header, representation, terms, steady_ms=store.steady_ms)
        if self._changes.stuck:
            return store.refused("stopped")
        parts, added = self._sealed(image, header, representation, added)
        attempt = Attempt()
        try:
            outcome = self._ask(
                lambda: store.add(parts, representation, added, header.keys, attempt),
                patience_s=store.timing.answer_s + image.nbytes / self._slowest_bytes_s,
                late="write_timed_out",
            )
        except StoreError as error:
            if error.facts.get("reason") != "hangs":
                raise
            attempt.given_up = True
            store.pauses.begin(f"the {self._medium} does not answer")
            return WriteOutcome(stored=False, reason="stopped")
        if outcome.stored:
            self.keep(self.locate(representation.digest, header.keys).ids(), terms)
        return outcome

    def write_all(
        self, images: Sequence[memoryview], representation: Representation, *, terms: Sequence[Terms]
    ) -> list[WriteOutcome]:
        """As `write` for several, with one flush for all. Where one is not stored, none behind it is tried or told of."""
        self._require_open()
        store = self._store
        headers = [decode_header(image, representation, store.sealing.at_the_door()) for image in images]
        largest = self.max_extent_bytes(representation)
        if any(image.nbytes > largest for image in images):
            return [self.write(image, representation, terms=its) for image, its in zip(images, terms, strict=True)]
        if self._changes.stuck:
            return [store.refused("stopped")]
        some = []
        for image, header, its in zip(images, headers, terms, strict=True):
            added = record_of(image, header, representation, its, steady_ms=store.steady_ms)
            some.append((*self._sealed(image, header, representation, added), header.keys))
        attempt = Attempt()
        try:
            outcomes = self._ask(
                lambda: store.add_all(some, representation, attempt),
                patience_s=store.timing.answer_s + sum(image.nbytes for image in images) / self._slowest_bytes_s,
                late="write_timed_out",
            )
        except StoreError as error:
            if error.facts.get("reason") != "hangs":
                raise
            attempt.given_up = True
            store.pauses.begin(f"the {self._medium} does not answer")
            return [WriteOutcome(stored=False, reason="stopped")]
        for outcome, header, its in zip(outcomes, headers, terms, strict=False):
            if outcome.stored:
                self.keep(self.locate(representation.digest, header.keys).ids(), its)
        return outcomes

    def _sealed(
        self, image: memoryview, header: ExtentHeader, representation: Representation, added: ExtentAdded
    ) -> tuple[Image, ExtentAdded]:
        """Return an image, in parts, and its record with the checks that are made here. Raises ExtentCorrupt."""
        algorithm = self.sealing.writes
        if header.algorithm == algorithm:
            return [image], added
        front = resealed(image, header, representation, algorithm)
        return [front, image[front.nbytes :]], replace(added, check_key=algorithm.key_id)

    def touch(self, extents: Sequence[ExtentId]) -> None:
        self._require_open()
        if not self._store.read_only:
            self._store.touch(extents)

    def keep(self, extents: Sequence[ExtentId], terms: Terms) -> None:
        self._require_open()
        require_short(terms.retention)
        if not self._store.read_only:
            self._store.promises.keep(extents, terms)

    def settle(self) -> None:
        """Return when all that was promised is written down. Raises StoreError, OSError where it is not."""
        self._require_open()
        self._ask(self._settle, late="write_timed_out")

    def _settle(self) -> None:
        with self._store.turn() as mine:
            if not mine:
                raise StoreError(f"{self._called} {self.path} cannot be written to now", reason="stopped", tier=self.name)
            self._store.promises.flush()

    def pin(self, extents: Sequence[ExtentId], *, until_ms: int | None) -> list[bool]:
        self._require_open()
        return self._ask(lambda: self._store.promises.pin(extents, until_ms), late="pin_timed_out")

    def unpin(self, extents: Sequence[ExtentId]) -> None:
        self.pin(extents, until_ms=0)

    def delete(self, extents: Sequence[ExtentId], *, reason: str) -> int:
        self._require_open()
        require_short(reason)
        return self._ask(lambda: self._delete(extents, reason), late="delete_timed_out")

    def removed(self, representation: bytes, keys: Sequence[bytes], *, before_ms: int) -> list[Gone | None]:
        books = self._store.books
        with self._store.lock:
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

    def watch(self, on_change: OnChange) -> None:
        with self._store.lock:
            self._store.books.on_change = on_change

    def tend(self) -> bool:
        """The tier tends itself, whether or not anybody has time for it."""
        return False

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

    def statistics(self) -> TierStatistics:
        store = self._store
        allocated_bytes = store.allocated_bytes
        with store.lock:
            return TierStatistics(
                name=self.name,
                capacity_bytes=store.capacity_bytes,
                allocated_bytes=allocated_bytes,
                live_bytes=store.books.live_bytes,
                extents=store.books.extents,
                blocks=store.books.blocks,
                written_day_bytes=store.books.bytes_since(store.now_ms() - DAY_MS),
                counters=self._counters.snapshot(),
                live_bytes_by_class=store.books.bytes_by_class(),
                live_bytes_by_tenant=store.books.bytes_by_tenant(),
                paused=self._why_silent() or store.pauses.why,
            )

    def check(self) -> list[Problem]:
        self._require_open()
        return self._ask(lambda: check_pool(self._store), patience_s=60.0, late="check_timed_out")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._end_threads(self._store.timing.answer_s)

    # What the tier's own threads do.

    def step(self) -> None:
        """Follow the others once, and do what is due."""
        self._look()
        self._look_after()

    def _look(self) -> None:
        """Follow the others once. An error is a counter, and a reason to find nothing for a while."""
        store = self._store
        try:
            store.follow()
            self._looked = True
            self._say_hidden()
        except (OSError, StoreError) as error:
            self._looked = False
            self._counters.add("look_failed")
            log.debug("%s %s: %s", self._called, self.path, error)
        if store.fresh == self._said_silent:
            self._said_silent = not self._said_silent
            log.warning(
                "%s %s: %s",
                self._called,
                self.path,
                "it does not answer; nothing is found in it" if self._said_silent else "it answers again",
            )

    def _look_after(self) -> None:
        """Collect where that is due, and the others' journals could be read just now. An error is a counter."""
        try:
            if self._looked and self._store.fresh:
                self._collect()
        except (OSError, StoreError) as error:
            self._counters.add("collect_failed")
            log.debug("%s %s: %s", self._called, self.path, error)

    def _say_hidden(self) -> None:
        """Tell, once, that there is what this process does not believe, and what to do."""
        if self._said_hidden:
            return
        with self._store.lock:
            keys = self._store.books.hidden_keys()
        if not keys:
            return
        self._said_hidden = True
        if not self.sealing.has_key:
            what = "is keyed, so what others write there is not read; give the file with its key as cache.check_key_file"
        elif keys == {0}:
            what = "holds what was written without its key; none of it is read, and it goes as other things do"
        else:
            what = "holds what was written with a key that is not in cache.check_key_file; none of it is read"
        log.warning("%s %s %s", self._called, self.path, what)

    @property
    def collects(self) -> bool:
        """Whether this process is the one that collects."""
        return self._collector.holds

    def _work(self, act: Callable[[], None]) -> None:
        while not self._ending.wait(self._store.timing.look_s):
            try:
                act()
            except Exception:
                self._counters.add("step_errors")
                log.exception("%s %s: a thread of its own met what it did not expect", self._called, self.path)

    def _collect(self, *, wait: bool = False) -> None:
        store = self._store
        if store.read_only or store.clock() < self._collect_due:
            return
        due = store.clock() >= store.list_due or self._collector.wants_listing
        if due and self._around is None:
            self._around = store.look_around()
        with store.turn(wait_s=1.0 if wait else _TURN_S) as mine:
            if mine:
                self._collect_due = store.clock() + store.timing.collect_s
                around, self._around = self._around, None
                store.upkeep(around)
                self._collector.step(around)

    def _delete(self, extents: Sequence[ExtentId], reason: str) -> int:
        store = self._store
        with store.turn() as mine:
            if not mine:
                return 0
            if reason == QUARANTINE:
                extents = [extent for extent in extents if self._is_wrong(extent)]
                self._reading.forget(extents)
            else:
                extents = store.promises.unpinned(extents)
            try:
                removed = store.remove(extents, reason=reason)
            except OSError:
                self._counters.add("remove_failed")
                return 0
            self._counters.add(f"quarantined_{reason}" if reason == QUARANTINE else f"removed_{reason}", len(removed))
            return len(removed)

    def _is_wrong(self, extent: ExtentId) -> bool:
        """Whether an extent is corrupt for all, and not only came late here; that one is taken up again under another id."""
        try:
            right = self._reading.is_right(extent)
        except OSError:
            return False
        except (MemoryError, ValueError):  # no extent is so long: somebody made its record up
            return True
        if right:
            with self._store.lock:
                row = self._store.books.row(extent)
                if row is not None:
                    self._counters.add("late_bytes")
                    self._store.books.enter_again(row)
        return right is False

    def _ask(self, work: Callable[[], T], *, patience_s: float | None = None, late: str) -> T:
        """Have something done by the thread that changes. Raises StoreError("hangs") where that takes too long."""
        try:
            return self._changes.ask(work, patience_s=self._store.timing.answer_s if patience_s is None else patience_s)
        except Late:
            self._counters.add(late)
            raise StoreError(
                f"{self._called} {self.path} does not answer; {self._to_mend}", reason="hangs", tier=self.name, path=self.path
            ) from None

    def _end_threads(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._ending.set()
        for thread in self._background:
            thread.join(max(0.0, deadline - timeout_s / 2 - time.monotonic()))  # one that lists may take long
        try:
            self._ask(
                self._close_store,
                patience_s=max(0.0, deadline - time.monotonic()) if timeout_s else 1.0,
                late="close_timed_out",
            )
        except (OSError, StoreError) as error:
            log.warning("%s %s was not closed well (%s)", self._called, self.path, error)
        self._changes.close(max(0.0, deadline - time.monotonic()))

    def _close_store(self) -> None:
        if not self._store.read_only and not self._store.forked:
            self._collector.resign()
        self._store.close()

    def _why_silent(self) -> str:
        return "" if self._store.fresh else f"the {self._medium} does not answer"

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self._called} {self.path} is closed", reason="closed", tier=self.name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path} of {self._store.capacity_bytes} bytes>"
