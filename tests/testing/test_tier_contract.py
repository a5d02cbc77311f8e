"""Every tier keeps the contract, also behind a FaultyTier that injects nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headstart.testing.faults import FaultyTier
from headstart.testing.tier_contract import TierContract
from headstart.tier.base import Tier
from headstart.tier.memory import MemoryTier


class TestMemoryTier(TierContract):
    @pytest.fixture
    def make_tier(self) -> Callable[[int], Tier]:
        return MemoryTier


class TestFaultyMemoryTier(TierContract):
    @pytest.fixture
    def make_tier(self) -> Callable[[int], Tier]:
        return lambda capacity_bytes: FaultyTier(MemoryTier(capacity_bytes))
