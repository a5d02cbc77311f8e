"""Things in a cache directory that are no files of ours: links, FIFOs, devices, nonsense in the marker."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_kit import CAPACITY, found, journals, save, segments

from headstart.errors import TierUnavailable
from headstart.tier.disk import DiskTier, RealDisk

Put = Callable[[Path, Path], None]


def put_fifo(path: Path, _: Path) -> None:
    os.mkfifo(path)


def put_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def put_dangling_link(path: Path, _: Path) -> None:
    path.symlink_to("nowhere")


def put_endless(path: Path, _: Path) -> None:
    path.symlink_to("/dev/zero")


def put_socket(path: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))  # its name may have some hundred bytes only


STRANGE = [put_fifo, put_link, put_dangling_link, put_endless, put_socket]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "kv"
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert all(save(tier, seed) for seed in range(3))
    tier.close()
    return root


@pytest.mark.parametrize("put", STRANGE)
@pytest.mark.parametrize("mode", ["read", "write"])
def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Put, mode: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").write_bytes(b"precious")
    put(tmp_path / "a", tmp_path / "outside")
    for bulk in (False, True):
        with pytest.raises(OSError, match="no regular file") as caught:
            RealDisk().open(tmp_path / "a", mode, bulk=bulk)  # type: ignore[arg-type]
        assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize("put", STRANGE)
@pytest.mark.parametrize("place", ["journal", "new journal", "segment", "new segment", "folder"])
def test_what_stands_in_the_place_of_a_file_is_removed_and_never_opened(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, put: Put, place: str
) -> None:
    monkeypatch.chdir(root / "journals")
    path = {
        "journal": journals(root)[0],
        "new journal": root / "journals" / f"{'0' * 32}-00000000.log",
        "segment": segments(root)[0],
        "new segment": segments(root)[0].with_name(f"{'0' * 32}-00000000.seg"),
        "folder": root / "segments" / "01",
    }[place]
    outside = tmp_path / "outside"
    if path.exists():
        shutil.move(path, outside)  # a link to it would work if it were followed
    else:
        outside.write_bytes(b"precious")
    before = outside.read_bytes()
    put(path, outside)
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert tier.statistics().counters["files_in_the_way"] == 1
    assert found(tier, range(3)) == (set() if place == "segment" else {0, 1, 2})
    assert save(tier, 7)
    assert tier.check() == []
    tier.close()
    assert outside.read_bytes() == before
    assert not path.is_symlink()
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert 7 in found(tier, range(9))
    tier.close()


@pytest.mark.parametrize("put", [put_fifo, put_link])
def test_a_segment_that_is_replaced_while_it_is_known_is_lost(tmp_path: Path, root: Path, put: Put) -> None:
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    path = segments(root)[0]
    tier._store.files.discard(next(iter(tier._store.books.segments.values())))
    shutil.move(path, tmp_path / "outside")
    put(path, tmp_path / "outside")
    assert found(tier, [7]) == set()
    assert [tier.lease([info.id]) for info in tier.scan()] == [[False]] * 3
    assert found(tier, range(3)) == set()
    assert save(tier, 7)
    tier.close()


@pytest.mark.parametrize("put", STRANGE)
@pytest.mark.parametrize("name", ["headstart.json", "journals", "segments"])
def test_a_marker_or_folder_that_is_none_is_refused_in_a_sentence(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, put: Put, name: str
) -> None:
    monkeypatch.chdir(root)
    outside = tmp_path / "outside"
    shutil.move(root / name, outside)
    before = outside.read_bytes() if outside.is_file() else b""
    put(root / name, outside)
    with pytest.raises(TierUnavailable, match=name):
        DiskTier.open(root, capacity_bytes=CAPACITY)
    assert before == (outside.read_bytes() if outside.is_file() else b"")


@pytest.mark.parametrize("text", ["[" * 60_000, '{"format": ' + '{"a":' * 10_000])
def test_a_marker_that_is_nested_too_deeply_is_written_anew(root: Path, text: str) -> None:
    (root / "headstart.json").write_text(text)
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert found(tier, range(3)) == {0, 1, 2}
    tier.close()


@pytest.mark.parametrize("content", [b"precious", b""])
def test_a_file_that_is_the_marker_under_a_second_name_is_not_written_to(tmp_path: Path, root: Path, content: bytes) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(content)
    (root / "headstart.json").unlink()
    os.link(outside, root / "headstart.json")
    for seed in (7, 8):
        tier = DiskTier.open(root, capacity_bytes=CAPACITY)
        assert save(tier, seed)
        assert found(tier, range(3)) == {0, 1, 2}
        assert tier.check() == []
        assert tier.statistics().counters.get("marker_rewritten", 0) == (seed == 7)
        tier.close()
    assert outside.read_bytes() == content
    assert sorted(path.name for path in root.iterdir()) == ["headstart.json", "journals", "segments"]
