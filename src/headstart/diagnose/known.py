"""Which blocks and pieces of text earlier prompts had, and who had them last: 64-bit names in arrays, some 20 bytes each.

An open-addressed table over NumPy arrays. A million names as Python objects would take five times as much.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Names = npt.NDArray[np.uint64]
NOBODY = 0xFFFF_FFFF
_SMALLEST = 1 << 12
_FULL = 0.6


class Known:
    """A map from names to the number of a prompt. `most` bounds it: beyond, what was not named for longest is forgotten, in
    two halves; without it nothing is."""

    def __init__(self, most: int | None = None) -> None:
        self._half = None if most is None else most // 2
        self._new = _Table()
        self._old = _Table()

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def owners(self, names: Names) -> npt.NDArray[np.uint32]:
        """Return for each name whose it was last, NOBODY where it is not known."""
        found = self._new.get(names)
        if len(self._old):
            missing = np.flatnonzero(found == NOBODY)
            found[missing] = self._old.get(names[missing])
        return found

    def put(self, names: Names, owner: int) -> None:
        """Say that `owner` has these names now."""
        if self._half is not None and len(self._new) + len(names) > self._half and len(self._new):
            self._old, self._new = self._new, _Table()
        self._new.put(names, owner)

    def longest(self, chain: Names) -> int:
        """Return how many names `chain` begins with are known, where none is known without those before it."""
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if self.owners(chain[middle : middle + 1])[0] != NOBODY:
                low = middle + 1
            else:
                high = middle
        return low


class _Table:
    def __init__(self) -> None:
        self._names = np.zeros(_SMALLEST, np.uint64)  # 0: free
        self._owners = np.full(_SMALLEST, NOBODY, np.uint32)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def get(self, names: Names) -> npt.NDArray[np.uint32]:
        return self._owners[self._rows(_named(names))]  # a free row has no owner

    def put(self, names: Names, owner: int) -> None:
        names = np.unique(_named(names))
        while self._used + len(names) > _FULL * len(self._names):
            self._grow()
        rows = self._rows(names)
        new = self._names[rows] == 0
        self._owners[rows[~new]] = owner
        self._insert(names[new], np.full(int(new.sum()), owner, np.uint32))

    def _rows(self, names: Names) -> npt.NDArray[np.int64]:
        """Return the row of each name, or the free one that ends the search for it."""
        mask = len(self._names) - 1
        rows = _spread(names, mask)
        going = np.arange(len(names))
        while len(going):
            there = self._names[rows[going]]
            going = going[(there != names[going]) & (there != 0)]
            rows[going] = (rows[going] + 1) & mask
        return rows

    def _insert(self, names: Names, owners: npt.NDArray[np.uint32]) -> None:
        """Add names that are not there, each once."""
        mask = len(self._names) - 1
        self._used += len(names)
        rows = _spread(names, mask)
        while len(names):
            free = self._names[rows] == 0
            self._names[rows[free]] = names[free]  # of several for one row the last stays
            self._owners[rows[free]] = owners[free]
            left = self._names[rows] != names
            names, owners, rows = names[left], owners[left], (rows[left] + 1) & mask

    def _grow(self) -> None:
        names, owners = self._names, self._owners
        taken = names != 0
        self._names = np.zeros(2 * len(names), np.uint64)
        self._owners = np.full(2 * len(names), NOBODY, np.uint32)
        self._used = 0
        self._insert(names[taken], owners[taken])


def _named(names: Names) -> Names:
    return np.maximum(names, np.uint64(1))


def _spread(names: Names, mask: int) -> npt.NDArray[np.int64]:
    return ((names * np.uint64(0x9E37_79B9_7F4A_7C15)) >> np.uint64(20)).astype(np.int64) & mask
