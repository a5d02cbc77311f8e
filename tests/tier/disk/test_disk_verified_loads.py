"""Many threads in two processes load and save over one directory that holds a quarter of what they want: every byte that is
loaded is right, and what the file system charges never passes the capacity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import RealDisk

CAPACITY = 8 << 20  # a quarter of what loading_child.py asks for
PROCESSES, THREADS = 2, 8
CHILD = Path(__file__).with_name("loading_child.py")


def charges(root: Path) -> dict[str, int]:
    """Return what the file system charges for each file now."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                facts = os.stat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            found[f"{name}/{facts.st_ino}"] = facts.st_blocks * 512
    return found


@contextmanager
def nobody_adding(root: Path) -> Iterator[None]:
    """Hold the lock under which processes add to a directory, as docs/format.md has it."""
    disk = RealDisk()
    handle = disk.open(root / "headstart.json", "write")
    try:
        while not disk.lock_file(handle):
            time.sleep(0.0005)
        yield
    finally:
        disk.close(handle)


def load_and_save(root: Path, *, loads: int) -> int:
    """Return how many pieces were loaded and compared."""
    arguments = [sys.executable, str(CHILD), str(root), str(CAPACITY)]
    children = [
        subprocess.Popen(
            [*arguments, str(seed), str(THREADS), str(loads // PROCESSES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(PROCESSES)
    ]
    most = samples = 0
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        before = charges(root)
        while any(child.poll() is None for child in children):
            if samples % 8 == 0:
                with nobody_adding(root):
                    charged = sum(charges(root).values())
            else:  # files change between one stat and the next: what two samples in a row agree on was charged at one time
                now = charges(root)
                charged = sum(min(nbytes, now.get(name, 0)) for name, nbytes in before.items())
                before = now
            most, samples = max(most, charged), samples + 1
            assert charged <= CAPACITY, f"{charged} bytes are charged, {CAPACITY} are allowed"
            time.sleep(0.01)
        told = [json.loads(child.communicate()[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for report in told:
        assert report["wrong"] == []
        assert report["problems"] == []
        assert report["short"] == 0, f"something under a lease could not be read: {report['faults']}"
    assert sum(report["loads"] for report in told) >= loads
    assert sum(report["tier"].get("evicted_capacity", 0) for report in told) > loads // 100, "the directory was never full"
    assert samples > 50
    assert most > CAPACITY * 3 // 4
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert tier.check() == []
    tier.close()
    return sum(report["pieces"] for report in told)


def test_twenty_thousand_loaded_pieces_over_a_quarter_of_the_data_are_right_and_the_cap_holds(tmp_path: Path) -> None:
    assert load_and_save(tmp_path / "kv", loads=500) >= 20_000


@pytest.mark.soak
def test_a_hundred_thousand_loads_over_a_quarter_of_their_data_are_right_and_the_cap_holds(tmp_path: Path) -> None:
    load_and_save(tmp_path / "kv", loads=100_000)
