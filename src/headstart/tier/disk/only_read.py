"""Opening a directory in which nothing may be changed: a read-only mount, or one that its owner lets this user only read.

Its journals are followed and what is handed out is locked as everywhere, which needs no right to write. There is no journal of
its own, so nothing is stored, removed, promised or pinned.
"""

from __future__ import annotations

from collections.abc import Callable

from headstart.metrics import Counters
from headstart.policy.retention import Retention
from headstart.tier.disk.books import Books
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk
from headstart.tier.disk.follow import Others, follow_all
from headstart.tier.disk.journal import Journal
from headstart.tier.disk.marker import Marker
from headstart.tier.disk.records import milliseconds
from headstart.tier.disk.removal import measure
from headstart.tier.disk.store import Store


def open_to_read(
    disk: Disk,
    directory: Directory,
    *,
    why: str,
    capacity_bytes: int,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    counters: Counters,
    retention: Retention,
) -> tuple[Store, Others]:
    """Return the store of a directory and all writers on it. Raises NotThere, FormatMismatch, TierUnavailable, OSError, leaving
    nothing open."""
    directory.require()
    books = Books(retention=retention)
    others = follow_all(disk, directory, books, now_ms=milliseconds(wall_clock()))
    try:
        there = directory.list_segments()  # behind the journals: what they speak of and is not there is no more
    except BaseException:
        others.close()
        raise
    store = Store(
        disk,
        directory,
        books,
        _NoJournal(),
        marker=Marker(disk, directory),
        capacity_bytes=capacity_bytes,
        min_free_bytes=0,
        reserve_bytes=0,
        sync=False,
        clock=clock,
        wall_clock=wall_clock,
        counters=counters,
        retention=retention,
        only_read=why,
    )
    store.other_journals_bytes, store.incomplete = others.allocated_bytes, others.incomplete
    for segment in [segment for segment in books.segments.values() if segment.opened and not segment.gone]:
        if segment.name in there:
            measure(store, segment)
        else:
            books.forget_segment(segment)
    return store, others


class _NoJournal(Journal):
    """Of who may only read: it says nothing."""

    def __init__(self) -> None:
        self.writer = b""
        self.generation = self.size = 0
        self.broken = False
        self.silent = True

    @property
    def lost(self) -> bool:
        return False

    @property
    def allocated_bytes(self) -> int:
        return 0

    @property
    def room_bytes(self) -> int:
        return 0

    def reads_back(self) -> bool:
        return True

    def close(self) -> None:
        pass
