"""A directory that cannot be used is one sentence that says what, where and the next step."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_kit import CAPACITY, files

from headstart.errors import FormatMismatch, TierUnavailable
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.tier.disk import DiskTier


def refusal(root: Path, **options: object) -> TierUnavailable:
    with pytest.raises(TierUnavailable) as caught:
        DiskTier.open(root, capacity_bytes=CAPACITY, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert str(root) in message
    assert "\n" not in message
    return caught.value


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.write_text("")
    assert "is a file" in str(refusal(root))
    assert "is a file" in str(refusal(root / "below"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "may not be written by this user"),
        (errno.ENOSPC, "full"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_directory_that_cannot_be_written(code: int, words: str) -> None:
    class Refusing(CrashDisk):
        def make_directory(self, path: Path) -> None:
            raise OSError(code, os.strerror(code), str(path))

    disk = Refusing()
    error = refusal(disk.root / "kv", disk=disk)
    assert words in str(error)
    assert error.errno == code


def test_a_disk_full_before_the_first_byte() -> None:
    disk = FaultyDisk(CrashDisk(), DiskFault("write", "enospc"))
    assert "full" in str(refusal(Path("/disk/kv"), disk=disk))


@pytest.fixture
def read_only_mount(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a read-only file system needs root to mount a tmpfs")
    place = tmp_path / "mount"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"NOT TESTED: a read-only file system; mounting is forbidden here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_read_only_file_system(read_only_mount: Path) -> None:
    assert "read-only" in str(refusal(read_only_mount / "kv"))


def test_another_format_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    (root / "headstart.json").write_text(json.dumps({"format": "headstart", "version": 2}))
    error = refusal(root)
    assert isinstance(error, FormatMismatch)
    assert (error.found, error.supported) == (2, 1)
    assert files(root) == ["headstart.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "something else", "version": 1}', "\x00" * 100])
def test_a_marker_that_is_not_ours_is_refused(tmp_path: Path, content: str) -> None:
    root = tmp_path / "kv"
    root.mkdir()
    (root / "headstart.json").write_text(content)
    assert "not the marker of a headstart cache" in str(refusal(root))


def test_a_capacity_that_holds_nothing_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        DiskTier.open(tmp_path / "kv", capacity_bytes=1000)
    assert not (tmp_path / "kv").exists()


def test_parents_are_created(tmp_path: Path) -> None:
    DiskTier.open(tmp_path / "a" / "b" / "kv", capacity_bytes=CAPACITY).close()
    assert files(tmp_path / "a" / "b" / "kv") == ["headstart.json"]
