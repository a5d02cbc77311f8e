"""Page-aligned memory for I/O: one anonymous mapping backed by huge pages, carved into regions that are counted and reused.

Huge pages under the buffers double the read rate of a virtual disk, and memory that was never touched costs a fault a page
at the worst moment; so arenas are mapped once, touched ahead of use where that pays, and kept. Private and anonymous on
purpose: a shared mapping takes no huge pages.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left
from contextlib import suppress
from threading import Lock
from types import TracebackType

import numpy as np

ALIGNMENT = 4096
HUGE_PAGE = 2 << 20

_TOUCH_STEP = 2 * HUGE_PAGE
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_madvise = getattr(ctypes.CDLL(None), "madvise", None)  # the mmap module's own would hold up all other threads meanwhile


def is_aligned(view: memoryview) -> bool:
    """True where direct I/O can go straight into or out of a buffer: its address and length are multiples of 4 KiB."""
    if view.nbytes % ALIGNMENT or not view.c_contiguous:
        return False
    return not view.nbytes or _address(view) % ALIGNMENT == 0


class Arena:
    """`Arena(capacity_bytes, name="…")`; `allocate(nbytes) -> Region | None` (None when it does not fit now; ValueError when
    it never can); `touch(nbytes)`; `used_bytes`, `capacity_bytes`; `close()`.

    First fit in granules of 4 KiB over an address-ordered free list; neighbours are joined when they come back, so an
    arena whose regions are all released is one piece again. Safe from many threads.
    """

    def __init__(self, capacity_bytes: int, *, name: str = "arena") -> None:
        if capacity_bytes <= 0:
            raise ValueError(f"arena {name!r} needs a capacity above 0 bytes, got {capacity_bytes}")
        self.name = name
        self.capacity_bytes = _rounded(capacity_bytes)
        self._lock = Lock()
        self._used_bytes = 0
        # Free runs, ordered by offset: _offsets[i] has _sizes[i] bytes. Never adjacent, never empty.
        self._offsets = [0]
        self._sizes = [self.capacity_bytes]
        self._mapping: mmap.mmap | None = _map(self.capacity_bytes + HUGE_PAGE)
        start = -_address(memoryview(self._mapping)) % HUGE_PAGE
        self._memory: memoryview | None = memoryview(self._mapping)[start : start + self.capacity_bytes]
        self._touched_bytes = 0
        self._reached_bytes = 0  # what was ever handed out ends here

    def allocate(self, nbytes: int) -> Region | None:
        """Return a region of `nbytes` with one reference, or None when no free run is long enough now."""
        if not 0 < nbytes <= self.capacity_bytes:
            raise ValueError(f"arena {self.name!r} holds {self.capacity_bytes} bytes, a region of {nbytes} can never fit")
        size = _rounded(nbytes)
        with self._lock:
            if self._memory is None:
                raise RuntimeError(f"arena {self.name!r} is closed")
            index = next((index for index, free in enumerate(self._sizes) if free >= size), None)
            if index is None:
                return None
            offset = self._offsets[index]
            if self._sizes[index] == size:
                del self._offsets[index], self._sizes[index]
            else:
                self._offsets[index] += size
                self._sizes[index] -= size
            self._used_bytes += size
            self._reached_bytes = max(self._reached_bytes, offset + size)
            return Region(self, offset, size, self._memory[offset : offset + nbytes])

    def touch(self, nbytes: int) -> bool:
        """Back the next `nbytes` with memory, from the front, where regions are handed out first. Changes no content, so
        regions may be in use. Returns whether some of the arena is still untouched; always False where the kernel cannot do
        this (then memory is backed on first use, as usual).

        Fresh memory costs a virtual machine some 3 s a GiB: touch what is needed soon, and the rest when idle."""
        with self._lock:
            first, last = self._touched_bytes, min(self._touched_bytes + nbytes, self.capacity_bytes)
            self._touched_bytes = last
            memory = self._memory  # while it is held the mapping stays
        if memory is None or _madvise is None:
            return False
        address = _address(memory)
        for start in range(first, last, _TOUCH_STEP):  # the address space is locked for each call, so each is short
            size = ctypes.c_size_t(min(_TOUCH_STEP, last - start))
            if _madvise(ctypes.c_void_p(address + start), size, _MADV_POPULATE_WRITE) != 0:  # an older kernel, no memory left
                return False
        return last < self.capacity_bytes

    def touch_ahead(self, nbytes: int, *, at_once: int) -> bool:
        """Touch at most `at_once` bytes, of the `nbytes` behind all that was ever handed out; return whether some of these are
        left."""
        with self._lock:
            end = min(self._reached_bytes + nbytes, self.capacity_bytes)
            missing = end - self._touched_bytes
        if missing <= 0:
            return False
        return self.touch(min(missing, at_once)) and missing > at_once

    @property
    def used_bytes(self) -> int:
        """Bytes that regions hold now, in whole granules."""
        with self._lock:
            return self._used_bytes

    def close(self) -> None:
        """Hand out nothing more and unmap as soon as no view is left. Twice is fine; live regions stay readable."""
        with self._lock:
            mapping, self._mapping, self._memory = self._mapping, None, None
        if mapping is not None:
            # Views that are still out keep the mapping alive; it is unmapped with the last of them.
            with suppress(BufferError):
                mapping.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Arena {self.name!r}: {self.used_bytes} of {self.capacity_bytes} bytes used>"

    def _count(self, region: Region, step: int) -> None:
        with self._lock:
            if region._references <= 0:
                raise RuntimeError(f"a region of arena {self.name!r} was used after its last release")
            region._references += step
            if region._references == 0:
                self._free(region._offset, region._size)

    def _free(self, offset: int, size: int) -> None:
        self._used_bytes -= size
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and offset + size == self._offsets[index]:  # joins the run behind
            size += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == offset:  # joins the run before
            self._sizes[index - 1] += size
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, size)


class Region:
    """Part of an arena: `view` is a writable memoryview, 4 KiB-aligned. Counted: `retain()` and `release()`; the bytes go
    back to the arena with the last release. Freed exactly once; releasing too often raises RuntimeError."""

    __slots__ = ("_arena", "_offset", "_references", "_size", "view")

    def __init__(self, arena: Arena, offset: int, size: int, view: memoryview) -> None:
        self._arena = arena
        self._offset = offset
        self._size = size
        self._references = 1
        self.view = view

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def retain(self) -> None:
        self._arena._count(self, +1)

    def release(self) -> None:
        self._arena._count(self, -1)

    def __repr__(self) -> str:
        return f"<Region of {self.nbytes} bytes at {self._offset} in arena {self._arena.name!r}, {self._references} references>"


def _map(nbytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel built without transparent huge pages: slower, not wrong
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _address(view: memoryview) -> int:
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # in an eighth of the time; reading asks for every piece


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
