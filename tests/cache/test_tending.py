"""Upkeep has its turn when nothing else waits, and only then."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from cache_kit import TIMEOUT_S, cache_of, prompt

from headstart.cache import saver as saver_module
from headstart.testing.round_trip import save
from headstart.tier.memory import MemoryTier


class TendedTier(MemoryTier):
    """A tier that does in `tend` what a test says, and counts how often it was asked."""

    def __init__(self, work: Callable[[int], bool]) -> None:
        super().__init__(8 << 20)
        self.work = work
        self.tended = 0
        self.enough = Event()

    def tend(self) -> bool:
        self.tended += 1
        if self.tended >= 5:
            self.enough.set()
        return self.work(self.tended)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "_IDLE_S", 0.001)


@pytest.mark.parametrize("more", [True, False])
def test_an_idle_cache_tends_its_tiers_again_and_again(more: bool) -> None:
    tiers = TendedTier(lambda _: more), TendedTier(lambda _: not more)
    with cache_of(*tiers):
        assert all(tier.enough.wait(TIMEOUT_S) for tier in tiers)


def test_a_busy_cache_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "_IDLE_S", TIMEOUT_S)
    tier = TendedTier(lambda _: True)
    with cache_of(tier) as cache:
        for seed in range(10):
            save(cache, prompt(4 * 64, seed=seed))
    assert tier.tended == 0


def test_a_save_that_comes_while_upkeep_is_under_way_is_next() -> None:
    begun, go_on = Event(), Event()

    def work(_: int) -> bool:
        begun.set()
        return go_on.wait(TIMEOUT_S)

    tier = TendedTier(work)
    with cache_of(tier) as cache:
        assert begun.wait(TIMEOUT_S)
        kv = prompt(4 * 64)
        ticket = cache.save(kv.tokens, kv)
        tended = tier.tended
        tended_then: list[int] = []
        ticket.add_done_callback(lambda _: tended_then.append(tier.tended))
        go_on.set()
        assert ticket.wait(TIMEOUT_S).stored_tokens == 4 * 64
    assert tended_then == [tended]


@pytest.mark.parametrize("error", [OSError(5, "planted"), RuntimeError("planted")], ids=["medium", "mistake"])
def test_upkeep_that_fails_is_counted_and_ends_nothing(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: int) -> Any:
        raise error

    tier = TendedTier(fail)
    with cache_of(tier) as cache:
        assert tier.enough.wait(TIMEOUT_S)
        assert save(cache, prompt(4 * 64)).stored_tokens == 4 * 64
        counters = cache.statistics().counters
    assert counters["tier_failed_tend" if isinstance(error, OSError) else "tend_errors"] >= 4


def test_closing_does_not_wait_for_upkeep_to_come_to_an_end() -> None:
    tier = TendedTier(lambda _: True)
    cache = cache_of(tier)
    assert tier.enough.wait(TIMEOUT_S)
    cache.close(TIMEOUT_S)
    tended = tier.tended
    assert not cache._saver._thread.is_alive()
    assert tier.tended == tended
