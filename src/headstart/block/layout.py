"""Where things lie inside an extent's image. Sums only: hostile counts cost nothing. `extent.py` writes and reads the image."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headstart.block.checks import CHECK_BYTES
from headstart.block.keys import BLOCK_TOKENS, KEY_BYTES
from headstart.block.representation import Representation

ALIGNMENT = 4096
MAX_HEADER_BYTES = 256 << 20
FIXED_BYTES = 176  # the part of a header that stands at fixed offsets

_MAX_RETENTION_BYTES = 64


@dataclass(frozen=True, slots=True)
class ExtentLayout:
    """Where things lie in an extent's image. Offsets and sizes in bytes from the image's start.

    `layer_bytes[l]` is the size of a piece in layer l, or None where it varies; `piece_ends` (i64 [layers, pieces], counted
    from the start of the layer's region) is there only when some layer varies. The boundary state, when there is one, lies
    at `state_offset`."""

    header_bytes: int
    layer_offsets: tuple[int, ...]
    state_offset: int
    extent_bytes: int
    pieces: int
    layer_bytes: tuple[int | None, ...]
    piece_ends: npt.NDArray[np.int64] | None = None

    def piece_range(self, layer: int, first: int, count: int) -> tuple[int, int]:
        """Return (offset, nbytes) of pieces first … first+count-1 of `layer`, which lie side by side. Raises ValueError for
        pieces that the extent does not have."""
        if not (0 <= layer < len(self.layer_offsets) and 0 <= first <= first + count <= self.pieces):
            raise ValueError(
                f"{count} pieces from {first} of layer {layer} do not exist: "
                f"the extent has {self.pieces} pieces in {len(self.layer_offsets)} layers"
            )
        start, end = self.bytes_before(layer, first), self.bytes_before(layer, first + count)
        return self.layer_offsets[layer] + start, end - start

    def piece_sizes(self, layer: int, first: int, count: int) -> list[int]:
        """Return the bytes of pieces first … first+count-1 of `layer`."""
        fixed = self.layer_bytes[layer]
        if fixed is not None:
            return [fixed] * count
        assert self.piece_ends is not None
        sizes: list[int] = np.diff(self.piece_ends[layer], prepend=0)[first : first + count].tolist()
        return sizes

    def region_end(self, layer: int) -> int:
        """Return where the last piece of `layer` ends."""
        return self.layer_offsets[layer] + self.bytes_before(layer, self.pieces)

    def bytes_before(self, layer: int, piece: int) -> int:
        """Return the bytes of `layer` before `piece`, which may be one past the last."""
        nbytes = self.layer_bytes[layer]
        if nbytes is not None:
            return piece * nbytes
        assert self.piece_ends is not None
        return int(self.piece_ends[layer, piece - 1]) if piece else 0


@dataclass(frozen=True, slots=True)
class HeaderSections:
    """Where the parts of a header start whose size depends on counts; `end` is where its padding starts."""

    layer_table: int
    keys: int
    tokens: int
    piece_bytes: int
    checks: int
    extras: int
    end: int

    @classmethod
    def of(
        cls, *, retention_bytes: int, layers: int, blocks: int, pieces: int, varies: bool, extras_bytes: int
    ) -> HeaderSections:
        layer_table = FIXED_BYTES + padded(retention_bytes, 8)
        keys = layer_table + 8 * layers
        tokens = keys + KEY_BYTES * blocks
        piece_bytes = tokens + 4 * BLOCK_TOKENS * blocks
        checks = piece_bytes + (4 * layers * pieces if varies else 0)
        extras = checks + CHECK_BYTES * layers * pieces
        end = extras + (4 * blocks + extras_bytes if extras_bytes else 0)
        return cls(layer_table, keys, tokens, piece_bytes, checks, extras, end)


def layout_of(
    representation: Representation,
    blocks: int,
    *,
    piece_bytes: npt.NDArray[np.uint32] | None = None,
    extras_bytes: int = 0,
    state_bytes: int = 0,
    retention: str = "default",
) -> ExtentLayout:
    """Return where everything lies in an extent of `blocks` blocks. Raises ValueError if blocks is no multiple of a piece.

    `extras_bytes` is the sum of the blocks' extras; `piece_bytes` is needed where the representation's sizes vary."""
    if blocks < 1 or blocks % representation.blocks_per_piece:
        raise ValueError(
            f"an extent of {blocks} blocks is not possible; give whole pieces of {representation.blocks_per_piece}"
        )
    if extras_bytes < 0 or state_bytes < 0:
        raise ValueError(f"extras of {extras_bytes} bytes or a state of {state_bytes} bytes: neither can be negative")
    if piece_bytes is None and not representation.varies:
        return _fixed_layout(representation, blocks, extras_bytes, state_bytes, retention)
    return _layout(representation, blocks, extras_bytes, state_bytes, retention, piece_bytes)


def padded(nbytes: int, alignment: int) -> int:
    """Return `nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def encode_retention(retention: str) -> bytes:
    """Return the name of a retention class as it stands in a header. Raises ValueError when it does not fit."""
    name = retention.encode()
    if not 1 <= len(name) <= _MAX_RETENTION_BYTES or not retention.isprintable():
        raise ValueError(f"retention class {retention!r} is no name of 1 to {_MAX_RETENTION_BYTES} printable bytes")
    return name


def _layout(
    representation: Representation,
    blocks: int,
    extras_bytes: int,
    state_bytes: int,
    retention: str,
    piece_bytes: npt.NDArray[np.uint32] | None = None,
) -> ExtentLayout:
    pieces = blocks // representation.blocks_per_piece
    sections = HeaderSections.of(
        retention_bytes=len(encode_retention(retention)),
        layers=representation.layers,
        blocks=blocks,
        pieces=pieces,
        varies=representation.varies,
        extras_bytes=extras_bytes,
    )
    header_bytes = padded(sections.end, ALIGNMENT)
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"an extent of {blocks} blocks needs a header of {header_bytes} bytes; cut the run in shorter ones")
    ends = _piece_ends(representation, pieces, piece_bytes)
    offset = header_bytes
    layer_offsets = []
    for layer, nbytes in enumerate(representation.layer_bytes):
        layer_offsets.append(offset)
        if nbytes is None:
            assert ends is not None
            region_bytes = int(ends[layer, -1])
        else:
            region_bytes = pieces * nbytes
        offset = padded(offset + region_bytes, ALIGNMENT)
    return ExtentLayout(
        header_bytes=header_bytes,
        layer_offsets=tuple(layer_offsets),
        state_offset=offset,
        extent_bytes=padded(offset + state_bytes, ALIGNMENT),
        pieces=pieces,
        layer_bytes=representation.layer_bytes,
        piece_ends=ends,
    )


_fixed_layout = lru_cache(maxsize=256)(_layout)  # asked for at every read, and most extents are of a few lengths


def _piece_ends(
    representation: Representation, pieces: int, piece_bytes: npt.NDArray[np.uint32] | None
) -> npt.NDArray[np.int64] | None:
    if not representation.varies:
        if piece_bytes is not None:
            raise ValueError("piece_bytes is given, but every piece of this representation has a fixed size; leave it out")
        return None
    shape = (representation.layers, pieces)
    if piece_bytes is None or piece_bytes.shape != shape or piece_bytes.dtype != np.uint32:
        raise ValueError(f"this representation's pieces vary in size; give piece_bytes as u32 of shape {list(shape)}")
    if not piece_bytes.all():
        raise ValueError("a piece of 0 bytes is not possible; pieces that vary have at least 1")
    for layer, nbytes in enumerate(representation.layer_bytes):
        if nbytes is not None and (piece_bytes[layer] != nbytes).any():
            raise ValueError(f"piece_bytes differs from the {nbytes} bytes that every piece of layer {layer} has")
    return np.cumsum(piece_bytes, axis=1, dtype=np.int64)
