"""The writing side of a pool: what one process adds to files of its own, and what it says in its own journal.

    extent's bytes → flushed → journal → flushed → found under its keys

Nothing is locked on the file system. A writer has a name of its own from opening to closing and never goes on for another
one; who was taken for dead meanwhile, and whose journal was taken in, begins anew under another name.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Lock

from headstart.block.checks import PLAIN, Sealing
from headstart.block.representation import Representation
from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.policy.clock import SteadyClock
from headstart.policy.retention import Retention
from headstart.tier.base import ExtentId, WriteOutcome
from headstart.tier.disk.books import Books
from headstart.tier.disk.bulk import Loaded
from headstart.tier.disk.directory import MARKER, Directory, Listing
from headstart.tier.disk.door import Disk, Handle
from headstart.tier.disk.files import SegmentFiles
from headstart.tier.disk.journal import Journal
from headstart.tier.disk.pause import FULL, Pause, told
from headstart.tier.disk.promises import Promises
from headstart.tier.disk.records import (
    BOUNDARY_STATE,
    WRITER_BYTES,
    ExtentAdded,
    ExtentName,
    Left,
    Record,
    RepresentationDeclared,
    SegmentName,
    SegmentSealed,
    Snapshot,
    Touched,
    milliseconds,
    removed_records,
)
from headstart.tier.disk.segment import SegmentHeader
from headstart.tier.disk.table import Segment
from headstart.tier.pool.follow import Missed, Writers
from headstart.tier.pool.room import MOST_SHARE, Room, pool_segment_capacity
from headstart.tier.pool.timing import Timing

RENEW_BYTES = 1 << 20  # a journal that grew by this much, more than half of it dead, starts anew
TOUCH_INTERVAL_S = 5.0
_USES_A_RECORD = 4096
_TURN_S = 10.0
_LOOKS = 8  # at journals that are renewed meanwhile

log = logging.getLogger(__name__)


Image = Sequence[memoryview]  # of an extent, in parts one behind the other


class Attempt:
    """A write that somebody waits for. Once `given_up`, nothing is said of it any more: its bytes may be others' by now."""

    given_up = False


@dataclass(frozen=True, slots=True)
class Around:
    """What stood there when everything was listed; `known`: the sealed segments that the books knew before."""

    known: Sequence[Segment]
    listing: Listing


class PoolStore:
    """`lock` guards `books` and is never held across I/O; what changes something takes a turn. `followed_at`: up to then all
    journals were read, by `clock`. `list_due`: when everything is to be listed next. `tier`: the name of what it is the store
    of. `empties`: segments hold several extents, so what is worth keeping in one that goes is written anew. `late`: lengths and
    bytes may be seen later than their record."""

    tier = "pool"
    empties = True
    late = True

    def __init__(
        self,
        disk: Disk,
        directory: Directory,
        *,
        capacity_bytes: int,
        timing: Timing,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        counters: Counters,
        retention: Retention,
        read_only: bool,
        sealing: Sealing = PLAIN,
    ) -> None:
        self.disk = disk
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self.timing = timing
        self.clock = clock
        self.counters = counters
        self.retention = retention
        self.read_only = read_only
        self.sealing = sealing
        self.holes = False
        self.lock = Lock()
        self.books = Books(
            retention=retention,
            key_ids=sealing.key_ids,
            largest_bytes=capacity_bytes,
            segment_bytes=capacity_bytes // MOST_SHARE,
        )
        self.files = self._files_of(disk, directory)
        self.writers = Writers(disk, directory, clock=clock, counters=counters)
        self.room = Room(self)
        self.pauses = Pause(directory.root, clock)
        self.appending: dict[tuple[bytes, int, bool], Segment] = {}  # by representation, check key, and whether it replaces
        self.followed_at = float("-inf")
        self.make_room: Callable[[int], bool] = lambda nbytes: False  # the collector's, where this process is it
        self._time = SteadyClock(clock, wall_clock)
        self._turn = Lock()
        self._following = Lock()
        self._process = os.getpid()
        self._closed = False
        self._touched: dict[ExtentName, int] = {}
        self._journal: Journal | None = None
        self._said_at = 0.0
        self._flush_due = clock() + TOUCH_INTERVAL_S
        self._verify_due = clock() + timing.verify_s
        self.list_due = clock() + timing.list_s
        self._renew_at = 0
        self.promises = Promises(self)

    def _files_of(self, disk: Disk, directory: Directory) -> SegmentFiles:
        return SegmentFiles(disk, directory, mode="read" if self.read_only else "write")

    def load(self) -> None:
        """Read what all writers said. Raises OSError."""
        self.look_surely(loading=True)
        self.books.finish_loading()

    def look_surely(self, *, loading: bool = False) -> None:
        """Follow the others, whoever else is at it, also where a journal was renewed while it was looked for. Raises
        OSError."""
        for tries_left in reversed(range(_LOOKS)):
            try:
                self.follow(loading=loading, wait_s=_TURN_S)
                return
            except Missed:
                if not tries_left:
                    raise

    def register(self) -> None:
        """Become a writer, under a new name. Raises OSError."""
        with self.lock:
            for segment in self.books.segments.values():
                segment.recorded = False  # whoever took the old journal in vouches for what it said
            self.books.declared.clear()
            self.books.next_sequence = 0
        self.appending.clear()
        self._journal = Journal.create(
            self.disk,
            self.directory,
            [Snapshot(self.books.counter, 0), Touched(())],
            writer=secrets.token_bytes(WRITER_BYTES),
            generation=0,
            now_ms=self.now_ms(),
        )
        self._renew_at = self._journal.size + min(RENEW_BYTES, self.capacity_bytes // 64)
        self._said_at = self.clock()

    def is_there(self) -> bool:
        """Whether the pool's file system is mounted, as far as its marker tells. Raises OSError."""
        try:
            self.disk.stat(self.directory.root / MARKER)
        except FileNotFoundError:
            return False
        return True

    # What others did.

    def follow(self, *, loading: bool = False, wait_s: float = 0) -> bool:
        """Take over what other writers said up to now. False where another thread is at it. Raises OSError where a journal
        could not be read: what it removed may then be unknown."""
        if not (self._following.acquire(timeout=wait_s) if wait_s else self._following.acquire(blocking=False)):
            return False
        try:
            begun = self.clock()
            try:
                said = self.writers.look(own=b"" if self._journal is None else self._journal.writer, loading=loading)
            except Missed as missed:
                self._take_over(missed.said, loading=loading)
                raise
            self._take_over(said, loading=loading)
            self.followed_at = begun
            return True
        finally:
            self._following.release()

    def _take_over(self, said: Sequence[tuple[bytes, Sequence[Loaded]]], *, loading: bool) -> None:
        if not said:
            return
        with self.lock:
            for _, records in said:
                self.books.apply(records, own=False, now_ms=self.now_ms())
            refused, self.books.too_large = self.books.too_large, 0
            done = [s for s in self.books.segments.values() if s.sealed and not s.rows and not s.gone]
            self.room.note_dead(done, long_ago=loading)
        if refused:
            self.counters.add("records_refused_size", refused)
        for segment in done:
            self.files.discard(segment)  # else its bytes are kept for as long as it is open here

    @property
    def fresh(self) -> bool:
        """Whether journals were read of late: what was removed since nobody here knows."""
        return self.clock() - self.followed_at <= self.timing.silent_s

    # What this process changes; each takes a turn.

    def add(
        self, image: Image, representation: Representation, added: ExtentAdded, keys: Sequence[bytes], attempt: Attempt
    ) -> WriteOutcome:
        """Store an extent whose place is decided here."""
        state = bool(added.flags & BOUNDARY_STATE)
        if self._present(representation, keys, state=state):
            return WriteOutcome(stored=True, reason="present")
        if self.pauses.holds:
            return self.refused("stopped")
        with self.turn() as mine:
            if not mine or attempt.given_up:
                return self.refused("stopped")
            if self._present(representation, keys, state=state):
                return WriteOutcome(stored=True, reason="present")
            try:
                if not self._within_quota(added.tenant, added.extent_bytes):
                    return self.refused("quota")
                stored = self.write_extent(image, representation, added, attempt=attempt)
            except (OSError, StoreError) as error:
                return self._stop(error)
            if not stored:
                return self.refused("full")
            self.pauses.end()
            return WriteOutcome(stored=True, reason="written")

    def add_all(
        self, some: Sequence[tuple[Image, ExtentAdded, Sequence[bytes]]], representation: Representation, attempt: Attempt
    ) -> list[WriteOutcome]:
        """As `add` for several extents (image, record, keys), with one flush for all that fit into a segment; where one is not
        stored, none behind it is tried or told of."""
        outcomes: list[WriteOutcome] = []
        with self.turn() as mine:
            if not mine or attempt.given_up or self.pauses.holds:
                return [self.refused("stopped")]
            written: list[ExtentAdded] = []  # which nobody knows of yet
            first = 0  # of those
            try:
                for image, added, keys in some:
                    if self._present(representation, keys, state=bool(added.flags & BOUNDARY_STATE)):
                        outcomes.append(WriteOutcome(stored=True, reason="present"))
                        continue
                    if not self._within_quota(added.tenant, sum(one.extent_bytes for one in written) + added.extent_bytes):
                        outcomes.append(self.refused("quota"))
                        break
                    segment, nbytes = self.appending.get((representation.digest, added.check_key, False)), added.extent_bytes
                    if segment is None or segment.gone or segment.sealed or segment.end + nbytes > segment.capacity_bytes:
                        self._commit(written, attempt)  # a segment is sealed when all in it is told
                        written, first = [], len(outcomes)
                    self._require_registered()
                    segment = self._segment_for(added, representation, replacing=False)
                    if segment is None:
                        outcomes.append(self.refused("full"))
                        break
                    name = self._put(image, segment)
                    written.append(replace(added, extent=name, last_used=self.books.next_use() + len(written)))
                    outcomes.append(WriteOutcome(stored=True, reason="written"))
                self._commit(written, attempt)
            except (OSError, StoreError) as error:
                stopped = self._stop(error)
                outcomes = [*(outcomes[:first] if written else outcomes), stopped]
            else:
                self.pauses.end()
        return outcomes

    def write_extent(
        self,
        image: Image,
        representation: Representation,
        added: ExtentAdded,
        *,
        attempt: Attempt,
        replacing: bool = False,
    ) -> ExtentName | None:
        """Write an extent and its record; None where there is no room. `replacing`: in others' stead, as `added` says. In turn.
        Raises OSError, StoreError, and then it is not stored."""
        self._require_registered()
        segment = self._segment_for(added, representation, replacing=replacing)
        if segment is None:
            return None
        name = self._put(image, segment)
        self._commit([replace(added, extent=name, last_used=added.last_used or self.books.next_use())], attempt)
        return name

    def _put(self, image: Image, segment: Segment) -> ExtentName:
        """Write an image behind what a segment holds, not flushed; `_commit` makes it an extent. In turn. Raises OSError."""
        begin = at = segment.end
        with self.lock:
            segment.end += sum(part.nbytes for part in image)  # whatever becomes of it: a place is used once
        with self._flushed(segment) as handle:
            for part in image:
                self.disk.write(handle, part, at)
                at += part.nbytes
        return ExtentName(segment.name, begin)

    def _commit(self, placed: Sequence[ExtentAdded], attempt: Attempt) -> None:
        """Flush images, then the records that name them. In turn. Raises OSError, StoreError, and then none counts here."""
        for name in dict.fromkeys(one.extent.segment for one in placed):
            segment = self.books.segment(name)
            with self._flushed(segment) as handle:
                self.disk.sync(handle)
        if attempt.given_up:
            raise OSError(errno.ETIMEDOUT, "the write took too long")
        self.append(placed)
        with self.lock:
            self.books.apply(placed, own=True)
        self.counters.add("bytes_written", sum(one.extent_bytes for one in placed))

    def remove(self, extents: Sequence[ExtentId], *, reason: str) -> list[ExtentId]:
        """Say that extents are no more, those leased here excepted; what is corrupt goes even so. The bytes are the
        collector's. In turn. Raises OSError, and then all of them stay."""
        corrupt = reason == "corrupt"
        with self.lock:
            rows = {extent: row for extent in extents if (row := self.books.row(extent)) is not None}
            going = {extent: row for extent, row in rows.items() if corrupt or not self.books.leases(row)}
            names = [(self.books.name(row), self.books.prefixes(row)) for row in going.values()]
        records = removed_records(self.now_ms(), reason, names, quarantined=corrupt)
        self.append(records)
        with self.lock:
            self.books.apply(records, own=True)
        return list(going)

    def touch(self, extents: Sequence[ExtentId]) -> None:
        """Note uses, the first one given being the latest; journalled now and then."""
        with self.lock:
            for extent in reversed(extents):
                row = self.books.row(extent)
                if row is not None:
                    self._touched[self.books.name(row)] = self.books.touch(row)

    def look_around(self) -> Around:
        """List everything that is there. Nobody waits for it: that takes long where there is much. Raises OSError."""
        with self.lock:
            known = [s for s in self.books.segments.values() if s.opened and s.sealed and not s.gone]
        return Around(known, self.directory.list())

    def upkeep(self, around: Around | None) -> None:
        """Write down uses and promises, show that this writer lives, keep its journal short, and, where that was looked at,
        agree with what is there. In turn. Raises OSError."""
        if self.clock() >= self._flush_due:
            self._flush_due = self.clock() + TOUCH_INTERVAL_S
            self.flush()
        if self.clock() - self._said_at >= self.timing.beat_s:
            self.append([Touched(())])
        with self.lock:
            self.books.forget_long_gone()
            due = self._has_grown()
        if self.clock() >= self._verify_due:
            self._verify_due = self.clock() + self.timing.verify_s
            if not self.journal.lost and not self.journal.reads_back():
                self.counters.add("journal_damaged")  # others could not follow it beyond that
                due = True
        if due:
            self.renew()
        if around is not None:
            self.list_due = self.clock() + self.timing.list_s
            self.forget_missing(around)
            self._remove_unsaid(around.listing.segments)

    def _has_grown(self) -> bool:
        """Whether the own journal is worth beginning anew. The lock is held."""
        return self.journal.size >= self._renew_at and self.books.snapshot_bytes() * 2 < self.journal.size

    def flush(self) -> None:
        """Journal what waits for it. In turn. Raises OSError."""
        self.promises.flush()
        with self.lock:
            uses, self._touched = list(self._touched.items()), {}
            timed = self.books.time_uses(self.now_ms())
            self.books.apply(timed, own=True)
        batches = [uses[first : first + _USES_A_RECORD] for first in range(0, len(uses), _USES_A_RECORD)]
        self.append([*(Touched(tuple(batch)) for batch in batches), *timed])

    def renew(self) -> None:
        """Begin the own journal anew, with what it vouches for and no more. In turn. Raises OSError, and then the old one
        stays."""
        records, parts = list[Record](), self.books.snapshot(self.now_ms())
        while True:
            with self.lock:
                part = next(parts, None)
            if part is None:
                break
            records += part
        self._journal = self.journal.renew(records, now_ms=self.now_ms())
        self._renew_at = self._journal.size + min(RENEW_BYTES, self.capacity_bytes // 64)
        self._said_at = self.clock()

    def seal(self, segments: Sequence[Segment]) -> None:
        """Say that nothing will be added to segments. In turn. Raises OSError."""
        self.appending = {name: one for name, one in self.appending.items() if one not in segments}
        sealed = [SegmentSealed(segment.name, segment.end) for segment in segments if not (segment.gone or segment.sealed)]
        self.append(sealed)
        with self.lock:
            self.books.apply(sealed, own=True)

    def append(self, records: Sequence[Record]) -> None:
        """Write records to the own journal, flushed. Raises OSError; then none of them counts here."""
        if not records:
            return
        self._require_registered()
        if self.journal.broken:
            self.renew()
        self.journal.append(records, sync=True)
        self._said_at = self.clock()

    def forget_missing(self, around: Around) -> None:
        """Forget what lay in files that are no more; whoever removed one need not have been able to tell. Raises OSError."""
        there = around.listing.segments
        # A folder may be read late as well; where nothing lives in a file that costs nothing.
        self.lost([s for s in around.known if not s.gone and s.name not in there and (not s.rows or self._is_missing(s))])

    def lost(self, segments: Sequence[Segment]) -> None:
        """The files of segments are not there: what was in them is forgotten, unless the whole pool is not there. Raises
        OSError."""
        if segments and self.is_there():
            self.counters.add("segments_lost", self.forget(segments))

    def forget(self, segments: Sequence[Segment]) -> int:
        """Forget what lay in segments whose files are gone; returns how many had not been forgotten yet."""
        forgotten = 0
        for segment in segments:
            with self.lock:  # not for all at once: lookups wait for it
                if segment.gone:
                    continue
                self.books.forget_segment(segment)
            self.files.discard(segment)
            forgotten += 1
        return forgotten

    def _is_missing(self, segment: Segment) -> bool:
        try:
            self.disk.stat(self.directory.segment_path(segment.name))
        except FileNotFoundError:
            return True
        return False

    def _remove_unsaid(self, there: set[SegmentName]) -> None:
        """Remove files of the own name that were never spoken of: a write failed, and so did taking it back, or it came late.
        In turn. Raises OSError."""
        with self.lock:
            unsaid = [name for name in there if name.writer == self.writer and name not in self.books.segments]
        if not unsaid or self.journal.lost:  # then the collector sees to them
            return
        for name in unsaid:
            with suppress(FileNotFoundError):
                self.disk.unlink(self.directory.segment_path(name))
        self.counters.add("litter_removed", len(unsaid))

    def close(self, timeout_s: float = _TURN_S) -> None:
        """Say what is still to say."""
        with self.turn(wait_s=timeout_s) as mine:
            if mine and self._journal is not None:
                with suppress(OSError, StoreError):
                    self.flush()
                    self.seal(list(self.appending.values()))
                    self.append([Left()])
                self._journal.close()
        self._closed = True
        self.files.close(timeout_s)
        with self._following:
            self.writers.close()

    @property
    def journal(self) -> Journal:
        assert self._journal is not None, "who only reads has no journal"
        return self._journal

    @property
    def writer(self) -> bytes:
        return b"" if self._journal is None else self._journal.writer

    @property
    def allocated_bytes(self) -> int:
        """What files take, as far as journals say."""
        return self.room.taken_bytes()

    @property
    def unsaid_bytes(self) -> int:
        """What is kept free for what journals still say."""
        return 4096

    @property
    def journals_bytes(self) -> int:
        return self.writers.journals_bytes + (0 if self._journal is None else self._journal.size)

    @contextmanager
    def turn(self, *, wait_s: float = _TURN_S) -> Iterator[bool]:
        """Wait for one's turn to change something; False if it did not come, or nothing may be changed."""
        if not self._turn.acquire(timeout=wait_s):
            if wait_s >= 1:
                self.counters.add("turn_timed_out")
            yield False
            return
        try:
            yield not (self._closed or self.read_only or self.forked)
        finally:
            self._turn.release()

    @contextmanager
    def charging(self, *, wait_s: float | None = None) -> Iterator[bool]:
        """Each writer charges files of its own, and asks nobody."""
        yield True

    @property
    def forked(self) -> bool:
        return os.getpid() != self._process

    def now_ms(self) -> int:
        return milliseconds(self._time.now_s())

    def steady_ms(self, wall_ms: int) -> int:
        return milliseconds(self._time.steady_s(wall_ms / 1000)) if wall_ms else self.now_ms()

    def _require_registered(self) -> None:
        """Make sure that the own journal is still there. Raises OSError where the pool is not."""
        if not self.journal.lost:
            return
        if not self.is_there():
            raise OSError(errno.ENODEV, f"the {self.tier} is not there", self._root)
        log.warning(
            "%s %s: this writer was taken for dead, or its journal was removed; it goes on as another one",
            self.tier,
            self._root,
        )
        self.counters.add("registered_again")
        self.register()

    def _segment_for(self, added: ExtentAdded, representation: Representation, *, replacing: bool) -> Segment | None:
        """Return a segment of extents like this one, with room for it."""
        name, nbytes = (representation.digest, added.check_key, replacing), added.extent_bytes
        segment = self.appending.get(name)
        if segment is not None and (segment.gone or segment.sealed or segment.end + nbytes > segment.capacity_bytes):
            self.seal([segment])
            segment = None
        if segment is not None:
            return segment
        capacity = pool_segment_capacity(representation, capacity_bytes=self.capacity_bytes)
        if not self.room.may_open(capacity, replacing=replacing) and (
            replacing or not self.make_room(2 * capacity) or not self.room.may_open(capacity)
        ):
            return None
        segment = self.appending.get(name)  # making room may have begun one
        return segment if segment is not None else self._open_segment(representation, capacity, name)

    def _open_segment(self, representation: Representation, capacity_bytes: int, appending: tuple[bytes, int, bool]) -> Segment:
        with self.lock:
            name = SegmentName(self.writer, self.books.next_sequence)
            self.books.next_sequence += 1  # also when what follows fails: a name is used once
            header = SegmentHeader(name, capacity_bytes, self.now_ms(), representation.encode(), representation.digest)
            segment = self.books.segment(name)
            segment.capacity_bytes, segment.header_bytes = header.capacity_bytes, header.header_bytes
            segment.created_ms, segment.representation = header.created_ms, header.digest
            declared = header.digest in self.books.declared
        self.files.create(header, sync=True)
        self.files.let_go(segment)
        records: list[Record] = [] if declared else [RepresentationDeclared(header.representation)]
        records.append(self.books.opened_record(segment))
        try:
            self.append(records)
        except OSError:
            with suppress(OSError):
                self.disk.unlink(self.directory.segment_path(name))
            self.files.discard(segment)
            with self.lock:
                segment.gone = True
            raise
        with self.lock:
            self.books.apply(records, own=True)
        self.room.opened(capacity_bytes)
        self.appending[appending] = segment
        return segment

    @contextmanager
    def _flushed(self, segment: Segment) -> Iterator[Handle]:
        """Hold a segment's file; one that cannot be written or flushed is not added to any more."""
        try:
            with self.files.held(segment) as handle:
                yield handle
        except OSError as error:
            if error.errno not in FULL:
                self.appending = {name: one for name, one in self.appending.items() if one is not segment}
            raise

    def _within_quota(self, tenant: str, nbytes: int) -> bool:
        quota = self.retention.quota_bytes(tenant, capacity_bytes=self.capacity_bytes, whole_bytes=None)
        if quota is None:
            return True
        with self.lock:
            return self.books.bytes_by_tenant().get(tenant, 0) + nbytes <= quota

    def _present(self, representation: Representation, keys: Sequence[bytes], *, state: bool) -> bool:
        with self.lock:
            return self.books.present(representation.digest, keys, state=state)

    def refused(self, reason: str) -> WriteOutcome:
        self.counters.add(f"write_failed_{reason}")
        return WriteOutcome(stored=False, reason=reason)

    def _stop(self, error: OSError | StoreError) -> WriteOutcome:
        """Store nothing for a while: the file system refuses."""
        log.info("%s %s: %s", self.tier, self._root, error)
        number = error.errno if isinstance(error, OSError) else None
        self.pauses.begin(told(error) if isinstance(error, OSError) else error.message)
        self.counters.add(f"write_failed_{errno.errorcode.get(number or 0, 'other').lower()}")
        return WriteOutcome(stored=False, reason="full" if number in FULL else "error")

    @property
    def _root(self) -> str:
        return str(self.directory.root)
