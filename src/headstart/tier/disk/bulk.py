"""A journal's "extent added" records in columns: nearly all that reopening reads. Pure.

What is refused, and where reading stops, is exactly as record by record: at the first thing that is not plain, `decode_bulk`
leaves the whole stretch to `decode_records`. Records of other types come before the columns of the stretch that they stood in,
which changes nothing: a removal is final, uses and promises are taken over last, and a stretch ends where a segment is opened
of which it has extents already. It also ends at a removal if its extents' checks were made with different keys: which of them
count is told by the first one that is there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from headstart.block.layout import MAX_HEADER_BYTES
from headstart.tier.disk.records import (
    ADDED,
    CHECK_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX_BYTES,
    RECORD_PREFIX,
    USES,
    Decoded,
    ExtentAdded,
    ExtentName,
    Record,
    RecordType,
    SegmentName,
    decode_fields,
    decode_payload,
    decode_records,
)

# The numbers of records stay below these; extents also below what sums up in i64, else they are decoded one by one.
_LIMITS = {
    "offset": 1 << 62,
    "extent_bytes": 1 << 40,
    "created_ms": 1 << 62,
    "header_bytes": MAX_HEADER_BYTES + 1,
    "last_used": USES,
}
_ROW = np.dtype(
    [
        ("writer", "V16"),
        ("sequence", "<u4"),
        ("offset", "<u8"),
        ("extent_bytes", "<u8"),
        ("header_bytes", "<u4"),
        ("created_ms", "<u8"),
        ("last_used", "<u8"),
        ("flags", "<u4"),
        ("blocks", "<u4"),
        ("parent", "u1", (PREFIX_BYTES,)),
    ]
)
_USE = np.dtype([("writer", "V16"), ("sequence", "<u4"), ("offset", "<u8"), ("used", "<u8")])
_SEGMENT_BYTES = 20  # writer and sequence, which a record begins with
_OPENED, _TOUCHED = int(RecordType.SEGMENT_OPENED), int(RecordType.TOUCHED)
_REMOVED = (int(RecordType.REMOVED), int(RecordType.QUARANTINED))
_FEW_TERMS = 32  # different ones that are looked for all at once
_Numbers = npt.NDArray[np.int64]
_Terms = tuple[str, str, int, bytes]
assert _ROW.itemsize == ADDED.size


@dataclass(frozen=True, slots=True)
class AddedColumns:
    """Records in their order. `rows`: their fixed parts, as in the journal. `keys`: the prefixes of all their blocks, one after
    the other; those of a record begin at its `first_keys`. `terms`: retention class, tenant, check key and unknown fields, each
    different combination once; `terms_of`: which one a record has."""

    rows: npt.NDArray[np.void]
    keys: npt.NDArray[np.uint8]  # [blocks, PREFIX_BYTES]
    first_keys: npt.NDArray[np.int64]
    terms: tuple[_Terms, ...]
    terms_of: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.rows)

    def groups(self) -> Iterator[tuple[SegmentName, int, int]]:
        """Yield (segment, first, end) for records that stand side by side and are of one segment."""
        for first, end in _runs(self.rows):
            yield _segment(self.rows[first]), first, end

    def record(self, at: int) -> ExtentAdded:
        row = self.rows[at]
        start = int(self.first_keys[at])
        retention, tenant, check_key, fields = self.terms[self.terms_of[at]]
        return ExtentAdded(
            ExtentName(_segment(row), int(row["offset"])),
            int(row["extent_bytes"]),
            int(row["header_bytes"]),
            int(row["created_ms"]),
            int(row["last_used"]),
            retention,
            row["parent"].tobytes(),
            self.keys[start : start + int(row["blocks"])].tobytes(),
            int(row["flags"]),
            fields,
            tenant,
            check_key,
        )

    def part(self, first: int, end: int) -> AddedColumns:
        """Return some of them."""
        keys = int(self.first_keys[first])
        keys_end = int(self.first_keys[end]) if end < len(self) else len(self.keys)
        some = self.first_keys[first:end] - keys
        return AddedColumns(self.rows[first:end], self.keys[keys:keys_end], some, self.terms, self.terms_of[first:end])

    def check_keys(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Return which keys some of them have checks of, each once."""
        keys = np.array([key for _, _, key, _ in self.terms], np.int64)
        return keys[:1] if (keys == keys[0]).all() else np.unique(keys[self.terms_of[first:end]])


@dataclass(frozen=True, slots=True)
class UsedColumns:
    """Uses, as `Touched`: rows of writer, sequence, offset and the use counter's value."""

    rows: npt.NDArray[np.void]

    @classmethod
    def together(cls, columns: Sequence[UsedColumns]) -> UsedColumns:
        return cls(np.concatenate([one.rows for one in columns]))

    def groups(self) -> Iterator[tuple[SegmentName, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield (segment, offsets, counters) for each segment."""
        writers = np.ascontiguousarray(self.rows["writer"]).view("<u8").reshape(-1, 2)
        rows = self.rows[np.lexsort((self.rows["sequence"], writers[:, 1], writers[:, 0]))]
        for first, end in _runs(rows):
            yield _segment(rows[first]), rows["offset"][first:end].astype(np.int64), rows["used"][first:end].astype(np.int64)


Loaded = Record | AddedColumns | UsedColumns


def decode_bulk(data: memoryview, *, writer: bytes, generation: int, offset: int, state: Decoded) -> list[Loaded]:
    """As `decode_records`, with extents that were added, and uses, in columns."""
    found: list[Loaded] = []
    try:
        _decode(data, struct.pack("<16sI", writer, generation), offset, state, found)
    except (ValueError, struct.error):
        found = [*decode_records(data, writer=writer, generation=generation, offset=offset, state=state)]
    return found


def _decode(data: memoryview, name: bytes, offset: int, state: Decoded, found: list[Loaded]) -> None:
    """Raises ValueError or struct.error for a record that cannot be decoded, or may be none."""
    starts, lengths, kinds = _walk(data, state)
    first, size = np.array(starts, np.int64), np.array(lengths, np.int64) + RECORD_PREFIX.size
    right = _checks(data, name, offset, first, size)
    if not right.all():
        good = int(right.argmin())
        state.stopped = "damaged"
        state.end = offset + starts[good]
        first, size, kinds = first[:good], size[:good], kinds[:good]
    else:
        state.end = offset + (int(first[-1] + size[-1]) + CHECK_BYTES if starts else 0)
    kind = np.frombuffer(bytes(kinds), np.uint8)
    payloads, ends = first + RECORD_PREFIX.size, first + size
    added = np.flatnonzero(kind == RecordType.ADDED)
    if len(added) and int(size[added].min()) < RECORD_PREFIX.size + _ROW.itemsize:
        raise ValueError("a record is too short")
    columns = _columns(data, payloads[added], ends[added])
    runs = [(begin, columns.rows[begin].tobytes()[:_SEGMENT_BYTES]) for begin, _ in _runs(columns.rows)]
    segments: set[bytes] = set()  # of the stretch that is being gathered, as far as `runs` are gone through
    begun = run = 0  # of the columns, and of the runs
    others = np.flatnonzero(kind != RecordType.ADDED)
    places = others.tolist(), np.searchsorted(added, others).tolist(), payloads[others].tolist(), ends[others].tolist()
    for at, before, start, end in zip(*places, strict=True):
        kind_of, payload = kinds[at], data[start:end]
        ends_here = False
        if kind_of == _OPENED:
            while run < len(runs) and runs[run][0] < before:
                segments.add(runs[run][1])
                run += 1
            ends_here = bytes(payload[:_SEGMENT_BYTES]) in segments
        elif kind_of in _REMOVED:
            ends_here = before > begun and len(columns.check_keys(begun, before)) > 1
        if ends_here and before > begun:
            found.append(columns.part(begun, before))
            begun, segments = before, set()
            run = max(0, run - 1)  # it may go on in the next stretch
        found.append(_uses(payload) if kind_of == _TOUCHED else decode_payload(kind_of, payload))
    if begun < len(added):
        found.append(columns.part(begun, len(added)))


def _walk(data: memoryview, state: Decoded) -> tuple[list[int], list[int], list[int]]:
    """Return where records begin, how long their payloads are, and of which types they are, by their own word."""
    unpack, around, total = RECORD_PREFIX.unpack_from, RECORD_PREFIX.size + CHECK_BYTES, len(data)
    starts, lengths, kinds = [], [], []
    at = 0
    state.stopped = ""
    while at < total:
        if total - at < around:
            state.stopped = "torn"
            break
        length, kind = unpack(data, at)
        end = at + around + length
        if length > MAX_PAYLOAD_BYTES or end > total:
            state.stopped = "torn"
            break
        starts.append(at)
        lengths.append(length)
        kinds.append(kind)
        at = end
    return starts, lengths, kinds


def _checks(data: memoryview, name: bytes, offset: int, first: _Numbers, size: _Numbers) -> npt.NDArray[np.bool_]:
    """Return which records, without their checks `size` bytes long, are right.

    What goes into a check before the record is written over the one in front of it, in a copy: for every second one at once."""
    before = np.zeros(len(first), [("name", f"V{len(name)}"), ("at", "<u8")])
    before["name"], before["at"] = np.frombuffer(name, f"V{len(name)}"), first + offset
    room, digest = before.itemsize, xxhash.xxh3_64_intdigest
    found: npt.NDArray[np.uint64] = np.zeros(len(first), np.uint64)
    copy = bytearray(room + len(data))
    view = memoryview(copy)
    for which in (slice(0, None, 2), slice(1, None, 2)):
        view[room:] = data
        _windows(copy, room)[first[which]] = before[which].view(f"V{room}")
        ends = (first[which] + size[which] + room).tolist()
        found[which] = [digest(view[start:end]) for start, end in zip(first[which].tolist(), ends, strict=True)]
    # A shorter one left no room for that: what was written reached into the record in front of it.
    for at in (np.flatnonzero(size[1:-1] + CHECK_BYTES < room)).tolist():
        found[at] = digest(before[at].tobytes() + bytes(data[int(first[at]) : int(first[at] + size[at])]))
    right: npt.NDArray[np.bool_] = found == _taken(data, first + size, CHECK_BYTES).view(">u8")[:, 0]
    return right


def _windows(data: bytearray | memoryview, nbytes: int) -> npt.NDArray[np.void]:
    """Return what stands in `nbytes` bytes from each byte on."""
    return np.ndarray((max(0, len(data) - nbytes + 1),), f"V{nbytes}", data, strides=(1,))


def _taken(data: memoryview, starts: _Numbers, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return, as rows, what stands in `nbytes` bytes from each of `starts` on."""
    if not nbytes or not len(starts):
        return np.zeros((len(starts), nbytes), np.uint8)
    return _windows(data, nbytes)[starts].view(np.uint8).reshape(len(starts), nbytes)


def _columns(data: memoryview, first: _Numbers, end: _Numbers) -> AddedColumns:
    """Return the records whose payloads lie between `first` and `end`. Raises ValueError where one cannot be decoded."""
    rows = _taken(data, first, _ROW.itemsize).view(_ROW)[:, 0]
    blocks = rows["blocks"].astype(np.int64)
    keys_at = first + _ROW.itemsize
    tails = keys_at + blocks * PREFIX_BYTES
    large = any(int(rows[name].max()) >= limit for name, limit in _LIMITS.items()) if len(rows) else False
    if large or (tails > end).any() or (rows["header_bytes"] > rows["extent_bytes"]).any():
        raise ValueError("a record cannot be decoded, or not in columns")
    first_keys = np.cumsum(blocks) - blocks
    keys = np.zeros((int(blocks.sum()), PREFIX_BYTES), np.uint8)
    for count in np.flatnonzero(np.bincount(blocks)).tolist():
        mine = np.flatnonzero(blocks == count)
        some = _taken(data, keys_at[mine], count * PREFIX_BYTES).reshape(-1, PREFIX_BYTES)
        keys[(first_keys[mine, None] + np.arange(count)).ravel()] = some
    terms, terms_of = _terms(data, tails, end)
    return AddedColumns(rows, keys, first_keys, terms, terms_of)


def _terms(data: memoryview, starts: _Numbers, ends: _Numbers) -> tuple[tuple[_Terms, ...], npt.NDArray[np.intp]]:
    """Return what stands between `starts` and `ends`, decoded, each different one once, and which one is whose."""
    numbered: list[bytes] = []
    which = np.zeros(len(starts), np.intp)
    left = np.arange(len(starts))
    while len(left) and len(numbered) < _FEW_TERMS:
        start, end = int(starts[left[0]]), int(ends[left[0]])
        alike = np.flatnonzero(ends[left] - starts[left] == end - start)
        same = (_taken(data, starts[left[alike]], end - start) == np.frombuffer(data, np.uint8)[start:end]).all(axis=1)
        which[left[alike[same]]] = len(numbered)
        numbered.append(bytes(data[start:end]))
        left = np.delete(left, alike[same])
    others: dict[bytes, int] = {}
    for at in left.tolist():
        which[at] = len(numbered) + others.setdefault(bytes(data[int(starts[at]) : int(ends[at])]), len(others))
    return tuple(decode_fields(tail) for tail in [*numbered, *others]), which


def _uses(payload: memoryview) -> UsedColumns:
    rows = np.frombuffer(payload, _USE)
    if len(rows) and int(rows["used"].max()) >= USES:
        raise ValueError("a use counter that nobody can have reached")
    return UsedColumns(rows)


def _runs(rows: npt.NDArray[np.void]) -> Iterator[tuple[int, int]]:
    """Yield where rows of one segment that stand side by side begin and end."""
    names = rows.view(np.uint8).reshape(len(rows), rows.itemsize)[:, :_SEGMENT_BYTES]
    edges = np.flatnonzero((names[1:] != names[:-1]).any(axis=1)) + 1
    yield from pairwise([0, *edges.tolist(), len(rows)] if len(rows) else [])


def _segment(row: np.void) -> SegmentName:
    return SegmentName(bytes(row["writer"]), int(row["sequence"]))
