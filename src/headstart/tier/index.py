"""Which extent holds a block, and which blocks an extent holds: numbers in arrays, 27 to 33 bytes a block. No I/O, no lock.

    table (`slots.py`)                                        rows: the blocks of an extent side by side, its *run*
    ┌───┬───┬───┬───┬───┬───┬───┬───┐                           ┌────────────────┬────────┐   ◀── first row of the
    │ 0 │ 3 │ 0 │ 1 │ 2 │ 0 │ 0 │ 0 │  row number + 1 ─────────▶│ 16 bytes of key│ extent │       extent, rows of it
    └───┴───┴───┴───┴───┴───┴───┴───┘                           └────────────────┴────────┘

A removed extent leaves dead rows, and the table names them until they go. When a sixteenth is dead, a *pass* begins: rows are
slid down, a few at every change, so that nobody waits for all of it. Of several extents with a block the one that came first is
found; its row is the lowest, since sliding keeps the order. An index serves one representation; whoever owns it holds the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headstart.tier.growing import Maps
from headstart.tier.slots import Prefixes, Rows, SlotTable

PREFIX_BYTES = 16

_DEAD = 0xFFFF_FFFF  # stands for the extent in the row of a removed block
_DEAD_SHARE = 16  # a pass begins when such a part of the rows is dead
# Rows, and slots, that are gone on by for each row that changes, once they are so many: some 0.3 ms; and of so many at once.
_PASS_RATE, _PASS_ROWS, _PASS_ROWS_MOST = 64, 1024, 4096
_MIN_ROWS = 512
_BATCH = 1 << 15  # rows slid at once; bounds the scratch arrays

Keys = Sequence[bytes] | npt.NDArray[np.uint8]


class BlockIndex:
    """Blocks by the first 16 bytes of their key: where each lies, as (extent, position).

    >>> index = BlockIndex()
    >>> index.insert([b"a" * 32, b"b" * 32], extent=7).tolist()
    [True, True]
    >>> extents, positions = index.lookup([b"b" * 32, b"c" * 32])
    >>> extents.tolist(), positions.tolist()
    ([7, -1], [1, -1])
    """

    def __init__(self) -> None:
        self._used = 0  # rows in use, dead ones included
        self._dead = 0
        self._again = 0  # living rows that are not found, because an earlier one with the same block is
        self._prefixes: Prefixes = np.zeros((_MIN_ROWS, 2), np.uint64)
        self._extents: npt.NDArray[np.uint32] = np.zeros(_MIN_ROWS, np.uint32)
        self._table = SlotTable()
        self._firsts: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)  # of each extent, its first row
        self._counts: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)  # of each extent, its rows; 0: it is not here
        self._several: dict[bytes, list[int]] = {}  # blocks that several extents hold, in the order in which they came
        self._loading = False
        self._maps = Maps()
        # A pass: the row that it looks at next, and where that one goes.
        self._passing = False
        self._reading = 0
        self._writing = 0
        self._owed = 0  # rows that it is to go on by

    def __len__(self) -> int:
        """Return how many different blocks there are."""
        return self._used - self._dead - self._again

    def __repr__(self) -> str:
        return f"<BlockIndex {len(self)} blocks, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays. A block that several extents hold takes some hundred more."""
        rows = self._prefixes.nbytes + self._extents.nbytes
        return rows + self._table.nbytes + self._firsts.nbytes + self._counts.nbytes

    def lookup(self, keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return (extents, positions) of `keys`, -1 in both where a block is absent."""
        rows, _ = self._table.find(self._prefixes, _prefixes(keys))
        rows[self._extents[rows] == _DEAD] = -1  # for -1 the last row is asked: it stays -1
        extents = np.full(len(rows), -1, np.int64)
        positions = np.full(len(rows), -1, np.int32)
        known = np.flatnonzero(rows >= 0)
        holders = self._extents[rows[known]]
        extents[known] = holders
        positions[known] = rows[known] - self._firsts[holders]
        return extents, positions

    def keys(self, extent: int) -> npt.NDArray[np.uint8]:
        """Return the first 16 bytes of each of an extent's keys, in order, as a copy; none for one that is not here."""
        start, end = self._run(extent)
        return self._prefixes[start:end].copy().view(np.uint8)

    def keys_of_all(self, extents: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """As `keys` for extents that are all here, one behind the other, and how many keys each has."""
        counts = self._counts[extents].astype(np.int64)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._prefixes[np.repeat(self._firsts[extents].astype(np.int64), counts) + within].view(np.uint8), counts

    def counts(self, extents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """As `count` for extents that are all here."""
        return self._counts[extents].astype(np.int64)

    def count(self, extent: int) -> int:
        """Return how many blocks an extent has."""
        count: int = self._counts.item(extent) if 0 <= extent < len(self._counts) else 0
        return count

    def sharing(self) -> set[tuple[int, ...]]:
        """Return which extents have a block in common."""
        return {tuple(holders) for holders in self._several.values()}

    def insert(self, keys: Keys, extent: int) -> npt.NDArray[np.bool_]:
        """Note that `extent`, which is not here yet, holds `keys`, in order. Returns which blocks are found in it: those that
        no other has (of two equal keys in `keys` the first). Raises ValueError for an extent that is here, or that a row
        cannot name."""
        assert not self._loading, "finish_loading() comes first"
        prefixes = _prefixes(keys)
        count = len(prefixes)
        self._table.make_room(self._prefixes, count)
        self._go_on(count)
        self._append(prefixes, np.array([extent], np.int64), np.array([count], np.int64))
        first = self._used - count
        again, before = self._table.enter(self._prefixes, np.arange(first, self._used))
        if (dead := self._extents[before] == _DEAD).any():
            again, before = self._instead_of_dead(again, before, dead)
        self._note_several(again, before)
        new = np.ones(count, np.bool_)
        new[again - first] = False
        return new

    def load(self, keys: Keys, extents: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
        """As `insert` for one extent after the other: `keys` are those of all, of which extents[i] holds the next blocks[i].
        None of them is found before `finish_loading`, which enters a million blocks in some 0.1 s."""
        self._loading = True
        self._append(_prefixes(keys), extents, blocks)

    def finish_loading(self) -> None:
        """Let everything be found that was loaded."""
        self._loading, self._passing, self._again = False, False, 0
        self._several.clear()
        living = self._extents[: self._used] != _DEAD
        self._note_several(*self._table.fill(self._prefixes[: self._used], living))

    def remove(self, extent: int) -> int:
        """Forget an extent; returns how many blocks it had. Those that others have are found there from now on."""
        start, end = self._run(extent)
        if self._several:
            self._leave(extent, start, end)
        self._extents[start:end] = _DEAD
        if start < end:
            self._counts[extent] = 0
        self._dead += end - start
        self._go_on(end - start)
        if not self._loading:
            if not self._passing and self._dead * _DEAD_SHARE > self._used > _MIN_ROWS:
                self._begin_pass()
            self._table.shrink(self._prefixes)
        return end - start

    # Rows.

    def _run(self, extent: int) -> tuple[int, int]:
        count = self.count(extent)
        start = int(self._firsts[extent]) if count else 0
        return start, start + count

    def _append(self, prefixes: Prefixes, extents: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
        """Write the runs of new extents behind the last row."""
        total = int(blocks.sum())
        if len(extents) != len(blocks) or total != len(prefixes):
            raise ValueError(f"{len(prefixes)} keys, but {len(extents)} extents of {total} blocks; give one row a block")
        if not len(extents):
            return
        least, most = int(extents.min()), int(extents.max())
        if least < 0 or most >= _DEAD:
            raise ValueError(f"extent {least} to {most} does not fit an index row of 0 to {_DEAD - 1}")
        if self._used + total >= _DEAD:
            raise ValueError(f"an index holds fewer than {_DEAD} blocks")
        self._make_room(self._used + total, most + 1)  # before anything changes: it may find no memory
        again = not (extents[1:] > extents[:-1]).all() and len(np.unique(extents)) < len(extents)
        if self._counts[extents].any() or again:
            raise ValueError(f"extent {least} to {most}: one is in the index already; remove it first")
        start, end = self._used, self._used + total
        self._prefixes[start:end] = prefixes
        self._extents[start:end] = np.repeat(extents, blocks)
        self._firsts[extents] = start + np.cumsum(blocks) - blocks
        self._counts[extents] = blocks
        self._used = end

    def _make_room(self, rows: int, extents: int) -> None:
        if rows > len(self._extents):  # the one that is resized last
            self._resize_rows(rows)
        if extents > len(self._counts):
            self._maps.resize(self, ("_firsts", "_counts"), extents + extents // 8 + 8)

    def _resize_rows(self, rows: int) -> None:
        """Have room for so many rows, and ahead of need some that take no memory yet."""
        self._maps.resize(self, ("_prefixes", "_extents"), max(rows + rows // 8, _MIN_ROWS))

    # Blocks that several extents have.

    def _note_several(self, again: Rows, before: Rows) -> None:
        """`again`: rows of blocks that are found in the rows `before`."""
        self._again += len(again)
        for row, first in zip(again.tolist(), before.tolist(), strict=True):
            holders = self._several.setdefault(self._prefixes[row].tobytes(), [int(self._extents[first])])
            holders.append(int(self._extents[row]))

    def _instead_of_dead(self, again: Rows, before: Rows, dead: npt.NDArray[np.bool_]) -> tuple[Rows, Rows]:
        """Let new rows be found instead of `dead` ones with the same blocks; returns which are still not found, and why."""
        came = again[dead]
        _, slots = self._table.find(self._prefixes, self._prefixes[came])
        self._table.point(slots[::-1], came[::-1])  # the last assignment counts: of rows with the same block the lowest gets it
        before[dead], _ = self._table.find(self._prefixes, self._prefixes[came])
        late = before != again
        return again[late], before[late]

    def _leave(self, extent: int, start: int, end: int) -> None:
        """Take an extent out of the blocks that it shares; the next one that has them is found from now on."""
        for prefix in self._prefixes[start:end]:
            key = prefix.tobytes()
            holders = self._several.get(key)
            if holders is None or extent not in holders:  # the latter: an extent that names a block twice
                continue
            left = [holder for holder in holders if holder != extent]
            self._again -= len(holders) - max(1, len(left))
            if left and holders[0] == extent:
                self._point(prefix.reshape(1, 2), left[0])
            if len(left) > 1:
                self._several[key] = left
            else:
                del self._several[key]

    def _point(self, prefix: Prefixes, extent: int) -> None:
        """Let a block be found in another extent that has it."""
        start, end = self._run(extent)
        row = start + int(np.flatnonzero((self._prefixes[start:end] == prefix).all(axis=1))[0])
        found, slots = self._table.find(self._prefixes, prefix)
        if found[0] >= 0:
            self._table.point(slots, np.array([row]))

    # Passes.

    def _begin_pass(self) -> None:
        """Begin to pack the rows."""
        self._passing, self._reading, self._writing = True, 0, 0

    def _go_on(self, count: int) -> None:
        """Go on with a pass, and with another width of the table, if there is one, because `count` rows changed."""
        if not (self._passing or self._table.changing):
            return
        self._owed += _PASS_RATE * count
        if self._owed < _PASS_ROWS:
            return
        count = min(self._owed, max(_PASS_ROWS_MOST, _PASS_RATE // 4 * count))
        self._owed -= count
        self._table.go_on(self._prefixes, count)
        if not self._passing:
            return
        until = min(self._used, self._reading + count)
        while self._reading < until:
            self._slide(min(_BATCH, until - self._reading))
        if self._reading >= self._used:
            self._passing = False
            self._dead -= self._used - self._writing
            self._used = self._writing
            self._resize_rows(self._used)

    def _slide(self, count: int) -> None:
        """Slide the next `count` rows down, and what else belongs to the last run.

        packed │ dead │ rows still to come
               ▲writing ▲reading"""
        start, end, target = self._reading, self._reading + count, self._writing
        if (last := int(self._extents[end - 1])) != _DEAD:
            end = self._run(last)[1]
        living = self._extents[start:end] != _DEAD
        rows = start + np.flatnonzero(living)
        self._reading, self._writing = end, target + len(rows)
        if self._writing == end:
            return  # nothing was dead so far
        self._table.leave(self._prefixes, start + np.flatnonzero(~living))
        prefixes, extents = self._prefixes[rows], self._extents[rows]
        found, slots = self._table.find(self._prefixes, prefixes)  # before anything moves: slots are known by their rows
        own = found == rows  # the others are not found, as an earlier one with the same block is
        moved = np.arange(target, self._writing)
        heads = self._firsts[extents] == rows
        self._prefixes[target : self._writing] = prefixes
        self._extents[target : self._writing] = extents
        self._extents[self._writing : end] = _DEAD
        self._firsts[extents[heads]] = moved[heads]
        self._table.point(slots[own], moved[own])


def _prefixes(keys: Keys) -> Prefixes:
    """Return the first 16 bytes of each key as two numbers."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] < PREFIX_BYTES:
            raise ValueError(f"keys are a {keys.dtype} array of shape {keys.shape}; give u8 [n, ≥ {PREFIX_BYTES}]")
        rows = keys
    elif not len(keys):
        return np.empty((0, 2), np.uint64)
    else:
        widths = set(map(len, keys))
        if min(widths) < PREFIX_BYTES:
            raise ValueError(f"a key has {min(widths)} bytes; at least {PREFIX_BYTES} are needed")
        joined = b"".join(keys) if len(widths) == 1 else b"".join(key[:PREFIX_BYTES] for key in keys)
        rows = np.frombuffer(joined, np.uint8).reshape(len(keys), -1)
    return np.ascontiguousarray(rows[:, :PREFIX_BYTES]).view(np.uint64)
