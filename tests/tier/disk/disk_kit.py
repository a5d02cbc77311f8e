"""What the disk tier's tests share: whole prompts written and read back, and a directory looked at from outside."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from headstart.block.keys import BlockKey
from headstart.testing.fake_kv import TINY, FakeKV
from headstart.testing.tier_contract import prompt as make_prompt
from headstart.testing.tier_contract import read
from headstart.tier.base import ExtentId
from headstart.tier.disk import DiskTier

CAPACITY = 8 << 20


class Clock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@lru_cache(maxsize=4096)
def prompt(pieces: int, *, seed: int = 0) -> FakeKV:
    """The contract's prompt, made once."""
    return make_prompt(pieces, seed=seed)


@lru_cache(maxsize=1024)
def image(seed: int, pieces: int = 4) -> memoryview:
    return prompt(pieces, seed=seed).image().toreadonly()


@lru_cache(maxsize=4096)
def keys(seed: int, pieces: int = 4) -> list[BlockKey]:
    return prompt(pieces, seed=seed).keys


def located(tier: DiskTier, seed: int, pieces: int = 4) -> list[int]:
    return [int(extent) for extent in tier.locate(TINY.digest, keys(seed, pieces)).extents]


def save(tier: DiskTier, seed: int, pieces: int = 4) -> bool:
    return tier.write(image(seed, pieces), TINY).stored


def extent_of(tier: DiskTier, seed: int, pieces: int = 4) -> ExtentId:
    return ExtentId(located(tier, seed, pieces)[0])


def found(tier: DiskTier, seeds: Iterable[int], pieces: int = 4) -> set[int]:
    """Return the seeds whose prompts are there, every byte of them compared; one that is there in part fails the test."""
    there = set()
    for seed in seeds:
        extents = set(located(tier, seed, pieces))
        if extents == {-1}:
            continue
        assert -1 not in extents
        assert len(extents) == 1
        whole = image(seed, pieces)
        assert read(tier, ExtentId(extents.pop()), 0, len(whole)) == whole, f"prompt {seed} came back with other bytes"
        there.add(seed)
    return there


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def journals(root: Path) -> list[Path]:
    return sorted((root / "journals").iterdir())


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("segments/*/*.seg"))


def charged(root: Path) -> int:
    """Return what the file system charges for a directory and everything in it, folders too."""
    return sum(path.lstat().st_blocks * 512 for path in (root, *root.rglob("*")))
