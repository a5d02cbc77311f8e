"""The pool keeps every promise of the door. Its grace is none here: what is removed gives way at once, as the contract
expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pool_kit
import pytest

from headstart.testing.fake_kv import TINY
from headstart.testing.faults import FaultyTier
from headstart.testing.tier_contract import TierContract
from headstart.tier.base import Terms, Tier
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


def test_a_class_or_reason_that_no_record_can_hold_is_refused_before_anything_is_written() -> None:
    with pool_kit.folder() as root, closing(PoolTier.open(root, capacity_bytes=4 << 20, timing=NO_GRACE)) as tier:
        for refused in (
            lambda: tier.write(pool_kit.image(1), TINY, terms=Terms(retention="x" * 256)),
            lambda: tier.keep([0], Terms(retention="x" * 256)),
            lambda: tier.delete([0], reason="x" * 256),
        ):
            with pytest.raises(ValueError, match="at most 255 bytes"):
                refused()
        assert tier.write(pool_kit.image(1), TINY).stored
        assert tier.check() == []
