"""Writing amid faults, other threads and other processes: stored once or not at all, and never beyond the capacity."""

from __future__ import annotations

import fcntl
import itertools
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from disk_kit import CAPACITY, Clock, charged, extent_of, found, image, keys, located, save

from headstart.errors import StoreError
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.testing.tier_contract import prompt, put, read
from headstart.tier.base import ExtentId, Problem
from headstart.tier.disk import DiskTier, evicting
from headstart.tier.disk import store as store_module
from headstart.tier.disk.books import Books
from headstart.tier.disk.pause import BUSY_S, STOPPED_S
from headstart.tier.index import BlockIndex

ROOT = Path("/disk/kv")
CHILD = Path(__file__).with_name("pressing_child.py")


def open_tier(disk: CrashDisk | FaultyDisk, clock: Clock | None = None, capacity_bytes: int = CAPACITY) -> DiskTier:
    return DiskTier.open(ROOT, capacity_bytes=capacity_bytes, disk=disk, clock=clock or Clock())


def segment_bytes(disk: CrashDisk) -> int:
    return sum(disk.stat(path).allocated_bytes for path in disk.files() if path.suffix == ".seg")


# What is stored, and what its name is.


def test_the_name_of_a_failed_extent_is_not_used_again() -> None:
    inner, clock = CrashDisk(), Clock()
    disk = FaultyDisk(inner)
    tier, other = open_tier(disk, clock), open_tier(inner, clock)
    assert save(tier, 0)
    disk.inject(DiskFault("write", "late", start=3, times=1))  # the record is written, and an error is reported
    assert not save(tier, 1)
    other.refresh()
    if seen := found_in_part(other, 1):
        assert other.delete([seen], reason="corrupt") == 1
    clock.now += STOPPED_S + 1
    assert save(tier, 2)
    tier.refresh()
    assert found(tier, [0, 2]) == {0, 2}
    other.refresh()
    assert found(other, [0, 2]) == {0, 2}
    other.close()
    tier.close()
    tier = open_tier(inner)
    assert found(tier, [0, 2]) == {0, 2}
    assert tier.check() == []
    tier.close()


def found_in_part(tier: DiskTier, seed: int) -> int | None:
    """Return the extent of a prompt that is found and cannot be read."""
    extent = extent_of(tier, seed)
    if extent < 0:
        return None
    with pytest.raises(StoreError):
        read(tier, extent, 0, len(image(seed)))
    return extent


@pytest.mark.parametrize(("call", "start"), [("facts", 3), ("truncate", 1), ("rename", 1)])
def test_what_was_journalled_is_stored_whatever_fails_afterwards(call: str, start: int) -> None:
    disk = FaultyDisk(CrashDisk())
    tier = open_tier(disk)
    assert save(tier, 0)
    before = disk.calls["write"]
    tier._store.upkeep.renew_at = 0  # a journal that is due to start anew
    disk.inject(DiskFault(call, "eio", start=start))
    assert tier.write(image(1), TINY).reason == "written"
    assert disk.calls["write"] - before <= 5  # extent, record, the mark before and after, a new generation
    disk.heal()
    assert tier.statistics().extents == 2
    assert found(tier, [0, 1]) == {0, 1}
    assert tier.check() == []
    tier.close()


def test_an_error_while_tidying_is_not_one_of_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("no", reason="test")

    tier = open_tier(CrashDisk())
    tier._store.upkeep.renew_at = 0
    monkeypatch.setattr(Books, "snapshot", refuse)
    monkeypatch.setattr(Books, "snapshot_bytes", lambda _: 0)
    assert tier.write(image(1), TINY).reason == "written"
    assert found(tier, [1]) == {1}
    tier.close()


def test_a_segment_whose_header_rotted_takes_nothing_more_and_the_next_one_does() -> None:
    disk = CrashDisk()
    tier = open_tier(disk)
    assert save(tier, 0)
    disk.damage(next(path for path in disk.files() if path.suffix == ".seg"), 3)
    tier._store.files.discard(next(iter(tier._store.books.segments.values())))  # as if it had been closed as idle
    assert tier.write(image(1), TINY).reason == "written"
    assert found(tier, [0, 1]) == {1}
    assert tier.check() == []
    tier.close()


def test_an_extent_written_by_two_threads_at_once_is_stored_once() -> None:
    disk = FaultyDisk(CrashDisk(), stall_s=60)
    tier = open_tier(disk)
    assert save(tier, 0)
    disk.inject(DiskFault("write", "stall", times=1))
    reasons: list[str] = []
    barrier = threading.Barrier(2)

    def write() -> None:
        barrier.wait(30)
        reasons.append(tier.write(image(1), TINY).reason)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert disk.stalled.wait(30)  # one of them is amid its write, the other waits for its turn or will
    disk.heal()
    for thread in threads:
        thread.join(30)
    assert sorted(reasons) == ["present", "written"]
    assert tier.statistics().extents == 2
    assert tier.check() == []
    tier.close()


# The capacity.


def test_two_processes_at_the_cap_keep_to_it_together(tmp_path: Path) -> None:
    root, capacity = tmp_path / "kv", 2 << 20
    children = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(root), str(capacity), str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in (0, 1000)
    ]
    with children[0], children[1]:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        highest, reasons = 0, Counter[str]()
        for _ in range(100):
            reasons.update(child.stdout.readline().strip() for child in children if child.stdout)
            with (root / "headstart.json").open("r+b") as marker:
                fcntl.flock(marker, fcntl.LOCK_EX)  # nobody adds while it is looked
                with suppress(FileNotFoundError):  # removing may go on
                    highest = max(highest, charged(root))
        problems = [child.stdout.readline() for child in children if child.stdout]
    assert reasons == {"written": 200}
    assert capacity // 2 < highest <= capacity
    assert problems == ["0\n", "0\n"]
    tier = DiskTier.open(root, capacity_bytes=capacity)
    assert tier.check() == []
    tier.close()


def test_a_directory_that_another_process_keeps_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ALONE_S", 0.01)
    disk, clock = CrashDisk(), Clock()
    tier = open_tier(disk, clock)
    assert save(tier, 0)
    marker = disk.open(ROOT / "headstart.json", "write")
    assert disk.lock_file(marker)
    assert tier.write(image(1), TINY).reason == "stopped"
    assert tier.write(image(2), TINY).reason == "stopped"
    assert tier.statistics().counters["write_failed_stopped"] == 2
    assert found(tier, [0, 1, 2]) == {0}
    disk.close(marker)
    clock.now += BUSY_S + 0.1
    assert save(tier, 1), "a slow disk stores less, it does not stop storing"
    assert tier.check() == []
    tier.close()


def test_the_last_extents_of_another_writers_open_segment_give_their_space_back() -> None:
    disk, clock = CrashDisk(), Clock()
    writer, tier = open_tier(disk, clock), open_tier(disk, clock)
    for seed in range(3):
        assert save(writer, seed)
    tier.refresh()
    before = segment_bytes(disk)
    assert tier.delete([extent_of(tier, seed) for seed in range(3)], reason="user") == 3
    assert segment_bytes(disk) == before - 3 * len(image(0))
    assert save(writer, 4)
    assert writer.check() == []
    writer.close()
    tier.close()


@pytest.mark.parametrize("kind", ["eio", "enospc"])
def test_holes_that_cannot_be_made_do_not_empty_the_tier(kind: str) -> None:
    disk = FaultyDisk(CrashDisk())
    tier = open_tier(disk, capacity_bytes=1 << 20)
    for seed in range(12):
        assert save(tier, seed)
    disk.inject(DiskFault("punch", kind))  # type: ignore[arg-type]
    for seed in range(12, 24):
        assert save(tier, seed)
        assert len(found(tier, range(seed + 1))) >= 8
        assert tier.statistics().allocated_bytes <= 1 << 20
    assert tier.statistics().counters["punch_failed"] == 1
    assert tier.check() == []
    tier.close()


def test_files_that_cannot_be_removed_either_do_not_empty_the_tier() -> None:
    disk = FaultyDisk(CrashDisk(holes=False))
    clock = Clock()
    tier = open_tier(disk, clock, capacity_bytes=1 << 20)
    seeds = itertools.count()
    while not tier.statistics().counters.get("evicted_capacity"):
        assert save(tier, next(seeds))
    there = len(found(tier, range(100)))
    disk.inject(DiskFault("unlink", "eio"))
    reasons = [tier.write(image(next(seeds)), TINY).reason for _ in range(12)]
    assert set(reasons[-8:]) == {"stopped"}
    assert len(found(tier, range(100))) >= there - 5
    disk.heal()
    clock.now += STOPPED_S + 1
    assert save(tier, 200)
    assert tier.check() == []
    tier.close()


# Work under the lock.


def test_a_full_tier_does_not_choose_anew_for_every_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(CrashDisk())
    chosen, choose = [], evicting.choose_victims
    monkeypatch.setattr(evicting, "choose_victims", lambda **columns: chosen.append(1) or choose(**columns))
    for seed in range(700):
        assert save(tier, seed, pieces=1)
    evicted = tier.statistics().counters["evicted_capacity"]
    assert evicted > 100
    assert len(chosen) < evicted / 3
    assert tier.check() == []
    tier.close()


def test_a_journal_that_is_mostly_alive_is_not_copied_to_learn_that(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(CrashDisk())
    for seed in range(20):
        assert save(tier, seed)
    monkeypatch.setattr(Books, "snapshot", lambda _: pytest.fail("the books were copied"))
    tier._store.upkeep.renew_at = 0
    assert save(tier, 20)
    assert tier.statistics().counters.get("journal_renewed", 0) == 0
    tier.close()


def test_what_a_snapshot_takes_is_known_without_making_it() -> None:
    tier = open_tier(CrashDisk(), capacity_bytes=2 << 20)
    for seed in range(60):
        assert save(tier, seed, pieces=1 + seed % 8)
        assert tier.write(prompt(9, seed=seed).image(), TINY).stored  # of which some blocks are there
    store = tier._store
    store.upkeep.renew_at = 1 << 40
    live = store.books.snapshot_bytes()
    journal = store.upkeep.journal.renew(store.upkeep.snapshot(), now_ms=0)
    assert live * 0.5 <= journal.size <= live * 1.5
    journal.close()


def test_removing_an_extent_looks_only_at_those_that_share_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(CrashDisk())
    for seed in range(30):  # each in two extents that share two blocks
        put(tier, prompt(4, seed=seed), pieces=3)
        assert tier.write(prompt(4, seed=seed).image(1, 3), TINY).stored
    pointed: list[int] = []
    point = BlockIndex._point

    def counting(index: BlockIndex, prefix: np.ndarray, extent: int) -> None:
        pointed.append(extent)
        point(index, prefix, extent)

    monkeypatch.setattr(BlockIndex, "_point", counting)
    gone = extent_of(tier, 7)
    other = ExtentId(located(tier, 7)[3])
    assert tier.delete([gone], reason="user") == 1
    assert pointed == [other & 0xFFFFFFFF] * 2
    assert [extent >= 0 for extent in tier.locate(TINY.digest, keys(7)).extents] == [False, True, True, True]
    assert tier.check() == []
    tier.close()


# What check finds.


def test_check_tells_of_space_that_nothing_takes() -> None:
    disk = CrashDisk()
    tier = open_tier(disk)
    for seed in range(4):
        assert save(tier, seed)
    tier.close()
    tier = open_tier(disk)  # the segment is sealed now
    segment = next(path for path in disk.files() if path.suffix == ".seg")
    handle = disk.open(segment, "write")
    disk.reserve(handle, disk.facts(handle).size, 256 << 10)
    disk.close(handle)
    assert any("its extents take" in problem.what for problem in problems_of(tier, segment))
    tier.close()


def test_check_tells_of_a_segment_without_extents() -> None:
    disk = FaultyDisk(CrashDisk())
    tier = open_tier(disk)
    assert save(tier, 0)
    disk.inject(DiskFault("unlink", "eio"))
    assert tier.delete([extent_of(tier, 0)], reason="user") == 1
    segment = next(path for path in disk.inner.files() if path.suffix == ".seg")  # type: ignore[attr-defined]
    tier._store.appending.clear()
    assert any("no extent is left" in problem.what for problem in problems_of(tier, segment))
    tier.close()


def problems_of(tier: DiskTier, path: Path) -> list[Problem]:
    return [problem for problem in tier.check() if problem.where == str(path)]
