"""A directory that cannot be opened at the start, for a reason that passes, is opened when it can be: without a restart."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from devices_kit import EACH, NEVER_S, whole, write

from headstart.errors import StoreError, TierUnavailable
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.testing.tier_contract import prompt
from headstart.tier.devices import DeviceTier
from headstart.tier.disk import DiskTier, RealDisk
from headstart.tier.disk import marker as marker_module
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(root: Path, clock: Clock, *, disk: Callable[[], Disk] = RealDisk, patient: bool = True) -> DeviceTier:
    return DeviceTier.open(
        [root],
        open_directory=lambda path, nbytes: DiskTier.open(path, capacity_bytes=nbytes, disk=disk(), clock=clock),
        capacities=lambda rooms: [EACH] * len(rooms),
        clock=clock,
        look_s=NEVER_S,
        patient=patient,
    )


def later(tier: DeviceTier, clock: Clock) -> None:
    clock.now += 60.0
    tier.look()


def lives_without(tier: DeviceTier) -> None:
    """A tier that has no device finds nothing and stores nothing, and nobody is hurt."""
    kv = prompt(2)
    assert not tier.devices
    assert (tier.locate(kv.representation.digest, kv.keys).extents < 0).all()
    with pytest.raises(StoreError, match="no device of the disk tier is there"):
        tier.write(kv.image(), kv.representation)
    assert tier.check() == []
    assert not tier.tend()


def test_a_start_on_a_full_disk_is_made_up_for_when_there_is_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    full = [DiskFault(call, "enospc") for call in ("write", "reserve")]

    def disk() -> FaultyDisk:
        return FaultyDisk(RealDisk(), *full)

    with caplog.at_level(logging.WARNING), closing(opened(tmp_path / "kv", clock, disk=disk)) as tier:
        lives_without(tier)
        assert tier.statistics().paused.startswith("it could not be opened yet (No space left on device), and is tried again")
        for _ in range(3):
            later(tier, clock)
        lives_without(tier)
        assert caplog.text.count("no disk tier yet") == 1
        full.clear()
        tier.look()  # it is too early
        lives_without(tier)
        later(tier, clock)
        assert tier.statistics().paused == ""
        write(tier, prompt(3))
        assert whole(tier, prompt(3))
        assert tier.check() == []
        assert caplog.text.count("can be used now") == 1


def test_a_set_of_which_no_device_can_be_opened_at_the_start_is_made_up_for(tmp_path: Path) -> None:
    clock, full = Clock(), [True]

    def open_directory(path: Path, nbytes: int) -> DiskTier:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return DiskTier.open(path, capacity_bytes=nbytes, clock=clock)

    with closing(
        DeviceTier.open(
            [tmp_path / "a", tmp_path / "b"],
            open_directory=open_directory,
            capacities=lambda rooms: [EACH] * len(rooms),
            clock=clock,
            look_s=NEVER_S,
            patient=True,
        )
    ) as tier:
        lives_without(tier)
        assert tier.statistics().paused == "not there"
        assert len(tier.warnings) == 2
        later(tier, clock)
        lives_without(tier)
        full.clear()
        later(tier, clock)
        assert len(tier.devices) == 2
        write(tier, prompt(3))
        assert whole(tier, prompt(3))
        assert tier.statistics().paused == ""
        assert tier.check() == []


def test_whoever_does_not_wait_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(TierUnavailable, match="full file system"):
        opened(tmp_path / "kv", Clock(), disk=lambda: FaultyDisk(RealDisk(), DiskFault("write", "enospc")), patient=False)


def test_what_does_not_pass_by_itself_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("mine")
    with pytest.raises(TierUnavailable, match="is a file"):
        opened(tmp_path / "kv", Clock())
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "headstart.json").write_text('{"format": "headstart", "version": 99}')
    with pytest.raises(TierUnavailable, match="format version 99"):
        opened(tmp_path / "new", Clock())


@pytest.fixture
def mount() -> Iterator[Path]:
    """A file system that may be remounted."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a mount that becomes writable; only root may mount")
    place = Path(tempfile.mkdtemp())
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(place)], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"NOT TESTED: a mount that becomes writable; this machine forbids it: {error.stderr!r}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)
    place.rmdir()


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


@pytest.mark.parametrize("filled", [True, False], ids=["with a cache on it", "empty"])
def test_a_start_on_a_read_only_mount_stores_once_it_may_be_written(
    mount: Path, filled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock, old, new = Clock(), prompt(3, seed=1), prompt(3, seed=2)
    if filled:
        with closing(opened(mount / "kv", clock)) as tier:
            write(tier, old)
    remount(mount, "ro")
    with closing(opened(mount / "kv", clock)) as tier:
        assert whole(tier, old) == filled
        if filled:
            assert tier.write(new.image(), new.representation).reason == "stopped"
        else:
            lives_without(tier)
        assert "Read-only file system" in tier.statistics().paused
        later(tier, clock)
        assert whole(tier, old) == filled
        held = tier.locate(old.representation.digest, old.keys).ids()
        assert tier.lease(held) == [True] * len(held)
        remount(mount, "rw")
        later(tier, clock)
        assert tier.statistics().paused == ""
        write(tier, new)
        assert whole(tier, new)
        assert whole(tier, old) == filled
        tier.release(held)  # of what was open before: it does not touch what is there now
        (extent,) = tier.locate(new.representation.digest, new.keys).ids()
        assert extent not in held
        assert tier.lease([extent]) == [True]
        assert tier.delete([extent], reason="user") == 0
        tier.release([extent])
        assert tier.check() == []
    with closing(opened(mount / "kv", clock)) as tier:
        assert whole(tier, new)


_ADDS = """
import sys
from pathlib import Path
from headstart.testing.fake_kv import TINY
from headstart.testing.tier_contract import prompt
from headstart.tier.disk import DiskTier, RealDisk

class Slow(RealDisk):
    def write(self, handle, data, offset):
        if memoryview(data).nbytes == size:
            print("adding", flush=True)
            sys.stdin.readline()
        super().write(handle, data, offset)

image = prompt(2, seed=7).image()
size = 0
tier = DiskTier.open(Path(sys.argv[1]), capacity_bytes=8 << 20, disk=Slow())
size = image.nbytes
print(tier.write(image, TINY).reason, flush=True)
tier.close()
"""


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that was stopped while it added to tmp_path / "kv"."""
    monkeypatch.setattr(marker_module, "ALONE_S", 0.3)
    arguments = [sys.executable, "-c", textwrap.dedent(_ADDS), str(tmp_path / "kv")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "adding\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        try:
            yield process
        finally:
            process.kill()


def goes_on(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGCONT)
    assert process.communicate("\n")[0] == "written\n"


def test_whoever_opens_beside_a_process_that_was_stopped_while_it_added_is_told_which(
    tmp_path: Path, stopped: subprocess.Popen[str]
) -> None:
    with pytest.raises(
        TierUnavailable, match=rf"process {stopped.pid} \(.*\), which is stopped, has been writing for too long"
    ):
        DiskTier.open(tmp_path / "kv", capacity_bytes=EACH)
    goes_on(stopped)
    with closing(DiskTier.open(tmp_path / "kv", capacity_bytes=EACH)) as tier:
        assert tier.check() == []


def test_a_start_beside_a_process_that_was_stopped_while_it_added_is_made_up_for(
    tmp_path: Path, stopped: subprocess.Popen[str]
) -> None:
    clock = Clock()
    with closing(opened(tmp_path / "kv", clock)) as tier:
        lives_without(tier)
        assert f"process {stopped.pid} (" in tier.statistics().paused
        goes_on(stopped)
        later(tier, clock)
        assert whole(tier, prompt(2, seed=7))
        write(tier, prompt(2, seed=8))
        assert tier.check() == []


def test_an_opening_that_has_waited_in_vain_waits_less_until_it_once_had_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to wait several times, and does not take several times as long."""
    with closing(DiskTier.open(tmp_path / "kv", capacity_bytes=EACH)):
        pass
    disk = RealDisk()
    marker = marker_module.Marker(disk, Directory(disk, tmp_path / "kv"))
    waited: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(marker, "_wait", lambda handle, wait_s: waited.append(wait_s))
        for _ in range(3):
            with marker.hold(charging=False) as mine:
                assert not mine
    assert marker.busy
    with marker.hold(charging=False) as mine:
        assert mine
    assert not marker.busy
    with monkeypatch.context() as patch:
        patch.setattr(marker, "_wait", lambda handle, wait_s: waited.append(wait_s))
        with marker.hold(charging=False):
            pass
        marker.opened()
        with marker.hold(charging=False), marker.hold(charging=False):  # somebody slow is waited for
            pass
    long, short = marker_module.ALONE_S, marker_module.AGAIN_S
    assert waited == [long, short, short, long, long, long]
