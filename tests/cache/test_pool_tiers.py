"""A cache whose last tier is a pool: what one machine saved another loads, keeps on its own disk, and goes on with alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cache_kit import prompt

from headstart.block.extent import decode_header
from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig, load_config
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.testing.round_trip import hit_tokens, load, save
from headstart.tier.base import Terms
from headstart.tier.disk.new_record import record_of
from headstart.tier.disk.records import ExtentName
from headstart.tier.pool import PoolTier

Open = Callable[..., PrefixCache]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Open]:
    """Opens machine `name`'s cache, over its own disk and the pool of all."""
    opened: list[PrefixCache] = []
    (tmp_path / "pool").mkdir()

    def start(name: str, **options: object) -> PrefixCache:
        settings = {"directory": tmp_path / name, "capacity": "64MiB", "memory": "0", "pool": tmp_path / "pool"}
        config = CacheConfig(**{**settings, "pool_capacity": "64MiB", **options})  # type: ignore[arg-type]
        opened.append(open_cache(config, identity=IDENTITY, representation=TINY))
        return opened[-1]

    yield start
    for cache in opened:
        cache.close()


def seen(cache: PrefixCache, kv: FakeKV) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if hit_tokens(cache, kv) == 6400:
            return True
        time.sleep(0.02)
    return False


def test_what_one_machine_saved_another_loads_from_the_pool_and_then_from_its_own_disk(machine: Open) -> None:
    kv = prompt(6401)
    a, b = machine("a"), machine("b")
    assert [tier.name for tier in a.statistics().tiers] == ["disk", "pool"]
    assert save(a, kv).stored_tokens == 6400
    assert load(a, kv).load.tokens_by_tier == {"disk": 6400}
    assert seen(b, kv)
    loaded = load(b, kv)
    assert (loaded.usable_tokens, loaded.wrong) == (6400, [])
    assert loaded.load.tokens_by_tier == {"pool": 6400}
    assert save(b, kv).stored_tokens == 6400  # as engines do at the end of every prompt
    assert load(b, kv).load.tokens_by_tier == {"disk": 6400}
    assert (a.check(), b.check()) == ([], [])


def test_a_machine_whose_pool_is_gone_goes_on_with_what_it_has(machine: Open, tmp_path: Path) -> None:
    kv, later = prompt(6401), prompt(6401, seed=2)
    cache = machine("a")
    assert save(cache, kv).stored_tokens == 6400
    shutil.move(tmp_path / "pool", tmp_path / "away")
    assert load(cache, kv).load.tokens_by_tier == {"disk": 6400}
    save(cache, later)
    assert load(cache, later).load.tokens_by_tier == {"disk": 6400}
    assert not (tmp_path / "pool").exists()


def test_a_pool_that_cannot_be_had_is_said_and_costs_nothing_else(machine: Open, tmp_path: Path) -> None:
    cache = machine("a", pool=tmp_path / "nowhere")
    assert [tier.name for tier in cache.statistics().tiers] == ["disk"]
    assert "mount its file system" in cache.warnings[0]
    (tmp_path / "tiny").mkdir()
    assert "holds nothing" in machine("b", pool=tmp_path / "tiny", pool_capacity="1KiB").warnings[0]


def test_a_reader_of_the_pool_stores_nothing_in_it(machine: Open, tmp_path: Path) -> None:
    kv = prompt(6401)
    save(machine("a"), kv)
    before = sorted(tmp_path.glob("pool/**/*"))
    reader = machine("b", pool_read_only=True)
    assert seen(reader, kv)
    save(reader, prompt(641, seed=3))
    assert sorted(tmp_path.glob("pool/**/*")) == before
    assert load(reader, kv).wrong == []


def test_the_settings_of_a_pool_have_short_flags(tmp_path: Path) -> None:
    from headstart.config import settings

    flags = {key: setting.flag for key, setting in settings().items() if key.startswith("cache.pool")}
    assert flags == {
        "cache.pool": "--pool",
        "cache.pool_capacity": "--pool-capacity",
        "cache.pool_read_only": "--pool-read-only",
        "cache.pool_visible_s": "--pool-visible-s",
    }
    assert load_config(overrides={"cache.pool": str(tmp_path)}).cache.pool == tmp_path


@pytest.mark.parametrize("pool_capacity", ["64MiB", str(1 << 61)])
def test_a_record_that_somebody_made_up_costs_no_save(machine: Open, tmp_path: Path, pool_capacity: str) -> None:
    """Memory for so long an extent cannot be had; where the pool could hold it, its bytes are looked at and found wrong."""
    kv, image = prompt(6401), prompt(6401).image()
    forger = PoolTier.open(tmp_path / "pool", capacity_bytes=64 << 20, background=False)
    forger.write(prompt(1281, seed=2).image(), TINY)
    (segment,) = forger._store.appending.values()
    record = record_of(image, decode_header(image, TINY), TINY, Terms(), steady_ms=lambda ms: ms)
    place = ExtentName(segment.name, segment.header_bytes + 4096)
    forger._store.append([replace(record, extent=place, extent_bytes=1 << 60)])
    try:
        cache = machine("a", pool_capacity=pool_capacity)
        assert (hit_tokens(cache, kv) > 0) == (pool_capacity != "64MiB")
        assert load(cache, kv).wrong == []
        for seed in (3, 4):
            assert save(cache, prompt(1281, seed=seed)).stored_tokens == 1280
        assert save(cache, kv).stored_tokens == 6400
        assert load(cache, kv).usable_tokens == 6400
        counters = cache.statistics().tiers[-1].counters
        assert counters.get("records_refused_size", 0) == (pool_capacity == "64MiB")
        assert counters.get("quarantined_corrupt", 0) == (pool_capacity != "64MiB")
    finally:
        forger.close()
