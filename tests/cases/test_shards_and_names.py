"""What other caches mixed up: shards of another split, engine memory beyond a hit, secrets in names of files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.fake_kv import IDENTITY, TINY, FakeDestination, FakeKV
from headstart.testing.round_trip import hit_tokens, match, save
from headstart.tier.disk import DiskTier


def open_cache(root: Path, representation: object = TINY) -> PrefixCache:
    tier = DiskTier.open(root, capacity_bytes=16 << 20)
    return PrefixCache([tier], identity=IDENTITY, representation=representation, match_timeout_s=20.0)  # type: ignore[arg-type]


def test_a_shard_of_another_split_is_never_read_as_this_one_though_keys_agree(tmp_path: Path) -> None:
    shards = {shard: replace(TINY, shard=shard) for shard in ("0/2", "1/2", "0/4", "replicated")}
    mine = FakeKV(shards["0/2"], range(641))
    with open_cache(tmp_path, shards["0/2"]) as cache:
        assert save(cache, mine).stored_tokens == 640
    for shard, representation in shards.items():
        theirs = FakeKV(representation, range(641))
        assert theirs.keys == mine.keys  # ranks agree on what a block is called; where it lies is another matter
        with open_cache(tmp_path, representation) as cache:
            assert hit_tokens(cache, theirs) == (640 if shard == "0/2" else 0)


@pytest.mark.parametrize("asked", [1, 3, 5])
def test_a_load_writes_nothing_beyond_what_matched(tmp_path: Path, asked: int) -> None:
    kv = FakeKV(TINY, range(10 * 64 + 1))
    with open_cache(tmp_path) as cache:
        save(cache, kv)
        destination = FakeDestination(TINY, 10)
        with match(cache, FakeKV(TINY, range(asked * 64 + 1))) as lease:
            assert lease.load(into=destination).result(20) == asked * 64
        assert destination.wrong(kv, pieces=asked) == []
        assert destination.touched(first=asked) == []


@pytest.mark.parametrize("salt", ["user@host/../x", "🔑" * 300, "s" * 1024], ids=["path", "emoji", "long"])
def test_names_of_files_are_short_and_say_nothing(tmp_path: Path, salt: str) -> None:
    kv = FakeKV(TINY, range(641), salt=salt)
    with open_cache(tmp_path) as cache:
        assert save(cache, kv).stored_tokens == 640
        assert hit_tokens(cache, kv) == 640
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "headstart.json"]
    assert files
    for path in files:
        assert re.fullmatch(r"[0-9a-f]{32}-[0-9a-f]{8}\.(seg|log)", path.name)
        assert salt.encode() not in path.read_bytes()
