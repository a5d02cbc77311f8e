"""What is in a segment that no journal speaks of: its extents' headers, read one after the other."""

from __future__ import annotations

import numpy as np

from headstart.block.extent import MAGIC, decode_header, header_bytes_of
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
_FRONT_BYTES = 64 << 10  # of an extent: nearly all headers


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
    """An extent is mostly followed by the next one, so only as much is read there as a header takes. Where none is, the next
    one is looked for in every OS page: a hole is there, or the inside of an extent whose header is gone."""
    found: list[ExtentAdded] = []
    offset, nbytes = header.header_bytes, _FRONT_BYTES
    while offset + ALIGNMENT <= size:
        window = _read(disk, handle, offset, min(nbytes, (size - offset) // ALIGNMENT * ALIGNMENT))
        added = None
        for at in _extents_in(window):
            added = _extent_at(disk, handle, header.segment, representation, offset + at, window[at:], size)
            if added is not None:
                break
        if added is None:
            offset, nbytes = offset + len(window), _WINDOW_BYTES
        else:
            found.append(added)
            offset, nbytes = added.extent.offset + added.extent_bytes, _FRONT_BYTES
    return found


def _extents_in(window: memoryview) -> list[int]:
    """Return where extents may begin."""
    pages = np.frombuffer(window, np.uint8).reshape(-1, ALIGNMENT)[:, : len(MAGIC)]
    places: list[int] = (np.flatnonzero((pages == np.frombuffer(MAGIC, np.uint8)).all(axis=1)) * ALIGNMENT).tolist()
    return places


def _extent_at(
    disk: Disk, handle: Handle, segment: SegmentName, representation: Representation, offset: int, data: memoryview, size: int
) -> ExtentAdded | None:
    """Return the extent at `offset`, where `data` lies, or None where there is none that lies wholly in the file."""
    try:
        header_bytes = header_bytes_of(data)
        if offset + header_bytes > size:
            return None
        if header_bytes > len(data):
            data = _read(disk, handle, offset, header_bytes)
        header = decode_header(data[:header_bytes], representation)
    except ExtentCorrupt:
        return None
    extent_bytes = header.layout(representation).extent_bytes
    if offset + extent_bytes > size:
        return None
    return ExtentAdded(
        ExtentName(segment, offset),
        extent_bytes,
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
