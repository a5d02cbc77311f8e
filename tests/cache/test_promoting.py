"""A prefix on disk is brought to memory before it is asked for: verified, bounded, behind what others wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from cache_kit import SpotTier, cache_of, disk, prompt, spot

from headstart.cache import promoting
from headstart.cache.prefix_cache import PrefixCache
from headstart.cache.source import Source
from headstart.testing.fake_kv import TINY, FakeDestination
from headstart.tier.memory import MemoryTier

TOKENS = 64 * 12


@pytest.fixture
def slow() -> SpotTier:
    return disk()


@pytest.fixture
def cache(slow: SpotTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefixCache]:
    """A cache whose disk has a prompt of 12 blocks that its memory lacks; parts are of 3 blocks."""
    monkeypatch.setattr(promoting, "_PART_BYTES", 3 * 64 * (TINY.bytes_per_token or 0))
    memory = MemoryTier(8 << 20)
    with cache_of(memory, slow) as cache:
        assert cache.save(prompt(TOKENS).tokens, prompt(TOKENS)).wait(20).reason is None
        memory.delete([one.id for one in memory.scan()], reason="test")
        yield cache


def where(cache: PrefixCache) -> dict[str, int]:
    with cache.match(prompt(TOKENS).tokens, leave=0) as lease:
        return lease.tokens_by_tier


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ended(cache: PrefixCache) -> bool:
    assert cache._promoter is not None
    return not cache._promoter.busy


def test_what_is_promoted_is_read_from_memory_as_it_was(cache: PrefixCache) -> None:
    assert where(cache) == {"disk": TOKENS}
    assert cache.promote(prompt(TOKENS + 1).tokens, most_bytes=1 << 30)
    until(lambda: ended(cache))
    assert where(cache) == {"memory": TOKENS}
    into = FakeDestination(TINY, TOKENS // 64)
    with cache.match(prompt(TOKENS).tokens, leave=0) as lease:
        assert lease.load(into).result(20) == TOKENS
    assert into.wrong(prompt(TOKENS), pieces=TOKENS // 64) == []
    assert cache.statistics().counters["promoted_tokens"] == TOKENS
    assert not cache.promote(prompt(TOKENS + 1).tokens, most_bytes=1 << 30)  # nothing to bring
    assert cache.check() == []


def test_no_more_is_promoted_than_was_allowed_and_from_the_head_on(cache: PrefixCache) -> None:
    assert cache.promote(prompt(TOKENS + 1).tokens, most_bytes=5 * 64 * (TINY.bytes_per_token or 0))
    until(lambda: ended(cache))
    assert where(cache) == {"memory": 5 * 64, "disk": TOKENS - 5 * 64}


def test_a_part_that_is_corrupt_ends_it_with_what_came_before(cache: PrefixCache, slow: SpotTier) -> None:
    slow.spots = {spot(TINY, pieces=12, layer=1, piece=7): "flip"}
    assert cache.promote(prompt(TOKENS + 1).tokens, most_bytes=1 << 30)
    until(lambda: ended(cache))
    assert where(cache)["memory"] == 6 * 64
    assert cache.statistics().counters["load_failed_corrupt"] == 1


def test_what_is_promoted_is_nobodys_request_and_no_save_to_the_disk(
    cache: PrefixCache, slow: SpotTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(slow, "keep", lambda *terms: kept.append(terms), raising=False)
    before = cache.statistics().counters
    assert cache.promote(prompt(TOKENS + 1).tokens, most_bytes=1 << 30)
    until(lambda: ended(cache))
    after = cache.statistics().counters
    for name in ("match_calls", "match_asked_tokens", "matched_tokens_disk", "save_calls"):
        assert after.get(name, 0) == before.get(name, 0)
    assert after["promoted_tokens"] == TOKENS
    assert kept == []  # a promise begins with a save, and not with a guess


def test_one_that_cannot_be_started_does_not_end_all_promoting(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Source, "pool_of", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        cache.promote(prompt(TOKENS + 1).tokens, most_bytes=1 << 30)
    monkeypatch.undo()
    assert cache.promote(prompt(TOKENS + 1).tokens, most_bytes=1 << 30)
    until(lambda: ended(cache))
    assert where(cache) == {"memory": TOKENS}


def test_without_a_memory_tier_nothing_is_promoted(slow: SpotTier) -> None:
    with cache_of(slow) as cache:
        assert not cache.promote(prompt(TOKENS).tokens, most_bytes=1 << 30)


def test_what_is_promoted_waits_for_what_others_wait_for(cache: PrefixCache) -> None:
    lease = cache.match(prompt(TOKENS).tokens, leave=0)
    with lease:
        first = lease.load(FakeDestination(TINY, 12), 0, 64, behind=True)
        second = lease.load(FakeDestination(TINY, 12), 64, 128)
        assert second.turn_s < first.turn_s
        assert first.result(20) == second.result(20) == 64


def test_a_look_ahead_is_no_match_of_a_request(cache: PrefixCache) -> None:
    with cache.match(prompt(TOKENS).tokens, leave=0, ahead=True) as lease:
        assert lease.tokens == TOKENS
    counters = cache.statistics().counters
    assert counters["match_ahead_calls"] == 1
    assert not [name for name in counters if name.startswith(("match", "matched")) and name != "match_ahead_calls"]
