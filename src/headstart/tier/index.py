"""Which extent holds a block: numbers in arrays instead of a million Python objects, 30 to 54 bytes a block. No I/O, no lock.

    table  u32, a power of two long, at most 0.6 full          rows, dense, in the order of insertion
    ┌───┬───┬───┬───┬───┬───┬───┬───┐                           ┌────────────────┬────────┬──────────┐
    │ 0 │ 3 │ 0 │ 1 │ 2 │ 0 │ 0 │ 0 │  row number + 1 ─────────▶│ 16 bytes of key│ extent │ position │
    └───┴───┴───┴───┴───┴───┴───┴───┘  0 = empty, ends a probe  └────────────────┴────────┴──────────┘

Keys are SHA-256, so their own bits choose the slot; a taken slot sends the probe to the next. A removed block keeps its row and
slot, marked dead, until a quarter of the rows is dead: then rows are packed and the table is built anew. One index serves one
representation; whoever owns it holds the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PREFIX_BYTES = 16

_DEAD = 0xFFFF_FFFF  # stands for the extent in the row of a removed block
_MAX_LOAD_NUM, _MAX_LOAD_DEN = 3, 5  # at most 0.6 of the slots are taken, so every probe meets an empty one
_MIN_SLOTS = 1024
_MIN_ROWS = 512
_BATCH = 1 << 16  # rows placed at once while a table is built; bounds the scratch arrays

Keys = Sequence[bytes] | npt.NDArray[np.uint8]
_Prefixes = npt.NDArray[np.uint64]  # [n, 2]
_Rows = npt.NDArray[np.int64]


class BlockIndex:
    """Blocks by the first 16 bytes of their key: where each lies, as (extent, position).

    >>> index = BlockIndex()
    >>> index.insert([b"a" * 32, b"b" * 32], extent=7, first_position=0).tolist()
    [True, True]
    >>> extents, positions = index.lookup([b"b" * 32, b"c" * 32])
    >>> extents.tolist(), positions.tolist()
    ([7, -1], [1, -1])
    """

    def __init__(self) -> None:
        self._used = 0  # rows in use, dead ones included
        self._dead = 0
        self._prefixes: _Prefixes = np.zeros((_MIN_ROWS, 2), np.uint64)
        self._places: npt.NDArray[np.uint32] = np.zeros((_MIN_ROWS, 2), np.uint32)  # extent, position
        self._table: npt.NDArray[np.uint32] = np.zeros(_MIN_SLOTS, np.uint32)

    def __len__(self) -> int:
        return self._used - self._dead

    def __repr__(self) -> str:
        return f"<BlockIndex {len(self)} blocks, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        return self._prefixes.nbytes + self._places.nbytes + self._table.nbytes

    def lookup(self, keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return (extents, positions) of `keys`, -1 in both where a block is absent."""
        rows = self._find(_prefixes(keys))
        extents = np.full(len(rows), -1, np.int64)
        positions = np.full(len(rows), -1, np.int32)
        known = np.flatnonzero(rows >= 0)
        places = self._places[rows[known]]
        alive = places[:, 0] != _DEAD
        known = known[alive]
        extents[known] = places[alive, 0]
        positions[known] = places[alive, 1]
        return extents, positions

    def insert(self, keys: Keys, extent: int, first_position: int = 0) -> npt.NDArray[np.bool_]:
        """Note that `extent` holds `keys` at first_position, first_position+1, … Returns which blocks were absent; a block
        that is known already keeps its place, and of two equal keys in `keys` the first counts. Raises ValueError for an
        extent or a position that a row cannot hold."""
        prefixes = _prefixes(keys)
        positions = np.arange(first_position, first_position + len(prefixes), dtype=np.int64)
        return self._insert(prefixes, np.full(len(prefixes), extent, np.int64), positions)

    def insert_extents(
        self, keys: Keys, extents: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """As `insert` for one extent after the other, at once: `keys` are those of all, of which extents[i] holds the next
        blocks[i], from its position 0 on. For reopening: a million blocks take 0.2 s so, and fifty
        times that one extent at a time."""
        prefixes = _prefixes(keys)
        ends = np.cumsum(blocks, dtype=np.int64)
        if len(extents) != len(blocks) or (int(ends[-1]) if len(ends) else 0) != len(prefixes):
            raise ValueError(f"{len(prefixes)} keys, but {len(extents)} extents of {blocks.sum()} blocks; give one row a block")
        positions = np.arange(len(prefixes), dtype=np.int64) - np.repeat(ends - blocks, blocks)
        return self._insert(prefixes, np.repeat(extents.astype(np.int64), blocks), positions)

    def _insert(
        self, prefixes: _Prefixes, extents: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        new = np.zeros(len(prefixes), np.bool_)
        if not len(prefixes):
            return new
        if extents.min() < 0 or extents.max() >= _DEAD:
            raise ValueError(f"extent {extents.min()} to {extents.max()} does not fit an index row of 0 to {_DEAD - 1}")
        if positions.min() < 0 or positions.max() >= 1 << 31:
            raise ValueError(f"position {positions.min()} to {positions.max()} does not fit an index row")
        places = np.empty((len(prefixes), 2), np.uint32)
        places[:, 0] = extents
        places[:, 1] = positions
        first = _first_of_equals(prefixes)
        rows = self._find(prefixes)

        absent = np.flatnonzero(first & (rows < 0))
        self._reserve(len(absent))  # before anything changes: it may find no memory
        dead = np.flatnonzero(first & (rows >= 0))
        dead = dead[self._places[rows[dead], 0] == _DEAD]
        self._places[rows[dead]] = places[dead]
        self._dead -= len(dead)
        start, end = self._used, self._used + len(absent)
        self._prefixes[start:end] = prefixes[absent]
        self._places[start:end] = places[absent]
        self._used = end
        self._enter(start, end)
        new[absent] = True
        new[dead] = True
        return new

    def remove(self, keys: Keys, extent: int) -> npt.NDArray[np.bool_]:
        """Forget those of `keys` that still point to `extent`; returns which ones did."""
        prefixes = _prefixes(keys)
        rows = self._find(prefixes)
        known = np.flatnonzero((rows >= 0) & _first_of_equals(prefixes))
        known = known[self._places[rows[known], 0] == extent] if 0 <= extent < _DEAD else known[:0]
        self._places[rows[known], 0] = _DEAD
        self._dead += len(known)
        removed = np.zeros(len(rows), np.bool_)
        removed[known] = True
        if self._dead * 4 > self._used and self._used > _MIN_ROWS:
            self._pack()
        return removed

    def _find(self, prefixes: _Prefixes) -> _Rows:
        """Return the row of each key, dead rows included, or -1.

        All keys take one step of their probes at a time; those that met their key or an empty slot drop out."""
        rows = np.full(len(prefixes), -1, np.int64)
        mask = np.uint64(len(self._table) - 1)
        asking = np.arange(len(prefixes))
        slots = prefixes[:, 0] & mask
        while len(asking):
            entries = self._table[slots]
            taken = entries != 0
            asking, slots, entries = asking[taken], slots[taken], entries[taken]
            candidates = entries.astype(np.int64) - 1
            wanted, found = prefixes[asking], self._prefixes[candidates]
            equal = (wanted[:, 0] == found[:, 0]) & (wanted[:, 1] == found[:, 1])  # a third of the time of all(axis=1)
            rows[asking[equal]] = candidates[equal]
            other = ~equal
            asking, slots = asking[other], (slots[other] + np.uint64(1)) & mask
        return rows

    def _enter(self, start: int, end: int) -> None:
        """Enter rows start … end-1, whose keys are not in the table and differ from each other."""
        mask = np.uint64(len(self._table) - 1)
        for low in range(start, end, _BATCH):
            entries = np.arange(low + 1, min(low + _BATCH, end) + 1, dtype=np.uint32)
            slots = self._prefixes[low : low + len(entries), 0] & mask
            while len(entries):
                free = self._table[slots] == 0
                self._table[slots[free]] = entries[free]
                # Two rows of a batch may choose the same free slot: what was written is read again, the loser goes on.
                other = self._table[slots] != entries
                entries, slots = entries[other], (slots[other] + np.uint64(1)) & mask

    def _reserve(self, count: int) -> None:
        """Make room for `count` more rows."""
        needed = self._used + count
        if needed >= _DEAD:
            raise ValueError(f"an index holds fewer than {_DEAD} blocks")
        if needed > len(self._places):  # the one that is resized last
            self._resize_rows(max(needed, self._used + self._used // 8))
        if needed * _MAX_LOAD_DEN > len(self._table) * _MAX_LOAD_NUM:
            self._build(_slots_for(needed))

    def _resize_rows(self, rows: int) -> None:
        # resize() moves the pages of a big array instead of copying them (mremap), so growing has no peak of twice the size.
        # No view of the arrays outlives a method of this class, which is what refcheck would look for.
        rows = max(rows, _MIN_ROWS)
        self._prefixes.resize((rows, 2), refcheck=False)
        self._places.resize((rows, 2), refcheck=False)

    def _build(self, slots: int) -> None:
        self._table = np.zeros(slots, np.uint32)
        self._enter(0, self._used)

    def _pack(self) -> None:
        """Drop dead rows, keep the order of the others, build the table anew."""
        packed = 0
        for low in range(0, self._used, _BATCH):
            high = min(low + _BATCH, self._used)
            alive = low + np.flatnonzero(self._places[low:high, 0] != _DEAD)
            self._prefixes[packed : packed + len(alive)] = self._prefixes[alive]
            self._places[packed : packed + len(alive)] = self._places[alive]
            packed += len(alive)
        self._used, self._dead = packed, 0
        self._resize_rows(packed + packed // 8)
        self._build(_slots_for(packed))


def _prefixes(keys: Keys) -> _Prefixes:
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


def _first_of_equals(prefixes: _Prefixes) -> npt.NDArray[np.bool_]:
    """Return True for each key that does not stand earlier in the batch."""
    first = np.ones(len(prefixes), np.bool_)
    heads = np.sort(prefixes[:, 0])  # np.unique would hash, which takes ten times as long for a million
    if not (heads[1:] == heads[:-1]).any():  # nearly always
        return first
    seen: set[bytes] = set()
    for at, prefix in enumerate(prefixes):
        key = prefix.tobytes()
        first[at] = key not in seen
        seen.add(key)
    return first


def _slots_for(rows: int) -> int:
    """Return the least power of two of which `rows` take at most 0.6."""
    least = -(-rows * _MAX_LOAD_DEN // _MAX_LOAD_NUM)
    return max(_MIN_SLOTS, 1 << (least - 1).bit_length())
