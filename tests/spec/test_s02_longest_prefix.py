"""S2 Longest prefix: match covers the longest run from the first block that is readable now, and leaves a token to compute."""

from __future__ import annotations

import pytest

from headstart.testing.fake_kv import PAGED, STATEFUL, TINY, FakeKV
from headstart.testing.round_trip import hit_tokens, load, match, save

PROMPT = list(range(100_000, 101_000))  # 15 blocks and 40 tokens


def kv(length: int, *, tail: list[int] | None = None) -> FakeKV:
    return FakeKV(TINY, PROMPT[:length] + (tail or []))


@pytest.mark.parametrize(
    ("length", "hit"),
    [(1, 0), (63, 0), (64, 0), (65, 64), (127, 64), (128, 64), (129, 128), (640, 576), (641, 640), (1000, 960)],
)
def test_at_least_one_token_is_left_to_compute(shelf, length: int, hit: int) -> None:
    """The very same prompt, sent again and again, at and around block edges."""
    cache = shelf.open("both")
    save(cache, kv(length))
    for _ in range(3):
        assert load(cache, kv(length)).usable_tokens == hit


def test_the_empty_prompt_matches_nothing_and_saves_nothing(shelf) -> None:
    cache = shelf.open("both")
    assert save(cache, kv(0)).stored_tokens == 0
    assert hit_tokens(cache, kv(0)) == 0


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
@pytest.mark.parametrize("common", [0, 1, 63, 64, 65, 500, 640])
def test_a_match_ends_where_the_prompts_part(shelf, tiers: str, common: int) -> None:
    cache = shelf.open(tiers)
    save(cache, kv(1000))
    found = load(cache, kv(common, tail=[5] * 700))
    assert (found.usable_tokens, found.wrong) == (common // 64 * 64, [])


def test_a_conversation_matches_all_that_was_said_before(shelf) -> None:
    cache = shelf.open("both")
    said = 0
    for length in (130, 400, 401, 720, 1000):
        found = load(cache, kv(length))
        assert (found.usable_tokens, found.wrong) == (said, [])
        save(cache, kv(length))
        said = length // 64 * 64


def test_a_shorter_prompt_matches_inside_a_longer_one(shelf) -> None:
    cache = shelf.open("disk")
    save(cache, kv(1000))
    found = load(cache, kv(300))
    assert (found.usable_tokens, found.wrong) == (256, [])


def test_a_hit_is_floored_to_whole_pieces(shelf) -> None:
    cache = shelf.open("both", representation=PAGED)
    save(cache, FakeKV(PAGED, PROMPT))
    for length, hit in ((128, 0), (129, 128), (255, 128), (257, 256), (1000, 896)):
        assert hit_tokens(cache, FakeKV(PAGED, PROMPT[:length])) == hit


def test_a_missing_head_makes_the_rest_a_miss_until_it_is_saved_again(shelf) -> None:
    cache = shelf.open("memory")
    tier = shelf.tiers[0]
    tier.write(kv(1000).image(2, 8), TINY)
    assert hit_tokens(cache, kv(1000)) == 0
    save(cache, kv(1000))
    found = load(cache, kv(1000))
    assert (found.usable_tokens, found.wrong) == (960, [])


def test_a_match_joins_extents_and_tiers(shelf) -> None:
    """The head in memory, the middle on disk, the tail in memory again: one prefix."""
    cache = shelf.open("both")
    memory, disk = shelf.tiers
    memory.write(kv(1000).image(0, 3), TINY)
    disk.write(kv(1000).image(3, 5), TINY)
    disk.write(kv(1000).image(8, 2), TINY)
    memory.write(kv(1000).image(10, 2), TINY)
    found = load(cache, kv(1000))
    assert (found.matched_tokens, found.usable_tokens, found.wrong) == (768, 768, [])
    assert found.load.tokens_by_tier == {"memory": 320, "disk": 448}


def test_a_hole_ends_the_match(shelf) -> None:
    cache = shelf.open("disk")
    disk = shelf.tiers[0]
    disk.write(kv(1000).image(0, 4), TINY)
    disk.write(kv(1000).image(5, 5), TINY)
    found = load(cache, kv(1000))
    assert (found.usable_tokens, found.wrong) == (256, [])


def test_matching_reads_no_payload(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    save(cache, kv(1000))
    before = shelf.faulty.statistics().counters.get("bytes_read", 0)
    for _ in range(20):
        with match(cache, kv(1000)) as lease:
            assert lease.tokens == 960
    layers = sum(n or 0 for n in TINY.layer_bytes)
    assert shelf.faulty.statistics().counters.get("bytes_read", 0) - before < 15 * layers


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_where_states_are_needed_the_longest_prefix_ends_at_the_latest_one(shelf, tiers: str) -> None:
    cache = shelf.open(tiers, representation=STATEFUL)
    saved = FakeKV(STATEFUL, PROMPT)
    save(cache, saved, states=saved.states(2, 7, 15))
    save(cache, saved, states=saved.states(11))  # its blocks are there already
    for length, hit in ((128, 0), (129, 2), (448, 2), (449, 7), (704, 7), (705, 11), (960, 11), (961, 15), (1000, 15)):
        found = load(cache, FakeKV(STATEFUL, PROMPT[:length]))
        assert (found.usable_tokens, found.wrong) == (hit * 64, [])
    parting = FakeKV(STATEFUL, PROMPT[:500] + [5] * 500)
    assert load(cache, parting).usable_tokens == 7 * 64
