"""The door to the real operating system: every byte, every lock, every refusal."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.errors import StoreError
from headstart.tier.disk.door import Handle, RealDisk

PAGE = 4096
CONTENT = bytes(range(256)) * 16 * 8  # eight pages


@pytest.fixture
def disk() -> RealDisk:
    return RealDisk()


@pytest.fixture
def handle(disk: RealDisk, tmp_path: Path) -> Iterator[Handle]:
    handle = disk.open(tmp_path / "file", "create", bulk=True)
    disk.write(handle, CONTENT, 0)
    yield handle
    disk.close(handle)


@pytest.fixture
def aligned() -> memoryview:
    return memoryview(mmap.mmap(-1, 16 * PAGE))


def test_a_probe_leaves_nothing_behind(disk: RealDisk, tmp_path: Path) -> None:
    assert disk.probe(tmp_path) in (True, False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("offset", "sizes"),
    [
        (0, [PAGE]),
        (PAGE, [PAGE, 2 * PAGE]),
        (PAGE, [PAGE, 100, 7, PAGE]),
        (3, [1, 0, 4094, PAGE]),
        (0, [100, PAGE]),
        (0, []),
    ],
)
def test_any_range_is_read_into_any_buffers(
    disk: RealDisk, handle: Handle, aligned: memoryview, offset: int, sizes: list[int]
) -> None:
    buffers, at = [], 0
    for size in sizes:
        buffers.append(aligned[at : at + size])
        at += size
    assert disk.read(handle, buffers, offset) == sum(sizes)
    assert bytes(aligned[:at]) == CONTENT[offset : offset + at]


def test_more_buffers_than_one_call_takes_are_filled(disk: RealDisk, handle: Handle) -> None:
    data = bytearray(3000)
    view = memoryview(data)
    assert disk.read(handle, [view[i : i + 1] for i in range(3000)], 5) == 3000
    assert data == CONTENT[5:3005]


@pytest.mark.parametrize("offset", [7 * PAGE, 7 * PAGE + 1, 100 * PAGE])
def test_a_short_read_is_no_read(disk: RealDisk, handle: Handle, aligned: memoryview, offset: int) -> None:
    with pytest.raises(StoreError) as caught:
        disk.read(handle, [aligned[: 2 * PAGE]], offset)
    assert caught.value.reason == "short-read"


@pytest.mark.parametrize(("start", "nbytes", "offset"), [(0, 2 * PAGE, PAGE), (1, PAGE, PAGE), (0, 100, 5), (0, 2 * PAGE, 3)])
def test_any_range_is_written(
    disk: RealDisk, handle: Handle, aligned: memoryview, tmp_path: Path, start: int, nbytes: int, offset: int
) -> None:
    aligned[:] = os.urandom(len(aligned))
    disk.write(handle, aligned[start : start + nbytes], offset)
    want = bytearray(CONTENT)
    want[offset : offset + nbytes] = aligned[start : start + nbytes]
    assert (tmp_path / "file").read_bytes() == want


def test_a_hole_gives_space_back_and_reads_as_zeros(disk: RealDisk, handle: Handle, aligned: memoryview) -> None:
    before = disk.facts(handle)
    if not disk.punch(handle, PAGE, 2 * PAGE):
        pytest.skip("NOT TESTED: this file system cannot punch holes")
    after = disk.facts(handle)
    assert after.size == before.size
    assert after.allocated_bytes < before.allocated_bytes
    disk.read(handle, [aligned[: 4 * PAGE]], 0)
    assert bytes(aligned[: 4 * PAGE]) == CONTENT[:PAGE] + bytes(2 * PAGE) + CONTENT[3 * PAGE : 4 * PAGE]


def test_reserved_space_is_charged_and_is_not_part_of_the_file(disk: RealDisk, handle: Handle) -> None:
    before = disk.facts(handle)
    if not disk.reserve(handle, before.size, 64 * PAGE):
        pytest.skip("NOT TESTED: this file system cannot reserve")
    assert disk.facts(handle).size == before.size
    assert disk.facts(handle).allocated_bytes >= before.allocated_bytes + 64 * PAGE
    disk.truncate(handle, before.size)
    assert disk.facts(handle).allocated_bytes <= before.allocated_bytes + PAGE


def test_a_file_is_locked_by_one_handle_until_it_is_closed(disk: RealDisk, handle: Handle, tmp_path: Path) -> None:
    other = disk.open(tmp_path / "file", "write")
    assert disk.lock_file(handle)
    assert disk.lock_file(handle)
    assert not disk.lock_file(other)
    disk.close(other)
    other = disk.open(tmp_path / "file", "read")
    assert not disk.lock_file(other)
    disk.close(other)


def test_ranges_are_shared_by_readers_and_refused_to_a_remover(disk: RealDisk, handle: Handle, tmp_path: Path) -> None:
    other = disk.open(tmp_path / "file", "write", bulk=True)
    assert disk.lock_range(handle, PAGE, PAGE, exclusive=False)
    assert disk.lock_range(other, PAGE, PAGE, exclusive=False)
    assert not disk.lock_range(other, 0, 2 * PAGE, exclusive=True)
    assert disk.lock_range(other, 2 * PAGE, PAGE, exclusive=True)
    assert not disk.lock_range(handle, 2 * PAGE, 1, exclusive=False)
    disk.unlock_range(handle, PAGE, PAGE)
    assert disk.lock_range(other, PAGE, PAGE, exclusive=True)
    disk.close(other)
    assert disk.lock_range(handle, 0, 8 * PAGE, exclusive=True)


def test_names(disk: RealDisk, tmp_path: Path) -> None:
    disk.make_directory(tmp_path / "d")
    disk.make_directory(tmp_path / "d")
    handle = disk.open(tmp_path / "d" / "a", "create")
    with pytest.raises(FileExistsError):
        disk.open(tmp_path / "d" / "a", "create")
    with pytest.raises(FileExistsError):
        disk.make_directory(tmp_path / "d" / "a")
    disk.rename(tmp_path / "d" / "a", tmp_path / "d" / "b")
    assert [(entry.name, entry.is_directory) for entry in disk.entries(tmp_path / "d")] == [("b", False)]
    assert disk.stat(tmp_path / "d" / "b").inode == disk.facts(handle).inode
    assert disk.facts(handle).links == 1
    disk.sync(handle)
    disk.sync_directory(tmp_path / "d")
    disk.unlink(tmp_path / "d" / "b")
    assert disk.facts(handle).links == 0
    disk.close(handle)
    with pytest.raises(FileNotFoundError):
        disk.stat(tmp_path / "d" / "b")


def test_a_bulk_file_that_cannot_be_opened_twice_leaves_nothing(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, system = [], os.open

    def once(path: Path, flags: int, *mode: int) -> int:
        if opened:
            raise OSError(errno.EMFILE, "too many open files")
        opened.append(path)
        return system(path, flags, *mode)

    monkeypatch.setattr(os, "open", once)
    with pytest.raises(OSError, match="too many"):
        disk.open(tmp_path / "file", "create", bulk=True)
    assert list(tmp_path.iterdir()) == []
