"""The door to a file system of many machines: as any other, but for what holds on one machine only.

Locks are known to one machine, so nothing here relies on one: they are given to whoever asks. Space is not reserved ahead and
no holes are made: few shared file systems can, and what a hole reads as on another machine is nobody's promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headstart.tier.disk.door import Disk, Entry, FileFacts, Handle, LockHolder, OpenMode, RealDisk, Space


class SharedDisk:
    """A `Disk` over another one."""

    def __init__(self, inner: Disk) -> None:
        self._inner = inner

    def probe(self, directory: Path) -> bool:
        return self._inner.probe(directory)

    def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
        return self._inner.open(path, mode, bulk=bulk)

    def close(self, handle: Handle) -> None:
        self._inner.close(handle)

    def read(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> int:
        return self._inner.read(handle, buffers, offset)

    def direct_descriptor(self, handle: Handle) -> int | None:
        """As of `RealDisk`: behind another door nobody may go round it."""
        return self._inner.direct_descriptor(handle) if isinstance(self._inner, RealDisk) else None

    def write(self, handle: Handle, data: memoryview | bytes, offset: int) -> None:
        self._inner.write(handle, data, offset)

    def reserve(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return False

    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return False

    def truncate(self, handle: Handle, nbytes: int) -> None:
        self._inner.truncate(handle, nbytes)

    def sync(self, handle: Handle) -> None:
        self._inner.sync(handle)

    def sync_directory(self, path: Path) -> None:
        self._inner.sync_directory(path)

    def lock_file(self, handle: Handle) -> bool:
        return True

    def lock_holder(self, handle: Handle) -> LockHolder:
        return LockHolder()

    def lock_range(self, handle: Handle, offset: int, nbytes: int, *, exclusive: bool) -> bool:
        return True

    def unlock_range(self, handle: Handle, offset: int, nbytes: int) -> None:
        pass

    def facts(self, handle: Handle) -> FileFacts:
        return self._inner.facts(handle)

    def stat(self, path: Path) -> FileFacts:
        return self._inner.stat(path)

    def space(self, path: Path) -> Space:
        return self._inner.space(path)

    def entries(self, path: Path) -> list[Entry]:
        return self._inner.entries(path)

    def make_directory(self, path: Path) -> None:
        self._inner.make_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._inner.rename(source, target)

    def unlink(self, path: Path) -> None:
        self._inner.unlink(path)
