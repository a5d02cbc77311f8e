"""Caches whose shared tiers have checks with a key: what is saved, loaded, promoted and moved is sealed where it lies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_kit import prompt

from headstart.cache.check_keys import sealing_of
from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig
from headstart.errors import ConfigError
from headstart.testing.fake_kv import IDENTITY, STATEFUL, TINY
from headstart.testing.round_trip import load, save

pytest.importorskip("blake3")
Open = Callable[..., PrefixCache]
KEY = "0123456789abcdef" * 4


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return written(tmp_path / "pool.key", f"# ours\n{KEY}\n")


def written(file: Path, text: str, mode: int = 0o600) -> Path:
    file.write_text(text)
    os.chmod(file, mode)
    return file


@pytest.fixture(params=["pool", "object"])
def machine(request: pytest.FixtureRequest, tmp_path: Path, key_file: Path) -> Iterator[Open]:
    """Opens machine `name`'s cache, over a disk of its own and a pool, or a bucket, that has a key."""
    opened: list[PrefixCache] = []
    shared = tmp_path / "shared"
    shared.mkdir()
    where: dict[str, object] = {"pool": {"pool": shared, "pool_capacity": "64MiB"}, "object": {}}[request.param]
    if request.param == "object":
        pytest.importorskip("obstore")
        where = {"object_store": f"file://{shared}", "object_capacity": "64MiB", "object_collects": "no"}

    def start(name: str, *, representation=TINY, **options: object) -> PrefixCache:  # type: ignore[no-untyped-def]
        settings = {"directory": tmp_path / name, "capacity": "64MiB", "memory": "0", "check_key_file": key_file}
        config = CacheConfig(**{**settings, **where, **options})  # type: ignore[arg-type]
        opened.append(open_cache(config, identity=IDENTITY, representation=representation))
        return opened[-1]

    yield start
    for cache in opened:
        cache.close()


def test_what_was_written_to_a_keyed_tier_is_loaded_by_who_has_the_key_and_kept_on_its_disk(machine: Open) -> None:
    kv = prompt(641)
    a = machine("a")
    assert save(a, kv).stored_tokens == 640
    assert load(a, kv).load.tokens_by_tier == {"disk": 640}
    b, stranger = machine("b"), machine("c", check_key_file=None)
    shared = b.statistics().tiers[-1].name
    loaded = load(b, kv)
    assert (loaded.usable_tokens, loaded.wrong, loaded.load.tokens_by_tier) == (640, [], {shared: 640})
    assert save(b, kv).stored_tokens == 640
    assert load(b, kv).load.tokens_by_tier == {"disk": 640}
    assert load(stranger, kv).usable_tokens == 0
    assert stranger.statistics().tiers[-1].counters["locate_refused_key"] > 0
    assert (a.check(), b.check(), stranger.check()) == ([], [], [])


def test_boundary_states_are_sealed_as_well(machine: Open) -> None:
    kv = prompt(641, representation=STATEFUL)
    a = machine("a", representation=STATEFUL)
    assert save(a, kv, states=kv.states()).stored_tokens == 640
    b = machine("b", representation=STATEFUL)
    loaded = load(b, kv)
    assert (loaded.usable_tokens, loaded.wrong) == (640, [])


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (KEY, 0o640, "others may read or change"),
        (KEY[:-1], 0o600, "64 hex digits, on each line"),
        ("", 0o600, "64 hex digits, on each line"),
        ("é", 0o600, "64 hex digits, on each line"),
        (f"{KEY}\nolder", 0o600, "64 hex digits, on each line"),
    ],
)
def test_a_file_that_holds_no_key_or_that_others_may_read_is_refused_before_anything_is_opened(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    config = CacheConfig(pool=tmp_path / "nowhere", capacity="0", check_key_file=written(tmp_path / "key", text, mode))
    with pytest.raises(ConfigError) as refused:
        open_cache(config, identity=IDENTITY, representation=TINY)
    assert says in refused.value.message
    assert f"(umask 077; openssl rand -hex 32 > {tmp_path / 'key'})" in refused.value.message


def test_a_file_that_is_not_there_is_refused_and_an_older_key_stands_behind_the_newest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        sealing_of(CacheConfig(check_key_file=tmp_path / "nowhere"))
    file = written(tmp_path / "key", f"{'ab' * 32}  # since May\n\n{KEY}\n")
    sealing = sealing_of(CacheConfig(check_key_file=file))
    assert [one.name for one in sealing.algorithms] == ["blake3-keyed-128"] * 2
    assert sealing.writes != sealing.algorithms[1]
