"""Opening while others write, die or open too, and with files that cannot be read: nothing acknowledged is lost by it."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from disk_kit import CAPACITY, Clock, extent_of, found, image, journals, save, segments

from headstart.errors import FormatMismatch, TierUnavailable
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.tier.disk import DiskTier, RealDisk
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Handle, OpenMode
from headstart.tier.disk.follow import Others
from headstart.tier.disk.journal import Journal, JournalTail
from headstart.tier.disk.records import HEADER_BYTES, Snapshot, Unknown, encode_record

WRITER = b"w" * 16


class Meddled(FaultyDisk):
    """A disk on which something else happens once, just before a call that `when` picks."""

    def __init__(self, inner: CrashDisk, call: str, when: Callable[[Path], bool], act: Callable[[Path], None]) -> None:
        super().__init__(inner)
        self._meddling: tuple[str, Callable[[Path], bool], Callable[[Path], None]] | None = (call, when, act)
        self._paths: dict[Handle, Path] = {}

    def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
        handle = super().open(path, mode, bulk=bulk)
        self._paths[handle] = path
        return handle

    def lock_file(self, handle: Handle) -> bool:
        self._meddle("lock_file", handle)
        return super().lock_file(handle)

    def read(self, handle, buffers, offset):  # type: ignore[no-untyped-def]
        done = super().read(handle, buffers, offset)
        if offset:
            self._meddle("after read", handle)
        return done

    def _meddle(self, call: str, handle: Handle) -> None:
        if self._meddling is not None:
            wanted, when, act = self._meddling
            if wanted == call and when(self._paths[handle]):
                self._meddling = None
                act(self._paths[handle])


class Unreadable(CrashDisk):
    """A disk with bad sectors in the files whose names end as said."""

    def __init__(self, inner: CrashDisk, suffix: str, call: str) -> None:
        self.__dict__.update(inner.__dict__)  # the same files
        self._bad, self._call = suffix, call
        self._paths: dict[Handle, Path] = {}

    def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
        handle = super().open(path, mode, bulk=bulk)
        self._paths[handle] = path
        return handle

    def read(self, handle, buffers, offset):  # type: ignore[no-untyped-def]
        self._refuse("read", self._paths[handle])
        return super().read(handle, buffers, offset)

    def stat(self, path):  # type: ignore[no-untyped-def]
        self._refuse("stat", path)
        return super().stat(path)

    def entries(self, path):  # type: ignore[no-untyped-def]
        self._refuse("entries", path)
        return super().entries(path)

    def _refuse(self, call: str, path: Path) -> None:
        if call == self._call and path.name.endswith(self._bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


@pytest.fixture
def disk() -> CrashDisk:
    return CrashDisk()


@pytest.fixture
def root(disk: CrashDisk) -> Path:
    return disk.root / "kv"


def open_tier(root: Path, disk: CrashDisk | FaultyDisk, **options: object) -> DiskTier:
    return DiskTier.open(root, capacity_bytes=CAPACITY, disk=disk, **options)  # type: ignore[arg-type]


def is_journal(path: Path) -> bool:
    return path.suffix == ".log"


# Others write, die and open meanwhile.


def test_what_a_writer_adds_before_it_dies_while_another_opens_is_kept(disk: CrashDisk, root: Path) -> None:
    doomed = FaultyDisk(disk)
    writer = open_tier(root, doomed)
    assert save(writer, 1)

    def write_and_die(_: Path) -> None:
        assert save(writer, 2)
        doomed.bury()

    opened = open_tier(root, Meddled(disk, "after read", is_journal, write_and_die))
    opened.refresh()
    assert found(opened, [1, 2]) == {1, 2}
    opened.close()
    again = open_tier(root, disk)
    assert found(again, [1, 2]) == {1, 2}
    assert again.check() == []
    again.close()


@pytest.mark.parametrize("leaves_the_old", [False, True])
def test_a_journal_renewed_before_its_writer_died_is_read_in_its_newest_generation(
    disk: CrashDisk, root: Path, leaves_the_old: bool
) -> None:
    doomed = FaultyDisk(disk)
    writer = open_tier(root, doomed)
    assert save(writer, 1)

    def renew_and_die(_: Path) -> None:
        if leaves_the_old:
            doomed.inject(DiskFault("unlink", "eio"))
        writer._store.upkeep.begin()
        assert save(writer, 2)
        doomed.bury()

    opened = open_tier(root, Meddled(disk, "lock_file", is_journal, renew_and_die))
    assert found(opened, [1, 2]) == {1, 2}
    assert save(opened, 3)
    opened.close()
    assert sum(is_journal(path) for path in disk.files()) == 1
    again = open_tier(root, disk)
    assert found(again, [1, 2, 3]) == {1, 2, 3}
    assert again.check() == []
    again.close()


def test_two_dead_writers_are_followed_and_their_locks_given_back(disk: CrashDisk, root: Path) -> None:
    doomed = [FaultyDisk(disk), FaultyDisk(disk)]
    for seed, tier in enumerate([open_tier(root, one) for one in doomed]):
        assert save(tier, seed)
    for one in doomed:
        one.bury()
    first, second = open_tier(root, disk), open_tier(root, disk)
    assert {first._store.writer, second._store.writer} == {
        bytes.fromhex(path.name[:32]) for path in disk.files() if is_journal(path)
    }
    for seed, tier in ((2, first), (3, second)):
        assert save(tier, seed)
    for tier in (first, second):
        tier.refresh()
        assert found(tier, range(4)) == set(range(4))
        assert tier.check() == []
        tier.close()


def test_a_temporary_file_that_another_opener_removes_is_made_again(disk: CrashDisk, root: Path) -> None:
    def is_temporary(path: Path) -> bool:
        return path.suffix == ".tmp"

    for _ in range(2):  # the marker's, then the journal's
        tier = open_tier(root, Meddled(disk, "lock_file", is_temporary, disk.unlink))
        assert save(tier, 1)
        assert tier.check() == []
        tier.close()
        for path in list(disk.files()):
            if is_journal(path):
                disk.unlink(path)


def test_a_probe_that_another_opener_removes_is_made_again(tmp_path: Path) -> None:
    class Removing(RealDisk):
        removed = 0

        def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
            if self.removed < 3:
                self.removed += 1
                if self.removed == 1:
                    raise FileNotFoundError(errno.ENOENT, "removed before it was opened a second time", str(path))
                handle = super().open(path, mode, bulk=bulk)
                path.unlink()
                return handle
            return super().open(path, mode, bulk=bulk)

    assert Removing().probe(tmp_path) == RealDisk().probe(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_append_that_failed_after_others_saw_it_is_never_written_over(disk: CrashDisk, root: Path) -> None:
    clock = Clock()
    faulty = FaultyDisk(disk)
    writer = open_tier(root, faulty, clock=clock)
    assert save(writer, 0)
    reader = open_tier(root, disk)
    faulty.inject(DiskFault("write", "late", start=2, times=1))  # 1: the extent's bytes, 2: the record
    assert not writer.write(image(1), TINY).stored
    assert faulty.injected["write", "late"] == 1
    reader.refresh()
    clock.now += 60
    for seed in (2, 3):
        assert save(writer, seed)
        reader.refresh()
    assert found(reader, [0, 2, 3]) == {0, 2, 3}
    faulty.bury()
    again = open_tier(root, disk)
    assert found(again, [0, 2, 3]) == {0, 2, 3}
    assert again.check() == []
    again.close()
    reader.close()


def test_a_torn_end_is_not_written_over_by_who_takes_the_journal_over(disk: CrashDisk, root: Path) -> None:
    tier = open_tier(root, disk)
    assert save(tier, 1)
    tier.close()
    path = next(path for path in disk.files() if is_journal(path))
    whole = disk.files()[path]
    handle = disk.open(path, "write")
    disk.write(handle, b"torn", len(whole))
    disk.close(handle)
    tier = open_tier(root, disk)
    assert disk.files()[path] == whole + b"torn"
    assert save(tier, 2)
    assert path not in disk.files()
    tier.close()
    tier = open_tier(root, disk)
    assert found(tier, [1, 2]) == {1, 2}
    tier.close()


def test_a_generation_that_was_withdrawn_and_made_again_is_read(disk: CrashDisk) -> None:
    directory = Directory(disk, disk.root)
    directory.prepare()

    def create(generation: int, counter: int) -> Journal:
        records = [Snapshot(counter, 0)]
        return Journal.create(disk, directory, records, writer=WRITER, generation=generation, now_ms=1)

    first, withdrawn = create(1, 1), create(2, 2)
    others = Others(disk, directory, [], own_writer=b"")
    assert others.look_for_new() == [Snapshot(2, 0)]
    disk.unlink(directory.journal_path(WRITER, 2))
    withdrawn.close()
    assert others.look_for_new() == [Snapshot(1, 0)]
    first.append([Snapshot(3, 0)], sync=False)
    again = create(2, 4)
    assert others.poll() == [Snapshot(3, 0)]
    assert others.look_for_new() == [Snapshot(4, 0)]
    disk.unlink(directory.journal_path(WRITER, 2))
    again.close()
    create(2, 5)
    assert others.look_for_new() == [Snapshot(5, 0)]


# Files that cannot be read.


@pytest.mark.parametrize("call", ["read", "stat", "entries", "lock_file", "facts", "lock_range", "truncate", "punch", "unlink"])
def test_no_single_error_while_opening_leaves_anything_open_or_loses_anything(call: str) -> None:
    n, opened = 0, 0
    while True:
        n += 1
        disk = CrashDisk()
        root = disk.root / "kv"
        for seed in range(3):  # three writers, two of them dead
            doomed = FaultyDisk(disk)
            assert save(open_tier(root, doomed), seed)
            if seed:
                doomed.bury()
        faulty = FaultyDisk(disk, DiskFault(call, "eio", start=n, times=1))
        try:
            tier = open_tier(root, faulty)
        except TierUnavailable:
            assert not faulty._handles, f"{call} number {n}"
        else:
            opened += 1
            tier.close()
        if not faulty.injected:
            break
        tier = open_tier(root, disk)
        there = found(tier, range(3))
        assert there == {0, 1, 2}, f"{call} number {n}"
        tier.close()
        assert n < 200
    assert opened > n // 2, f"{n - opened} of {n} errors of {call} kept the tier from opening"


@pytest.mark.parametrize(
    ("suffix", "call", "journals_lost", "readable"),
    [
        (".log", "read", False, False),
        (".seg", "read", False, False),
        (".seg", "read", True, False),
        (".seg", "stat", False, True),
        ("00", "entries", False, True),
        ("headstart.json", "read", False, True),
    ],
)
def test_a_file_that_cannot_be_read_costs_what_is_in_it(
    disk: CrashDisk, root: Path, suffix: str, call: str, journals_lost: bool, readable: bool
) -> None:
    tier = open_tier(root, disk)
    assert save(tier, 1)
    tier.close()
    for path in list(disk.files()):
        if journals_lost and is_journal(path):
            disk.unlink(path)
    before = {path for path in disk.files() if path.suffix == ".seg"}
    tier = open_tier(root, Unreadable(disk, suffix, call))
    assert tier.lease([extent_of(tier, 1)]) == [readable]
    assert save(tier, 2)
    assert tier.statistics().allocated_bytes >= 2 * len(image(1))  # what cannot be read is charged all the same
    tier.close()
    assert before <= set(disk.files())
    tier = open_tier(root, disk)
    assert found(tier, [1, 2]) == {1, 2}
    tier.close()


# What a crash did not let a writer finish.


@pytest.mark.parametrize("call", ["punch", "unlink"])
def test_space_that_was_not_given_back_comes_back_at_the_next_opening(disk: CrashDisk, root: Path, call: str) -> None:
    faulty = FaultyDisk(disk)
    tier = open_tier(root, faulty)
    for seed in range(4):
        assert save(tier, seed)
    gone = range(1, 4) if call == "punch" else range(4)
    faulty.inject(DiskFault(call, "eio"))
    assert tier.delete([extent_of(tier, seed) for seed in gone], reason="user") == len(gone)
    tier.close()
    tier = open_tier(root, disk)
    assert tier.statistics().allocated_bytes < 2 * len(image(0)) + (128 << 10)
    assert found(tier, range(4)) == set(range(4)) - set(gone)
    assert sum(path.suffix == ".seg" for path in disk.files()) == (call == "punch")
    assert tier.check() == []
    tier.close()


# What other versions wrote.


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A closed directory on a real disk that holds prompts 0 to 2."""
    root = tmp_path / "kv"
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert all(save(tier, seed) for seed in range(3))
    tier.close()
    return root


def set_version(path: Path, *, check_at: int, covers: Callable[[bytes], bytes]) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, 2)
    data[check_at : check_at + 16] = xxhash.xxh3_128_digest(covers(bytes(data)))
    path.write_bytes(data)


def test_a_journal_of_another_version_is_kept_and_its_segments_are_charged(real: Path) -> None:
    journal, segment = journals(real)[0], segments(real)[0]
    set_version(journal, check_at=64, covers=lambda data: data[:64])
    before = journal.read_bytes(), segment.read_bytes()
    tier = DiskTier.open(real, capacity_bytes=CAPACITY)
    assert found(tier, range(3)) == set()
    assert tier.statistics().allocated_bytes >= segment.stat().st_blocks * 512
    assert tier.check() == []
    assert save(tier, 7)
    tier.close()
    assert (journal.read_bytes(), segment.read_bytes()) == before


@pytest.mark.parametrize("journals_lost", [False, True])
def test_a_segment_of_another_version_is_kept_and_charged(real: Path, journals_lost: bool) -> None:
    segment = segments(real)[0]

    def covered(data: bytes) -> bytes:
        return data[:96] + data[112 : 112 + struct.unpack_from("<I", data, 88)[0]]

    set_version(segment, check_at=96, covers=covered)
    if journals_lost:
        journals(real)[0].unlink()
    before = segment.read_bytes()
    for _ in range(2):
        tier = DiskTier.open(real, capacity_bytes=CAPACITY)
        assert found(tier, range(3)) == set()
        assert tier.statistics().allocated_bytes >= segment.stat().st_blocks * 512
        assert save(tier, 7)
        tier.close()
        assert segment.read_bytes() == before


@pytest.mark.parametrize("version_named", [1, 2])
def test_a_damaged_header_is_not_taken_for_a_later_version(real: Path, version_named: int) -> None:
    for path in (journals(real)[0], segments(real)[0]):
        data = bytearray(path.read_bytes())
        data[8], data[40] = version_named, data[40] ^ 1
        path.write_bytes(data)
    tier = DiskTier.open(real, capacity_bytes=CAPACITY)
    assert found(tier, range(3)) == set()
    assert segments(real) == []
    assert tier.check() == []
    tier.close()


def test_records_of_later_versions_outlive_the_generation(real: Path) -> None:
    path = journals(real)[0]
    pinned = Unknown(190, bytes(36))
    data = path.read_bytes()
    writer = bytes.fromhex(path.name[:32])
    path.write_bytes(data + encode_record(pinned, writer=writer, generation=0, offset=len(data)))
    for generation in (1, 2):
        tier = DiskTier.open(real, capacity_bytes=CAPACITY)
        tier._store.upkeep.begin()
        tier.close()
        tail = JournalTail(RealDisk(), Directory(RealDisk(), real), writer=writer, generation=generation)
        assert [record for record in tail.poll() if isinstance(record, Unknown)] == [pinned]
        tail.close()


def test_a_directory_with_an_unknown_feature_is_refused(real: Path) -> None:
    marker = real / "headstart.json"
    assert json.loads(marker.read_text())["features"] == []
    marker.write_text(json.dumps({"format": "headstart", "version": 1, "features": ["moss"]}))
    with pytest.raises(FormatMismatch, match=r"uses moss, which this headstart does not know"):
        DiskTier.open(real, capacity_bytes=CAPACITY)


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_a_rotten_marker_is_written_anew_where_files_of_a_cache_stand(real: Path, at: int) -> None:
    marker = real / "headstart.json"
    data = bytearray(marker.read_bytes())
    data[at] ^= 0x80
    marker.write_bytes(data)
    inode = marker.stat().st_ino
    tier = DiskTier.open(real, capacity_bytes=CAPACITY)
    assert found(tier, range(3)) == {0, 1, 2}
    tier.close()
    assert json.loads(marker.read_text())["version"] == 1
    assert marker.stat().st_ino == inode  # writers lock it


def test_a_journal_whose_reserved_bytes_are_set_is_no_journal(real: Path) -> None:
    path = journals(real)[0]
    data = bytearray(path.read_bytes())
    data[60] = 1
    data[64:HEADER_BYTES] = xxhash.xxh3_128_digest(bytes(data[:64]))
    path.write_bytes(data)
    tier = DiskTier.open(real, capacity_bytes=CAPACITY)
    assert found(tier, range(3)) == {0, 1, 2}  # by their headers
    assert tier.statistics().counters["journals_unreadable"] == 1
    tier.close()
