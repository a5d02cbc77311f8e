"""The object tier keeps every promise of the door, over obstore's bucket in memory. Its grace is none here: what is removed
gives way at once, as the contract expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import object_kit
import pytest

from headstart.testing.tier_contract import TierContract
from headstart.tier.base import Tier
from headstart.tier.object import ObjectTier


class TestObjectTier(TierContract):
    persistent = True
    capacity_bytes = 1 << 20

    @pytest.fixture
    def make_tier(self, store: Any) -> Callable[[int], Tier]:
        return lambda capacity_bytes: ObjectTier.open_bucket(
            object_kit.bucket_over(store), capacity_bytes=capacity_bytes, timing=object_kit.NO_GRACE
        )
