"""A cache that may only be read, on a read-only mount or as another user: hits are served, stores are skipped."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_kit import CAPACITY, Clock, extent_of, found, image, prompt, save

from headstart.cache.open import open_cache
from headstart.config import CacheConfig
from headstart.errors import TierUnavailable
from headstart.testing.fake_kv import IDENTITY, TINY
from headstart.testing.round_trip import load
from headstart.testing.round_trip import save as save_prompt
from headstart.testing.tier_contract import read
from headstart.tier.base import Terms
from headstart.tier.disk import DiskTier
from headstart.tier.disk.pause import STOPPED_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: only root may mount, or become another user")


@pytest.fixture
def root() -> Iterator[Path]:
    """A filled directory that others may read, not below a folder of this user's alone."""
    above = Path(tempfile.mkdtemp())
    above.chmod(0o755)
    tier = DiskTier.open(above / "kv", capacity_bytes=CAPACITY)
    assert all(save(tier, seed) for seed in range(4))
    tier.close()
    for path in (above / "kv", *(above / "kv").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    yield above / "kv"
    shutil.rmtree(above)


@pytest.fixture
def read_only(root: Path) -> Iterator[Path]:
    """The same directory, mounted a second time and read-only."""
    place = root.parent / "mount"
    place.mkdir()
    try:
        subprocess.run(["mount", "--bind", str(root), str(place)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        subprocess.run(["umount", "--lazy", str(place)], capture_output=True)
        pytest.skip(f"NOT TESTED: a read-only mount; this machine forbids it: {error.stderr!r}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def as_nobody(work: Callable[[], None]) -> None:
    """Do something as a user who owns nothing, in a child."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def serves_and_does_not_store(place: Path) -> None:
    clock = Clock()
    tier = DiskTier.open(place, capacity_bytes=CAPACITY, clock=clock)
    assert found(tier, range(4)) == set(range(4))
    for seed in range(4, 8):
        assert tier.write(image(seed), TINY).reason == "stopped"
        clock.now += STOPPED_S + 1
        assert not tier.tend()
    assert tier.write(image(0), TINY).reason == "present"
    extent = extent_of(tier, 0)
    tier.touch([extent])
    tier.keep([extent], Terms("agent"))
    assert tier.pin([extent], until_ms=None) == [False]
    tier.unpin([extent])
    assert tier.delete([extent], reason="user") == 0
    assert tier.delete([extent], reason="corrupt") == 0
    statistics = tier.statistics()
    assert statistics.paused
    assert statistics.extents == 4
    assert statistics.counters["write_failed_stopped"] == 4
    assert tier.check() == []
    tier.close()
    tier.close()


def test_a_read_only_mount_serves_hits_and_skips_stores_with_one_warning(
    read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        serves_and_does_not_store(read_only)
    assert [r.getMessage() for r in caplog.records] == [
        f"disk tier {read_only}: nothing is stored (Read-only file system); what is there is read"
    ]


def test_another_users_files_that_may_be_read_are_hits_and_nothing_of_them_changes(root: Path) -> None:
    before = {path: path.stat() for path in root.rglob("*")}
    as_nobody(lambda: serves_and_does_not_store(root))
    after = {path: path.stat() for path in root.rglob("*")}
    assert {path: (s.st_mtime_ns, s.st_size) for path, s in after.items()} == {
        path: (s.st_mtime_ns, s.st_size) for path, s in before.items()
    }


def test_who_may_only_read_follows_a_living_writer_and_what_it_leases_stays(root: Path, read_only: Path) -> None:
    clock = Clock()
    writer = DiskTier.open(root, capacity_bytes=CAPACITY)
    reader = DiskTier.open(read_only, capacity_bytes=CAPACITY, clock=clock)
    assert save(writer, 4)
    clock.now += 1
    assert found(reader, range(5)) == set(range(5))
    held, gone = extent_of(reader, 1), extent_of(reader, 2)
    assert reader.lease([held]) == [True]
    for seed in (1, 2):
        writer.delete([extent_of(writer, seed)], reason="user")
    assert read(reader, held, 0, len(image(1))) == image(1)
    clock.now += 1
    reader.refresh()
    assert reader.lease([gone]) == [False]
    reader.release([held])
    assert writer.delete([extent_of(writer, 1)], reason="user") == 1
    reader.close()
    assert writer.check() == []
    writer.close()


def test_a_server_over_a_read_only_mount_hits_and_goes_on(read_only: Path) -> None:
    config = CacheConfig(directory=read_only, capacity="8MiB", memory="0", min_free="0")
    with open_cache(config, identity=IDENTITY, representation=TINY) as cache:
        assert cache.warnings == ()
        loaded = load(cache, prompt(4, seed=1))
        assert (loaded.usable_tokens, loaded.wrong) == (4 * 64, [])
        assert save_prompt(cache, prompt(4, seed=9)).stored_tokens == 0
        assert cache.check() == []


def test_where_there_is_no_cache_that_could_be_read_the_first_reason_is_told(read_only: Path) -> None:
    with pytest.raises(TierUnavailable, match="read-only") as caught:
        DiskTier.open(read_only / "another", capacity_bytes=CAPACITY)
    assert caught.value.errno == errno.EROFS
