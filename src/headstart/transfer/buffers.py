"""Runs of bytes that are spread over several buffers: cut, copied, checked for alignment. Nothing here owns memory.

Copies go through NumPy because it lets go of the GIL while it copies; a slice assignment of memoryviews does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from headstart.errors import StoreError
from headstart.tier.arena import HUGE_PAGE, Arena

_KEEPS_LOCK_BYTES = 1 << 18

Bytes = list[memoryview] | npt.NDArray[np.uint8]
"""Bytes in order: flat buffers one behind the other, or one array of any strides in C order."""


def flat(buffers: Sequence[memoryview] | npt.NDArray[np.uint8]) -> Bytes:
    """Return the buffers as bytes, whatever format or shape they came in. Raises TypeError where one is not contiguous."""
    if isinstance(buffers, np.ndarray):
        return buffers
    return [buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B") for buffer in buffers]


def total_bytes(buffers: Bytes) -> int:
    if isinstance(buffers, np.ndarray):
        return buffers.nbytes
    return buffers[0].nbytes if len(buffers) == 1 else sum(buffer.nbytes for buffer in buffers)


def split(buffers: Sequence[memoryview], sizes: Sequence[int]) -> list[list[memoryview]]:
    """Return, for consecutive runs of `sizes` bytes, the parts of `buffers` that hold each. Together they must suffice."""
    if len(buffers) == 1:  # as most often
        ends = list(accumulate(sizes))
        return [[buffers[0][end - size : end]] if size else [] for end, size in zip(ends, sizes, strict=True)]
    runs = []
    rest = iter(buffers)
    left = memoryview(b"")
    for size in sizes:
        run = []
        while size:
            if not left.nbytes:
                left = next(rest)
            part = left[:size]
            left = left[part.nbytes :]
            size -= part.nbytes
            if part.nbytes:
                run.append(part)
        runs.append(run)
    return runs


def gather(source: Bytes, into: memoryview) -> None:
    """Copy buffers one behind the other into one that is as long as they are together."""
    target = np.frombuffer(into, np.uint8)
    if isinstance(source, np.ndarray):
        np.copyto(target.reshape(source.shape), source)
        return
    at = 0
    for buffer in source:
        if buffer.nbytes:
            np.copyto(target[at : at + buffer.nbytes], np.frombuffer(buffer, np.uint8))
            at += buffer.nbytes
    assert at == into.nbytes


def scatter(source: memoryview, into: Bytes) -> None:
    """Copy one buffer into several that are as long together."""
    data = np.frombuffer(source, np.uint8)
    if isinstance(into, np.ndarray):
        np.copyto(into, data.reshape(into.shape))
        return
    at = 0
    for buffer in into:
        if buffer.nbytes:
            np.copyto(np.frombuffer(buffer, np.uint8), data[at : at + buffer.nbytes])
            at += buffer.nbytes
    assert at == source.nbytes


class Coming:
    """A stream that begins at offset `at`, and is taken in the order of its bytes. All raise what the stream raises, and
    StoreError("short-read") where it ends too early."""

    def __init__(self, chunks: Iterable[bytes | memoryview], *, at: int) -> None:
        self._coming = iter(chunks)
        self._chunk = memoryview(b"")
        self.at = at

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill flat buffers, one behind the other, with what stands at `offset`; what comes before it is passed over."""
        for buffer in buffers:
            done = 0
            while done < buffer.nbytes:
                chunk = self.chunk()
                skipped = min(offset - self.at, chunk.nbytes)
                part = chunk[skipped : skipped + buffer.nbytes - done]
                _copy(part, buffer[done : done + part.nbytes])
                self.take(skipped + part.nbytes)
                done, offset = done + part.nbytes, offset + part.nbytes

    def chunk(self) -> memoryview:
        """Return some bytes that come next, at least one. They stay until they are taken."""
        while not self._chunk.nbytes:
            got = next(self._coming, None)
            if got is None:
                raise StoreError(f"what was to be read ended at byte {self.at}", reason="short-read")
            self._chunk = memoryview(got)
        return self._chunk

    def take(self, nbytes: int) -> None:
        """Go on behind so many bytes of the chunk."""
        self._chunk = self._chunk[nbytes:]
        self.at += nbytes

    def end(self) -> None:
        """Let the rest come, so that the stream is told that it was read to its end."""
        self._chunk = memoryview(b"")
        for _ in self._coming:
            pass


def _copy(source: memoryview, into: memoryview) -> None:
    """Copy flat bytes. Some 100 KB take 10 µs, and let nobody else run meanwhile: with sixteen threads two switches of threads
    for each cost more."""
    if source.nbytes <= _KEEPS_LOCK_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


class Staging:
    """One thread's aligned buffer for bytes on their way; `take(nbytes)` gives its front and takes back what was given before.

    A buffer a thread instead of a shared pool: nobody ever waits for one, and the bound is threads × the largest request."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory = memoryview(b"")

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def take(self, nbytes: int) -> memoryview:
        if nbytes > self._memory.nbytes:
            self._memory = memoryview(b"")  # unmap the old one before the new one is mapped
            with Arena(max(nbytes, HUGE_PAGE), name=self._name) as arena:
                arena.touch(nbytes)
                region = arena.allocate(arena.capacity_bytes)
                assert region is not None  # the whole of a fresh arena
                self._memory = region.view  # which keeps the mapping of the closed arena
        return self._memory[:nbytes]
