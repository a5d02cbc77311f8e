"""Killed anywhere: what was acknowledged is there, everything that is found is right, nothing is left to clean up."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
from disk_kit import found, keys, save

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.faulty_disk import FaultyDisk, ProcessDied
from headstart.tier.disk import DiskTier
from headstart.tier.disk.records import PREFIX_BYTES

CAPACITY = 1 << 20
HISTORY = range(24)  # more than the capacity holds, so that something is evicted too
CHILD = Path(__file__).with_name("saving_child.py")


def live(disk: CrashDisk, *, die_at: int, after: bool, durability: Literal["none", "data"]) -> tuple[set[int], bool]:
    """Save until the process dies amid its n-th call to the disk. Returns what was acknowledged and not evicted since, as far
    as that is certain, and whether it died."""
    faulty = FaultyDisk(disk)
    faulty.die_at(die_at, after=after)
    stored: set[int] = set()
    try:
        tier = DiskTier.open(disk.root / "kv", capacity_bytes=CAPACITY, disk=faulty, durability=durability)
        for seed in HISTORY:
            if save(tier, seed):
                stored.add(seed)
            if seed % 5 == 4:
                tier.touch([info.id for info in tier.scan()][:3])
        tier.close()
    except ProcessDied:
        faulty.bury()
        return stored, True
    return stored, False


def calls_of_a_life() -> int:
    disk = CrashDisk()
    faulty = FaultyDisk(disk)
    tier = DiskTier.open(disk.root / "kv", capacity_bytes=CAPACITY, disk=faulty)
    for seed in HISTORY:
        assert save(tier, seed)
    tier.close()
    return faulty.calls.total()


def reopen(disk: CrashDisk) -> tuple[set[int], set[int]]:
    """Return what is found again, and what gave way for it as far as the journals say."""
    tier = DiskTier.open(disk.root / "kv", capacity_bytes=CAPACITY, disk=disk)
    there = found(tier, HISTORY)
    reasons = {removal.prefixes: removal.reason for removal in tier.removals()}
    evicted = {n for n in HISTORY if reasons.get(b"".join(key[:PREFIX_BYTES] for key in keys(n))) == "capacity"}
    assert tier.check() == []
    assert tier.statistics().allocated_bytes <= CAPACITY
    assert save(tier, 1000)
    assert tier.check() == []
    tier.close()
    return there, evicted


@pytest.mark.parametrize("after", [False, True], ids=["in-part", "whole"])
def test_dead_amid_any_call_everything_acknowledged_is_found_again(after: bool) -> None:
    total = calls_of_a_life()
    evicting = False
    for die_at in range(1, total, 5 if after else 3):
        disk = CrashDisk()
        stored, _ = live(disk, die_at=die_at, after=after, durability="none")
        disk.kill()
        there, evicted = reopen(disk)
        assert stored <= there | evicted, f"after dying in call {die_at}"
        assert len(there) >= min(len(stored), 10), f"after dying in call {die_at}"
        evicting = evicting or bool(evicted)
    assert evicting, "the history never filled the tier"


@pytest.mark.parametrize("durability", ["none", "data"])
def test_without_power_synced_extents_stay_and_the_rest_is_right_or_absent(durability: Literal["none", "data"]) -> None:
    total = calls_of_a_life()
    for seed in range(60):
        disk = CrashDisk()
        stored, _ = live(disk, die_at=random.Random(seed).randrange(1, total), after=False, durability=durability)
        disk.power_cut(seed)
        tier = DiskTier.open(disk.root / "kv", capacity_bytes=CAPACITY, disk=disk)
        there = set()
        for number in HISTORY:
            with suppress(AssertionError):  # bytes that were never synced may be wrong: checks tell, above this tier
                there |= found(tier, [number])
        assert tier.check() == []
        assert save(tier, 1000)
        tier.close()
        if durability == "data" and stored:
            newest = max(stored)
            assert {number for number in stored if number > newest - 10} <= there, f"seed {seed}"


@pytest.mark.parametrize("round_", range(20))
def test_a_process_killed_while_saving_loses_nothing_that_it_acknowledged(tmp_path: Path, round_: int) -> None:
    root = tmp_path / "kv"
    choice = random.Random(round_)
    acknowledged: list[int] = []
    with subprocess.Popen(
        [sys.executable, str(CHILD), str(root), str(round_ * 1000)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for _ in range(choice.randrange(1, 60)):
            acknowledged.append(int(child.stdout.readline()))
        for _ in range(choice.randrange(0, 20_000)):
            pass  # some moment between two acknowledgements
        child.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
    tier = DiskTier.open(root, capacity_bytes=64 << 20)
    written = range(round_ * 1000, acknowledged[-1] + 2)
    assert set(acknowledged) <= found(tier, written)
    assert tier.check() == []
    tier.close()
    tier = DiskTier.open(root, capacity_bytes=64 << 20)
    assert set(acknowledged) <= found(tier, written)
    assert tier.check() == []
    tier.close()
