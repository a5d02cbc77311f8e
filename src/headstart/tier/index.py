"""Which extent holds a block, and which blocks an extent holds: numbers in arrays, 27 to 50 bytes a block. No I/O, no lock.

    table  u32, at most 0.6 full                               rows: the blocks of an extent side by side, its *run*
    ┌───┬───┬───┬───┬───┬───┬───┬───┐                           ┌────────────────┬────────┐   ◀── first row of the
    │ 0 │ 3 │ 0 │ 1 │ 2 │ 0 │ 0 │ 0 │  row number + 1 ─────────▶│ 16 bytes of key│ extent │       extent, rows of it
    └───┴───┴───┴───┴───┴───┴───┴───┘  0 = empty, ends a probe  └────────────────┴────────┘

Keys are SHA-256, so their own bits choose the slot; a taken slot sends the probe to the next. What a slot says is only ever a
hint: the row is compared, so a slot that outlived its row does no harm but take room.

A removed extent leaves dead rows. When an eighth of the rows is dead, or the table is full, a *pass* begins: rows are slid
down and entered into a new table, a few at every change, so that nobody waits for all of it. Until it is through, the old
table tells of the rows that it has not reached. Of several extents with a block the one that came first is found; its row is
the lowest, since sliding keeps the order. One index serves one representation; whoever owns it holds the lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headstart.tier.growing import Maps, zeros

PREFIX_BYTES = 16

_DEAD = 0xFFFF_FFFF  # stands for the extent in the row of a removed block
_MAX_LOAD_NUM, _MAX_LOAD_DEN = 3, 5  # at most 0.6 of the slots are taken, so every probe meets an empty one
_ROOM_NUM, _ROOM_DEN = 4, 3  # a new table has room for a third more rows: a pass is through before that is used up
_DEAD_SHARE = 8  # a pass begins when such a part of the rows is dead
_PASS_ROWS, _PASS_RATE = 256, 16  # rows that a pass goes on by with every change, at least, and for each row of it
_MIN_SLOTS = 1024
_MIN_ROWS = 512
_FEW = 128
_ONE, _EIGHT = np.arange(1, 2), np.arange(1, 9)
_BATCH = 1 << 15  # rows entered at once; bounds the scratch arrays

Keys = Sequence[bytes] | npt.NDArray[np.uint8]
_Prefixes = npt.NDArray[np.uint64]  # [n, 2]
_Rows = npt.NDArray[np.int64]
_Table = npt.NDArray[np.uint32]


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
        self._taken = 0  # slots of the table
        self._again = 0  # living rows that are not found, because an earlier one with the same block is
        self._prefixes: _Prefixes = np.zeros((_MIN_ROWS, 2), np.uint64)
        self._extents: npt.NDArray[np.uint32] = np.zeros(_MIN_ROWS, np.uint32)
        self._table: _Table = np.zeros(_MIN_SLOTS, np.uint32)
        self._firsts: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)  # of each extent, its first row
        self._counts: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)  # of each extent, its rows; 0: it is not here
        self._several: dict[bytes, list[int]] = {}  # blocks that several extents hold, in the order in which they came
        self._loading = False
        self._maps = Maps()
        # A pass: the table that it replaces, the row that it looks at next, and where that one goes.
        self._old: _Table | None = None
        self._reading = 0
        self._writing = 0

    def __len__(self) -> int:
        """Return how many different blocks there are."""
        return self._used - self._dead - self._again

    def __repr__(self) -> str:
        return f"<BlockIndex {len(self)} blocks, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays. A block that several extents hold takes some hundred more."""
        tables = self._table.nbytes + (0 if self._old is None else self._old.nbytes)
        return tables + self._prefixes.nbytes + self._extents.nbytes + self._firsts.nbytes + self._counts.nbytes

    def lookup(self, keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return (extents, positions) of `keys`, -1 in both where a block is absent."""
        prefixes = _prefixes(keys)
        rows = self._living(self._table, prefixes)
        if self._old is not None:
            missing = np.flatnonzero(rows < 0)
            rows[missing] = self._living(self._old, prefixes[missing])
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
        self._go_on(count)
        left = self._used - self._reading if self._old is not None else 0  # what the pass has still to enter
        if (self._taken + left + count) * _MAX_LOAD_DEN > len(self._table) * _MAX_LOAD_NUM:
            self._go_on(self._used)
            self._begin_pass(count)
        self._append(prefixes, np.array([extent], np.int64), np.array([count], np.int64))
        rows = np.arange(self._used - count, self._used)
        new = np.ones(count, np.bool_)
        if self._old is not None:  # what the pass has not reached yet is not in the table
            earlier = self._living(self._old, prefixes)
            new = earlier < 0
            self._note_several(rows[~new], earlier[~new])
        again, before = self._enter(rows[new])
        self._note_several(again, before)
        new[again - (self._used - count)] = False
        return new

    def load(self, keys: Keys, extents: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
        """As `insert` for one extent after the other: `keys` are those of all, of which extents[i] holds the next blocks[i].
        None of them is found before `finish_loading`, which enters a million blocks in some 0.2 s."""
        self._loading = True
        self._append(_prefixes(keys), extents, blocks)

    def finish_loading(self) -> None:
        """Let everything be found that was loaded."""
        self._loading, self._old, self._taken, self._again = False, None, 0, 0
        self._several.clear()
        living = np.flatnonzero(self._extents[: self._used] != _DEAD)
        self._table = zeros(_slots_for(len(living)), np.uint32)
        self._note_several(*self._enter(living))

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
        if self._old is None and not self._loading and self._dead * _DEAD_SHARE > self._used > _MIN_ROWS:
            self._begin_pass(0)
        return end - start

    # Rows.

    def _run(self, extent: int) -> tuple[int, int]:
        count = self.count(extent)
        start = int(self._firsts[extent]) if count else 0
        return start, start + count

    def _append(self, prefixes: _Prefixes, extents: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> None:
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
        if self._counts[extents].any() or (len(extents) > 1 and len(np.unique(extents)) < len(extents)):
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

    def _note_several(self, again: _Rows, before: _Rows) -> None:
        """`again`: rows of blocks that are found in the rows `before`."""
        self._again += len(again)
        for row, first in zip(again.tolist(), before.tolist(), strict=True):
            holders = self._several.setdefault(self._prefixes[row].tobytes(), [int(self._extents[first])])
            holders.append(int(self._extents[row]))

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

    def _point(self, prefix: _Prefixes, extent: int) -> None:
        """Let a block be found in another extent that has it."""
        start, end = self._run(extent)
        row = start + int(np.flatnonzero((self._prefixes[start:end] == prefix).all(axis=1))[0])
        for table in (self._table, self._old):
            if table is not None:
                found, slots = self._probe(table, prefix)
                if found[0] >= 0:
                    table[slots] = row + 1

    # The table.

    def _living(self, table: _Table, prefixes: _Prefixes) -> _Rows:
        """Return the row in which a table finds each key, or -1."""
        rows, _ = self._probe(table, prefixes)
        rows[self._extents[rows] == _DEAD] = -1  # for -1 the last row is asked: it stays -1
        return rows

    def _probe(self, table: _Table, prefixes: _Prefixes) -> tuple[_Rows, _Rows]:
        """Return the row of each key, dead ones included, or -1; and the slot that says so, or the empty one that was met.

        All keys take a step of their probes at a time: of one slot, and of eight when few are left, for which many steps would
        cost more than what they look at."""
        ended = _first_slots(prefixes, len(table))
        entries = table[ended]
        rows = entries.astype(np.int64) - 1
        asking = np.flatnonzero((entries != 0) & ~_equal(prefixes, self._prefixes[rows]))
        slots = ended[asking]
        while len(asking):
            slots = (slots[:, None] + (_EIGHT if len(asking) <= _FEW else _ONE)) % len(table)  # [n, 8 or 1]
            candidates = table[slots].astype(np.int64) - 1
            ends = (self._prefixes[candidates] == prefixes[asking, None]).all(axis=2) | (candidates < 0)
            at = np.arange(len(asking)), ends.argmax(axis=1)
            rows[asking], ended[asking] = candidates[at], slots[at]
            other = ~ends[at]
            asking, slots = asking[other], slots[other, -1]
        return rows, ended

    def _enter(self, rows: _Rows) -> tuple[_Rows, _Rows]:
        """Let `rows`, given in their order, be found; returns those whose blocks are found already, and in which rows."""
        late: list[tuple[_Rows, _Rows]] = []
        table = self._table
        for low in range(0, len(rows), _BATCH):
            asking = rows[low : low + _BATCH]
            slots = _first_slots(self._prefixes[asking], len(table))
            while len(asking):
                entries = table[slots]
                free = entries == 0
                candidates = entries.astype(np.int64) - 1
                equal = _equal(self._prefixes[asking], self._prefixes[candidates]) & ~free
                dead = equal & (self._extents[candidates] == _DEAD)
                # Several may choose the same slot: what was written is read again, and the losers look there once more. The
                # last assignment counts, hence backwards: of rows with the same block the lowest gets it.
                open_slots = np.flatnonzero(free | dead)[::-1]
                table[slots[open_slots]] = asking[open_slots] + 1
                mine = table[slots] == asking + 1
                self._taken += int((mine & free).sum())
                again = equal & ~dead & ~mine
                if again.any():
                    late.append((asking[again], candidates[again]))
                occupied = ~(free | equal)
                left = ~(mine | again)
                asking, slots = asking[left], np.where(occupied, _next_slots(slots, len(table)), slots)[left]
        if not late:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        again_rows, before = np.concatenate([a for a, _ in late]), np.concatenate([b for _, b in late])
        order = np.argsort(again_rows)
        return again_rows[order], before[order]

    # Passes.

    def _begin_pass(self, count: int) -> None:
        """Begin to pack the rows and to enter them into a new table, which has room for `count` more than there are."""
        self._old, self._table, self._taken = self._table, zeros(_slots_for(self._used - self._dead + count), np.uint32), 0
        self._reading = self._writing = 0
        if not self._used:
            self._old = None

    def _go_on(self, count: int) -> None:
        """Go on with a pass, if there is one, because `count` rows changed."""
        if self._old is None:
            return
        until = min(self._used, self._reading + max(_PASS_ROWS, _PASS_RATE * count))
        while self._reading < until:
            self._slide(min(_BATCH, until - self._reading))
        if self._reading >= self._used:
            self._old = None
            self._dead -= self._used - self._writing
            self._used = self._writing
            self._resize_rows(self._used)

    def _slide(self, count: int) -> None:
        """Slide the next `count` rows down, and what else belongs to the last run, and enter them into the new table.

        packed │ dead │ rows still to come          what the old table says of rows behind `reading` stays right
               ▲writing ▲reading"""
        start, end, target = self._reading, self._reading + count, self._writing
        if (last := int(self._extents[end - 1])) != _DEAD:
            end = self._run(last)[1]
        rows = np.arange(start, end)
        # Some are in the new table: those that came since the pass began, or that others made way for. Dead ones leave it, so
        # that no slot ever names a row that is no more. Asked before anything moves, since slots are known by their rows.
        found, slots = self._probe(self._table, self._prefixes[start:end])
        own = found == rows
        living = self._extents[start:end] != _DEAD
        self._table[slots[own & ~living]] = 1  # any row will do that is another's
        rows, slots, own, absent = rows[living], slots[living], own[living], (found < 0)[living]
        absent |= ~own & (self._extents[found[living]] == _DEAD)
        prefixes, extents = self._prefixes[rows], self._extents[rows]
        moved = np.arange(target, target + len(rows))
        heads = self._firsts[extents] == rows
        self._prefixes[target : target + len(rows)] = prefixes
        self._extents[target : target + len(rows)] = extents
        self._extents[target + len(rows) : end] = _DEAD
        self._firsts[extents[heads]] = moved[heads]
        self._table[slots[own]] = moved[own] + 1
        self._reading, self._writing = end, target + len(rows)
        self._enter(moved[absent])


def _equal(some: _Prefixes, others: _Prefixes) -> npt.NDArray[np.bool_]:
    equal: npt.NDArray[np.bool_] = some[:, 0] == others[:, 0]
    equal &= some[:, 1] == others[:, 1]  # a third of the time of all(axis=1)
    return equal


def _first_slots(prefixes: _Prefixes, slots: int) -> _Rows:
    """Return where each key's probe begins: its first bits as a share of the table, whose length can so be any."""
    return ((prefixes[:, 0] >> np.uint64(32)) * np.uint64(slots) >> np.uint64(32)).astype(np.int64)


def _next_slots(slots: _Rows, total: int) -> _Rows:
    following = slots + 1
    following[following == total] = 0
    return following


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


def _slots_for(rows: int) -> int:
    """Return the length of a new table: room for a third more rows than there are, and then 0.6 full."""
    return max(_MIN_SLOTS, -(-rows * _ROOM_NUM * _MAX_LOAD_DEN // (_ROOM_DEN * _MAX_LOAD_NUM)))
