"""Joining extents: the same blocks, byte for byte, under the same checks; what rotted on the way is seen."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from extents import seal_random
from hypothesis import given

from headstart.block.checks import XXH3
from headstart.block.extent import ExtentHeader, decode_header, verify_chain
from headstart.block.joining import Joined, finish, join_headers, verify_part
from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt
from headstart.testing.fake_kv import OPAQUE, PAGED, TINY, UNEVEN, FakeKV

KINDS = [TINY, UNEVEN, PAGED, OPAQUE]
PIECES = 7


def prompt(representation: Representation, salt: str | None = None) -> FakeKV:
    tokens = range(PIECES * representation.piece_tokens)
    return FakeKV(representation, list(tokens), salt=salt, shared_tokens=3 * representation.piece_tokens)


def parts_of(kv: FakeKV, edges: list[int]) -> list[tuple[ExtentHeader, memoryview]]:
    images = [kv.image(first, end - first) for first, end in zip([0, *edges], [*edges, PIECES], strict=True)]
    return [(decode_header(image, kv.representation), image) for image in images]


def copied(parts: list[tuple[ExtentHeader, memoryview]], representation: Representation) -> tuple[Joined, memoryview]:
    """Join without looking whether the pieces are right."""
    joined = join_headers([header for header, _ in parts], representation)
    image = memoryview(bytearray(b"\xaa" * joined.layout.extent_bytes))
    for number, (_, part) in enumerate(parts):
        for move in joined.moves(number):
            image[move.target : move.target + move.nbytes] = part[move.source : move.source + move.nbytes]
    return joined, image


edges = st.sets(st.integers(1, PIECES - 1)).map(sorted)


@given(st.sampled_from(KINDS), edges, st.sampled_from([None, "tenant"]))
def test_the_parts_of_a_prompt_joined_are_the_image_of_the_whole(
    representation: Representation, edges: list[int], salt: str | None
) -> None:
    kv = prompt(representation, salt)
    joined, image = copied(parts_of(kv, edges), representation)
    for part in range(len(edges) + 1):
        verify_part(image, joined, part)
    finish(image, joined)
    assert image == kv.image()
    assert verify_chain(decode_header(image, representation))


@given(st.sampled_from(KINDS), edges, st.data())
def test_a_bit_that_rotted_in_a_part_is_seen_in_that_part_alone(
    representation: Representation, edges: list[int], data: st.DataObject
) -> None:
    kv = prompt(representation)
    parts = parts_of(kv, edges)
    broken = data.draw(st.integers(0, len(parts) - 1))
    header, image = parts[broken]
    layout = header.layout(representation)
    layer = data.draw(st.integers(0, representation.layers - 1))
    offset, nbytes = layout.piece_range(layer, 0, layout.pieces)
    image[offset + data.draw(st.integers(0, nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    joined, whole = copied(parts, representation)
    for part in range(len(parts)):
        if part == broken:
            with pytest.raises(ExtentCorrupt):
                verify_part(whole, joined, part)
        else:
            verify_part(whole, joined, part)


def test_the_boundary_state_of_the_last_part_stays_at_the_end_and_is_verified() -> None:
    first = seal_random(TINY, pieces=2, seed=1)
    last = seal_random(TINY, pieces=2, seed=2, state_bytes=5000)
    follows = replace(last.header, parent=first.header.keys[-1])
    joined, image = copied([(first.header, memoryview(first.image)), (follows, memoryview(last.image))], TINY)
    verify_part(image, joined, 1)
    finish(image, joined)
    start = joined.layout.state_offset
    assert image[start : start + 5000] == last.image[last.layout.state_offset : last.layout.state_offset + 5000]
    image[start + 7] ^= 1
    with pytest.raises(ExtentCorrupt, match="state"):
        verify_part(image, joined, 1)


def test_the_oldest_creation_and_the_asked_class_are_kept() -> None:
    headers = [header for header, _ in parts_of(prompt(TINY), [2, 4])]
    dated = [replace(header, created_ms=created) for header, created in zip(headers, [30, 10, 20], strict=True)]
    header = join_headers(dated, TINY, retention="agent").header
    assert (header.created_ms, header.retention) == (10, "agent")


@pytest.mark.parametrize("wrong", ["none", "order", "state", "algorithm", "representation"])
def test_what_does_not_belong_together_is_not_joined(wrong: str) -> None:
    one, two = [header for header, _ in parts_of(prompt(TINY), [3])]
    headers = {
        "none": [],
        "order": [two, one],
        "state": [replace(one, state_bytes=1), two],
        "algorithm": [one, replace(two, algorithm=replace(XXH3, number=2))],
        "representation": [one, replace(two, representation=UNEVEN.digest)],
    }[wrong]
    with pytest.raises(ValueError, match=r"join|follow"):
        join_headers(headers, TINY)
