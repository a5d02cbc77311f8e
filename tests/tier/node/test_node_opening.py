"""A node's memory tier that cannot be had is refused with one sentence; a full file system is an error, not a signal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from headstart.errors import FormatMismatch, StoreError, TierUnavailable
from headstart.testing.fake_kv import TINY
from headstart.testing.tier_contract import located, prompt, put
from headstart.tier.node import bytes_to_come, open_node_tier

sys.path.append(str(Path(__file__).parent.parent / "disk"))
from mounts import mounted

CAPACITY = 4 << 20


def refused(directory: Path, *, capacity_bytes: int = CAPACITY) -> str:
    with pytest.raises(StoreError) as caught:
        open_node_tier(directory, capacity_bytes=capacity_bytes)
    return caught.value.message


def test_a_place_that_others_could_read_or_have_made_is_refused(shared_memory: Path) -> None:
    (shared_memory / "open").mkdir(mode=0o755)
    assert "chmod 700" in refused(shared_memory / "open")
    (shared_memory / "own").mkdir(mode=0o700)
    (shared_memory / "link").symlink_to(shared_memory / "own")
    assert "not a directory of this user's own" in refused(shared_memory / "link")
    (shared_memory / "file").touch()
    assert "not a directory of this user's own" in refused(shared_memory / "file")
    assert "there is no" in refused(shared_memory / "nowhere" / "node")
    if os.geteuid() == 0:
        os.chown(shared_memory / "own", 65534, 65534)
        assert "not a directory of this user's own" in refused(shared_memory / "own")


def test_a_place_on_a_disk_is_refused(tmp_path: Path) -> None:
    """Engines ask memory themselves and wait for it; a disk is asked by a thread, with patience, and wears out."""
    kind = file_system_of(tmp_path)
    if kind == "tmpfs":
        pytest.skip("temporary files lie in memory here")
    assert f"lies on {kind}, which is not in memory" in refused(tmp_path / "node")
    assert not (tmp_path / "node").exists()


def file_system_of(path: Path) -> str:
    return subprocess.run(["df", "--output=fstype", path], capture_output=True, text=True, check=True).stdout.split()[1]


def test_more_than_the_file_system_holds_is_refused(shared_memory: Path) -> None:
    assert "--shm-size" in refused(shared_memory / "node", capacity_bytes=1 << 60)


def test_what_another_version_wrote_is_refused(shared_memory: Path) -> None:
    open_node_tier(shared_memory / "node", capacity_bytes=CAPACITY).close()
    marker = shared_memory / "node" / "headstart.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "version": 999}))
    with pytest.raises(FormatMismatch, match="999"):
        open_node_tier(shared_memory / "node", capacity_bytes=CAPACITY)
    assert issubclass(FormatMismatch, TierUnavailable)


def test_a_file_system_that_others_fill_costs_space_and_nothing_else(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path, 8) as mount:
        directory = mount.place / "node"
        tier = open_node_tier(directory, capacity_bytes=6 << 20)
        kept = prompt(4)
        put(tier, kept)
        others = os.open(mount.place / "others", os.O_WRONLY | os.O_CREAT)
        with suppress(OSError):
            while os.write(others, bytes(65536)):
                pass
        os.close(others)
        assert not all(tier.write(prompt(8, seed=seed).image(), TINY).stored for seed in range(1, 9))
        assert tier.check() == []
        os.unlink(mount.place / "others")
        tier.close()
        tier = open_node_tier(directory, capacity_bytes=6 << 20)
        put(tier, prompt(8, seed=100))
        assert -1 not in located(tier, prompt(8, seed=100))
        assert tier.check() == []
        tier.close()


def test_what_is_still_to_come_is_known_beforehand(shared_memory: Path) -> None:
    directory = shared_memory / "node"
    assert bytes_to_come(directory, CAPACITY) == CAPACITY
    tier = open_node_tier(directory, capacity_bytes=CAPACITY)
    put(tier, prompt(8))
    tier.close()
    taken = CAPACITY - bytes_to_come(directory, CAPACITY)
    assert len(prompt(8).image()) <= taken < CAPACITY // 2
