"""What promises and the choice of victims need of whoever owns a directory's books: a disk tier's store or a pool's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Protocol

from headstart.metrics import Counters
from headstart.policy.retention import Retention
from headstart.tier.disk.books import Books
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk
from headstart.tier.disk.files import SegmentFiles
from headstart.tier.disk.journal import Journal
from headstart.tier.disk.records import Record


class Owner(Protocol):
    """`lock` guards `books`; `holes`: whether space comes back extent by extent, or with whole files only."""

    disk: Disk
    directory: Directory
    files: SegmentFiles
    books: Books
    lock: Lock
    counters: Counters
    capacity_bytes: int
    retention: Retention
    holes: bool
    clock: Callable[[], float]

    @property
    def journal(self) -> Journal:
        """The own journal, as it is now."""
        ...

    def now_ms(self) -> int: ...

    def turn(self) -> AbstractContextManager[bool]: ...

    def charging(self, *, wait_s: float | None = None) -> AbstractContextManager[bool]: ...

    def append(self, records: Sequence[Record]) -> None: ...
