"""A cache whose last tier is an object store: what one machine saved another loads, and goes on with alone."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_kit import prompt

from headstart.cache.open import open_cache, open_object_store
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig, load_config, settings
from headstart.errors import ConfigError
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.testing.round_trip import hit_tokens, load, save

Open = Callable[..., PrefixCache]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Open]:
    """Opens machine `name`'s cache, over its own disk and the bucket of all."""
    opened: list[PrefixCache] = []
    (tmp_path / "bucket").mkdir()

    def start(name: str, **options: object) -> PrefixCache:
        given = {"directory": tmp_path / name, "capacity": "64MiB", "memory": "0", "object_store": f"file://{tmp_path}/bucket"}
        config = CacheConfig(**{**given, "object_capacity": "64MiB", **options})  # type: ignore[arg-type]
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


def test_what_one_machine_saved_another_loads_from_the_bucket_and_then_from_its_own_disk(machine: Open) -> None:
    kv = prompt(6401)
    a, b = machine("a"), machine("b")
    assert [tier.name for tier in a.statistics().tiers] == ["disk", "object"]
    assert save(a, kv).stored_tokens == 6400
    assert seen(b, kv)
    loaded = load(b, kv)
    assert (loaded.usable_tokens, loaded.wrong) == (6400, [])
    assert loaded.load.tokens_by_tier == {"object": 6400}
    assert save(b, kv).stored_tokens == 6400
    assert load(b, kv).load.tokens_by_tier == {"disk": 6400}
    assert (a.check(), b.check()) == ([], [])


@pytest.mark.parametrize("what", ["flipped", "cut"])
def test_wrong_bytes_in_the_bucket_are_computed_again_and_stored_again(machine: Open, tmp_path: Path, what: str) -> None:
    kv = prompt(6401)
    save(machine("a"), kv)
    b = machine("b", capacity="0")
    for path in (tmp_path / "bucket" / "segments").rglob("*.seg"):
        data = bytearray(path.read_bytes())
        data[9000] ^= 1
        path.write_bytes(data if what == "flipped" else path.read_bytes()[:-8192])
    assert seen(b, kv)
    loaded = load(b, kv)
    assert loaded.wrong == []
    assert loaded.usable_tokens < 6400
    assert save(b, kv).stored_tokens == 6400
    again = load(b, kv)
    assert (again.usable_tokens, again.wrong) == (6400, [])


def test_a_machine_whose_bucket_is_gone_goes_on_with_what_it_has(machine: Open, tmp_path: Path) -> None:
    kv = prompt(6401)
    cache = machine("a")
    assert save(cache, kv).stored_tokens == 6400
    shutil.move(tmp_path / "bucket", tmp_path / "away")
    assert load(cache, kv).load.tokens_by_tier == {"disk": 6400}


def test_a_bucket_that_cannot_be_had_is_said_and_costs_nothing_else(machine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = machine("a", object_store="file:///proc/nowhere")
    assert [tier.name for tier in cache.statistics().tiers] == ["disk"]
    assert "no object store until a restart" in cache.warnings[0]
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "pip install 'headstart[object]'" in machine("b").warnings[0]


def test_the_settings_of_an_object_store_have_short_flags_and_hold_no_secret() -> None:
    flags = {key: setting.flag for key, setting in settings().items() if key.startswith("cache.object")}
    assert flags == {
        "cache.object_store": "--object-store",
        "cache.object_capacity": "--object-capacity",
        "cache.object_read_only": "--object-read-only",
        "cache.object_collects": "--object-collects",
    }
    assert load_config(overrides={"cache.object_store": "s3://bucket/prefix"}).cache.object_store == "s3://bucket/prefix"
    for refused in ("bucket", "http://bucket/x", "s3:///prefix", "s3://key:hidden@bucket/x", "s3://bucket/x?key=hidden"):
        with pytest.raises(ConfigError) as raised:
            load_config(overrides={"cache.object_store": refused})
        assert "hidden" not in str(raised.value)


def test_a_command_beside_the_configured_collector_does_not_collect(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    config = CacheConfig(object_store=f"file://{tmp_path / 'bucket'}", object_collects="yes")
    for passing in (False, True):
        tier = open_object_store(config, passing=passing)
        try:
            assert tier.collects is not passing
        finally:
            tier.close()
