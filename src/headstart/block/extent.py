"""A run of consecutive blocks of one prompt as one image of bytes: header, then pieces layer-major. Pure; tiers do the I/O.

    ┌ header (padded to 4 KiB) ┬ layer 0: piece 0, 1, … n-1 ┬ layer 1 … ┬ … ┬ boundary state (optional) ┐
                               └ each layer's region starts at a multiple of 4 KiB ┘

Layer 0 stands right behind the header so that one read fetches both; one layer of a run is one read; a hit that ends
inside a run still reads a contiguous part of each layer. The header holds the keys and token ids of its blocks (a hash
collision is a miss, not a wrong answer) and a 16-byte check of every piece, bound to the piece's key, its layer and the
representation, so that bytes that belong elsewhere never pass. `docs/format.md` is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headstart.block.representation import Representation

ALIGNMENT = 4096
CHECK_BYTES = 16

Buffer = memoryview | bytes | bytearray | npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ExtentLayout:
    """Where things lie in an extent's image. Offsets and sizes in bytes from the image's start."""

    header_bytes: int
    layer_offsets: tuple[int, ...]
    state_offset: int
    extent_bytes: int

    # Methods: piece_range(layer, first_piece, count) -> (offset, nbytes)


@dataclass(frozen=True, slots=True)
class ExtentHeader:
    """The decoded header. `keys`: one per block. `tokens`: u32 [blocks · 64]. `checks`: u8 [layers, pieces, 16].
    `piece_bytes`: u32 [layers, pieces] where the representation's sizes vary, else None. `parent`: key of the block before
    the first, or the identity's root."""

    representation: bytes  # digest, 32 bytes
    parent: bytes
    keys: tuple[bytes, ...]
    tokens: npt.NDArray[np.uint32]
    checks: npt.NDArray[np.uint8]
    extras: tuple[bytes, ...] = ()  # one per block, or empty when all are empty
    piece_bytes: npt.NDArray[np.uint32] | None = None
    state_bytes: int = 0
    state_check: bytes = b"\0" * CHECK_BYTES
    created_ms: int = 0  # wall clock of the writer, for people and ceilings; never for order
    retention: str = "default"
    algorithm: str = "xxh3-128"


def layout_of(
    representation: Representation,
    blocks: int,
    *,
    piece_bytes: npt.NDArray[np.uint32] | None = None,
    extras_bytes: int = 0,
    state_bytes: int = 0,
    retention: str = "default",
) -> ExtentLayout:
    """Return where everything lies in an extent of `blocks` blocks. Raises ValueError if blocks is no multiple of a piece."""
    raise NotImplementedError


def encode_header(header: ExtentHeader, representation: Representation) -> bytes:
    """Return the header, padded to its `header_bytes`, with its own check."""
    raise NotImplementedError


def decode_header(data: Buffer, representation: Representation) -> ExtentHeader:
    """Return the header in `data` (at least header_bytes long). Raises ExtentCorrupt(reason=…): "magic", "version",
    "truncated", "header-check", "representation", "fields"."""
    raise NotImplementedError


def piece_check(*, algorithm: str, representation: bytes, key: bytes, layer: int, buffers: Sequence[Buffer]) -> bytes:
    """Return the 16-byte check of one piece whose bytes are `buffers` in order; `key` is that of the piece's last block.
    Raises ExtentCorrupt(reason="algorithm") for an algorithm that this version does not know."""
    raise NotImplementedError
