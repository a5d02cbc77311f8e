"""S4 Budget: bytes held never exceed the capacity after any call, and the books equal the medium."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headstart.testing.fake_kv import TINY, FakeKV
from headstart.testing.faults import Fault
from headstart.testing.round_trip import hit_tokens, load, save
from headstart.testing.tier_contract import prompt

TIERS = ["memory", "disk", "both"]


def within(shelf) -> bool:
    return all(s.live_bytes <= s.allocated_bytes <= s.capacity_bytes for s in (tier.statistics() for tier in shelf.tiers))


@pytest.mark.parametrize("tiers", TIERS)
def test_no_save_takes_a_tier_above_its_capacity(shelf, tiers: str) -> None:
    cache = shelf.open_small(tiers)
    for seed in range(120):
        save(cache, prompt(1 + seed * 5 % 17, seed=seed))
        assert within(shelf)
    assert load(cache, prompt(1 + 119 * 5 % 17, seed=119)).wrong == []


def test_the_medium_itself_is_charged_no_more_than_the_capacity(shelf) -> None:
    """Counted by the disk, not by the tier: headers, journals and snapshots included."""
    cache = shelf.open_small("disk", crashable=True)
    for seed in range(80):
        save(cache, prompt(1 + seed * 5 % 17, seed=seed))
        assert shelf.disk.allocated_bytes() <= shelf.tiers[0].statistics().capacity_bytes


def test_a_restart_counts_what_is_there(shelf) -> None:
    for start in range(4):
        cache = shelf.open_small("disk")
        assert within(shelf)
        for seed in range(25):
            save(cache, prompt(8, seed=100 * start + seed))
            assert within(shelf)
        assert shelf.tiers[0].statistics().extents > 0
        shelf.close()


def test_a_smaller_capacity_after_a_restart_is_kept_at_once(shelf) -> None:
    cache = shelf.open("disk", disk_bytes=8 << 20)
    for seed in range(60):
        save(cache, prompt(8, seed=seed))
    shelf.close()
    cache = shelf.open("disk", disk_bytes=4 << 20)
    save(cache, prompt(8, seed=1000))
    assert within(shelf)
    assert load(cache, prompt(8, seed=1000)).wrong == []


def test_a_prompt_larger_than_the_memory_tier_goes_to_disk_and_spares_what_is_in_memory(shelf) -> None:
    cache = shelf.open("both", memory_bytes=256 << 10)
    save(cache, prompt(4))
    large = prompt(60, seed=1)
    assert save(cache, large).stored_tokens == 60 * 64
    assert within(shelf)
    found = load(cache, large)
    assert (found.usable_tokens, found.wrong) == (60 * 64, [])


def test_a_prompt_larger_than_everything_is_kept_in_part_or_not_and_said_so(shelf) -> None:
    cache = shelf.open_small("both")
    huge = prompt(1000, seed=1)
    result = save(cache, huge)
    assert result.stored_tokens < 1000 * 64
    assert result.reason is not None
    assert within(shelf)
    assert load(cache, huge).wrong == []


def test_saves_that_the_disk_cannot_follow_are_dropped_at_the_bound(shelf) -> None:
    image = len(prompt(8).image())
    cache = shelf.open("disk", faulty=True, save_queue_bytes=4 * image)
    shelf.faulty.inject(Fault("write", "stall", times=1))
    kvs = [prompt(8, seed=s) for s in range(30)]
    tickets = [cache.save(kv.tokens.tolist(), kv) for kv in kvs]
    dropped = [ticket for ticket in tickets if ticket.done]
    assert len(tickets) - len(dropped) <= 6
    assert {ticket.wait(1).reason for ticket in dropped} == {"queue-full"}
    shelf.faulty.heal()
    results = [ticket.wait(10) for ticket in tickets]
    for kv, result in zip(kvs, results, strict=True):
        found = load(cache, kv)
        assert found.wrong == []
        assert found.usable_tokens >= result.stored_tokens
        assert (result.stored_tokens == 512) == (result.reason is None)
    assert save(cache, kvs[-1]).stored_tokens == 512


def test_a_fixed_set_that_fits_stays(shelf) -> None:
    """Saving again what is there takes no room from it."""
    cache = shelf.open_small("disk")
    kvs = [prompt(6, seed=s) for s in range(6)]
    for _ in range(20):
        for kv in kvs:
            save(cache, kv)
    assert [hit_tokens(cache, kv) for kv in kvs] == [384] * 6


def test_another_representation_in_the_same_directory_is_counted_and_gives_way(shelf) -> None:
    other = replace(TINY, layout="fake/older")
    cache = shelf.open_small("disk", representation=other)
    for seed in range(60):
        save(cache, prompt(8, seed=seed, representation=other))
    shelf.close()
    cache = shelf.open_small("disk")
    for seed in range(60):
        kv = FakeKV(TINY, prompt(8, seed=seed).tokens.tolist())
        assert save(cache, kv).stored_tokens == 512
        assert within(shelf)
    assert load(cache, kv).usable_tokens == 512
