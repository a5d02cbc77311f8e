"""Checks made with a key: what was sealed with it comes back, and nobody without it can seal anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headstart.block.checks import PLAIN, XXH3, Algorithm, Sealing, keyed, piece_check
from headstart.block.extent import decode_header, encode_header
from headstart.block.whole import aligned, examine, part_of, resealed, unkeyed
from headstart.errors import ExtentCorrupt
from headstart.testing.fake_kv import TINY
from headstart.testing.tier_contract import prompt

pytest.importorskip("blake3")
KEY, OTHER = keyed(bytes(range(32))), keyed(bytes(32))
KV = prompt(3, seed=1)


def sealed(algorithm: Algorithm = KEY) -> memoryview:
    image = aligned(KV.image(state_bytes=100).nbytes)
    image[:] = KV.image(state_bytes=100)
    front = resealed(image, examine(image, TINY), TINY, algorithm)
    image[: front.nbytes] = front
    return image


def reason(image: memoryview, *algorithms: Algorithm) -> str:
    with pytest.raises(ExtentCorrupt) as caught:
        examine(image, TINY, Sealing(algorithms))
    return str(caught.value.facts["reason"])


def test_what_was_sealed_with_a_key_is_believed_by_who_has_it_and_by_nobody_else() -> None:
    image = sealed()
    header = examine(image, TINY, Sealing((OTHER, KEY)), padding=True)  # an older key may stand behind the newest
    assert header.algorithm == KEY
    assert header.keys == tuple(KV.keys)
    assert [reason(image, XXH3), reason(image, OTHER), reason(KV.image(), KEY)] == ["key", "key", "key"]
    assert repr(KEY).count("0001020304") == 0


def test_ids_and_checks_are_those_of_the_format_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    check = piece_check(algorithm=KEY, representation=bytes(32), key=bytes(32), layer=0, buffers=[b"pi", b"ece"])
    assert f"{KEY.key_id:08x}" in page
    assert check.hex() in page


def test_only_the_header_differs_and_without_the_key_everything_is_as_it_was() -> None:
    image, plain = sealed(), KV.image(state_bytes=100)
    header = examine(image, TINY, Sealing((KEY,)))
    edge = header.layout(TINY).header_bytes
    assert image[edge:] == plain[edge:]
    assert unkeyed(image, header, TINY).algorithm is XXH3
    assert image == plain
    assert unkeyed(image, examine(image, TINY), TINY).algorithm is XXH3


def test_what_is_cut_out_of_it_needs_no_key() -> None:
    image = sealed()
    part = part_of(image, examine(image, TINY, Sealing((KEY,))), TINY, first_piece=1, pieces=2)
    assert examine(part, TINY).keys == tuple(KV.keys[TINY.blocks_per_piece :])


def test_what_is_wrong_does_not_get_right_checks() -> None:
    for at in (-KV.image(state_bytes=100).nbytes + 4096, -4096):  # a piece, the state
        image = aligned(KV.image(state_bytes=100).nbytes)
        image[:] = KV.image(state_bytes=100)
        header = examine(image, TINY)
        image[at] ^= 1
        with pytest.raises(ExtentCorrupt):
            resealed(image, header, TINY, KEY)


@pytest.mark.parametrize("part", ["parent", "keys", "tokens", "checks", "retention", "state_check", "created_ms"])
def test_a_header_that_was_changed_and_checked_anew_without_the_key_is_refused(part: str) -> None:
    image = sealed()
    header = decode_header(image, TINY, Sealing((KEY,)))
    changed = {
        "parent": b"p" * 32,
        "keys": header.keys[::-1],
        "tokens": header.tokens[::-1].copy(),
        "checks": np.zeros_like(header.checks),
        "retention": "forged",
        "state_check": b"s" * 16,
        "created_ms": 1,
    }[part]
    forged = bytearray(encode_header(replace(header, **{part: changed}, algorithm=XXH3), TINY))
    assert decode_header(forged, TINY, PLAIN)  # right, for who goes without a key
    image[: len(forged)] = forged
    assert reason(image, KEY) == "key"
    image[60:62], image[108:112] = sealed()[60:62], sealed()[108:112]  # called keyed, under the old check
    assert reason(image, KEY) == "header-check"


def test_bytes_that_were_exchanged_with_those_of_another_extent_are_refused() -> None:
    image, other = sealed(), prompt(3, seed=2).image(state_bytes=100)
    header = decode_header(image, TINY, Sealing((KEY,)))
    at, nbytes = header.layout(TINY).piece_range(0, 1, 1)
    image[at : at + nbytes] = other[at : at + nbytes]
    assert reason(image, KEY) == "piece"
