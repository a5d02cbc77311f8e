"""S9 Layers: layer i is ready before anyone waits past it; if a block fails, the tokens before it stay usable."""

from __future__ import annotations

import threading

import pytest

from headstart.cache.prefix_cache import Load
from headstart.errors import LoadFailed
from headstart.testing.fake_kv import STATEFUL, TINY, FakeDestination
from headstart.testing.faults import Fault
from headstart.testing.round_trip import TIMEOUT_S, load, match, save
from headstart.testing.tier_contract import prompt

KV = prompt(8)


def wait_layer_by_layer(running: Load) -> None:
    for layer in range(TINY.layers):
        running.wait(layer, TIMEOUT_S)


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_a_layer_waited_for_is_right_and_so_are_all_before_it(shelf, tiers: str) -> None:
    cache = shelf.open(tiers)
    save(cache, KV)
    with match(cache, KV) as lease:
        destination = FakeDestination(TINY, 8)
        running = lease.load(into=destination)
        for layer in range(TINY.layers):
            running.wait(layer, TIMEOUT_S)
            assert destination.wrong(KV, pieces=8, layers=range(layer + 1)) == []
        assert running.result(TIMEOUT_S) == 512
        assert running.usable_tokens == 512
        assert sum(running.tokens_by_tier.values()) == 512


def test_layers_can_be_waited_for_in_any_order_and_from_many_threads(shelf) -> None:
    cache = shelf.open("disk")
    save(cache, KV)
    with match(cache, KV) as lease:
        destination = FakeDestination(TINY, 8)
        running = lease.load(into=destination)
        wrong: list[object] = []

        def wait(layer: int) -> None:
            running.wait(layer, TIMEOUT_S)
            wrong.extend(destination.wrong(KV, pieces=8, layers=[layer]))

        threads = [threading.Thread(target=wait, args=(layer,)) for layer in (2, 0, 1, 2, 1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert wrong == []


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("piece", [0, 1, 4, 7])
def test_the_tokens_before_a_bad_block_stay_usable(shelf, layer: int, piece: int) -> None:
    cache = shelf.open("disk")
    save(cache, KV)
    shelf.close()
    shelf.damage_piece(KV, layer=layer, piece=piece)
    cache = shelf.open("disk")
    with match(cache, KV) as lease:
        destination = FakeDestination(TINY, 8)
        running = lease.load(into=destination)
        with pytest.raises(LoadFailed):
            wait_layer_by_layer(running)
        assert running.result(TIMEOUT_S) == piece * 64
        assert destination.wrong(KV, pieces=piece) == []
    assert load(cache, KV).wrong == []
    save(cache, KV)
    assert load(cache, KV).usable_tokens == 512


def test_a_failure_wakes_everybody_who_waits(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    save(cache, KV)
    shelf.faulty.inject(Fault("read", "stall", times=1), Fault("read", "eio", start=1))
    with match(cache, KV) as lease:
        running = lease.load(into=FakeDestination(TINY, 8))
        ended: list[bool] = []

        def wait() -> None:
            try:
                running.wait(TINY.layers - 1, TIMEOUT_S)
            except LoadFailed as failure:
                ended.append(bool(failure.facts.get("timed_out", False)))

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        shelf.faulty.heal()
        shelf.faulty.inject(Fault("read", "eio"))
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert True not in ended
        running.result(TIMEOUT_S)


def test_a_cancelled_load_ends_and_touches_nothing_afterwards(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    save(cache, KV)
    shelf.faulty.inject(Fault("read", "stall", times=1))
    done = threading.Event()
    with match(cache, KV) as lease:
        destination = FakeDestination(TINY, 8)
        running = lease.load(into=destination)
        running.add_done_callback(lambda _: done.set())
        assert shelf.faulty.stalled.wait(TIMEOUT_S)
        running.cancel()
        assert not done.is_set()
        shelf.faulty.heal()
        usable = running.result(TIMEOUT_S)
        assert done.wait(TIMEOUT_S)
        assert destination.wrong(KV, pieces=usable // 64) == []
        before = destination.touched()
    assert load(cache, KV).usable_tokens == 512
    assert destination.touched() == before


def test_a_callback_added_after_the_end_is_called_at_once(shelf) -> None:
    cache = shelf.open("memory")
    save(cache, KV)
    with match(cache, KV) as lease:
        running = lease.load(into=FakeDestination(TINY, 8))
        running.result(TIMEOUT_S)
        called: list[object] = []
        running.add_done_callback(called.append)
        assert called == [running]


def test_a_load_of_nothing_ends_with_nothing(shelf) -> None:
    cache = shelf.open("both")
    with match(cache, KV) as lease:
        assert lease.tokens == 0
        running = lease.load(into=FakeDestination(TINY, 0))
        assert running.result(TIMEOUT_S) == 0
        running.wait(0, TIMEOUT_S)


def test_a_lease_loads_a_token_once(shelf) -> None:
    cache = shelf.open("memory")
    save(cache, KV)
    with match(cache, KV) as lease:
        lease.load(into=FakeDestination(TINY, 8)).result(TIMEOUT_S)
        with pytest.raises(ValueError, match=r".+"):
            lease.load(into=FakeDestination(TINY, 8))


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_each_range_of_a_lease_has_layers_and_an_end_of_its_own(shelf, tiers: str) -> None:
    cache = shelf.open(tiers)
    save(cache, KV)
    destination = FakeDestination(TINY, 8)
    with match(cache, KV) as lease:
        tail = lease.load(into=destination, first_tokens=3 * 64)
        wait_layer_by_layer(tail)
        assert tail.result(TIMEOUT_S) == 5 * 64
        assert destination.wrong(KV, first=3, pieces=5) == []
        assert destination.touched() == [(layer, piece) for layer in range(TINY.layers) for piece in range(3, 8)]
        head = lease.load(into=destination, end_tokens=3 * 64)
        wait_layer_by_layer(head)
        assert head.result(TIMEOUT_S) == 3 * 64
    assert destination.wrong(KV, pieces=8) == []


def test_a_failure_in_one_range_costs_no_other_one(shelf) -> None:
    cache = shelf.open("disk")
    save(cache, KV)
    shelf.damage_piece(KV, layer=1, piece=5)
    destination = FakeDestination(TINY, 8)
    with match(cache, KV) as lease:
        ranges = [(0, 4), (4, 7), (7, 8)]
        loads = [lease.load(into=destination, first_tokens=64 * a, end_tokens=64 * b) for a, b in ranges]
        assert [running.result(TIMEOUT_S) for running in loads] == [4 * 64, 64, 64]
        with pytest.raises(LoadFailed, match="not what was written"):
            loads[1].wait(2, TIMEOUT_S)
        for (first, _), running in zip(ranges, loads, strict=True):
            assert destination.wrong(KV, first=first, pieces=running.usable_tokens // 64) == []
    shelf.expect_problems()


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_a_state_is_there_before_any_layer_is_needed(shelf, tiers: str) -> None:
    cache = shelf.open(tiers, representation=STATEFUL)
    kv = prompt(8, representation=STATEFUL)
    save(cache, kv)
    with cache.match(kv.tokens, leave=0) as lease:
        running = lease.load(FakeDestination(STATEFUL, 8))
        assert running.state(TIMEOUT_S) == kv.state(8)
        wait_layer_by_layer(running)
        assert running.result(TIMEOUT_S) == 512
