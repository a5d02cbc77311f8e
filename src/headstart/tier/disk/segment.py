"""A segment file: one header, then extents of one representation, appended 4 KiB-aligned by one writer. Pure.

The header carries the encoded representation, so that a segment whose journals are lost can still be read. `docs/format.md`,
section "Segments", is the specification.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt
from headstart.tier.disk.records import SegmentName

MAGIC = b"hssegmnt"
VERSION = 1
ALIGNMENT = 4096
_MIN_BYTES, _MAX_BYTES = 8 << 20, 1 << 30
_MIN_STATE_BYTES = 256 << 20  # a boundary state may be larger than hundreds of blocks, and lies in one segment with some
_FIXED = struct.Struct("<8sII16sIIQQ32sII")
_CHECK_BYTES = 16


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """`header_bytes` is where the first extent begins; `representation` is encoded."""

    segment: SegmentName
    capacity_bytes: int
    created_ms: int
    representation: bytes
    digest: bytes  # of the representation

    @property
    def header_bytes(self) -> int:
        used = _FIXED.size + _CHECK_BYTES + len(self.representation)
        return -(-used // ALIGNMENT) * ALIGNMENT


def segment_capacity(representation: Representation, *, capacity_bytes: int) -> int:
    """Return the size of segments: capacity/256 between 8 MiB (256 MiB where there are boundary states) and 1 GiB, at least 16
    blocks, at most capacity/4."""
    least = _MIN_BYTES if representation.state == "none" else _MIN_STATE_BYTES
    size = min(max(capacity_bytes // 256, least), _MAX_BYTES)
    per_token = representation.bytes_per_token
    if per_token is not None:
        size = max(size, 16 * 64 * per_token + 64 * ALIGNMENT)  # 16 blocks and room for their header and padding
    return min(size, capacity_bytes // 4) // ALIGNMENT * ALIGNMENT


def encode_segment_header(header: SegmentHeader) -> bytes:
    """Return the header, padded to its `header_bytes`."""
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        header.header_bytes,
        header.segment.writer,
        header.segment.sequence,
        0,
        header.capacity_bytes,
        header.created_ms,
        header.digest,
        len(header.representation),
        0,
    )
    check = xxhash.xxh3_128_digest(fixed + header.representation)
    return (fixed + check + header.representation).ljust(header.header_bytes, b"\0")


def decode_segment_header(data: bytes | memoryview) -> SegmentHeader:
    """Return the header in `data`. Raises ExtentCorrupt(reason=…): "truncated", "magic", "header-check", "version" (only where
    the check holds: what is damaged is no later version), "fields"."""
    if len(data) < _FIXED.size + _CHECK_BYTES:
        raise _corrupt("truncated", "it is shorter than a header")
    fixed = bytes(data[: _FIXED.size])
    magic, version, header_bytes, writer, sequence, zero, capacity, created, digest, length, zero_too = _FIXED.unpack(fixed)
    if magic != MAGIC:
        raise _corrupt("magic", "it does not begin like a segment")
    start = _FIXED.size + _CHECK_BYTES
    representation = bytes(data[start : start + length])
    if len(representation) != length:
        raise _corrupt("truncated", "its header is cut")
    if xxhash.xxh3_128_digest(fixed + representation) != bytes(data[_FIXED.size : start]):
        raise _corrupt("header-check", "its header's check does not hold")
    if version != VERSION:
        raise _corrupt("version", f"it has version {version}, this headstart reads {VERSION}")
    if zero or zero_too:
        raise _corrupt("fields", "reserved bytes of its header are not zero")
    header = SegmentHeader(SegmentName(writer, sequence), capacity, created, representation, digest)
    if header.header_bytes != header_bytes:
        raise _corrupt("fields", "its header's length is wrong")
    return header


def _corrupt(reason: str, why: str) -> ExtentCorrupt:
    return ExtentCorrupt(f"a segment file cannot be used: {why}", reason=reason)
