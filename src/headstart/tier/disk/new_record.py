"""The record of an extent that is about to be added, the same for a disk and for a pool."""

from __future__ import annotations

from collections.abc import Callable

from headstart.block.extent import ExtentHeader
from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt
from headstart.tier.base import Terms
from headstart.tier.disk.records import BOUNDARY_STATE, PREFIX_BYTES, ExtentAdded, ExtentName, SegmentName, plausible_ms

UNPLACED = ExtentName(SegmentName(b"", 0), 0)


def record_of(
    image: memoryview, header: ExtentHeader, representation: Representation, terms: Terms, *, steady_ms: Callable[[int], int]
) -> ExtentAdded:
    """Return the record, of no place yet. Raises ExtentCorrupt where the image is not as long as its header says."""
    layout = header.layout(representation)
    if image.nbytes != layout.extent_bytes:
        raise ExtentCorrupt(
            f"an image of {image.nbytes} bytes was given for an extent of {layout.extent_bytes}", reason="truncated"
        )
    return ExtentAdded(
        UNPLACED,
        image.nbytes,
        layout.header_bytes,
        steady_ms(plausible_ms(header.created_ms)),
        0,
        terms.retention,
        header.parent[:PREFIX_BYTES],
        b"".join(key[:PREFIX_BYTES] for key in header.keys),
        BOUNDARY_STATE if header.state_bytes else 0,
        tenant=terms.tenant,
        check_key=header.algorithm.key_id,
    )


def require_short(word: str) -> None:
    """Raise ValueError for a reason or retention class that no record can hold."""
    if len(word.encode()) > 255:
        raise ValueError(f"a reason or retention class has at most 255 bytes, not {len(word.encode())}")
