"""Extents drawn at random, for the tests beside this file."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from headstart.block.extent import ExtentHeader, ExtentLayout, layout_of, seal
from headstart.block.keys import BLOCK_TOKENS, chain, token_bytes
from headstart.block.representation import Representation


@dataclass(frozen=True)
class Sealed:
    representation: Representation
    layout: ExtentLayout
    header: ExtentHeader
    image: bytearray

    def piece(self, layer: int, piece: int) -> bytes:
        offset, nbytes = self.layout.piece_range(layer, piece, 1)
        return bytes(self.image[offset : offset + nbytes])


def seal_random(
    representation: Representation,
    *,
    pieces: int = 2,
    seed: int = 0,
    extras: tuple[bytes, ...] = (),
    state_bytes: int = 0,
    retention: str = "default",
    piece_bytes: np.ndarray | None = None,
) -> Sealed:
    """Return a sealed extent with random bytes everywhere, so that whatever is not zeroed is seen."""
    source = random.Random(seed)
    blocks = pieces * representation.blocks_per_piece
    tokens = [source.randrange(2**32) for _ in range(blocks * BLOCK_TOKENS)]
    parent = source.randbytes(32)
    if representation.varies and piece_bytes is None:
        sizes = [[1 + source.randrange(200) if n is None else n for _ in range(pieces)] for n in representation.layer_bytes]
        piece_bytes = np.array(sizes, np.uint32)
    layout = layout_of(
        representation,
        blocks,
        piece_bytes=piece_bytes,
        extras_bytes=sum(map(len, extras)),
        state_bytes=state_bytes,
        retention=retention,
    )
    image = bytearray(source.randbytes(layout.extent_bytes))
    keys = chain(parent, token_bytes(tokens), dict(enumerate(extras)))
    header = seal(
        memoryview(image),
        representation,
        parent=parent,
        keys=keys,
        tokens=tokens,
        extras=extras,
        piece_bytes=piece_bytes,
        state_bytes=state_bytes,
        created_ms=source.randrange(2**42),
        retention=retention,
    )
    return Sealed(representation, layout, header, image)


@st.composite
def sealed_extents(draw: st.DrawFn) -> Sealed:
    representation = Representation(
        kind="gqa",
        layout="test/1",
        dtype="float32",
        layer_bytes=tuple(draw(st.lists(st.none() | st.integers(1, 5000), min_size=1, max_size=4))),
        piece_tokens=64 * draw(st.integers(1, 2)),
    )
    pieces = draw(st.integers(1, 3))
    blocks = pieces * representation.blocks_per_piece
    extras = draw(st.just(()) | st.lists(st.binary(max_size=50), min_size=blocks, max_size=blocks).map(tuple))
    return seal_random(
        representation,
        pieces=pieces,
        seed=draw(st.integers(0, 2**32)),
        extras=extras,
        state_bytes=draw(st.sampled_from([0, 0, 1, 4096, 5000])),
        retention=draw(st.text(min_size=1, max_size=16).filter(str.isprintable)),
    )
