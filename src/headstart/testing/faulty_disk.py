"""A disk that fails as disks do: `FaultyDisk` stands between a tier and any other `Disk` and breaks chosen calls.

Its faults are those that `tier.disk.door` allows: an error before or after a call had its effect, a write that is cut, a read
that is short, bits that rotted, a device that hangs, a mount that vanishes, and a process that dies amid its n-th call.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from typing import Literal, TypeVar

from headstart.errors import StoreError
from headstart.tier.disk.door import Disk, Entry, FileFacts, Handle, LockHolder, OpenMode, Space

DiskFaultKind = Literal[
    "eio", "enospc", "edquot", "emfile", "enfile", "erofs", "enodev", "vanished", "late", "short", "flip", "stall"
]
_ERRNO = {
    "eio": errno.EIO,
    "enospc": errno.ENOSPC,
    "edquot": errno.EDQUOT,
    "emfile": errno.EMFILE,
    "enfile": errno.ENFILE,
    "enodev": errno.ENODEV,
    "erofs": errno.EROFS,
    "vanished": errno.ESTALE,
    "late": errno.EIO,
}
_T = TypeVar("_T")


class ProcessDied(BaseException):
    """The process is dead from here on: nobody catches this but the test that killed it."""


@dataclass(frozen=True, slots=True)
class DiskFault:
    """Every `every`-th call named `call` ("any": all of them), from number `start` on and at most `times` times, fails by
    `kind`: an errno before its effect, "late" (EIO after its effect), "short" (a read or write does half and raises),
    "flip" (a read flips one bit and says nothing), "stall" (waits until `heal`, then goes on)."""

    call: str
    kind: DiskFaultKind
    every: int = 1
    start: int = 1
    times: int | None = None


class FaultyDisk:
    """`injected[call, kind]` counts faults, `calls` all calls; `die_at(n)` kills the process amid the n-th call from now."""

    def __init__(self, inner: Disk, *faults: DiskFault, stall_s: float = 20.0) -> None:
        self.inner = inner
        self.calls: Counter[str] = Counter()
        self.injected: Counter[tuple[str, DiskFaultKind]] = Counter()
        self.died = Event()
        self.stalled = Event()
        self._faults = list(faults)
        self._stall_s = stall_s
        self._resume = Event()
        self._lock = Lock()
        self._dies_in: int | None = None
        self._dies_after = False
        self._handles: set[Handle] = set()

    def inject(self, *faults: DiskFault) -> None:
        """Add faults; their `start` counts calls from now."""
        with self._lock:
            total = self.calls.total()
            self._faults += [replace(f, start=f.start + (total if f.call == "any" else self.calls[f.call])) for f in faults]
            self._resume.clear()

    def heal(self) -> None:
        """No more faults; let stalled calls go on. The dead stay dead."""
        with self._lock:
            self._faults.clear()
            self.stalled.clear()
            self._resume.set()

    def die_at(self, call: int, *, after: bool = False) -> None:
        """Let the `call`-th call from now (1: the next one) raise ProcessDied, and every later one at once. It has happened in
        part, or as a whole (`after`)."""
        with self._lock:
            self._dies_in, self._dies_after = call, after

    def bury(self) -> None:
        """End what a process's end ends: from now on every call dies, and the handles (with their locks) are closed."""
        self.died.set()
        self.heal()
        with self._lock:
            handles, self._handles = self._handles, set()
        for handle in handles:
            with suppress(OSError):  # a CrashDisk that has crashed has forgotten them
                self.inner.close(handle)

    # The door.

    def probe(self, directory: Path) -> bool:
        return self._call("probe", lambda: self.inner.probe(directory))

    def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
        handle = self._call("open", lambda: self.inner.open(path, mode, bulk=bulk))
        with self._lock:
            self._handles.add(handle)
        return handle

    def close(self, handle: Handle) -> None:
        self._call("close", lambda: self.inner.close(handle))
        with self._lock:
            self._handles.discard(handle)

    def read(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> int:
        def half() -> None:
            first = next((b for b in buffers if b.nbytes), None)
            if first is not None:
                self.inner.read(handle, [first.cast("B")[: first.nbytes // 2]], offset)
            raise StoreError(f"a read at byte {offset} was short, as injected", reason="short-read")

        def flip() -> None:
            first = next((b for b in buffers if b.nbytes), None)
            if first is not None:
                first.cast("B")[first.nbytes // 2] ^= 0x08

        return self._call("read", lambda: self.inner.read(handle, buffers, offset), half=half, flip=flip)

    def write(self, handle: Handle, data: memoryview | bytes, offset: int) -> None:
        def half() -> None:
            self.inner.write(handle, bytes(data)[: len(bytes(data)) // 2], offset)
            raise OSError(errno.ENOSPC, "a write was cut, as injected")

        self._call("write", lambda: self.inner.write(handle, data, offset), half=half)

    def reserve(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return self._call("reserve", lambda: self.inner.reserve(handle, offset, nbytes))

    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return self._call("punch", lambda: self.inner.punch(handle, offset, nbytes))

    def truncate(self, handle: Handle, nbytes: int) -> None:
        self._call("truncate", lambda: self.inner.truncate(handle, nbytes))

    def sync(self, handle: Handle) -> None:
        self._call("sync", lambda: self.inner.sync(handle))

    def sync_directory(self, path: Path) -> None:
        self._call("sync_directory", lambda: self.inner.sync_directory(path))

    def lock_file(self, handle: Handle) -> bool:
        return self._call("lock_file", lambda: self.inner.lock_file(handle))

    def lock_holder(self, handle: Handle) -> LockHolder:
        return self.inner.lock_holder(handle)

    def lock_range(self, handle: Handle, offset: int, nbytes: int, *, exclusive: bool) -> bool:
        return self._call("lock_range", lambda: self.inner.lock_range(handle, offset, nbytes, exclusive=exclusive))

    def unlock_range(self, handle: Handle, offset: int, nbytes: int) -> None:
        self._call("unlock_range", lambda: self.inner.unlock_range(handle, offset, nbytes))

    def facts(self, handle: Handle) -> FileFacts:
        return self._call("facts", lambda: self.inner.facts(handle))

    def stat(self, path: Path) -> FileFacts:
        return self._call("stat", lambda: self.inner.stat(path))

    def space(self, path: Path) -> Space:
        return self._call("space", lambda: self.inner.space(path))

    def entries(self, path: Path) -> list[Entry]:
        return self._call("entries", lambda: self.inner.entries(path))

    def make_directory(self, path: Path) -> None:
        self._call("make_directory", lambda: self.inner.make_directory(path))

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename", lambda: self.inner.rename(source, target))

    def unlink(self, path: Path) -> None:
        self._call("unlink", lambda: self.inner.unlink(path))

    def _call(
        self,
        name: str,
        act: Callable[[], _T],
        *,
        half: Callable[[], None] | None = None,
        flip: Callable[[], None] | None = None,
    ) -> _T:
        kind, dies = self._strike(name)
        if dies:
            with suppress(OSError, StoreError):
                if self._dies_after:
                    act()
                elif half is not None:
                    half()
            self.died.set()
        if self.died.is_set():
            raise ProcessDied(f"dead in {name}")
        if kind == "stall":
            self.stalled.set()
            self._resume.wait(self._stall_s)
        if kind == "short" and half is not None:
            half()
        if kind == "late":
            act()
        if kind in _ERRNO:
            raise OSError(_ERRNO[kind], f"injected into {name}")
        done = act()
        if kind == "flip" and flip is not None:
            flip()
        return done

    def _strike(self, name: str) -> tuple[DiskFaultKind | None, bool]:
        """Count a call; return what goes wrong with it and whether the process dies in it."""
        with self._lock:
            self.calls[name] += 1
            if self._dies_in is not None:
                self._dies_in -= 1
                if self._dies_in == 0:
                    return None, True
            fault = next((f for f in self._faults if self._due(f, name)), None)
            if fault is None:
                return None, False
            self.injected[name, fault.kind] += 1
            if fault.times is not None:
                self._faults.remove(fault)
                if fault.times > 1:
                    self._faults.append(replace(fault, times=fault.times - 1))
            return fault.kind, False

    def _due(self, fault: DiskFault, name: str) -> bool:
        if fault.call not in ("any", name):
            return False
        turn = (self.calls.total() if fault.call == "any" else self.calls[name]) - fault.start
        return turn >= 0 and turn % fault.every == 0
