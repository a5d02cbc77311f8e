"""Little room, or none: who gives way, what is refused, and that reading goes on."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from disk_kit import CAPACITY, Clock, charged, extent_of, found, image, keys, located, prompt, save

from headstart.block.extent import layout_of
from headstart.errors import ExtentCorrupt
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.testing.tier_contract import put, read
from headstart.tier.base import ExtentId
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import Handle
from headstart.tier.disk.pause import STOPPED_S

SMALL = 2 << 20


def test_the_file_system_never_charges_more_than_the_capacity(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=SMALL)
    for seed in range(100):
        assert save(tier, seed, pieces=1 + seed % 8)
        assert charged(tmp_path / "kv") <= SMALL
        assert abs(charged(tmp_path / "kv") - tier.statistics().allocated_bytes) <= 32 << 10
    assert tier.statistics().counters["evicted_capacity"] > 50
    assert tier.check() == []
    tier.close()
    assert charged(tmp_path / "kv") <= SMALL


def test_the_tail_of_a_prompt_gives_way_before_its_head() -> None:
    disk = CrashDisk()
    tier = DiskTier.open(disk.root / "kv", capacity_bytes=1 << 20, disk=disk)
    kv = prompt(12, seed=7)
    extents = [put(tier, kv, first=first, pieces=3) for first in (0, 3, 6, 9)]
    tier.touch(extents)
    lengths = [12]
    for seed in range(100, 140):
        assert save(tier, seed)
        there = [extent >= 0 for extent in located(tier, 7, 12)]
        length = there.index(False) if False in there else len(there)
        assert not any(there[length:]), "a tail outlived its head"
        lengths.append(length)
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 3
    assert lengths[-1] == 0
    tier.close()


def test_an_extent_as_large_as_a_segment_is_taken_and_a_larger_one_is_not(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=SMALL)
    largest = tier.max_extent_bytes(TINY)
    pieces = next(n for n in range(200, 0, -1) if layout_of(TINY, n).extent_bytes <= largest)
    assert tier.write(image(1, pieces), TINY).reason == "written"
    assert tier.write(image(2, pieces + 1), TINY).reason == "too-large"
    assert found(tier, [1], pieces) == {1}
    tier.close()


def test_a_full_disk_makes_room_once_and_goes_on() -> None:
    disk = CrashDisk(size_bytes=1 << 20)
    tier = DiskTier.open(disk.root / "kv", capacity_bytes=CAPACITY, disk=disk)
    for seed in range(60):
        assert save(tier, seed)
    counters = tier.statistics().counters
    assert counters["evicted_full"] > 0
    assert found(tier, [59]) == {59}
    assert tier.check() == []
    tier.close()


def test_a_disk_that_others_filled_stops_storing_says_so_once_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    clock, disk = Clock(), FaultyDisk(CrashDisk())
    tier = DiskTier.open(Path("/disk/kv"), capacity_bytes=CAPACITY, disk=disk, clock=clock)
    assert save(tier, 1)
    extent = extent_of(tier, 1)
    assert tier.lease([extent]) == [True]
    disk.inject(DiskFault("write", "enospc"))
    with caplog.at_level(logging.WARNING):
        assert tier.write(image(2), TINY).reason == "full"
        writes = disk.calls["write"]
        for seed in range(3, 9):
            assert tier.write(image(seed), TINY).reason == "stopped"
        assert disk.calls["write"] == writes
        clock.now += STOPPED_S + 1
        assert tier.write(image(2), TINY).reason == "full"
        assert found(tier, range(9)) == {1}
        assert len([r for r in caplog.records if "nothing is stored" in r.message]) == 1
        disk.heal()
        clock.now += STOPPED_S + 1
        assert save(tier, 2)
        assert len([r for r in caplog.records if "storing again" in r.message]) == 1
    assert tier.statistics().counters["write_failed_enospc"] == 2
    assert found(tier, [1, 2]) == {1, 2}
    assert tier.check() == []
    tier.release([extent])
    tier.close()


@pytest.mark.parametrize("kind", ["eio", "edquot", "erofs", "emfile", "enodev"])
@pytest.mark.parametrize("call", ["write", "facts", "open", "stat", "sync", "truncate", "reserve"])
def test_a_failing_disk_is_never_an_exception_of_write_and_reading_goes_on(call: str, kind: str) -> None:
    clock, disk = Clock(), FaultyDisk(CrashDisk())
    root = Path("/disk/kv")
    tier = DiskTier.open(root, capacity_bytes=1 << 20, disk=disk, clock=clock, durability="data")
    assert save(tier, 0)
    disk.inject(DiskFault(call, kind, every=2))  # type: ignore[arg-type]
    for seed in range(1, 30):
        tier.write(image(seed), TINY)
        clock.now += STOPPED_S + 1
    disk.heal()
    clock.now += STOPPED_S + 1
    assert save(tier, 100)
    there = found(tier, range(101))
    assert 100 in there
    assert tier.check() == []
    tier.close()
    tier = DiskTier.open(root, capacity_bytes=1 << 20, disk=disk, clock=clock)
    assert found(tier, range(101)) == there
    assert tier.check() == []
    tier.close()


@pytest.mark.parametrize("kind", ["emfile", "enfile"])
def test_too_many_open_files_are_met_by_closing_idle_ones(kind: str) -> None:
    disk = FaultyDisk(CrashDisk())
    tier = DiskTier.open(Path("/disk/kv"), capacity_bytes=CAPACITY, disk=disk)
    for seed in range(60):
        assert save(tier, seed)  # in several files, which stay open for a while
    opened = len(disk._handles)
    disk.inject(DiskFault("open", kind, times=1))  # type: ignore[arg-type]
    assert save(tier, 100)
    assert len(disk._handles) < opened
    assert found(tier, range(101)) == {*range(60), 100}
    assert tier.statistics().paused == ""
    tier.close()


def test_a_range_that_cannot_be_read_is_quarantined_and_a_device_that_cannot_is_not() -> None:
    clock, disk = Clock(), BadSector(CrashDisk())
    tier = DiskTier.open(Path("/disk/kv"), capacity_bytes=CAPACITY, disk=disk, clock=clock)
    assert save(tier, 1)
    assert save(tier, 2)
    extent = extent_of(tier, 1)
    assert tier.lease([extent]) == [True]
    disk.inject(DiskFault("read", "eio"))
    with pytest.raises(OSError, match="injected"):
        read(tier, extent, 0, len(image(1)))
    disk.heal()
    disk.inject(DiskFault("read", "eio", times=1))
    with pytest.raises(OSError, match="injected"):  # once is no bad sector
        read(tier, extent, 0, len(image(1)))
    assert read(tier, extent, 0, len(image(1))) == image(1)
    disk.bad = range(4096 + 8192, 4096 + 8192 + 512)
    with pytest.raises(ExtentCorrupt) as caught:
        read(tier, extent, 0, len(image(1)))
    assert caught.value.reason == "unreadable"
    tier.release([extent])
    assert tier.delete([extent], reason="corrupt") == 1
    assert found(tier, [1, 2]) == {2}
    assert save(tier, 1)
    disk.bad = range(0)
    assert found(tier, [1, 2]) == {1, 2}
    assert tier.check() == []
    tier.close()


class BadSector(FaultyDisk):
    """Cannot read the bytes `bad` of any file."""

    bad = range(0)

    def read(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> int:
        end = offset + sum(buffer.nbytes for buffer in buffers)
        if self.bad and offset < self.bad.stop and self.bad.start < end:
            raise OSError(errno.EIO, "a bad sector")
        return super().read(handle, buffers, offset)


def test_a_corrupt_extent_is_not_found_again_even_when_that_cannot_be_written_down() -> None:
    disk = FaultyDisk(CrashDisk())
    tier = DiskTier.open(Path("/disk/kv"), capacity_bytes=CAPACITY, disk=disk)
    assert save(tier, 1)
    disk.inject(DiskFault("write", "eio"))
    tier.delete([extent_of(tier, 1)], reason="corrupt")
    assert found(tier, [1]) == set()
    disk.heal()
    tier.close()


def test_a_write_that_waits_for_a_stuck_disk_does_not_hold_up_lookups() -> None:
    disk = FaultyDisk(CrashDisk(), stall_s=60)
    tier = DiskTier.open(Path("/disk/kv"), capacity_bytes=CAPACITY, disk=disk)
    assert save(tier, 1)
    disk.inject(DiskFault("write", "stall"))
    writer = threading.Thread(target=save, args=(tier, 2))
    writer.start()
    assert disk.stalled.wait(30)
    assert found(tier, [1, 2]) == {1}
    tier.touch([extent_of(tier, 1)])
    assert tier.statistics().extents == 1
    disk.heal()
    writer.join(30)
    assert found(tier, [1, 2]) == {1, 2}
    tier.close()


def test_a_write_that_does_not_end_is_told_of_while_it_hangs() -> None:
    disk, now = FaultyDisk(CrashDisk(), stall_s=60), 1000.0
    tier = DiskTier.open(Path("/disk/kv"), capacity_bytes=CAPACITY, disk=disk, clock=lambda: now)
    disk.inject(DiskFault("write", "stall"))
    writer = threading.Thread(target=save, args=(tier, 2))
    writer.start()
    assert disk.stalled.wait(30)
    assert tier.statistics().paused == ""
    now += 40
    assert tier.statistics().paused == "a change has not ended in 40 s: the disk does not answer, or is very slow"
    disk.heal()
    writer.join(30)
    assert tier.statistics().paused == ""
    tier.close()


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 3 MiB that is full when it is full."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a real full disk needs root to mount a tmpfs")
    place = tmp_path / "mount"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"NOT TESTED: a real full disk; mounting a tmpfs is forbidden here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_on_a_real_full_file_system_the_oldest_give_way(small_mount: Path) -> None:
    clock = Clock()
    tier = DiskTier.open(small_mount / "kv", capacity_bytes=64 << 20, clock=clock)
    for seed in range(120):
        assert save(tier, seed)
    assert found(tier, range(110, 120)) == set(range(110, 120))
    assert tier.check() == []
    assert tier.delete([info.id for info in tier.scan()][:25], reason="user") == 25
    (small_mount / "somebody else's").write_bytes(bytes(1 << 20))
    for seed in range(120, 160):
        tier.write(image(seed), TINY)
        clock.now += STOPPED_S + 1
    there = found(tier, range(160))
    assert 159 in there
    tier.close()
    tier = DiskTier.open(small_mount / "kv", capacity_bytes=64 << 20)
    assert found(tier, range(160)) == there
    assert tier.check() == []
    tier.close()


def test_only_what_is_used_is_journalled_as_touched_and_not_each_time() -> None:
    clock, disk = Clock(), FaultyDisk(CrashDisk())
    tier = DiskTier.open(Path("/disk/kv"), capacity_bytes=CAPACITY, disk=disk, clock=clock)
    assert save(tier, 1)
    before = disk.calls["write"]
    for _ in range(100):
        tier.touch([extent_of(tier, 1)])
        tier.locate(TINY.digest, keys(1))
    assert disk.calls["write"] == before
    clock.now += 6
    tier.touch([extent_of(tier, 1)])
    assert disk.calls["write"] == before + 1
    tier.close()


def test_a_stale_id_names_nothing_even_when_its_row_is_used_again() -> None:
    disk = CrashDisk()
    tier = DiskTier.open(disk.root / "kv", capacity_bytes=CAPACITY, disk=disk)
    assert save(tier, 1)
    stale = extent_of(tier, 1)
    assert tier.delete([stale], reason="user") == 1
    assert save(tier, 2)
    assert extent_of(tier, 2) != stale
    assert tier.info(stale) is None
    assert tier.lease([stale, ExtentId(-1), ExtentId(1 << 50)]) == [False, False, False]
    assert tier.delete([stale], reason="corrupt") == 0
    assert found(tier, [2]) == {2}
    tier.close()
