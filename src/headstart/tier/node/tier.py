"""One memory tier for all headstart processes of a machine: the segments and journals of a disk tier, on a file system in
memory.

Shared memory that a process may leave at any instruction needs what a directory that many processes share has already: files
with one writer each, records that count when they are whole, locks that the kernel lets go with the process, leases that
others see. So this is `tier.disk` on tmpfs, which keeps its files until the machine is started again. Bytes go by reads and
writes, not by a mapping: a full tmpfs is an error then and not a signal, and what another process wrote is verified like
anything on a disk.

What differs from a disk: others are looked at whenever something is not found, so what one process wrote all find at once; and
nothing is promised, so the least recently used goes first. See docs/decisions/0047-one-memory-tier-per-node.md.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headstart.block.representation import Representation
from headstart.errors import StoreError, TierUnavailable
from headstart.policy.retention import DEFAULT_CLASS, Retention, Span
from headstart.tier.base import DEFAULT_TERMS, ExtentId, Terms, WriteOutcome
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import DIRECTORY_MODE
from headstart.tier.disk.tier import FOLLOW_S

_LEFT_FREE = 16  # such a part of the file system is left to others: who maps its memory dies where it is full
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_NOTHING_PROMISED = Retention({DEFAULT_CLASS: Span(0, None)})


class NodeTier(DiskTier):
    """Use `open_node_tier`. It goes by the name of the process's own memory tier, in whose place it stands. Safe from many
    threads and processes."""

    name = "memory"
    in_memory = True
    refresh_interval_s = 0.0
    refresh_wait_s = FOLLOW_S

    def write(self, image: memoryview, representation: Representation, *, terms: Terms = DEFAULT_TERMS) -> WriteOutcome:
        return super().write(image, representation, terms=replace(terms, keep_s=0.0))

    def keep(self, extents: Sequence[ExtentId], terms: Terms) -> None:
        """Promise nothing: memory is for what is used."""

    def pin(self, extents: Sequence[ExtentId], *, until_ms: int | None) -> list[bool]:
        return [False] * len(extents)

    def __repr__(self) -> str:
        return f"<NodeTier {self._store.directory.root} of {self._store.capacity_bytes} bytes>"


def open_node_tier(directory: Path, *, capacity_bytes: int) -> NodeTier:
    """Open the memory tier of this machine and this user, made where it is missing. All processes give the same capacity; else
    each keeps to its own when it writes. Raises StoreError, OSError, ValueError where it cannot be had."""
    _require_own(directory)
    room = os.statvfs(directory)
    total_bytes = room.f_blocks * room.f_frsize
    if capacity_bytes > total_bytes - total_bytes // _LEFT_FREE:
        raise StoreError(
            f"{directory.parent} holds {total_bytes >> 20} MiB, of which a sixteenth is left to others; "
            f"{capacity_bytes >> 20} MiB are too much: ask for less, or make it larger (a container: --shm-size or --ipc=host)",
            path=directory,
        )
    return NodeTier.open(
        directory,
        capacity_bytes=capacity_bytes,
        min_free_bytes=total_bytes // _LEFT_FREE,
        retention=_NOTHING_PROMISED,
    )


def bytes_to_come(directory: Path, capacity_bytes: int) -> int:
    """Return how much memory the tier there may still take, beyond what it takes already."""
    taken = 0
    with suppress(OSError):
        for folder, _, names in os.walk(directory):
            for name in names:
                with suppress(OSError):
                    taken += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return max(0, capacity_bytes - taken)


def _require_own(directory: Path) -> None:
    """Make the directory if it is missing, and make sure that nobody else can read or write there: where anybody may make
    names, another user may have made this one. Raises StoreError, OSError."""
    if not directory.parent.is_dir():
        raise TierUnavailable(
            f"there is no {directory.parent} on this machine; name a directory on a file system in memory", path=directory
        )
    kind = _file_system(directory if directory.exists() else directory.parent)
    if kind not in (*_IN_MEMORY, None):
        raise TierUnavailable(
            f"{directory} lies on {kind}, which is not in memory; name a directory on tmpfs, or none for /dev/shm",
            path=directory,
        )
    with suppress(FileExistsError):
        os.mkdir(directory, DIRECTORY_MODE)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise TierUnavailable(
            f"{directory} is not a directory of this user's own; remove it, or name another place", path=directory
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise TierUnavailable(f"{directory} is open to other users; chmod 700 it, or remove it", path=directory)


def _file_system(path: Path) -> str | None:
    """Return the kind of file system that a path lies on; None where the system does not tell."""
    device = os.stat(path).st_dev
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            where, _, what = line.partition(" - ")
            if where.split()[2] == f"{os.major(device)}:{os.minor(device)}":
                return what.split()[0]
    return None
