"""Processes on one memory tier: what one wrote all find, and who is killed leaves nothing that hinders the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from node_crowd import BLOCKS, CAPACITY, PROMPTS, charged
from node_crowd import prompt as crowd_prompt

from headstart.testing.fake_kv import TINY
from headstart.testing.tier_contract import located, prompt, put, read
from headstart.tier.base import ExtentId
from headstart.tier.node import open_node_tier

CROWD = Path(__file__).with_name("node_crowd.py")


def crowd(directory: Path, *, processes: int, kills: int, steps: int, seconds: float, timeout_s: float) -> list[int]:
    """Return how many hits each process had; everything else is compared here."""
    words = [sys.executable, str(CROWD), str(directory), str(processes), str(kills), str(steps), str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(found["wrong"]) == 0
    assert found["died_by_themselves"] == 0, done.stderr
    assert sum(found["hits"]) > 0
    assert 0 < found["most_bytes"] <= CAPACITY
    tier = open_node_tier(directory, capacity_bytes=CAPACITY)  # all are dead: what they left is right, and none holds a lease
    try:
        assert tier.check() == []
        for number in range(PROMPTS):
            kv = crowd_prompt(number)
            for extent in {ExtentId(e) for e in located(tier, kv) if e >= 0}:
                assert read(tier, extent, 0, 4096)
        extents = [info.id for info in tier.scan()]
        assert extents
        assert tier.delete(extents, reason="user") == len(extents)
        assert tier.statistics().live_bytes == 0
        assert charged(directory) <= CAPACITY // 4  # journals, and one segment's header
        full = BLOCKS * 3 * 4096
        for seed in range(CAPACITY // full):
            assert tier.write(prompt(BLOCKS, seed=seed).image(), TINY).stored
        assert tier.check() == []
    finally:
        tier.close()
    return list(found["hits"])


def test_what_one_process_wrote_another_finds_at_once_and_after_all_have_ended(shared_memory: Path) -> None:
    one = open_node_tier(shared_memory / "node", capacity_bytes=CAPACITY)
    other = open_node_tier(shared_memory / "node", capacity_bytes=CAPACITY)
    kvs = [prompt(4, seed=seed) for seed in range(20)]
    for kv in kvs:
        put(one, kv)
        assert -1 not in located(other, kv)
        assert read(other, ExtentId(located(other, kv)[0]), 0, 4096) == bytes(kv.image()[:4096])
    lent = ExtentId(located(other, kvs[0])[0])
    assert other.lease([lent]) == [True]
    assert one.delete([ExtentId(located(one, kvs[0])[0])], reason="user") == 0  # the other process reads it
    other.release([lent])
    one.close()
    other.close()
    again = open_node_tier(shared_memory / "node", capacity_bytes=CAPACITY)
    assert all(-1 not in located(again, kv) for kv in kvs)
    assert again.check() == []
    again.close()


def test_processes_are_killed_at_any_moment_and_no_byte_is_wrong_and_no_memory_lost(shared_memory: Path) -> None:
    crowd(shared_memory / "node", processes=3, kills=3, steps=20, seconds=0.0, timeout_s=300)


@pytest.mark.soak
@pytest.mark.parametrize("processes", [2, 8])
def test_one_process_is_killed_every_second_for_a_minute(shared_memory: Path, processes: int) -> None:
    hits = crowd(shared_memory / "node", processes=processes, kills=60, steps=0, seconds=1.0, timeout_s=600)
    assert min(hits) > 0


def test_the_directory_is_the_users_own(shared_memory: Path) -> None:
    tier = open_node_tier(shared_memory / "node", capacity_bytes=CAPACITY)
    put(tier, prompt(4))
    for folder, _, names in os.walk(shared_memory / "node"):
        assert os.stat(folder).st_mode & 0o077 == 0
        assert all(os.stat(os.path.join(folder, name)).st_mode & 0o077 == 0 for name in names)
    tier.close()
