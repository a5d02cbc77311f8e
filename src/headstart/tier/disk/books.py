"""What the journals say, in memory: segments and what they hold (`table`), removals. No I/O; whoever owns it holds the lock.

Records may come in any order of journals: a removal is final, so one that comes before its extent is kept and waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headstart.block.checks import PLAIN
from headstart.policy.retention import FOREVER_MS, Retention
from headstart.tier.base import Change, OnChange
from headstart.tier.disk.bulk import AddedColumns, Loaded, UsedColumns
from headstart.tier.disk.offsets import Rows
from headstart.tier.disk.records import (
    BOUNDARY_STATE,
    PREFIX_BYTES,
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
    UsesTimed,
    removed_records,
)
from headstart.tier.disk.table import ExtentTable, Segment

REMOVALS_KEPT = 10_000
GONE_KEPT = 4096  # segments that are no more and are still known by name
_WAITING = 1 << 16  # promises and pins of extents that were not heard of yet, at most
_PART = 256  # records of a snapshot at once: what a lookup may have to wait for
# Bytes of a journal, about: of a record, of an extent that is only named, of one's promise and pin, of the time of a use.
_RECORD_BYTES, _DEAD_BYTES, _TERMS_BYTES, _NOTE_BYTES = 128, 32, 64, 16


class Removal(NamedTuple):
    """One extent that is no more: when, why, and the key prefixes of its blocks. `recorded`: by this process's journal."""

    time_ms: int
    reason: str
    extent: ExtentName
    prefixes: bytes
    quarantined: bool
    recorded: bool


class Books(ExtentTable):
    """Extents and segments as journals tell of them."""

    def __init__(
        self,
        *,
        removals_kept: int = REMOVALS_KEPT,
        retention: Retention | None = None,
        key_ids: frozenset[int] = PLAIN.key_ids,
        largest_bytes: int | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        """`key_ids`: which keys checks may have been made with that are known here. `largest_bytes`: what is said of an extent
        that ends behind it is passed over, and counted in `too_large`. `segment_bytes`: no segment is believed to be larger,
        whatever is said of it; only extents in it may make it so."""
        super().__init__(Retention() if retention is None else retention)
        self.representations: dict[bytes, bytes] = {}
        self.declared: set[bytes] = set()  # representations that the own journal declares
        self.segments: dict[SegmentName, Segment] = {}
        self.removals: deque[Removal] = deque(maxlen=removals_kept)
        self.on_change: OnChange | None = None  # told of what comes and goes, once loading is over
        self.next_sequence = 0  # of the own writer
        self.allocated_bytes = 0  # of all segments
        self._next_number = 0
        self._forget_at = GONE_KEPT
        self._removed_blocks = 0  # of all removals that are kept
        self.too_large = 0
        self._key_ids = key_ids
        self._largest_bytes = largest_bytes
        self._segment_bytes = segment_bytes
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
                case Removed():
                    self._remove(record, own=own)
                case SegmentOpened():
                    self._open(record, own=own)
                case SegmentSealed():
                    segment = self.segment(record.segment)
                    segment.sealed = True
                    segment.end = max(segment.end, self._bounded(record.end))
                case RepresentationDeclared(encoded):
                    digest = _digest(encoded)
                    self.representations[digest] = encoded
                    if own:
                        self.declared.add(digest)
                case UsesTimed(notes):
                    self.use_times.note(notes)
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
            segment = Segment(name, self._next_number, Rows(lambda: self._offset))
            self.segments[name] = self._numbered[self._next_number] = segment
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

    def enter_again(self, row: int) -> None:
        """Take an extent up under a new id: what was noted against the old one counts no more."""
        record, kept = self.added_record(row), self.terms_records([row], now_ms=0)
        own = self._numbered[self._segment[row]].recorded
        self._drop(row)
        self.apply([record, *kept], own=own)

    def charge(self, segment: Segment, allocated_bytes: int) -> None:
        """Note what the file system charges for a segment."""
        self.allocated_bytes += allocated_bytes - segment.allocated_bytes
        segment.allocated_bytes = allocated_bytes
        segment.overhead_bytes = min(segment.overhead_bytes, segment.idle_bytes)
        segment.stale = False

    def _open(self, record: SegmentOpened, *, own: bool) -> None:
        segment = self.segment(record.segment)
        if segment.rows and segment.representation != record.representation:
            return  # what is in it stands in another index; the file itself says which is right, when it is opened
        segment.representation = record.representation
        segment.header_bytes = record.header_bytes
        segment.capacity_bytes = self._bounded(record.capacity_bytes)
        segment.created_ms = record.created_ms
        segment.end = max(segment.end, self._bounded(record.header_bytes))
        segment.opened = True
        segment.recorded |= own

    def _bounded(self, nbytes: int) -> int:
        return nbytes if self._segment_bytes is None else min(nbytes, self._segment_bytes)

    def _add(self, record: ExtentAdded, *, own: bool, now_ms: int) -> None:
        segment = self.segments.get(record.extent.segment)
        if segment is None or not segment.opened or segment.gone:
            return
        if self._largest_bytes is not None and record.extent.offset + record.extent_bytes > self._largest_bytes:
            self.too_large += 1
            return
        segment.stale |= not own
        offset = record.extent.offset
        segment.end = max(segment.end, offset + record.extent_bytes)
        self.counter = max(self.counter, record.last_used)
        if offset in segment.rows:
            self._use(record.extent, record.last_used)
        elif offset not in segment.dead and self._seal(segment, record.check_key):
            self._enter(segment, record, now_ms)

    def _seal(self, segment: Segment, check_key: int) -> bool:
        """Note which key a segment's checks were made with. False where that of its other extents is another: no writer that
        can be believed says so."""
        if not segment.rows:
            segment.check_key, segment.hidden = check_key, check_key not in self._key_ids
            self.any_hidden |= segment.hidden
        return segment.check_key == check_key

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
        segment.rows.add(row)
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
            self._note_state(segment.index, record.prefixes[-PREFIX_BYTES:], row)
        keys, index = _split(record.prefixes), self._index(segment.index)
        if self._loading:
            index.load(keys, np.array([row]), np.array([blocks]))
        else:
            index.insert(keys, row)
            self._changed(segment, keys, came=True)

    def _add_columns(self, columns: AddedColumns, *, own: bool, now_ms: int) -> None:
        """As `_add` for each. Segments that are told of from their beginning to their end are taken over together."""
        assert self._loading, "one by one they are found at once"
        offsets = columns.rows["offset"].astype(np.int64)
        nbytes = columns.rows["extent_bytes"].astype(np.int64)
        groups = list(columns.groups())
        firsts = np.array([first for _, first, _ in groups])
        falls = np.concatenate([[False], offsets[1:] <= offsets[:-1]])
        falls[firsts] = False
        out_of_order = set((np.searchsorted(firsts, np.flatnonzero(falls), "right") - 1).tolist())
        of_each = (np.maximum.reduceat(each, firsts).tolist() for each in (offsets + nbytes, columns.rows["last_used"]))
        plain: dict[Segment, npt.NDArray[np.int64]] = {}
        for number, ((name, first, end), last, used) in enumerate(zip(groups, *of_each, strict=True)):
            segment = self.segments.get(name)
            if segment is None or not segment.opened or segment.gone:
                continue
            check_keys = columns.check_keys(first, end)
            in_order = number not in out_of_order and segment.rows.behind(offsets.item(first))
            in_order &= self._largest_bytes is None or last <= self._largest_bytes
            if segment not in plain and in_order and len(check_keys) == 1 and self._seal(segment, int(check_keys[0])):
                segment.stale |= not own
                segment.end = max(segment.end, last)
                self.counter = max(self.counter, used)
                some = np.arange(first, end)
                plain[segment] = some[~segment.dead.among(offsets[first:end])] if segment.dead else some
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
        for number, (_, _, _, fields) in enumerate(columns.terms):
            if fields:
                self._fields.update(dict.fromkeys(rows[columns.terms_of[at] == number].tolist(), fields))
        # Sums up to each segment's first record and behind its last one.
        edges = np.concatenate([[0], np.cumsum(counts)])
        bytes_to, blocks_to = (np.concatenate([[0], np.cumsum(each)])[edges].tolist() for each in (nbytes, blocks))
        for number, segment in enumerate(groups):
            mine = slice(int(edges[number]), int(edges[number + 1]))
            segment.rows.extend(rows[mine])
            segment.live_bytes += bytes_to[number + 1] - bytes_to[number]
            segment.blocks += blocks_to[number + 1] - blocks_to[number]
        self.live_bytes += bytes_to[-1]
        self.blocks += blocks_to[-1]
        self.extents += len(at)
        for name in {segment.index for segment in groups}:
            those = np.repeat(np.array([segment.index == name for segment in groups]), counts)
            some = blocks[those]
            keys = columns.keys
            if int(some.sum()) < len(keys):  # else they are all of them
                within = np.arange(int(some.sum())) - np.repeat(np.cumsum(some) - some, some)
                keys = keys[np.repeat(columns.first_keys[at[those]], some) + within]
            self._index(name).load(keys, rows[those], some)
        with_state = np.flatnonzero((new["flags"] & BOUNDARY_STATE) * blocks)
        if len(with_state):
            last = columns.first_keys[at] + blocks - 1
            owners = np.repeat(np.arange(len(groups)), counts)
            names = [segment.index for segment in groups]
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

    def _remove(self, record: Removed, *, own: bool) -> None:
        last, segment, kept = SegmentName(b"", 0), None, self.removals.maxlen
        for name, prefixes in record.extents:  # those of a segment mostly stand side by side: there may be very many
            if segment is None or name.segment is not last:
                last, segment = name.segment, self.segment(name.segment)
            if prefixes and kept:
                if len(self.removals) == kept:
                    self._removed_blocks -= len(self.removals[0].prefixes) // PREFIX_BYTES
                self._removed_blocks += len(prefixes) // PREFIX_BYTES
                self.removals.append(Removal(record.time_ms, record.reason, name, prefixes, record.quarantined, own))
            if not segment.gone:
                segment.dead.add(name.offset)
                segment.stale |= not own
            row = segment.rows.get(name.offset)
            if row is not None:
                self._drop(row)

    def _drop(self, row: int) -> None:
        segment = self._numbered[self._segment[row]]
        segment.rows.remove(int(self._offset[row]))
        nbytes = int(self._extent_bytes[row])
        if self._flags[row] & BOUNDARY_STATE:
            self._forget_state(segment.index, row)
        segment.live_bytes -= nbytes
        self.live_bytes -= nbytes
        self.extents -= 1
        index = self._index(segment.index)
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
        if self.on_change is not None and not self._loading and not segment.hidden:
            self.on_change(Change(segment.representation, [key.tobytes() for key in keys], came))

    # What a snapshot keeps.

    def snapshot(self, now_ms: int) -> Iterator[list[Record]]:
        """Yield, part by part, what the own journal must say when it starts anew. Segment by segment, so that damage inside
        costs one. Others' records may be applied between two parts: what they change, their journals say."""
        yield [Snapshot(self.counter, self.next_sequence), *map(RepresentationDeclared, self.representations.values())]
        if (timed := self.use_times.record()) is not None:
            yield [timed]
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
            + _NOTE_BYTES * len(self.use_times)
        )

    def time_uses(self, now_ms: int) -> list[Record]:
        """Return the note of the time by which so many uses were counted; none where none came since the last one."""
        return [UsesTimed(((self.counter, now_ms),))] if self.counter > self.use_times.latest else []

    def opened_record(self, segment: Segment) -> SegmentOpened:
        return SegmentOpened(
            segment.name, segment.header_bytes, segment.capacity_bytes, segment.created_ms, segment.representation
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


def _split(prefixes: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(prefixes, np.uint8).reshape(-1, PREFIX_BYTES)


def _digest(encoded: bytes) -> bytes:
    return sha256(encoded).digest()
