"""Tiers keep the contract, also behind a FaultyTier that injects nothing. Disk and pool by themselves: beside their tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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


class TestFaultyDiskTier(TierContract):
    persistent = True
    capacity_bytes = 1 << 20

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Callable[[int], Tier]:
        return lambda capacity_bytes: FaultyTier(DiskTier.open(tmp_path / "kv", capacity_bytes=capacity_bytes))
