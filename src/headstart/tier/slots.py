"""Row numbers by key: an open-addressed table that grows and shrinks where it lies. No I/O, no lock.

A key's first bits, as a share of the table's width, choose its home; a taken slot sends the probe to the next. So the table is
nearly in the order of keys, and it can be stretched a part at a time: from its end down, what stands between two empty slots is
taken out and entered again for the new width. It shrinks in the same way, from its front up. There is never a second table.

    growing     │ homes of the old width │ empty │ homes of the new width │
                0                        ▲ edge  ▲                        new width

The keys themselves are whose rows they are: every call is given their column, in which a row is compared.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headstart.tier.growing import Maps

_MAX_LOAD_NUM, _MAX_LOAD_DEN = 3, 5  # at most 0.6 of the slots are taken, so every probe meets an empty one
_ROOM_NUM, _ROOM_DEN = 4, 3  # a new width has room for a third more rows: it is there before that is used up
_MIN_SLOTS = 1024
_FEW = 128
_ONE, _EIGHT = np.arange(1, 2), np.arange(1, 9)
_BATCH = 1 << 15  # rows entered at once; bounds the scratch arrays
_FILLED = 1 << 20  # the same, of `fill`
_BITS = np.uint64(32)  # of a key, that say where it is at home
_END = 1 << 32

Prefixes = npt.NDArray[np.uint64]  # [n, 2]
Rows = npt.NDArray[np.int64]


class SlotTable:
    """`taken`: how many rows are found in it. A column is the first 16 bytes of each row's key, as two numbers."""

    def __init__(self) -> None:
        self.taken = 0
        self._maps = Maps()
        self._slots: npt.NDArray[np.uint32] = np.zeros(_MIN_SLOTS, np.uint32)  # row number + 1; 0 is empty, and ends a probe
        # Keys whose bits are below the edge are at home by the smaller width, the others by the larger one. Either may be the
        # new one; when no change is under way they are equal.
        self._edge = 0
        self._below = self._above = _MIN_SLOTS
        self._growing = True

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    @property
    def changing(self) -> bool:
        """Whether its width is being changed."""
        return self._below != self._above

    def find(self, column: Prefixes, keys: Prefixes) -> tuple[Rows, Rows]:
        """Return the row of each key, or -1; and the slot that says so, or the empty one that was met.

        All keys take a step of their probes at a time: of one slot, and of eight when few are left, for which many steps would
        cost more than what they look at."""
        table = self._slots
        ended = self._homes(keys)
        entries = table[ended]
        rows = entries.astype(np.int64) - 1
        asking = np.flatnonzero((entries != 0) & ~_equal(keys, column[rows]))
        slots = ended[asking]
        while len(asking):
            slots = (slots[:, None] + (_EIGHT if len(asking) <= _FEW else _ONE)) % len(table)  # [n, 8 or 1]
            candidates = table[slots].astype(np.int64) - 1
            ends = (column[candidates] == keys[asking, None]).all(axis=2) | (candidates < 0)
            at = np.arange(len(asking)), ends.argmax(axis=1)
            rows[asking], ended[asking] = candidates[at], slots[at]
            other = ~ends[at]
            asking, slots = asking[other], slots[other, -1]
        return rows, ended

    def point(self, slots: Rows, rows: Rows) -> None:
        """Let slots that `find` returned say other rows, of the same keys."""
        self._slots[slots] = rows + 1

    def enter(self, column: Prefixes, rows: Rows) -> tuple[Rows, Rows]:
        """Let `rows`, given in their order, be found, for which `make_room` has made room; returns those whose keys are found
        already, and in which rows."""
        late: list[tuple[Rows, Rows]] = []
        table = self._slots
        for low in range(0, len(rows), _BATCH):
            asking = rows[low : low + _BATCH]
            slots = self._homes(column[asking])
            while len(asking):
                entries = table[slots]
                free = entries == 0
                candidates = entries.astype(np.int64) - 1
                equal = _equal(column[asking], column[candidates]) & ~free
                # Several may choose the same slot: what was written is read again, and the losers look there once more. The
                # last assignment counts, hence backwards: of rows with the same key the lowest gets it.
                open_slots = np.flatnonzero(free)[::-1]
                table[slots[open_slots]] = asking[open_slots] + 1
                mine = free & (table[slots] == asking + 1)
                self.taken += int(np.count_nonzero(mine))
                if equal.any():
                    late.append((asking[equal], candidates[equal]))
                left = ~(mine | equal)
                asking, slots = asking[left], np.where(free, slots, (slots + 1) % len(table))[left]
        if not late:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        again_rows, before = np.concatenate([a for a, _ in late]), np.concatenate([b for _, b in late])
        order = np.argsort(again_rows)
        return again_rows[order], before[order]

    def leave(self, column: Prefixes, rows: Rows) -> None:
        """Let rows be found no more, as far as they are."""
        found, slots = self.find(column, column[rows])
        self._take_out(slots[found == rows])
        # What stands behind an emptied slot, up to the next empty one, may have probed past it.
        at, behind = slots[found == rows], []
        while len(at):
            following = (at[:, None] + _EIGHT) % len(self._slots)
            ends = self._slots[following] == 0
            behind.append(following[~np.logical_or.accumulate(ends, axis=1)])
            at = following[~ends.any(axis=1), -1]
        if behind:
            self.enter(column, self._take_out(np.concatenate(behind)))

    def fill(self, column: Prefixes, living: npt.NDArray[np.bool_]) -> tuple[Rows, Rows]:
        """Begin anew with the living rows; returns what `enter` does. Sorted by their keys' bits, a row's place is behind the
        last one's or at its home."""
        count = int(np.count_nonzero(living))
        width = _slots_for(count)
        self._slots, self._maps = np.zeros(0, np.uint32), Maps()  # whose memory is all zeros
        self._maps.resize(self, ("_slots",), width)
        self._edge, self._below, self._above, self.taken = 0, width, width, 0
        parts = -(-count // _FILLED)
        behind, later = 0, [np.empty(0, np.int64)]
        for part in range(parts):
            low, end = (np.uint64((part + more) * _END // parts << 32) if part + more < parts else None for more in (0, 1))
            mine = living if low is None or not part else living & (column[:, 0] >= low)
            rows = np.flatnonzero(mine if end is None else mine & (column[:, 0] < end))
            if not len(rows):
                continue
            order = column[rows, 0] >> _BITS << _BITS | rows.astype(np.uint64)
            order.sort()
            bits, rows = order >> _BITS, (order & np.uint64(_END - 1)).astype(np.int64)
            first = np.concatenate([[True], bits[1:] != bits[:-1]])  # the others may have the same key
            later.append(rows[~first])
            bits, rows = bits[first], rows[first]
            steps = np.arange(len(rows))
            slots = (
                np.maximum(np.maximum.accumulate((bits * np.uint64(width) >> _BITS).astype(np.int64) - steps), behind) + steps
            )
            behind = int(slots[-1]) + 1
            inside = int(np.searchsorted(slots, width))
            later.append(rows[inside:])
            self._slots[slots[:inside]] = rows[:inside] + 1
            self.taken += inside
        return self.enter(column, np.sort(np.concatenate(later)))

    # Another width.

    def make_room(self, column: Prefixes, count: int) -> None:
        """Make sure that `count` more rows can be entered. The table grows, if it must, as `go_on` is called."""
        if (self.taken + count) * _MAX_LOAD_DEN > self._width * _MAX_LOAD_NUM:
            self._change(column, _slots_for(self.taken + count))

    def shrink(self, column: Prefixes) -> None:
        """Begin to give memory back where half of it would do."""
        width = _slots_for(self.taken)
        if not self.changing and 2 * width <= self._width:
            self._change(column, width)

    def go_on(self, column: Prefixes, count: int) -> None:
        """Go on with a change of width, if there is one, by some `count` slots."""
        if self._below == self._above:
            return
        if self._growing:
            at = self._edge * self._below >> 32
            start = self._begin_of_run(max(0, at - count))
            rows = self._take_out(np.arange(start, self._end_of_run(at)) % len(self._slots))
            self._edge = -(-(start << 32) // self._below)
            if not start:
                self._below = self._above
        else:
            at = self._edge * self._above >> 32
            end = self._end_of_run(min(at + count, self._above))
            if end >= self._above:
                self._cut(column)
                return
            rows = self._take_out(np.arange(self._begin_of_run(at), end))
            self._edge = -(-(end << 32) // self._above)
        self.enter(column, rows)

    def _change(self, column: Prefixes, width: int) -> None:
        while self.changing:
            self.go_on(column, len(self._slots))
        self._growing, old = width > self._width, self._width
        if self._growing:
            around = self._end_of_run(0) if self._slots[-1] else 0  # some were entered past the end
            self._maps.resize(self, ("_slots",), width)
            rows = self._take_out(np.arange(around))
            self._edge, self._below, self._above = _END, old, width
            self.enter(column, rows)
        else:
            self._edge, self._below, self._above = 0, width, old

    def _cut(self, column: Prefixes) -> None:
        """End shrinking: what still stands behind the new width, and what had been entered past the old one, comes into it."""
        width = self._below
        start = self._begin_of_run(min(width, self._edge * self._above >> 32))
        around = min(start, self._end_of_run(0) if self._slots[-1] else 0)
        rows = self._take_out(np.concatenate([np.arange(start, len(self._slots)), np.arange(around)]))
        self._maps.resize(self, ("_slots",), width)
        self._edge, self._above = 0, width
        self.enter(column, rows)

    @property
    def _width(self) -> int:
        """The width that it has, or will have."""
        return self._above if self._growing else self._below

    def _begin_of_run(self, at: int) -> int:
        """Return the first of the taken slots that end before `at`; none lies further to the front than the table's begin."""
        while at and self._slots.item(at - 1):
            at -= 1
        return at

    def _end_of_run(self, at: int) -> int:
        """Return the first slot from `at` on that is empty, or so many behind the table's end."""
        while self._slots.item(at % len(self._slots)):
            at += 1
        return at

    def _take_out(self, slots: Rows) -> Rows:
        """Empty slots; returns the rows that they said, in their order."""
        entries = self._slots[slots]
        rows: Rows = entries[entries != 0].astype(np.int64) - 1
        self._slots[slots] = 0
        self.taken -= len(rows)
        rows.sort()
        return rows

    def _homes(self, keys: Prefixes) -> Rows:
        """Return where each key's probe begins."""
        bits: npt.NDArray[np.uint64] = keys[:, 0] >> _BITS
        widths: npt.NDArray[np.uint64] | np.uint64 = np.uint64(self._above)
        if self.changing:
            widths = np.where(bits < np.uint64(self._edge), np.uint64(self._below), widths)
        homes: Rows = (bits * widths >> _BITS).astype(np.int64)
        return homes


def _equal(some: Prefixes, others: Prefixes) -> npt.NDArray[np.bool_]:
    equal: npt.NDArray[np.bool_] = some[:, 0] == others[:, 0]
    equal &= some[:, 1] == others[:, 1]  # a third of the time of all(axis=1)
    return equal


def _slots_for(rows: int) -> int:
    """Return the width for so many rows and a third more, at 0.6 full."""
    return max(_MIN_SLOTS, -(-rows * _ROOM_NUM * _MAX_LOAD_DEN // (_ROOM_DEN * _MAX_LOAD_NUM)))
