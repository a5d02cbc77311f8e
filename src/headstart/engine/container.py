"""What the container around this process leaves to it, by its control groups of version 2 or 1. None where nothing is limited.

A limit binds wherever it stands on the way up from the process's own group; what is not mounted here cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def free_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes that may still be taken. File pages that were not used lately count as free: the kernel drops them
    first, and without them a container that has just fetched a model would seem full."""
    free = []
    for group in _groups("memory", root):
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(max(0, limit - used + _inactive_file_bytes(group)))
    return min(free, default=None)


def cpus(root: Path = _ROOT) -> float | None:
    """Return how many CPUs' worth of time this process may use."""
    shares = []
    for group in _groups("cpu", root):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        quota = quota or _text(group / "cpu.cfs_quota_us")
        period = period or _text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" and -1 are no limit
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth])


def _inactive_file_bytes(group: Path) -> int:
    facts = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines())
    return int(facts.get("total_inactive_file", facts.get("inactive_file", "0")))  # total_: version 1, with all groups below


def _number(*files: Path) -> int | None:
    """Return the number in the first of `files` that is there."""
    text = next(filter(None, map(_text, files)), "")
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
