"""Readers and those who take away, in threads and processes: what is under a lease is read to its end, and goes afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_kit import extent_of, found, image, read, save

from headstart.tier.base import ExtentId
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import Handle, RealDisk

CAPACITY = 4 << 20
HELD = range(0, 12, 2)
CHILD = Path(__file__).with_name("pressing_child.py")


class WithoutHoles(RealDisk):
    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return False


class Readers:
    """Threads that read leased extents from end to end, again and again, and compare every byte."""

    def __init__(self, tier: DiskTier, extents: Sequence[tuple[int, ExtentId]]) -> None:
        self.rounds = 0
        self._tier = tier
        self._extents = extents
        self._stop = threading.Event()
        self._wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(3)]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self._wrong == []
        assert self.rounds > 3

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                for seed, extent in self._extents:
                    whole = image(seed)
                    if read(self._tier, extent, 0, len(whole)) != whole:
                        self._wrong.append(f"prompt {seed}")
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 a thread's outer edge: the test says it
            self._wrong.append(repr(error))


@pytest.mark.parametrize("disk", [RealDisk, WithoutHoles], ids=["holes", "no holes"])
def test_what_is_leased_is_read_to_its_end_while_others_evict_delete_and_tend(tmp_path: Path, disk: type[RealDisk]) -> None:
    root = tmp_path / "kv"
    tier = DiskTier.open(root, capacity_bytes=CAPACITY, disk=disk())
    assert all(save(tier, seed) for seed in range(12))
    extents = [(seed, extent_of(tier, seed)) for seed in HELD]
    assert all(tier.lease([extent for _, extent in extents]))
    other = DiskTier.open(root, capacity_bytes=CAPACITY, disk=disk())
    arguments = [sys.executable, str(CHILD), str(root), str(CAPACITY), "1000"]
    with Readers(tier, extents), subprocess.Popen(arguments, stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        child.stdin.write("go\n")
        child.stdin.flush()
        for seed in range(2000, 2030):  # this process and the other one press at once
            save(other, seed)
            save(tier, seed + 500)
            other.tend()
            other.delete([extent_of(other, seed) for seed in HELD], reason="user")
        said = child.communicate()[0].split()
        assert "written" in said
        if disk is RealDisk:  # else that process, which has holes, misses those that were not made here
            assert said[-1] == "0", "the other process' check found something"
    assert found(other, range(12)) >= set(HELD)
    tier.release([extent for _, extent in extents])
    assert other.delete([extent_of(other, seed) for seed in HELD], reason="user") == len(HELD)
    assert found(other, HELD) == set()
    assert other.check() == []
    other.close()
    tier.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_lease_outlives_children_that_were_forked_and_died(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY)
    other = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY)
    assert save(tier, 1)
    extent = extent_of(tier, 1)
    assert tier.lease([extent]) == [True]
    for clean in (True, False):
        child = os.fork()
        if not child:
            if clean:
                tier.close()
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        other.refresh()
        assert other.delete([extent_of(other, 1)], reason="user") == 0
        assert read(tier, extent, 0, len(image(1))) == image(1)
    tier.release([extent])
    other.close()
    assert tier.check() == []
    tier.close()
