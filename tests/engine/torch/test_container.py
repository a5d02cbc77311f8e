"""Limits of control groups are found in either version, wherever they stand above the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.engine import container
from headstart.engine.torch import hardware

GIB = 1 << 30


def _tree(root: Path, own: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": own, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_the_tightest_limit_of_version_2_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "memory.max": str(64 * GIB),
        "memory.current": str(1 * GIB),
        "pod/memory.max": str(8 * GIB),
        "pod/memory.current": str(5 * GIB),
        "pod/memory.stat": f"anon 17\ninactive_file {GIB}\nactive_file {GIB}",
        "pod/box/memory.max": "max",
        "pod/box/memory.current": "4096",
        "cpu.max": "max 100000",
        "pod/cpu.max": "250000 100000",
        "pod/box/cpu.max": "max 100000",
        "other/memory.max": "1",
        "other/memory.current": "1",
    }
    root = _tree(tmp_path, "0::/pod/box", files)
    assert container.free_bytes(root) == 4 * GIB
    assert container.cpus(root) == 2.5


def test_limits_of_version_1_are_found_per_controller(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": str(2 * GIB),  # the container's own group, where paths are the host's
        "memory/memory.usage_in_bytes": str(GIB),
        "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}",
        "cpu/cpu.cfs_quota_us": "50000",
        "cpu/cpu.cfs_period_us": "100000",
    }
    root = _tree(tmp_path, "4:memory:/docker/abc\n2:cpuacct,cpu:/docker/abc\n1:name=systemd:/\n0::/", files)
    assert container.free_bytes(root) == GIB + GIB // 2
    assert container.cpus(root) == 0.5


@pytest.mark.parametrize("used", [3 * GIB, 2 * GIB])
def test_a_container_that_is_full_has_nothing_free(tmp_path: Path, used: int) -> None:
    root = _tree(tmp_path, "0::/", {"memory.max": str(2 * GIB), "memory.current": str(used)})
    assert container.free_bytes(root) == 0


def test_no_limits_and_no_control_groups_are_none(tmp_path: Path) -> None:
    assert container.free_bytes(tmp_path) is container.cpus(tmp_path) is None
    root = _tree(
        tmp_path,
        "2:cpu:/x\n0::/../../x",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "memory.max": "max", "memory.current": "5"},
    )
    assert container.free_bytes(root) is container.cpus(root) is None


def test_this_machine_answers() -> None:
    assert (container.free_bytes() or 0) >= 0
    assert (container.cpus() or 1) > 0


def test_memory_and_cores_are_no_more_than_the_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(container, "free_bytes", lambda: 12345)
    assert hardware.available_bytes(torch.device("cpu")) == 12345
    monkeypatch.setattr(container, "free_bytes", lambda: None)
    assert hardware.available_bytes(torch.device("cpu")) > 12345
    monkeypatch.setattr(container, "cpus", lambda: 0.4)
    assert hardware.use_physical_cores() == 1
