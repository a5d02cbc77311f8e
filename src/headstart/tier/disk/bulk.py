"""A journal's "extent added" records in columns: nearly all that reopening reads. Pure.

What is refused, and where reading stops, is exactly as record by record: at the first thing that is not plain, `decode_bulk`
leaves the whole stretch to `decode_records`. Records of other types come before the columns of the stretch that they stood in,
which changes nothing: a removal is final, uses and promises are taken over last, and a stretch ends where a segment is opened
of which it has extents already.
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
_LENGTHS = np.arange(_ROW.itemsize)
assert _ROW.itemsize == ADDED.size


@dataclass(frozen=True, slots=True)
class AddedColumns:
    """Records in their order. `rows`: their fixed parts, as in the journal. `keys`: the prefixes of all their blocks, one after
    the other; those of a record begin at its `first_keys`. `terms`: retention class, tenant, check key and unknown fields, each
    different combination once; `terms_of`: which one a record has."""

    rows: npt.NDArray[np.void]
    keys: npt.NDArray[np.uint8]  # [blocks, PREFIX_BYTES]
    first_keys: npt.NDArray[np.int64]
    terms: tuple[tuple[str, str, int, bytes], ...]
    terms_of: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.rows)

    def groups(self) -> Iterator[tuple[SegmentName, int, int]]:
        """Yield (segment, first, end) for records that stand side by side and are of one segment."""
        names = self.rows.view(np.uint8).reshape(len(self), -1)[:, :_SEGMENT_BYTES]
        edges = np.flatnonzero((names[1:] != names[:-1]).any(axis=1)) + 1
        for first, end in pairwise([0, *edges.tolist(), len(self)]):
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

    def check_keys(self, first: int, end: int) -> npt.NDArray[np.int64]:
        """Return which keys some of them have checks of, each once."""
        keys = np.array([key for _, _, key, _ in self.terms], np.int64)
        return np.unique(keys[self.terms_of[first:end]])


@dataclass(frozen=True, slots=True)
class UsedColumns:
    """Uses, as `Touched`: rows of writer, sequence, offset and the use counter's value."""

    rows: npt.NDArray[np.void]

    @classmethod
    def together(cls, columns: Sequence[UsedColumns]) -> UsedColumns:
        return cls(np.concatenate([one.rows for one in columns]))

    def groups(self) -> Iterator[tuple[SegmentName, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield (segment, offsets, counters) for each segment."""
        names = np.ascontiguousarray(self.rows.view(np.uint8).reshape(-1, _USE.itemsize)[:, :_SEGMENT_BYTES])
        different, which = np.unique(names.view(f"S{_SEGMENT_BYTES}")[:, 0], return_inverse=True)
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(different))).tolist()
        for first, end in pairwise([0, *ends]):
            some = self.rows[order[first:end]]
            yield _segment(some[0]), some["offset"].astype(np.int64), some["used"].astype(np.int64)


Loaded = Record | AddedColumns | UsedColumns


def decode_bulk(data: memoryview, *, writer: bytes, generation: int, offset: int, state: Decoded) -> list[Loaded]:
    """As `decode_records`, with extents that were added, and uses, in columns."""
    found: list[Loaded] = []
    try:
        _decode(bytes(data), struct.pack("<16sI", writer, generation), offset, state, found)
    except (ValueError, struct.error):
        found = [*decode_records(data, writer=writer, generation=generation, offset=offset, state=state)]
    return found


def _decode(data: bytes, name: bytes, offset: int, state: Decoded, found: list[Loaded]) -> None:
    """Raises ValueError or struct.error for a record that cannot be decoded, or may be none."""
    unpack, digest, position = RECORD_PREFIX.unpack_from, xxhash.xxh3_64_digest, struct.Struct("<Q").pack
    added, opened, head = int(RecordType.ADDED), int(RecordType.SEGMENT_OPENED), RECORD_PREFIX.size
    starts: list[int] = []
    ends: list[int] = []
    segments: set[bytes] = set()  # of the columns that are being gathered, as far as `looked` says
    looked = 0
    at, total = 0, len(data)
    state.stopped = ""
    while at < total:
        if total - at < head + CHECK_BYTES:
            state.stopped = "torn"
            break
        length, kind = unpack(data, at)
        check = at + head + length
        if length > MAX_PAYLOAD_BYTES or check + CHECK_BYTES > total:
            state.stopped = "torn"
            break
        if digest(name + position(offset + at) + data[at:check]) != data[check : check + CHECK_BYTES]:
            state.stopped = "damaged"
            break
        start = at + head
        if kind == added:
            starts.append(start)
            ends.append(check)
        else:
            if kind == opened:
                segments.update([data[first : first + _SEGMENT_BYTES] for first in starts[looked:]])
                looked = len(starts)
            if kind == opened and data[start : start + _SEGMENT_BYTES] in segments:
                found.append(_columns(data, starts, ends))
                starts, ends, segments, looked = [], [], set(), 0
            payload = memoryview(data)[start:check]
            found.append(_uses(payload) if kind == RecordType.TOUCHED else decode_payload(kind, payload))
        at = check + CHECK_BYTES
    if starts:
        found.append(_columns(data, starts, ends))
    state.end = offset + at


def _columns(data: bytes, starts: list[int], ends: list[int]) -> AddedColumns:
    """Return the records whose payloads lie between `starts` and `ends`. Raises ValueError where one cannot be decoded."""
    first, end = np.array(starts), np.array(ends)
    if (end - first < _ROW.itemsize).any():
        raise ValueError("a record is too short")
    fixed = np.frombuffer(data, np.uint8)[first[:, None] + _LENGTHS]
    rows = fixed.view(_ROW)[:, 0]
    blocks = rows["blocks"].astype(np.int64)
    keys = first + _ROW.itemsize + blocks * PREFIX_BYTES  # where they end
    large = any(int(rows[name].max()) >= limit for name, limit in _LIMITS.items())
    if large or (keys > end).any() or (rows["header_bytes"] > rows["extent_bytes"]).any():
        raise ValueError("a record cannot be decoded, or not in columns")
    keys_end = keys.tolist()
    prefixes = b"".join([data[start + _ROW.itemsize : stop] for start, stop in zip(starts, keys_end, strict=True)])
    numbered: dict[bytes, int] = {}
    terms_of = [numbered.setdefault(data[a:b], len(numbered)) for a, b in zip(keys_end, ends, strict=True)]
    return AddedColumns(
        rows,
        np.frombuffer(prefixes, np.uint8).reshape(-1, PREFIX_BYTES),
        np.cumsum(blocks) - blocks,
        tuple(decode_fields(tail) for tail in numbered),
        np.array(terms_of, np.intp),
    )


def _uses(payload: memoryview) -> UsedColumns:
    rows = np.frombuffer(payload, _USE)
    if len(rows) and int(rows["used"].max()) >= USES:
        raise ValueError("a use counter that nobody can have reached")
    return UsedColumns(rows)


def _segment(row: np.void) -> SegmentName:
    return SegmentName(bytes(row["writer"]), int(row["sequence"]))
