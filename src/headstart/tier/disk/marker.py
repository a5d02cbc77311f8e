"""The lock on `headstart.json`, and the mark in it. Who holds the lock is the only process that may make the file system charge
more for the directory; the mark tells who comes next that somebody died over it.

The mark is the file's last byte: a line feed, or a space from before anything is charged until it is known what was. It takes
no space and needs no sync: after a power loss every process opens the directory anew, and measures it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from headstart.errors import StoreError
from headstart.tier.disk.directory import MARKER, Directory
from headstart.tier.disk.door import Disk, Handle

ALONE_S, ALONE_PAUSE_S = 10.0, 0.002  # how long another process may charge the directory, and how often that is asked
AGAIN_S = 0.5  # and how long who has waited in vain, while opening or for one that is stopped, waits the next times
_AT_REST, _AT_WORK = b"\n", b" "


class Marker:
    """Held by one thread at a time (the store's turn); who holds it may take it again. `unsure`: what is charged is not known,
    because somebody died or failed over it; whoever measures all of it anew clears that. `busy`: who held it for too long when
    it was last asked for, in words; "" where nobody did."""

    def __init__(self, disk: Disk, directory: Directory) -> None:
        self.unsure = True  # nothing was measured yet
        self.busy = ""
        self._disk = disk
        self._directory = directory
        self._handle: Handle | None = None
        self._mark_at: int | None = None
        self._waits_s = ALONE_S
        self._opening = True

    def opened(self) -> None:
        """The opening, which may come to wait several times, is over."""
        self._opening, self._waits_s = False, ALONE_S

    @property
    def held(self) -> bool:
        return self._handle is not None

    @contextmanager
    def hold(self, *, charging: bool, wait_s: float = ALONE_S) -> Iterator[bool]:
        """Keep all other processes from charging anything. `charging`: this one will. False: another one was too long about it.
        Raises OSError."""
        if self.held:
            if charging:
                self._mark()
            yield True
            return
        handle = self._disk.open(self._directory.root / MARKER, "write")
        try:
            waits_s = min(wait_s, self._waits_s)
            if not self._wait(handle, waits_s):
                if wait_s:
                    holder = self._disk.lock_holder(handle)
                    self.busy = f"{holder} has been writing for too long"
                    self._waits_s = AGAIN_S if self._opening or holder.stopped else ALONE_S
                yield False
                return
            self.busy, self._waits_s = "", ALONE_S
            self._handle, self._mark_at = handle, None
            try:
                if charging:
                    self._mark()
                yield True
            except BaseException:
                self.unsure = True
                raise
            finally:
                if self._mark_at is not None and not self.unsure:
                    with suppress(OSError):  # then the next one measures
                        self._disk.write(handle, _AT_REST, self._mark_at)
                self._handle = None
        finally:
            with suppress(OSError):  # the lock ends with it
                self._disk.close(handle)

    def _wait(self, handle: Handle, wait_s: float) -> bool:
        for _ in range(int(wait_s / ALONE_PAUSE_S)):
            if self._disk.lock_file(handle):
                return True
            time.sleep(ALONE_PAUSE_S)
        return self._disk.lock_file(handle)

    def _mark(self) -> None:
        """Say that something is being charged, and learn whether who said so before was done."""
        assert self._handle is not None, "who marks holds the lock"
        if self._mark_at is not None:
            return
        last, end = bytearray(1), self._disk.facts(self._handle).size
        with suppress(OSError, StoreError):  # it cannot be read, or was cut meanwhile
            self._disk.read(self._handle, [memoryview(last)], max(0, end - 1))
        if last != _AT_REST:
            self.unsure = True
        at = end - 1 if last in (_AT_REST, _AT_WORK) and end else end
        self._disk.write(self._handle, _AT_WORK, at)
        self._mark_at = at
