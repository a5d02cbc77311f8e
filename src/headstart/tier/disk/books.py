"""What the journals say, in memory: segments, extents, which extent holds a block. No I/O; whoever owns it holds the lock.

Records may come in any order of journals: a removal is final, so one that comes before its extent is kept and waits for it.
Extents are rows of arrays. An ExtentId is a row with the number of times the row was given out, so an id that outlives its
extent names nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headstart.policy.retention import FOREVER_MS, Retention
from headstart.tier.base import Change, ExtentId, ExtentInfo, OnChange, Shape
from headstart.tier.columns import ExtentColumns
from headstart.tier.disk.bulk import AddedColumns, Loaded, UsedColumns
from headstart.tier.disk.kept import Kept
from headstart.tier.disk.offsets import Offsets, Rows
from headstart.tier.disk.records import (
    BOUNDARY_STATE,
    PREFIX_BYTES,
    USES,
    ClassRaised,
    ExtentAdded,
    ExtentName,
    Pin,
    Pinned,
    Raise,
    Record,
    Removed,
    RepresentationDeclared,
    SegmentName,
    SegmentOpened,
    SegmentSealed,
    Snapshot,
    Touched,
    removed_records,
)
from headstart.tier.growing import Maps
from headstart.tier.index import BlockIndex

REMOVALS_KEPT = 10_000
GONE_KEPT = 4096  # segments that are no more and are still known by name
CONDEMNED = -1  # instead of a count of leases: the extent is being removed and takes none
_GENERATION_SHIFT = 32
ROW_MASK = (1 << _GENERATION_SHIFT) - 1
_WAITING = 1 << 16  # promises and pins of extents that were not heard of yet, at most
_PART = 256  # records of a snapshot at once: what a lookup may have to wait for
# Bytes of a journal, about: of a record, of an extent that is only named, and of one's promise and pin.
_RECORD_BYTES, _DEAD_BYTES, _TERMS_BYTES = 128, 32, 64


@dataclass(slots=True, eq=False)
class Segment:
    """`end`: where the next extent begins, as far as journals say. `recorded`: this process's own journal vouches for it.
    `gone`: the file is no more. `dead`: offsets of removed extents. `allocated_bytes`: what the file system charges, or, when
    `stale`, did before another process changed the file. `synced_bytes`: up to there it would survive a power loss, and the
    records of its extents too, as far as this process knows."""

    name: SegmentName
    number: int
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
    synced_bytes: int = 0
    live_bytes: int = 0
    blocks: int = 0
    rows: Rows = field(default_factory=Rows)  # by offset
    dead: Offsets = field(default_factory=Offsets)

    @property
    def settled(self) -> bool:
        """Whether nobody will add to it without this process knowing, so that its file may go."""
        return self.recorded or self.sealed


class Removal(NamedTuple):
    """One extent that is no more: when, why, and the key prefixes of its blocks. `recorded`: by this process's journal."""

    time_ms: int
    reason: str
    extent: ExtentName
    prefixes: bytes
    quarantined: bool
    recorded: bool


@dataclass(frozen=True, slots=True)
class Candidates:
    """Living extents in columns: ids, numbers of their segments, use counters, sizes, whether this process leases them, until
    when they are promised to stay, whether they are pinned now, and numbers of their tenants."""

    ids: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32]
    last_used: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    leased: npt.NDArray[np.bool_]
    promised_ms: npt.NDArray[np.int64]
    pinned: npt.NDArray[np.bool_]
    tenants: npt.NDArray[np.int32]


class Books:
    """Extents and segments by name and by key."""

    def __init__(self, *, removals_kept: int = REMOVALS_KEPT, retention: Retention | None = None) -> None:
        self.representations: dict[bytes, bytes] = {}
        self.declared: set[bytes] = set()  # representations that the own journal declares
        self.segments: dict[SegmentName, Segment] = {}
        self.removals: deque[Removal] = deque(maxlen=removals_kept)
        self.on_change: OnChange | None = None  # told of what comes and goes, once loading is over
        self.counter = 0
        self.next_sequence = 0  # of the own writer
        self.live_bytes = 0
        self.allocated_bytes = 0  # of all segments
        self.blocks = 0
        self.extents = 0
        self._numbered: dict[int, Segment] = {}
        self._next_number = 0
        self._forget_at = GONE_KEPT
        self._indexes: dict[bytes, BlockIndex] = {}  # by representation; an extent's number there is its row
        # By representation, and the key of their last block: the extents that carry a boundary state, first come first.
        self._states: dict[bytes, dict[bytes, list[int]]] = {}
        self._free = array("I")
        self._used_rows = 0
        self._maps = Maps()  # of the columns
        self._kept = Kept(Retention() if retention is None else retention)
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
        self._generation = np.zeros(64, np.int64)
        self._alive = np.zeros(64, np.bool_)
        self._removed_blocks = 0  # of all removals that are kept
        self._loading = True
        self._early_uses: list[Touched | UsedColumns] = []
        self._early_terms: list[tuple[ClassRaised | Pinned, bool, int]] = []
        self._waiting: dict[ExtentName, list[tuple[Raise | Pin, bool]]] = {}

    # What journals say.

    def apply(self, records: Iterable[Loaded], *, own: bool, now_ms: int = FOREVER_MS) -> None:
        """Take over records of one journal, in its order. `own`: it is this process's journal. Uses and promises come last,
        while loading after all journals: one may speak of them before another one, read later, says that the extent was added.
        `now_ms`: what somebody's clock called later than that counts as now."""
        uses: list[Touched | UsedColumns] = []
        terms: list[tuple[ClassRaised | Pinned, bool, int]] = []
        for record in records:
            match record:
                case ExtentAdded():
                    self._add(record, own=own, now_ms=now_ms)
                case AddedColumns():
                    self._add_columns(record, own=own, now_ms=now_ms)
                case Touched() | UsedColumns():
                    uses.append(record)
                case ClassRaised() | Pinned():
                    terms.append((record, own, now_ms))
                case Removed(time_ms, reason, extents, quarantined):
                    for name, prefixes in extents:
                        self._remove(Removal(time_ms, reason, name, prefixes, quarantined, own))
                case SegmentOpened():
                    self._open(record, own=own)
                case SegmentSealed():
                    segment = self.segment(record.segment)
                    segment.sealed = True
                    segment.end = max(segment.end, record.end)
                case RepresentationDeclared(encoded):
                    digest = _digest(encoded)
                    self.representations[digest] = encoded
                    if own:
                        self.declared.add(digest)
                case Snapshot(counter, _):
                    self.counter = max(self.counter, counter)
        if self._loading:
            self._early_uses += uses
            self._early_terms += terms
        else:
            self._use_all(uses)
            self._keep_all(terms)

    def finish_loading(self) -> None:
        """Index what was applied so far, all at once; until then nothing is found by its keys."""
        self._loading = False
        uses, self._early_uses = self._early_uses, []
        self._use_all(uses)
        terms, self._early_terms = self._early_terms, []
        self._keep_all(terms)
        for index in self._indexes.values():
            index.finish_loading()

    def segment(self, name: SegmentName) -> Segment:
        """Return the segment of that name; one that was never heard of holds only what waits for it."""
        segment = self.segments.get(name)
        if segment is None:
            segment = self.segments[name] = self._numbered[self._next_number] = Segment(name, self._next_number)
            self._next_number += 1
        return segment

    def forget_segment(self, segment: Segment) -> None:
        """The file is no more, and with it every extent in it; what journals still say of it no longer counts."""
        for row in list(segment.rows.values()):
            self._drop(row)
        segment.gone = True
        self.charge(segment, 0)
        segment.dead.clear()

    def forget_long_gone(self) -> None:
        """Of segments that are gone, or only named by removals, know no more than the last ones mentioned first: a directory is
        in use for years. A journal that speaks of an older one yet finds no file, as it would have anyway. For whoever holds no
        segment: in turn, between two changes."""
        if len(self.segments) < self._forget_at:
            return
        idle = [s for s in self.segments.values() if not (s.rows or s.allocated_bytes) and (s.gone or not s.opened)]
        for segment in idle[:-GONE_KEPT]:
            del self.segments[segment.name]
            del self._numbered[segment.number]
        self._forget_at = len(self.segments) + GONE_KEPT

    def charge(self, segment: Segment, allocated_bytes: int) -> None:
        """Note what the file system charges for a segment."""
        self.allocated_bytes += allocated_bytes - segment.allocated_bytes
        segment.allocated_bytes = allocated_bytes
        segment.stale = False

    def _open(self, record: SegmentOpened, *, own: bool) -> None:
        segment = self.segment(record.segment)
        if segment.rows and segment.representation != record.representation:
            return  # what is in it stands in another index; the file itself says which is right, when it is opened
        segment.representation = record.representation
        segment.header_bytes = record.header_bytes
        segment.capacity_bytes = record.capacity_bytes
        segment.created_ms = record.created_ms
        segment.end = max(segment.end, record.header_bytes)
        segment.opened = True
        segment.recorded |= own

    def _add(self, record: ExtentAdded, *, own: bool, now_ms: int) -> None:
        segment = self.segments.get(record.extent.segment)
        if segment is None or not segment.opened or segment.gone:
            return
        segment.stale |= not own
        offset = record.extent.offset
        segment.end = max(segment.end, offset + record.extent_bytes)
        self.counter = max(self.counter, record.last_used)
        if offset in segment.rows:
            self._use(record.extent, record.last_used)
        elif offset not in segment.dead:
            self._enter(segment, record, now_ms)

    def _enter(self, segment: Segment, record: ExtentAdded, now_ms: int) -> None:
        row = self._take_row()
        self._segment[row] = segment.number
        self._offset[row] = record.extent.offset
        self._extent_bytes[row] = record.extent_bytes
        self._header_bytes[row] = record.header_bytes
        self._created_ms[row] = created_ms = min(record.created_ms, now_ms)
        self._last_used[row] = record.last_used
        self._alive[row] = True
        self._kept.enter(
            row, created_ms=created_ms, nbytes=record.extent_bytes, retention=record.retention, tenant=record.tenant
        )
        self._parent[row] = np.frombuffer(record.parent, np.uint8)
        self._flags[row] = record.flags
        if record.fields:
            self._fields[row] = record.fields
        segment.rows[record.extent.offset] = row
        segment.live_bytes += record.extent_bytes
        self.live_bytes += record.extent_bytes
        self.extents += 1
        blocks = len(record.prefixes) // PREFIX_BYTES
        segment.blocks += blocks
        self.blocks += blocks
        if self._waiting:
            for said, own in self._waiting.pop(record.extent, ()):
                self._keep(row, said, own=own)
        if record.flags & BOUNDARY_STATE and blocks:
            self._note_state(segment.representation, record.prefixes[-PREFIX_BYTES:], row)
        keys, index = _split(record.prefixes), self._index(segment.representation)
        if self._loading:
            index.load(keys, np.array([row]), np.array([blocks]))
        else:
            index.insert(keys, row)
            self._changed(segment, keys, came=True)

    def _add_columns(self, columns: AddedColumns, *, own: bool, now_ms: int) -> None:
        """As `_add` for each. Segments that are told of from their beginning to their end are taken over together."""
        assert self._loading, "one by one they are found at once"
        offsets = columns.rows["offset"].astype(np.int64)
        ends = offsets + columns.rows["extent_bytes"].astype(np.int64)
        plain: dict[Segment, npt.NDArray[np.int64]] = {}
        for name, first, end in columns.groups():
            segment = self.segments.get(name)
            if segment is None or not segment.opened or segment.gone:
                continue
            some = offsets[first:end]
            if segment not in plain and segment.rows.behind(int(some[0])) and bool((some[1:] > some[:-1]).all()):
                segment.stale |= not own
                segment.end = max(segment.end, int(ends[first:end].max()))
                self.counter = max(self.counter, int(columns.rows["last_used"][first:end].max()))
                plain[segment] = first + np.flatnonzero(~segment.dead.among(some))
                continue
            self._enter_columns(columns, plain, now_ms)
            plain = {}
            for at in range(first, end):
                self._add(columns.record(at), own=own, now_ms=now_ms)
        self._enter_columns(columns, plain, now_ms)

    def _enter_columns(self, columns: AddedColumns, groups: dict[Segment, npt.NDArray[np.int64]], now_ms: int) -> None:
        """As `_enter` for each record of `groups`, which are in order: of each segment, those that it gets."""
        at = np.concatenate([*groups.values(), np.zeros(0, np.int64)])
        if not len(at):
            return
        new, counts = columns.rows[at], np.array([len(some) for some in groups.values()])
        nbytes, blocks = new["extent_bytes"].astype(np.int64), new["blocks"].astype(np.int64)
        rows = self._take_rows(len(at))
        self._segment[rows] = np.repeat(np.array([segment.number for segment in groups]), counts)
        self._offset[rows] = new["offset"]
        self._extent_bytes[rows] = nbytes
        self._header_bytes[rows] = new["header_bytes"]
        self._created_ms[rows] = created_ms = np.minimum(new["created_ms"].astype(np.int64), now_ms)
        self._last_used[rows] = new["last_used"]
        self._alive[rows] = True
        self._parent[rows] = new["parent"]
        self._flags[rows] = new["flags"]
        self._kept.enter_all(
            rows, created_ms=created_ms, nbytes=nbytes, terms=[t[:2] for t in columns.terms], terms_of=columns.terms_of[at]
        )
        for number, (_, _, fields) in enumerate(columns.terms):
            if fields:
                self._fields.update(dict.fromkeys(rows[columns.terms_of[at] == number].tolist(), fields))
        # Sums up to each segment's first record and behind its last one.
        edges = np.concatenate([[0], np.cumsum(counts)])
        bytes_to, blocks_to = (np.concatenate([[0], np.cumsum(each)])[edges].tolist() for each in (nbytes, blocks))
        for number, segment in enumerate(groups):
            mine = slice(int(edges[number]), int(edges[number + 1]))
            segment.rows.extend(self._offset[rows[mine]], rows[mine])
            segment.live_bytes += bytes_to[number + 1] - bytes_to[number]
            segment.blocks += blocks_to[number + 1] - blocks_to[number]
        self.live_bytes += bytes_to[-1]
        self.blocks += blocks_to[-1]
        self.extents += len(at)
        for representation in {segment.representation for segment in groups}:
            those = np.repeat(np.array([segment.representation == representation for segment in groups]), counts)
            some = blocks[those]
            within = np.arange(int(some.sum())) - np.repeat(np.cumsum(some) - some, some)
            keys = columns.keys[np.repeat(columns.first_keys[at[those]], some) + within]
            self._index(representation).load(keys, rows[those], some)
        with_state = np.flatnonzero((new["flags"] & BOUNDARY_STATE) * blocks)
        if len(with_state):
            last = columns.first_keys[at] + blocks - 1
            owners = np.repeat(np.arange(len(groups)), counts)
            names = [segment.representation for segment in groups]
            for one in with_state.tolist():
                self._note_state(names[owners[one]], columns.keys[last[one]].tobytes(), int(rows[one]))

    def _use_all(self, records: Iterable[Touched | UsedColumns]) -> None:
        columns: list[UsedColumns] = []
        for record in records:
            if isinstance(record, UsedColumns):
                columns.append(record)
                continue
            for name, used in record.uses:
                self._use(name, used)
        for segment_name, offsets, counters in UsedColumns.together(columns).groups() if columns else ():
            self.counter = max(self.counter, int(counters.max()))
            if (segment := self.segments.get(segment_name)) is not None:
                rows = segment.rows.get_all(offsets)
                np.maximum.at(self._last_used, rows[rows >= 0], counters[rows >= 0])

    def _use(self, name: ExtentName, used: int) -> None:
        self.counter = max(self.counter, used)
        segment = self.segments.get(name.segment)
        row = None if segment is None else segment.rows.get(name.offset)
        if row is not None:
            self._last_used[row] = max(int(self._last_used[row]), used)

    def _keep_all(self, records: Iterable[tuple[ClassRaised | Pinned, bool, int]]) -> None:
        for record, own, now_ms in records:
            said: Iterable[Raise | Pin]
            if isinstance(record, ClassRaised):
                early_ms = max(0, record.time_ms - now_ms)  # the clock that reckoned it was ahead
                said = [Raise(name, max(0, until_ms - early_ms), retention) for name, until_ms, retention in record.raises]
            else:
                said = record.pins
            for one in said:
                segment = self.segments.get(one.extent.segment)
                row = None if segment is None else segment.rows.get(one.extent.offset)
                if row is not None:
                    self._keep(row, one, own=own)
                elif segment is not None and (segment.gone or one.extent.offset in segment.dead):
                    pass  # it is no more
                elif len(self._waiting) < _WAITING:
                    self._waiting.setdefault(one.extent, []).append((one, own))

    def _keep(self, row: int, said: Raise | Pin, *, own: bool) -> None:
        self._kept.said[row] |= 2 if own else 1
        if isinstance(said, Raise):
            self._kept.promise(row, said.until_ms, said.retention, nbytes=int(self._extent_bytes[row]))
        else:
            self.counter = max(self.counter, said.counter)
            self._kept.pin(row, said.until_ms, said.counter)

    def _remove(self, removal: Removal) -> None:
        if removal.prefixes and self.removals.maxlen:
            if len(self.removals) == self.removals.maxlen:
                self._removed_blocks -= len(self.removals[0].prefixes) // PREFIX_BYTES
            self._removed_blocks += len(removal.prefixes) // PREFIX_BYTES
            self.removals.append(removal)
        segment = self.segment(removal.extent.segment)
        offset = removal.extent.offset
        if not segment.gone:
            segment.dead.add(offset)
            segment.stale |= not removal.recorded
        row = segment.rows.get(offset)
        if row is not None:
            self._drop(row)

    def _drop(self, row: int) -> None:
        segment = self._numbered[self._segment[row]]
        del segment.rows[int(self._offset[row])]
        nbytes = int(self._extent_bytes[row])
        if self._flags[row] & BOUNDARY_STATE:
            self._forget_state(segment.representation, row)
        segment.live_bytes -= nbytes
        self.live_bytes -= nbytes
        self.extents -= 1
        index = self._index(segment.representation)
        keys = None if self.on_change is None else index.keys(row)
        blocks = index.remove(row)
        segment.blocks -= blocks
        self.blocks -= blocks
        self._kept.leave(row, nbytes=nbytes)
        self._alive[row] = False
        self._leases[row] = 0
        self._fields.pop(row, None)
        self._generation[row] += 1
        self._free.append(row)
        if keys is not None:
            self._changed(segment, keys, came=False)

    def _changed(self, segment: Segment, keys: npt.NDArray[np.uint8], *, came: bool) -> None:
        if self.on_change is not None and not self._loading:
            self.on_change(Change(segment.representation, [key.tobytes() for key in keys], came))

    # What callers ask.

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return (ids, positions), -1 in the ids where a block is absent."""
        if representation not in self._indexes or not keys:
            return np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.int32)
        rows, positions = self._indexes[representation].lookup(keys)
        found = rows >= 0
        ids = np.where(found, rows | self._generation[rows] << _GENERATION_SHIFT, -1)
        return ids, np.where(found, positions, 0).astype(np.int32)

    def states(self, representation: bytes, keys: Sequence[bytes]) -> npt.NDArray[np.int64] | None:
        """Return for each key the extent that ends with that block and carries a boundary state, or -1; None where no extent of
        this representation carries one."""
        held = self._states.get(representation)
        if not held:
            return None
        found = [held.get(key[:PREFIX_BYTES]) for key in keys]
        return np.array([-1 if rows is None else self.id_of(rows[0]) for rows in found], np.int64)

    def row(self, extent: ExtentId) -> int | None:
        """Return the row of a living extent."""
        row = extent & ((1 << _GENERATION_SHIFT) - 1)
        if not 0 <= row < self._used_rows or not self._alive[row] or self._generation[row] != extent >> _GENERATION_SHIFT:
            return None
        return row

    def id_of(self, row: int) -> ExtentId:
        return ExtentId(row | int(self._generation[row]) << _GENERATION_SHIFT)

    def place(self, row: int) -> tuple[Segment, int, int]:
        """Return (segment, offset, extent_bytes)."""
        return self._numbered[self._segment[row]], int(self._offset[row]), int(self._extent_bytes[row])

    def shape(self, row: int) -> Shape:
        blocks = self._index(self._numbered[self._segment[row]].representation).count(row)
        return Shape(blocks, int(self._header_bytes[row]), int(self._extent_bytes[row]))

    def numbered(self, number: int) -> Segment:
        return self._numbered[number]

    def name(self, row: int) -> ExtentName:
        return ExtentName(self._numbered[self._segment[row]].name, int(self._offset[row]))

    def last_used(self, row: int) -> int:
        return int(self._last_used[row])

    def prefixes(self, row: int) -> bytes:
        return self._index(self._numbered[self._segment[row]].representation).keys(row).tobytes()

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
        where = {number: (self._numbered[number].representation, self._numbered[number].name.file) for number in set(numbers)}
        columns = (
            end - shape.blocks * PREFIX_BYTES,
            end,
            rows | self._generation[rows] << _GENERATION_SHIFT,
            self._offset[rows],
            self._extent_bytes[rows],
            self._header_bytes[rows],
            self._created_ms[rows],
            self._last_used[rows],
            self._leases[rows] > 0,
            promised_ms,
            expires_ms,
            (self._flags[rows] & BOUNDARY_STATE) != 0,
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
        ) in enumerate(zip(rows.tolist(), numbers, *(column.tolist() for column in columns), strict=True)):
            representation, file = where[number]
            pinned_ms = self._kept.pinned_ms(row)
            found.append(
                ExtentInfo(
                    id=ExtentId(one),
                    representation=representation,
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
                    where=f"{file}, byte {offset}",
                )
            )
        return found

    def columns(self, rows: npt.NDArray[np.int64]) -> ExtentColumns:
        """Return what prefixes are made of, of many extents at once."""
        numbers, member = np.unique(self._segment[rows], return_inverse=True)
        of_segment = [self._numbered[number].representation for number in numbers.tolist()]
        names = tuple(dict.fromkeys(of_segment))
        representation = np.array([names.index(name) for name in of_segment], np.int64)[member]
        blocks, parts = np.zeros(len(rows), np.int64), []
        for n, name in enumerate(names):
            mine = np.flatnonzero(representation == n)
            part, blocks[mine] = self._index(name).keys_of_all(rows[mine])
            parts.append(part)
        keys = np.zeros((int(blocks.sum()), PREFIX_BYTES), np.uint8)
        owners = np.repeat(representation, blocks)
        for n, part in enumerate(parts):
            keys[owners == n] = part
        return ExtentColumns(names, representation, blocks, self._extent_bytes[rows], self._parent[rows], keys)

    def living(self) -> npt.NDArray[np.int64]:
        """Return the rows of all living extents."""
        return np.flatnonzero(self._alive[: self._used_rows])

    def living_ids(self) -> npt.NDArray[np.int64]:
        """Return the ids of all living extents."""
        rows = self.living()
        return rows | self._generation[rows] << _GENERATION_SHIFT

    def candidates(self, now_ms: int) -> Candidates:
        """Return a copy of what a choice among all living extents needs."""
        rows = self.living()
        return Candidates(
            ids=rows | self._generation[rows] << _GENERATION_SHIFT,
            segments=self._segment[rows],
            last_used=self._last_used[rows],
            nbytes=self._extent_bytes[rows],
            leased=self._leases[rows] != 0,
            promised_ms=np.minimum(self._kept.promised_ms[rows], self._kept.expires_ms(rows, self._created_ms[rows])),
            pinned=np.isin(rows, self._kept.pinned(now_ms)),
            tenants=self._kept.tenants[rows],
        )

    def parents(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each extent the row in which the block before its first one is found, or -1."""
        rows = ids & ROW_MASK
        found = np.full(len(rows), -1, np.int64)
        numbers, member = np.unique(self._segment[rows], return_inverse=True)
        representations = [self._numbered[int(number)].representation for number in numbers]
        for representation in dict.fromkeys(representations):
            if representation in self._indexes:
                mine = np.array([other == representation for other in representations], np.bool_)[member]
                found[mine] = self._indexes[representation].lookup(self._parent[rows[mine]])[0]
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
        return {s.number: max(s.allocated_bytes, 0 if s.sealed else s.capacity_bytes) for s in segments}

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
        return int(self._leases[row])

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

    # What a snapshot keeps.

    def snapshot(self, now_ms: int) -> Iterator[list[Record]]:
        """Yield, part by part, what the own journal must say when it starts anew. Segment by segment, so that damage inside
        costs one. Others' records may be applied between two parts: what they change, their journals say."""
        yield [Snapshot(self.counter, self.next_sequence), *map(RepresentationDeclared, self.representations.values())]
        for segment in list(self.segments.values()):
            if not segment.gone:
                yield from self._segment_parts(segment, now_ms)
        removals = [r for r in self.removals if r.recorded]
        for first in range(0, len(removals), _PART):
            part = removals[first : first + _PART]
            yield [Removed(r.time_ms, r.reason, ((r.extent, r.prefixes),), r.quarantined) for r in part]

    def snapshot_bytes(self) -> int:
        """Return about what a snapshot takes in a journal."""
        segments = [s for s in self.segments.values() if not s.gone]
        dead = sum(len(s.dead) for s in segments)
        own = [s for s in segments if s.recorded]
        return (
            _RECORD_BYTES * (len(segments) + len(self.removals) + sum(len(s.rows) for s in own))
            + PREFIX_BYTES * (self._removed_blocks + sum(s.blocks for s in own))
            + _DEAD_BYTES * dead
            + _TERMS_BYTES * int(np.count_nonzero(self._kept.said[: self._used_rows][self._alive[: self._used_rows]]))
            + sum(map(len, self.representations.values()))
        )

    def opened_record(self, segment: Segment) -> SegmentOpened:
        return SegmentOpened(
            segment.name, segment.header_bytes, segment.capacity_bytes, segment.created_ms, segment.representation
        )

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
        )

    def _segment_parts(self, segment: Segment, now_ms: int) -> Iterator[list[Record]]:
        if segment.recorded:
            yield [self.opened_record(segment)]
        offsets = sorted(segment.rows)
        for first in range(0, len(offsets), _PART):
            part = [row for offset in offsets[first : first + _PART] if (row := segment.rows.get(offset)) is not None]
            added: list[Record] = [self.added_record(row) for row in part] if segment.recorded else []
            # Promises to others' extents that only this journal may speak of; to the own ones whoever spoke of them.
            said = [row for row in part if self._kept.said[row] & (3 if segment.recorded else 2)]
            yield added + self.terms_records(said, now_ms=now_ms, added=segment.recorded)
        # Other journals may still say that these were added, as the segment's headers do if this journal is ever lost.
        dead: list[Record] = [
            *removed_records(0, "", [(ExtentName(segment.name, offset), b"") for offset in sorted(segment.dead)])
        ]
        if segment.recorded and segment.sealed:
            dead.append(SegmentSealed(segment.name, segment.end))
        yield dead

    def _note_state(self, representation: bytes, last: bytes, row: int) -> None:
        self._states.setdefault(representation, {}).setdefault(last, []).append(row)

    def _forget_state(self, representation: bytes, row: int) -> None:
        keys = self._index(representation).keys(row)
        if not len(keys):  # as only a wrong writer's journal says
            return
        held, last = self._states[representation], keys[-1].tobytes()
        held[last].remove(row)
        if not held[last]:
            del held[last]

    # Rows.

    def _index(self, representation: bytes) -> BlockIndex:
        index = self._indexes.get(representation)
        if index is None:
            index = self._indexes[representation] = BlockIndex()
        return index

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        return int(self._new_rows(1)[0])

    def _take_rows(self, count: int) -> npt.NDArray[np.int64]:
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        return np.concatenate([np.array(again, np.int64), self._new_rows(count - len(again))])

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


def _split(prefixes: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(prefixes, np.uint8).reshape(-1, PREFIX_BYTES)


def _digest(encoded: bytes) -> bytes:
    return sha256(encoded).digest()
