"""Other writers' journals on the same directory, followed while this process runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from headstart.errors import StoreError
from headstart.policy.retention import FOREVER_MS
from headstart.tier.disk.books import Books
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk, OpenMode
from headstart.tier.disk.journal import JournalTail
from headstart.tier.disk.records import Record

_NOBODY = b""  # the writer whose journal is not followed, where all are others'
_LOOKS = 8  # at the list of journals: one that is renewed while it is read is found the next time


class Others:
    """Tails of all other writers' journals. Not safe from many threads: the caller lets one in at a time."""

    def __init__(
        self,
        disk: Disk,
        directory: Directory,
        tails: Sequence[JournalTail],
        *,
        own_writer: bytes,
        mode: OpenMode = "write",
    ) -> None:
        self._disk = disk
        self._mode: OpenMode = mode
        self._directory = directory
        self._own_writer = own_writer
        self._tails = {tail.writer: tail for tail in tails}
        self._unreadable: dict[bytes, int] = {}  # writers, with the generation of theirs that cannot even be begun with
        self.allocated_bytes = 0
        self._measure()

    @property
    def incomplete(self) -> bool:
        """Whether a journal cannot be read to its end: files may stand there, and more may come, that no journal explains."""
        return bool(self._unreadable) or any(tail.stopped and not tail.ended for tail in self._tails.values())

    def poll(self) -> list[Record]:
        """Return what the journals that are followed say since the last time."""
        records: list[Record] = []
        for tail in self._tails.values():
            records += _poll(tail)
        if records:
            self._measure()
        return records

    def look_for_new(self) -> list[Record]:
        """Return what new journals and new generations say. Raises OSError where they cannot be listed."""
        newest = self._directory.list_journals()
        newest.pop(self._own_writer, None)
        records: list[Record] = []
        self._unreadable.clear()
        for writer, generation in newest.items():
            tail = self._tails.get(writer)
            if tail is not None and generation <= tail.generation and not _gone(tail):
                continue
            try:
                new = JournalTail(self._disk, self._directory, writer=writer, generation=generation, mode=self._mode)
            except FileNotFoundError:
                continue  # renewed or removed since it was listed: the next look finds what became of it
            except (OSError, StoreError):
                self._unreadable[writer] = generation
                continue
            if tail is not None:
                records += self._finish(tail)
            self._tails[writer] = new
            records += _poll(new)
        for writer in self._tails.keys() - newest.keys():
            records += self._finish(self._tails.pop(writer))
        self._measure()
        return records

    def sync(self) -> None:
        """Return when all that was read of other journals would survive a power loss. Raises OSError."""
        for tail in self._tails.values():
            self._disk.sync(tail.handle)

    def close(self) -> None:
        while self._tails:
            self._tails.popitem()[1].close()

    def _finish(self, tail: JournalTail) -> list[Record]:
        """Read a journal that has been replaced or removed to its end; it says nothing more."""
        records = _poll(tail)
        tail.close()
        return records

    def _measure(self) -> None:
        with contextlib.suppress(OSError):
            unreadable = [self._directory.journal_path(*name) for name in self._unreadable.items()]
            self.allocated_bytes = sum(tail.allocated_bytes() for tail in self._tails.values()) + sum(
                self._disk.stat(path).allocated_bytes for path in unreadable
            )


def follow_all(disk: Disk, directory: Directory, books: Books, *, now_ms: int = FOREVER_MS) -> Others:
    """Have `books` take over what all journals say, and return who follows them from now on. Nothing is locked or changed.
    Raises OSError, leaving nothing open."""
    tails: list[JournalTail] = []
    try:
        for writer, generation in directory.list_journals().items():
            # What cannot be opened or read now, or was renewed just now, is looked for again.
            with contextlib.suppress(OSError, StoreError):
                tail = JournalTail(disk, directory, writer=writer, generation=generation, mode="read")
                tails.append(tail)
                books.apply(tail.load(), own=False, now_ms=now_ms)
        others = Others(disk, directory, tails, own_writer=_NOBODY, mode="read")
        for _ in range(_LOOKS):
            before = directory.list_journals()
            books.apply(others.look_for_new(), own=False, now_ms=now_ms)
            if before == directory.list_journals():
                break
    except BaseException:
        for tail in tails:
            tail.close()
        raise
    books.finish_loading()
    return others


def _gone(tail: JournalTail) -> bool:
    """A generation that could not be finished is withdrawn; the next one that is made may have its name."""
    try:
        return tail.gone
    except OSError:
        return True


def _poll(tail: JournalTail) -> list[Record]:
    """Read on. What cannot be read now (EIO; a torn end that is being cut) is tried again next time: the position stays."""
    try:
        return tail.poll()
    except (OSError, StoreError):
        return []
