"""The only door to the operating system's files. `RealDisk` is the door in use; tests put faults into another one.

Fault model: what the tier behind this door must bear, and so what a fault-injecting `Disk` may do.

- Any call may raise OSError, before or after it had its effect (ENOSPC, EDQUOT, EIO, EROFS, EMFILE, ENOENT, ESTALE …).
- `write` that raises may have written any prefix of its bytes, or any 4 KiB pieces of them, also past the old end of file.
- When the process dies, calls that returned have happened and the one under way has happened in part.
- When the power goes, every write that no later `sync` of that file covers may be lost, kept or torn per 4 KiB, in any
  order; a file's length may be kept while its bytes read as zeros; a rename or a new name may be lost until
  `sync_directory`. A rename never leaves a mix of two files.
- Bytes at rest may change or vanish; a file or a whole directory may be deleted by somebody else at any time.
- Assumed: `read` returns what lies there or raises (never another file's bytes); locks hold for as long as the process
  keeps the handle open and end with the process; names that were created stay apart from other names.

A handle is an opaque number. Every method may be called from many threads at once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat as stat_module
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NewType, Protocol

from headstart.errors import StoreError
from headstart.tier.arena import ALIGNMENT, is_aligned

Handle = NewType("Handle", int)
OpenMode = Literal["read", "write", "create"]  # create: a new file, EEXIST if there is one; write: an existing one

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


@dataclass(frozen=True, slots=True)
class FileFacts:
    """`allocated_bytes` is what the file system charges; `links` is 0 once the file's last name is gone."""

    size: int
    allocated_bytes: int
    links: int
    inode: int


@dataclass(frozen=True, slots=True)
class Entry:
    """`is_strange`: neither a directory nor a regular file, but a link, a FIFO, a device."""

    name: str
    is_directory: bool
    is_strange: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """Of a file system: its size, and what somebody without privileges may still take of it."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class LockHolder:
    """`name`: for people. `stopped`: by a signal, so that it will not go on by itself."""

    name: str = "another process"
    stopped: bool = False

    def __str__(self) -> str:
        return f"{self.name}, which is stopped," if self.stopped else self.name


class Disk(Protocol):
    def probe(self, directory: Path) -> bool:
        """Write, read back and remove one block in `directory`. True when bulk files bypass the page cache there."""
        ...

    def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
        """Open a file for reading or for both, without waiting. `bulk` asks to bypass the page cache where that works. What
        is no regular file (a link is none) is OSError(ELOOP)."""
        ...

    def close(self, handle: Handle) -> None:
        """Let go of a handle. It is gone whatever is raised: its number may be another file's by then."""
        ...

    def read(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill every buffer, in order, from `offset`; returns the bytes read. Where the file ends before that, raises
        StoreError(reason="short-read")."""
        ...

    def write(self, handle: Handle, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset` or raise."""
        ...

    def reserve(self, handle: Handle, offset: int, nbytes: int) -> bool:
        """Allocate space without changing the file's size, so that writes there cannot meet a full disk. False: cannot."""
        ...

    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        """Give the space of a range back; it reads as zeros afterwards. False: this file system cannot."""
        ...

    def truncate(self, handle: Handle, nbytes: int) -> None: ...

    def sync(self, handle: Handle) -> None:
        """Return when the file's bytes would survive a power loss."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Return when the directory's names would survive a power loss."""
        ...

    def lock_file(self, handle: Handle) -> bool:
        """Take the whole file exclusively, without waiting; held until the handle is closed. False: somebody has it."""
        ...

    def lock_holder(self, handle: Handle) -> LockHolder:
        """Return who has the whole file's lock, as far as that can be told."""
        ...

    def lock_range(self, handle: Handle, offset: int, nbytes: int, *, exclusive: bool) -> bool:
        """Lock bytes of a file against other handles (also of this process), without waiting. False: somebody has them."""
        ...

    def unlock_range(self, handle: Handle, offset: int, nbytes: int) -> None: ...

    def facts(self, handle: Handle) -> FileFacts: ...

    def stat(self, path: Path) -> FileFacts:
        """Return the facts of what has that name; a link's are its own."""
        ...

    def space(self, path: Path) -> Space:
        """Return how large and how free the file system is that `path` lies on."""
        ...

    def entries(self, path: Path) -> list[Entry]: ...

    def make_directory(self, path: Path) -> None:
        """Create one directory; one that is already there is fine. A link or the like in its place is OSError(ELOOP)."""
        ...

    def rename(self, source: Path, target: Path) -> None: ...

    def unlink(self, path: Path) -> None: ...


class RealDisk:
    """POSIX files. A bulk file has a second descriptor that bypasses the page cache (O_DIRECT) where the file system has
    that; requests that are not 4 KiB-aligned in offset, length and memory take the ordinary one, and what they brought into
    the page cache is dropped. Range locks are Linux's open-file-description locks; elsewhere every range lock is granted, so
    that a lease protects within one process and an extent removed by another one is caught by its checks."""

    def __init__(self) -> None:
        self._direct: dict[Handle, int] = {}
        self._locked: dict[Handle, int] = {}  # files locked whole → the process that did so

    def probe(self, directory: Path) -> bool:
        for _ in range(_PROBES - 1):
            with suppress(FileNotFoundError):  # a process that opens the directory just now takes the file for abandoned
                return self._probe(directory)
        return self._probe(directory)

    def _probe(self, directory: Path) -> bool:
        path = directory / f"{secrets.token_hex(16)}.tmp"
        handle = self.open(path, "create", bulk=True)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
            with mmap.mmap(-1, 2 * ALIGNMENT) as memory, memoryview(memory) as view:
                view[:ALIGNMENT] = secrets.token_bytes(ALIGNMENT)
                source, target = view[:ALIGNMENT], view[ALIGNMENT:]
                self.write(handle, source, 0)
                self.read(handle, [target], 0)
                same = source == target
                source.release()
                target.release()
            if not same:
                raise OSError(errno.EIO, "a block read back differs from what was written", str(directory))
            return handle in self._direct
        finally:
            self.close(handle)

    def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
        flags = os.O_RDONLY if mode == "read" else os.O_RDWR
        if mode == "create":
            flags |= os.O_CREAT | os.O_EXCL
        handle = Handle(_open(path, flags))
        o_direct: int = getattr(os, "O_DIRECT", 0)
        if bulk and o_direct:
            try:
                self._direct[handle] = _open(path, (flags & ~(os.O_CREAT | os.O_EXCL)) | o_direct)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: no O_DIRECT on this file system
                    os.close(handle)
                    if mode == "create":
                        with suppress(FileNotFoundError):
                            os.unlink(path)
                    raise
        return handle

    def close(self, handle: Handle) -> None:
        direct = self._direct.pop(handle, None)
        try:
            if self._locked.pop(handle, None) == os.getpid():
                with suppress(OSError):  # else a child that was forked meanwhile keeps the lock for as long as it lives
                    fcntl.flock(handle, fcntl.LOCK_UN)
            if direct is not None:
                os.close(direct)
        finally:
            os.close(handle)

    def read(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> int:
        start = offset
        direct = self._direct.get(handle)
        aligned = 0
        if direct is not None and offset % ALIGNMENT == 0:
            while aligned < len(buffers) and is_aligned(buffers[aligned]):
                aligned += 1
            if aligned:
                try:
                    offset += _read(direct, buffers[:aligned], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # EINVAL: this medium wants more than 4 KiB; the ordinary way always works
                        raise
                    aligned = 0
        if aligned < len(buffers):
            rest = _read(handle, buffers[aligned:], offset)
            if direct is not None:
                os.posix_fadvise(handle, offset, rest, os.POSIX_FADV_DONTNEED)
            offset += rest
        return offset - start

    def direct_descriptor(self, handle: Handle) -> int | None:
        """Return the descriptor that bypasses the page cache, for a reader that goes round this door; none where there is no
        such descriptor. No part of `Disk`: behind a door with faults nobody may go round it."""
        return self._direct.get(handle)

    def write(self, handle: Handle, data: memoryview | bytes, offset: int) -> None:
        view = memoryview(data).cast("B")
        direct = self._direct.get(handle)
        if direct is None or offset % ALIGNMENT or view.nbytes % ALIGNMENT:
            return _write(handle, view, offset)
        try:
            if is_aligned(view):
                return _write(direct, view, offset)
            if view.nbytes <= _BOUNCE_BYTES:
                # Not through the page cache, which would allocate its blocks only some time later and charge them then.
                with mmap.mmap(-1, view.nbytes) as memory, memoryview(memory) as copy:
                    copy[:] = view
                    return _write(direct, copy, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        return _write(handle, view, offset)

    def reserve(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return _fallocate(handle, _KEEP_SIZE, offset, nbytes)

    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return _fallocate(handle, _KEEP_SIZE | _PUNCH_HOLE, offset, nbytes)

    def truncate(self, handle: Handle, nbytes: int) -> None:
        os.ftruncate(handle, nbytes)

    def sync(self, handle: Handle) -> None:
        getattr(os, "fdatasync", os.fsync)(handle)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock_file(self, handle: Handle) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._locked[handle] = os.getpid()
        return True

    def lock_holder(self, handle: Handle) -> LockHolder:
        found = os.fstat(handle)
        where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        with suppress(OSError, ValueError, IndexError):  # there is no such file, or it has another form
            for line in Path("/proc/locks").read_text().splitlines():
                words = line.split()
                if words[1] == "FLOCK" and words[5] == where and int(words[4]) > 0:
                    return _process(int(words[4]))
        return LockHolder()

    def lock_range(self, handle: Handle, offset: int, nbytes: int, *, exclusive: bool) -> bool:
        return _range_lock(handle, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, offset, nbytes)

    def unlock_range(self, handle: Handle, offset: int, nbytes: int) -> None:
        _range_lock(handle, fcntl.F_UNLCK, offset, nbytes)

    def facts(self, handle: Handle) -> FileFacts:
        return _facts(os.fstat(handle))

    def stat(self, path: Path) -> FileFacts:
        return _facts(os.lstat(path))

    def space(self, path: Path) -> Space:
        found = os.statvfs(path)
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def entries(self, path: Path) -> list[Entry]:
        with os.scandir(path) as found:
            return sorted(map(_entry, found), key=lambda e: e.name)

    def make_directory(self, path: Path) -> None:
        try:
            os.mkdir(path, DIRECTORY_MODE)
        except FileExistsError:
            mode = os.lstat(path).st_mode
            if stat_module.S_ISREG(mode):
                raise
            if not stat_module.S_ISDIR(mode):
                raise OSError(errno.ELOOP, "no directory", str(path)) from None

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)


_IOV_MAX = 1024
_PROBES = 8
_BOUNCE_BYTES = 1 << 20
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO}  # a link; a directory; a socket, or a device that is not there
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def _open(path: Path, flags: int) -> int:
    """Open a regular file and nothing else: no link out of the directory is followed, no FIFO waited for."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise _no_file(path) from error
    if not stat_module.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path)
    return descriptor


def _no_file(path: Path) -> OSError:
    return OSError(errno.ELOOP, "no regular file", str(path))


def _entry(found: os.DirEntry[str]) -> Entry:
    is_directory = found.is_dir(follow_symlinks=False)
    return Entry(found.name, is_directory, not is_directory and not found.is_file(follow_symlinks=False))


def _read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    start = offset
    for first in range(0, len(buffers), _IOV_MAX):
        batch = buffers[first : first + _IOV_MAX]
        wanted = sum(buffer.nbytes for buffer in batch)
        got = os.preadv(descriptor, batch, offset)
        if got != wanted:
            raise StoreError(
                f"a read at byte {offset} ended after {got} of {wanted} bytes: the file is shorter than its journal says",
                reason="short-read",
            )
        offset += got
    return offset - start


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < view.nbytes:  # a nearly full disk takes a part and gives its reason at the next call
        count = os.pwrite(descriptor, view[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        done += count


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "fallocate"):
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def _fallocate(descriptor: int, mode: int, offset: int, nbytes: int) -> bool:
    libc = _libc()
    if not hasattr(libc, "fallocate"):
        return False
    while libc.fallocate(descriptor, mode, offset, nbytes) != 0:
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def _process(pid: int) -> LockHolder:
    with suppress(OSError, ValueError):
        said = Path(f"/proc/{pid}/stat").read_text()
        name, state = said[said.index("(") + 1 : said.rindex(")")], said[said.rindex(")") + 2]
        return LockHolder(f"process {pid} ({name})", stopped=state in "Tt")
    return LockHolder(f"process {pid}")


def _range_lock(descriptor: int, kind: int, offset: int, nbytes: int) -> bool:
    command: int | None = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        return True
    try:
        fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, offset, nbytes, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in _UNSUPPORTED and error.errno != errno.ENOLCK:
            raise
    return True


def _facts(found: os.stat_result) -> FileFacts:
    return FileFacts(found.st_size, found.st_blocks * 512, found.st_nlink, found.st_ino)
