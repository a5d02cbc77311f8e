"""What lies at which offset of a segment: sorted arrays, 8 to 16 bytes an entry instead of 100 and more. No I/O, no lock.

A segment grows at its end, so nearly every entry is added behind the last one."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


class Offsets:
    """A set of offsets, iterated in order."""

    __slots__ = ("_offsets",)

    def __init__(self) -> None:
        self._offsets = array("q")

    def __len__(self) -> int:
        return len(self._offsets)

    def __contains__(self, offset: int) -> bool:
        return self._find(offset) is not None

    def __iter__(self) -> Iterator[int]:
        return iter(self._offsets)

    def add(self, offset: int) -> None:
        at = bisect_left(self._offsets, offset)
        if at == len(self._offsets) or self._offsets[at] != offset:
            self._offsets.insert(at, offset)

    def among(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of `offsets` are here."""
        return self._places(offsets) >= 0

    def _places(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """Return the place of each of `offsets` among those that are here, or -1."""
        if not self._offsets:
            return np.full(len(offsets), -1)
        here = np.frombuffer(self._offsets, np.int64)
        at = np.minimum(np.searchsorted(here, offsets), len(here) - 1)
        return np.where(here[at] == offsets, at, -1)

    def clear(self) -> None:
        self._offsets = array("q")

    def _find(self, offset: int) -> int | None:
        at = bisect_left(self._offsets, offset)
        return at if at < len(self._offsets) and self._offsets[at] == offset else None


class Rows(Offsets):
    """The row of each living extent of a segment, by its offset; iterated in the order of offsets."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        super().__init__()
        self._rows = array("I")

    def get(self, offset: int) -> int | None:
        at = self._find(offset)
        return None if at is None else self._rows[at]

    def get_all(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row at each offset, or -1."""
        at = self._places(offsets)
        return np.where(at >= 0, np.frombuffer(self._rows, np.uint32)[at].astype(np.int64), -1) if self._rows else at

    def __setitem__(self, offset: int, row: int) -> None:
        at = bisect_left(self._offsets, offset)
        if at < len(self._offsets) and self._offsets[at] == offset:
            self._rows[at] = row
        else:
            self._offsets.insert(at, offset)
            self._rows.insert(at, row)

    def __delitem__(self, offset: int) -> None:
        at = self._find(offset)
        if at is None:
            raise KeyError(offset)
        del self._offsets[at], self._rows[at]

    def extend(self, offsets: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        """Add entries that lie, in order, behind all others."""
        self._offsets.frombytes(offsets.tobytes())
        self._rows.frombytes(rows.astype(np.uint32).tobytes())

    def behind(self, offset: int) -> bool:
        """Whether `offset` lies behind every entry."""
        return not self._offsets or offset > self._offsets[-1]

    def values(self) -> Iterator[int]:
        return iter(self._rows)

    def items(self) -> Iterator[tuple[int, int]]:
        return zip(self._offsets, self._rows, strict=True)

    def clear(self) -> None:
        super().clear()
        self._rows = array("I")
