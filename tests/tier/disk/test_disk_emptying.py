"""Where a part of a file cannot be given back: whole files go, and what is worth keeping in one lives on elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from disk_kit import Clock

from headstart.block.representation import Representation
from headstart.policy.retention import Retention
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import FakeKV
from headstart.testing.faulty_disk import FaultyDisk, ProcessDied
from headstart.testing.tier_contract import read
from headstart.tier.base import ExtentId, Terms
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import Disk

KV = Representation(kind="gqa", layout="test/1", dtype="u8", layer_bytes=(1 << 13,))
CAPACITY = 8 << 20  # four files of 2 MiB
PIECES = 8
AGENT, CHAT = Terms("agent"), Terms("chat")


def prompt(seed: int) -> FakeKV:
    return FakeKV(KV, [seed * 1_000_000 + n for n in range(PIECES * 64)])


def open_tier(disk: Disk, clock: Clock, *, promises: str = "agent=1d.., chat=0s..") -> DiskTier:
    return DiskTier.open(
        Path("/disk/kv"),
        capacity_bytes=CAPACITY,
        disk=disk,
        clock=clock,
        wall_clock=lambda: clock.now + 1e9,
        retention=Retention.of(promises),
    )


def extents(tier: DiskTier, kv: FakeKV) -> list[ExtentId]:
    found = tier.locate(kv.representation.digest, kv.keys).extents.tolist()
    return [ExtentId(extent) for extent in dict.fromkeys(found) if extent >= 0]


def right(tier: DiskTier, seeds: Sequence[int]) -> set[int]:
    """Return which prompts are there, each compared to the bit."""
    there = set()
    for seed in seeds:
        kv = prompt(seed)
        for extent in extents(tier, kv):
            assert tier.lease([extent]) == [True]
            assert read(tier, extent, 0, len(kv.image())) == kv.image()
            tier.release([extent])
            there.add(seed)
    return there


def fill(tier: DiskTier, seeds: Sequence[int], *, used: Sequence[int] = (), terms: Terms = CHAT) -> Iterator[int]:
    """Save prompts, and use others after each of them."""
    for seed in seeds:
        tier.write(prompt(seed).image(), KV, terms=terms)
        for other in used:
            tier.touch(extents(tier, prompt(other)))
        yield seed


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_what_is_used_again_and_again_outlives_the_files_that_it_lies_in(clock: Clock) -> None:
    disk = CrashDisk(holes=False)
    tier = open_tier(disk, clock)
    often = [3, 20, 40]
    for _ in fill(tier, range(50)):
        pass
    for _ in fill(tier, range(100, 350), used=often):
        assert tier.statistics().allocated_bytes <= CAPACITY
    assert right(tier, often) == set(often)
    counters = tier.statistics().counters
    saved = counters["bytes_written"] - counters["moved_bytes"]
    assert 0 < counters["moved_bytes"] <= saved / 8
    assert counters["removed_moved"] > 0
    assert tier.check() == []
    tier.close()
    again = open_tier(disk, clock)
    assert right(again, often) == set(often)
    assert again.check() == []
    again.close()


def test_what_is_promised_stays_while_something_else_can_go(clock: Clock) -> None:
    tier = open_tier(CrashDisk(holes=False), clock)
    kept = range(0, 60, 12)
    for seed in range(60):
        tier.write(prompt(seed).image(), KV, terms=AGENT if seed in kept else CHAT)
    for _ in fill(tier, range(100, 300)):
        pass
    assert right(tier, kept) == set(kept)
    assert "promises_broken" not in str(tier.statistics().counters)
    tier.close()


def test_what_is_pinned_stays_where_it_is(clock: Clock) -> None:
    tier = open_tier(CrashDisk(holes=False), clock)
    for _ in fill(tier, range(20)):
        pass
    assert tier.pin(extents(tier, prompt(5)), until_ms=None) == [True]
    for _ in fill(tier, range(100, 350)):
        pass
    (extent,) = extents(tier, prompt(5))
    info = tier.info(extent)
    assert info is not None
    assert info.pinned_until_ms is not None
    assert right(tier, [5]) == {5}
    tier.close()


def test_what_is_read_is_neither_carried_nor_removed(clock: Clock) -> None:
    tier = open_tier(CrashDisk(holes=False), clock)
    for _ in fill(tier, range(20)):
        pass
    (extent,) = extents(tier, prompt(5))
    assert tier.lease([extent]) == [True]
    for _ in fill(tier, range(100, 300)):
        pass
    assert extents(tier, prompt(5)) == [extent]
    assert read(tier, extent, 0, len(prompt(5).image())) == prompt(5).image()
    tier.release([extent])
    assert tier.check() == []
    tier.close()


def test_what_turns_out_to_be_corrupt_is_not_carried(clock: Clock) -> None:
    disk = CrashDisk(holes=False)
    tier = open_tier(disk, clock)
    for _ in fill(tier, range(20)):
        pass
    content = bytes(prompt(5).image()[4096:8192])
    path, place = next((path, at) for path, held in disk.files().items() if (at := held.find(content)) >= 0)
    disk.damage(path, place + 7)
    for _ in fill(tier, range(100, 300), used=[5]):
        pass
    assert right(tier, [3]) <= {3}
    assert extents(tier, prompt(5)) == []
    assert tier.statistics().counters["quarantined_corrupt"] == 1
    tier.close()


@pytest.mark.parametrize("call", range(1, 320, 29))
def test_whenever_the_process_dies_what_was_used_often_is_there_afterwards(clock: Clock, call: int) -> None:
    inner = CrashDisk(holes=False)
    disk = FaultyDisk(inner)
    tier = open_tier(disk, clock)
    for _ in fill(tier, range(110), used=[3]):
        pass
    disk.die_at(call)
    with suppress(ProcessDied):
        for _ in fill(tier, range(200, 260), used=[3]):
            pass
    disk.bury()
    inner.kill()
    again = open_tier(inner, clock)
    assert right(again, [3]) == {3}
    assert again.check() == []
    again.close()
