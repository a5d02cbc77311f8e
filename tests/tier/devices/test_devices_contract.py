"""Several directories keep every promise of the door together, and one alone keeps them as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from devices_kit import Set

from headstart.testing.tier_contract import TierContract
from headstart.tier.base import Tier


class _Devices(TierContract):
    persistent = True
    names: tuple[str, ...]

    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Callable[[int], Tier]:
        directories = Set(tmp_path, self.names)
        return lambda capacity_bytes: directories.open(each=capacity_bytes // len(self.names))


class TestOneDirectory(_Devices):
    names = ("a",)


class TestTwoDirectories(_Devices):
    names = ("a", "b")
    capacity_bytes = 2 << 20


class TestThreeDirectories(_Devices):
    names = ("a", "b", "c")
    capacity_bytes = 3 << 20


del _Devices  # it is no test by itself
