"""A day's write budget is kept by the saver: memory is not counted; the disk gets heads of prompts when it runs short."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from cache_kit import cache_of, prompt

from headstart.cache import budget
from headstart.cache.open import open_cache
from headstart.config import CacheConfig
from headstart.errors import ConfigError
from headstart.testing.fake_kv import IDENTITY, TINY
from headstart.testing.round_trip import hit_tokens, save
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier


def disk(root: Path) -> DiskTier:
    return DiskTier.open(root, capacity_bytes=64 << 20)


def block_bytes() -> int:
    return sum(nbytes or 0 for nbytes in TINY.layer_bytes)


def test_without_a_budget_everything_is_kept(tmp_path: Path) -> None:
    with cache_of(disk(tmp_path)) as cache:
        assert save(cache, prompt(4096)).stored_tokens == 4096


def test_when_it_runs_short_the_disk_keeps_heads_and_memory_keeps_all(tmp_path: Path) -> None:
    budget_bytes = 40 * block_bytes()  # of which a fifth, 8 blocks, may be written at once
    memory, tier = MemoryTier(8 << 20), disk(tmp_path)
    with cache_of(memory, tier, write_budget_bytes=budget_bytes) as cache:
        result = save(cache, prompt(64 * 64))
        assert result.reason == "budget"
        assert 0 < result.stored_tokens <= 8 * 64
        counters = cache.statistics().counters
        assert counters["save_budget_dropped_tokens_disk"] == 64 * 64 - result.stored_tokens
        assert hit_tokens(cache, prompt(64 * 64)) == 63 * 64


def test_the_log_says_once_that_the_budget_runs_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cache_of(disk(tmp_path), write_budget_bytes=40 * block_bytes()) as cache:
        save(cache, prompt(4 * 64))
        assert "cache.write_budget" not in caplog.text
        for seed in range(1, 4):
            save(cache, prompt(64 * 64, seed=seed))
    assert caplog.text.count("cache.write_budget") == 1


def test_where_it_stops_every_save_the_tier_says_so_until_something_is_kept_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_bytes = 1280 * block_bytes()  # a 64th of the fifth that comes at once is 4 blocks
    now = [1000.0]
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with cache_of(MemoryTier(8 << 20), disk(tmp_path), write_budget_bytes=budget_bytes) as cache:

        def paused() -> list[str]:
            return [tier.paused for tier in cache.statistics().tiers]

        seed = 0
        while save(cache, prompt(64 * 64, seed=seed)).stored_tokens:
            assert paused() == ["", ""]
            seed += 1
        memory, told = paused()
        assert memory == ""
        assert told.startswith("cache.write_budget (")
        assert "is used up" in told
        now[0] += 3600.0
        assert paused() == ["", ""]  # there is enough for one more by now
        assert save(cache, prompt(64 * 64, seed=seed)).stored_tokens
        assert paused() == ["", ""]


def test_what_comes_again_is_kept_before_what_is_new(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with cache_of(tier, write_budget_bytes=1000 * block_bytes()) as cache:
        for seed in range(1, 40):  # spend the budget down
            save(cache, prompt(64 * 64, seed=seed))
        new = save(cache, prompt(4 * 64, seed=100)).stored_tokens
        again = save(cache, prompt(4 * 64, seed=100)).stored_tokens
        assert new < 4 * 64
        assert again >= new


def test_a_restart_does_not_give_a_new_budget(tmp_path: Path) -> None:
    budget_bytes = 100 * block_bytes()
    with cache_of(disk(tmp_path), write_budget_bytes=budget_bytes) as cache:
        save(cache, prompt(64 * 64))
    written = []
    for seed in range(1, 20):
        with cache_of(disk(tmp_path), write_budget_bytes=budget_bytes) as cache:
            written.append(save(cache, prompt(64 * 64, seed=seed)).written_bytes)
    with cache_of(disk(tmp_path), write_budget_bytes=budget_bytes) as cache:
        assert cache.statistics().tiers[0].written_day_bytes <= budget_bytes
    assert written[-1] == 0


def test_a_budget_of_nothing_is_refused_with_what_to_write_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unlimited"):
        open_cache(CacheConfig(directory=tmp_path, write_budget="0"), identity=IDENTITY, representation=TINY)
