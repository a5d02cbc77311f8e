"""Every tier keeps the contract, also behind a FaultyTier that injects nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.faults import FaultyTier
from headstart.testing.tier_contract import TierContract
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier


class TestMemoryTier(TierContract):
    @pytest.fixture
    def make_tier(self) -> Callable[[int], Tier]:
        return MemoryTier


class TestFaultyMemoryTier(TierContract):
    @pytest.fixture
    def make_tier(self) -> Callable[[int], Tier]:
        return lambda capacity_bytes: FaultyTier(MemoryTier(capacity_bytes))


class TestDiskTier(TierContract):
    persistent = True
    capacity_bytes = 4 << 20

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Callable[[int], Tier]:
        return lambda capacity_bytes: DiskTier.open(tmp_path / "kv", capacity_bytes=capacity_bytes)


class TestFaultyDiskTier(TierContract):
    persistent = True
    capacity_bytes = 4 << 20

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Callable[[int], Tier]:
        return lambda capacity_bytes: FaultyTier(DiskTier.open(tmp_path / "kv", capacity_bytes=capacity_bytes))


class TestDiskTierThatCannotPunch(TierContract):
    """As on a file system without holes: space comes back only with whole segments."""

    persistent = True
    capacity_bytes = 4 << 20

    @pytest.fixture
    def make_tier(self) -> Callable[[int], Tier]:
        disk = CrashDisk(direct=False, holes=False)
        return lambda capacity_bytes: DiskTier.open(disk.root / "kv", capacity_bytes=capacity_bytes, disk=disk)
