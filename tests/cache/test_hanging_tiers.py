"""A medium that hangs costs its hits and nothing else: no engine's thread waits for it longer than a match's patience."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cache_kit import TIMEOUT_S, cache_of, disk, leased_bytes, prompt, until

from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.fake_kv import TINY
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.round_trip import finish, hit_tokens, load, match, save
from headstart.tier.memory import MemoryTier

KV = prompt(20 * 64 + 1)
PATIENCE_S = 0.05


@pytest.fixture
def slow() -> FaultyTier:
    return FaultyTier(disk(), stall_s=10 * TIMEOUT_S)


@pytest.fixture
def cache(slow: FaultyTier) -> Iterator[PrefixCache]:
    """The whole prompt is on the slow tier, its head in memory."""
    memory = MemoryTier(8 << 20)
    with cache_of(memory, slow, match_timeout_s=PATIENCE_S) as cache:
        save(cache, KV)
        for info in list(memory.scan()):
            memory.delete([info.id], reason="user")
        memory.write(KV.image(0, 5), TINY)
        yield cache
        slow.heal()


def hangs(cache: PrefixCache) -> bool:
    return cache._sources[1].hangs(TIMEOUT_S)


@pytest.mark.parametrize("verb", ["locate", "lease"])
def test_what_faster_tiers_have_counts_when_a_lookup_hangs(cache: PrefixCache, slow: FaultyTier, verb: str) -> None:
    slow.inject(Fault(verb, "stall", times=1))  # type: ignore[arg-type]
    with match(cache, KV) as lease:
        assert lease.tokens_by_tier == {"memory": 5 * 64}
        assert finish(lease, KV).wrong == []
    assert slow.stalled.is_set()
    calls = slow.calls.copy()
    assert hit_tokens(cache, KV) == 5 * 64  # and asks nobody who does not answer
    assert slow.calls == calls
    counters = cache.statistics().counters
    assert (counters["match_timed_out_disk"], counters["match_skipped_disk"]) == (1, 1)
    slow.heal()
    until(lambda: not hangs(cache))
    assert hit_tokens(cache, KV) == 20 * 64


def test_a_lease_that_comes_late_is_let_go(cache: PrefixCache, slow: FaultyTier) -> None:
    slow.inject(Fault("lease", "stall", times=1))
    match(cache, KV).release()
    slow.heal()
    until(lambda: not hangs(cache))
    assert leased_bytes(slow) == 0


def test_a_release_that_hangs_is_made_once_the_tier_answers(cache: PrefixCache, slow: FaultyTier) -> None:
    lease = match(cache, KV)
    slow.inject(Fault("release", "stall", times=1))
    lease.release()
    assert hit_tokens(cache, KV) == 5 * 64
    slow.heal()
    until(lambda: not hangs(cache))
    assert leased_bytes(slow) == 0


@pytest.mark.parametrize("verb", ["touch", "delete"])
def test_a_load_is_done_without_waiting_for_anything_to_be_written(cache: PrefixCache, slow: FaultyTier, verb: str) -> None:
    slow.inject(Fault(verb, "stall", times=1), Fault("read", "flip", start=3, times=1))  # type: ignore[arg-type]
    loaded = load(cache, KV)
    assert loaded.load.done
    assert loaded.wrong == []
    assert slow.stalled.wait(TIMEOUT_S)


def test_an_error_of_a_lookup_is_a_miss_and_not_a_hang(cache: PrefixCache, slow: FaultyTier) -> None:
    cache._sources[1]._patience_s = TIMEOUT_S  # a busy machine is not what this is about
    slow.inject(Fault("locate", "eio", times=1))
    assert hit_tokens(cache, KV) == 5 * 64
    assert not hangs(cache)
    assert hit_tokens(cache, KV) == 20 * 64
    assert "match_timed_out_disk" not in cache.statistics().counters
