"""S3 Lease: leased blocks are not evicted or moved away, for as long as the lease is held and not a moment longer."""

from __future__ import annotations

import random

import pytest

from headstart.testing.fake_kv import TINY, FakeDestination
from headstart.testing.faults import Fault
from headstart.testing.round_trip import finish, hit_tokens, load, match, save
from headstart.testing.tier_contract import prompt

BOTH = ["memory", "disk", "both"]


def press(cache, tiers) -> None:
    """Save twice what the largest tier holds."""
    room = max(tier.statistics().capacity_bytes for tier in tiers)
    for seed in range(2 * room // len(prompt(12).image()) + 1):
        save(cache, prompt(12, seed=5000 + seed))


@pytest.mark.parametrize("tiers", BOTH)
def test_leased_blocks_survive_pressure(shelf, tiers: str) -> None:
    kv = prompt(6)
    cache = shelf.open_small(tiers)
    save(cache, kv)
    with match(cache, kv) as lease:
        press(cache, shelf.tiers)
        found = finish(lease, kv)
    assert (found.usable_tokens, found.wrong) == (384, [])


@pytest.mark.parametrize("tiers", BOTH)
def test_released_blocks_give_way(shelf, tiers: str) -> None:
    kv = prompt(6)
    cache = shelf.open_small(tiers)
    save(cache, kv)
    match(cache, kv).release()
    press(cache, shelf.tiers)
    assert hit_tokens(cache, kv) == 0


@pytest.mark.parametrize("tiers", ["memory", "disk"])
def test_a_read_slower_than_every_eviction_is_still_right(shelf, tiers: str) -> None:
    """The reader stops amid its load while everything around is evicted."""
    kv = prompt(6)
    cache = shelf.open_small(tiers, faulty=True)
    save(cache, kv)
    shelf.faulty.inject(Fault("read", "stall", times=1))
    with match(cache, kv) as lease:
        destination = FakeDestination(TINY, 6)
        running = lease.load(into=destination)
        assert shelf.faulty.stalled.wait(10)
        press(cache, shelf.tiers)
        shelf.faulty.heal()
        assert running.result(10) == 384
        assert destination.wrong(kv, pieces=6) == []


def test_releasing_twice_releases_once(shelf) -> None:
    kv = prompt(6)
    cache = shelf.open_small("memory")
    save(cache, kv)
    first, second = match(cache, kv), match(cache, kv)
    first.release()
    first.release()
    press(cache, shelf.tiers)
    assert finish(second, kv).usable_tokens == 384
    second.release()


def test_a_lease_released_while_its_load_runs_protects_to_the_end_of_the_load(shelf) -> None:
    kv = prompt(6)
    cache = shelf.open_small("disk", faulty=True)
    save(cache, kv)
    shelf.faulty.inject(Fault("read", "stall", times=1))
    lease = match(cache, kv)
    destination = FakeDestination(TINY, 6)
    running = lease.load(into=destination)
    assert shelf.faulty.stalled.wait(10)
    lease.release()
    press(cache, shelf.tiers)
    shelf.faulty.heal()
    usable = running.result(10)
    assert destination.wrong(kv, pieces=usable // 64) == []
    press(cache, shelf.tiers)
    assert hit_tokens(cache, kv) == 0


@pytest.mark.parametrize("tiers", ["memory", "disk"])
def test_lookups_leave_nothing_pinned(shelf, tiers: str) -> None:
    """Of many lookups some never load, some are cancelled, some fail; afterwards every extent can be deleted."""
    cache = shelf.open_small(tiers, faulty=True)
    kvs = [prompt(4, seed=s) for s in range(4)]
    choice = random.Random(1)
    for _ in range(500):
        kv = choice.choice(kvs)
        what = choice.random()
        if what < 0.3:
            match(cache, kv).release()
        elif what < 0.4:
            with match(cache, kv) as lease:
                running = lease.load(into=FakeDestination(TINY, lease.tokens // 64))
                running.cancel()
                running.result(10)
        elif what < 0.5:
            shelf.faulty.inject(Fault("read", "eio", times=1))
            load(cache, kv)
            shelf.faulty.heal()
        else:
            save(cache, kv)
            assert load(cache, kv).wrong == []
    tier = shelf.tiers[0]
    extents = [info.id for info in tier.scan()]
    assert tier.delete(extents, reason="user") == len(extents)


@pytest.mark.parametrize("tiers", ["memory", "disk"])
def test_looking_does_not_keep_a_prompt_alive(shelf, tiers: str) -> None:
    """Probes without loading must not protect everything: what nobody loads is what is evicted."""
    cache = shelf.open_small(tiers)
    probed = prompt(6, seed=1)
    save(cache, probed)
    room = shelf.tiers[0].statistics().capacity_bytes
    for seed in range(2 * room // len(prompt(6).image())):
        hit_tokens(cache, probed)
        assert save(cache, prompt(6, seed=100 + seed)).reason is None
    assert hit_tokens(cache, probed) == 0
