"""What lies at which offset of a segment: sorted arrays, 4 or 8 bytes an entry instead of 100 and more. No I/O, no lock.

A segment grows at its end, so nearly every entry is added behind the last one."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator

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
        if not self._offsets or offset > self._offsets[-1]:
            self._offsets.append(offset)
            return
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


class Rows:
    """The row of each living extent of a segment, by its offset; iterated in the order of offsets. `offsets`: the column that
    says where the extent in a row lies, which is not kept twice; it says so before a row is added, until that is removed."""

    __slots__ = ("_offsets", "_rows")

    def __init__(self, offsets: Callable[[], npt.NDArray[np.int64]]) -> None:
        self._offsets = offsets
        self._rows = array("I")

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self._column().tolist())

    def __contains__(self, offset: int) -> bool:
        return self.get(offset) is not None

    def get(self, offset: int) -> int | None:
        if self.behind(offset):
            return None
        row = self._rows[self._place(offset)]
        return row if self._offsets().item(row) == offset else None

    def get_all(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row at each offset, or -1."""
        if not self._rows:
            return np.full(len(offsets), -1)
        here = self._column()
        at = np.minimum(np.searchsorted(here, offsets), len(here) - 1)
        return np.where(here[at] == offsets, np.frombuffer(self._rows, np.uint32)[at].astype(np.int64), -1)

    def add(self, row: int) -> None:
        """Add a row at whose offset there is none."""
        self._rows.insert(self._place(self._offsets().item(row)), row)

    def remove(self, offset: int) -> None:
        """Take away the row at an offset. Raises KeyError where there is none."""
        if offset not in self:
            raise KeyError(offset)
        del self._rows[self._place(offset)]

    def extend(self, rows: npt.NDArray[np.int64]) -> None:
        """Add rows that lie, in order, behind all others."""
        self._rows.frombytes(rows.astype(np.uint32).tobytes())

    def behind(self, offset: int) -> bool:
        """Whether `offset` lies behind every entry."""
        return not self._rows or offset > self._offsets().item(self._rows[-1])

    def values(self) -> Iterator[int]:
        return iter(self._rows)

    def items(self) -> Iterator[tuple[int, int]]:
        return zip(self, self._rows, strict=True)

    def _place(self, offset: int) -> int:
        """Return how many entries lie before an offset."""
        return len(self._rows) if self.behind(offset) else bisect_left(self._rows, offset, key=self._offsets().item)

    def _column(self) -> npt.NDArray[np.int64]:
        return self._offsets()[np.frombuffer(self._rows, np.uint32)] if self._rows else np.empty(0, np.int64)
