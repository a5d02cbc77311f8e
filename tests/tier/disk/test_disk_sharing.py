"""Several processes on one directory: what one stores the others find, what one reads no other removes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from disk_kit import CAPACITY, Clock, extent_of, found, image, journals, save, segments

from headstart.errors import StoreError
from headstart.testing.fake_kv import TINY
from headstart.tier.base import ReadRange
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import Handle, RealDisk

CHILD = Path(__file__).with_name("sharing_child.py")


class Other:
    """Another process with the same directory open, which does what it is told."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.wait() == "open"

    def __call__(self, *words: object) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self.wait()

    def wait(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def tier(root: Path) -> Iterator[DiskTier]:
    clock = Clock()

    def ticking() -> float:
        clock.now += 1.0  # every look at the other journals is due
        return clock.now

    tier = DiskTier.open(root, capacity_bytes=CAPACITY, clock=ticking)
    yield tier
    assert tier.check() == []
    tier.close()


@pytest.fixture
def start(root: Path) -> Iterator[Callable[[], Other]]:
    started: list[Other] = []

    def start() -> Other:
        started.append(Other(root))
        return started[-1]

    yield start
    for other in started:
        other.kill()


def test_two_processes_find_and_read_what_the_other_stored(tier: DiskTier, start: Callable[[], Other]) -> None:
    assert save(tier, 1)
    other = start()
    assert other("find", 1) == "1"
    assert other("save", 2) == "written"
    assert found(tier, [1, 2]) == {1, 2}
    assert other("save", 1) == "present"
    assert save(tier, 3)
    assert other("find", 1, 2, 3) == "1 2 3"
    assert tier.statistics().extents == 3
    assert other("check") == "0"


def test_a_living_writer_is_not_taken_over(tier: DiskTier, root: Path, start: Callable[[], Other]) -> None:
    assert save(tier, 1)
    other = start()
    assert other("save", 2) == "written"
    assert len(journals(root)) == 2
    assert len({path.name.split("-")[0] for path in segments(root)}) == 2


def test_a_killed_writer_is_taken_over_by_the_next_one(tier: DiskTier, root: Path, start: Callable[[], Other]) -> None:
    first = start()
    assert first("save", 1) == "written"
    first.kill()
    second = start()
    assert second("find", 1) == "1"
    assert second("save", 2) == "written"
    assert found(tier, [1, 2]) == {1, 2}
    assert len(journals(root)) == 2


def test_what_another_process_reads_is_not_removed(tier: DiskTier, start: Callable[[], Other]) -> None:
    for seed in (1, 2):
        assert save(tier, seed)
    other = start()
    assert other("lease", 1) == "True"
    assert tier.delete([extent_of(tier, 1)], reason="user") == 0
    assert tier.delete([extent_of(tier, 2)], reason="user") == 1
    assert other("read", 1) == "right"
    assert other("release", 1) == "released"
    assert tier.delete([extent_of(tier, 1)], reason="user") == 1


def test_what_another_process_removed_is_gone_here_and_stays_gone(
    tier: DiskTier, start: Callable[[], Other], root: Path
) -> None:
    for seed in (1, 2):
        assert save(tier, seed)
    stale = extent_of(tier, 1)
    other = start()
    assert other("delete", 1) == "1"
    assert tier.lease([stale]) == [False]
    assert found(tier, [1, 2]) == {2}
    with pytest.raises(StoreError) as caught:
        tier.read([ReadRange(stale, 0, [memoryview(bytearray(4096))])])
    assert caught.value.reason == "gone"
    other.kill()
    again = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert found(again, [1, 2]) == {2}
    again.close()


def test_an_extent_that_another_process_removed_is_not_called_corrupt(root: Path, start: Callable[[], Other]) -> None:
    clock = Clock()
    tier = DiskTier.open(root, capacity_bytes=CAPACITY, clock=clock)
    assert save(tier, 1)
    extent = extent_of(tier, 1)
    assert start()("delete", 1) == "1"
    assert tier.delete([extent], reason="corrupt") == 0
    assert tier.statistics().counters.get("quarantined_corrupt", 0) == 0
    tier.close()


def test_uses_elsewhere_count_in_the_order_of_eviction(tier: DiskTier, start: Callable[[], Other]) -> None:
    for seed in (1, 2, 3):
        assert save(tier, seed)
    other = start()
    assert other("touch", 1) == "touched"
    assert other("close") == "closed"
    tier.refresh()
    by_use = sorted(tier.scan(), key=lambda info: info.last_used)
    assert by_use[-1].id == extent_of(tier, 1)


def test_one_process_evicts_what_another_stored(root: Path, start: Callable[[], Other]) -> None:
    other = start()
    for seed in range(20):
        assert other("save", seed) == "written"
    tier = DiskTier.open(root, capacity_bytes=1 << 20)
    assert tier.statistics().allocated_bytes <= 1 << 20
    there = found(tier, range(20))
    assert there == set(range(min(there), 20))
    assert len(there) < 20
    assert other("find", *range(20)) == " ".join(map(str, sorted(there)))
    assert tier.check() == []
    tier.close()


def test_a_directory_removed_while_in_use_loses_entries_and_is_made_anew(root: Path) -> None:
    clock = Clock()
    tier = DiskTier.open(root, capacity_bytes=CAPACITY, clock=clock)
    for seed in range(3):
        assert save(tier, seed)
    extent = extent_of(tier, 0)
    assert tier.lease([extent]) == [True]
    shutil.rmtree(root)
    front = bytearray(4096)
    tier.read([ReadRange(extent, 0, [memoryview(front)])])  # an open file outlives its name
    assert front == image(0)[:4096]
    clock.now += 1
    assert tier.write(image(1), TINY).reason == "written"
    assert save(tier, 7)
    assert found(tier, range(9)) == {1, 7}
    assert tier.check() == []
    tier.release([extent])
    tier.close()
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert found(tier, range(9)) == {1, 7}
    tier.close()


def test_segments_removed_while_in_use_are_missed_and_the_rest_goes_on(root: Path) -> None:
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    for seed in range(3):
        assert save(tier, seed)
    tier.close()
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    shutil.rmtree(root / "segments")
    assert tier.lease([extent_of(tier, 1)]) == [False]
    assert found(tier, range(3)) == set()
    for seed in range(3):
        assert save(tier, seed)
    assert found(tier, range(3)) == {0, 1, 2}
    assert tier.check() == []
    tier.close()


def test_a_directory_replaced_by_a_file_stops_storing_and_no_more(root: Path) -> None:
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert save(tier, 1)
    shutil.rmtree(root)
    root.write_text("not a directory")
    assert tier.write(image(2), TINY).reason == "error"
    assert tier.write(image(3), TINY).reason == "stopped"
    assert found(tier, [2, 3]) == set()
    tier.close()


class Forking(RealDisk):
    """Forks a child at the first lock that is asked for after `due`, which lives until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.due = False
        self._ends, self._end = os.pipe()

    def lock_file(self, handle: Handle) -> bool:
        locked = super().lock_file(handle)
        if locked and self.due:
            self.due = False
            self._child = os.fork()
            if not self._child:
                os.close(self._end)
                os.read(self._ends, 1)
                os._exit(0)
        return locked

    def end(self) -> None:
        os.close(self._end)
        os.close(self._ends)
        os.waitpid(self._child, 0)


def test_a_child_that_was_forked_while_something_was_written_keeps_no_lock(tmp_path: Path) -> None:
    disk = Forking()
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY, disk=disk)
    disk.due = True
    assert save(tier, 1)
    assert save(tier, 2)
    tier.close()
    with closing(DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY)) as other:
        assert save(other, 3)
        assert found(other, range(4)) == {1, 2, 3}
        assert len(journals(tmp_path / "kv")) == 1  # the first one's, whose lock could be taken
    disk.end()
