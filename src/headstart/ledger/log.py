"""The usage log on disk: lines are appended by one thread, synced within a second, in files that have one writer each.

    add ─▶ queue ─▶ write at once ─▶ fsync at most SYNC_S later ─▶ next file at FILE_BYTES ─▶ above `keep_bytes` the oldest go

A process that is killed loses what waits in the queue, some milliseconds; a machine without power at most a second. A line
that a kill or a full disk has torn is the last of its file, and readers drop it. While the medium is full, read-only or
broken, lines wait in memory and are written when it is well again; a folder that was taken away is made again. Nothing that
fails here reaches a request.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from headstart.errors import UsageLogFailed
from headstart.ledger.entry import Entry, encode
from headstart.metrics import Counters

SYNC_S = 0.5
FILE_BYTES = 16 << 20
PATTERN = "usage-*.jsonl"
_MOST_WAITING = 100_000  # lines; some 50 MB that a hanging disk may hold up
_RETRY_S = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger("headstart")


class UsageLog:
    """Appends to a file of its own in `directory`. Safe from many threads; `add` never blocks.

    `keep_bytes`: of all files there together, beside the one that is being written. Raises UsageLogFailed where the folder
    cannot be had."""

    def __init__(self, directory: Path, *, keep_bytes: int, file_bytes: int = FILE_BYTES, sync_s: float = SYNC_S) -> None:
        self.directory = directory
        self.counters = Counters()
        self._keep_bytes = keep_bytes
        self._file_bytes = min(file_bytes, max(1 << 16, keep_bytes // 4))
        self._sync_s = sync_s
        self._condition = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._unsynced = 0  # lines that were added and are not known to be on the medium
        self._closing = False
        self._number = 0
        self._name = f"{time.time_ns() // 1_000_000:013d}-{os.getpid()}"
        self._file: int | None = None
        self._path: Path | None = None
        self._size = 0
        self._written: list[bytes] = []  # since the last fsync
        self._device: int | None = None
        self._failing: set[str] = set()
        try:
            self._open()
        except OSError as error:
            raise UsageLogFailed(
                f"the usage log cannot be kept in {directory}: {error.strerror or error}; choose another folder with "
                "server.usage_log, or server.usage_keep = 0 to keep none",
                path=directory,
            ) from error
        self._thread = threading.Thread(target=self._work, name="usage-log", daemon=True)
        self._thread.start()

    def add(self, entry: Entry) -> None:
        """Have a line written soon."""
        line = encode(entry)
        with self._condition:
            taken = len(self._queue) < _MOST_WAITING and not self._closing
            if taken:
                self._queue.append(line)
                self._unsynced += 1
                self._condition.notify_all()
        if not taken:
            self.counters.add("usage_lines_lost")
            self._complain("hold", f"{_MOST_WAITING} lines wait for the disk, and more are lost", counter=None)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all that was added is on the medium; False if it took too long."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._unsynced, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write and sync what waits. Twice is fine."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout_s)

    def __enter__(self) -> UsageLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread.

    def _work(self) -> None:
        due_s = 0.0
        while True:
            with self._condition:
                wait_s = max(0.0, due_s - time.monotonic()) if self._written else None
                self._condition.wait_for(lambda: self._queue or self._closing, wait_s)
                lines, self._queue = list(self._queue), deque()
                closing = self._closing
            if lines:
                if not self._written:
                    due_s = time.monotonic() + self._sync_s
                self._write(lines)
                self._written += lines
            if self._written and (closing or time.monotonic() >= due_s):
                self._sync()
                with self._condition:
                    self._unsynced -= len(self._written)
                    self._written = []
                    self._condition.notify_all()
            if closing and not lines:
                break
        if self._file is not None:
            os.close(self._file)
            if not self._size and self._path is not None:
                with suppress(OSError):
                    self._path.unlink()

    def _write(self, lines: Sequence[bytes]) -> None:
        """Write lines in one go; where that fails, again, in another file if need be, until it works or the log is closed."""
        data = b"".join(lines)
        while data:
            try:
                if self._file is None or self._size >= self._file_bytes:
                    self._open()
                assert self._file is not None
                done = os.write(self._file, data)
            except OSError as error:
                self._complain("write", error.strerror or str(error))
                if error.errno not in _FULL:
                    self._size = self._file_bytes  # a file that fails may fail for ever, though the medium is well again
                if self._closing:
                    self.counters.add("usage_lines_lost", data.count(b"\n"))
                    return
                time.sleep(min(_RETRY_S, 0.1 + self._sync_s))
                continue
            self._size += done
            if done < len(data):  # what is left of the torn line is dropped by readers; it stands whole in the next file
                torn = data.rfind(b"\n", 0, done) + 1
                data = data[torn:]
                self._size = self._file_bytes
                continue
            self._well("write")
            return

    def _sync(self) -> None:
        """Have what was written on the medium. Where the file was taken away meanwhile, write it once more in another."""
        where = self._where()
        if where != "here":
            self._size = self._file_bytes  # what comes next is for where the log is
        if where == "gone":
            _log.warning("the usage log in %s was taken away; it goes on in a new file", self.directory)
            self._write(self._written)
        self._fsync()

    def _where(self) -> Literal["here", "elsewhere", "gone"]:
        """Return whether the file that is written is still what its path names, or lies under another, or under none."""
        with suppress(OSError):  # nothing can be said of it now; it is written on
            assert self._file is not None
            assert self._path is not None
            mine = os.fstat(self._file)
            if not mine.st_nlink:
                return "gone"
            try:
                return "here" if os.path.samestat(mine, self._path.stat()) else "elsewhere"
            except FileNotFoundError:
                return "elsewhere"
        return "here"

    def _open(self) -> None:
        """Begin the next file, and let the oldest ones go that are too much."""
        self._fsync()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._make_folder()
        path = self.directory / f"usage-{self._name}-{self._number:06d}.jsonl"
        self._number += 1
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._path, self._size = path, 0
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so that no other process takes it for an old one
        folder = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._let_go()

    def _make_folder(self) -> None:
        """Make the folder where it is not there: not on another device than it was on, which would lie under its mount."""
        if not self.directory.is_dir():
            there = next(one for one in self.directory.absolute().parents if one.exists())
            if self._device not in (None, there.stat().st_dev):
                raise OSError(errno.ENODEV, "its file system is not there")
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._device = self.directory.stat().st_dev

    def _let_go(self) -> None:
        """Remove files that have no line, and the oldest ones above what is kept; not those that somebody writes."""
        files = []
        for file in sorted(self.directory.glob(PATTERN)):
            with suppress(OSError):
                files.append((file, file.stat().st_size))
        total = sum(size for _, size in files)
        for file, size in files:
            if (size and total <= self._keep_bytes) or not _unused(file):
                continue
            with suppress(FileNotFoundError):
                file.unlink()
            total -= size
            if size:
                _log.warning("the usage log is larger than server.usage_keep; its oldest file %s is gone", file.name)

    def _fsync(self) -> None:
        if self._file is None:
            return
        try:
            os.fsync(self._file)
        except OSError as error:
            self._complain("sync", error.strerror or str(error))
        else:
            self._well("sync")

    def _complain(self, act: str, why: str, *, counter: str | None = "usage_write_failed") -> None:
        """Count a failure, and say it once until that works again."""
        if counter is not None:
            self.counters.add(counter)
        if act not in self._failing:
            self._failing.add(act)
            _log.error("the usage log in %s cannot be written, it is tried again: %s", self.directory, why)

    def _well(self, act: str) -> None:
        if self._failing & {act, "hold"}:
            self._failing -= {act, "hold"}
            _log.warning("the usage log in %s is written again", self.directory)


def _unused(file: Path) -> bool:
    """Whether no process writes `file`."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
