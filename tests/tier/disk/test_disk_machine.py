"""Random histories on a disk tier, reopened in between: it may lose, it may not lie."""

from __future__ import annotations

from disk_kit import Clock
from hypothesis import settings

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.machines import TierMachine
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier


class DiskMachine(TierMachine):
    persistent = True
    holes = True

    def __init__(self) -> None:
        self.disk = CrashDisk(holes=self.holes)
        self.clock = Clock()
        super().__init__()

    def make_tier(self) -> Tier:
        return DiskTier.open(
            self.disk.root / "kv", capacity_bytes=self.capacity_bytes, disk=self.disk, clock=self.clock, wall_clock=self.clock
        )

    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds


class HolelessMachine(DiskMachine):
    holes = False


TestDiskMachine = DiskMachine.TestCase
TestHolelessMachine = HolelessMachine.TestCase
TestDiskMachine.settings = TestHolelessMachine.settings = settings(max_examples=settings().max_examples * 2 // 5)
