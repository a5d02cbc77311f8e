"""Prefixes as one file, to carry between machines: a segment (docs/format.md, "Segments") that stands alone and is full.

Writing: under a temporary name, synced, renamed. Reading: any bytes may be in such a file, so nothing in it is believed before
it was checked: header, every key, every piece, and zeros wherever nothing else belongs. One wrong bit anywhere refuses it.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headstart.block.extent import ExtentHeader, decode_header, header_bytes_of
from headstart.block.representation import Representation
from headstart.block.whole import aligned, examine
from headstart.errors import ExtentCorrupt, NotThere, StoreError
from headstart.tier.disk.door import FILE_MODE
from headstart.tier.disk.records import WRITER_BYTES, SegmentName
from headstart.tier.disk.segment import SegmentHeader, decode_segment_header, encode_segment_header

MAX_IMAGE_BYTES = 1 << 30  # of one extent: what a segment can hold at most
_HEAD_BYTES = 1 << 20  # enough for any segment's header: 65,535 layers take half of it
_FRONT_BYTES = 32
_PART_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Carried:
    """One extent of a file, verified to the last byte."""

    header: ExtentHeader
    image: memoryview


def write_file(path: Path, representation: Representation, images: Iterable[memoryview], *, now_ms: int) -> int:
    """Write extents as one file, which is there whole or not at all; returns its bytes. Raises StoreError."""
    if path.exists():
        raise StoreError(f"{path} is there already; remove it or choose another name", path=path)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                nbytes = _write(file.write, file.seek, representation, images, now_ms=now_ms)
                file.flush()
                os.fsync(file.fileno())
            _put_in_place(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except FileExistsError as error:
        raise StoreError(f"{path} is there already; remove it or choose another name", path=path) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}; free space or choose another place") from error
    return nbytes


def _put_in_place(temporary: Path, path: Path) -> None:
    """Give a file its name, for good, unless somebody else has it by now. Raises OSError."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # there are no second names on this file system
        os.rename(temporary, path)
    else:
        os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(
    write: Callable[[bytes | memoryview], int],
    seek: Callable[[int], int],
    representation: Representation,
    images: Iterable[memoryview],
    *,
    now_ms: int,
) -> int:
    encoded = representation.encode()
    name = SegmentName(secrets.token_bytes(WRITER_BYTES), 0)
    end = SegmentHeader(name, 0, now_ms, encoded, representation.digest).header_bytes
    seek(end)
    for image in images:
        write(image)
        end += image.nbytes
    seek(0)
    write(encode_segment_header(SegmentHeader(name, end, now_ms, encoded, representation.digest)))
    return end


class CarriedFile:
    """A file of prefixes, opened for reading. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Read its header. Raises NotThere, StoreError, ExtentCorrupt for what is no such file, also of another version."""
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise NotThere(f"there is no file {path}; name one that `headstart cache export` wrote", path=path) from error
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}; choose another file", path=path) from error
        try:
            facts = os.fstat(self._descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise StoreError(f"{path} is no regular file; copy what it gives into one first", path=path)
            self.size = facts.st_size
            self._header = self._read_header()
            self.representation = Representation.decode(self._header.representation)
            if self.representation.digest != self._header.digest:
                raise ExtentCorrupt("its representation is not what its header says", reason="representation")
        except ExtentCorrupt as error:
            self.close()
            raise self._refused(error) from error
        except BaseException:
            self.close()
            raise

    def extents(self, *, on_bytes: Callable[[int], None] = lambda nbytes: None) -> Iterator[Carried]:
        """Yield what is in the file, each verified. Raises ExtentCorrupt, StoreError."""
        offset = self._header.header_bytes
        try:
            while offset < self.size:
                one = self._extent_at(offset)
                offset += one.image.nbytes
                on_bytes(one.image.nbytes)
                yield one
        except ExtentCorrupt as error:
            raise self._refused(error, offset) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> CarriedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self) -> SegmentHeader:
        data = self._read(0, min(self.size, _HEAD_BYTES))
        header = decode_segment_header(data)
        used = encode_segment_header(header)
        if len(data) < len(used) or header.header_bytes > len(data):
            raise ExtentCorrupt("it ends inside its header", reason="truncated")
        if data[: len(used)] != used:
            raise ExtentCorrupt("something stands where its header's padding belongs", reason="padding")
        if header.capacity_bytes != self.size:
            raise ExtentCorrupt(f"it was written with {header.capacity_bytes} bytes and has {self.size}", reason="truncated")
        return header

    def _extent_at(self, offset: int) -> Carried:
        left = self.size - offset
        header_bytes = header_bytes_of(self._read(offset, min(_FRONT_BYTES, left)))
        if header_bytes > left:
            raise ExtentCorrupt(f"a header of {header_bytes} bytes begins {left} bytes before the end", reason="truncated")
        header = decode_header(self._read(offset, header_bytes), self.representation)
        nbytes = header.layout(self.representation).extent_bytes
        if nbytes > min(left, MAX_IMAGE_BYTES):
            raise ExtentCorrupt(f"an extent of {nbytes} bytes begins {left} bytes before the end", reason="truncated")
        image = self._read(offset, nbytes)
        return Carried(examine(image, self.representation, padding=True), image)

    def _read(self, offset: int, nbytes: int) -> memoryview:
        data = aligned(nbytes)
        at = 0
        try:
            while at < nbytes:
                got = os.preadv(self._descriptor, [data[at : at + _PART_BYTES]], offset + at)
                if not got:
                    raise ExtentCorrupt("it became shorter while it was read", reason="truncated")
                at += got
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror or error}; copy it anew", path=self.path) from error
        return data

    def _refused(self, error: ExtentCorrupt, offset: int = 0) -> ExtentCorrupt:
        where = f" at byte {offset}" if offset else ""
        return ExtentCorrupt(
            f"{self.path} is refused{where}: {error.message}; copy or export it anew",
            **error.facts,
            path=self.path,
            offset=offset,
        )
