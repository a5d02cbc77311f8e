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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock

from headstart.block.representation import Representation
from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.policy.clock import SteadyClock
from headstart.policy.retention import Retention
from headstart.tier.base import ExtentId, WriteOutcome
from headstart.tier.disk.adding import add_extent, seal_segments
from headstart.tier.disk.books import Books
from headstart.tier.disk.carrying import carry
from headstart.tier.disk.charges import survey
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk
from headstart.tier.disk.durable import sync_found
from headstart.tier.disk.evicting import evict
from headstart.tier.disk.files import SegmentFiles
from headstart.tier.disk.journal import Journal
from headstart.tier.disk.marker import ALONE_S, Marker
from headstart.tier.disk.pause import BUSY_S, FULL, GONE, LOST, SHORT, Pause, told
from headstart.tier.disk.promises import Promises
from headstart.tier.disk.records import BOUNDARY_STATE, ExtentAdded, Record, SegmentOpened, milliseconds
from headstart.tier.disk.removal import QUARANTINE, give_back_waiting, measure, remove, unlink
from headstart.tier.disk.table import Segment
from headstart.tier.disk.upkeep import Upkeep

TURN_S = 30.0
_HANGS_S = 15.0  # no change takes so long on a disk that answers, waiting for another process included
ROOM_BYTES = 8192  # always left below the capacity: the file system's own blocks, and the next process's journal

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
        marker: Marker,
        capacity_bytes: int,
        min_free_bytes: int,
        reserve_bytes: int,
        sync: bool,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        counters: Counters,
        retention: Retention,
        only_read: str = "",
    ) -> None:
        """`only_read`: why nothing may be changed here, "" where it may."""
        self.disk = disk
        self.directory = directory
        self.books = books
        self.files = SegmentFiles(disk, directory)
        self.lock = Lock()
        self.counters = counters
        self.capacity_bytes = capacity_bytes
        self.min_free_bytes = min_free_bytes
        self.give_back_due = 0.0
        self.refused_bytes = 0  # what the medium had no room for the last time
        self.marker = marker
        self.opening = True  # until then nobody follows what others do: all is measured each time
        self.follow: Callable[[], bool] = lambda: True  # takes over what other processes did; False where it could not
        self.sync_others: Callable[[], bool] = lambda: True
        self.other_journals_bytes = 0
        self.remains_bytes = 4096  # of the marker, and of what others left behind and the next opening removes
        self.folders: dict[Path, int] = {}  # what each is charged
        self.incomplete = False  # another journal cannot be read to its end
        self.slack_bytes = 2 * reserve_bytes + ROOM_BYTES  # what journal and file system may take beside an extent
        self.sync = sync
        self.clock = clock
        self.retention = retention
        self.whole_bytes: int | None = None  # what the tier may hold that this directory is a part of
        self._time = SteadyClock(clock, wall_clock)
        self._turn = Lock()
        self._turn_since: float | None = None  # when whoever changes something began
        self._process = os.getpid()
        # (representation, whether they replace others) → the segment that takes its extents
        self.appending: dict[tuple[bytes, bool], Segment] = {}
        self.waiting: list[tuple[Segment, int, int]] = []  # corrupt extents whose space waits for the last reader
        self.holes = True  # whether the file system can give back a part of a file
        self.pauses = Pause(directory.root, clock)
        self.only_read = bool(only_read)
        if only_read:
            self.pauses.begin_for_good(only_read)
        self.upkeep = Upkeep(self, journal, reserve_bytes=reserve_bytes, sync=sync)
        self.promises = Promises(self)
        self._closed = False

    # What changes something.

    def add(
        self,
        image: memoryview,
        representation: Representation,
        added: ExtentAdded,
        *,
        keys: Sequence[bytes],
    ) -> WriteOutcome:
        """Store an extent whose place is not decided yet (`added.extent` is ignored)."""
        state = bool(added.flags & BOUNDARY_STATE)

        def add_once() -> WriteOutcome:
            if self.upkeep.journal.lost:
                raise FileNotFoundError(errno.ENOENT, "the journal was removed", str(self.directory.root))
            with self.charging() as alone:
                if not alone:
                    return self.refused("stopped")
                # Written while this one waited, or by somebody who does not sync.
                present = self._present(representation, keys, state=state)
                if present and (not self.sync or sync_found(self, representation.digest, keys)):
                    return WriteOutcome(stored=True, reason="present")
                outcome = add_extent(self, image, representation, added)
                if outcome.stored:
                    self.upkeep.tidy()
                return outcome

        if not self.sync and self._present(representation, keys, state=state):
            return WriteOutcome(stored=True, reason="present")
        if self.stopped:
            return self.refused("stopped")
        with self.turn() as mine:
            if not mine:
                return self.refused("stopped")
            if self.pauses.why:
                self.files.close_idle()  # what is open may be of a device that went; what is there now is found by its name
            try:
                return add_once()
            except OSError as error:
                self.refused_bytes = image.nbytes
                if not self._mended(error, image.nbytes):
                    return self._stop(error)
            try:
                return add_once()  # once more, not for ever
            except OSError as error:
                return self._stop(error)

    def alone(self) -> AbstractContextManager[bool]:
        """Keep other processes from adding, and add nothing. False: another one was too long about it. Raises OSError."""
        return self.marker.hold(charging=False)

    @contextmanager
    def charging(self, *, wait_s: float | None = None) -> Iterator[bool]:
        """Be the only process that makes the file system charge more for the directory, and know what it charges now. False:
        another process was too long about it, or what it did could not be followed. Raises OSError."""
        outermost, wait_s = not self.marker.held, ALONE_S if wait_s is None else wait_s
        with self.marker.hold(charging=True, wait_s=wait_s) as alone:
            if not alone and wait_s:
                self.pauses.begin(self.marker.busy, for_s=BUSY_S)
            if alone and outermost:
                alone = self.follow()
                if alone and (self.marker.unsure or self.opening):
                    survey(self)
            yield alone

    @contextmanager
    def charging_or_error(self) -> Iterator[None]:
        """The same; OSError where `charging` says False."""
        with self.charging() as alone:
            if not alone:
                raise OSError(errno.EAGAIN, "another process is adding", str(self.directory.root))
            yield

    def _present(self, representation: Representation, keys: Sequence[bytes], *, state: bool) -> bool:
        with self.lock:
            return self.books.present(representation.digest, keys, state=state)

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
                    self.upkeep.note_use(self.books.name(row), self.books.touch(row))
        if self.upkeep.touches_due:
            with self.turn(wait_s=0) as mine:
                if mine:
                    self.upkeep.flush_touches()
                    self.upkeep.verify()

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
            if mine and self.upkeep.journal.lost:
                self._recreate()

    def make_room(self) -> None:
        """Evict what lies above the capacity (which may have been lowered since); only then reserve space for the journal."""
        try:
            with self.turn() as mine:
                if not mine:
                    return
                with self.charging() as alone:
                    if not alone:
                        return
                    missing = self.allocated_bytes + self.upkeep.reserve_bytes + ROOM_BYTES - self.capacity_bytes
                    if missing > 0:
                        evict(self, missing, "capacity")
                    self.upkeep.reserve_ahead()
                    self.marker.unsure = True  # an opening may have removed what others still count
        except OSError:  # whoever adds comes here again
            self.counters.add("make_room_failed")
        finally:
            self.opening = False
            self.marker.opened()

    def renew(self) -> bool:
        """Begin the journal anew, with all that it vouches for. False where that failed."""
        with self.turn() as mine:
            try:
                if mine:
                    self.upkeep.begin()
            except OSError:
                self.counters.add("journal_renew_failed")
                return False
            return mine

    def seal(self, segments: Sequence[Segment]) -> None:
        """Say that nothing will be added to segments; a segment without a living extent is removed."""
        with self.turn() as mine:
            if mine:
                seal_segments(self, segments)

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
                    self.promises.flush(at_last=True)
                    self.upkeep.flush_touches()
                    seal_segments(self, list(self.appending.values()))
                self.upkeep.journal.close()
                self._closed = True
        # A turn that never came is a stuck disk: its thread still uses the journal, which then ends with the process.
        self._closed = True
        if not self.files.close(TURN_S):
            log.warning("disk tier %s: a read did not end in %d s; its file stays open", self.directory.root, TURN_S)

    @property
    def allocated_bytes(self) -> int:
        """What the file system charges for all files and folders, as far as it is known."""
        journals = self.upkeep.allocated_bytes + self.other_journals_bytes
        return self.books.allocated_bytes + journals + self.remains_bytes + sum(self.folders.values())

    @property
    def stopped(self) -> bool:
        return self.pauses.holds

    @property
    def paused(self) -> str:
        """Why nothing is stored now, "" where it is. Takes no lock: a disk that hangs in a write holds the turn."""
        since = self._turn_since
        took_s = 0.0 if since is None else self.clock() - since
        if not self.pauses.why and took_s > _HANGS_S:
            return f"a change has not ended in {took_s:.0f} s: the disk does not answer, or is very slow"
        return self.pauses.why

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, which has the parent's locks and names: it must not change either."""
        return os.getpid() != self._process

    @property
    def writer(self) -> bytes:
        return self.journal.writer

    @property
    def journal(self) -> Journal:
        return self.upkeep.journal

    @contextmanager
    def turn(self, *, wait_s: float = TURN_S) -> Iterator[bool]:
        """Wait for one's turn to change something; False if it did not come or if there is nothing to change any more."""
        if not (self._turn.acquire(timeout=wait_s) if wait_s else self._turn.acquire(blocking=False)):
            if wait_s:
                self.counters.add("turn_timed_out")
            yield False
            return
        try:
            self._turn_since = self.clock()
            yield not (self._closed or self.forked or self.only_read)
        finally:
            self._turn_since = None
            self._turn.release()

    # What goes with every change; in turn.

    def append(self, records: Sequence[Record]) -> None:
        """Write records to the own journal. Raises OSError; then none of them counts here, whatever others have seen."""
        self.upkeep.append(records)

    def reads_back(self) -> bool:
        """Whether others can follow the own journal; one that is begun anew before the next change counts as well."""
        return self.upkeep.reads_back()

    def refused(self, reason: str) -> WriteOutcome:
        self.counters.add(f"write_failed_{reason}")
        return WriteOutcome(stored=False, reason=reason)

    def pause(self, why: str) -> None:
        """Store nothing for a while."""
        self.pauses.begin(why)

    def now_ms(self) -> int:
        """What time it is, by a clock that does not jump while the directory is open."""
        return milliseconds(self._time.now_s())

    def steady_ms(self, wall_ms: int) -> int:
        """Return when that was, by the same clock, which the wall clock noted as `wall_ms`: not later than now, and now where
        nothing was noted (0)."""
        return milliseconds(self._time.steady_s(wall_ms / 1000)) if wall_ms else self.now_ms()

    def carry(self, extents: Sequence[ExtentId]) -> list[ExtentId]:
        """See `carrying.carry`."""
        return carry(self, extents)

    # Failing and recovering; in turn.

    def try_again(self) -> None:
        """Where storing is paused and it is time: find out whether the medium takes something again, by writing a block."""
        if not self.pauses.why or self.stopped:
            return
        with self.turn(wait_s=0) as mine:
            if not mine:
                return
            try:
                self.files.close_idle()
                if self.upkeep.journal.lost:
                    self._recreate()
                with self.charging(wait_s=0) as alone:
                    if not alone:
                        return
                    needed = self.min_free_bytes + self.refused_bytes + self.slack_bytes
                    if self.disk.space(self.directory.root).available_bytes < needed:
                        raise OSError(errno.ENOSPC, "there is still no room", str(self.directory.root))
                    self.disk.probe(self.directory.journals)
            except (OSError, StoreError) as error:
                self.pause(told(error) if isinstance(error, OSError) else str(error))
            else:
                self.pauses.end()

    def _mended(self, error: OSError, nbytes: int) -> bool:
        """Do what may help against an error: room where the disk is full, a directory where it was removed."""
        try:
            if error.errno in FULL:
                return evict(self, nbytes + self.slack_bytes, "full")
            if error.errno in LOST:
                self._recreate()
                return True
            if error.errno in SHORT:
                return self.files.close_idle()
        except (OSError, StoreError):
            self.counters.add("mend_failed")
        return False

    def _recreate(self) -> None:
        """Somebody removed the directory, or a part of it: forget what is gone, and begin again in what can be made anew."""
        self.directory.prepare()
        there = self.directory.list().segments
        with self.lock:
            lost = [s for s in self.books.segments.values() if not s.gone and s.opened and s.name not in there]
        for segment in lost:
            self.lost_segment(segment)
        self.marker.unsure = True
        if self.upkeep.journal.lost:
            self.upkeep.begin()
            log.warning("disk tier %s: the directory was removed; it was made anew", self.directory.root)
            self.counters.add("recreated")

    def _stop(self, error: OSError) -> WriteOutcome:
        """Store nothing for a while: the medium refuses."""
        log.info("disk tier %s: %s", self.directory.root, error)
        self.pause(told(error))
        if error.errno in GONE:
            self.upkeep.journal.broken = True  # it may be of a device that went; what is there now has another
        code = errno.errorcode.get(error.errno or 0, "other").lower()
        self.counters.add(f"write_failed_{code}")
        return WriteOutcome(stored=False, reason="full" if error.errno in FULL else "error")
