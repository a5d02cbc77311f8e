"""What other caches' directories did to them: too many files, leftovers of crashes, heads that went before their tails, writers
that got in each other's way, file systems that lack a call, directories of somebody else."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headstart.block.representation import Representation
from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.testing.faulty_disk import FaultyDisk, ProcessDied
from headstart.testing.round_trip import hit_tokens, load, save
from headstart.tier.disk import DiskTier, door
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Handle, RealDisk
from headstart.tier.disk.records import SegmentName
from headstart.tier.disk.segment import segment_capacity

CAPACITY = 8 << 20


def cache_over(tier: DiskTier) -> PrefixCache:
    return PrefixCache([tier], identity=IDENTITY, representation=TINY, match_timeout_s=20.0)


def chain(number: int, pieces: int) -> FakeKV:
    first = number * 100_003
    return FakeKV(TINY, range(first, first + pieces * 64 + 1))


def test_no_folder_grows_large_whatever_the_cache_holds() -> None:
    """16 TiB of segments of a GiB, of one writer that has been at it for long."""
    place = Directory(RealDisk(), Path("/kv"))
    paths = [place.segment_path(SegmentName(b"w" * 16, 1_000_000 + sequence)) for sequence in range(16 << 10)]
    entries = Counter(path.parent for path in paths)
    assert max(entries.values()) <= 4096
    assert len(entries) <= 256
    assert {len(path.relative_to("/kv").parts) for path in paths} == {3}


def test_many_blocks_lie_in_few_files() -> None:
    """100,000 blocks of 64 KiB, in a cache that they fill."""
    small = Representation(kind="gqa", layout="x/1", dtype="float16", layer_bytes=(16 << 10,) * 4)
    total = 100_000 * (64 << 10)
    assert total / segment_capacity(small, capacity_bytes=total) <= 256


def test_seventy_crashes_leave_a_directory_that_opens_within_its_cap() -> None:
    disk = CrashDisk(size_bytes=6 << 20)
    for crash in range(70):
        faulty = FaultyDisk(disk)
        faulty.die_at(8 + crash % 40, after=bool(crash % 2))
        try:
            tier = DiskTier.open(disk.root / "kv", capacity_bytes=4 << 20, disk=faulty)
            for number in range(6):
                tier.write(chain(crash * 10 + number, 8).image(), TINY)
        except ProcessDied:
            pass
        faulty.bury()
        disk.kill()
    tier = DiskTier.open(disk.root / "kv", capacity_bytes=4 << 20, disk=disk)
    assert disk.allocated_bytes() <= 4 << 20
    assert tier.check() == []
    assert len([path for path in disk.files() if path.suffix == ".log"]) <= 2
    assert tier.write(chain(9999, 8).image(), TINY).stored
    tier.close()


def test_a_short_side_task_does_not_take_the_place_of_the_long_session(tmp_path: Path) -> None:
    main, side = chain(1, 60), chain(2, 6)
    with cache_over(DiskTier.open(tmp_path, capacity_bytes=CAPACITY)) as cache:
        save(cache, main)
        save(cache, side)
    with cache_over(DiskTier.open(tmp_path, capacity_bytes=CAPACITY)) as cache:
        assert hit_tokens(cache, main) == 60 * 64
        assert hit_tokens(cache, side) == 6 * 64


def test_whatever_is_left_of_a_chain_can_be_reached_from_its_head(tmp_path: Path) -> None:
    """Chains that are longer together than there is room, saved turn by turn: heads outlive their tails."""
    chains = [chain(number, 64) for number in range(14)]
    with cache_over(DiskTier.open(tmp_path, capacity_bytes=CAPACITY)) as cache:
        (tier,) = [source.tier for source in cache._sources]
        for pieces in range(8, 65, 8):
            for number in range(len(chains)):
                save(cache, chain(number, pieces))
                load(cache, chain(number, pieces))
        assert tier.statistics().counters["evicted_capacity"] > 0
        for whole in chains:
            there = tier.locate(TINY.digest, whole.keys).extents >= 0
            reached = hit_tokens(cache, whole) // 64
            assert there.sum() == reached, "a block is stored that no prompt can reach"
        assert tier.check() == []


def test_sixteen_writers_of_the_same_prompts_store_each_once_and_never_replace_it(tmp_path: Path) -> None:
    prompts = [chain(number, 4) for number in range(8)]
    tiers = [DiskTier.open(tmp_path, capacity_bytes=CAPACITY) for _ in range(16)]
    outcomes: Counter[str] = Counter()
    places: dict[int, str] = {}

    def work(tier: DiskTier) -> None:
        for _ in range(10):
            for number, kv in enumerate(prompts):
                outcome = tier.write(kv.image(), TINY)
                outcomes[outcome.reason] += 1
                (extent,) = set(tier.locate(TINY.digest, kv.keys).extents.tolist())
                info = tier.info(extent)
                assert info is not None
                assert places.setdefault(number, info.where) == info.where, "it was published a second time"

    threads = [threading.Thread(target=work, args=(tier,)) for tier in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"written": len(prompts), "present": 16 * 10 * 8 - len(prompts)}
    for tier in tiers:
        tier.close()
    assert not list(tmp_path.rglob("*.tmp"))
    with cache_over(DiskTier.open(tmp_path, capacity_bytes=CAPACITY)) as cache:
        assert all(load(cache, kv).usable_tokens == 4 * 64 for kv in prompts)
        assert cache.check() == []


class WithoutFallocate:
    """The C library over a file system, such as a parallel one, that neither reserves space nor makes holes."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls = 0

    def fallocate(self, *_: int) -> int:
        self.calls += 1
        ctypes.set_errno(self.code)
        return -1


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_without_fallocate_everything_is_stored_served_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    root, without = tmp_path / "kv", WithoutFallocate(code)
    monkeypatch.setattr(door, "_libc", lambda: without)
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    with cache_over(tier) as cache:
        for number in range(30):
            kv = chain(number, 24)
            assert save(cache, kv).stored_tokens == 24 * 64
            assert load(cache, kv).usable_tokens == 24 * 64
            charged = sum(path.stat().st_blocks * 512 for path in root.rglob("*"))
            assert charged <= tier.statistics().allocated_bytes <= CAPACITY
        assert cache.check() == []
    assert without.calls > 10
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(CAPACITY)
    assert RealDisk().stat(tmp_path / "sparse").allocated_bytes < CAPACITY // 2


class InParts(RealDisk):
    """Writes an extent in parts, and calls `between` after each."""

    between: Callable[[], None] | None = None

    def write(self, handle: Handle, data: memoryview | bytes, offset: int) -> None:
        view = memoryview(data).cast("B")
        if self.between is None or view.nbytes <= 64 << 10:
            return super().write(handle, view, offset)
        at = 0
        for percent in (10, 50, 99, 100):
            end = view.nbytes * percent // 100 // 4096 * 4096
            super().write(handle, view[at:end], offset + at)
            at = end
            self.between()
        return None


def test_nobody_finds_what_is_still_being_written(tmp_path: Path) -> None:
    """Not whoever writes it, and no other process."""
    disk, kv = InParts(), chain(1, 24)
    other = DiskTier.open(tmp_path, capacity_bytes=CAPACITY)
    with cache_over(DiskTier.open(tmp_path, capacity_bytes=CAPACITY, disk=disk)) as mine, cache_over(other) as theirs:
        found: list[tuple[int, int]] = []

        def look() -> None:
            other.refresh()
            found.append((hit_tokens(mine, kv), hit_tokens(theirs, kv)))

        disk.between = look
        assert save(mine, kv).stored_tokens == 24 * 64
        assert found == [(0, 0)] * 4
        look()
        assert found[-1] == (24 * 64, 24 * 64)


class Recorder(RealDisk):
    """Notes what is written and synced, by the kind of file."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self._paths: dict[Handle, Path] = {}

    def open(self, path: Path, mode: object, *, bulk: bool = False) -> Handle:
        handle = super().open(path, mode, bulk=bulk)  # type: ignore[arg-type]
        self._paths[handle] = path
        return handle

    def write(self, handle: Handle, data: memoryview | bytes, offset: int) -> None:
        super().write(handle, data, offset)
        self.calls.append(("write", self._paths[handle].suffix))

    def sync(self, handle: Handle) -> None:
        super().sync(handle)
        self.calls.append(("sync", self._paths[handle].suffix))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._paths |= {handle: target for handle, path in self._paths.items() if path == source}
        self.calls.append(("rename", target.suffix))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.calls.append(("sync", "folder"))


def in_order(calls: Sequence[tuple[str, str]], *wanted: tuple[str, str]) -> bool:
    """Whether `wanted` are among the calls, in that order."""
    left = iter(calls)
    return all(call in left for call in wanted)


def test_bytes_reach_the_medium_before_their_record_and_a_whole_file_before_its_name(tmp_path: Path) -> None:
    disk = Recorder()
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY, disk=disk, durability="data")
    assert in_order(disk.calls, ("sync", ".tmp"), ("rename", ".log"), ("sync", "folder"))
    tier.write(chain(1, 4).image(), TINY)  # begins the segment, whose name is synced as well
    assert in_order(disk.calls, ("write", ".seg"), ("sync", ".seg"), ("sync", "folder"))
    disk.calls.clear()
    assert tier.write(chain(2, 4).image(), TINY).stored
    assert [call for call in disk.calls if call[1] in (".seg", ".log")] == [
        ("write", ".seg"),
        ("sync", ".seg"),
        ("write", ".log"),
        ("sync", ".log"),
    ]
    tier.close()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become two users")
@pytest.mark.parametrize("umask", [0o077, 0o022], ids=["077", "022"])
def test_another_users_directory_is_a_miss_and_a_sentence(umask: int, caplog: pytest.LogCaptureFixture) -> None:
    root = Path(f"/tmp/headstart-{os.getpid()}-{umask:o}")
    before = os.umask(umask)
    try:
        with cache_over(DiskTier.open(root, capacity_bytes=CAPACITY)) as cache:
            save(cache, chain(1, 4))
        child = os.fork()
        if not child:
            status = 1
            try:
                os.setgid(65534)
                os.setuid(65534)
                config = CacheConfig(directory=root, capacity="8MiB", memory="0")
                with open_cache(config, identity=IDENTITY, representation=TINY) as theirs:
                    assert "may not be written by this user" in caplog.text
                    assert hit_tokens(theirs, chain(1, 4)) == 0
                    assert save(theirs, chain(2, 4)).stored_tokens == 0
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        os.umask(before)
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        root.rmdir()
