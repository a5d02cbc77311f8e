"""Tagged, length-framed fields: `u8 tag, u32 length (little endian), bytes`. Different lists of fields give different bytes."""

from __future__ import annotations

import struct

_HEAD = struct.Struct("<BI")


def frame(tag: int, data: bytes) -> bytes:
    """Return one field.

    >>> frame(3, b"ab").hex()
    '03020000006162'
    """
    return _HEAD.pack(tag, len(data)) + data


def unframe(data: bytes) -> list[tuple[int, bytes]]:
    """Return (tag, bytes) of every field in order. Raises ValueError when the last field is cut short."""
    fields: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise ValueError(f"a field's head is cut short at byte {at} of {len(data)}")
        tag, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if length > len(data) - at:
            raise ValueError(f"field {tag} promises {length} bytes at byte {at} of {len(data)}")
        fields.append((tag, data[at : at + length]))
        at += length
    return fields
