"""Whole extents: examined, each byte that means something is held to; cut, the part is an extent like any other."""

from __future__ import annotations

import random

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from block.extents import Sealed, seal_random, sealed_extents
from headstart.block.representation import Representation
from headstart.block.whole import examine, part_of
from headstart.errors import ExtentCorrupt
from headstart.testing.fake_kv import UNEVEN, FakeKV

STATEFUL = Representation(kind="opaque", layout="test/1", dtype="float32", layer_bytes=(300,), state="required")


@settings(deadline=None)
@given(sealed_extents())
def test_what_was_sealed_is_right(sealed: Sealed) -> None:
    header = examine(memoryview(sealed.image), sealed.representation, padding=True)
    assert header.keys == sealed.header.keys


@settings(deadline=None)
@given(sealed_extents(), st.integers(0, 2**32))
def test_one_wrong_bit_anywhere_is_found_where_padding_counts(sealed: Sealed, seed: int) -> None:
    source = random.Random(seed)
    image = bytearray(sealed.image)
    image[source.randrange(len(image))] ^= 1 << source.randrange(8)
    with pytest.raises(ExtentCorrupt):
        examine(memoryview(image), sealed.representation, padding=True)


@pytest.mark.parametrize("at", [80, 95, -1])
def test_a_header_with_something_in_its_padding_is_found_though_its_check_covers_that(at: int) -> None:
    image = bytearray(FakeKV(UNEVEN, list(range(129))).image())
    header = image[: int.from_bytes(image[12:16], "little")]
    header[at] = 7
    header[16:32] = xxhash.xxh3_128_digest(header[:16] + header[32:])
    image[: len(header)] = header
    assert len(examine(memoryview(image), UNEVEN).keys) == 2
    with pytest.raises(ExtentCorrupt, match="padding"):
        examine(memoryview(image), UNEVEN, padding=True)


@settings(deadline=None)
@given(sealed_extents(), st.data())
def test_a_part_is_right_in_itself_and_holds_the_same_pieces(sealed: Sealed, data: st.DataObject) -> None:
    representation = sealed.representation
    pieces = sealed.layout.pieces
    first = data.draw(st.integers(0, pieces - 1))
    count = data.draw(st.integers(1, pieces - first))
    header = examine(memoryview(sealed.image), representation)
    part = part_of(memoryview(sealed.image), header, representation, first_piece=first, pieces=count)
    found = examine(part, representation, padding=True)
    per_piece = representation.blocks_per_piece
    assert found.keys == header.keys[first * per_piece : (first + count) * per_piece]
    assert found.parent == (header.keys[first * per_piece - 1] if first else header.parent)
    assert (found.state_bytes > 0) == (header.state_bytes > 0 and first + count == pieces)
    layout = found.layout(representation)
    for layer in range(representation.layers):
        for piece in range(count):
            at, nbytes = layout.piece_range(layer, piece, 1)
            assert bytes(part[at : at + nbytes]) == sealed.piece(layer, first + piece)


def test_an_image_that_is_too_long_or_short_is_refused() -> None:
    sealed = seal_random(UNEVEN)
    for image in (sealed.image[:-4096], sealed.image + bytes(4096)):
        with pytest.raises(ExtentCorrupt, match="an image of"):
            examine(memoryview(image), UNEVEN)


def test_what_needs_its_state_is_not_cut() -> None:
    sealed = seal_random(STATEFUL, pieces=3, state_bytes=100)
    header = examine(memoryview(sealed.image), STATEFUL)
    with pytest.raises(ValueError, match="only up to the end"):
        part_of(memoryview(sealed.image), header, STATEFUL, first_piece=0, pieces=2)
    assert part_of(memoryview(sealed.image), header, STATEFUL, first_piece=0, pieces=3) == bytes(sealed.image)
