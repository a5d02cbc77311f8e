"""Leases against everything that takes extents away: eviction, corruption, other processes, forked children."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from disk_kit import CAPACITY, Clock, extent_of, found, image, located, save

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.tier.base import ExtentId
from headstart.tier.disk import DiskTier
from headstart.tier.disk import tier as tier_module

ROOT = Path("/disk/kv")


def open_tier(disk: CrashDisk | FaultyDisk, clock: Clock | None = None) -> DiskTier:
    return DiskTier.open(ROOT, capacity_bytes=CAPACITY, disk=disk, clock=clock or Clock())


def segment_bytes(disk: CrashDisk) -> int:
    return sum(disk.stat(path).allocated_bytes for path in disk.files() if path.suffix == ".seg")


def test_what_is_corrupt_is_saved_anew_even_while_it_is_leased() -> None:
    disk = CrashDisk()
    tier = open_tier(disk)
    assert save(tier, 1)
    extent = extent_of(tier, 1)
    assert tier.lease([extent, extent]) == [True, True]
    assert tier.delete([extent], reason="corrupt") == 1
    assert located(tier, 1) == [-1] * 4
    assert tier.lease([extent]) == [False]
    assert tier.write(image(1), TINY).reason == "written"
    assert found(tier, [1]) == {1}
    tier.release([extent])
    before = segment_bytes(disk)
    assert save(tier, 2)
    assert segment_bytes(disk) == before + len(image(2)), "its bytes went under a lease"
    tier.release([extent])
    assert save(tier, 3)
    assert segment_bytes(disk) == before + len(image(2))
    assert found(tier, [1, 2, 3]) == {1, 2, 3}
    assert tier.check() == []
    tier.close()
    tier = open_tier(disk)
    assert found(tier, [1, 2, 3]) == {1, 2, 3}
    assert tier.check() == []
    tier.close()


def test_what_is_corrupt_goes_even_while_another_process_leases_it() -> None:
    disk, clock = CrashDisk(), Clock()
    tier, other = open_tier(disk, clock), open_tier(disk, clock)
    assert save(tier, 1)
    clock.now += 1
    leased = extent_of(other, 1)
    assert other.lease([leased]) == [True]
    assert tier.delete([extent_of(tier, 1)], reason="user") == 0
    assert tier.delete([extent_of(tier, 1)], reason="corrupt") == 1
    assert tier.write(image(1), TINY).reason == "written"
    other.refresh()
    assert found(other, [1]) == {1}
    assert extent_of(other, 1) != leased
    before = segment_bytes(disk)
    assert tier.check() == []
    assert segment_bytes(disk) == before
    other.release([leased])
    assert tier.check() == []
    assert segment_bytes(disk) == before - len(image(1))
    other.close()
    tier.close()


def test_the_last_corrupt_extent_of_a_file_takes_it_along_when_it_is_released() -> None:
    disk = CrashDisk()
    tier = open_tier(disk)
    assert save(tier, 1)
    extent = extent_of(tier, 1)
    assert tier.lease([extent]) == [True]
    assert tier.delete([extent], reason="corrupt") == 1
    assert segment_bytes(disk) > 0
    tier.close()
    assert segment_bytes(disk) == 0
    tier = open_tier(disk)
    assert tier.check() == []
    tier.close()


def test_releasing_never_opens_what_the_evictor_has_locked() -> None:
    disk = FaultyDisk(CrashDisk(), stall_s=60)
    tier = open_tier(disk)
    assert save(tier, 1)
    extent = extent_of(tier, 1)
    assert tier.lease([extent]) == [True]
    disk.inject(DiskFault("unlock_range", "stall", times=1))
    releasing = threading.Thread(target=tier.release, args=([extent],))
    releasing.start()
    assert disk.stalled.wait(30)
    assert tier.delete([extent], reason="user") == 0  # the bytes are still locked for the reader
    disk.heal()
    releasing.join(30)
    assert tier.delete([extent], reason="user") == 1
    assert tier.check() == []
    tier.close()


def test_a_lease_is_not_given_without_a_look_at_what_others_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "FOLLOW_S", 0.05, raising=False)
    inner, clock = CrashDisk(), Clock()
    disk = FaultyDisk(inner, stall_s=60)
    tier, other = open_tier(disk, clock), open_tier(inner, clock)
    assert save(tier, 1)
    assert save(tier, 2)
    clock.now += 1
    assert extent_of(other, 1) >= 0
    disk.inject(DiskFault("entries", "stall", times=1))
    looking = threading.Thread(target=tier.refresh)
    looking.start()  # it has read the other journal, and is stuck behind that
    assert disk.stalled.wait(30)
    assert other.delete([extent_of(other, 1)], reason="user") == 1
    assert tier.lease([extent_of(tier, 1)]) == [False]
    disk.heal()
    looking.join(30)
    assert tier.lease([extent_of(tier, 2)]) == [True]
    tier.release([extent_of(tier, 2)])
    assert found(tier, [1, 2]) == {2}
    other.close()
    assert tier.check() == []
    tier.close()


def test_a_forked_child_gives_and_takes_no_leases(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY)
    assert save(tier, 1)
    extent = extent_of(tier, 1)
    assert tier.lease([extent]) == [True]
    child = os.fork()
    if child == 0:
        answer = tier.lease([extent])
        tier.release([extent])
        tier.close()
        os._exit(answer != [False])
    assert os.waitpid(child, 0)[1] == 0
    other = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY)
    assert other.delete([extent_of(other, 1)], reason="user") == 0, "the child let go of its parent's lock"
    tier.release([extent])
    assert other.delete([extent_of(other, 1)], reason="user") == 1
    other.close()
    tier.close()


def test_a_lease_that_was_not_given_cannot_be_released(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY)
    assert save(tier, 1)
    with pytest.raises(ValueError, match="more often than leased"):
        tier.release([extent_of(tier, 1)])
    tier.release([ExtentId(1 << 50)])
    tier.close()


# What fails on the way leaves nothing behind.


def test_a_file_that_is_cut_while_it_is_opened_costs_its_own_extents_and_no_other_lease() -> None:
    disk = FaultyDisk(CrashDisk())
    tier = open_tier(disk)
    seeds = range(100)
    assert all(save(tier, seed, 8) for seed in seeds)
    extents = [extent_of(tier, seed, 8) for seed in seeds]
    files = {(info.where.split(",")[0] if (info := tier.info(extent)) else "") for extent in extents}
    assert len(files) > 1
    tier._store.files.close_idle()
    disk.inject(DiskFault("read", "short", start=2, times=1))  # as when another process removes the second file just then
    leased = tier.lease(extents)
    disk.heal()
    assert any(leased)
    assert not all(leased)
    tier.release([extent for extent, ok in zip(extents, leased, strict=True) if ok])
    left = [extent for extent in extents if tier.info(extent) is not None]
    assert tier.delete(left, reason="user") == len(left), "a lease was left behind"
    assert tier.check() == []
    tier.close()


def test_a_file_that_is_cut_while_it_is_removed_leaves_no_extent_condemned() -> None:
    disk = FaultyDisk(CrashDisk())
    tier = open_tier(disk)
    assert all(save(tier, seed) for seed in range(4))
    tier._store.files.close_idle()
    disk.inject(DiskFault("read", "short", times=1))
    assert tier.delete([extent_of(tier, seed) for seed in range(3)], reason="user") == 3
    disk.heal()
    assert tier.delete([extent_of(tier, 3)], reason="user") == 1
    assert tier.check() == []
    tier.close()


def test_a_failure_on_closing_a_file_changes_nothing() -> None:
    disk = CrashDisk()
    faulty = FaultyDisk(disk)
    tier = open_tier(faulty)
    assert save(tier, 0)
    faulty.inject(DiskFault("close", "late"))
    assert tier._store.renew(), "the journal that was begun anew is the one to go on with"
    tier._store.files.close_idle()
    assert all(save(tier, seed) for seed in range(1, 4))
    faulty.heal()
    assert tier.check() == []
    faulty.bury()
    tier = open_tier(disk)
    assert found(tier, range(4)) == set(range(4))
    assert tier.check() == []
    tier.close()
