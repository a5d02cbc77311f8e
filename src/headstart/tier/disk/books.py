"""What the journals say, in memory: segments, extents, which extent holds a block. No I/O; whoever owns it holds the lock.

Records may come in any order of journals: a removal is final, so one that comes before its extent is kept and waits for it.
Extents are rows of arrays. An ExtentId is a row with the number of times the row was given out, so an id that outlives its
extent names nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from headstart.tier.base import ExtentId, ExtentInfo
from headstart.tier.disk.lookup import Lookup
from headstart.tier.disk.records import (
    PREFIX_BYTES,
    USES,
    ExtentAdded,
    ExtentName,
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

REMOVALS_KEPT = 10_000
CONDEMNED = -1  # instead of a count of leases: the extent is being removed and takes none
_GENERATION_SHIFT = 32
_PART = 256  # records of a snapshot at once: what a lookup may have to wait for
_RECORD_BYTES, _DEAD_BYTES = 128, 32  # of a journal, about: of a record, and of an extent that is only named


@dataclass(slots=True, eq=False)
class Segment:
    """`end`: where the next extent begins, as far as journals say. `recorded`: this process's own journal vouches for it.
    `gone`: the file is no more. `dead`: offsets of removed extents. `allocated_bytes`: what the file system charges, or, when
    `stale`, did before another process changed the file."""

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
    live_bytes: int = 0
    blocks: int = 0
    rows: dict[int, int] = field(default_factory=dict)  # offset → row
    dead: set[int] = field(default_factory=set)

    @property
    def settled(self) -> bool:
        """Whether nobody will add to it without this process knowing, so that its file may go."""
        return self.recorded or self.sealed


@dataclass(frozen=True, slots=True)
class Removal:
    """One extent that is no more: when, why, and the key prefixes of its blocks. `recorded`: by this process's journal."""

    time_ms: int
    reason: str
    extent: ExtentName
    prefixes: bytes
    quarantined: bool
    recorded: bool


@dataclass(frozen=True, slots=True)
class Candidates:
    """Living extents in columns: ids, numbers of their segments, use counters, sizes, and whether this process leases them."""

    ids: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int32]
    last_used: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    leased: npt.NDArray[np.bool_]


class Books:
    """Extents and segments by name and by key."""

    def __init__(self, *, removals_kept: int = REMOVALS_KEPT) -> None:
        self.representations: dict[bytes, bytes] = {}
        self.declared: set[bytes] = set()  # representations that the own journal declares
        self.segments: dict[SegmentName, Segment] = {}
        self.removals: deque[Removal] = deque(maxlen=removals_kept)
        self.counter = 0
        self.next_sequence = 0  # of the own writer
        self.live_bytes = 0
        self.allocated_bytes = 0  # of all segments
        self.blocks = 0
        self.extents = 0
        self._numbered: list[Segment] = []
        self._lookups: dict[bytes, Lookup] = {}  # by representation
        self._free: list[int] = []
        self._used_rows = 0
        self._prefixes: list[bytes] = []
        self._retention: list[str] = []
        self._parents: list[bytes] = []
        self._fields: list[bytes] = []
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
        self._early_uses: list[Touched] = []

    # What journals say.

    def apply(self, records: Iterable[Record], *, own: bool) -> None:
        """Take over records of one journal, in its order. `own`: it is this process's journal. Uses come last, while loading
        after all journals: one journal may speak of a use before another one, read later, says that the extent was added."""
        uses: list[Touched] = []
        for record in records:
            match record:
                case ExtentAdded():
                    self._add(record, own=own)
                case Touched():
                    uses.append(record)
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
        else:
            self._use_all(uses)

    def finish_loading(self) -> None:
        """Index what was applied so far, all at once; until then nothing is found by its keys."""
        self._loading = False
        uses, self._early_uses = self._early_uses, []
        self._use_all(uses)
        rows_by_representation: dict[bytes, list[int]] = {}
        for row in self.living().tolist():
            rows_by_representation.setdefault(self.place(row)[0].representation, []).append(row)
        for representation, rows in rows_by_representation.items():
            self._lookup(representation).add_all(rows)

    def segment(self, name: SegmentName) -> Segment:
        """Return the segment of that name; one that was never heard of holds only what waits for it."""
        segment = self.segments.get(name)
        if segment is None:
            segment = self.segments[name] = Segment(name, len(self._numbered))
            self._numbered.append(segment)
        return segment

    def forget_segment(self, segment: Segment) -> None:
        """The file is no more, and with it every extent in it; what journals still say of it no longer counts."""
        for row in list(segment.rows.values()):
            self._drop(row)
        segment.gone = True
        self.charge(segment, 0)
        segment.dead.clear()

    def charge(self, segment: Segment, allocated_bytes: int) -> None:
        """Note what the file system charges for a segment."""
        self.allocated_bytes += allocated_bytes - segment.allocated_bytes
        segment.allocated_bytes = allocated_bytes
        segment.stale = False

    def _open(self, record: SegmentOpened, *, own: bool) -> None:
        segment = self.segment(record.segment)
        segment.representation = record.representation
        segment.header_bytes = record.header_bytes
        segment.capacity_bytes = record.capacity_bytes
        segment.created_ms = record.created_ms
        segment.end = max(segment.end, record.header_bytes)
        segment.opened = True
        segment.recorded |= own

    def _add(self, record: ExtentAdded, *, own: bool) -> None:
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
            self._enter(segment, record)

    def _enter(self, segment: Segment, record: ExtentAdded) -> None:
        row = self._take_row()
        self._segment[row] = segment.number
        self._offset[row] = record.extent.offset
        self._extent_bytes[row] = record.extent_bytes
        self._header_bytes[row] = record.header_bytes
        self._created_ms[row] = record.created_ms
        self._last_used[row] = record.last_used
        self._alive[row] = True
        self._prefixes[row] = record.prefixes
        self._retention[row] = record.retention
        self._parents[row] = record.parent
        self._flags[row] = record.flags
        self._fields[row] = record.fields
        segment.rows[record.extent.offset] = row
        segment.live_bytes += record.extent_bytes
        self.live_bytes += record.extent_bytes
        self.extents += 1
        blocks = len(record.prefixes) // PREFIX_BYTES
        segment.blocks += blocks
        self.blocks += blocks
        if self._loading:
            return
        self._lookup(segment.representation).add(row)

    def _use_all(self, records: Iterable[Touched]) -> None:
        for record in records:
            for name, used in record.uses:
                self._use(name, used)

    def _use(self, name: ExtentName, used: int) -> None:
        self.counter = max(self.counter, used)
        segment = self.segments.get(name.segment)
        row = None if segment is None else segment.rows.get(name.offset)
        if row is not None:
            self._last_used[row] = max(int(self._last_used[row]), used)

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
        segment.live_bytes -= nbytes
        self.live_bytes -= nbytes
        self.extents -= 1
        blocks = len(self._prefixes[row]) // PREFIX_BYTES
        segment.blocks -= blocks
        self.blocks -= blocks
        if not self._loading:
            self._lookup(segment.representation).remove(row)
        self._alive[row] = False
        self._leases[row] = 0
        self._prefixes[row] = b""
        self._generation[row] += 1
        self._free.append(row)

    # What callers ask.

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return (ids, positions), -1 in the ids where a block is absent."""
        if representation not in self._lookups or not keys:
            return np.full(len(keys), -1, np.int64), np.zeros(len(keys), np.int32)
        rows, positions = self._lookups[representation].find(keys)
        found = rows >= 0
        ids = np.where(found, rows | self._generation[rows] << _GENERATION_SHIFT, -1)
        return ids, np.where(found, positions, 0).astype(np.int32)

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

    def numbered(self, number: int) -> Segment:
        return self._numbered[number]

    def name(self, row: int) -> ExtentName:
        return ExtentName(self._numbered[self._segment[row]].name, int(self._offset[row]))

    def prefixes(self, row: int) -> bytes:
        return self._prefixes[row]

    def info(self, row: int) -> ExtentInfo:
        prefixes = self._prefixes[row]
        return ExtentInfo(
            id=self.id_of(row),
            representation=self._numbered[self._segment[row]].representation,
            keys=tuple(prefixes[at : at + PREFIX_BYTES] for at in range(0, len(prefixes), PREFIX_BYTES)),
            blocks=len(prefixes) // PREFIX_BYTES,
            header_bytes=int(self._header_bytes[row]),
            extent_bytes=int(self._extent_bytes[row]),
            created_ms=int(self._created_ms[row]),
            last_used=int(self._last_used[row]),
            retention=self._retention[row],
        )

    def living(self) -> npt.NDArray[np.int64]:
        """Return the rows of all living extents."""
        return np.flatnonzero(self._alive[: self._used_rows])

    def candidates(self) -> Candidates:
        """Return a copy of what a choice among all living extents needs."""
        rows = self.living()
        return Candidates(
            ids=rows | self._generation[rows] << _GENERATION_SHIFT,
            segments=self._segment[rows],
            last_used=self._last_used[rows],
            nbytes=self._extent_bytes[rows],
            leased=self._leases[rows] != 0,
        )

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

    def present(self, representation: bytes, keys: Sequence[bytes]) -> bool:
        lookup = self._lookups.get(representation)
        return lookup is not None and bool((lookup.find(keys)[0] >= 0).all())

    # What a snapshot keeps.

    def snapshot(self) -> Iterator[list[Record]]:
        """Yield, part by part, what the own journal must say when it starts anew. Segment by segment, so that damage inside
        costs one. Others' records may be applied between two parts: what they change, their journals say."""
        yield [Snapshot(self.counter, self.next_sequence), *map(RepresentationDeclared, self.representations.values())]
        for segment in list(self.segments.values()):
            if not segment.gone:
                yield from self._segment_parts(segment)
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
            self._retention[row],
            self._parents[row],
            self._prefixes[row],
            int(self._flags[row]),
            self._fields[row],
        )

    def _segment_parts(self, segment: Segment) -> Iterator[list[Record]]:
        if segment.recorded:
            yield [self.opened_record(segment)]
            offsets = sorted(segment.rows)
            for first in range(0, len(offsets), _PART):
                part = [segment.rows.get(offset) for offset in offsets[first : first + _PART]]
                yield [self.added_record(row) for row in part if row is not None]
        # Other journals may still say that these were added, as the segment's headers do if this journal is ever lost.
        dead: list[Record] = [
            *removed_records(0, "", [(ExtentName(segment.name, offset), b"") for offset in sorted(segment.dead)])
        ]
        if segment.recorded and segment.sealed:
            dead.append(SegmentSealed(segment.name, segment.end))
        yield dead

    # Rows.

    def _lookup(self, representation: bytes) -> Lookup:
        lookup = self._lookups.get(representation)
        if lookup is None:
            lookup = self._lookups[representation] = Lookup(self._prefixes)
        return lookup

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        row = self._used_rows
        if row == len(self._segment):
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._used_rows += 1
        self._prefixes.append(b"")
        self._retention.append("")
        self._parents.append(b"")
        self._fields.append(b"")
        return row


_COLUMNS = (
    "_segment",
    "_offset",
    "_extent_bytes",
    "_header_bytes",
    "_created_ms",
    "_last_used",
    "_flags",
    "_leases",
    "_generation",
    "_alive",
)


def _digest(encoded: bytes) -> bytes:
    return sha256(encoded).digest()
