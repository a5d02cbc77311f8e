"""Caches of several processes over one memory tier: what one computed all hit, and it takes the place of their own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_kit import prompt, until

from headstart.cache.open import memory_to_come, open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig, load_config, settings
from headstart.testing.fake_kv import IDENTITY, TINY
from headstart.testing.round_trip import load, save

Open = Callable[..., PrefixCache]


@pytest.fixture
def node() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="headstart-test-", dir="/dev/shm"))
    yield folder / "node"
    shutil.rmtree(folder)


@pytest.fixture
def config(node: Path, tmp_path: Path) -> CacheConfig:
    return CacheConfig(
        directory=tmp_path / "kv", capacity="64MiB", memory="8MiB", node_memory="8MiB", node_directory=node, write_budget="1"
    )


def opened(config: CacheConfig) -> PrefixCache:
    return open_cache(config, identity=IDENTITY, representation=TINY)


def test_what_one_process_computed_another_loads_from_memory_at_once(config: CacheConfig) -> None:
    kv, other = prompt(6401), prompt(6401, seed=2)
    with opened(config) as one, opened(config) as two:
        assert [tier.name for tier in one.statistics().tiers] == ["memory", "disk"]
        assert save(one, kv).reason == "budget"  # no disk takes anything: that is for what wears out, not for memory
        for cache in (one, two):
            loaded = load(cache, kv)
            assert (loaded.usable_tokens, loaded.wrong) == (6400, [])
            assert loaded.load.tokens_by_tier == {"memory": 6400}
        two.save(other.tokens, other, memory_only=True).wait(20)
        assert load(one, other).load.tokens_by_tier == {"memory": 6400}
        assert (one.check(), two.check()) == ([], [])
    with opened(config) as later:
        assert load(later, kv).load.tokens_by_tier == {"memory": 6400}


def test_bytes_that_were_overwritten_in_memory_are_a_miss(config: CacheConfig, node: Path) -> None:
    kv = prompt(6401)
    with opened(config) as one, opened(config) as two:
        save(one, kv)
        for segment in (node / "segments").rglob("*.seg"):
            data = bytearray(segment.read_bytes())
            data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
            with segment.open("r+b") as file:
                file.write(data)
        loaded = load(two, kv)
        assert loaded.wrong == []
        assert loaded.usable_tokens < 6400
        assert two.statistics().counters["load_failed_corrupt"] >= 1


def test_where_it_cannot_be_had_each_process_has_its_own(config: CacheConfig, node: Path) -> None:
    node.mkdir(mode=0o755)
    with opened(config) as cache:
        assert "chmod 700" in cache.warnings[0]
        assert [tier.name for tier in cache.statistics().tiers] == ["memory", "disk"]
        assert list(node.iterdir()) == []


def test_a_prefix_on_disk_is_promoted_to_it(config: CacheConfig, node: Path) -> None:
    kv = prompt(6401)
    alone = CacheConfig(directory=config.directory, capacity="64MiB", memory="0")
    with opened(alone) as cache:
        save(cache, kv)
    with opened(config) as cache:
        assert cache.promote(kv.tokens, most_bytes=1 << 30)
        until(lambda: cache.statistics().counters.get("promoted_tokens", 0) > 0)
        assert load(cache, kv).load.tokens_by_tier["memory"] > 0


def test_its_settings_have_flags_and_count_as_memory_that_is_taken(config: CacheConfig, node: Path) -> None:
    flags = {key: setting.flag for key, setting in settings().items() if key.startswith("cache.node")}
    assert flags == {"cache.node_memory": "--node-memory", "cache.node_directory": "--node-directory"}
    assert load_config().cache.node_path.parent == Path("/dev/shm")
    assert memory_to_come(CacheConfig()) == 2 << 30
    assert memory_to_come(CacheConfig(enabled=False)) == 0
    assert memory_to_come(config) == 8 << 20
    with opened(config) as cache:
        save(cache, prompt(6401))
        assert memory_to_come(config) < 7 << 20
