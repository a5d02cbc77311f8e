"""What the pool's tests share: machines on one directory, each with clocks of its own that stand still until they are told."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from headstart.block.keys import BlockKey
from headstart.testing.fake_kv import TINY, FakeKV
from headstart.testing.tier_contract import prompt as make_prompt
from headstart.tier.base import ExtentId, ReadRange
from headstart.tier.disk.door import Disk
from headstart.tier.pool import PoolTier, Timing

CAPACITY = 8 << 20
# Seconds of fake clocks.
TIMING = Timing(grace_s=100.0, lease_s=40.0, term_s=30.0, dead_s=300.0, silent_s=10.0, beat_s=5.0, answer_s=20.0)


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Machine:
    """A machine with the pool open: its tier, and clocks that need not agree with anybody's."""

    def __init__(self, root: Path, *, ahead_s: float = 0.0, disk: Disk | None = None, **options: Any) -> None:
        self.clock = Clock(5000.0 + 3 * ahead_s)
        self.wall = Clock(1.9e9 + ahead_s)
        settings: dict[str, Any] = {"capacity_bytes": CAPACITY, "timing": TIMING} | options
        self.tier = PoolTier.open(root, disk=disk, clock=self.clock, wall_clock=self.wall, background=False, **settings)

    def wait(self, seconds: float) -> None:
        """Let time pass here, and look what others did."""
        self.clock.now += seconds
        self.wall.now += seconds
        self.tier.step()

    def save(self, seed: int, pieces: int = 4) -> str:
        return self.tier.write(image(seed, pieces), TINY).reason

    def found(self, seeds: Iterable[int], pieces: int = 4) -> set[int]:
        """Return the seeds whose prompts are there, every byte of them compared."""
        return {seed for seed in seeds if self.reads(seed, pieces)}

    def extent(self, seed: int, pieces: int = 4) -> ExtentId:
        return ExtentId(int(self.tier.locate(TINY.digest, keys(seed, pieces)).extents[0]))

    def reads(self, seed: int, pieces: int = 4) -> bool:
        extent = self.extent(seed, pieces)
        if extent < 0 or self.tier.lease([extent]) != [True]:
            return False
        try:
            whole, got = image(seed, pieces), bytearray(image(seed, pieces).nbytes)
            self.tier.read([ReadRange(extent, 0, [memoryview(got)])])
            assert got == whole, f"prompt {seed} came back with other bytes"
            return True
        finally:
            self.tier.release([extent])

    def counter(self, name: str) -> int:
        return self.tier.statistics().counters.get(name, 0)

    def close(self) -> None:
        self.tier.close()


@lru_cache(maxsize=4096)
def prompt(pieces: int, *, seed: int = 0) -> FakeKV:
    return make_prompt(pieces, seed=seed)


@lru_cache(maxsize=1024)
def image(seed: int, pieces: int = 4) -> memoryview:
    return prompt(pieces, seed=seed).image().toreadonly()


@lru_cache(maxsize=4096)
def keys(seed: int, pieces: int = 4) -> list[BlockKey]:
    return prompt(pieces, seed=seed).keys


def taken_bytes(root: Path) -> int:
    """What stands in segment files, asked of the file system."""
    nbytes = 0
    for path in root.rglob("*.seg"):
        with suppress(FileNotFoundError):  # collected since it was listed
            nbytes += path.stat().st_size
    return nbytes


@contextmanager
def folder() -> Iterator[Path]:
    """A directory in memory where there is one: each write is flushed, which on a disk is what these tests would wait for."""
    shared = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="headstart-pool-", dir=shared if shared.is_dir() else None))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
