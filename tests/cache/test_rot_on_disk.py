"""Rot on a real disk tier: what one process found is written anew, whoever still holds the rotten bytes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from cache_kit import cache_of, prompt, until

from headstart.block.representation import Representation
from headstart.testing.round_trip import hit_tokens, load, match, save
from headstart.tier.disk import DiskTier


def test_the_log_says_where_the_disk_rots_and_not_for_every_extent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = prompt(4 * 64 + 1)
    with cache_of(DiskTier.open(tmp_path, capacity_bytes=64 << 20)) as cache:
        first = ""
        for _ in range(2):
            save(cache, kv)
            for segment in tmp_path.rglob("*.seg"):
                first = first or segment.name
                data = bytearray(segment.read_bytes())
                data[8192 + 64 :: 97] = bytes(len(data[8192 + 64 :: 97]))
                segment.write_bytes(data)
            assert load(cache, kv).usable_tokens < 4 * 64
            save(cache, kv)  # what is wrong is dropped behind a load
    (said,) = [record.getMessage() for record in caplog.records if "were not what was written there" in record.message]
    assert first in said
    assert "headstart cache verify" in said


@pytest.mark.parametrize("caches", [1, 2], ids=["one process", "two processes"])
def test_a_rotten_extent_on_disk_is_saved_again_while_others_hold_it(tmp_path: Path, caches: int) -> None:
    wide = Representation(kind="mha", layout="fake/1", dtype="float32", layer_bytes=(65536,) * 4, piece_tokens=128)
    kv = prompt(8 * 128 + 1, representation=wide)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(cache_of(DiskTier.open(tmp_path, capacity_bytes=64 << 20), representation=wide))
            for _ in range(caches)
        ]
        finder, other = opened[0], opened[-1]
        save(finder, kv)
        (segment,) = tmp_path.rglob("*.seg")
        with segment.open("r+b") as file:
            file.seek(segment.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 255]))
        until(lambda: hit_tokens(other, kv) == 8 * 128)  # it looks at the others' journals now and then
        with match(other, kv) as held:
            assert held.tokens == 8 * 128
            assert load(finder, kv).usable_tokens < 8 * 128
            assert save(finder, kv).stored_tokens == 8 * 128
            assert load(finder, kv).usable_tokens == 8 * 128
        until(lambda: load(other, kv).usable_tokens == 8 * 128)
    with cache_of(DiskTier.open(tmp_path, capacity_bytes=64 << 20), representation=wide) as cache:
        assert load(cache, kv).usable_tokens == 8 * 128
        assert cache.check() == []
