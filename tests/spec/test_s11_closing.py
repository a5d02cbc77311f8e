"""S11 Closing: close joins every thread, twice is fine, a lease held keeps its blocks until it is released."""

from __future__ import annotations

import threading

import pytest

from headstart.testing.fake_kv import TINY, FakeDestination
from headstart.testing.faults import Fault
from headstart.testing.round_trip import TIMEOUT_S, load, match, save
from headstart.testing.tier_contract import prompt

TIERS = ["memory", "disk", "both"]


@pytest.mark.parametrize("tiers", TIERS)
def test_close_joins_every_thread_and_twice_is_fine(shelf, tiers: str) -> None:
    before = set(threading.enumerate())
    cache = shelf.open(tiers)
    save(cache, prompt(6))
    load(cache, prompt(6))
    cache.close()
    cache.close()
    assert set(threading.enumerate()) <= before


def test_close_finishes_queued_saves(shelf) -> None:
    cache = shelf.open("disk")
    kvs = [prompt(6, seed=s) for s in range(20)]
    tickets = [cache.save(kv.tokens.tolist(), kv) for kv in kvs]
    cache.close()
    assert [ticket.wait(0).stored_tokens for ticket in tickets] == [384] * 20
    cache = shelf.open("disk")
    for kv in kvs:
        assert load(cache, kv).usable_tokens == 384


def test_a_closed_cache_misses_and_stores_nothing(shelf) -> None:
    cache = shelf.open("both")
    save(cache, prompt(6))
    cache.close()
    with match(cache, prompt(6)) as lease:
        assert lease.tokens == 0
    result = save(cache, prompt(6, seed=1))
    assert (result.stored_tokens, result.reason) == (0, "closed")


def test_a_ticket_calls_back_once_whatever_becomes_of_the_save(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    called: list[object] = []
    for seed in range(4):
        shelf.faulty.inject(*[Fault("write", "eio", times=1)] * (seed % 2))
        ticket = cache.save(prompt(4, seed=seed).tokens.tolist(), prompt(4, seed=seed))
        ticket.add_done_callback(called.append)
        ticket.wait(TIMEOUT_S)
    cache.close()
    ticket = cache.save(prompt(4).tokens.tolist(), prompt(4))
    ticket.add_done_callback(called.append)
    assert len(called) == 5


def test_a_load_under_way_ends_before_the_cache_is_closed(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    save(cache, prompt(6))
    shelf.faulty.inject(Fault("read", "stall", times=1))
    lease = match(cache, prompt(6))
    destination = FakeDestination(TINY, 6)
    running = lease.load(into=destination)
    assert shelf.faulty.stalled.wait(TIMEOUT_S)
    closer = threading.Thread(target=cache.close)
    closer.start()
    shelf.faulty.heal()
    closer.join(TIMEOUT_S)
    assert not closer.is_alive()
    usable = running.result(TIMEOUT_S)
    assert destination.wrong(prompt(6), pieces=usable // 64) == []
    lease.release()


def test_a_lease_may_be_released_after_the_close(shelf) -> None:
    cache = shelf.open("both")
    save(cache, prompt(6))
    lease = match(cache, prompt(6))
    cache.close()
    lease.release()
    lease.release()
    assert load(shelf.open("disk"), prompt(6)).usable_tokens == 384
