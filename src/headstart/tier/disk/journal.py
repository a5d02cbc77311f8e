"""Journals as files: this writer's own, which it appends to and renews, and others', which it follows.

A writer holds the exclusive lock of its journal for life; a journal whose lock can be taken belongs to a dead writer.
A new generation is written whole under a temporary name, synced, renamed, and only then is the old one removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from headstart.errors import StoreError
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk, Handle
from headstart.tier.disk.records import (
    HEADER_BYTES,
    VERSION,
    Decoded,
    Record,
    Snapshot,
    decode_journal_header,
    decode_records,
    encode_journal_header,
    encode_record,
)

RESERVE_BYTES = 64 << 10  # allocated ahead: a removal, which frees space, must fit when the disk is full


class Journal:
    """This writer's journal, locked. Not safe from many threads: the caller takes turns."""

    def __init__(
        self, disk: Disk, directory: Directory, handle: Handle, *, writer: bytes, generation: int, size: int, reserve_bytes: int
    ) -> None:
        self.writer = writer
        self.generation = generation
        self.size = size
        self._disk = disk
        self._directory = directory
        self._handle = handle
        self._reserve_bytes = reserve_bytes
        self._reserved = 0
        self._dirty_tail = False
        self._closed = False
        self.silent = False  # it says nothing that anybody would miss
        self._reserve()

    @classmethod
    def create(
        cls,
        disk: Disk,
        directory: Directory,
        records: Sequence[Record],
        *,
        writer: bytes,
        generation: int,
        now_ms: int,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> Journal:
        """Write a generation that holds `records` and take its lock. Raises OSError, leaving nothing behind."""
        data = bytearray(encode_journal_header(writer, generation, now_ms, host=_host()))
        for record in records:
            data += encode_record(record, writer=writer, generation=generation, offset=len(data))
        temporary, path = directory.temporary_path(), directory.journal_path(writer, generation)
        handle = disk.open(temporary, "create")
        try:
            if not disk.lock_file(handle):
                raise StoreError(f"journal {temporary} was taken by another process", reason="journal-taken")
            disk.write(handle, memoryview(data), 0)
            disk.sync(handle)
            disk.rename(temporary, path)
            disk.sync_directory(directory.journals)
        except BaseException:
            for name in (temporary, path):  # a generation that is not used must not be taken for the newest
                with contextlib.suppress(OSError):
                    disk.unlink(name)
            disk.close(handle)
            raise
        journal = cls(
            disk, directory, handle, writer=writer, generation=generation, size=len(data), reserve_bytes=reserve_bytes
        )
        journal.silent = all(isinstance(record, Snapshot) for record in records)
        return journal

    @classmethod
    def take_over(cls, disk: Disk, directory: Directory, tail: JournalTail, *, reserve_bytes: int) -> Journal:
        """Go on with a dead writer's journal that `tail` has locked and read to its end; what is torn behind that is cut."""
        journal = cls(
            disk,
            directory,
            tail.handle,
            writer=tail.writer,
            generation=tail.generation,
            size=tail.position,
            reserve_bytes=reserve_bytes,
        )
        journal._dirty_tail = True
        return journal

    @property
    def lost(self) -> bool:
        """True once somebody removed the file under us."""
        return self._disk.facts(self._handle).links == 0

    @property
    def allocated_bytes(self) -> int:
        return self._disk.facts(self._handle).allocated_bytes

    def append(self, records: Sequence[Record], *, sync: bool) -> None:
        """Add records, all or none. Raises OSError; the journal can be used again afterwards."""
        if self._dirty_tail:
            # Behind `size` may stand whole records of a failed append; they must not come to life behind new ones.
            self._disk.truncate(self._handle, self.size)
            self._dirty_tail = False
            self._reserved = 0
        data = bytearray()
        for record in records:
            data += encode_record(record, writer=self.writer, generation=self.generation, offset=self.size + len(data))
        self._dirty_tail = True
        self._disk.write(self._handle, memoryview(data), self.size)
        if sync:
            self._disk.sync(self._handle)
        self._dirty_tail = False
        self.silent = False
        self.size += len(data)
        self._reserve()

    def renew(self, records: Sequence[Record], *, now_ms: int) -> Journal:
        """Return the next generation, which holds `records`; this one is closed and removed. Raises OSError, and then this
        one stays."""
        new = Journal.create(
            self._disk,
            self._directory,
            records,
            writer=self.writer,
            generation=self.generation + 1,
            now_ms=now_ms,
            reserve_bytes=self._reserve_bytes,
        )
        with contextlib.suppress(OSError):  # a generation too many is removed at the next open
            self._disk.unlink(self._directory.journal_path(self.writer, self.generation))
        self._close()
        return new

    def close(self) -> None:
        """Let go of the lock; a journal that says nothing goes. Twice is fine."""
        if self._closed:
            return
        with contextlib.suppress(OSError):
            self._disk.truncate(self._handle, self.size)  # gives the reservation back
            if self.silent:
                self._disk.unlink(self._directory.journal_path(self.writer, self.generation))
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._disk.close(self._handle)

    def _reserve(self) -> None:
        if self._reserve_bytes and self.size + self._reserve_bytes // 2 > self._reserved:
            with contextlib.suppress(OSError):  # full already: then the append itself will say so
                if self._disk.reserve(self._handle, self.size, self._reserve_bytes):
                    self._reserved = self.size + self._reserve_bytes


class JournalTail:
    """A journal that is being followed: `poll` returns the records that were added since. `handle` may be locked by `take`."""

    def __init__(self, disk: Disk, directory: Directory, *, writer: bytes, generation: int) -> None:
        """Open the journal. Raises OSError, or StoreError for a file that is none ("journal-header",
        "short-read") or of another version ("journal-version")."""
        self.writer = writer
        self.generation = generation
        self.position = HEADER_BYTES
        self.stopped = ""
        self._disk = disk
        self._path = directory.journal_path(writer, generation)
        self.handle = disk.open(self._path, "write")
        try:
            self._check_header()
        except BaseException:
            disk.close(self.handle)
            raise

    def take(self) -> bool:
        """Try to lock the journal: True means that its writer is dead and that it is ours now, if it still has its name."""
        if not self._disk.lock_file(self.handle):
            return False
        try:
            return self._disk.stat(self._path).inode == self._disk.facts(self.handle).inode
        except FileNotFoundError:
            return False

    def poll(self) -> list[Record]:
        """Return what was added. A record that is not whole yet is looked at again next time; `stopped` says why."""
        size = self._disk.facts(self.handle).size
        if size <= self.position:
            return []
        data = bytearray(size - self.position)
        self._disk.read(self.handle, [memoryview(data)], self.position)
        state = Decoded(self.position)
        records = list(
            decode_records(memoryview(data), writer=self.writer, generation=self.generation, offset=self.position, state=state)
        )
        self.position, self.stopped = state.end, state.stopped
        return records

    def allocated_bytes(self) -> int:
        return self._disk.facts(self.handle).allocated_bytes

    def close(self) -> None:
        self._disk.close(self.handle)

    def _check_header(self) -> None:
        data = bytearray(HEADER_BYTES)
        try:
            self._disk.read(self.handle, [memoryview(data)], 0)
            writer, generation, version = decode_journal_header(memoryview(data))
            if (writer, generation) != (self.writer, self.generation):
                raise ValueError("its header names another journal")
            if version != VERSION:
                raise StoreError(
                    f"journal {self._path} has version {version}, this headstart reads {VERSION}",
                    reason="journal-version",
                    path=self._path,
                )
        except ValueError as error:
            raise StoreError(
                f"journal {self._path} cannot be read: {error}", reason="journal-header", path=self._path
            ) from error


@cache
def _host() -> bytes:
    """Return what names this machine since it was started; zeros where it does not say. Locks are worth as much as that: on a
    file system that several machines share, a lock that can be taken may still be held on another one."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
