"""Checks of stored bytes: 16 bytes by a named algorithm, bound to what the bytes belong to. Pure.

A check is taken over representation ‖ key ‖ layer ‖ bytes, so right bytes in the wrong place fail like wrong bytes. XXH3 finds
accidents. Where others may write whom nobody trusts, checks are made with a key (BLAKE3): who does not have it can make none.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from headstart.errors import MissingExtra

CHECK_BYTES = 16
STATE_LAYER = 0xFFFF_FFFF  # stands for the layer in the check of the boundary state

CHECK_KEY_BYTES = 32
_KEEPS_LOCK_BYTES = 1 << 16  # XXHASH_GIL_MINSIZE
_SLICED_BYTES = 1 << 18  # some 25 µs; others need not wait longer for the interpreter

Buffer = memoryview | bytes | bytearray | npt.NDArray[np.uint8]


class Hasher(Protocol):
    def update(self, data: memoryview, /) -> object: ...
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How checks are made. `number` and `key_id` stand for it in headers; `key_id`: which key, 0 where there is none. `begin`
    starts a check over some first bytes; its digest has 16."""

    name: str
    number: int
    key_id: int
    begin: Callable[[bytes], Hasher] = field(repr=False, compare=False)


XXH3 = Algorithm("xxh3-128", 1, 0, xxhash.xxh3_128)
_KEYED = "blake3-keyed-128", 2
_KEY_NAME = b"headstart check key 1"


def keyed(secret: bytes) -> Algorithm:
    """Return the algorithm of a key of 32 bytes. Raises MissingExtra where the library is not installed."""
    try:
        blake3 = importlib.import_module("blake3").blake3
    except ImportError as error:
        raise MissingExtra("checks with a key need BLAKE3: pip install 'headstart[keyed]'", extra="keyed") from error
    if len(secret) != CHECK_KEY_BYTES:
        raise ValueError(f"a key of checks has {CHECK_KEY_BYTES} bytes, not {len(secret)}")
    (key_id,) = struct.unpack("<I", blake3(_KEY_NAME, key=secret).digest(4))
    return Algorithm(*_KEYED, key_id or 1, lambda first: _Keyed(blake3(first, key=secret)))


class _Keyed:
    """The first 16 bytes of what BLAKE3 gives."""

    __slots__ = ("_digest", "update")

    def __init__(self, hasher: Any) -> None:
        self.update = hasher.update
        self._digest = hasher.digest

    def digest(self) -> bytes:
        digest: bytes = self._digest(CHECK_BYTES)
        return digest


@dataclass(frozen=True, slots=True)
class Sealing:
    """What a tier believes: checks by any of `algorithms`. What is written there gets those of the first."""

    algorithms: tuple[Algorithm, ...] = (XXH3,)

    @property
    def writes(self) -> Algorithm:
        return self.algorithms[0]

    @property
    def key_ids(self) -> frozenset[int]:
        return frozenset(algorithm.key_id for algorithm in self.algorithms)

    @property
    def has_key(self) -> bool:
        """Whether nothing is believed that was made without a key."""
        return XXH3 not in self.algorithms

    def at_the_door(self) -> Sealing:
        """Return what a writer may bring: as it lies here, or without a key, as everything is made in this process."""
        return Sealing((*self.algorithms, XXH3)) if self.has_key else self

    def find(self, number: int, key_id: int) -> Algorithm | None:
        """Return the algorithm that a header names, None where that is not believed."""
        for algorithm in self.algorithms:
            if algorithm.number == number and (algorithm.key_id == key_id or algorithm is XXH3):
                return algorithm
        return None


PLAIN = Sealing()


def is_keyed(number: int) -> bool:
    """Whether a header names an algorithm with a key."""
    return number == _KEYED[1]


def piece_check(*, algorithm: Algorithm, representation: bytes, key: bytes, layer: int, buffers: Sequence[Buffer]) -> bytes:
    """Return the 16-byte check of one piece whose bytes are `buffers` in order; `key` is that of the piece's last block.

    For the boundary state `layer` is STATE_LAYER and `key` that of the extent's last block."""
    return _check(algorithm, representation + key + struct.pack("<I", layer), map(flat, buffers))


def count_right(
    checks: bytes,
    *,
    algorithm: Algorithm,
    representation: bytes,
    keys: Sequence[bytes],
    layer: int,
    pieces: Iterable[Iterable[memoryview]],
) -> int:
    """Return how many pieces of a layer, from the first on, are what their checks (one behind the other) say; otherwise as
    `piece_check`, of flat buffers.

    Buffers of some 100 KB are hashed in parts for which xxhash keeps the interpreter's lock. It gives it away for larger ones,
    which take 10 µs: with sixteen threads that read, each then cost two switches of threads, and more time than hashing."""
    number = struct.pack("<I", layer)
    at = 0
    for key, buffers in zip(keys, pieces, strict=True):
        check = algorithm.begin(representation + key + number)
        for buffer in buffers:
            if algorithm is XXH3 and _KEEPS_LOCK_BYTES < buffer.nbytes <= _SLICED_BYTES:
                for low in range(0, buffer.nbytes, _KEEPS_LOCK_BYTES):
                    check.update(buffer[low : low + _KEEPS_LOCK_BYTES])
            else:
                check.update(buffer)
        if check.digest() != checks[at : at + CHECK_BYTES]:
            break
        at += CHECK_BYTES
    return at // CHECK_BYTES


def header_check(header: memoryview, *, at: int, algorithm: Algorithm) -> bytes:
    """Return the check of a whole header, padding included, less the 16 bytes from `at` where the check itself stands."""
    return _check(algorithm, bytes(header[:at]), [header[at + CHECK_BYTES :]])


def flat(buffer: Buffer) -> memoryview:
    """Return the bytes of a contiguous buffer in one row."""
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if not view.nbytes:
        return memoryview(b"")  # cast() refuses a shape with a zero in it
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _check(algorithm: Algorithm, prefix: bytes, buffers: Iterable[memoryview]) -> bytes:
    check = algorithm.begin(prefix)
    for buffer in buffers:
        check.update(buffer)
    return check.digest()
