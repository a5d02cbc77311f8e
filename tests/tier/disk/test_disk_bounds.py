"""The capacity is what the file system charges, and never exceeded, whoever adds, dies, fails or opens the directory."""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from pathlib import Path

import pytest
from disk_kit import CAPACITY, Clock, extent_of, found, image, save

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import DiskFault, FaultyDisk, ProcessDied
from headstart.tier.disk import DiskTier
from headstart.tier.disk.pause import STOPPED_S

ROOT = Path("/disk/kv")
SMALL = 1 << 20


class Metered(CrashDisk):
    """Knows the most that was ever charged, at whatever moment."""

    most_bytes = 0

    def _charge(self, *arguments: object) -> None:
        super()._charge(*arguments)  # type: ignore[arg-type]
        self.most_bytes = max(self.most_bytes, self.allocated_bytes())


def open_tier(
    disk: CrashDisk | FaultyDisk, *, capacity_bytes: int = SMALL, clock: Clock | None = None, **more: int
) -> DiskTier:
    return DiskTier.open(ROOT, capacity_bytes=capacity_bytes, disk=disk, clock=clock or Clock(), **more)


def fill(tier: DiskTier, *, first: int = 0) -> int:
    """Save until something had to go; returns the next seed."""
    for seed in itertools.count(first):
        assert save(tier, seed)
        if tier.statistics().counters.get("evicted_capacity"):
            return seed + 1
    raise AssertionError


@pytest.mark.parametrize("first", range(4))
def test_whoever_dies_while_it_adds_at_the_cap_takes_no_byte_more_than_it(first: int) -> None:
    disk = Metered()
    survivor = open_tier(disk)
    seed = fill(survivor)
    died = 0
    for call in range(1 + first, 260, 23):
        mortal = FaultyDisk(disk)
        tier = open_tier(mortal)
        sizes = random.Random(call)
        mortal.die_at(call, after=bool(call % 2))
        with suppress(ProcessDied):
            for _ in range(6):  # a segment holds some of them: one is begun and one sealed
                seed += 1
                save(tier, seed, sizes.choice((1, 4, 9)))
        died += mortal.died.is_set()
        mortal.bury()
        for pieces in (9, 4):
            seed += 1
            assert save(survivor, seed, pieces)
    assert died > 5
    assert SMALL // 2 < disk.most_bytes <= SMALL
    survivor.close()
    tier = open_tier(disk)
    assert tier.check() == []
    tier.close()


def test_whoever_dies_while_it_opens_the_directory_takes_no_byte_more_than_the_cap() -> None:
    disk = Metered()
    survivor = open_tier(disk)
    seed = fill(survivor)
    for call in range(1, 150, 5):
        mortal = FaultyDisk(disk)
        mortal.die_at(call)
        with suppress(ProcessDied):
            open_tier(mortal).close()
        mortal.bury()
        for _ in range(2):
            seed += 1
            assert save(survivor, seed)
    assert disk.most_bytes <= SMALL
    survivor.close()
    tier = open_tier(disk)
    assert tier.check() == []
    assert not [path for path in disk.files() if path.suffix == ".tmp"]
    tier.close()


@pytest.mark.parametrize("kind", ["eio", "enospc", "late", "short"])
@pytest.mark.parametrize("call", ["write", "reserve", "truncate", "stat", "facts", "rename", "punch", "unlink"])
def test_a_disk_that_fails_now_and_then_never_holds_more_than_the_cap(call: str, kind: str) -> None:
    disk, clock = Metered(), Clock()
    faulty = FaultyDisk(disk)
    tier, other = open_tier(faulty, clock=clock), open_tier(disk, clock=clock)
    seed = fill(tier)
    for _ in range(40):
        faulty.inject(DiskFault(call, kind, start=1 + seed % 5, times=2))  # type: ignore[arg-type]
        for one in (tier, other):
            seed += 1
            save(one, seed, 1 + seed % 9)
            clock.now += STOPPED_S + 1
        faulty.heal()
    assert disk.most_bytes <= SMALL
    seed += 1
    assert save(tier, seed)
    assert save(other, seed + 1)
    assert tier.check() == []
    other.close()
    tier.close()


def test_many_that_open_a_full_directory_keep_to_the_cap_together() -> None:
    disk = Metered()
    tiers = [open_tier(disk)]
    fill(tiers[0])
    tiers += [open_tier(disk) for _ in range(6)]
    for seed, tier in enumerate(tiers * 5, start=1000):
        assert save(tier, seed)
    assert disk.most_bytes <= SMALL
    for tier in tiers:
        assert tier.check() == []
        tier.close()


def test_the_journal_keeps_to_the_cap_when_thousands_are_used_and_removed() -> None:
    disk, clock = Metered(), Clock()
    tier = open_tier(disk, clock=clock)
    seed = fill(tier)
    for _ in range(60):
        clock.now += 6
        tier.touch([info.id for info in tier.scan()] * 8)
        seed += 1
        assert save(tier, seed)
    assert tier.delete([info.id for info in tier.scan()], reason="user") > 10
    assert disk.most_bytes <= SMALL
    assert tier.check() == []
    tier.close()


def test_a_broken_journal_at_the_cap_is_begun_anew_without_a_byte_more() -> None:
    disk, clock = Metered(), Clock()
    faulty = FaultyDisk(disk)
    tier = open_tier(faulty, clock=clock)
    seed = fill(tier)
    for _ in range(5):
        faulty.inject(DiskFault("write", "late", start=3, times=1))  # the record stands there and an error is reported
        seed += 1
        save(tier, seed)
        faulty.heal()
        clock.now += STOPPED_S + 1
        seed += 1
        assert save(tier, seed)
    assert disk.most_bytes <= SMALL
    assert tier.check() == []
    tier.close()


def test_a_lowered_capacity_is_kept_to_from_the_next_opening_on() -> None:
    disk = Metered()
    tier = open_tier(disk, capacity_bytes=4 * SMALL)
    for seed in range(100):
        assert save(tier, seed)
    tier.close()
    tier = open_tier(disk)
    assert disk.allocated_bytes() <= SMALL
    assert found(tier, range(100))
    disk.most_bytes = 0
    for seed in range(100, 130):
        assert save(tier, seed)
    assert disk.most_bytes <= SMALL
    tier.close()


def test_what_a_dead_writer_left_is_counted_by_those_that_live_at_once() -> None:
    disk = CrashDisk()
    survivor = open_tier(disk, capacity_bytes=CAPACITY)
    assert save(survivor, 0)
    mortal = FaultyDisk(disk)
    tier = open_tier(mortal, capacity_bytes=CAPACITY)
    mortal.die_at(next(n for n in itertools.count(1) if dies_with_a_segment_begun(n)))
    with pytest.raises(ProcessDied):
        save(tier, 1)
    mortal.bury()
    assert save(survivor, 2)
    assert survivor.statistics().allocated_bytes == disk.allocated_bytes()
    open_tier(disk, capacity_bytes=CAPACITY).close()  # and takes it away
    assert save(survivor, 3)
    assert survivor.statistics().allocated_bytes == disk.allocated_bytes()
    survivor.close()


def dies_with_a_segment_begun(call: int) -> bool:
    """Whether somebody who dies in that call of a first save leaves a segment that its journal does not speak of."""
    disk = CrashDisk()
    mortal = FaultyDisk(disk)
    tier = open_tier(mortal, capacity_bytes=CAPACITY)
    mortal.die_at(call)
    try:
        save(tier, 1)
    except ProcessDied:
        return any(path.suffix == ".seg" and len(data) for path, data in disk.files().items())
    raise AssertionError("no such call")


def test_nothing_is_stored_that_leaves_less_free_than_was_to_be_kept() -> None:
    disk, clock = Metered(size_bytes=4 << 20), Clock()
    tier = open_tier(disk, capacity_bytes=16 << 20, min_free_bytes=1 << 20, clock=clock)
    for seed in range(120):
        save(tier, seed)
        clock.now += STOPPED_S + 1
        assert disk.space(ROOT).available_bytes >= 1 << 20
    assert disk.most_bytes <= 3 << 20
    assert tier.statistics().counters["evicted_min-free"] > 0
    assert found(tier, [119]) == {119}
    assert tier.check() == []
    tier.close()


def test_a_cache_gives_back_what_somebody_else_needs_and_keeps_its_last_eighth() -> None:
    disk, clock = CrashDisk(size_bytes=8 << 20), Clock()
    tier = open_tier(disk, capacity_bytes=4 << 20, min_free_bytes=1 << 20, clock=clock)
    for seed in range(60):
        assert save(tier, seed)
    before = tier.statistics().live_bytes
    stranger = disk.open(take(disk, disk.space(ROOT).available_bytes - (512 << 10)), "write")
    for _ in range(200):
        clock.now += 2
        tier.tend()
    assert disk.space(ROOT).available_bytes >= 1 << 20
    assert (512 << 10) <= before - tier.statistics().live_bytes < (1 << 20)
    for _ in range(200):
        disk.write(stranger, bytes(disk.space(ROOT).available_bytes), disk.facts(stranger).size)
        clock.now += 2
        tier.tend()
    assert abs(tier.statistics().live_bytes - (4 << 20) // 8) < 256 << 10
    assert tier.write(image(1000), TINY).reason in ("full", "stopped")
    assert "free" in tier.statistics().paused
    disk.truncate(stranger, 0)
    clock.now += STOPPED_S + 1
    tier.tend()
    assert tier.statistics().paused == ""
    assert save(tier, 1000)
    assert tier.check() == []
    tier.close()


def take(disk: CrashDisk, nbytes: int) -> Path:
    """Let somebody else have so much of the disk."""
    path = disk.root / "somebody else's"
    handle = disk.open(path, "create")
    disk.write(handle, bytes(nbytes), 0)
    disk.close(handle)
    return path


def test_storing_resumes_when_the_disk_does_though_nothing_is_saved() -> None:
    disk, clock = FaultyDisk(CrashDisk()), Clock()
    tier = open_tier(disk, clock=clock)
    assert save(tier, 0)
    disk.inject(DiskFault("write", "erofs"))
    assert tier.write(image(1), TINY).reason == "error"
    assert "read-only" in tier.statistics().paused.lower() or "erofs" in tier.statistics().paused.lower()
    clock.now += STOPPED_S + 1
    tier.tend()
    assert tier.statistics().paused
    disk.heal()
    tier.tend()
    assert tier.statistics().paused, "it is not tried again at once"
    clock.now += STOPPED_S + 1
    tier.tend()
    assert tier.statistics().paused == ""
    assert found(tier, [0]) == {0}
    assert extent_of(tier, 0) >= 0
    tier.close()
