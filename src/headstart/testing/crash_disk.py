"""A disk in memory that can lose its power. It knows what was synced, and gives the tier above no more than that afterwards.

Fault model of `power_cut(seed)`; the seed decides, so a run repeats:

- What a `sync` of the file covered stays. Every later write of it is cut into units (512 bytes, or 4 KiB: the seed says), and
  each unit is kept or lost by itself, so writes are torn and, where they overlap, reordered. Whole files also fare all or
  nothing, as they mostly do.
- A file that grew has its old length, its new one with zeros in place of what was lost, or one in between.
- A later `truncate` or `punch` has happened or has not. Space that was only reserved holds no promise.
- A name that was created, renamed or removed since the last `sync_directory` of its directory is as it is or as it was; a
  rename is one change, never half of it. A directory that was lost takes everything in it along.
- `kill()` is the lesser crash: the process dies, the machine lives. Every call that returned has happened.

Both end every lock and make every handle of before invalid. Assumed: bytes that were synced do not change by themselves (that
is `damage`), no file ever shows bytes of another one, and `sync` does not lie.
"""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from threading import RLock

from headstart.errors import StoreError
from headstart.tier.disk.door import Entry, FileFacts, Handle, LockHolder, OpenMode, Space

_PAGE = 4096


@dataclass(slots=True, eq=False)
class _File:
    """`data`: what readers see. `durable`: what certainly lies on the medium. `pending`: what happened since, in order."""

    inode: int
    data: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)
    pages: set[int] = field(default_factory=set)
    whole_lock: Handle | None = None
    range_locks: list[_RangeLock] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Write:
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Truncate:
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Punch:
    offset: int
    nbytes: int


_Change = _Write | _Truncate | _Punch


@dataclass(frozen=True, slots=True)
class _RangeLock:
    handle: Handle
    start: int
    end: int
    exclusive: bool


@dataclass(frozen=True, slots=True)
class _NameChange:
    """Names that go and names that come, at once. The node of a directory is None."""

    removed: tuple[str, ...] = ()
    added: tuple[tuple[str, _File | None], ...] = ()

    def concerns(self, directory: str) -> bool:
        return any(_parent(name) == directory for name in (*self.removed, *(name for name, _ in self.added)))

    def apply(self, names: _Names) -> None:
        for name in self.removed:
            names.pop(name, None)
        names.update(self.added)


_Names = dict[str, _File | None]  # paths as text: as objects they take longer to make than all the rest


class CrashDisk:
    """Implements `Disk` without touching a real one. `size_bytes` is all that it holds; a write beyond is ENOSPC.

    `root` exists from the start and holds everything. `direct` is what `probe` answers; `holes` whether it can punch."""

    def __init__(
        self, root: Path = Path("/disk"), *, size_bytes: int = 1 << 30, direct: bool = True, holes: bool = True
    ) -> None:
        self.root = root
        self.size_bytes = size_bytes
        self._direct = direct
        self._holes = holes
        self._lock = RLock()
        self._names: _Names = {str(root): None}
        self._durable_names: _Names = dict(self._names)
        self._pending_names: list[_NameChange] = []
        self._open: dict[Handle, tuple[_File, bool]] = {}
        self._numbers = itertools.count(3)

    # Crashes and rot.

    def kill(self) -> None:
        """The process dies: locks and handles end, every byte stays."""
        with self._lock:
            self._open.clear()
            for file in self._files():
                file.whole_lock = None
                file.range_locks.clear()

    def power_cut(self, seed: int) -> None:
        """The power goes; see the fault model above."""
        choice = random.Random(seed)
        with self._lock:
            self.kill()
            self._lose_names(choice)
            for file in sorted(self._files(), key=lambda f: f.inode):
                _lose_data(file, choice)

    def damage(self, path: Path, offset: int, *, mask: int = 0x01) -> None:
        """Flip bits of one byte at rest."""
        with self._lock:
            file = self._file(path)
            for data in (file.data, file.durable):
                if offset < len(data):
                    data[offset] ^= mask

    def files(self) -> dict[Path, bytes]:
        """Return every file's bytes as a reader sees them now."""
        with self._lock:
            return {Path(path): bytes(file.data) for path, file in sorted(self._names.items()) if file is not None}

    def allocated_bytes(self) -> int:
        """Return what all files are charged, also those that only an open handle keeps."""
        with self._lock:
            held = {file.inode: file for file, _ in self._open.values()} | {file.inode: file for file in self._files()}
            return sum(len(file.pages) for file in held.values()) * _PAGE

    # The door.

    def probe(self, directory: Path) -> bool:
        with self._lock:
            self._directory(directory)
            return self._direct

    def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
        with self._lock:
            name = str(path)
            if mode == "create":
                if name in self._names:
                    raise _error(errno.EEXIST, path)
                self._directory(path.parent)
                created = _File(next(self._numbers))
                self._change_names(_NameChange(added=((name, created),)))
            handle = Handle(next(self._numbers))
            self._open[handle] = (self._file(path), mode != "read")
            return handle

    def close(self, handle: Handle) -> None:
        with self._lock:
            file, _ = self._opened(handle)
            del self._open[handle]
            if file.whole_lock == handle:
                file.whole_lock = None
            file.range_locks = [lock for lock in file.range_locks if lock.handle != handle]

    def read(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> int:
        wanted = sum(buffer.nbytes for buffer in buffers)
        with self._lock:
            file, _ = self._opened(handle)
            found = bytes(file.data[offset : offset + wanted])
        at = 0
        for buffer in buffers:
            part = found[at : at + buffer.nbytes]
            buffer.cast("B")[: len(part)] = part
            at += len(part)
        if at < wanted:
            raise StoreError(f"a read at byte {offset} ended after {at} of {wanted} bytes", reason="short-read")
        return wanted

    def write(self, handle: Handle, data: memoryview | bytes, offset: int) -> None:
        written = bytes(data)
        with self._lock:
            file = self._writable(handle)
            self._charge(file, offset, len(written))
            self._change(file, _Write(offset, written))

    def reserve(self, handle: Handle, offset: int, nbytes: int) -> bool:
        with self._lock:
            self._charge(self._writable(handle), offset, nbytes)
            return True

    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        if not self._holes:
            return False
        with self._lock:
            file = self._writable(handle)
            file.pages -= set(range(-(-offset // _PAGE), (offset + nbytes) // _PAGE))
            self._change(file, _Punch(offset, nbytes))
            return True

    def truncate(self, handle: Handle, nbytes: int) -> None:
        with self._lock:
            file = self._writable(handle)
            file.pages = {page for page in file.pages if page * _PAGE < nbytes}
            self._change(file, _Truncate(nbytes))

    def sync(self, handle: Handle) -> None:
        with self._lock:
            file, _ = self._opened(handle)
            for change in file.pending:
                _apply(file.durable, change)
            file.pending.clear()

    def sync_directory(self, path: Path) -> None:
        with self._lock:
            self._directory(path)
            left = []
            for change in self._pending_names:
                if change.concerns(str(path)):
                    change.apply(self._durable_names)
                else:
                    left.append(change)
            self._pending_names = left

    def lock_file(self, handle: Handle) -> bool:
        with self._lock:
            file, _ = self._opened(handle)
            if file.whole_lock not in (None, handle):
                return False
            file.whole_lock = handle
            return True

    def lock_holder(self, handle: Handle) -> LockHolder:
        return LockHolder()

    def lock_range(self, handle: Handle, offset: int, nbytes: int, *, exclusive: bool) -> bool:
        with self._lock:
            file, _ = self._opened(handle)
            end = offset + nbytes
            for lock in file.range_locks:
                if lock.handle != handle and lock.start < end and offset < lock.end and (exclusive or lock.exclusive):
                    return False
            self.unlock_range(handle, offset, nbytes)
            file.range_locks.append(_RangeLock(handle, offset, end, exclusive))
            return True

    def unlock_range(self, handle: Handle, offset: int, nbytes: int) -> None:
        with self._lock:
            file, _ = self._opened(handle)
            end = offset + nbytes
            kept: list[_RangeLock] = []
            for lock in file.range_locks:
                if lock.handle != handle or lock.end <= offset or end <= lock.start:
                    kept.append(lock)
                    continue
                if lock.start < offset:
                    kept.append(_RangeLock(handle, lock.start, offset, lock.exclusive))
                if end < lock.end:
                    kept.append(_RangeLock(handle, end, lock.end, lock.exclusive))
            file.range_locks = kept

    def facts(self, handle: Handle) -> FileFacts:
        with self._lock:
            return self._facts(self._opened(handle)[0])

    def stat(self, path: Path) -> FileFacts:
        with self._lock:
            name = str(path)
            if name not in self._names:
                raise _error(errno.ENOENT, path)
            file = self._names[name]
            return FileFacts(0, 0, 2, 0) if file is None else self._facts(file)

    def space(self, path: Path) -> Space:
        with self._lock:
            return Space(self.size_bytes, max(0, self.size_bytes - self.allocated_bytes()))

    def entries(self, path: Path) -> list[Entry]:
        with self._lock:
            self._directory(path)
            above = f"{path}/"
            inside = [(name.removeprefix(above), file) for name, file in self._names.items() if name.startswith(above)]
            return [Entry(name, file is None) for name, file in sorted(inside, key=itemgetter(0)) if "/" not in name]

    def make_directory(self, path: Path) -> None:
        with self._lock:
            name = str(path)
            if name in self._names:
                if self._names[name] is not None:
                    raise _error(errno.EEXIST, path)
                return
            self._directory(path.parent)
            self._change_names(_NameChange(added=((name, None),)))

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            file = self._file(source)
            self._directory(target.parent)
            self._change_names(_NameChange((str(source),), ((str(target), file),)))

    def unlink(self, path: Path) -> None:
        with self._lock:
            self._file(path)
            self._change_names(_NameChange(removed=(str(path),)))

    # Inside; the lock is held.

    def _files(self) -> list[_File]:
        return [file for file in self._names.values() if file is not None]

    def _file(self, path: Path) -> _File:
        name = str(path)
        if name not in self._names:
            raise _error(errno.ENOENT, path)
        file = self._names[name]
        if file is None:
            raise _error(errno.EISDIR, path)
        return file

    def _directory(self, path: Path) -> None:
        name = str(path)
        if name not in self._names:
            raise _error(errno.ENOENT, path)
        if self._names[name] is not None:
            raise _error(errno.ENOTDIR, path)

    def _opened(self, handle: Handle) -> tuple[_File, bool]:
        if handle not in self._open:
            raise _error(errno.EBADF, Path(f"handle {handle}"))
        return self._open[handle]

    def _writable(self, handle: Handle) -> _File:
        file, writable = self._opened(handle)
        if not writable:
            raise _error(errno.EBADF, Path(f"handle {handle}"))
        return file

    def _facts(self, file: _File) -> FileFacts:
        links = sum(1 for other in self._names.values() if other is file)
        return FileFacts(len(file.data), len(file.pages) * _PAGE, links, file.inode)

    def _charge(self, file: _File, offset: int, nbytes: int) -> None:
        new = set(range(offset // _PAGE, -(-(offset + nbytes) // _PAGE))) - file.pages
        if self.allocated_bytes() + len(new) * _PAGE > self.size_bytes:
            raise _error(errno.ENOSPC, self.root)
        file.pages |= new

    def _change(self, file: _File, change: _Change) -> None:
        file.pending.append(change)
        _apply(file.data, change)

    def _change_names(self, change: _NameChange) -> None:
        self._pending_names.append(change)
        change.apply(self._names)

    def _lose_names(self, choice: random.Random) -> None:
        names = self._durable_names
        for change in self._pending_names:
            if choice.random() < 0.5:
                change.apply(names)
        for name in sorted(names, key=lambda name: name.count("/")):
            if name != str(self.root) and _parent(name) not in names:
                del names[name]
        self._pending_names = []
        self._names = dict(names)


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


def _apply(data: bytearray, change: _Change) -> None:
    match change:
        case _Write(offset, written):
            if offset > len(data):
                data.extend(bytes(offset - len(data)))
            data[offset : offset + len(written)] = written
        case _Truncate(nbytes):
            del data[nbytes:]
            data.extend(bytes(nbytes - len(data)))
        case _Punch(offset, nbytes):
            end = min(offset + nbytes, len(data))
            data[offset:end] = bytes(max(0, end - offset))


def _lose_data(file: _File, choice: random.Random) -> None:
    """Decide what of a file's unsynced changes the power cut left."""
    kept_share = choice.choice((0.0, 0.5, 0.9, 1.0))
    unit = choice.choice((512, _PAGE))
    changes = [part for change in file.pending for part in _units(change, unit)]
    if choice.random() < 0.5 and all(isinstance(change, _Write) for change in changes):
        choice.shuffle(changes)
    left = bytearray(file.durable)
    for change in changes:
        if choice.random() < kept_share:
            _apply(left, change)
    if len(left) < len(file.data) and choice.random() < 0.3:
        left.extend(bytes(len(file.data) - len(left)))  # the length reached the medium, the bytes did not
    file.data, file.durable = left, bytearray(left)
    file.pending.clear()
    # Reserved space stays charged, and so does what came back because its removal was lost.
    file.pages |= {at // _PAGE for at in range(0, len(left), _PAGE) if any(left[at : at + _PAGE])}


def _units(change: _Change, unit: int) -> list[_Change]:
    if not isinstance(change, _Write):
        return [change]
    start, end = change.offset, change.offset + len(change.data)
    edges = [start, *range((start // unit + 1) * unit, end, unit), end]
    return [_Write(a, change.data[a - start : b - start]) for a, b in itertools.pairwise(edges) if b > a]


def _error(number: int, path: Path) -> OSError:
    return OSError(number, errno.errorcode[number], str(path))
