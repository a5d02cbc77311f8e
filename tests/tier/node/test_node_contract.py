"""The node's memory tier keeps every promise of the door, on a real file system in memory; it promises nothing for later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.testing.tier_contract import TierContract
from headstart.tier.base import Tier
from headstart.tier.node import open_node_tier


class TestNodeTier(TierContract):
    persistent = True
    promises = False
    capacity_bytes = 1 << 20

    @pytest.fixture
    def make_tier(self, shared_memory: Path) -> Callable[[int], Tier]:
        return lambda capacity_bytes: open_node_tier(shared_memory / "node", capacity_bytes=capacity_bytes)
