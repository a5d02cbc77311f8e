"""Representations: equal bytes for equal values, another digest for every difference, nothing guessed."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.block.framing import frame, unframe
from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt

BASE = Representation(kind="gqa", layout="torch/token-kv-head-dim/1", dtype="float16", layer_bytes=(128, 128))
NAMES = st.text(min_size=1, max_size=20)
REPRESENTATIONS = st.builds(
    Representation,
    kind=st.sampled_from(["mha", "gqa", "mla", "opaque"]),
    layout=NAMES,
    dtype=NAMES,
    layer_bytes=st.lists(st.none() | st.integers(1, 2**32 - 1), min_size=1, max_size=6).map(tuple),
    piece_tokens=st.integers(1, 100).map(lambda n: 64 * n),
    quantisation=NAMES,
    shard=st.just("replicated") | st.integers(1, 9).flatmap(lambda n: st.integers(0, n - 1).map(lambda r: f"{r}/{n}")),
)


@given(REPRESENTATIONS)
def test_decoding_gives_back_what_was_encoded(representation):
    assert Representation.decode(representation.encode()) == representation


@given(REPRESENTATIONS, REPRESENTATIONS)
def test_digests_are_equal_only_for_equal_representations(one, other):
    assert (one.digest == other.digest) == (one == other)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "mha"},
        {"layout": "torch/token-kv-head-dim/2"},
        {"dtype": "bfloat16"},
        {"dtype": "float8_e4m3"},
        {"layer_bytes": (128, 129)},
        {"layer_bytes": (128,)},
        {"layer_bytes": (128, None)},
        {"piece_tokens": 128},
        {"quantisation": "int8"},
        {"shard": "0/2"},
        {"state": "required"},
        {"layer_numbers": (0, 2)},
        {"layer_numbers": (2, 3)},
    ],
)
def test_every_difference_in_layout_gives_another_digest(change):
    assert dataclasses.replace(BASE, **change).digest != BASE.digest


@given(REPRESENTATIONS, st.data())
def test_cut_or_changed_bytes_never_decode_to_the_same_value(representation, data):
    encoded = representation.encode()
    end = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(ExtentCorrupt):
        Representation.decode(encoded[:end])
    changed = bytearray(encoded)
    changed[end] ^= data.draw(st.integers(1, 255))
    try:
        assert Representation.decode(bytes(changed)) != representation
    except ExtentCorrupt:
        return


def rebuilt(change):
    fields = change(unframe(BASE.encode()))
    return b"".join(frame(tag, value) for tag, value in fields)


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: [*fields, (10, b"new")],
        lambda fields: [*fields, fields[-1]],
        lambda fields: fields[1:],
        lambda fields: [fields[1], fields[0], *fields[2:]],
        lambda fields: fields[:-1],
        lambda fields: [(tag, b"gguf" if tag == 3 else value) for tag, value in fields],
        lambda fields: [(tag, b"\xff\xfe" if tag == 4 else value) for tag, value in fields],
        lambda fields: [(tag, struct.pack("<I", 65) if tag == 8 else value) for tag, value in fields],
        lambda fields: [(tag, struct.pack("<I", 16) if tag == 2 else value) for tag, value in fields],
        lambda fields: [(tag, b"\x01\0\0\0\0" if tag == 9 else value) for tag, value in fields],
        lambda fields: [(tag, b"" if tag == 9 else value) for tag, value in fields],
    ],
)
def test_unknown_missing_repeated_or_odd_fields_are_refused(change):
    with pytest.raises(ExtentCorrupt) as caught:
        Representation.decode(rebuilt(change))
    assert caught.value.reason == "representation"


def test_another_format_version_is_named():
    encoded = rebuilt(lambda fields: [(1, struct.pack("<I", 2)), (99, b"who knows")])
    with pytest.raises(ExtentCorrupt, match="version 2") as caught:
        Representation.decode(encoded)
    assert (caught.value.reason, caught.value.found) == ("version", 2)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "other"},
        {"layout": ""},
        {"dtype": "d" * 256},
        {"layer_bytes": ()},
        {"layer_bytes": (0,)},
        {"layer_bytes": (2**32,)},
        {"layer_bytes": (1,) * 65536},
        {"layer_numbers": (0,)},
        {"layer_numbers": (1, 1)},
        {"layer_numbers": (-1, 1)},
        {"layer_numbers": (0, 2**32)},
        {"state": "maybe"},
        {"piece_tokens": 0},
        {"piece_tokens": 96},
        {"shard": "2/2"},
        {"shard": "01/2"},
        {"shard": "1"},
        {"shard": "٠/٢"},
    ],
)
def test_impossible_representations_are_refused(change):
    with pytest.raises(ValueError, match=r"."):
        dataclasses.replace(BASE, **change)


def test_bytes_per_token_counts_all_layers():
    assert BASE.bytes_per_token == 4
    assert dataclasses.replace(BASE, layer_bytes=(128, None)).bytes_per_token is None
    assert dataclasses.replace(BASE, piece_tokens=256).blocks_per_piece == 4
