"""A directory opened again: everything that was stored, less what damage took, and never a person's work."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
import xxhash
from disk_kit import CAPACITY, charged, extent_of, files, found, journals, save, segments

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import OPAQUE, TINY, UNEVEN
from headstart.testing.tier_contract import located, prompt, put, read
from headstart.tier.base import ExtentId, Terms
from headstart.tier.disk import DiskTier, RealDisk
from headstart.tier.disk.records import HEADER_BYTES, decode_journal_header

SEEDS = range(6)


def open_tier(root: Path, capacity_bytes: int = CAPACITY) -> DiskTier:
    return DiskTier.open(root, capacity_bytes=capacity_bytes)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A closed directory that holds prompts 0 to 5."""
    root = tmp_path / "kv"
    tier = open_tier(root)
    assert all(save(tier, seed) for seed in SEEDS)
    tier.close()
    return root


def test_what_was_stored_is_found_again(root: Path) -> None:
    tier = open_tier(root)
    assert found(tier, SEEDS) == set(SEEDS)
    assert tier.check() == []
    tier.close()


def test_the_dead_writers_identity_goes_on(root: Path) -> None:
    before = files(root)
    tier = open_tier(root)
    assert save(tier, 50)
    tier.close()
    after = files(root)
    assert len(journals(root)) == 1
    new = set(after) - set(before)
    assert len(new) == 1
    assert new.pop().split("/")[-1].split("-")[0] == journals(root)[0].name.split("-")[0]


def test_opening_and_closing_leaves_nothing_behind(tmp_path: Path, root: Path) -> None:
    empty = tmp_path / "empty"
    open_tier(empty).close()
    assert files(empty) == ["headstart.json"]
    before = files(root)
    open_tier(root).close()
    assert files(root) == before


def test_directories_and_files_are_private(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_the_use_counter_and_retention_survive(root: Path) -> None:
    tier = open_tier(root)
    tier.touch([extent_of(tier, 3)])
    assert tier.write(prompt(2, seed=70).image(), TINY, terms=Terms("agent")).stored
    tier.close()
    tier = open_tier(root)
    by_use = sorted(tier.scan(), key=lambda info: info.last_used)
    assert by_use[-2].id == extent_of(tier, 3)
    assert by_use[-1].retention == "agent"
    tier.touch([extent_of(tier, 0)])
    info = tier.info(extent_of(tier, 0))
    assert info is not None
    assert info.last_used > by_use[-1].last_used
    tier.close()


@pytest.mark.parametrize("representation", [UNEVEN, OPAQUE], ids=["uneven", "opaque"])
def test_segments_hold_one_representation_each(root: Path, representation: type[TINY]) -> None:
    tier = open_tier(root)
    kv = prompt(6, representation=representation)
    put(tier, kv)
    tier.close()
    shutil.rmtree(root / "journals")
    tier = open_tier(root)
    extent = ExtentId(located(tier, kv)[0])
    assert read(tier, extent, 0, len(kv.image())) == bytes(kv.image())
    assert found(tier, SEEDS) == set(SEEDS)
    tier.close()


def test_a_journal_torn_at_any_byte_of_its_last_records_costs_only_those() -> None:
    sizes = []
    for back in range(310):
        disk = CrashDisk()
        root = disk.root / "kv"
        tier = DiskTier.open(root, capacity_bytes=CAPACITY, disk=disk)
        assert all(save(tier, seed) for seed in SEEDS)
        tier.close()
        journal, data = next((path, data) for path, data in disk.files().items() if path.suffix == ".log")
        handle = disk.open(journal, "write")
        disk.truncate(handle, len(data) - back)
        disk.close(handle)
        tier = DiskTier.open(root, capacity_bytes=CAPACITY, disk=disk)
        there = found(tier, SEEDS)
        assert there == set(range(len(there)))
        assert tier.check() == []
        sizes.append(len(there))
        if back % 10 == 0:  # and what is written behind the cut is found
            assert save(tier, 5)
            assert save(tier, 99)
            tier.close()
            tier = DiskTier.open(root, capacity_bytes=CAPACITY, disk=disk)
            assert found(tier, [*SEEDS, 99]) == there | {5, 99}
            assert tier.check() == []
        tier.close()
    assert (min(sizes), max(sizes)) == (4, 6)


def test_a_flipped_bit_anywhere_in_a_journal_never_gives_wrong_bytes(root: Path, tmp_path: Path) -> None:
    nbytes = len(journals(root)[0].read_bytes())
    for at in [*range(0, HEADER_BYTES, 7), *range(HEADER_BYTES, nbytes, 23)]:
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        flip(journals(copy)[0], at)
        tier = open_tier(copy)
        found(tier, SEEDS)
        assert tier.check() == []
        assert all(save(tier, seed) for seed in SEEDS)
        tier.close()
        tier = open_tier(copy)
        assert found(tier, SEEDS) == set(SEEDS)
        assert tier.check() == []
        tier.close()
        shutil.rmtree(copy)


@pytest.mark.parametrize("closed", [True, False], ids=["at-rest", "while-open"])
def test_a_flipped_bit_in_a_segments_header_costs_the_segment(root: Path, tmp_path: Path, closed: bool) -> None:
    for at in range(0, 112, 9):
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        if closed:
            flip(segments(copy)[0], at)
        tier = open_tier(copy)
        if not closed:
            flip(segments(copy)[0], at)
            tier._store.files.discard(next(iter(tier._store.books.segments.values())))  # as if it had been closed as idle
            assert [problem.where for problem in tier.check()] == [str(segments(copy)[0])]
            assert tier.lease([extent_of(tier, 0)]) == [False]
        assert found(tier, SEEDS) == set()
        assert tier.check() == []
        assert all(save(tier, seed) for seed in SEEDS)
        tier.close()
        tier = open_tier(copy)
        assert found(tier, SEEDS) == set(SEEDS)
        assert tier.check() == []
        tier.close()
        shutil.rmtree(copy)


def test_extents_are_found_by_their_headers_when_every_journal_is_gone(root: Path) -> None:
    shutil.rmtree(root / "journals")
    for _ in range(2):  # the second time from the journal that the first wrote
        tier = open_tier(root)
        assert found(tier, SEEDS) == set(SEEDS)
        assert tier.check() == []
        tier.close()
    assert tier.statistics().counters.get("segments_scanned", 0) == 0


def test_a_scan_passes_over_removed_and_torn_extents(root: Path) -> None:
    tier = open_tier(root)
    assert tier.delete([extent_of(tier, 2)], reason="user") == 1
    tier.close()
    shutil.rmtree(root / "journals")
    segment = segments(root)[0]
    os.truncate(segment, segment.stat().st_size - 4096)
    tier = open_tier(root)
    assert found(tier, SEEDS) == {0, 1, 3, 4}
    assert tier.check() == []
    tier.close()


def test_a_segment_without_journal_and_without_header_is_removed(root: Path) -> None:
    shutil.rmtree(root / "journals")
    flip(segments(root)[0], 3)
    tier = open_tier(root)
    assert found(tier, SEEDS) == set()
    assert segments(root) == []
    assert tier.check() == []
    tier.close()


def test_extents_whose_bytes_are_gone_are_forgotten(root: Path) -> None:
    os.truncate(segments(root)[0], 4096 + 70_000)
    tier = open_tier(root)
    assert found(tier, SEEDS) == {0}
    assert tier.check() == []
    tier.close()


def test_a_missing_segment_file_is_no_reason_to_fail(root: Path) -> None:
    segments(root)[0].unlink()
    tier = open_tier(root)
    assert found(tier, SEEDS) == set()
    assert tier.check() == []
    assert save(tier, 0)
    tier.close()


def test_litter_of_dead_writers_is_removed(root: Path) -> None:
    (root / "journals" / ("ab" * 16 + ".tmp")).write_bytes(b"half a journal")
    (root / ("cd" * 16 + ".tmp")).write_bytes(b"half a marker")
    (root / "segments" / "07").mkdir(exist_ok=True)
    stub = root / "segments" / "07" / ("ef" * 16 + "-00000007.seg")
    stub.write_bytes(b"")
    before = files(root)
    tier = open_tier(root)
    assert tier.check() == []
    assert len(files(root)) == len(before) - 3
    tier.close()


def test_files_of_others_are_left_alone_and_named(root: Path) -> None:
    note = root / "segments" / "notes.txt"
    note.write_text("mine")
    tier = open_tier(root)
    assert [problem.where for problem in tier.check()] == [str(note)]
    tier.close()
    assert note.read_text() == "mine"


def test_a_lower_capacity_is_kept_from_the_start(root: Path) -> None:
    tier = open_tier(root, 1 << 20)
    tier.close()
    tier = open_tier(root, 1 << 20)
    assert tier.statistics().allocated_bytes <= 1 << 20
    assert charged(root) <= 1 << 20
    for seed in range(100, 130):
        assert save(tier, seed)
        assert charged(root) <= 1 << 20
    assert tier.check() == []
    tier.close()


def test_a_quarantined_extent_is_never_found_again(root: Path) -> None:
    tier = open_tier(root)
    assert tier.delete([extent_of(tier, 1)], reason="corrupt") == 1
    tier.close()
    tier = open_tier(root)
    assert found(tier, SEEDS) == set(SEEDS) - {1}
    assert [(r.reason, r.quarantined) for r in tier.removals()] == [("corrupt", True)]
    assert save(tier, 1)
    assert found(tier, SEEDS) == set(SEEDS)
    tier.close()


def test_removals_and_order_survive_a_journal_that_starts_anew() -> None:
    disk = CrashDisk()
    root = disk.root / "kv"
    tier = DiskTier.open(root, capacity_bytes=2 << 20, disk=disk)
    seed = 0
    while tier.statistics().counters.get("journal_renewed", 0) < 3:
        assert save(tier, seed, pieces=1 + seed % 3)
        seed += 1
        assert seed < 3000, "the journal is never renewed"
    before = {(info.keys, info.last_used) for info in tier.scan()}
    removed = [(r.time_ms, r.reason, r.prefixes) for r in tier.removals()]
    assert sum(path.suffix == ".log" for path in disk.files()) == 1
    tier.close()
    tier = DiskTier.open(root, capacity_bytes=2 << 20, disk=disk)
    assert {(info.keys, info.last_used) for info in tier.scan()} == before
    assert [(r.time_ms, r.reason, r.prefixes) for r in tier.removals()] == removed
    assert len(removed) >= 100
    assert tier.check() == []
    tier.close()


def test_blocks_that_lie_in_two_extents_are_found_while_one_is_left(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "kv")
    kv = prompt(6)
    short = put(tier, kv, pieces=4)
    assert tier.write(kv.image(2, 4), TINY).reason == "written"
    assert tier.delete([short], reason="user") == 1
    assert [extent >= 0 for extent in located(tier, kv)] == [False, False, True, True, True, True]
    assert tier.locate(TINY.digest, kv.keys).positions[2:].tolist() == [0, 1, 2, 3]
    tier.close()


def test_after_closing_verbs_raise_and_a_lease_may_still_be_released(tmp_path: Path) -> None:
    from headstart.errors import StoreError

    tier = open_tier(tmp_path / "kv")
    extent = put(tier, prompt(2))
    assert tier.lease([extent]) == [True]
    tier.close()
    tier.close()
    tier.release([extent])
    for verb in (
        lambda: tier.locate(TINY.digest, prompt(2).keys),
        lambda: tier.lease([extent]),
        lambda: tier.write(prompt(2).image(), TINY),
        lambda: tier.delete([extent], reason="user"),
        lambda: tier.touch([extent]),
        lambda: tier.scan(),
        tier.check,
    ):
        with pytest.raises(StoreError, match="closed"):
            verb()


def test_many_small_segments_do_not_keep_many_files_open(tmp_path: Path) -> None:
    disk = CrashDisk()
    tier = DiskTier.open(disk.root / "kv", capacity_bytes=CAPACITY, disk=disk)
    tier._store.files._max_idle = 2
    for seed in range(40):
        assert save(tier, seed, pieces=16)
        assert found(tier, [seed], pieces=16) == {seed}
    assert len(tier._store.files._open) <= 3
    assert tier.check() == []
    tier.close()


def test_a_directory_without_direct_io_works_and_says_so(tmp_path: Path) -> None:
    class Buffered(RealDisk):
        def open(self, path, mode, *, bulk=False):  # type: ignore[no-untyped-def]
            return super().open(path, mode, bulk=False)

    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY, disk=Buffered())
    assert not tier.bypasses_page_cache
    assert save(tier, 1)
    assert found(tier, [1]) == {1}
    tier.close()


def test_a_journal_with_records_of_a_later_version_is_left_as_it_is(root: Path) -> None:
    path = journals(root)[0]
    whole = path.read_bytes()
    writer, generation, _ = decode_journal_header(whole)
    unknown = struct.pack("<IB", 0, 99)
    check = xxhash.xxh3_64(struct.pack("<16sIQ", writer, generation, len(whole)) + unknown).digest()
    path.write_bytes(whole + unknown + check)
    tier = open_tier(root)
    assert found(tier, SEEDS) == set(SEEDS)
    assert save(tier, 50)
    tier.close()
    assert path.read_bytes() == whole + unknown + check
    assert len(journals(root)) == 2
    tier = open_tier(root)
    assert found(tier, [*SEEDS, 50]) == {*SEEDS, 50}
    assert tier.check() == []
    tier.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x20
    path.write_bytes(data)
