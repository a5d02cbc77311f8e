"""Which worker holds which blocks: bits by worker for each key, in arrays, looked up a whole prompt at a time.

A router only guesses with it, so it may forget and need not be exact: keys are cut to 64 bits, and room is made by dropping the
older of two generations as a whole. What is looked up in the older one moves to the younger.

    young  ──full──▶  old  ──▶  dropped           no row is moved one by one, nothing is sorted, no pause
      ▲────asked for───┘

For a million blocks and 64 workers some 60 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headstart.policy.routing.native import native_choice

Keys = npt.NDArray[np.uint64]

MEMORY, DISK, POOL = 0, 1, 2  # a worker's fast memory, a disk that it alone has, what every worker can read
_PLANES = 3
_BITS = 64
_ONE_BY_ONE = 12  # keys; fewer are looked for faster without arrays
_LOOKED_UP = 32  # keys of a prompt at first
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ ÷ golden ratio: neighbouring keys come to lie far apart


def keys_of(chain: Sequence[bytes]) -> Keys:
    """Return the first eight bytes of each key of a prompt's chain as numbers."""
    return np.frombuffer(b"".join(key[:8] for key in chain), np.uint64)


def packed_keys_of(chain: bytes) -> Keys:
    """Return the same of keys of 32 bytes that stand one behind the other."""
    return np.ascontiguousarray(np.frombuffer(chain, np.uint64)[::4])


class _Table:
    """Open addressing, at most half full. Key 0 marks a free row."""

    def __init__(self, rows: int, words: int) -> None:
        self._capacity = rows
        size = 1 << max(4, (2 * rows - 1).bit_length())
        self._shift = np.uint64(64 - size.bit_length() + 1)
        self._last = size - 1
        self.keys = np.zeros(size, np.uint64)
        self.masks = np.zeros((_PLANES, size, words), np.uint64)
        self.addresses = self.keys.ctypes.data, self.masks.ctypes.data
        self.count = 0

    def room(self) -> int:
        return self._capacity - self.count

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return each key's row, or the free row where it would be, as ~row."""
        rows = ((keys * _SPREAD) >> self._shift).astype(np.int64)
        there = self.keys[rows]
        free = there == 0
        found = np.where(free, ~rows, rows)
        open_ = np.flatnonzero(~free & (there != keys))
        while len(open_) > _ONE_BY_ONE:
            rows = (found[open_] + 1) & self._last
            there = self.keys[rows]
            free = there == 0
            found[open_] = np.where(free, ~rows, rows)
            open_ = open_[~free & (there != keys[open_])]
        for at in open_.tolist():
            row, key = int(found[at]), keys[at]
            while True:
                row = (row + 1) & self._last
                if (one := self.keys[row]) == key or not one:
                    break
            found[at] = row if one else ~row
        return found

    def add(self, keys: Keys, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return each key's row, new ones with no bits set. Keys differ, and there is room. `rows`: where they were found."""
        while (new := rows < 0).any():
            at, taken = np.unique(~rows[new], return_index=True)  # of two that want one row the first gets it
            self.keys[at] = keys[new][taken]
            self.count += len(at)
            rows[new] = self.find(keys[new])
        return rows


class Holders:
    """`workers`: how many at most; a worker is a number below it. `blocks`: how many keys are remembered, about.

    >>> holders = Holders(workers=2, blocks=1000)
    >>> prompt = np.array([11, 12, 13], np.uint64)
    >>> holders.add(1, prompt[:2]), holders.add(1, prompt[2:], DISK), holders.add(0, prompt[1:])
    (None, None, None)
    >>> holders.runs(prompt).tolist()    # of each worker: in memory, or on its own disk, or in the pool
    [[0, 2], [0, 3], [0, 3]]
    """

    def __init__(self, *, workers: int, blocks: int) -> None:
        self._workers = workers
        self._words = -(-workers // _BITS)
        self._rows = max(1, blocks // 2)
        self._young = _Table(self._rows, self._words)
        self._old = _Table(1, self._words)
        self._kept = np.zeros((_PLANES, self._words), np.uint64)  # where C counts
        self._kept_address = self._kept.ctypes.data

    def __len__(self) -> int:
        return self._young.count + self._old.count

    def add(self, worker: int, keys: Keys, plane: int = MEMORY) -> None:
        """The worker holds these blocks from now on; for the pool all do, whatever `worker` is."""
        for some in self._in_parts(keys):
            rows = self._fresh(some)
            if plane == POOL:
                self._young.masks[POOL][rows] = ~np.uint64(0)
            else:
                self._young.masks[plane][rows, worker // _BITS] |= np.uint64(1 << worker % _BITS)

    def remove(self, worker: int, keys: Keys, plane: int = MEMORY) -> None:
        """The worker no longer holds these blocks."""
        for table in (self._young, self._old):
            rows = table.find(_no_zeros(keys))
            rows = rows[rows >= 0]
            if plane == POOL:
                table.masks[POOL][rows] = 0
            else:
                table.masks[plane][rows, worker // _BITS] &= ~np.uint64(1 << worker % _BITS)

    def forget(self, worker: int) -> None:
        """The worker holds nothing any more: it is gone, or has started anew. In one pass over all rows."""
        for table in (self._young, self._old):
            table.masks[:POOL, :, worker // _BITS] &= ~np.uint64(1 << worker % _BITS)

    def runs(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return how many blocks from the first on each worker has: [in memory | or on its disk | or in the pool, worker]."""
        if (library := native_choice()) is not None:
            whole, counted = self._counted(library, keys)
            if whole:
                return counted
        masks = self._masks(_no_zeros(keys))
        if not masks.shape[1]:
            return np.zeros((_PLANES, self._workers), np.int64)
        masks = np.bitwise_or.accumulate(masks, axis=0)
        np.bitwise_and.accumulate(masks, axis=1, out=masks)
        # Of most keys the same workers have them as have the one before: bits are counted where that changes.
        begins = np.flatnonzero(np.concatenate(([True], (masks[:, 1:] != masks[:, :-1]).any(axis=(0, 2)))))
        lengths = np.diff(begins, append=masks.shape[1])
        few = np.ascontiguousarray(masks[:, begins])
        bits = np.unpackbits(few.view(np.uint8).reshape(_PLANES, len(begins), -1), axis=2, bitorder="little")
        runs: npt.NDArray[np.int64] = np.tensordot(bits[:, :, : self._workers], lengths, axes=([1], [0]))
        return runs

    def _counted(self, library: Any, keys: Keys) -> tuple[bool, npt.NDArray[np.int64]]:
        """Return what `runs` does as far as keys lie in the young table, and whether that is all there is."""
        young, old = self._young, self._old
        if not keys.flags.c_contiguous:
            keys = np.ascontiguousarray(keys)
        runs = np.empty((_PLANES, self._workers), np.int64)
        whole = library.headstart_runs(
            keys.ctypes.data,
            len(keys),
            *young.addresses,
            len(young.keys),
            old.addresses[0],
            len(old.keys),
            self._words,
            self._workers,
            self._kept_address,
            runs.ctypes.data,
        )
        return bool(whole), runs

    def _masks(self, keys: Keys) -> npt.NDArray[np.uint64]:
        """Return the bits of each key [plane, key, word] up to the first that is not known, moving what lies in the old table.

        Looked up are some, then more: of most prompts nobody has all."""
        found: list[npt.NDArray[np.uint64]] = []
        at, size = 0, _LOOKED_UP
        while at < len(keys):
            some = keys[at : at + size]
            rows = self._young.find(some)
            missing = np.flatnonzero(rows < 0)
            if len(missing) and self._old.count:
                old = self._old.find(some[missing])
                known = some[missing[old >= 0]]
                if len(known):
                    self._fresh(np.unique(known)[: self._rows])
                    rows = self._young.find(some)
                    missing = np.flatnonzero(rows < 0)
            end = int(missing[0]) if len(missing) else len(some)
            found.append(self._young.masks[:, rows[:end]])
            if end < len(some):
                break
            at, size = at + size, 4 * size
        return np.concatenate(found, axis=1) if found else np.zeros((_PLANES, 0, self._words), np.uint64)

    def _fresh(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the rows of these keys in the young table, with the bits that the old one has of them."""
        if self._young.room() < len(keys):
            self._old, self._young = self._young, _Table(self._rows, self._words)
        rows = self._young.find(keys)
        new = keys[rows < 0]
        rows = self._young.add(keys, rows)
        if len(new) and self._old.count:
            old = self._old.find(new)
            carried = old >= 0
            self._young.masks[:, self._young.find(new[carried])] = self._old.masks[:, old[carried]]
        return rows

    def _in_parts(self, keys: Keys) -> list[Keys]:
        keys = np.unique(_no_zeros(keys))
        return [keys[at : at + self._rows] for at in range(0, len(keys), self._rows)]


def _no_zeros(keys: Keys) -> Keys:
    return np.where(keys == 0, np.uint64(1), keys)
