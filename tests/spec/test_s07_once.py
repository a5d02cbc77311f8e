"""S7 Once: saving the same block twice stores one extent, whoever saves it."""

from __future__ import annotations

import pytest

from headstart.testing.fake_kv import STATEFUL
from headstart.testing.faults import Fault
from headstart.testing.round_trip import load, save
from headstart.testing.tier_contract import prompt, together

TIERS = ["memory", "disk", "both"]


def extents(shelf) -> list[int]:
    return [tier.statistics().extents for tier in shelf.tiers]


@pytest.mark.parametrize("tiers", TIERS)
def test_saving_again_writes_nothing(shelf, tiers: str) -> None:
    cache = shelf.open(tiers)
    first = save(cache, prompt(6))
    assert (first.stored_tokens, first.reason) == (384, None)
    assert first.written_bytes > 0
    before = extents(shelf)
    again = save(cache, prompt(6))
    assert (again.stored_tokens, again.written_bytes, again.reason) == (384, 0, None)
    assert extents(shelf) == before


def test_the_next_turn_writes_only_what_is_new(shelf) -> None:
    cache = shelf.open("disk")
    save(cache, prompt(6))
    result = save(cache, prompt(8))
    assert result.stored_tokens == 512
    assert result.written_bytes < len(prompt(4).image())
    assert load(cache, prompt(8)).usable_tokens == 512


@pytest.mark.parametrize("tiers", TIERS)
def test_threads_that_save_the_same_prompts_store_each_once(shelf, tiers: str) -> None:
    cache = shelf.open(tiers)
    kvs = [prompt(4, seed=s) for s in range(8)]
    written: list[int] = []

    def save_all(thread: int) -> None:
        for number in range(16):
            result = save(cache, kvs[(number + thread) % 8])
            assert (result.stored_tokens, result.reason) == (256, None)
            written.append(result.written_bytes)

    together(save_all, count=16)
    assert extents(shelf) == [8] * len(shelf.tiers)
    assert sum(n > 0 for n in written) == 8
    for kv in kvs:
        assert load(cache, kv).wrong == []


def test_two_saves_queued_one_behind_the_other_write_once(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    shelf.faulty.inject(Fault("write", "stall", times=1))
    tickets = [cache.save(prompt(4).tokens.tolist(), prompt(4)) for _ in range(5)]
    shelf.faulty.heal()
    assert [ticket.wait(10).stored_tokens for ticket in tickets] == [256] * 5
    assert extents(shelf) == [1]


def test_two_caches_on_one_directory_agree(shelf) -> None:
    """As two processes do: neither writes over the other, and both serve the truth."""
    one, two = shelf.open("disk"), shelf.open("disk")
    kvs = [prompt(4, seed=s) for s in range(8)]

    def save_all(thread: int) -> None:
        for kv in kvs:
            assert save((one, two)[thread % 2], kv).reason is None

    together(save_all, count=4)
    for cache in (one, two):
        for kv in kvs:
            found = load(cache, kv)
            assert (found.usable_tokens, found.wrong) == (256, [])
    again = shelf.reopen("disk")
    for kv in kvs:
        assert load(again, kv).usable_tokens == 256


@pytest.mark.parametrize("tiers", TIERS)
def test_a_state_is_stored_once_and_blocks_for_its_sake_once_more(shelf, tiers: str) -> None:
    cache = shelf.open(tiers, representation=STATEFUL)
    kv = prompt(8, representation=STATEFUL)

    def save_all(thread: int) -> None:
        for behind in (3 + thread % 2, 8):
            assert save(cache, kv, states=kv.states(behind)).stored_tokens >= behind * 64

    together(save_all, count=8)
    before = extents(shelf)
    assert all(count <= 5 for count in before)
    again = save(cache, kv, states=kv.states(3, 4, 8))
    assert (again.written_bytes, extents(shelf)) == (0, before)
