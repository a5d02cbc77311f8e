"""What a journal says, and how it is laid down: one record for each change. Pure; `journal` does the I/O.

    record = u32 payload bytes ‖ u8 type ‖ payload ‖ u64 check

The check (xxh3-64) covers the journal's writer and generation and the record's offset in the file besides the record, so a
record that lies elsewhere than where it was written never passes. `docs/format.md`, section "Journals", is the specification.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import xxhash

from headstart.block.framing import frame, unframe
from headstart.block.layout import MAX_HEADER_BYTES

MAGIC = b"hsjournl"
VERSION = 1
WRITER_BYTES = 16
PREFIX_BYTES = 16  # of a block's key
SKIPPABLE = 0x80  # a reader that does not know such a type passes over it
MAX_PAYLOAD_BYTES = 16 << 20
HEADER_BYTES = 80
BOUNDARY_STATE = 1  # flag of an extent: its bytes end with a boundary state
_CLASS, _TENANT, _CHECK_KEY = 1, 2, 4  # tags of an extent's fields; 3 (session) is reserved
_U31, _U62 = 1 << 31, 1 << 62  # what numbers of a record are below, so that sums of them fit into i32 and i64
# What counts up is below these, far more than anybody counts in a life time: what is higher was never counted.
SEQUENCES = GENERATIONS = 1 << 30
USES = 1 << 56
_MAX_MS = 1 << 53


def milliseconds(seconds: float) -> int:
    """Return a wall clock's time as files hold it. A clock that is off, even not a number, gives a number that can be read."""
    return int(min(seconds * 1000, _MAX_MS)) if seconds > 0 else 0


def plausible_ms(created_ms: int) -> int:
    """Return a time that somebody else wrote as files of this version hold it."""
    return min(created_ms, _MAX_MS)


class RecordType(IntEnum):
    REPRESENTATION = 1
    SEGMENT_OPENED = 2
    SEGMENT_SEALED = 3
    ADDED = 4
    TOUCHED = 5 | SKIPPABLE
    CLASS_RAISED = 6 | SKIPPABLE
    PINNED = 7 | SKIPPABLE
    REMOVED = 9
    QUARANTINED = 10
    SNAPSHOT = 11
    LEFT = 9 | SKIPPABLE
    USES_TIMED = 10 | SKIPPABLE


class SegmentName(NamedTuple):
    """Never reused. `writer` is 16 random bytes."""

    writer: bytes
    sequence: int

    @property
    def file(self) -> str:
        """The name of its file, folders left out."""
        return f"{self.writer.hex()}-{self.sequence:08x}.seg"


class ExtentName(NamedTuple):
    """Never reused: a segment only grows."""

    segment: SegmentName
    offset: int


@dataclass(frozen=True, slots=True)
class RepresentationDeclared:
    encoded: bytes


@dataclass(frozen=True, slots=True)
class SegmentOpened:
    """`representation` is the digest that all extents of the segment have; it was declared earlier in the same journal."""

    segment: SegmentName
    header_bytes: int
    capacity_bytes: int
    created_ms: int
    representation: bytes


@dataclass(frozen=True, slots=True)
class SegmentSealed:
    """Nothing will be added to the segment any more; it ends at `end`."""

    segment: SegmentName
    end: int


@dataclass(frozen=True, slots=True)
class ExtentAdded:
    """`parent`: the first 16 bytes of the key before the first block, or of the root. `prefixes`: those of each block's key,
    joined. `last_used`: the use counter, not a time. `fields`: framed fields that this version does not know, kept as they
    are. `tenant`: who wrote it first, "" where there are none. `check_key`: which key its checks were made with, 0: none; it is
    a hint, what counts stands in its header."""

    extent: ExtentName
    extent_bytes: int
    header_bytes: int
    created_ms: int
    last_used: int
    retention: str
    parent: bytes
    prefixes: bytes
    flags: int = 0
    fields: bytes = b""
    tenant: str = ""
    check_key: int = 0


@dataclass(frozen=True, slots=True)
class Touched:
    """Uses since the last such record: each extent with the counter's value at its use."""

    uses: tuple[tuple[ExtentName, int], ...]


class Raise(NamedTuple):
    """One extent's promise: not to go before `until_ms` while anything else may, and the class that it was given for that."""

    extent: ExtentName
    until_ms: int
    retention: str


@dataclass(frozen=True, slots=True)
class ClassRaised:
    """Promises since the last such record. `time_ms`: what the clock said that reckoned them; of all promises that an extent
    ever got, the latest end counts."""

    time_ms: int
    raises: tuple[Raise, ...]


class Pin(NamedTuple):
    """`until_ms`: the deadline, 0: unpinned. `counter`: the use counter's value for it; the highest is what counts."""

    extent: ExtentName
    until_ms: int
    counter: int


@dataclass(frozen=True, slots=True)
class Pinned:
    pins: tuple[Pin, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Final, whichever journal says it and in whatever order journals are read. `extents`: names with their blocks' key
    prefixes (empty where they no longer matter). `quarantined`: the bytes were found to be wrong."""

    time_ms: int
    reason: str
    extents: tuple[tuple[ExtentName, bytes], ...]
    quarantined: bool = False


def removed_records(
    time_ms: int, reason: str, extents: Sequence[tuple[ExtentName, bytes]], *, quarantined: bool = False
) -> list[Removed]:
    """Return the removal of any number of extents as records that are not too large."""
    records: list[Removed] = []
    batch: list[tuple[ExtentName, bytes]] = []
    nbytes = 0
    for extent in extents:
        batch.append(extent)
        nbytes += _GONE.size + len(extent[1])
        if nbytes > MAX_PAYLOAD_BYTES // 4:
            records.append(Removed(time_ms, reason, tuple(batch), quarantined))
            batch, nbytes = [], 0
    if batch:
        records.append(Removed(time_ms, reason, tuple(batch), quarantined))
    return records


@dataclass(frozen=True, slots=True)
class Snapshot:
    """First record of a generation: what follows up to now stands for all earlier generations of this writer."""

    counter: int
    next_sequence: int


@dataclass(frozen=True, slots=True)
class Left:
    """The writer has closed its journal in a pool; nothing follows, and nobody need wait for it."""


@dataclass(frozen=True, slots=True)
class UsesTimed:
    """When the counter of uses stood where: pairs of its value and milliseconds since 1970."""

    notes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """A record that says nothing to this version, but may to a later one: it is passed over, and outlives the generation."""

    kind: int
    payload: bytes


Record = (
    RepresentationDeclared
    | SegmentOpened
    | SegmentSealed
    | ExtentAdded
    | Touched
    | ClassRaised
    | Pinned
    | Removed
    | Snapshot
    | Left
    | UsesTimed
    | Unknown
)


def encode_journal_header(writer: bytes, generation: int, created_ms: int, *, host: bytes) -> bytes:
    """Return the header. `host`: 16 bytes that name the machine and its boot, zeros where it has no such name."""
    body = _JOURNAL_HEADER.pack(MAGIC, VERSION, generation, writer, host, created_ms, 0)
    return body + xxhash.xxh3_128_digest(body)


def decode_journal_header(data: bytes | memoryview) -> tuple[bytes, int, int]:
    """Return (writer, generation, version); of another version, only these are sure. Raises ValueError for what is no journal
    header."""
    body, check = bytes(data[: _JOURNAL_HEADER.size]), bytes(data[_JOURNAL_HEADER.size : HEADER_BYTES])
    if len(check) != 16 or xxhash.xxh3_128_digest(body) != check:
        raise ValueError("the header's check does not hold")
    magic, version, generation, writer, _host, _created, reserved = _JOURNAL_HEADER.unpack(body)
    if magic != MAGIC:
        raise ValueError("no journal")
    if version == VERSION and reserved:
        raise ValueError("reserved bytes of the journal are not zero")
    return writer, generation, version


def encode_record(record: Record, *, writer: bytes, generation: int, offset: int) -> bytes:
    """Return the record as it stands at byte `offset` of the writer's journal."""
    kind, payload = _encode(record)
    assert len(payload) <= MAX_PAYLOAD_BYTES, "a reader takes such a record for damage"
    body = RECORD_PREFIX.pack(len(payload), kind) + payload
    return body + _check(body, writer, generation, offset)


def encoded_bytes(record: Record) -> int:
    """Return how long a record is in a journal."""
    match record:
        case ExtentAdded():  # those that are many are reckoned, not encoded
            payload = ADDED.size + len(record.prefixes) + len(_fields(record))
        case Removed(_, reason, extents):
            payload = _REMOVED.size + len(reason.encode()) + sum(_GONE.size + len(prefixes) for _, prefixes in extents)
        case _:
            payload = len(_encode(record)[1])
    return RECORD_PREFIX.size + payload + CHECK_BYTES


@dataclass(slots=True)
class Decoded:
    """`end`: offset behind the last good record. `stopped`: why nothing behind it is read ("" at a clean end)."""

    end: int
    stopped: str = ""


def decode_records(data: memoryview, *, writer: bytes, generation: int, offset: int, state: Decoded) -> Iterator[Record]:
    """Yield the records in `data`, which lies at byte `offset` of a journal; `state` says where and why it stopped.

    A record that is cut, damaged or of an unknown type that may not be passed over ends the journal there."""
    at = 0
    state.end, state.stopped = offset, ""
    while at < len(data):
        if len(data) - at < RECORD_PREFIX.size + CHECK_BYTES:
            state.stopped = "torn"
            return
        length, kind = RECORD_PREFIX.unpack_from(data, at)
        end = at + RECORD_PREFIX.size + length + CHECK_BYTES
        if length > MAX_PAYLOAD_BYTES or end > len(data):
            state.stopped = "torn"
            return
        body = data[at : end - CHECK_BYTES]
        if _check(body, writer, generation, offset + at) != data[end - CHECK_BYTES : end]:
            state.stopped = "damaged"
            return
        try:
            record = decode_payload(kind, body[RECORD_PREFIX.size :])
        except (ValueError, struct.error, UnicodeDecodeError):
            state.stopped = "unreadable"
            return
        yield record
        at = end
        state.end = offset + at


def record_bytes(data: bytes | memoryview) -> int:
    """Return how long the record is that `data` begins with, by its own word; 0 where none can begin like that."""
    if len(data) < RECORD_PREFIX.size:
        return 0
    length, _ = RECORD_PREFIX.unpack_from(data)
    return RECORD_PREFIX.size + int(length) + CHECK_BYTES if length <= MAX_PAYLOAD_BYTES else 0


_JOURNAL_HEADER = struct.Struct("<8sII16s16sQQ")
RECORD_PREFIX = struct.Struct("<IB")
CHECK_BYTES = 8
_SEGMENT = struct.Struct("<16sI")
_EXTENT = struct.Struct("<16sIQ")
_OPENED = struct.Struct("<16sIIQQ32s")
_SEALED = struct.Struct("<16sIQ")
ADDED = struct.Struct("<16sIQQIQQII16s")
_USE = struct.Struct("<16sIQQ")
_RAISED = struct.Struct("<16sIQQB")
_TIME = struct.Struct("<Q")
_PIN = struct.Struct("<16sIQQQ")
_REMOVED = struct.Struct("<QIB")
_GONE = struct.Struct("<16sIQI")
_SNAPSHOT = struct.Struct("<QI")
_USES_TIMED = struct.Struct("<QQ")


def _check(body: bytes | memoryview, writer: bytes, generation: int, offset: int) -> bytes:
    digest = xxhash.xxh3_64(struct.pack("<16sIQ", writer, generation, offset))
    digest.update(body)
    return digest.digest()


def _encode(record: Record) -> tuple[int, bytes]:
    match record:
        case RepresentationDeclared(encoded):
            return RecordType.REPRESENTATION, encoded
        case SegmentOpened(segment, header_bytes, capacity_bytes, created_ms, representation):
            return RecordType.SEGMENT_OPENED, _OPENED.pack(*segment, header_bytes, capacity_bytes, created_ms, representation)
        case SegmentSealed(segment, end):
            return RecordType.SEGMENT_SEALED, _SEALED.pack(*segment, end)
        case ExtentAdded():
            return RecordType.ADDED, _encode_added(record)
        case Touched(uses):
            return RecordType.TOUCHED, b"".join(_USE.pack(*extent.segment, extent.offset, used) for extent, used in uses)
        case ClassRaised(time_ms, raises):
            words = [raised.retention.encode() for raised in raises]
            heads = [_RAISED.pack(*e.segment, e.offset, ms, len(word)) for (e, ms, _), word in zip(raises, words, strict=True)]
            return RecordType.CLASS_RAISED, _TIME.pack(time_ms) + b"".join(map(bytes.__add__, heads, words))
        case Pinned(pins):
            return RecordType.PINNED, b"".join(_PIN.pack(*e.segment, e.offset, ms, counter) for e, ms, counter in pins)
        case Removed(time_ms, reason, extents, quarantined):
            word = reason.encode()
            parts = [_REMOVED.pack(time_ms, len(extents), len(word)), word]
            for extent, prefixes in extents:
                parts += [_GONE.pack(*extent.segment, extent.offset, len(prefixes) // PREFIX_BYTES), prefixes]
            return (RecordType.QUARANTINED if quarantined else RecordType.REMOVED), b"".join(parts)
        case Snapshot(counter, next_sequence):
            return RecordType.SNAPSHOT, _SNAPSHOT.pack(counter, next_sequence)
        case Left():
            return RecordType.LEFT, b""
        case UsesTimed(notes):
            return RecordType.USES_TIMED, b"".join(_USES_TIMED.pack(*note) for note in notes)
        case Unknown(kind, payload):
            return kind, payload


def _encode_added(record: ExtentAdded) -> bytes:
    fixed = ADDED.pack(
        *record.extent.segment,
        record.extent.offset,
        record.extent_bytes,
        record.header_bytes,
        record.created_ms,
        record.last_used,
        record.flags,
        len(record.prefixes) // PREFIX_BYTES,
        record.parent,
    )
    return fixed + record.prefixes + _fields(record)


def _fields(record: ExtentAdded) -> bytes:
    tenant = frame(_TENANT, record.tenant.encode()) if record.tenant else b""
    check_key = frame(_CHECK_KEY, struct.pack("<I", record.check_key)) if record.check_key else b""
    return frame(_CLASS, record.retention.encode()) + tenant + check_key + record.fields


def decode_payload(kind: int, payload: memoryview) -> Record:
    """Return what stands between a record's type and its check. Raises ValueError or struct.error."""
    match kind:
        case RecordType.REPRESENTATION:
            return RepresentationDeclared(bytes(payload))
        case RecordType.SEGMENT_OPENED:
            writer, sequence, *rest = _OPENED.unpack(payload)
            _require_below(SEQUENCES, sequence)
            _require_below(_U31, rest[0])
            _require_below(_U62, *rest[1:3])
            return SegmentOpened(SegmentName(writer, sequence), *rest)
        case RecordType.SEGMENT_SEALED:
            writer, sequence, end = _SEALED.unpack(payload)
            _require_below(_U62, end)
            return SegmentSealed(SegmentName(writer, sequence), end)
        case RecordType.ADDED:
            return _decode_added(payload)
        case RecordType.TOUCHED:
            uses = list(_USE.iter_unpack(payload))
            _require_below(USES, *(used for *_, used in uses))
            return Touched(tuple((ExtentName(SegmentName(w, s), offset), used) for w, s, offset, used in uses))
        case RecordType.CLASS_RAISED:
            return _decode_raised(payload)
        case RecordType.PINNED:
            pins = list(_PIN.iter_unpack(payload))
            _require_below(_U62, *(number for _, _, offset, until, _ in pins for number in (offset, until)))
            _require_below(USES, *(counter for *_, counter in pins))
            return Pinned(tuple(Pin(ExtentName(SegmentName(w, s), offset), ms, counter) for w, s, offset, ms, counter in pins))
        case RecordType.REMOVED | RecordType.QUARANTINED:
            return _decode_removed(payload, quarantined=kind == RecordType.QUARANTINED)
        case RecordType.SNAPSHOT:
            counter, next_sequence = _SNAPSHOT.unpack(payload)
            _require_below(USES, counter)
            _require_below(SEQUENCES, next_sequence)
            return Snapshot(counter, next_sequence)
        case RecordType.LEFT:
            return Left()
        case RecordType.USES_TIMED:
            notes = tuple(_USES_TIMED.iter_unpack(payload))
            _require_below(USES, *(counter for counter, _ in notes))
            _require_below(_U62, *(time_ms for _, time_ms in notes))
            return UsesTimed(notes)
        case _ if kind & SKIPPABLE:
            return Unknown(kind, bytes(payload))
        case _:
            raise ValueError(f"record type {kind}")


def _decode_added(payload: memoryview) -> ExtentAdded:
    writer, sequence, offset, nbytes, header, created, used, flags, blocks, parent = ADDED.unpack_from(payload)
    _require_below(min(MAX_HEADER_BYTES, nbytes) + 1, header)  # memory is taken for it before anything is verified
    _require_below(_U62, offset, nbytes, created)
    _require_below(USES, used)
    end = ADDED.size + blocks * PREFIX_BYTES
    if end > len(payload):
        raise ValueError("lengths do not add up")
    retention, tenant, check_key, fields = decode_fields(bytes(payload[end:]))
    return ExtentAdded(
        ExtentName(SegmentName(writer, sequence), offset),
        nbytes,
        header,
        created,
        used,
        retention,
        parent,
        bytes(payload[ADDED.size : end]),
        flags,
        fields,
        tenant,
        check_key,
    )


def decode_fields(data: bytes) -> tuple[str, str, int, bytes]:
    """Return (retention class, tenant, check key, fields that this version does not know) of an extent. Raises ValueError,
    struct.error."""
    fields = unframe(data)
    if not fields or fields[0][0] != _CLASS:
        raise ValueError("an extent without a class")
    retention, tenant, check_key = fields.pop(0)[1].decode(), "", 0
    if fields and fields[0][0] == _TENANT:
        tenant = fields.pop(0)[1].decode()
    if fields and fields[0][0] == _CHECK_KEY:
        (check_key,) = struct.unpack("<I", fields.pop(0)[1])
    return retention, tenant, check_key, b"".join(frame(*field) for field in fields)


def _require_below(limit: int, *numbers: int) -> None:
    if max(numbers, default=0) >= limit:
        raise ValueError("a number that no extent or file can have")


def _decode_raised(payload: memoryview) -> ClassRaised:
    (time_ms,) = _TIME.unpack_from(payload)
    _require_below(_U62, time_ms)
    at, raises = _TIME.size, []
    while at < len(payload):
        writer, sequence, offset, until_ms, length = _RAISED.unpack_from(payload, at)
        _require_below(_U62, offset, until_ms)
        at += _RAISED.size + length
        if at > len(payload):
            raise ValueError("lengths do not add up")
        word = bytes(payload[at - length : at]).decode()
        raises.append(Raise(ExtentName(SegmentName(writer, sequence), offset), until_ms, word))
    return ClassRaised(time_ms, tuple(raises))


def _decode_removed(payload: memoryview, *, quarantined: bool) -> Removed:
    data = bytes(payload)
    time_ms, count, word = _REMOVED.unpack_from(data)
    _require_below(_U62, time_ms)
    at = _REMOVED.size + word
    reason = data[_REMOVED.size : at].decode()
    extents = []
    segment = SegmentName(b"", 0)  # one object for all extents of a segment that stand side by side: there may be very many
    for _ in range(count):
        writer, sequence, offset, blocks = _GONE.unpack_from(data, at)
        if offset >= _U62:
            raise ValueError("a number that no extent or file can have")
        first = at + _GONE.size
        at = first + blocks * PREFIX_BYTES
        if at > len(data):
            raise ValueError("lengths do not add up")
        if sequence != segment.sequence or writer != segment.writer:
            segment = SegmentName(writer, sequence)
        extents.append((ExtentName(segment, offset), data[first:at]))
    if at != len(data):
        raise ValueError("lengths do not add up")
    return Removed(time_ms, reason, tuple(extents), quarantined)
