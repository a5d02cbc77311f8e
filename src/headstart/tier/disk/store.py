"""The writing side of a disk tier: one change at a time, each in the order that survives a crash.

    extent's bytes → (sync) → journal → (sync) → found under its keys        (taking away: `removal`)

A change takes its turn: only changes wait for each other, and no longer than `TURN_S`. The books have a lock of their own,
which is never held across I/O, so looking up and reading never wait for a disk that writes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock

from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt, StoreError
from headstart.metrics import Counters
from headstart.tier.base import ExtentId, WriteOutcome
from headstart.tier.disk.books import Books, Segment
from headstart.tier.disk.directory import MARKER, Directory
from headstart.tier.disk.door import Disk, Handle
from headstart.tier.disk.files import SegmentFiles
from headstart.tier.disk.journal import Journal
from headstart.tier.disk.records import (
    ExtentAdded,
    ExtentName,
    Record,
    RepresentationDeclared,
    SegmentName,
    SegmentOpened,
    SegmentSealed,
    Touched,
    milliseconds,
)
from headstart.tier.disk.removal import (
    QUARANTINE,
    evict,
    give_back_waiting,
    measure,
    measure_stale,
    measure_unexplained,
    remove,
    unlink,
)
from headstart.tier.disk.segment import SegmentHeader, segment_capacity

TURN_S = 30.0
ALONE_S, ALONE_PAUSE_S = 10.0, 0.002  # how long another process may add to the directory, and how often that is asked
STOPPED_S = 30.0  # how long nothing is stored after the medium refused
TOUCH_INTERVAL_S = 5.0
VERIFY_INTERVAL_S = 10.0  # how often the own journal is read back: what is wrong in it, others cannot follow
RENEW_BYTES = 4 << 20  # a journal that grew by this much, more than half of it dead, starts anew
FULL = {errno.ENOSPC, errno.EDQUOT}
LOST = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP}  # the last: something else stands in its place
_USES_A_RECORD = 4096

log = logging.getLogger(__name__)


class Store:
    """Everything of an open directory. `lock` guards `books`; what is public here and changes something takes a turn."""

    def __init__(
        self,
        disk: Disk,
        directory: Directory,
        books: Books,
        journal: Journal,
        *,
        capacity_bytes: int,
        reserve_bytes: int,
        sync: bool,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        counters: Counters,
    ) -> None:
        self.disk = disk
        self.directory = directory
        self.books = books
        self.files = SegmentFiles(disk, directory)
        self.lock = Lock()
        self.counters = counters
        self.capacity_bytes = capacity_bytes
        self.other_journals_bytes = 0
        self.incomplete = False  # another journal cannot be read to its end
        self._journal = journal
        self._journal_bytes = journal.allocated_bytes
        self._slack_bytes = 2 * reserve_bytes + 8192  # what journal and file system may take beside an extent
        self._sync = sync
        self._clock = clock
        self._wall_clock = wall_clock
        self._turn = Lock()
        self._process = os.getpid()
        self.appending: dict[bytes, Segment] = {}  # representation → the segment that takes its extents
        self.waiting: list[tuple[Segment, int, int]] = []  # corrupt extents whose space waits for the last reader
        self.holes = True  # whether the file system can give back a part of a file
        self._reserve_bytes = reserve_bytes
        self._verify_due = clock() + VERIFY_INTERVAL_S
        self._touched: dict[ExtentName, int] = {}
        self._touch_due = clock() + TOUCH_INTERVAL_S
        self._renew_bytes = min(RENEW_BYTES, capacity_bytes // 32)
        self._renew_at = journal.size + self._renew_bytes
        self._stopped_until: float | None = None
        self._closed = False

    # What changes something.

    def add(
        self,
        image: memoryview,
        representation: Representation,
        added: ExtentAdded,
        *,
        keys: Sequence[bytes],
        follow: Callable[[], bool],
    ) -> WriteOutcome:
        """Store an extent whose place is not decided yet (`added.extent` is ignored). `follow` takes over what other processes
        did; False where it could not."""

        def add_once() -> WriteOutcome:
            if self._journal.lost:
                raise FileNotFoundError(errno.ENOENT, "the journal was removed", str(self.directory.root))
            with self.alone() as alone:
                if not alone or not follow():
                    return self._refused("stopped")
                if self._present(representation, keys):  # written while this one waited
                    return WriteOutcome(stored=True, reason="present")
                outcome = self._add(image, representation, added)
                if outcome.stored:
                    self._tidy()
                return outcome

        if self._present(representation, keys):
            return WriteOutcome(stored=True, reason="present")
        if self.stopped:
            return self._refused("stopped")
        with self.turn() as mine:
            if not mine:
                return self._refused("stopped")
            try:
                return add_once()
            except OSError as error:
                if not self._mended(error, image.nbytes):
                    return self._stop(error)
            try:
                return add_once()  # once more, not for ever
            except OSError as error:
                return self._stop(error)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Be the only process that adds to the directory: together they keep to one capacity. False: another one was too long
        about it. Raises OSError."""
        handle = self.disk.open(self.directory.root / MARKER, "write")
        try:
            for _ in range(int(ALONE_S / ALONE_PAUSE_S)):
                if alone := self.disk.lock_file(handle):
                    break
                time.sleep(ALONE_PAUSE_S)
            else:
                self.pause(f"another process has been writing for {ALONE_S:.0f} s")
            yield alone
        finally:
            with contextlib.suppress(OSError):  # the lock ends with it
                self.disk.close(handle)

    def _present(self, representation: Representation, keys: Sequence[bytes]) -> bool:
        with self.lock:
            return self.books.present(representation.digest, keys)

    def _mended(self, error: OSError, nbytes: int) -> bool:
        """Do what may help against an error: room where the disk is full, a directory where it was removed."""
        try:
            if error.errno in FULL:
                return evict(self, nbytes + self._slack_bytes, "full")
            if error.errno in LOST:
                self._recreate()
                return True
        except (OSError, StoreError):
            self.counters.add("mend_failed")
        return False

    def remove(self, extents: Sequence[ExtentId], *, reason: str) -> int:
        """Remove extents that nobody leases; returns how many."""
        with self.turn() as mine:
            if not mine:
                return 0
            try:
                removed = remove(self, extents, reason=reason)
            except OSError:
                self.counters.add("remove_failed")
                return 0
            self.counters.add(f"quarantined_{reason}" if reason == QUARANTINE else f"removed_{reason}", len(removed))
            return len(removed)

    def touch(self, extents: Sequence[ExtentId]) -> None:
        """Note uses, the first one given being the latest; journalled now and then."""
        with self.lock:
            for extent in reversed(extents):
                row = self.books.row(extent)
                if row is not None:
                    self._touched[self.books.name(row)] = self.books.touch(row)
            due = self._clock() >= self._touch_due
        if due:
            with self.turn(wait_s=0) as mine:
                if mine:
                    self._flush_touches()
                    self._verify()

    def drop_segment(self, segment: Segment) -> None:
        """The file of a segment is not what it was: nothing in it is found any more, and the file goes too."""
        self.lost_segment(segment)
        with self.turn(wait_s=0) as mine:
            if mine and segment.settled:
                unlink(self, segment)

    def lost_segment(self, segment: Segment) -> None:
        """The file of a segment is gone: nothing in it is found any more."""
        with self.lock:
            if segment.gone:
                return
            self.books.forget_segment(segment)
        self.files.discard(segment)
        self.counters.add("segments_lost")

    def recreate_if_lost(self) -> None:
        """Begin anew if somebody removed the directory: what was in it shall not count as stored."""
        with self.turn(wait_s=0) as mine, contextlib.suppress(OSError, StoreError):  # the next write says what is wrong
            if mine and self._journal.lost:
                self._recreate()

    def make_room(self, *, follow: Callable[[], bool]) -> None:
        """Evict what lies above the capacity (which may have been lowered since); only then reserve space for the journal."""
        try:
            with self.turn() as mine:
                if not mine:
                    return
                if self.allocated_bytes + self._slack_bytes <= self.capacity_bytes:
                    return self._reserve_ahead()
                with self.alone() as alone:  # or somebody else fills the room meanwhile
                    if not alone or not follow():
                        return
                    missing = self.allocated_bytes + self._reserve_bytes - self.capacity_bytes
                    if missing <= 0 or evict(self, missing, "capacity"):
                        self._reserve_ahead()
        except OSError:  # whoever adds comes here again
            self.counters.add("make_room_failed")

    def renew(self) -> bool:
        """Begin the journal anew, with all that it vouches for. False where that failed."""
        with self.turn() as mine:
            try:
                if mine:
                    self._begin_journal()
            except OSError:
                self.counters.add("journal_renew_failed")
                return False
            return mine

    def seal(self, segments: Sequence[Segment]) -> None:
        """Say that nothing will be added to segments; a segment without a living extent is removed."""
        with self.turn() as mine:
            if mine:
                self._seal(segments)

    def record(self, records: Sequence[Record]) -> None:
        """Journal what was found out about segments that no journal speaks of."""
        with self.turn() as mine:
            if mine:
                self.append(records)
                with self.lock:
                    self.books.apply(records, own=True)
                    segments = [self.books.segment(r.segment) for r in records if isinstance(r, SegmentOpened)]
                for segment in segments:
                    measure(self, segment)

    def unlink(self, segment: Segment) -> None:
        """Remove a segment file in which nothing is alive."""
        with self.turn() as mine:
            if mine:
                unlink(self, segment)

    def close(self) -> None:
        """Say what is still to say and let go of the journal."""
        with self.turn() as mine:
            if mine:
                give_back_waiting(self)
                with contextlib.suppress(OSError):
                    self._flush_touches()
                    self._seal(list(self.appending.values()))
                self._journal.close()
                self._closed = True
        # A turn that never came is a stuck disk: its thread still uses the journal, which then ends with the process.
        self._closed = True
        if not self.files.close(TURN_S):
            log.warning("disk tier %s: a read did not end in %d s; its file stays open", self.directory.root, TURN_S)

    @property
    def allocated_bytes(self) -> int:
        return self.books.allocated_bytes + self._journal_bytes + self.other_journals_bytes + 4096  # the marker

    @property
    def stopped(self) -> bool:
        return self._stopped_until is not None and self._clock() < self._stopped_until

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, which has the parent's locks and names: it must not change either."""
        return os.getpid() != self._process

    @property
    def writer(self) -> bytes:
        return self._journal.writer

    @contextmanager
    def turn(self, *, wait_s: float = TURN_S) -> Iterator[bool]:
        """Wait for one's turn to change something; False if it did not come or if there is nothing to change any more."""
        if not (self._turn.acquire(timeout=wait_s) if wait_s else self._turn.acquire(blocking=False)):
            if wait_s:
                self.counters.add("turn_timed_out")
            yield False
            return
        try:
            yield not self._closed and not self.forked
        finally:
            self._turn.release()

    # Adding; in turn.

    def _add(self, image: memoryview, representation: Representation, added: ExtentAdded) -> WriteOutcome:
        nbytes = image.nbytes
        segment = self.appending.get(representation.digest)
        if segment is not None and (segment.gone or segment.end + nbytes > segment.capacity_bytes):
            self._seal([segment])
            segment = None
        header = self._new_header(representation) if segment is None else None
        needed = nbytes + self._slack_bytes + (header.header_bytes if header else 0)
        measure_stale(self)
        if self.incomplete:
            measure_unexplained(self)
        missing = self.allocated_bytes + needed - self.capacity_bytes
        if missing > 0 and not evict(self, missing, "capacity"):
            return self._refused("full")
        if segment is not None and segment.gone:  # evicted whole
            segment, header = None, self._new_header(representation)
        if segment is None:
            assert header is not None
            segment = self._open_segment(header)
        offset = segment.end
        with self.lock:
            segment.end += nbytes  # whatever becomes of it: others may see a half of it, and a name is used once
        with self._held(segment) as handle:
            try:
                self.disk.write(handle, image, offset)
                if self._sync:
                    self.disk.sync(handle)
                placed = replace(added, extent=ExtentName(segment.name, offset), last_used=self.books.next_use())
                self.append([placed])
            except OSError:
                with contextlib.suppress(OSError):
                    self.disk.truncate(handle, offset)
                    measure(self, segment)
                raise
            with self.lock:
                self.books.apply([placed], own=True)
                self.books.charge(segment, segment.allocated_bytes + nbytes)
            try:
                facts = self.disk.facts(handle)
            except OSError:  # stored all the same
                self.counters.add("stat_failed")
                facts = None
        if facts is not None:
            with self.lock:
                self.books.charge(segment, facts.allocated_bytes)
        if facts is not None and facts.links == 0:
            self.lost_segment(segment)
            raise FileNotFoundError(errno.ENOENT, "the segment was removed", str(self.directory.segment_path(segment.name)))
        self.counters.add("bytes_written", nbytes)
        self._recovered()
        return WriteOutcome(stored=True, reason="written")

    @contextmanager
    def _held(self, segment: Segment) -> Iterator[Handle]:
        try:
            handle = self.files.hold(segment)
        except ExtentCorrupt as error:  # its header rotted while it was closed: as if somebody had removed it
            unlink(self, segment)
            path = self.directory.segment_path(segment.name)
            raise FileNotFoundError(errno.ENOENT, str(error), str(path)) from error
        try:
            yield handle
        finally:
            self.files.let_go(segment)

    def _new_header(self, representation: Representation) -> SegmentHeader:
        return SegmentHeader(
            SegmentName(self._journal.writer, self.books.next_sequence),
            segment_capacity(representation, capacity_bytes=self.capacity_bytes),
            self.now_ms(),
            representation.encode(),
            representation.digest,
        )

    def _open_segment(self, header: SegmentHeader) -> Segment:
        with self.lock:
            self.books.next_sequence += 1  # also when what follows fails: a name is used once
            segment = self.books.segment(header.segment)
            segment.capacity_bytes = header.capacity_bytes
            segment.header_bytes = header.header_bytes
            segment.created_ms = header.created_ms
            segment.representation = header.digest
            declared = header.digest in self.books.representations
        self.files.create(header, sync=self._sync)
        try:
            records: list[Record] = [] if declared else [RepresentationDeclared(header.representation)]
            records.append(self.books.opened_record(segment))
            self.append(records)
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.unlink(self.directory.segment_path(segment.name))
            self.files.discard(segment)
            with self.lock:
                segment.gone = True
            raise
        finally:
            self.files.let_go(segment)
        with self.lock:
            self.books.apply(records, own=True)
        measure(self, segment)
        self.appending[header.digest] = segment
        return segment

    def _seal(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self.appending.pop(segment.representation, None)
        sealed = [SegmentSealed(s.name, s.end) for s in segments if not s.gone and not s.sealed]
        try:
            self.append(sealed)
        except OSError:
            self.counters.add("seal_failed")  # it is said at the next open then
        with self.lock:
            self.books.apply(sealed, own=True)
        for segment in segments:
            if not segment.gone and not segment.rows:
                unlink(self, segment)

    # What goes with every change; in turn.

    def append(self, records: Sequence[Record]) -> None:
        """Write records to the own journal. Raises OSError; then none of them counts here, whatever others have seen."""
        if not records:
            return
        if self._journal.broken:
            self._begin_journal()
        self._journal.append(records, sync=self._sync)
        with contextlib.suppress(OSError):  # what is written is written, whatever it is charged
            self._journal_bytes = self._journal.allocated_bytes

    def _begin_journal(self) -> None:
        """Go on in a new generation of the journal that says what the books say. Raises OSError, and then the old one stays."""
        self._journal = self._journal.renew(self._snapshot(), now_ms=self.now_ms())
        self._renew_at = self._journal.size + self._renew_bytes
        with contextlib.suppress(OSError):
            self._journal_bytes = self._journal.allocated_bytes

    def reads_back(self) -> bool:
        """Whether others can follow the own journal; one that is begun anew before the next change counts as well."""
        return self._journal.broken or self._journal.reads_back()

    def _reserve_ahead(self) -> None:
        self._journal.reserve_ahead(self._reserve_bytes)
        with contextlib.suppress(OSError):
            self._journal_bytes = self._journal.allocated_bytes

    def _flush_touches(self) -> None:
        self._touch_due = self._clock() + TOUCH_INTERVAL_S
        with self.lock:
            uses, self._touched = list(self._touched.items()), {}
        for first in range(0, len(uses), _USES_A_RECORD):
            batch = tuple(uses[first : first + _USES_A_RECORD])
            if self.allocated_bytes + self._slack_bytes > self.capacity_bytes:
                break  # the order of use is kept in memory; it is not worth an extent
            try:
                self.append([Touched(batch)])
            except OSError:
                self.counters.add("touch_failed")
                return

    def _tidy(self) -> None:
        """What can wait until an extent is stored, and does not change that it is: give back, journal touches, renew."""
        try:
            give_back_waiting(self)
            if self._touched and self._clock() >= self._touch_due:
                self._flush_touches()
            if self._journal.size >= self._renew_at:
                self._renew_at = self._journal.size + self._renew_bytes
                self._renew(only_if_dead=True)
            self._verify()
        except (OSError, StoreError):
            self.counters.add("tidy_failed")

    def _verify(self) -> None:
        """Start the journal anew if it is not what was written, now and then: others read it, this process never does."""
        if self._clock() < self._verify_due:
            return
        self._verify_due = self._clock() + VERIFY_INTERVAL_S
        if not self._journal.lost and not self.reads_back():
            self.counters.add("journal_damaged")
            self._renew(only_if_dead=False)

    def _renew(self, *, only_if_dead: bool) -> None:
        """Start the journal anew, if it is mostly dead, where there is room."""
        with self.lock:
            live = self.books.snapshot_bytes()
        if only_if_dead and live * 2 > self._journal.size:
            return
        missing = self.allocated_bytes + live + self._slack_bytes - self.capacity_bytes
        if missing > 0 and not evict(self, missing, "capacity"):
            return
        try:
            self._begin_journal()
        except OSError:
            self.counters.add("journal_renew_failed")
            return
        self.counters.add("journal_renewed")

    def _snapshot(self) -> list[Record]:
        parts, records = self.books.snapshot(), list[Record]()
        while True:
            with self.lock:  # for one part at a time: lookups go on
                part = next(parts, None)
            if part is None:
                return records
            records += part

    def _recreate(self) -> None:
        """Somebody removed the directory, or a part of it: forget what is gone, and begin again in what can be made anew."""
        self.directory.prepare()
        there = self.directory.list().segments
        with self.lock:
            lost = [s for s in self.books.segments.values() if not s.gone and s.opened and s.name not in there]
        for segment in lost:
            self.lost_segment(segment)
        if self._journal.lost:
            self._begin_journal()
            log.warning("disk tier %s: the directory was removed; it was made anew", self.directory.root)
            self.counters.add("recreated")

    def _refused(self, reason: str) -> WriteOutcome:
        self.counters.add(f"write_failed_{reason}")
        return WriteOutcome(stored=False, reason=reason)

    def _stop(self, error: OSError) -> WriteOutcome:
        """Store nothing for a while: the medium refuses."""
        self.pause(str(error))
        code = errno.errorcode.get(error.errno or 0, "other").lower()
        self.counters.add(f"write_failed_{code}")
        return WriteOutcome(stored=False, reason="full" if error.errno in FULL else "error")

    def pause(self, why: str) -> None:
        """Store nothing for a while. Said once, until something was stored again."""
        if self._stopped_until is None:
            log.warning(
                "disk tier %s: nothing is stored for now (%s); reading goes on, and it is tried again every %d s",
                self.directory.root,
                why,
                STOPPED_S,
            )
        self._stopped_until = self._clock() + STOPPED_S

    def _recovered(self) -> None:
        if self._stopped_until is not None:
            self._stopped_until = None
            log.warning("disk tier %s: storing again", self.directory.root)

    def now_ms(self) -> int:
        return milliseconds(self._wall_clock())
