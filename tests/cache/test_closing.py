"""Closing finishes what was promised within its bound, joins every thread, and leaves held leases alone."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from cache_kit import TIMEOUT_S, SpotTier, cache_of, disk, prompt, until

from headstart.errors import LoadFailed
from headstart.testing.fake_kv import TINY, FakeDestination
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.round_trip import finish, match, save
from headstart.tier.memory import MemoryTier


def test_close_finishes_queued_saves_and_joins_every_thread() -> None:
    before = set(threading.enumerate())
    tier = disk(64 << 20)
    cache = cache_of(MemoryTier(64 << 20), tier)
    tickets = [cache.save(prompt(640, seed=seed).tokens, prompt(640, seed=seed)) for seed in range(20)]
    cache.close()
    cache.close()
    assert [ticket.wait(0.0).stored_tokens for ticket in tickets] == [640] * 20
    assert set(threading.enumerate()) <= before


def test_a_closed_cache_misses_and_keeps_nothing() -> None:
    cache = cache_of(disk())
    save(cache, prompt(640))
    cache.close()
    with match(cache, prompt(640)) as lease:
        assert lease.tokens == 0
    assert save(cache, prompt(640)).reason == "closed"
    assert cache.statistics().counters["match_missed_closed"] == 1


def test_a_lease_that_outlives_its_cache_keeps_its_blocks_until_released() -> None:
    tier = MemoryTier(4 << 20)
    cache = cache_of(tier)
    save(cache, prompt(640))
    save(cache, prompt(640, seed=1))
    lease = match(cache, prompt(641))
    cache.close()
    assert tier.statistics().extents == 1
    loaded = finish(lease, prompt(641))
    assert (loaded.usable_tokens, loaded.wrong) == (0, [])  # nobody reads any more
    with pytest.raises(LoadFailed, match="closed"):
        loaded.load.wait(0)
    lease.release()
    assert tier.statistics().extents == 0
    assert tier.check() == []


def test_a_load_under_way_ends_with_what_it_has() -> None:
    tier = FaultyTier(MemoryTier(4 << 20))
    cache = cache_of(tier)
    save(cache, prompt(640))
    tier.inject(Fault("read", "stall", times=1))
    lease = match(cache, prompt(641))
    running = lease.load(into=FakeDestination(TINY, 10))
    assert tier.stalled.wait(TIMEOUT_S)
    closing = threading.Thread(target=cache.close)
    closing.start()
    tier.heal()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert running.result(TIMEOUT_S) in (0, 640)
    lease.release()
    assert tier.inner.statistics().extents == 0


def test_closing_does_not_wait_for_a_tier_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    tier = FaultyTier(MemoryTier(4 << 20), Fault("write", "stall", times=1))
    cache = cache_of(tier)
    with caplog.at_level(logging.CRITICAL):
        stuck = cache.save(prompt(640).tokens, prompt(640))
        assert tier.stalled.wait(TIMEOUT_S)
        queued = cache.save(prompt(640, seed=1).tokens, prompt(640, seed=1))
        cache.close(timeout_s=0.0)
    assert queued.wait(0.0).reason == "closed"
    assert not stuck.done  # what hangs has not let go yet
    tier.heal()
    assert stuck.wait(TIMEOUT_S).stored_tokens == 640
    cache._saver._thread.join(TIMEOUT_S)
    tier.close()


def test_a_tier_whose_own_close_hangs_is_left_behind_with_it() -> None:
    class Hanging(SpotTier):
        answers = threading.Event()

        def close(self) -> None:
            self.answers.wait(10 * TIMEOUT_S)

    before = set(threading.enumerate())
    cache = cache_of(Hanging(MemoryTier(4 << 20)))
    save(cache, prompt(640))
    cache.close(timeout_s=0.5)
    assert cache.statistics().counters["close_timed_out_disk"] == 1
    Hanging.answers.set()
    until(lambda: set(threading.enumerate()) <= before)  # of earlier tests some may still be ending


def test_one_deadline_is_passed_through_everything_that_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = [FaultyTier(MemoryTier(4 << 20)) for _ in range(2)]
    cache = cache_of(*tiers)
    clock = [0.0]
    waits: list[float] = []

    def join(thread: threading.Thread, timeout_s: float | None = None) -> None:
        """Every thread takes all the time that it is given."""
        assert timeout_s is not None
        waits.append(timeout_s)
        clock[0] += timeout_s

    with monkeypatch.context() as patched, caplog.at_level(logging.CRITICAL):
        patched.setattr(time, "monotonic", lambda: clock[0])
        patched.setattr(threading.Thread, "join", join)
        cache.close(timeout_s=10.0)
    assert waits[:2] == [7.5, 2.5]
    assert sum(waits) == 10.0
