"""What this machine, and the container on it, leaves to an engine: physical cores and memory."""

from __future__ import annotations

import os
from pathlib import Path

from headstart.engine import container


def physical_cores() -> int:
    """Return how many physical cores this process may use, fewer where the container has less: siblings only disturb each
    other."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), int(container.cpus() or len(cores))))


def free_bytes() -> int:
    """Return the bytes of memory that may still be taken."""
    limited = container.free_bytes()
    return _free_on_machine() if limited is None else min(limited, _free_on_machine())


def _free_on_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc: not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
