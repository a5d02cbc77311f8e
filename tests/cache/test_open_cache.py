"""Opening a cache from configuration: what can be had is there, what cannot is said, and nothing about a medium raises."""

from __future__ import annotations

import errno
import logging
import re
from pathlib import Path

import pytest
from cache_kit import prompt

from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig
from headstart.errors import ConfigError
from headstart.testing.fake_kv import IDENTITY, TINY
from headstart.testing.round_trip import load, save
from headstart.tier.devices import remove_device
from headstart.tier.disk import RealDisk


def opened(directory: Path | tuple[Path, ...], **options: object) -> PrefixCache:
    config = CacheConfig(**{"directory": directory, "capacity": "64MiB", "memory": "8MiB", **options})  # type: ignore[arg-type]
    return open_cache(config, identity=IDENTITY, representation=TINY)


def test_what_was_saved_is_found_after_a_restart(tmp_path: Path) -> None:
    kv = prompt(6401)
    with opened(tmp_path / "kv") as cache:
        assert cache.warnings == ()
        assert save(cache, kv).stored_tokens == 6400
        assert load(cache, kv).load.tokens_by_tier == {"memory": 6400}
    with opened(tmp_path / "kv") as cache:
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (6400, [])
        assert loaded.load.tokens_by_tier == {"disk": 6400}
        assert cache.check() == []


def test_what_is_for_memory_alone_never_reaches_the_disk(tmp_path: Path) -> None:
    kv = prompt(6401)
    with opened(tmp_path / "kv") as cache:
        assert cache.save(kv.tokens, kv, memory_only=True).wait(20).stored_tokens == 6400
        assert load(cache, kv).load.tokens_by_tier == {"memory": 6400}
        assert cache.statistics().tiers[1].blocks == 0
        assert cache.check() == []
    with opened(tmp_path / "kv") as cache, cache.match(kv.tokens) as lease:
        assert lease.tokens == 0
    with opened(tmp_path / "kv", memory="0") as cache:
        assert cache.save(kv.tokens, kv, memory_only=True).wait(20).stored_tokens == 0
        assert cache.check() == []


def test_quotas_change_while_the_cache_is_open(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", memory="0", quotas="acme=1MiB, *=50%") as cache:

        def stored(seed: int, tenant: str) -> int:
            kv = prompt(6400, seed=seed)
            cache.save(kv.tokens, kv, tenant=tenant).wait(20)
            return cache.statistics().tiers[0].live_bytes_by_tenant.get(tenant, 0)

        assert stored(1, "acme") <= 1 << 20
        cache.limit_tenants({"acme": "32MiB"})
        before = stored(2, "acme")
        assert before > 1 << 20
        cache.limit_tenants({"acme": "2MiB", "beta": "1MiB"})
        assert stored(3, "acme") <= 2 << 20
        assert stored(4, "beta") <= 1 << 20
        assert cache.check() == []


def test_tiers_are_switched_off_by_a_size_of_0_and_the_whole_by_enabled(tmp_path: Path) -> None:
    for options, tiers in [
        ({"memory": "0"}, ["disk"]),
        ({"capacity": "0"}, ["memory"]),
        ({"enabled": False}, []),
    ]:
        with opened(tmp_path / "kv", **options) as cache:
            assert [tier.name for tier in cache.statistics().tiers] == tiers
            assert cache.warnings == ()


def test_a_capacity_may_be_a_share_of_the_file_system(tmp_path: Path) -> None:
    with opened(tmp_path / "not" / "yet", capacity="1%") as cache:
        assert cache.warnings == ()
        assert cache.statistics().tiers[1].capacity_bytes > 1 << 20


def test_the_start_line_tells_small_sizes_in_small_units(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), opened(tmp_path, capacity="64MiB", min_free="0"):
        assert re.search(r"disk tier: 64 MiB of .* GiB at .*, keeps 0 KiB free, now \d+ KiB used", caplog.text)


@pytest.mark.parametrize("broken", ["a file", "below a file", "too small"])
def test_a_directory_that_cannot_be_used_is_a_warning(tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("mine")
    directory = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "kv", "too small": tmp_path / "kv"}[broken]
    with (
        caplog.at_level(logging.WARNING),
        opened(directory, capacity="4096" if broken == "too small" else "64MiB", memory="8MiB") as cache,
    ):
        assert [tier.name for tier in cache.statistics().tiers] == ["memory"]
        (warning,) = cache.warnings
        assert "no disk tier" in warning
        assert warning in caplog.text
        assert save(cache, prompt(641)).stored_tokens == 640
        assert load(cache, prompt(641)).wrong == []
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_that_is_full_at_the_start_is_no_warning_for_good_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RealDisk, "write", full)
    with caplog.at_level(logging.WARNING), opened(tmp_path / "kv", memory="8MiB") as cache:
        assert cache.warnings == ()
        memory, disk = cache.statistics().tiers
        assert (memory.paused, disk.capacity_bytes) == ("", 0)
        assert disk.paused == "it could not be opened yet (No space left on device), and is tried again every 10 s"
        assert save(cache, prompt(641)).stored_tokens == 640
        assert load(cache, prompt(641)).wrong == []
        (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "no disk tier yet" in said.getMessage()
        assert "full file system" in said.getMessage()


def test_a_directory_that_was_removed_by_command_is_said_once_and_not_to_whoever_asks_for_health(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    both = (a, b)
    opened(both).close()
    remove_device(a, b, even_if_not_drained=True)
    with opened(both) as cache:
        (warning,) = cache.warnings
        assert str(b) in warning
        assert caplog.text.count("was removed by command") == 1
        assert not warning.startswith("cache.")  # such sentences are public, and this one names a directory


def test_a_memory_size_that_cannot_be_had_is_a_warning(tmp_path: Path) -> None:
    for memory in ("1", "8000000GiB"):
        with opened(tmp_path / "kv", memory=memory) as cache:
            assert [tier.name for tier in cache.statistics().tiers] == ["disk"]
            assert "cache.memory" in cache.warnings[0]


def test_a_size_that_is_none_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        opened(tmp_path / "kv", memory="much")
