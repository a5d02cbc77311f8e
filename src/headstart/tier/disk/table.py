"""Living extents as rows of arrays, found by the keys of their blocks. No I/O; whoever owns it holds the lock.

An ExtentId is a row with the number of times the row was given out, so an id that outlives its extent names nothing. What
enters and what leaves is `books`' business.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headstart.policy.retention import FOREVER_MS, Retention
from headstart.policy.tiering import Facts
from headstart.tier.base import ExtentId, ExtentInfo, Shape
from headstart.tier.columns import ExtentColumns
from headstart.tier.disk.kept import Kept
from headstart.tier.disk.offsets import Offsets, Rows
from headstart.tier.disk.records import BOUNDARY_STATE, PREFIX_BYTES, USES, ExtentAdded, ExtentName, Record, SegmentName
from headstart.tier.disk.use_times import UseTimes
from headstart.tier.growing import Maps
from headstart.tier.index import BlockIndex
from headstart.tier.surveying import Survey

CONDEMNED = -1  # instead of a count of leases: the extent is being removed and takes none
_GENERATION_SHIFT = 32
ROW_MASK = (1 << _GENERATION_SHIFT) - 1
_HIDDEN = b"hidden"
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Segment:
    """`end`: where the next extent begins, as far as journals say. `recorded`: this process's own journal vouches for it.
    `gone`: the file is no more. `dead`: offsets of removed extents. `allocated_bytes`: what the file system charges, or, when
    `stale`, did before another process changed the file. `overhead_bytes`: what of that no hole brings back. `synced_bytes`: up
    to there it would survive a power loss, and the records of its extents too, as far as this process knows.
    `check_key`: the key that the checks of all its extents were made with, 0: none. `hidden`: it is none that is believed here,
    so nothing in it is found."""

    name: SegmentName
    number: int
    rows: Rows  # by offset
    representation: bytes = b""
    header_bytes: int = 0
    capacity_bytes: int = 0
    created_ms: int = 0
    end: int = 0
    opened: bool = False
    sealed: bool = False
    recorded: bool = False
    gone: bool = False
    stale: bool = False
    allocated_bytes: int = 0
    overhead_bytes: int = 0
    synced_bytes: int = 0
    live_bytes: int = 0
    blocks: int = 0
    check_key: int = 0
    hidden: bool = False
    dead: Offsets = field(default_factory=Offsets)

    @property
    def index(self) -> bytes:
        """The name of the index that its blocks stand in: what is hidden has one that nobody asks."""
        return self.representation + _HIDDEN if self.hidden else self.representation

    @property
    def settled(self) -> bool:
        """Whether nobody will add to it without this process knowing, so that its file may go."""
        return self.recorded or self.sealed

    @property
    def idle_bytes(self) -> int:
        """What is charged beside the header and the living extents."""
        return max(0, self.allocated_bytes - self.header_bytes - self.live_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where extents lie and how large they are, in columns. `segment`: the place of each extent's own in `segments`."""

    segments: list[Segment]
    segment: npt.NDArray[np.intp]
    offsets: npt.NDArray[np.int64]
    extent_bytes: npt.NDArray[np.int64]
    header_bytes: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Living extents in columns: ids, numbers of their segments, use counters, sizes, whether this process leases them, until
    when they are promised to stay, whether they are pinned now, numbers of their tenants, and when they were written."""

    ids: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32]
    last_used: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    leased: npt.NDArray[np.bool_]
    promised_ms: npt.NDArray[np.int64]
    pinned: npt.NDArray[np.bool_]
    tenants: npt.NDArray[np.int32]
    created_ms: npt.NDArray[np.int64]


class ExtentTable:
    """What is asked about extents, by row or by key."""

    def __init__(self, retention: Retention) -> None:
        self.counter = 0
        self.use_times = UseTimes()
        self.live_bytes = 0
        self.blocks = 0
        self.extents = 0
        self._numbered: dict[int, Segment] = {}
        self.any_hidden = False  # of segments, or was
        self._indexes: dict[bytes, BlockIndex] = {}  # by `Segment.index`; an extent's number there is its row
        # By `Segment.index`, and the key of their last block: the extents that carry a boundary state, first come first.
        self._states: dict[bytes, dict[bytes, list[int]]] = {}
        self._free = array("I")
        self._used_rows = 0
        self._maps = Maps()  # of the columns
        self._kept = Kept(retention)
        self._fields: dict[int, bytes] = {}  # only of rows that have any
        self._parent = np.zeros((64, PREFIX_BYTES), np.uint8)
        self._segment = np.zeros(64, np.int32)
        self._offset = np.zeros(64, np.int64)
        self._extent_bytes = np.zeros(64, np.int64)
        self._header_bytes = np.zeros(64, np.int32)
        self._created_ms = np.zeros(64, np.int64)
        self._last_used = np.zeros(64, np.int64)
        self._flags = np.zeros(64, np.uint32)
        self._leases = np.zeros(64, np.int32)
        self._generation = np.zeros(64, np.uint32)
        self._alive = np.zeros(64, np.bool_)

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return (ids, positions), -1 in the ids where a block is absent."""
        if representation not in self._indexes or not keys:
            return np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.int32)
        rows, positions = self._indexes[representation].lookup(keys)
        found = rows >= 0
        ids = np.where(found, self._ids(rows), -1)
        return ids, np.where(found, positions, 0).astype(np.int32)

    def states(self, representation: bytes, keys: Sequence[bytes]) -> npt.NDArray[np.int64] | None:
        """Return for each key the extent that ends with that block and carries a boundary state, or -1; None where no extent of
        this representation carries one."""
        held = self._states.get(representation)
        if not held:
            return None
        found = [held.get(key[:PREFIX_BYTES]) for key in keys]
        return np.array([-1 if rows is None else self.id_of(rows[0]) for rows in found], np.int64)

    def hidden(self, representation: bytes, keys: Sequence[bytes]) -> int:
        """Return how many of these blocks lie here with checks that are not believed."""
        return sum(since is not None for since in self.hidden_since(representation, keys))

    def hidden_since(self, representation: bytes, keys: Sequence[bytes]) -> list[int | None]:
        """Return when those of these blocks came that lie here so, in milliseconds since 1970; None for the others."""
        index = self._indexes.get(representation + _HIDDEN)
        rows = [] if index is None or not keys else index.lookup(keys)[0].tolist()
        return [int(self._created_ms[row]) if row >= 0 else None for row in rows] or [None] * len(keys)

    def hidden_keys(self) -> set[int]:
        """Return the keys of checks that are not believed, of what is here."""
        return {s.check_key for s in self._numbered.values() if s.hidden and s.rows} if self.any_hidden else set()

    def row(self, extent: ExtentId) -> int | None:
        """Return the row of a living extent."""
        row = extent & ((1 << _GENERATION_SHIFT) - 1)
        if not 0 <= row < self._used_rows or not self._alive.item(row):
            return None
        return row if self._generation.item(row) == extent >> _GENERATION_SHIFT else None

    def rows(self, extents: Sequence[ExtentId]) -> list[int]:
        """As `row` for many at once; -1 where it says None."""
        ids = np.array(extents, np.int64)
        rows = ids & ROW_MASK
        known = (ids >= 0) & (rows < self._used_rows)
        rows[~known] = 0
        known &= self._alive[rows] & (self._generation[rows] == ids >> _GENERATION_SHIFT)
        found: list[int] = np.where(known, rows, -1).tolist()
        return found

    def id_of(self, row: int) -> ExtentId:
        return ExtentId(row | self._generation.item(row) << _GENERATION_SHIFT)

    def _ids(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return rows | self._generation[rows].astype(np.int64) << _GENERATION_SHIFT

    def place(self, row: int) -> tuple[Segment, int, int]:
        """Return (segment, offset, extent_bytes)."""
        return self.segment_of(row), self._offset.item(row), self._extent_bytes.item(row)

    def places(self, extents: Sequence[ExtentId]) -> Places | None:
        """As `place` and `shape` for many extents at once; None where one of them is gone."""
        rows = np.array(self.rows(extents), np.int64)
        if (rows < 0).any():
            return None
        numbers, segment = np.unique(self._segment[rows], return_inverse=True)
        segments = [self._numbered[number] for number in numbers.tolist()]
        blocks = np.zeros(len(rows), np.int64)
        for representation in dict.fromkeys(one.representation for one in segments):
            mine = np.array([one.representation == representation for one in segments])[segment]
            blocks[mine] = self._index(representation).counts(rows[mine])
        sizes = self._extent_bytes[rows], self._header_bytes[rows].astype(np.int64)
        return Places(segments, segment, self._offset[rows], *sizes, blocks)

    def segment_of(self, row: int) -> Segment:
        return self._numbered[self._segment.item(row)]

    def shape(self, row: int) -> Shape:
        blocks = self._index(self.segment_of(row).index).count(row)
        return Shape(blocks, self._header_bytes.item(row), self._extent_bytes.item(row))

    def numbered(self, number: int) -> Segment:
        return self._numbered[number]

    def name(self, row: int) -> ExtentName:
        return ExtentName(self._numbered[self._segment[row]].name, int(self._offset[row]))

    def last_used(self, row: int) -> int:
        return int(self._last_used[row])

    def prefixes(self, row: int) -> bytes:
        return self._index(self._numbered[self._segment[row]].index).keys(row).tobytes()

    def info(self, row: int, *, now_ms: int = 0) -> ExtentInfo:
        """Return what is known of an extent; a pin whose deadline is over is none."""
        return self.infos(np.array([row]), now_ms=now_ms)[0]

    def infos(self, rows: npt.NDArray[np.int64], *, now_ms: int = 0) -> list[ExtentInfo]:
        """As `info`, for many at once: column by column, since 250,000 of them are looked at together."""
        expires_ms = self._kept.expires_ms(rows, self._created_ms[rows])
        promised_ms = np.minimum(self._kept.promised_ms[rows], expires_ms)
        shape = self.columns(rows)
        parents, blob = shape.parents.tobytes(), shape.keys.tobytes()
        end = shape.ends * PREFIX_BYTES
        numbers = self._segment[rows].tolist()
        where = {number: self._numbered[number] for number in set(numbers)}
        columns = (
            end - shape.blocks * PREFIX_BYTES,
            end,
            self._ids(rows),
            self._offset[rows],
            self._extent_bytes[rows],
            self._header_bytes[rows],
            self._created_ms[rows],
            self._last_used[rows],
            self._leases[rows] > 0,
            promised_ms,
            expires_ms,
            (self._flags[rows] & BOUNDARY_STATE) != 0,
            self.use_times.of(self._last_used[rows], now_ms=now_ms or FOREVER_MS),
        )
        found = []
        for n, (
            row,
            number,
            first,
            last,
            one,
            offset,
            extent_bytes,
            header_bytes,
            created_ms,
            last_used,
            leased,
            promised,
            expires,
            state,
            used_ms,
        ) in enumerate(zip(rows.tolist(), numbers, *(column.tolist() for column in columns), strict=True)):
            segment = where[number]
            pinned_ms = self._kept.pinned_ms(row)
            found.append(
                ExtentInfo(
                    id=ExtentId(one),
                    representation=segment.representation,
                    keys=tuple([blob[at : at + PREFIX_BYTES] for at in range(first, last, PREFIX_BYTES)]),
                    blocks=(last - first) // PREFIX_BYTES,
                    header_bytes=header_bytes,
                    extent_bytes=extent_bytes,
                    created_ms=created_ms,
                    last_used=last_used,
                    retention=self._kept.retention_of(row),
                    tenant=self._kept.tenant_of(row),
                    parent=parents[n * PREFIX_BYTES : (n + 1) * PREFIX_BYTES],
                    state=state,
                    guaranteed_until_ms=promised,
                    expires_ms=None if expires == FOREVER_MS else expires,
                    pinned_until_ms=pinned_ms if pinned_ms > now_ms else None,
                    leased=leased,
                    used_ms=None if used_ms == FOREVER_MS else used_ms,
                    where=f"{segment.name.file}, byte {offset}",
                    check_key=segment.check_key,
                )
            )
        return found

    def columns(self, rows: npt.NDArray[np.int64]) -> ExtentColumns:
        """Return what prefixes are made of, of many extents at once."""
        numbers, member = np.unique(self._segment[rows], return_inverse=True)
        segments = [self._numbered[number] for number in numbers.tolist()]
        indexes = list(dict.fromkeys(segment.index for segment in segments))
        index = np.array([indexes.index(segment.index) for segment in segments], np.int64)[member]
        blocks, parts = np.zeros(len(rows), np.int64), []
        for n, name in enumerate(indexes):
            mine = np.flatnonzero(index == n)
            part, blocks[mine] = self._index(name).keys_of_all(rows[mine])
            parts.append(part)
        keys = np.zeros((int(blocks.sum()), PREFIX_BYTES), np.uint8)
        owners = np.repeat(index, blocks)
        for n, part in enumerate(parts):
            keys[owners == n] = part
        names = tuple(dict.fromkeys(segment.representation for segment in segments))
        representation = np.array([names.index(segment.representation) for segment in segments], np.int64)[member]
        return ExtentColumns(names, representation, blocks, self._extent_bytes[rows], self._parent[rows], keys)

    def living(self) -> npt.NDArray[np.int64]:
        """Return the rows of all living extents."""
        return np.flatnonzero(self._alive[: self._used_rows])

    def living_ids(self) -> npt.NDArray[np.int64]:
        """Return the ids of all living extents."""
        return self._ids(self.living())

    def candidates(self, now_ms: int) -> Candidates:
        """Return a copy of what a choice among all living extents needs."""
        rows = self.living()
        return Candidates(
            ids=self._ids(rows),
            segments=self._segment[rows],
            last_used=self._last_used[rows],
            nbytes=self._extent_bytes[rows],
            leased=self._leases[rows] != 0,
            promised_ms=np.minimum(self._kept.promised_ms[rows], self._kept.expires_ms(rows, self._created_ms[rows])),
            pinned=np.isin(rows, self._kept.pinned(now_ms)),
            tenants=self._kept.tenants[rows],
            created_ms=self._created_ms[rows],
        )

    def in_steps(
        self, lock: AbstractContextManager[object], most: int, look: Callable[[npt.NDArray[np.int64]], T]
    ) -> Iterator[T]:
        """Yield what `look` makes of the living rows, at most so many at a time under `lock`: a lookup would wait for all."""
        low = 0
        while True:
            with lock:
                living = self.living()
                rows = living[np.searchsorted(living, low) :][:most]
                found = look(rows)
            if not len(rows):
                return
            low = int(rows[-1]) + 1
            yield found

    def survey(self, rows: npt.NDArray[np.int64], tier: str, *, now_ms: int) -> Survey:
        """Return what rules may ask of some living extents."""
        blocks = np.zeros(len(rows), np.int64)
        numbers, member = np.unique(self._segment[rows], return_inverse=True)
        of_segment = [self._numbered[number].index for number in numbers.tolist()]
        for name in dict.fromkeys(of_segment):
            mine = np.array([other == name for other in of_segment], np.bool_)[member]
            blocks[mine] = self._index(name).counts(rows[mine])
        used_ms = self.use_times.of(self._last_used[rows], now_ms=now_ms)
        retention, tenant = self._kept.words(rows)
        facts = Facts(
            tier,
            retention=retention,
            tenant=tenant,
            idle_ms=np.maximum(now_ms - used_ms, 0),
            age_ms=np.maximum(now_ms - self._created_ms[rows], 0),
            nbytes=self._extent_bytes[rows],
            blocks=blocks,
        )
        hidden = np.array([self._numbered[number].hidden for number in numbers.tolist()], np.bool_)[member]
        stays = (self._leases[rows] != 0) | hidden | np.isin(rows, self._kept.pinned(now_ms))
        return Survey(self._ids(rows), facts, self._last_used[rows], stays)

    def parents(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each extent the row in which the block before its first one is found, or -1."""
        rows = ids & ROW_MASK
        found = np.full(len(rows), -1, np.int64)
        numbers, member = np.unique(self._segment[rows], return_inverse=True)
        indexes = [self._numbered[int(number)].index for number in numbers]
        for name in dict.fromkeys(indexes):
            if name in self._indexes:
                mine = np.array([other == name for other in indexes], np.bool_)[member]
                found[mine] = self._indexes[name].lookup(self._parent[rows[mine]])[0]
        return found

    def expired(self, now_ms: int) -> list[ExtentId]:
        """Return the extents that are older than their classes may grow, neither leased here nor pinned."""
        rows = self.living()
        over = self._kept.expires_ms(rows, self._created_ms[rows]) <= now_ms
        rows = rows[over & (self._leases[rows] == 0)]
        return [self.id_of(row) for row in np.setdiff1d(rows, self._kept.pinned(now_ms)).tolist()]

    # On what terms extents are kept.

    def keep(self, row: int, until_ms: int, retention: str) -> bool:
        """Raise a promise, which the own journal will tell of; False where it says nothing new."""
        self._kept.said[row] |= 2
        return self._kept.promise(row, until_ms, retention, nbytes=int(self._extent_bytes[row]))

    def is_pinned(self, row: int, now_ms: int) -> bool:
        return self._kept.pinned_ms(row) > now_ms

    def pinned_bytes(self, now_ms: int) -> int:
        """Return how many bytes pinned extents take."""
        return int(self._extent_bytes[self._kept.pinned(now_ms)].sum())

    def kept_by_pins(self, rows: Iterable[int], *, holes: bool) -> dict[int, int]:
        """Return what cannot be given back while these rows are pinned, in parts by number, so that no part counts twice: the
        extents, or, without `holes`, the segments that they lie in."""
        if holes:
            return {row: int(self._extent_bytes[row]) for row in rows}
        segments = [self._numbered[number] for number in {int(self._segment[row]) for row in rows}]
        return {s.number: max(s.allocated_bytes, s.end if s.sealed else s.capacity_bytes) for s in segments}

    def pinned(self, now_ms: int) -> list[int]:
        """Return the rows that are pinned."""
        rows: list[int] = self._kept.pinned(now_ms).tolist()
        return rows

    def terms_records(self, rows: Iterable[int], *, now_ms: int, added: bool = False) -> list[Record]:
        """Return the promises and pins of rows as a journal says them; `added`: it says as well that they were added."""
        named = ((row, self.name(row), int(self._created_ms[row]) if added else None) for row in rows)
        return self._kept.records(named, now_ms=now_ms)

    def bytes_by_class(self) -> dict[str, int]:
        return self._kept.bytes_by_class()

    def bytes_by_tenant(self) -> dict[str, int]:
        return self._kept.bytes_by_tenant()

    def tenant_number(self, tenant: str) -> int:
        return self._kept.tenant_number(tenant)

    def bytes_since(self, created_ms: int) -> int:
        """Return the bytes of living extents that were written since."""
        rows = self.living()
        return int(self._extent_bytes[rows[self._created_ms[rows] >= created_ms]].sum())

    def leases(self, row: int) -> int:
        """Return an extent's count of leases, or CONDEMNED."""
        leases: int = self._leases.item(row)
        return leases

    def set_leases(self, row: int, count: int) -> None:
        self._leases[row] = count

    def touch(self, row: int) -> int:
        """Note a use; returns the counter's value for it."""
        self.counter = self.next_use()
        self._last_used[row] = self.counter
        return self.counter

    def next_use(self) -> int:
        """Return the counter's value for the next use. At its end it stands still: nobody could read on."""
        return min(self.counter + 1, USES - 1)

    def has_state(self, row: int) -> bool:
        return bool(self._flags[row] & BOUNDARY_STATE)

    def present(self, representation: bytes, keys: Sequence[bytes], *, state: bool) -> bool:
        """Whether all blocks are there, and, with `state`, an extent that ends with the last one and carries its state."""
        index = self._indexes.get(representation)
        there = index is not None and bool((index.lookup(keys)[0] >= 0).all())
        return there and not (state and keys[-1][:PREFIX_BYTES] not in self._states.get(representation, {}))

    def sharing(self) -> Iterator[tuple[int, ...]]:
        """Yield rows of extents that have a block in common."""
        for index in self._indexes.values():
            yield from index.sharing()

    def added_record(self, row: int) -> ExtentAdded:
        return ExtentAdded(
            self.name(row),
            int(self._extent_bytes[row]),
            int(self._header_bytes[row]),
            int(self._created_ms[row]),
            int(self._last_used[row]),
            self._kept.retention_of(row),
            self._parent[row].tobytes(),
            self.prefixes(row),
            int(self._flags[row]),
            self._fields.get(row, b""),
            self._kept.tenant_of(row),
            self.segment_of(row).check_key,
        )

    def _note_state(self, index: bytes, last: bytes, row: int) -> None:
        self._states.setdefault(index, {}).setdefault(last, []).append(row)

    def _forget_state(self, index: bytes, row: int) -> None:
        keys = self._index(index).keys(row)
        if not len(keys):  # as only a wrong writer's journal says
            return
        held, last = self._states[index], keys[-1].tobytes()
        held[last].remove(row)
        if not held[last]:
            del held[last]

    def _index(self, name: bytes) -> BlockIndex:
        index = self._indexes.get(name)
        if index is None:
            index = self._indexes[name] = BlockIndex()
        return index

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        return int(self._new_rows(1)[0])

    def _take_rows(self, count: int) -> npt.NDArray[np.int64]:
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        return np.concatenate([again, self._new_rows(count - len(again))]) if again else self._new_rows(count)

    def _new_rows(self, count: int) -> npt.NDArray[np.int64]:
        first, self._used_rows = self._used_rows, self._used_rows + count
        if self._used_rows > len(self._segment):
            length = self._used_rows + max(64, first // 8)
            self._maps.resize(self, _COLUMNS, length)
            self._kept.grow(length)
        return np.arange(first, self._used_rows)


_COLUMNS = (
    "_segment",
    "_offset",
    "_extent_bytes",
    "_header_bytes",
    "_created_ms",
    "_last_used",
    "_parent",
    "_flags",
    "_leases",
    "_generation",
    "_alive",
)
