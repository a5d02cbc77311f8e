"""One directory of a device tier: its threads, how fast it is, and whether it answers.

What may hang is asked on threads of the device's own, with patience, so that a hung device holds up nobody who asks another.
Two of them, because a change may take as long as a write and a lookup may not.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TypeVar

from headstart.errors import ExtentCorrupt, StoreError
from headstart.metrics import Counters
from headstart.policy.placement import Estimate, Room
from headstart.tier.base import ExtentId, ReadRange
from headstart.tier.devices.listing import State
from headstart.tier.disk import DiskTier
from headstart.tier.lookup_thread import Late, LookupThread, Patience

LOOKUP_PATIENCE_S = 0.1  # below that of who asks the tier, so that one device that hangs does not look like all of them
SILENT_S = 2.0  # a lookup that is late by so much: nothing is written there either until it ends
CHANGE_PATIENCE_S = 15.0
HANG_S = 10.0  # a read that takes longer: the device is passed over until it ends
REFUSED_S = 10.0  # how long nothing more is written to a device that did not take a write
FAILED_EXTENTS = 3  # that could not be read, none other having been in between: it is the device, not the extents
_NOT_THE_DEVICE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}

log = logging.getLogger(__name__)
T = TypeVar("T")


class Device:
    """A directory that is or will be open. It is opened once; a device that was gone comes back as another one with another
    `serial`, so that no id is used twice. `whole_bytes`: what all devices together may hold, as far as it was told."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.serial = 0  # given when it joins the tier
        self.path = path
        self.id = ""
        self.state: State = "active"
        self.room: Room | None = None  # where it is the only one
        self.capacity_bytes = 0
        self.whole_bytes = 0
        self.tier: DiskTier | None = None
        self.counters = Counters()
        self.reading = Meter(clock)
        self.writing = Meter(clock)
        self.lookups = LookupThread(f"disk-{path.name}")
        self.changes = LookupThread(f"disk-{path.name}-change")
        self.out = False  # its reads fail; `probe` brings it back
        self.gone = False  # what is mounted there is another file system, or none
        self._clock = clock
        self._lock = Lock()
        self._failed: set[ExtentId] = set()
        self._refused_until = 0.0
        self._file_system: int | None = None

    def opened(self, tier: DiskTier) -> None:
        self._file_system = _file_system(self.path)
        self.tier = tier

    @property
    def answers(self) -> bool:
        """Whether it is worth asking."""
        return self._usable and not self.lookups.stuck

    @property
    def takes_writes(self) -> bool:
        """Whether it is worth writing to. A lookup that is merely late says nothing about that: a write may take long."""
        willing = self.state == "active" and not self.changes.stuck and self._clock() >= self._refused_until
        return self._usable and willing and self.lookups.stuck_s < SILENT_S

    @property
    def _usable(self) -> bool:
        usable = self.tier is not None and not self.out and not self.gone
        return usable and self.reading.oldest_s() < HANG_S

    def refuse(self) -> None:
        """Let nothing be written here for a while."""
        self._refused_until = self._clock() + REFUSED_S

    def why_not(self) -> str:
        """Return what is the matter in a few words; "" where nothing is."""
        if self.gone or self.tier is None:
            return "not there"
        if self.out:
            return "its reads fail"
        if self.lookups.stuck or self.changes.stuck or self.reading.oldest_s() >= HANG_S:
            return "it does not answer"
        return "" if self.state != "active" or self.takes_writes else "it refuses writes"

    def look_up(self, work: Callable[[DiskTier], T]) -> Future[T]:
        """Have something quick done, in order; `answer_of` waits for it."""
        return self.lookups.hand_over(lambda: work(self._there()))

    def change(
        self, work: Callable[[DiskTier], T], *, patience_s: float = CHANGE_PATIENCE_S, undo: Callable[[T], None] | None = None
    ) -> T:
        """Have something done that may take as long as a write. Raises what it raises, and StoreError where it takes too long
        or the device is known to hang."""
        if self.changes.stuck:
            raise self._late()
        try:
            return self.changes.ask(lambda: work(self._there()), patience_s=patience_s, undo=undo)
        except Late:
            self.counters.add("change_timed_out")
            raise self._late() from None

    def answer_of(self, future: Future[T], patience: Patience, *, undo: Callable[[T], None] | None = None) -> T:
        """Return what a lookup brings. Raises as `change` does."""
        try:
            return self.lookups.answer(future, patience, undo=undo)
        except Late:
            self.counters.add("lookup_timed_out")
            raise self._late() from None

    def read(self, tier: DiskTier, read: ReadRange, extent: ExtentId) -> int:
        """Read on the caller's thread; measured, and counted for or against the device. `extent`: as the tier names it."""
        if self.out or self.gone:
            raise StoreError(f"device {self.path} is out: {self.why_not()}", reason="gone", tier=DiskTier.name)
        try:
            with self.reading.busy() as done:
                nbytes = tier.read([ReadRange(extent, read.offset, read.buffers)])
                done(nbytes)
        except ExtentCorrupt:
            raise
        except OSError as error:
            if error.errno not in _NOT_THE_DEVICE:
                self._note_failure(extent)
            raise
        if self._failed:
            with self._lock:
                self._failed.clear()
        return nbytes

    def probe(self) -> bool:
        """Try whether a device whose reads failed is back: a block that is written and read, or one of the extents."""

        def try_it(tier: DiskTier) -> None:
            try:
                tier.probe()
            except OSError:
                self._read_one(tier)

        try:
            self.change(try_it)
        except (OSError, StoreError):
            return False
        with self._lock:
            self._failed.clear()
        self.out = False
        log.warning("disk tier: device %s answers again and is used again", self.path)
        return True

    def close(self, deadline: float) -> bool:
        """Close the tier and end the threads; False, and they are left behind, if that takes longer."""
        tier = self.tier
        if tier is not None:
            future = self.changes.hand_over(tier.close)
            try:
                self.changes.answer(future, Patience(deadline - time.monotonic()))
            except Late:
                log.warning("disk tier: device %s hangs and is left as it is", self.path)
            except (OSError, StoreError) as error:
                log.warning("disk tier: device %s was not closed well (%s)", self.path, error)
        ended = self.changes.close(deadline - time.monotonic())
        return self.lookups.close(deadline - time.monotonic()) and ended

    def __repr__(self) -> str:
        return f"<Device {self.serial} at {self.path}, {self.state}{', ' + why if (why := self.why_not()) else ''}>"

    def _there(self) -> DiskTier:
        """Return the tier, if what is mounted is what it was opened on: nothing is begun anew below an empty mount point."""
        if self.tier is None or self.gone:
            raise self._lost()
        if _file_system(self.path) != self._file_system:
            self.gone = True
            log.warning(
                "disk tier: device %s is gone; its blocks are misses, and it is looked for every few seconds", self.path
            )
            raise self._lost()
        return self.tier

    def _note_failure(self, extent: ExtentId) -> None:
        with self._lock:
            self._failed.add(extent)
            falls = len(self._failed) >= FAILED_EXTENTS and not self.out
            if falls:
                self.out = True
        if falls:
            self.counters.add("taken_out")
            log.warning(
                "disk tier: device %s fails in every read and is taken out; it is tried again every few seconds", self.path
            )

    def _read_one(self, tier: DiskTier) -> None:
        with self._lock:
            failed = list(self._failed)
        for extent in failed:
            if tier.lease([extent]) == [True]:
                try:
                    tier.read([ReadRange(extent, 0, [memoryview(bytearray(4096))])])
                finally:
                    tier.release([extent])
                return
        raise OSError(errno.EIO, "nothing of it can be read", str(self.path))

    def _late(self) -> StoreError:
        return StoreError(f"device {self.path} does not answer", reason="hangs", tier=DiskTier.name)

    def _lost(self) -> StoreError:
        return StoreError(f"device {self.path} is not there", reason="gone", tier=DiskTier.name)


class Meter:
    """How fast a device is while it is busy, by what is done anyway. Safe from many threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.estimate = Estimate()
        self._clock = clock
        self._lock = Lock()
        self._since: dict[object, float] = {}
        self._mark = 0.0  # up to when `_busy_s` counts
        self._busy_s = 0.0

    def begin(self, *, watched: bool = True) -> object:
        """Note that an access begins; `end` is given what this returns. `watched`: it counts in `oldest_s`."""
        token = object()
        with self._lock:
            self._count_time()
            self._since[token] = self._mark if watched else math.inf
        return token

    def end(self, token: object, nbytes: int) -> None:
        with self._lock:
            self._count_time()
            del self._since[token]
            self.estimate = self.estimate.with_sample(nbytes, self._busy_s)
            self._busy_s = 0.0

    @contextmanager
    def busy(self) -> Iterator[Callable[[int], None]]:
        """Measure what is done inside; it says how many bytes that were."""
        moved = 0

        def done(nbytes: int) -> None:
            nonlocal moved
            moved = nbytes

        token = self.begin()
        try:
            yield done
        finally:
            self.end(token, moved)

    @property
    def under_way(self) -> int:
        return len(self._since)

    def oldest_s(self) -> float:
        """Return for how long the oldest access has been under way."""
        if not self._since:
            return 0.0
        with self._lock:
            oldest = min(self._since.values(), default=math.inf)
            return max(0.0, self._clock() - oldest)

    def _count_time(self) -> None:
        now = self._clock()
        if self._since:
            self._busy_s += now - self._mark
        self._mark = now


def _file_system(path: Path) -> int | None:
    """Return the number of the file system that `path`, or where it would be made, lies on."""
    for there in (path, *path.parents):
        try:
            return os.stat(there).st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None
