"""Checks of stored bytes: 16 bytes by a named algorithm, bound to what the bytes belong to. Pure.

A check is taken over representation ‖ key ‖ layer ‖ bytes, so right bytes in the wrong place fail like wrong bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from headstart.errors import ExtentCorrupt

CHECK_BYTES = 16
STATE_LAYER = 0xFFFF_FFFF  # stands for the layer in the check of the boundary state

# 2 is set aside for keyed BLAKE3, for media on which other writers are not trusted.
ALGORITHM_IDS = {"xxh3-128": 1}

Buffer = memoryview | bytes | bytearray | npt.NDArray[np.uint8]


def piece_check(*, algorithm: str, representation: bytes, key: bytes, layer: int, buffers: Sequence[Buffer]) -> bytes:
    """Return the 16-byte check of one piece whose bytes are `buffers` in order; `key` is that of the piece's last block.
    Raises ExtentCorrupt(reason="algorithm") for an algorithm that this version does not know.

    For the boundary state `layer` is STATE_LAYER and `key` that of the extent's last block."""
    if algorithm not in ALGORITHM_IDS:
        raise ExtentCorrupt(f"check algorithm {algorithm!r} is unknown to this version", reason="algorithm")
    check = xxhash.xxh3_128(representation + key + struct.pack("<I", layer))
    for buffer in buffers:
        check.update(flat(buffer))
    digest: bytes = check.digest()
    return digest


def count_right(
    checks: Sequence[bytes],
    *,
    algorithm: str,
    representation: bytes,
    keys: Sequence[bytes],
    layer: int,
    pieces: Iterable[Sequence[Buffer]],
) -> int:
    """Return how many pieces of a layer, from the first on, are what their checks say. `keys[i]`, `pieces[i]`: as `piece_check`
    takes them."""
    right = 0
    for want, key, buffers in zip(checks, keys, pieces, strict=True):
        found = piece_check(algorithm=algorithm, representation=representation, key=key, layer=layer, buffers=buffers)
        if found != want:
            break
        right += 1
    return right


def header_check(header: memoryview, *, at: int) -> bytes:
    """Return the check of a whole header, padding included, less the 16 bytes from `at` where the check itself stands."""
    check = xxhash.xxh3_128(header[:at])
    check.update(header[at + CHECK_BYTES :])
    digest: bytes = check.digest()
    return digest


def flat(buffer: Buffer) -> memoryview:
    """Return the bytes of a contiguous buffer in one row."""
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if not view.nbytes:
        return memoryview(b"")  # cast() refuses a shape with a zero in it
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
