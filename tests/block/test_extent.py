"""Extents: what was sealed comes back; anything else is refused, quickly and without big allocations."""

from __future__ import annotations

import dataclasses
import random
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
from extents import Sealed, seal_random, sealed_extents
from hypothesis import given
from hypothesis import strategies as st

from headstart.block.checks import XXH3
from headstart.block.extent import (
    ALIGNMENT,
    CHECK_BYTES,
    STATE_LAYER,
    ExtentHeader,
    decode_header,
    encode_header,
    header_bytes_of,
    layout_of,
    piece_check,
    seal,
    verify_chain,
)
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt

FIXED = Representation(kind="gqa", layout="test/1", dtype="float32", layer_bytes=(96, 40, 4096), piece_tokens=128)
VARIES = Representation(kind="opaque", layout="test/1", dtype="q8", layer_bytes=(None,))


def same(one: ExtentHeader, other: ExtentHeader) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(ExtentHeader)]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def with_check(header: bytes | bytearray) -> bytes:
    """Return a header whose own check holds again, as a hostile writer would make it."""
    header = bytearray(header)
    header[16:32] = xxhash.xxh3_128_digest(bytes(header[:16] + header[32:]))
    return bytes(header)


def good_pieces(header: ExtentHeader, layer: int, first: int, pieces: list[bytes]) -> int:
    """Return how many leading pieces of those from `first` on are what the header's checks say."""
    blocks_per_piece = len(header.keys) // header.checks.shape[1]
    for piece, data in enumerate(pieces, first):
        key = header.keys[(piece + 1) * blocks_per_piece - 1]
        cut = len(data) // 3
        check = piece_check(
            algorithm=header.algorithm,
            representation=header.representation,
            key=key,
            layer=layer,
            buffers=[data[:cut], memoryview(data)[cut:]],
        )
        if check != header.checks[layer, piece].tobytes():
            return piece - first
    return len(pieces)


def reason(data: bytes, representation: Representation) -> str:
    with pytest.raises(ExtentCorrupt) as caught:
        decode_header(data, representation)
    return caught.value.reason


@given(sealed_extents())
def test_decoding_gives_back_what_was_sealed(extent: Sealed):
    decoded = decode_header(extent.image, extent.representation)
    assert same(decoded, extent.header)
    assert encode_header(decoded, extent.representation) == extent.image[: extent.layout.header_bytes]
    assert header_bytes_of(extent.image[:32]) == extent.layout.header_bytes
    laid = decoded.layout(extent.representation)
    assert (laid.layer_offsets, laid.extent_bytes) == (extent.layout.layer_offsets, extent.layout.extent_bytes)
    assert verify_chain(decoded)


@given(sealed_extents())
def test_parts_tile_the_image_and_start_at_aligned_offsets(extent: Sealed):
    layout, last = extent.layout, extent.layout.header_bytes
    assert layout.layer_offsets[0] == last
    for layer, offset in enumerate(layout.layer_offsets):
        assert offset % ALIGNMENT == 0
        assert 0 <= offset - last < ALIGNMENT
        last = offset
        for piece in range(layout.pieces):
            start, nbytes = layout.piece_range(layer, piece, 1)
            assert start == last
            last += nbytes
        assert layout.piece_range(layer, 0, layout.pieces) == (offset, last - offset)
    assert 0 <= layout.state_offset - last < ALIGNMENT
    assert layout.state_offset % ALIGNMENT == layout.extent_bytes % ALIGNMENT == 0
    assert 0 <= layout.extent_bytes - layout.state_offset - extent.header.state_bytes < ALIGNMENT
    assert len(extent.image) == layout.extent_bytes


@given(sealed_extents())
def test_nothing_of_what_lay_in_the_buffer_before_is_left_in_the_padding(extent: Sealed):
    padding = bytearray(extent.image)
    for layer in range(extent.representation.layers):
        offset, nbytes = extent.layout.piece_range(layer, 0, extent.layout.pieces)
        padding[offset : offset + nbytes] = bytes(nbytes)
    state = extent.layout.state_offset
    padding[state : state + extent.header.state_bytes] = bytes(extent.header.state_bytes)
    assert not any(padding[extent.layout.header_bytes :])


@pytest.mark.parametrize("representation", [FIXED, VARIES])
def test_any_flipped_byte_in_a_header_is_refused(representation):
    extras = (b"", b"x" * 37) * representation.blocks_per_piece
    extent = seal_random(representation, extras=extras, state_bytes=9)
    header = extent.image[: extent.layout.header_bytes]
    for at in range(len(header)):
        header[at] ^= 1 << at % 8
        want = {range(8): "magic", range(8, 12): "version", range(12, 16): None}
        expected = next((value for span, value in want.items() if at in span), "header-check")
        found = reason(bytes(header), representation)
        assert found == expected or (expected is None and found in ("fields", "truncated", "header-check"))
        header[at] ^= 1 << at % 8
    assert same(decode_header(header, representation), extent.header)


@given(sealed_extents(), st.data())
def test_a_flipped_byte_in_a_piece_is_seen_in_that_piece_alone(extent: Sealed, data):
    layer = data.draw(st.integers(0, extent.representation.layers - 1))
    broken = data.draw(st.integers(0, extent.layout.pieces - 1))
    offset, nbytes = extent.layout.piece_range(layer, broken, 1)
    if not nbytes:
        return
    extent.image[offset + data.draw(st.integers(0, nbytes - 1))] ^= data.draw(st.integers(1, 255))
    for other in range(extent.representation.layers):
        for piece in range(extent.layout.pieces):
            good = good_pieces(extent.header, other, piece, [extent.piece(other, piece)])
            assert good == ((other, piece) != (layer, broken))


def test_right_bytes_in_the_wrong_place_fail():
    extent = seal_random(dataclasses.replace(FIXED, layer_bytes=(64, 64)), pieces=3)
    piece = extent.piece(0, 0)
    assert good_pieces(extent.header, 0, 0, [piece]) == 1
    assert good_pieces(extent.header, 0, 1, [piece]) == 0
    assert good_pieces(extent.header, 1, 0, [piece]) == 0
    assert good_pieces(dataclasses.replace(extent.header, representation=b"r" * 32), 0, 0, [piece]) == 0
    # The same bytes under another key, in another layer or as a state have a check of their own.
    own = {
        piece_check(algorithm=XXH3, representation=extent.header.representation, key=key, layer=layer, buffers=[piece])
        for key in extent.header.keys
        for layer in (0, 1, STATE_LAYER)
    }
    assert len(own) == 3 * len(extent.header.keys)


@given(sealed_extents())
def test_checks_are_piece_checks_under_the_key_of_the_last_block(extent: Sealed):
    per_piece = extent.representation.blocks_per_piece
    for layer in range(extent.representation.layers):
        for piece in range(extent.layout.pieces):
            data = extent.piece(layer, piece)
            check = piece_check(
                algorithm=XXH3,
                representation=extent.representation.digest,
                key=extent.header.keys[piece * per_piece + per_piece - 1],
                layer=layer,
                buffers=[data[:7], np.frombuffer(data[7:], np.uint8)],
            )
            assert check == extent.header.checks[layer, piece].tobytes()
    if extent.header.state_bytes:
        state = memoryview(extent.image)[extent.layout.state_offset :][: extent.header.state_bytes]
        check = piece_check(
            algorithm=XXH3,
            representation=extent.representation.digest,
            key=extent.header.keys[-1],
            layer=STATE_LAYER,
            buffers=[state],
        )
        assert check == extent.header.state_check


def test_buffers_of_any_shape_are_hashed_as_their_bytes():
    def check(buffer: memoryview | bytes | np.ndarray) -> bytes:
        return piece_check(algorithm=XXH3, representation=bytes(32), key=bytes(32), layer=0, buffers=[buffer])

    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert check(memoryview(rows)) == check(rows) == check(rows.tobytes())
    assert check(rows[:0]) == check(b"")


def test_an_unknown_check_algorithm_is_refused():
    extent = seal_random(FIXED)
    header = extent.image[: extent.layout.header_bytes]
    header[60:62] = struct.pack("<H", 3)
    assert reason(with_check(header), FIXED) == "algorithm"
    header[60:62] = struct.pack("<H", 2)
    assert reason(with_check(header), FIXED) == "key"


def test_another_representation_is_refused():
    extent = seal_random(FIXED)
    for change in ({"dtype": "bfloat16"}, {"shard": "0/2"}, {"layer_bytes": (96, 40, 4097)}, {"layout": "test/2"}):
        assert reason(extent.image, dataclasses.replace(FIXED, **change)) == "representation"


@given(sealed_extents(), st.data())
def test_truncated_headers_are_refused(extent: Sealed, data):
    end = data.draw(st.integers(0, extent.layout.header_bytes - 1))
    assert reason(bytes(extent.image[:end]), extent.representation) == "truncated"


FIELDS = {  # offset and struct format of each number in the fixed part
    "header bytes": (12, "<I"),
    "flags": (32, "<I"),
    "blocks": (36, "<I"),
    "extent bytes": (40, "<Q"),
    "block tokens": (48, "<I"),
    "piece tokens": (52, "<I"),
    "layers": (56, "<I"),
    "algorithm": (60, "<H"),
    "retention bytes": (62, "<H"),
    "state offset": (64, "<Q"),
    "state bytes": (72, "<Q"),
    "created": (96, "<Q"),
    "extras bytes": (104, "<I"),
    "reserved": (108, "<I"),
}


@pytest.mark.parametrize("representation", [FIXED, VARIES])
@pytest.mark.parametrize("field", FIELDS)
def test_lying_numbers_under_a_good_check_are_refused_without_big_allocations(representation, field):
    extras = (b"ab", b"cde") * representation.blocks_per_piece
    extent = seal_random(representation, extras=extras, state_bytes=9)
    at, code = FIELDS[field]
    (true,) = struct.unpack_from(code, extent.image, at)
    largest = 2 ** (8 * struct.calcsize(code)) - 1
    source = random.Random(field)
    lies = {0, 1, true - 1, true + 1, 2 * true, true + 4096, largest, largest // 2 + 1, largest - 4095}
    lies |= {source.randrange(largest) for _ in range(50)}
    if field == "created":
        lies = {lie for lie in lies if lie >= 1 << 63}  # below, any time is possible
    if field == "state bytes":
        lies = {lie for lie in lies if not 0 < lie <= ALIGNMENT}  # in there, only the state's check can tell
    tracemalloc.start()
    try:
        for lie in {lie & largest for lie in lies} - {true}:
            header = extent.image[: extent.layout.header_bytes]
            struct.pack_into(code, header, at, lie)
            assert reason(with_check(header), representation) in ("fields", "truncated", "algorithm", "key")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(sealed_extents(), st.data())
def test_garbage_under_a_good_check_is_refused_or_harmless(extent: Sealed, data):
    """Whatever a hostile writer puts in a header, reading gives a header that fits its bytes, or ExtentCorrupt."""
    header = extent.image[: extent.layout.header_bytes]
    at = data.draw(st.integers(32, len(header) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=40))[: len(header) - at]
    header[at : at + len(junk)] = junk
    try:
        decoded = decode_header(with_check(header), extent.representation)
    except ExtentCorrupt:
        return
    layout = decoded.layout(extent.representation)
    assert (layout.header_bytes, layout.extent_bytes) == (extent.layout.header_bytes, extent.layout.extent_bytes)
    if decoded.keys != extent.header.keys:
        assert not verify_chain(decoded)


def test_lying_lengths_of_extras_are_refused():
    extent = seal_random(FIXED, extras=(b"abc",) * 4)
    header = bytes(extent.image[: extent.layout.header_bytes])
    at = header.index(struct.pack("<I", 3) + b"abc")
    for length in (0, 2, 4, 100, 2**32 - 1):
        assert reason(with_check(header[:at] + struct.pack("<I", length) + header[at + 4 :]), FIXED) == "fields"


def test_a_decoded_header_does_not_change_with_the_buffer_it_came_from():
    extent = seal_random(VARIES, extras=(b"e", b"f"))
    decoded = decode_header(memoryview(extent.image), VARIES)
    extent.image[:] = bytes(len(extent.image))
    assert same(decoded, extent.header)


@pytest.mark.parametrize(
    "change",
    [
        {"parent": bytes(32)},
        {"tokens": np.zeros(4 * BLOCK_TOKENS, np.uint32)},
        {"extras": (b"", b"", b"", b"x")},
        {"keys": tuple(bytes([i]) * 32 for i in range(4))},
    ],
)
def test_keys_that_do_not_follow_from_parent_tokens_and_extras_are_seen(change):
    header = seal_random(FIXED).header
    assert verify_chain(header)
    assert not verify_chain(dataclasses.replace(header, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"parent": b"short"},
        {"keys": (b"short",) * 4},
        {"keys": ()},
        {"keys": (b"k" * 32,) * 3},
        {"tokens": np.zeros(3, np.uint32)},
        {"extras": (b"x",)},
        {"checks": np.zeros((1, 1, CHECK_BYTES), np.uint8)},
        {"created_ms": -1},
        {"retention": ""},
        {"retention": "r" * 65},
        {"retention": "line\n"},
        {"representation": bytes(32)},
        {"piece_bytes": np.zeros((3, 2), np.uint32)},
        {"state_bytes": -1},
    ],
)
def test_headers_that_contradict_themselves_are_not_written(change):
    with pytest.raises(ValueError, match=r"."):
        encode_header(dataclasses.replace(seal_random(FIXED).header, **change), FIXED)


def test_wrong_sizes_are_wrong_use():
    with pytest.raises(ValueError, match="whole pieces"):
        layout_of(FIXED, 3)
    with pytest.raises(ValueError, match="piece_bytes"):
        layout_of(VARIES, 2)
    with pytest.raises(ValueError, match="shorter"):
        layout_of(FIXED, 2_000_000)
    mixed = dataclasses.replace(FIXED, layer_bytes=(None, 10), piece_tokens=64)
    with pytest.raises(ValueError, match="layer 1"):
        layout_of(mixed, 1, piece_bytes=np.array([[5], [11]], np.uint32))
    extent = seal_random(FIXED)
    with pytest.raises(ValueError, match="image"):
        seal(memoryview(extent.image)[:-1], FIXED, parent=bytes(32), keys=extent.header.keys, tokens=extent.header.tokens)
    for layer, first, count in ((3, 0, 1), (-1, 0, 1), (0, 2, 1), (0, 0, 3), (0, -1, 1), (0, 1, -1)):
        with pytest.raises(ValueError, match="pieces"):
            extent.layout.piece_range(layer, first, count)
