"""Whole extents in memory: looked at to the last byte, and cut. Pure. For scrubbing and carrying, not for the hot path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headstart.block.checks import PLAIN, STATE_LAYER, XXH3, Algorithm, Sealing, flat, piece_check
from headstart.block.extent import ExtentHeader, decode_header, encode_header, seal, verify_chain
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.layout import ALIGNMENT, ExtentLayout, layout_of, padded
from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt


def examine(
    image: memoryview, representation: Representation, sealing: Sealing = PLAIN, *, padding: bool = False
) -> ExtentHeader:
    """Return the header of an image of which everything is right: header, keys, every piece, the state; with `padding` also
    that zeros stand between them, so that there is no byte that may be another one. `sealing`: whose checks are
    believed. Raises ExtentCorrupt: the reasons of `decode_header`, "chain" (keys that do not follow from parent, token ids and
    extras), "piece", "state", "padding"."""
    image = flat(image)
    header = decode_header(image, representation, sealing)
    layout = header.layout(representation)
    if len(image) != layout.extent_bytes:
        raise ExtentCorrupt(f"an extent of {layout.extent_bytes} bytes has an image of {len(image)}", reason="truncated")
    if not verify_chain(header):
        raise ExtentCorrupt("an extent's keys do not follow from its parent, token ids and extras", reason="chain")
    for layer in range(representation.layers):
        _examine_layer(image, header, layout, representation, layer, padding=padding)
    state_end = layout.state_offset + header.state_bytes
    if header.state_bytes:
        state = image[layout.state_offset : state_end]
        found = piece_check(
            algorithm=header.algorithm,
            representation=header.representation,
            key=header.keys[-1],
            layer=STATE_LAYER,
            buffers=[state],
        )
        if found != header.state_check:
            raise ExtentCorrupt("an extent's boundary state is not what was written", reason="state")
    if padding:
        _require_zeros(image[state_end:])
        _require_zeros(memoryview(b"" if header.state_bytes else header.state_check))
        if image[: layout.header_bytes] != encode_header(header, representation):  # a check of its own covers what is there
            raise ExtentCorrupt("something stands where a header's padding belongs", reason="padding")
    return header


def unkeyed(image: memoryview, header: ExtentHeader, representation: Representation) -> ExtentHeader:
    """Give an examined image the checks that need no key, where it lies, and return its header: as it is made everywhere."""
    if header.algorithm is XXH3:
        return header
    front = resealed(image, header, representation, XXH3)
    image[: front.nbytes] = front
    return decode_header(front, representation)


def resealed(image: memoryview, header: ExtentHeader, representation: Representation, algorithm: Algorithm) -> memoryview:
    """Return the header, as it stands in front, of an image whose checks are made by `algorithm`; only the header differs.
    `header`: what stands there. Every piece and the state are verified by it on the way: raises ExtentCorrupt ("piece",
    "state"), so that nothing wrong gets right checks."""
    image, layout = flat(image), header.layout(representation)
    checks = np.empty_like(header.checks)

    def check(layer: int, key: bytes, start: int, nbytes: int, old: bytes, reason: str) -> bytes:
        found = [
            piece_check(
                algorithm=one,
                representation=header.representation,
                key=key,
                layer=layer,
                buffers=[image[start : start + nbytes]],
            )
            for one in (header.algorithm, algorithm)
        ]
        if found[0] != old:
            raise ExtentCorrupt(f"the {reason} of an extent is not what was written", reason=reason)
        return found[1]

    for layer in range(representation.layers):
        for piece in range(layout.pieces):
            key = header.keys[(piece + 1) * representation.blocks_per_piece - 1]
            old = header.checks[layer, piece].tobytes()
            new = check(layer, key, *layout.piece_range(layer, piece, 1), old, "piece")
            checks[layer, piece] = np.frombuffer(new, np.uint8)
    state = header.state_check
    if header.state_bytes:
        state = check(STATE_LAYER, header.keys[-1], layout.state_offset, header.state_bytes, state, "state")
    front = aligned(layout.header_bytes)
    front[:] = encode_header(replace(header, checks=checks, state_check=state, algorithm=algorithm), representation)
    return front


def part_of(
    image: memoryview, header: ExtentHeader, representation: Representation, *, first_piece: int, pieces: int
) -> memoryview:
    """Return an extent's image of `pieces` pieces of another, from `first_piece` on; the boundary state goes along where the
    end does. `header` is that of `image`, examined. Raises ValueError where the representation needs a state that would be
    lost."""
    whole = header.layout(representation)
    last = first_piece + pieces == whole.pieces
    if representation.state == "required" and not last:
        raise ValueError("blocks of this representation are of use only up to the end of the extent that they were saved in")
    per_piece = representation.blocks_per_piece
    start, end = first_piece * per_piece, (first_piece + pieces) * per_piece
    state_bytes = header.state_bytes if last else 0
    extras = header.extras[start:end]
    sizes = (
        None if header.piece_bytes is None else np.ascontiguousarray(header.piece_bytes[:, first_piece : first_piece + pieces])
    )
    layout = layout_of(
        representation,
        end - start,
        piece_bytes=sizes,
        extras_bytes=sum(map(len, extras)),
        state_bytes=state_bytes,
        retention=header.retention,
    )
    part = aligned(layout.extent_bytes)
    for layer, offset in enumerate(layout.layer_offsets):
        at, nbytes = whole.piece_range(layer, first_piece, pieces)
        part[offset : offset + nbytes] = image[at : at + nbytes]
    part[layout.state_offset : layout.state_offset + state_bytes] = image[whole.state_offset : whole.state_offset + state_bytes]
    seal(
        part,
        representation,
        parent=header.keys[start - 1] if start else header.parent,
        keys=header.keys[start:end],
        tokens=header.tokens[start * BLOCK_TOKENS : end * BLOCK_TOKENS],
        extras=extras,
        piece_bytes=sizes,
        state_bytes=state_bytes,
        created_ms=header.created_ms,
        retention=header.retention,
    )
    return part


def aligned(nbytes: int) -> memoryview:
    """Return memory whose address is a multiple of 4 KiB, as media take it without a copy."""
    raw: npt.NDArray[np.uint8] = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].data


def _examine_layer(
    image: memoryview,
    header: ExtentHeader,
    layout: ExtentLayout,
    representation: Representation,
    layer: int,
    *,
    padding: bool,
) -> None:
    end = layout.layer_offsets[layer]
    for piece in range(layout.pieces):
        start, nbytes = layout.piece_range(layer, piece, 1)
        end = start + nbytes
        found = piece_check(
            algorithm=header.algorithm,
            representation=header.representation,
            key=header.keys[(piece + 1) * representation.blocks_per_piece - 1],
            layer=layer,
            buffers=[image[start:end]],
        )
        if found != header.checks[layer, piece].tobytes():
            raise ExtentCorrupt(
                f"piece {piece} of layer {layer} is not what was written", reason="piece", layer=layer, piece=piece
            )
    if padding:
        _require_zeros(image[end : padded(end, ALIGNMENT)])


def _require_zeros(padding: memoryview) -> None:
    if padding.nbytes and np.frombuffer(padding, np.uint8).any():
        raise ExtentCorrupt("something stands where an extent's padding belongs", reason="padding")
