"""The disk tier keeps every promise of the door, on a real directory and on a disk in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.tier_contract import TierContract
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier


class TestDiskTier(TierContract):
    persistent = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Callable[[int], Tier]:
        return lambda capacity_bytes: DiskTier.open(tmp_path / "kv", capacity_bytes=capacity_bytes)


class TestDiskTierWithoutHoles(TierContract):
    """A file system that cannot punch holes gives space back segment by segment."""

    persistent = True

    @pytest.fixture
    def make_tier(self) -> Callable[[int], Tier]:
        disk = CrashDisk(holes=False)
        return lambda capacity_bytes: DiskTier.open(disk.root / "kv", capacity_bytes=capacity_bytes, disk=disk)


class TestDiskTierInMemory(TierContract):
    persistent = True

    @pytest.fixture
    def make_tier(self) -> Callable[[int], Tier]:
        disk = CrashDisk()
        return lambda capacity_bytes: DiskTier.open(
            disk.root / "kv", capacity_bytes=capacity_bytes, disk=disk, durability="data"
        )
