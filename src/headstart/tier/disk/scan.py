"""What is in a segment that no journal speaks of: its extents' headers, read one after the other."""

from __future__ import annotations

from headstart.block.extent import decode_header, header_bytes_of
from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt
from headstart.tier.disk.door import Disk, Handle
from headstart.tier.disk.records import (
    BOUNDARY_STATE,
    PREFIX_BYTES,
    ExtentAdded,
    ExtentName,
    Record,
    RepresentationDeclared,
    SegmentName,
    SegmentOpened,
    SegmentSealed,
    plausible_ms,
)
from headstart.tier.disk.segment import ALIGNMENT, SegmentHeader, decode_segment_header

_WINDOW_BYTES = 1 << 20
_FRONT_BYTES = 32  # of an extent: enough to know how long its header is


def scan_segment(disk: Disk, handle: Handle, name: SegmentName) -> list[Record]:
    """Return the records that a journal would hold of this segment, sealed. Pieces are not verified here: whoever reads them
    does. Raises ExtentCorrupt where the segment's own header cannot be used, OSError where reading fails."""
    size = disk.facts(handle).size  # may be anything
    header = decode_segment_header(_read(disk, handle, 0, min(size, _WINDOW_BYTES)))
    if header.segment != name:
        raise ExtentCorrupt("a segment file is not the one that its name says", reason="segment-name")
    representation = Representation.decode(header.representation)
    if representation.digest != header.digest:
        raise ExtentCorrupt("a segment's representation is not what its header says", reason="representation")
    extents = _scan_extents(disk, handle, header, representation, min(size, header.capacity_bytes))
    end = max([header.header_bytes, *(e.extent.offset + e.extent_bytes for e in extents)])
    created_ms = plausible_ms(header.created_ms)
    opened = SegmentOpened(name, header.header_bytes, min(header.capacity_bytes, end), created_ms, header.digest)
    return [RepresentationDeclared(header.representation), opened, *extents, SegmentSealed(name, end)]


def _scan_extents(
    disk: Disk, handle: Handle, header: SegmentHeader, representation: Representation, size: int
) -> list[ExtentAdded]:
    found: list[ExtentAdded] = []
    offset = header.header_bytes
    window, start = memoryview(b""), 0
    while offset + ALIGNMENT <= size:
        if offset + ALIGNMENT > start + len(window):
            start, window = offset, _read(disk, handle, offset, min(_WINDOW_BYTES, size - offset))
        added = None
        try:
            nbytes = header_bytes_of(window[offset - start : offset - start + _FRONT_BYTES])
            if offset + nbytes <= size:
                added = _extent_at(disk, handle, header.segment, representation, offset, nbytes)
        except ExtentCorrupt:
            pass  # a hole, or the inside of an extent whose header is gone: look at the next OS page
        if added is None or offset + added.extent_bytes > size:
            offset += ALIGNMENT
        else:
            found.append(added)
            offset += added.extent_bytes
    return found


def _extent_at(
    disk: Disk, handle: Handle, segment: SegmentName, representation: Representation, offset: int, header_bytes: int
) -> ExtentAdded:
    header = decode_header(_read(disk, handle, offset, header_bytes), representation)
    return ExtentAdded(
        ExtentName(segment, offset),
        header.layout(representation).extent_bytes,
        header_bytes,
        plausible_ms(header.created_ms),
        0,  # when it was used last is not known: it gives way first
        header.retention,
        header.parent[:PREFIX_BYTES],
        b"".join(key[:PREFIX_BYTES] for key in header.keys),
        BOUNDARY_STATE if header.state_bytes else 0,
    )


def _read(disk: Disk, handle: Handle, offset: int, nbytes: int) -> memoryview:
    data = memoryview(bytearray(nbytes))
    disk.read(handle, [data], offset)
    return data
