"""What the tests of the device tier share: directories with disks that can fail, opened as one tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event

from headstart.policy.retention import Retention
from headstart.testing.fake_kv import TINY, FakeKV
from headstart.testing.faulty_disk import FaultyDisk
from headstart.testing.tier_contract import located, read
from headstart.tier.base import ExtentId, Tier
from headstart.tier.devices import DeviceTier
from headstart.tier.devices.device import Device
from headstart.tier.disk import DiskTier, RealDisk

EACH = 8 << 20  # what a directory may hold
NEVER_S = 3600.0  # the tests look after the devices themselves


class Set:
    """Directories below `root`, the disk of each, and a clock that only tests move."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root = root
        self.paths = [root / name for name in names]
        self.disks: dict[str, FaultyDisk] = {}
        self.refused: set[str] = set()  # directories that cannot be opened
        self.holding: set[str] = set()  # and such whose opening takes until `held` is set
        self.held = Event()
        self.now = 1000.0

    def open(self, *, each: int = EACH, names: Sequence[str] | None = None, retention: Retention | None = None) -> DeviceTier:
        paths = self.paths if names is None else [self.root / name for name in names]

        def open_directory(path: Path, capacity_bytes: int) -> DiskTier:
            if path.name in self.refused:
                raise OSError(5, "no such disk", str(path))
            if path.name in self.holding:
                self.held.wait(30)
            disk = self.disks[path.name] = FaultyDisk(RealDisk())
            return DiskTier.open(path, capacity_bytes=capacity_bytes, disk=disk, clock=lambda: self.now, retention=retention)

        return DeviceTier.open(
            paths,
            open_directory=open_directory,
            capacities=lambda used: [each] * len(used),
            clock=lambda: self.now,
            look_s=NEVER_S,
        )

    def later(self, tier: DeviceTier, seconds: float = 60.0) -> None:
        """Let time pass and the tier look after its devices."""
        self.now += seconds
        tier.look()


def device(tier: DeviceTier, name: str) -> Device:
    return next(device for device in tier.devices if device.path.name == name)


def on(tier: DeviceTier, kv: FakeKV) -> list[str]:
    """Return the directory in which each block of a prompt lies, "" where it is absent."""
    names = {device.serial: device.path.name for device in tier.devices}
    return ["" if extent < 0 else names[tier.lane(ExtentId(extent))] for extent in located(tier, kv)]


def write(tier: Tier, kv: FakeKV, *, extents: int = 1) -> None:
    """Write a prompt as so many extents, each of which must be stored."""
    pieces = len(kv.keys) // kv.representation.blocks_per_piece
    each = pieces // extents
    for first in range(0, pieces, each):
        assert tier.write(kv.image(first, each), TINY).stored


def whole(tier: Tier, kv: FakeKV) -> bool:
    """Whether all of a prompt is there; every byte of what is there is compared."""
    places = located(tier, kv)
    for extent in {one for one in places if one >= 0}:
        first, count = places.index(extent), places.count(extent)
        image = kv.image(first, count)
        assert read(tier, ExtentId(extent), 0, len(image)) == bytes(image)
    return -1 not in places
