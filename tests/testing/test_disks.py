"""The disks of the kit behave as the real one does where nothing is injected, and as their fault model says where it is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import StoreError
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import aligned_bytes
from headstart.testing.faulty_disk import DiskFault, FaultyDisk, ProcessDied
from headstart.tier.disk.door import Disk, Entry, RealDisk

ROOT = Path("/disk")


def read(disk: Disk, path: Path, nbytes: int, offset: int = 0) -> bytes:
    handle = disk.open(path, "read")
    buffer = bytearray(nbytes)
    try:
        disk.read(handle, [memoryview(buffer)], offset)
    finally:
        disk.close(handle)
    return bytes(buffer)


@pytest.fixture(params=["real", "crash", "faulty"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Disk, Path]:
    if request.param == "real":
        return RealDisk(), tmp_path
    return (CrashDisk() if request.param == "crash" else FaultyDisk(CrashDisk())), ROOT


# What the door promises, on the real disk and on those of the kit.


def test_bytes_come_back_scattered_and_in_order(place: tuple[Disk, Path]) -> None:
    disk, root = place
    handle = disk.open(root / "a", "create", bulk=True)
    page = aligned_bytes(8192)
    page[:] = list(range(256)) * 32
    disk.write(handle, page.data, 4096)
    disk.write(handle, b"odd", 1)
    parts = [bytearray(5), bytearray(4091), bytearray(8192)]
    assert disk.read(handle, [memoryview(p) for p in parts], 0) == 12288
    assert b"".join(parts) == b"\0odd\0" + bytes(4091) + page.tobytes()
    assert disk.facts(handle).size == 12288
    disk.close(handle)


def test_a_read_past_the_end_is_short_and_says_so(place: tuple[Disk, Path]) -> None:
    disk, root = place
    handle = disk.open(root / "a", "create")
    disk.write(handle, b"12345", 0)
    with pytest.raises(StoreError) as raised:
        disk.read(handle, [memoryview(bytearray(6))], 0)
    assert raised.value.reason == "short-read"
    disk.close(handle)


def test_names_are_created_renamed_listed_and_removed(place: tuple[Disk, Path]) -> None:
    disk, root = place
    disk.make_directory(root / "d")
    disk.make_directory(root / "d")
    for name in ("b", "a"):
        disk.close(disk.open(root / "d" / name, "create"))
    assert disk.entries(root / "d") == [Entry("a", False), Entry("b", False)]
    assert Entry("d", True) in disk.entries(root)
    disk.rename(root / "d" / "a", root / "d" / "b")
    assert disk.entries(root / "d") == [Entry("b", False)]
    disk.unlink(root / "d" / "b")
    assert disk.entries(root / "d") == []


@pytest.mark.parametrize(
    ("act", "number"),
    [
        (lambda disk, root: disk.open(root / "there", "create"), errno.EEXIST),
        (lambda disk, root: disk.open(root / "no", "read"), errno.ENOENT),
        (lambda disk, root: disk.open(root / "no" / "no", "create"), errno.ENOENT),
        (lambda disk, root: disk.stat(root / "no"), errno.ENOENT),
        (lambda disk, root: disk.unlink(root / "no"), errno.ENOENT),
        (lambda disk, root: disk.make_directory(root / "there"), errno.EEXIST),
        (lambda disk, root: disk.entries(root / "there"), errno.ENOTDIR),
        (lambda disk, root: disk.entries(root / "no"), errno.ENOENT),
        (lambda disk, root: disk.rename(root / "no", root / "x"), errno.ENOENT),
    ],
)
def test_what_cannot_be_is_refused_alike(place: tuple[Disk, Path], act, number: int) -> None:
    disk, root = place
    disk.close(disk.open(root / "there", "create"))
    with pytest.raises(OSError, match=r".+") as raised:
        act(disk, root)
    assert raised.value.errno == number


def test_locks_keep_other_handles_out_until_they_close(place: tuple[Disk, Path]) -> None:
    disk, root = place
    one = disk.open(root / "a", "create")
    two = disk.open(root / "a", "write")
    assert disk.lock_file(one)
    assert not disk.lock_file(two)
    assert disk.lock_range(one, 0, 100, exclusive=False)
    assert disk.lock_range(two, 50, 100, exclusive=False)
    assert not disk.lock_range(two, 0, 60, exclusive=True)
    assert disk.lock_range(two, 100, 50, exclusive=True)
    disk.unlock_range(one, 0, 50)
    assert disk.lock_range(two, 0, 50, exclusive=True)
    assert not disk.lock_range(two, 0, 51, exclusive=True)
    disk.close(one)
    assert disk.lock_file(two)
    assert disk.lock_range(two, 0, 150, exclusive=True)
    disk.close(two)


def test_space_is_charged_and_comes_back(place: tuple[Disk, Path]) -> None:
    disk, root = place
    handle = disk.open(root / "a", "create")
    assert disk.reserve(handle, 0, 1 << 20) in (True, False)
    for at in range(0, 1 << 20, 65536):
        disk.write(handle, b"\1" * 65536, at)
    disk.sync(handle)
    full = disk.facts(handle).allocated_bytes
    assert full >= 1 << 20
    if disk.punch(handle, 4096, 65536):
        assert disk.facts(handle).allocated_bytes <= full - 65536
        assert read(disk, root / "a", 4096 + 65536 + 1)[4096:] == bytes(65536) + b"\1"
    disk.truncate(handle, 4096)
    assert disk.facts(handle).size == 4096
    disk.unlink(root / "a")
    assert disk.facts(handle).links == 0
    disk.close(handle)


# What a crash leaves.


def test_a_kill_keeps_every_byte_and_ends_locks_and_handles() -> None:
    disk = CrashDisk()
    handle = disk.open(ROOT / "a", "create")
    disk.write(handle, b"kept", 0)
    assert disk.lock_file(handle)
    disk.kill()
    with pytest.raises(OSError, match="EBADF"):
        disk.facts(handle)
    assert read(disk, ROOT / "a", 4) == b"kept"
    assert disk.lock_file(disk.open(ROOT / "a", "write"))


@given(st.integers(0, 10_000))
def test_what_was_synced_survives_every_power_cut(seed: int) -> None:
    disk = CrashDisk()
    disk.make_directory(ROOT / "d")
    disk.sync_directory(ROOT)
    handle = disk.open(ROOT / "d" / "a", "create")
    disk.sync_directory(ROOT / "d")
    disk.write(handle, b"1" * 9000, 0)
    disk.sync(handle)
    disk.write(handle, b"2" * 9000, 9000)
    disk.power_cut(seed)
    data = disk.files()[ROOT / "d" / "a"]
    assert data[:9000] == b"1" * 9000
    assert set(data[9000:]) <= set(b"2\0")
    disk.power_cut(seed + 1)
    assert disk.files()[ROOT / "d" / "a"] == data


def test_what_was_not_synced_is_lost_torn_zeroed_or_kept_by_seed() -> None:
    outcomes = set()
    for seed in range(200):
        disk = CrashDisk()
        handle = disk.open(ROOT / "a", "create")
        disk.sync_directory(ROOT)
        disk.sync(handle)
        disk.write(handle, b"1" * 4096, 0)
        disk.write(handle, b"2" * 4096, 4096)
        disk.power_cut(seed)
        data = disk.files()[ROOT / "a"]
        outcomes.add(
            "lost" if not data else "zeros" if not any(data) else "kept" if data == b"1" * 4096 + b"2" * 4096
            else "reordered" if data.startswith(b"\0" * 4096) else "torn"
        )  # fmt: skip
    assert outcomes == {"lost", "zeros", "kept", "reordered", "torn"}


def test_a_name_that_was_not_synced_may_be_lost_with_all_below() -> None:
    left = set()
    for seed in range(60):
        disk = CrashDisk()
        disk.make_directory(ROOT / "d")
        disk.close(disk.open(ROOT / "d" / "a", "create"))
        disk.rename(ROOT / "d" / "a", ROOT / "d" / "b")
        disk.power_cut(seed)
        left.add(tuple(str(path.relative_to(ROOT)) for path in disk.files()))
    assert left == {(), ("d/a",), ("d/b",)}


def test_a_full_disk_takes_nothing_more() -> None:
    disk = CrashDisk(size_bytes=1 << 16)
    handle = disk.open(ROOT / "a", "create")
    disk.write(handle, bytes(60_000), 0)
    with pytest.raises(OSError, match="ENOSPC"):
        disk.write(handle, bytes(10_000), 60_000)
    assert disk.allocated_bytes() == 61_440


# What is injected.


def test_faults_strike_when_they_are_due_and_are_counted() -> None:
    disk = FaultyDisk(CrashDisk())
    handle = disk.open(ROOT / "a", "create")
    disk.inject(DiskFault("write", "enospc", every=3, start=2, times=2))
    failed = []
    for n in range(10):
        try:
            disk.write(handle, b"x", n)
        except OSError as error:
            failed.append((n, error.errno))
    assert failed == [(1, errno.ENOSPC), (4, errno.ENOSPC)]
    assert disk.injected == {("write", "enospc"): 2}


def test_a_cut_write_leaves_half_and_a_late_error_all_of_it() -> None:
    disk = FaultyDisk(CrashDisk())
    handle = disk.open(ROOT / "a", "create")
    disk.inject(DiskFault("write", "short", times=1))
    with pytest.raises(OSError, match="cut"):
        disk.write(handle, b"1234", 0)
    assert disk.facts(handle).size == 2
    disk.inject(DiskFault("write", "late", times=1))
    with pytest.raises(OSError, match="injected"):
        disk.write(handle, b"1234", 0)
    assert disk.facts(handle).size == 4


def test_a_flipped_bit_is_silent() -> None:
    disk = FaultyDisk(CrashDisk())
    handle = disk.open(ROOT / "a", "create")
    disk.write(handle, b"\0" * 8, 0)
    disk.inject(DiskFault("read", "flip", times=1))
    assert sum(map(int.bit_count, read(disk, ROOT / "a", 8))) == 1
    assert read(disk, ROOT / "a", 8) == bytes(8)


def test_the_dead_stay_dead_and_their_locks_are_free() -> None:
    inner = CrashDisk()
    disk = FaultyDisk(inner)
    handle = disk.open(ROOT / "a", "create")
    assert disk.lock_file(handle)
    disk.die_at(2)
    disk.write(handle, b"1234", 0)
    with pytest.raises(ProcessDied):
        disk.write(handle, b"5678", 4)
    with pytest.raises(ProcessDied):
        disk.entries(ROOT)
    disk.bury()
    assert inner.files() == {ROOT / "a": b"123456"}
    assert inner.lock_file(inner.open(ROOT / "a", "write"))
