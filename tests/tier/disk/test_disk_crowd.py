"""Random histories of two processes on a simulated disk that dies with its power, or under one or both of them, at any call:
what was acknowledged is there unless a record says why it went, what is found is right, the books are whole."""

from __future__ import annotations

import random
import secrets
from typing import Literal

import pytest
from disk_kit import image, keys, prompt
from truth_kit import cache_over

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import FaultyDisk, ProcessDied
from headstart.testing.round_trip import load
from headstart.testing.tier_contract import read
from headstart.tier.base import ExtentId, Terms
from headstart.tier.disk import DiskTier
from headstart.tier.disk.records import PREFIX_BYTES

CAPACITY = 1 << 20
PROMPTS, PIECES = 24, 6
WENT = {"capacity", "full", "expired", "quota", "user"}
VERBS = {"save": 10, "read": 3, "touch": 2, "keep": 1, "pin": 1, "unpin": 1, "delete": 1, "tend": 3, "check": 1}


class Crowd:
    """`stored`: blocks that a write called stored, by prefix. `lossy`: bytes that were never synced may be gone, and only
    their checks tell."""

    def __init__(self, seed: int, durability: Literal["none", "data"]) -> None:
        self.choice = random.Random(seed)
        self.disk = CrashDisk()
        self.durability = durability
        self.stored: set[bytes] = set()
        self.lossy = False
        self.now_s = 1_000_000.0
        self.members: list[tuple[FaultyDisk, DiskTier]] = []

    def open(self) -> None:
        faulty = FaultyDisk(self.disk)
        if self.choice.random() < 0.2:
            faulty.die_at(self.choice.randrange(1, 60), after=self.choice.random() < 0.5)
        try:
            self.members.append((faulty, self._tier(faulty)))
        except ProcessDied:
            faulty.bury()

    def step(self) -> None:
        """One verb of one process; now and then it dies amid that."""
        if not self.members:
            return self.open()
        faulty, tier = member = self.choice.choice(self.members)
        if self.choice.random() < 0.08:
            faulty.die_at(self.choice.randrange(1, 25), after=self.choice.random() < 0.5)
        self.now_s += 3
        try:
            self._act(tier, self.choice.choices(list(VERBS), list(VERBS.values()))[0])
        except ProcessDied:
            faulty.bury()
            self.members.remove(member)
        if len(self.members) < 2 and self.choice.random() < 0.3:
            self.open()

    def crash(self, power_cut: int | None) -> None:
        for faulty, _ in self.members:
            faulty.bury()
        self.members.clear()
        if power_cut is None:
            self.disk.kill()
        else:
            self.disk.power_cut(power_cut)
            self.lossy |= self.durability == "none"

    def look(self, *, sure: bool) -> None:
        """Open it once more. `sure`: nothing that was acknowledged may be missing."""
        tier = self._tier(self.disk)
        with cache_over(tier, TINY) as cache:
            assert tier.check() == []
            assert tier.statistics().allocated_bytes <= CAPACITY
            went = {
                removal.prefixes[at : at + PREFIX_BYTES]
                for removal in tier.removals()
                if removal.reason in WENT
                for at in range(0, len(removal.prefixes), PREFIX_BYTES)
            }
            there = set()
            for number in range(PROMPTS):
                kv = prompt(PIECES, seed=number)
                extents = tier.locate(TINY.digest, kv.keys).extents.tolist()
                there |= {key[:PREFIX_BYTES] for key, e in zip(kv.keys, extents, strict=True) if e != -1}
                loaded = load(cache, kv)
                assert loaded.wrong == []
                assert not sure or loaded.usable_tokens == loaded.matched_tokens
            assert not sure or self.stored <= there | went
            assert tier.write(image(1000), TINY).stored
            assert tier.check() == []

    def _tier(self, disk: FaultyDisk | CrashDisk) -> DiskTier:
        return DiskTier.open(
            self.disk.root / "kv",
            capacity_bytes=CAPACITY,
            disk=disk,
            durability=self.durability,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
        )

    def _act(self, tier: DiskTier, verb: str) -> None:
        number = self.choice.randrange(PROMPTS)
        kv, names = prompt(PIECES, seed=number), keys(number, PIECES)
        extents = [ExtentId(e) for e in dict.fromkeys(tier.locate(TINY.digest, names).extents.tolist()) if e != -1]
        match verb:
            case "save":
                first = self.choice.randrange(PIECES)
                pieces = self.choice.randrange(1, PIECES - first + 1)
                if tier.write(kv.image(first, pieces), TINY).stored:
                    self.stored |= {key[:PREFIX_BYTES] for key in names[first : first + pieces]}
            case "read":
                if not self.lossy:
                    self._read(tier, number)
            case "touch":
                tier.touch(extents)
            case "keep":
                tier.keep(extents, Terms(retention=self.choice.choice(["agent", "chat"])))
            case "pin":
                tier.pin(extents[:1], until_ms=int(self.now_s * 1000) + 60_000)
            case "unpin":
                tier.unpin(extents)
            case "delete":
                tier.delete(extents[:1], reason="user")
            case "tend":
                tier.tend()
            case "check":
                assert tier.check() == []

    def _read(self, tier: DiskTier, number: int) -> None:
        """What is found is right, also by the tier's own word."""
        kv = prompt(PIECES, seed=number)
        placement = tier.locate(TINY.digest, kv.keys)
        for extent, block, position in zip(
            placement.extents.tolist(), range(PIECES), placement.positions.tolist(), strict=True
        ):
            info = None if extent == -1 else tier.info(ExtentId(extent))
            if info is None:
                continue
            if tier.lease([ExtentId(extent)]) == [False]:  # another process removed it since this one looked the last time
                assert tier.info(ExtentId(extent)) is None
                continue
            layer_bytes = 4096
            for layer in range(TINY.layers):
                at = info.header_bytes + layer * info.blocks * layer_bytes + position * layer_bytes
                assert read(tier, ExtentId(extent), at, layer_bytes) == kv.piece(layer, block).tobytes()
            tier.release([ExtentId(extent)])


def crowd_dies(seed: int, durability: Literal["none", "data"], *, power: bool, names_seed: int | None = None) -> None:
    crowd, names = Crowd(seed, durability), random.Random(seed if names_seed is None else names_seed)
    with pytest.MonkeyPatch.context() as patch:
        # Whose journal a process goes on with is a matter of names: with the same ones, the same seed is the same history.
        patch.setattr(secrets, "token_bytes", names.randbytes)
        patch.setattr(secrets, "token_hex", lambda nbytes: names.randbytes(nbytes).hex())
        for _ in range(2):
            for _ in range(crowd.choice.randrange(5, 40)):
                crowd.step()
            crowd.crash(seed if power else None)
            crowd.look(sure=durability == "data" or not power)


def test_processes_that_die_at_any_call_lose_nothing_that_was_acknowledged() -> None:
    for seed in range(40):
        crowd_dies(seed, "none", power=False)


def test_without_power_nothing_is_lost_that_durability_data_acknowledged() -> None:
    for seed in range(40):
        crowd_dies(seed, "data", power=True)


def test_without_power_and_without_syncing_nothing_wrong_is_served() -> None:
    for seed in range(20):
        crowd_dies(seed, "none", power=True)


def test_who_dies_over_a_removal_in_the_file_of_one_that_lives_leaves_no_litter() -> None:
    for names_seed in (1, 2, 3):
        crowd_dies(10_014, "data", power=True, names_seed=names_seed)


@pytest.mark.soak
@pytest.mark.parametrize("durability", ["none", "data"])
@pytest.mark.parametrize("power", [False, True], ids=["killed", "without power"])
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_crashes_lose_nothing_that_was_promised(
    part: int, power: bool, durability: Literal["none", "data"]
) -> None:
    for seed in range(10_000 + part * 100, 10_100 + part * 100):
        crowd_dies(seed, durability, power=power)
