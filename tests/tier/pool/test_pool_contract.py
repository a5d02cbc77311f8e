"""The pool keeps every promise of the door. Its grace is none here: what is removed gives way at once, as the contract
expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pool_kit
import pytest

from headstart.testing.faults import FaultyTier
from headstart.testing.tier_contract import TierContract
from headstart.tier.base import Tier
from headstart.tier.pool import PoolTier, Timing

NO_GRACE = Timing(grace_s=0.0, collect_s=0.2)


class TestPoolTier(TierContract):
    persistent = True
    capacity_bytes = 4 << 20

    @pytest.fixture
    def make_tier(self) -> Iterator[Callable[[int], Tier]]:
        with pool_kit.folder() as root:
            yield lambda capacity_bytes: PoolTier.open(root, capacity_bytes=capacity_bytes, timing=NO_GRACE)


class TestFaultyPoolTier(TierContract):
    persistent = True
    capacity_bytes = 4 << 20

    @pytest.fixture
    def make_tier(self) -> Iterator[Callable[[int], Tier]]:
        with pool_kit.folder() as root:
            yield lambda size: FaultyTier(PoolTier.open(root, capacity_bytes=size, timing=NO_GRACE))
