"""Checks of stored bytes: 16 bytes by a named algorithm, bound to what the bytes belong to. Pure.

A check is taken over representation ‖ key ‖ layer ‖ bytes, so right bytes in the wrong place fail like wrong bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from headstart.errors import ExtentCorrupt

CHECK_BYTES = 16
STATE_LAYER = 0xFFFF_FFFF  # stands for the layer in the check of the boundary state

# 2 is set aside for keyed BLAKE3, for media on which other writers are not trusted.
ALGORITHM_IDS = {"xxh3-128": 1}

_KEEPS_LOCK_BYTES = 1 << 16  # XXHASH_GIL_MINSIZE
_SLICED_BYTES = 1 << 18  # some 25 µs; others need not wait longer for the interpreter

Buffer = memoryview | bytes | bytearray | npt.NDArray[np.uint8]


def piece_check(*, algorithm: str, representation: bytes, key: bytes, layer: int, buffers: Sequence[Buffer]) -> bytes:
    """Return the 16-byte check of one piece whose bytes are `buffers` in order; `key` is that of the piece's last block.
    Raises ExtentCorrupt(reason="algorithm") for an algorithm that this version does not know.

    For the boundary state `layer` is STATE_LAYER and `key` that of the extent's last block."""
    _require_known(algorithm)
    return _check(representation + key + struct.pack("<I", layer), map(flat, buffers))


def count_right(
    checks: bytes,
    *,
    algorithm: str,
    representation: bytes,
    keys: Sequence[bytes],
    layer: int,
    pieces: Iterable[Iterable[memoryview]],
) -> int:
    """Return how many pieces of a layer, from the first on, are what their checks (one behind the other) say; otherwise as
    `piece_check`, of flat buffers."""
    _require_known(algorithm)
    number = struct.pack("<I", layer)
    at = 0
    for key, buffers in zip(keys, pieces, strict=True):
        if _check(representation + key + number, _in_slices(buffers)) != checks[at : at + CHECK_BYTES]:
            break
        at += CHECK_BYTES
    return at // CHECK_BYTES


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


def _require_known(algorithm: str) -> None:
    if algorithm not in ALGORITHM_IDS:
        raise ExtentCorrupt(f"check algorithm {algorithm!r} is unknown to this version", reason="algorithm")


def _in_slices(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield buffers of some 100 KB in parts for which xxhash keeps the interpreter's lock. It gives it away for larger ones,
    which take 10 µs: with sixteen threads that read, each then cost two switches of threads, and more time than hashing."""
    for buffer in buffers:
        if _KEEPS_LOCK_BYTES < buffer.nbytes <= _SLICED_BYTES:
            yield from (buffer[at : at + _KEEPS_LOCK_BYTES] for at in range(0, buffer.nbytes, _KEEPS_LOCK_BYTES))
        else:
            yield buffer


def _check(prefix: bytes, buffers: Iterable[memoryview]) -> bytes:
    check = xxhash.xxh3_128(prefix)
    for buffer in buffers:
        check.update(buffer)
    digest: bytes = check.digest()
    return digest
