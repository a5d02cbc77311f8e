"""A bucket behind the door of files, as far as a pool asks: all that holds for a pool's writers and collectors holds here too.

    headstart.json, terms/<number>                    one object each
    segments/<2 hex>/<writer>-<sequence>.seg          one object: a segment of one extent, put whole, never changed
    journals/<writer>-<generation>.log/<16 hex>       one object for each append, named by the offset where it begins

Objects cannot be appended to, renamed or locked. A journal is the objects of its name in the order of their offsets, each
beginning where the one before it ends; what stands behind a gap is not there yet. A file with a temporary name lives in this
process's memory until it is renamed. What `entries` found last is what `open` finds of journals and `facts` tells of segments,
so that following all writers is one request. An append of which nobody knows whether it was put leaves its journal lost: its
writer begins anew under another name, since no name is used for two contents.
"""

from __future__ import annotations

import errno
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from headstart.errors import StoreError
from headstart.policy.fetching import Fetching
from headstart.tier.disk.door import Entry, FileFacts, Handle, LockHolder, OpenMode, Space
from headstart.tier.object.bucket import Bucket, scatter

_LISTING_KEPT_S = 120.0  # of all segments, for as long as something may be held against it
_JOURNALS, _SEGMENTS, _TERMS = "journals", "segments", "terms"
_FOLDERS = (_JOURNALS, _SEGMENTS, _TERMS)
_PART = re.compile(r"journals/([^/]+\.log)/([0-9a-f]{16})")


@dataclass(slots=True)
class _File:
    """An open file. `data`: of a small one, whole, as this process reads or writes it; None for others. `parts`: of a journal,
    offset and size of each object, without gaps from 0 on; `appended`: what the next `sync` puts; `begun`: offset and bytes of
    the object that was read last, where more of it is to be read. `size`: of a segment, as far as journals say. `put`: it
    stands in the bucket. `doubtful`: whether its last object was put is not known."""

    path: Path
    data: bytearray | None = None
    parts: list[tuple[int, int]] = field(default_factory=list)
    appended: bytearray = field(default_factory=bytearray)
    begun: tuple[int, memoryview] | None = None
    size: int | None = None
    put: bool = True
    doubtful: bool = False

    @property
    def end(self) -> int:
        return sum(self.parts[-1]) if self.parts else 0


class ObjectDisk:
    """Files in a bucket; `root` is the path that stands for its top. Safe from many threads, each file for one at a time."""

    def __init__(self, bucket: Bucket, root: Path) -> None:
        self.bucket = bucket
        self.fetching = Fetching()
        self._root = root
        self._lock = Lock()
        self._files: dict[Handle, _File] = {}
        self._next = 1
        self._journals: dict[str, list[tuple[int, int]]] = {}  # as last listed
        self._begun = self._newest = 0  # listings of journals, numbered as they begin; which one `_journals` is from
        self._segments: dict[str, int] = {}
        self._shards: dict[str, list[str]] = {}
        self._listed_at = 0.0  # those two
        self._headless: list[str] = []

    # What a pool does beside reading and writing files.

    def put_segment(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        """Put a segment whole. Raises OSError; then it may be there all the same, and no journal speaks of it."""
        self.bucket.put(self._key(path), parts)

    def get_segment(self, path: Path) -> memoryview:
        """Return a segment whole. Raises OSError."""
        return self.bucket.get(self._key(path))

    def segment_bytes(self, path: Path) -> int:
        """Return how long a segment is, as last listed or else as the service says. Raises OSError."""
        key = self._key(path)
        with self._lock:
            size = self._segments.get(key)
        return self.bucket.size(key) if size is None else size

    def delete_segments(self, paths: Sequence[Path]) -> None:
        """Delete segments, a thousand with one request; those that are not there are fine. Raises OSError."""
        self.bucket.delete([self._key(path) for path in paths])

    def headless_journals(self) -> list[Path]:
        """Return the journals that lack their first part, as last listed: whoever removed them died over it, or something was
        added meanwhile. Nobody can read them, so they are none."""
        with self._lock:
            return [self._root / _JOURNALS / name for name in self._headless]

    def open_segment(self, path: Path, nbytes: int) -> Handle:
        """Open a segment that a journal says is there, and how long it is. Asks nobody."""
        return self._keep(_File(path, size=nbytes))

    def stream_segment(self, handle: Handle, offset: int, nbytes: int, *, at_once: bool) -> Iterator[bytes | memoryview]:
        """Ask for a part of a segment and yield its bytes as `Bucket.stream` does. Raises OSError, StoreError("short-read")."""
        begun, first_s = time.monotonic(), None
        for chunk in self.bucket.stream(self._key(self._file(handle).path), offset, nbytes, at_once=at_once):
            first_s = time.monotonic() - begun if first_s is None else first_s
            yield chunk
        self.fetching.note(nbytes, first_s=first_s or 0.0, seconds=time.monotonic() - begun)

    # The door.

    def probe(self, directory: Path) -> bool:
        return False

    def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
        if mode == "create":
            return self._keep(_File(path, data=bytearray(), put=False))
        if _is_journal(path):
            with self._lock:
                parts = self._journals.get(path.name)
            if parts is None:
                raise FileNotFoundError(errno.ENOENT, "no such journal", str(path))
            return self._keep(_File(path, parts=_without_gaps(parts)))
        if _is_segment(path):
            return self._keep(_File(path, size=self.bucket.size(self._key(path))))
        return self._keep(_File(path, data=bytearray(self.bucket.get(self._key(path)))))

    def close(self, handle: Handle) -> None:
        with self._lock:
            del self._files[handle]

    def read(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> int:
        file = self._file(handle)
        wanted = sum(buffer.nbytes for buffer in buffers)
        if _is_segment(file.path):
            return self.bucket.read(self._key(file.path), buffers, offset)
        if file.data is not None:
            scatter(memoryview(bytes(file.data[offset : offset + wanted])), buffers, key=file.path.name)
            return wanted
        touched = [(at, size) for at, size in file.parts if at < offset + wanted and at + size > offset]
        found = self._parts(file, [at for at, _ in touched])
        for at, size in touched:
            if len(found[at]) != size:
                raise StoreError(f"an object of journal {file.path.name} is not as long as listed", reason="short-read", at=at)
        asked = b"".join(found[at][max(0, offset - at) : offset + wanted - at] for at, _ in touched)
        scatter(memoryview(asked), buffers, key=file.path.name)
        file.begun = next(((at, found[at]) for at, size in touched if at + size > offset + wanted), None)
        return wanted

    def write(self, handle: Handle, data: memoryview | bytes, offset: int) -> None:
        file = self._file(handle)
        if file.data is not None:
            file.data[offset : offset + len(data)] = data
            return
        if offset != file.end or file.doubtful:
            raise OSError(errno.EIO, "an object cannot be written over", str(file.path))
        file.appended = bytearray(data)

    def sync(self, handle: Handle) -> None:
        file = self._file(handle)
        if file.data is not None:
            if file.put:
                self.bucket.put(self._key(file.path), [bytes(file.data)])
            elif not _is_temporary(file.path):
                self.bucket.create(self._key(file.path), bytes(file.data))
                file.put = True
        elif file.appended:
            data, file.appended = bytes(file.appended), bytearray()
            try:
                self.bucket.put(self._part_key(file.path, file.end), [data])
            except OSError:
                file.doubtful = True
                raise
            file.parts.append((file.end, len(data)))

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            file = next((one for one in self._files.values() if one.path == source), None)
        if file is None or file.data is None or file.put:
            raise FileNotFoundError(errno.ENOENT, "no such temporary file", str(source))
        data = bytes(file.data)
        if _is_journal(target):
            self.bucket.put(self._part_key(target, 0), [data])
            file.data, file.parts = None, [(0, len(data))]
        else:
            self.bucket.put(self._key(target), [data])
        file.path, file.put = target, True

    def unlink(self, path: Path) -> None:
        if _is_temporary(path):
            return
        if _is_journal(path):
            self.bucket.delete([key for key, _ in self.bucket.sizes(self._key(path))])
            return
        self.bucket.delete([self._key(path)])
        with self._lock:
            self._segments.pop(self._key(path), None)

    def facts(self, handle: Handle) -> FileFacts:
        file = self._file(handle)
        if file.doubtful:
            raise OSError(errno.EIO, "whether the last append was put is not known", str(file.path))
        if file.data is not None:
            return _facts(file.path, len(file.data))
        if not _is_segment(file.path):
            return _facts(file.path, file.end)
        return _facts(file.path, self.segment_bytes(file.path))

    def stat(self, path: Path) -> FileFacts:
        if self._is_folder(path):
            return _facts(path, 0)
        return _facts(path, self.bucket.size(self._part_key(path, 0) if _is_journal(path) else self._key(path)))

    def entries(self, path: Path) -> list[Entry]:
        if path == self._root:
            folders, objects = self.bucket.names()
            return [Entry(name, True) for name in folders] + [Entry(name, False) for name in objects]
        name = self._key(path)
        if name == _JOURNALS:
            return self._list_journals()
        if name == _SEGMENTS:
            return self._list_segments()
        if name.startswith(f"{_SEGMENTS}/"):
            with self._lock:
                return [Entry(one, False) for one in self._shards.get(name, ())]
        return [Entry(key.rpartition("/")[2], False) for key, _ in self.bucket.sizes(name)]

    def truncate(self, handle: Handle, nbytes: int) -> None:
        file = self._file(handle)
        if file.data is not None:
            del file.data[nbytes:]

    def reserve(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return False

    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return False

    def sync_directory(self, path: Path) -> None:
        pass

    def make_directory(self, path: Path) -> None:
        pass

    def lock_file(self, handle: Handle) -> bool:
        return True

    def lock_holder(self, handle: Handle) -> LockHolder:
        return LockHolder()

    def lock_range(self, handle: Handle, offset: int, nbytes: int, *, exclusive: bool) -> bool:
        return True

    def unlock_range(self, handle: Handle, offset: int, nbytes: int) -> None:
        pass

    def space(self, path: Path) -> Space:
        raise OSError(errno.ENOTSUP, "a bucket has no size", str(path))

    def _parts(self, file: _File, offsets: Sequence[int]) -> dict[int, memoryview]:
        """Return objects of a journal by their offsets. Journals are read in steps: none is fetched once for each."""
        found = dict([file.begun] if file.begun is not None else [])
        missing = [at for at in offsets if at not in found]
        found |= zip(missing, self.bucket.get_all([self._part_key(file.path, at) for at in missing]), strict=True)
        return found

    def _list_journals(self) -> list[Entry]:
        with self._lock:
            self._begun += 1
            number = self._begun
        listed: dict[str, list[tuple[int, int]]] = {}
        for key, size in self.bucket.sizes(_JOURNALS):
            if found := _PART.fullmatch(key):
                listed.setdefault(found[1], []).append((int(found[2], 16), size))
        headless = [name for name, parts in listed.items() if min(parts)[0]]
        for name in headless:
            del listed[name]
        with self._lock:
            if number > self._newest:  # else another thread's, begun later, was done sooner
                self._newest, self._journals, self._headless = number, listed, headless
            names = sorted(self._journals)
            if time.monotonic() - self._listed_at > _LISTING_KEPT_S:
                self._segments, self._shards = {}, {}
        return [Entry(name, False) for name in names]

    def _list_segments(self) -> list[Entry]:
        """All of them at once; the folders are then asked for one by one."""
        listed, shards = dict(self.bucket.sizes(_SEGMENTS)), dict[str, list[str]]()
        for key in listed:
            folder, _, one = key.rpartition("/")
            shards.setdefault(folder, []).append(one)
        with self._lock:
            self._segments, self._shards, self._listed_at = listed, shards, time.monotonic()
        return [Entry(folder.rpartition("/")[2], True) for folder in sorted(shards)]

    def _is_folder(self, path: Path) -> bool:
        top = self._root
        folders = {top, *(top / name for name in _FOLDERS)}
        return path in folders or path.parent == top / _SEGMENTS or path in top.parents

    def _key(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _part_key(self, path: Path, offset: int) -> str:
        return f"{self._key(path)}/{offset:016x}"

    def _keep(self, file: _File) -> Handle:
        with self._lock:
            handle = Handle(self._next)
            self._next += 1
            self._files[handle] = file
        return handle

    def _file(self, handle: Handle) -> _File:
        with self._lock:
            file = self._files.get(handle)
        if file is None:
            raise OSError(errno.EBADF, "the file is closed")
        return file


def _without_gaps(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    end, whole = 0, list[tuple[int, int]]()
    for offset, size in sorted(parts):
        if offset != end:
            break
        whole.append((offset, size))
        end = offset + size
    return whole


def _facts(path: Path, size: int) -> FileFacts:
    """A name never means another file, so it stands for the inode."""
    return FileFacts(size, size, links=1, inode=zlib.crc32(path.as_posix().encode()))


def _is_journal(path: Path) -> bool:
    return path.suffix == ".log"


def _is_segment(path: Path) -> bool:
    return path.suffix == ".seg"


def _is_temporary(path: Path) -> bool:
    return path.suffix == ".tmp"
