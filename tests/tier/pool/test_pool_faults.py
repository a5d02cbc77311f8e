"""What shared file systems do to their clients: late lengths, holes, names that are stale, mounts that hang or vanish. A miss
and a counter, never a wrong byte and never a wait without an end."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pool_kit import CAPACITY, TIMING, Machine, image, keys

from headstart.errors import StoreError
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.tier.base import ReadRange
from headstart.tier.disk import RealDisk
from headstart.tier.disk.door import Entry, Handle
from headstart.tier.pool import PoolTier, Timing

Make = Callable[..., Machine]


def test_a_length_that_comes_late_is_read_after_opening_anew(machine: Make) -> None:
    disk = FaultyDisk(RealDisk())
    a, b = machine(), machine(disk=disk)
    a.save(1)
    b.wait(0.2)
    assert b.found([1]) == {1}
    disk.inject(DiskFault("read", "short", times=1))
    assert b.found([1]) == {1}
    assert b.counter("read_again_late") == 1
    disk.inject(DiskFault("read", "short", times=2))
    extent = b.extent(1)
    assert b.tier.lease([extent]) == [True]
    with pytest.raises(StoreError) as late:
        b.tier.read([ReadRange(extent, 0, [memoryview(bytearray(4096))])])
    assert late.value.facts["reason"] == "late"
    b.tier.release([extent])
    assert b.found([1]) == {1}


class Zeros(RealDisk):
    """A client whose view of a file's bytes lags: they read as zeros."""

    lagging = False

    def read(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().read(handle, buffers, offset)
        if self.lagging and offset >= 4096:
            for buffer in buffers:
                buffer.cast("B")[:] = bytes(buffer.nbytes)
        return got


def test_a_hole_that_reads_as_zeros_is_not_taken_for_corrupt_once_it_reads_right(machine: Make) -> None:
    disk = Zeros()
    a, b = machine(), machine(disk=disk)
    a.save(1)
    b.wait(0.2)
    extent = b.extent(1)
    # What the cache does with an extent whose checks did not hold, by then the bytes have come.
    assert b.tier.delete([extent], reason="corrupt") == 0
    assert b.tier.info(extent) is None  # whoever avoids it need not avoid what is there now
    assert b.found([1]) == {1}
    assert b.counter("late_bytes") == 1
    disk.lagging = True
    assert b.tier.delete([b.extent(1)], reason="corrupt") == 1
    disk.lagging = False
    a.wait(0.2)
    assert a.found([1]) == set()
    assert a.save(1) == "written"


def test_bytes_that_are_wrong_for_all_are_quarantined_by_whoever_finds_them(machine: Make, root: Path) -> None:
    a, b = machine(), machine()
    a.save(1)
    b.wait(0.2)
    (segment,) = root.rglob("*.seg")
    with segment.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"poison")
    assert b.tier.delete([b.extent(1)], reason="corrupt") == 1
    a.wait(0.2)
    assert a.extent(1) == -1


@pytest.mark.parametrize("fault", ["vanished", "eio", "enodev"])
def test_a_mount_that_fails_costs_misses_and_is_used_again_when_it_is_back(machine: Make, fault: str) -> None:
    disk = FaultyDisk(RealDisk())
    a, b = machine(), machine(disk=disk)
    a.save(1)
    b.wait(0.2)
    disk.inject(DiskFault("any", fault))  # type: ignore[arg-type]
    extent = b.extent(1)
    assert b.tier.lease([extent]) == [True]
    with pytest.raises((StoreError, OSError)):
        b.tier.read([ReadRange(extent, 0, [memoryview(bytearray(4096))])])
    b.tier.release([extent])
    assert b.save(2) in ("error", "stopped")
    b.wait(TIMING.silent_s + 1)
    assert b.extent(1) == -1
    assert b.tier.lease([extent]) == [False]
    assert b.tier.statistics().paused
    assert b.counter("look_failed") >= 1
    disk.heal()
    b.wait(31)
    b.wait(0.2)
    assert b.found([1]) == {1}
    assert b.save(2) == "written"


def test_a_stale_handle_is_opened_anew(machine: Make) -> None:
    disk = FaultyDisk(RealDisk())
    a, b = machine(), machine(disk=disk)
    a.save(1)
    b.wait(0.2)
    assert b.found([1]) == {1}
    disk.inject(DiskFault("read", "vanished", times=1))
    extent = b.extent(1)
    assert b.tier.lease([extent]) == [True]
    with pytest.raises(OSError, match="injected"):
        b.tier.read([ReadRange(extent, 0, [memoryview(bytearray(4096))])])
    b.tier.release([extent])
    assert b.found([1]) == {1}


def test_an_empty_mount_point_is_not_begun_anew_under_a_pool_that_was_there(machine: Make, root: Path) -> None:
    a = machine()
    a.save(1)
    away = root.with_name(f"{root.name}-away")
    shutil.move(root, away)
    root.mkdir()
    a.wait(TIMING.silent_s + 1)
    assert a.extent(1) == -1
    assert a.save(2) in ("error", "stopped")
    assert list(root.iterdir()) == []
    root.rmdir()
    shutil.move(away, root)
    a.wait(31)
    a.wait(1)
    assert a.found([1]) == {1}
    assert a.save(2) == "written"


def test_a_file_that_somebody_removed_is_a_miss(machine: Make, root: Path) -> None:
    a, b = machine(), machine()
    a.save(1)
    b.wait(0.2)
    for segment in root.rglob("*.seg"):
        segment.unlink()
    extent = b.extent(1)
    assert b.tier.lease([extent]) == [True]
    for _ in range(2):  # it might only not be seen yet
        with pytest.raises(OSError, match="No such file"):
            b.tier.read([ReadRange(extent, 0, [memoryview(bytearray(4096))])])
        b.clock.now += 3
    assert b.tier.info(extent) is None
    b.tier.release([extent])
    assert b.extent(1) == -1


def test_a_file_that_went_while_somebody_has_it_open_is_left_to_the_client_that_renamed_it(machine: Make, root: Path) -> None:
    a = machine()
    a.save(1)
    for name in (".nfs000000000012", ".fuse_hidden0000001"):
        (root / "segments" / "00" / name).write_bytes(b"held open")
    a.wait(31)
    assert a.tier.check() == []
    (root / "segments" / "00" / "stranger").touch()
    assert [problem.what for problem in a.tier.check()] == ["not a file of this pool"]
    (root / "segments" / "00" / "stranger").unlink()


def test_what_lay_in_files_that_went_unheard_is_forgotten_by_all(machine: Make, root: Path) -> None:
    a, b = machine(), machine()
    a.save(1)
    a.close()
    b.wait(1)
    assert b.tier.statistics().extents == 1
    for segment in root.rglob("*.seg"):
        segment.unlink()
    b.wait(31)
    assert b.tier.statistics().extents == 0
    assert b.save(1) == "written"


def test_a_full_file_system_stops_storing_and_breaks_nothing(machine: Make) -> None:
    disk = FaultyDisk(RealDisk())
    a = machine(disk=disk)
    assert a.save(1) == "written"
    disk.inject(DiskFault("write", "enospc"))
    assert a.save(2) == "full"
    assert a.save(3) == "stopped"
    assert a.found([1]) == {1}
    disk.heal()
    a.wait(31)
    assert a.save(2) == "written"
    assert a.found([1, 2]) == {1, 2}


def test_a_journal_that_rots_is_begun_anew_so_that_others_can_follow(machine: Make, root: Path) -> None:
    a = machine()
    a.save(1)
    (journal,) = (root / "journals").iterdir()
    with journal.open("r+b") as file:
        file.seek(200)
        file.write(b"rotten")
    a.save(2)
    b = machine()
    assert b.found([1, 2]) != {1, 2}
    a.wait(61)
    b.wait(1)
    assert a.counter("journal_damaged") == 1
    assert b.found([1, 2]) == {1, 2}


def test_a_mount_that_may_only_be_read_is_read(machine: Make) -> None:
    a = machine()
    a.save(1)
    b = machine(disk=FaultyDisk(RealDisk(), DiskFault("write", "erofs")))
    assert b.found([1]) == {1}
    assert b.save(2) == "stopped"
    assert b.tier.statistics().paused == "it may only be read"


def test_a_write_that_hangs_is_given_up_and_never_announced(root: Path) -> None:
    disk = FaultyDisk(RealDisk(), stall_s=60.0)
    with PoolOpen(root, disk=disk, timing=Timing(answer_s=0.5, silent_s=1.0)) as a, PoolOpen(root) as b:
        assert a.write(image(1), TINY).stored
        disk.inject(DiskFault("sync", "stall"))
        begun = time.monotonic()
        assert a.write(image(2), TINY).reason == "stopped"
        assert a.write(image(3), TINY).reason == "stopped"
        assert time.monotonic() - begun < 30  # and not the minute that the disk hangs
        assert a.statistics().counters["write_timed_out"] == 1
        disk.heal()
        assert eventually(lambda: not a._changes.stuck)
        b._store.follow()
        assert (b.locate(TINY.digest, keys(1)).extents >= 0).all()
        assert (b.locate(TINY.digest, keys(2)).extents < 0).all()


def test_a_mount_that_hangs_holds_nobody_up_and_answers_misses(root: Path) -> None:
    disk = FaultyDisk(RealDisk(), stall_s=60.0)
    with PoolOpen(root, disk=disk, timing=Timing(answer_s=0.5, silent_s=0.5)) as a:
        assert a.write(image(1), TINY).stored
        disk.inject(DiskFault("any", "stall"))
        done = threading.Event()

        def ask() -> None:
            while (a.locate(TINY.digest, keys(1)).extents >= 0).any():
                time.sleep(0.01)
            done.set()

        threading.Thread(target=ask, daemon=True).start()
        assert done.wait(30)
        assert a.statistics().paused
        disk.heal()
        assert eventually(lambda: (a.locate(TINY.digest, keys(1)).extents >= 0).all())


def test_opening_a_mount_that_hangs_ends_with_a_sentence(root: Path) -> None:
    disk = FaultyDisk(RealDisk(), DiskFault("any", "stall"), stall_s=60.0)
    try:
        with pytest.raises(StoreError, match="does not answer; look after its mount"):
            PoolTier.open(root, capacity_bytes=CAPACITY, disk=disk, timing=Timing(answer_s=0.3))
    finally:
        disk.heal()


class PoolOpen:
    """`with PoolOpen(root) as tier:` with threads of its own and real clocks."""

    def __init__(self, root: Path, **options: object) -> None:
        self._tier = PoolTier.open(root, capacity_bytes=CAPACITY, **options)  # type: ignore[arg-type]

    def __enter__(self) -> PoolTier:
        return self._tier

    def __exit__(self, *_: object) -> None:
        self._tier.close()


class SlowToList(RealDisk):
    """Lists what lies in segments when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.listing, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def entries(self, path: Path) -> list[Entry]:
        if path.name == "segments" and self.slow.is_set():
            self.listing.set()
            assert self.go_on.wait(60)
        return super().entries(path)


def test_whoever_lists_for_long_follows_and_writes_meanwhile(machine: Make, root: Path) -> None:
    disk, a = SlowToList(), machine()
    timing = Timing(look_s=0.01, collect_s=0.01, list_s=0.01)
    b = PoolTier.open(root, capacity_bytes=CAPACITY, timing=timing, disk=disk)
    try:
        disk.slow.set()
        assert disk.listing.wait(60)
        a.save(1)
        assert eventually(lambda: (b.locate(TINY.digest, keys(1)).extents >= 0).all())
        assert b.write(image(2), TINY).reason == "written"
        assert not disk.go_on.is_set()
    finally:
        disk.go_on.set()
        b.close()


def eventually(holds: Callable[[], bool], *, within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.01)
    return False


class Listed(RealDisk):
    """Counts how often everything is listed, which may be made to take long."""

    root, listings = Path(), 0
    goes_on: threading.Event | None = None

    def entries(self, path: Path) -> list[Entry]:
        if path == self.root / "segments":
            self.listings += 1
            if self.goes_on is not None:
                self.goes_on.wait(60)
        return super().entries(path)


def test_what_was_listed_waits_for_a_turn_and_is_not_listed_again(machine: Make, root: Path) -> None:
    disk = Listed()
    a = machine(disk=disk)
    disk.root = root
    a.wait(1000)
    before = disk.listings
    with a.tier._store.turn() as mine:
        assert mine
        for _ in range(3):
            a.wait(1000 if disk.listings == before else 1)
    assert disk.listings == before + 1
    a.wait(1)
    assert disk.listings == before + 1


def test_a_pool_is_closed_well_also_while_it_is_being_listed(root: Path) -> None:
    disk = Listed()
    timing = Timing(look_s=0.01, collect_s=0.01, list_s=0.01, answer_s=2.0)
    tier = PoolTier.open(root, capacity_bytes=CAPACITY, timing=timing, disk=disk)
    disk.goes_on = threading.Event()
    disk.root = root
    try:
        deadline = time.monotonic() + 60
        while not disk.listings and time.monotonic() < deadline:
            time.sleep(0.01)
        tier.close()
        assert tier.statistics().counters.get("close_timed_out", 0) == 0
        assert tier._store._closed
    finally:
        disk.goes_on.set()
