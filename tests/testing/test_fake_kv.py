"""The oracle itself: its content depends on everything that it must depend on, and its destination sees every wrong byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.block.extent import decode_header, layout_of, piece_check
from headstart.testing.fake_kv import IDENTITY, OPAQUE, PAGED, TINY, UNEVEN, FakeDestination, FakeKV

TOKENS = list(range(500))


def fill(destination: FakeDestination, kv: FakeKV, pieces: int) -> None:
    for layer in range(kv.representation.layers):
        sizes = [kv.piece_bytes(layer, p) for p in range(pieces)]
        targets = destination.buffers(layer, 0, sizes)
        content = b"".join(bytes(kv.piece(layer, p)) for p in range(pieces))
        for target in targets:
            target[:], content = content[: len(target)], content[len(target) :]
        assert content == b""


def test_every_page_of_every_piece_is_different() -> None:
    big = replace(TINY, layer_bytes=(16384, 16384))
    kvs = [FakeKV(big, TOKENS), FakeKV(big, TOKENS, salt="a"), FakeKV(big, TOKENS, rank=1), FakeKV(big, [9, *TOKENS])]
    kvs.append(FakeKV(big, TOKENS, identity=replace(IDENTITY, version="2")))
    pages = [
        bytes(kv.piece(layer, piece)[at : at + 4096])
        for kv in kvs
        for layer in range(2)
        for piece in range(kv.pieces)
        for at in range(0, 16384, 4096)
    ]
    assert len(set(pages)) == len(pages)
    assert len({page[-8:] for page in pages}) == len(pages)


@given(st.integers(0, 448), st.integers(0, 6))
def test_changing_one_token_changes_its_piece_and_all_after_it(at: int, piece: int) -> None:
    changed = [*TOKENS[:at], 7_000, *TOKENS[at + 1 :]]
    same = np.array_equal(FakeKV(TINY, TOKENS).piece(0, piece), FakeKV(TINY, changed).piece(0, piece))
    assert same == (at >= (piece + 1) * 64)


def test_a_salt_changes_only_what_is_not_shared() -> None:
    plain, salted = FakeKV(TINY, TOKENS), FakeKV(TINY, TOKENS, salt="s", shared_tokens=130)
    same = [np.array_equal(plain.piece(1, p), salted.piece(1, p)) for p in range(plain.pieces)]
    assert same == [True, True, False, False, False, False, False]


@pytest.mark.parametrize("representation", [TINY, UNEVEN, PAGED, OPAQUE], ids=["tiny", "uneven", "paged", "opaque"])
@pytest.mark.parametrize("cuts", [1, 3])
def test_a_filled_destination_is_right_and_a_poisoned_one_is_not(representation, cuts: int) -> None:
    kv = FakeKV(representation, TOKENS)
    destination = FakeDestination(representation, kv.pieces, shift=1, cuts=cuts)
    assert {w.what for w in destination.wrong(kv, pieces=kv.pieces)} == {"poison"}
    assert destination.touched() == []
    fill(destination, kv, kv.pieces)
    assert destination.wrong(kv, pieces=kv.pieces) == []
    assert len(destination.touched(first=1)) == representation.layers * (kv.pieces - 1)


def test_one_flipped_bit_a_torn_page_and_a_foreign_piece_are_seen() -> None:
    kv, other = FakeKV(UNEVEN, TOKENS), FakeKV(UNEVEN, TOKENS[1:])
    destination = FakeDestination(UNEVEN, kv.pieces)
    fill(destination, kv, kv.pieces)
    destination.buffers(1, 2, [4104])[0][4000] ^= 1
    destination.buffers(0, 1, [1536])[0][:] = other.piece(0, 1).data
    destination.buffers(2, 0, [520])[0][300:] = b"\0" * 220
    found = {(w.layer, w.piece): (w.first_wrong_byte, w.what) for w in destination.wrong(kv, pieces=kv.pieces)}
    assert found[1, 2] == (4000, "torn")
    assert found[0, 1][1] == "foreign"
    assert found[2, 0][1] == "torn"
    assert len(found) == 3


def test_writing_outside_a_destination_is_refused() -> None:
    with pytest.raises(ValueError, match="pieces"):
        FakeDestination(TINY, 3).buffers(0, 2, [4096, 4096])
    with pytest.raises(ValueError, match="bytes"):
        FakeDestination(TINY, 3).buffers(0, 0, [4095])


@pytest.mark.parametrize("representation", [TINY, UNEVEN, PAGED, OPAQUE], ids=["tiny", "uneven", "paged", "opaque"])
def test_an_image_is_an_extent_as_the_format_says(representation) -> None:
    kv = FakeKV(representation, TOKENS, salt="s")
    image = kv.image(1, 2)
    header = decode_header(image, representation)
    per_piece = representation.blocks_per_piece
    assert list(header.keys) == kv.keys[per_piece : 3 * per_piece]
    assert header.parent == kv.keys[per_piece - 1]
    layout = layout_of(representation, len(header.keys), piece_bytes=header.piece_bytes)
    for layer in range(representation.layers):
        offset, nbytes = layout.piece_range(layer, 1, 1)
        assert bytes(image[offset : offset + nbytes]) == bytes(kv.piece(layer, 2))
        check = piece_check(
            algorithm=header.algorithm,
            representation=representation.digest,
            key=header.keys[2 * per_piece - 1],
            layer=layer,
            buffers=[image[offset : offset + nbytes]],
        )
        assert check == bytes(header.checks[layer, 1])
