"""Rules of tiers are read again when their file changes; what is wrong changes nothing and is said once."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asking import eventually
from headstart.cache.prefix_cache import PrefixCache
from headstart.cache.rule_follower import RuleFollower, follow
from headstart.config import load_config
from headstart.policy.rule_text import parse_rules
from headstart.testing.fake_kv import IDENTITY, TINY
from headstart.tier.memory import MemoryTier


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("headstart.cache.rule_follower.LOOK_S", 0.02)
    save(tmp_path / "headstart.toml", "write to memory")
    return tmp_path / "headstart.toml"


@pytest.fixture
def cache(file: Path) -> Iterator[PrefixCache]:
    follower = RuleFollower(file, lambda: load_config(file), load_config(file).cache.tiering.rules)
    with PrefixCache([MemoryTier(1 << 20)], identity=IDENTITY, representation=TINY) as cache:
        cache.apply_rules(parse_rules(load_config(file).cache.tiering.rules))
        follower.start(cache)
        yield cache
        follower.close()


def save(file: Path, *rules: str, more: str = "") -> None:
    temporary = file.with_suffix(".new")
    temporary.write_text(f"{more}\n[cache.tiering]\nrules = {json.dumps(rules)}\n")
    temporary.replace(file)


def refused(cache: PrefixCache) -> int:
    return cache.statistics().counters.get("tiering_rules_refused", 0)


def test_rules_hold_soon_after_the_file_is_saved(cache: PrefixCache, file: Path) -> None:
    save(file, "write to memory", "when idle > 1h then drop from memory")
    eventually(lambda: cache.tiering.rules == 2)
    file.unlink()
    eventually(lambda: refused(cache) == 1)
    save(file)
    eventually(lambda: cache.tiering.rules == 0)
    assert cache.tiering.refused == ""


@pytest.mark.parametrize("more", ["", "nonsense = 1"], ids=["a wrong rule", "another key that is wrong"])
def test_what_is_wrong_changes_nothing_and_is_said_once(
    cache: PrefixCache, file: Path, more: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(file, "move to poool" if not more else "move to pool", more=more)
    eventually(lambda: refused(cache) == 1)
    assert cache.tiering.rules == 1
    assert cache.tiering.refused
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "the rules of cache.tiering hold that were read before" in errors[0].getMessage()
    save(file, "write to memory")  # as before: it holds, and nothing is refused any more
    eventually(lambda: cache.tiering.refused == "")
    assert refused(cache) == 1


def test_a_signal_has_the_file_read_again_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.cache.rule_follower.LOOK_S", 600.0)
    follower = RuleFollower(file, lambda: load_config(file), load_config(file).cache.tiering.rules)
    with PrefixCache([MemoryTier(1 << 20)], identity=IDENTITY, representation=TINY) as cache:
        follower.start(cache)
        save(file, "write to memory", "drop from memory")
        follower.look_now()
        eventually(lambda: cache.tiering.rules == 2)
        follower.close()


def test_a_file_that_breaks_its_reader_does_not_end_following(cache: PrefixCache, file: Path) -> None:
    temporary = file.with_suffix(".new")
    temporary.write_text("a = " + 10_000 * "[")
    temporary.replace(file)
    eventually(lambda: refused(cache) == 1)
    save(file, "write to memory", "when idle > 1h then drop from memory")
    eventually(lambda: cache.tiering.rules == 2)
    assert cache.tiering.refused == ""


def test_what_changed_before_it_began_to_look_counts_too(file: Path) -> None:
    opened_with = load_config(file).cache.tiering.rules
    follower = RuleFollower(file, lambda: load_config(file), opened_with)
    with PrefixCache([MemoryTier(1 << 20)], identity=IDENTITY, representation=TINY) as cache:
        cache.apply_rules(parse_rules(opened_with))
        save(file, "write to memory", "drop from memory")
        follower.start(cache)
        eventually(lambda: cache.tiering.rules == 2)
        follower.close()


def test_the_file_that_the_environment_names_is_followed_for_several_caches_until_all_are_closed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_CONFIG", str(file))
    caches = [PrefixCache([MemoryTier(1 << 20)], identity=IDENTITY, representation=TINY) for _ in range(2)]
    follow(load_config, load_config().cache.tiering.rules, *caches)
    save(file, "write to memory", "drop from memory")
    eventually(lambda: [cache.tiering.rules for cache in caches] == [2, 2])
    caches[0].close()
    save(file, "write to memory")
    eventually(lambda: caches[1].tiering.rules == 1)
    caches[1].close()
    eventually(lambda: "tiering-rules" not in [thread.name for thread in threading.enumerate()])


def test_without_such_a_file_nothing_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSTART_CONFIG", raising=False)
    with PrefixCache([MemoryTier(1 << 20)], identity=IDENTITY, representation=TINY) as cache:
        follow(load_config, (), cache)
        assert "tiering-rules" not in [thread.name for thread in threading.enumerate()]
