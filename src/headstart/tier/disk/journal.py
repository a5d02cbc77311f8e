"""Journals as files: this writer's own, which it appends to and renews, and others', which it follows.

A writer holds the exclusive lock of its journal for life; a journal whose lock can be taken belongs to a dead writer.
A new generation is written whole under a temporary name, synced, renamed, and only then is the old one removed.
Bytes that a reader may have taken for a record are never cut or written over: after an append that failed in part, and behind
the torn end of a dead writer's journal, only a new generation can follow.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import xxhash

from headstart.errors import StoreError
from headstart.tier.disk.bulk import Loaded, decode_bulk
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk, Handle, OpenMode
from headstart.tier.disk.records import (
    HEADER_BYTES,
    VERSION,
    Decoded,
    Record,
    Snapshot,
    Unknown,
    decode_journal_header,
    decode_records,
    encode_journal_header,
    encode_record,
    encoded_bytes,
    record_bytes,
)

RESERVE_BYTES = 64 << 10  # allocated ahead: a removal, which frees space, must fit when the disk is full
_CHUNK_BYTES, _LOAD_BYTES = 64 << 10, 4 << 20  # read at once, whatever length a file claims
_HEAD_BYTES = 64
R = TypeVar("R")


class Journal:
    """This writer's journal, locked. Not safe from many threads: the caller takes turns."""

    def __init__(
        self,
        disk: Disk,
        directory: Directory,
        handle: Handle,
        *,
        writer: bytes,
        generation: int,
        size: int,
    ) -> None:
        self.writer = writer
        self.generation = generation
        self.size = size
        self._disk = disk
        self._directory = directory
        self._handle = handle
        self._reserved = 0  # up to this byte of the file the file system has charged already
        self._closed = False
        self._written = xxhash.xxh3_64()  # of all `size` bytes
        self._unknown: list[Unknown] = []  # records of later versions, kept for them
        self._withdrawn: Path | None = None  # the next generation, which failed and may still stand there
        self.broken = False  # something that readers may have seen stands behind `size`: to go on, renew it
        self.silent = False  # it says nothing that anybody would miss

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
        most_bytes: int | None = None,
    ) -> Journal:
        """Write a generation that holds `records` and take its lock; one of more than `most_bytes` is ENOSPC. Raises OSError,
        leaving nothing behind."""
        data = bytearray(encode_journal_header(writer, generation, now_ms, host=_host()))
        for record in records:
            data += encode_record(record, writer=writer, generation=generation, offset=len(data))
        if most_bytes is not None and len(data) > most_bytes:
            raise OSError(errno.ENOSPC, "the capacity leaves no room for the journal", str(directory.root))
        path = directory.journal_path(writer, generation)
        temporary, handle = directory.create_temporary(directory.journals)
        try:
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
        journal = cls(disk, directory, handle, writer=writer, generation=generation, size=len(data))
        journal._written.update(data)
        journal.silent = all(isinstance(record, Snapshot) for record in records)
        journal._unknown = [record for record in records if isinstance(record, Unknown)]
        return journal

    @classmethod
    def take_over(cls, disk: Disk, directory: Directory, tail: JournalTail, unknown: Sequence[Unknown]) -> Journal:
        """Go on with a dead writer's journal that `tail` has locked and read to its end. `unknown`: what it holds of those."""
        journal = cls(
            disk,
            directory,
            tail.handle,
            writer=tail.writer,
            generation=tail.generation,
            size=tail.position,
        )
        journal._written = tail.read.copy()
        journal.broken = bool(tail.stopped)
        journal._unknown = list(unknown)
        return journal

    @property
    def lost(self) -> bool:
        """True once somebody removed the file under us, or the file system that it lies on."""
        facts = None
        with contextlib.suppress(OSError):  # of a device that went, while its place may have another by now
            facts = self._disk.facts(self._handle)
        try:
            there = self._disk.stat(self._directory.journal_path(self.writer, self.generation))
        except FileNotFoundError:
            return True
        return facts is None or facts.links == 0 or facts.inode != there.inode

    @property
    def allocated_bytes(self) -> int:
        return self._disk.facts(self._handle).allocated_bytes

    @property
    def room_bytes(self) -> int:
        """What can be appended without anything more being charged."""
        return max(0, self._reserved - self.size)

    def reserve(self, nbytes: int) -> None:
        """Have so much space charged behind its end. Raises OSError; where the file system cannot, nothing is changed."""
        if self._disk.reserve(self._handle, self.size, nbytes):
            self._reserved = self.size + nbytes

    def reads_back(self) -> bool:
        """Whether the file is what was written, and nothing large behind it: else others may not be able to follow it."""
        try:
            too_long = self._disk.facts(self._handle).size > self.size + RESERVE_BYTES
            return not too_long and self._read_back().digest() == self._written.digest()
        except (OSError, StoreError):
            return False

    def append(self, records: Sequence[Record], *, sync: bool) -> None:
        """Add records. Raises OSError; then none of them counts, though readers may have seen some if it is `broken` now."""
        assert not self.broken, "a broken journal is renewed before anything is added"
        self._settle(sync=sync)
        data = bytearray()
        seen = 0  # so much must stand behind `size` for a reader to find a record there
        for record in records:
            data += encode_record(record, writer=self.writer, generation=self.generation, offset=self.size + len(data))
            seen = seen or len(data)
        try:
            self._disk.write(self._handle, memoryview(data), self.size)
            if sync:
                self._disk.sync(self._handle)
        except OSError:
            self.broken = self._reaches(self.size + seen)
            raise
        self.silent = False
        self.size += len(data)
        self._written.update(data)

    def encoded_bytes(self, records: Sequence[Record]) -> int:
        """Return what records take in it."""
        return sum(map(encoded_bytes, records))

    def sync(self) -> None:
        """Return when all that was appended would survive a power loss. Raises OSError."""
        self._disk.sync(self._handle)

    def renew(self, records: Sequence[Record], *, now_ms: int, most_bytes: int | None = None) -> Journal:
        """Return the next generation, which holds `records`; this one is closed and removed. Raises OSError, and then this
        one stays. What it holds of later versions goes along."""
        try:
            new = Journal.create(
                self._disk,
                self._directory,
                [*records, *self._unknown],
                writer=self.writer,
                generation=self.generation + 1,
                now_ms=now_ms,
                most_bytes=most_bytes,
            )
        except OSError:
            self._withdrawn = self._directory.journal_path(self.writer, self.generation + 1)
            raise
        with contextlib.suppress(OSError):  # a generation too many is removed at the next open
            self._disk.unlink(self._directory.journal_path(self.writer, self.generation))
        self._close()
        return new

    def close(self) -> None:
        """Let go of the lock; a journal that says nothing goes. Twice is fine."""
        if self._closed:
            return
        with contextlib.suppress(OSError):
            if not self.broken:
                self._disk.truncate(self._handle, self.size)  # gives the reservation back
            if self.silent:
                self._disk.unlink(self._directory.journal_path(self.writer, self.generation))
        self._close()

    def _settle(self, *, sync: bool) -> None:
        """Make sure that a newer generation which failed is gone, and stays so after a power loss: only the newest counts, so
        what is added to an older one would be lost. Raises OSError."""
        if self._withdrawn is None:
            return
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(self._withdrawn)
        if sync:
            self._disk.sync_directory(self._directory.journals)
        self._withdrawn = None

    def _close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):  # else a journal whose handle may be another file's by now would go on
            self._disk.close(self._handle)

    def _read_back(self) -> xxhash.xxh3_64:
        found = xxhash.xxh3_64()
        for at in range(0, self.size, _CHUNK_BYTES):
            found.update(_read(self._disk, self._handle, at, min(_CHUNK_BYTES, self.size - at)))
        return found

    def _reaches(self, end: int) -> bool:
        try:
            return self._disk.facts(self._handle).size >= end
        except OSError:
            return True


class JournalTail:
    """A journal that is being followed: `poll` returns the records that were added since. `stopped`: why nothing is read behind
    `position` ("version": the journal is of another one). `taken`: its lock is held by `handle`, so its writer is dead.
    `ended`: it was so, and as the journal stops before its end, only a new generation can go on."""

    def __init__(self, disk: Disk, directory: Directory, *, writer: bytes, generation: int, mode: OpenMode = "write") -> None:
        """Open the journal; with the mode "read" it can only be followed. Raises OSError, or StoreError for a file that is none
        ("journal-header", "short-read")."""
        self.writer = writer
        self.generation = generation
        self.position = HEADER_BYTES
        self.stopped = ""
        self.taken = False
        self.ended = False
        self.read = xxhash.xxh3_64()  # of all bytes in front of `position`
        self._refused = b""  # how a long record began that was found to be damaged, so that it is not read again and again
        self._disk = disk
        self._path = directory.journal_path(writer, generation)
        self.handle = disk.open(self._path, mode)
        try:
            self._check_header()
        except BaseException:
            disk.close(self.handle)
            raise

    def take(self) -> bool:
        """Try to lock the journal: True means that its writer is dead. It is ours if it still is the writer's newest."""
        self.taken = self._disk.lock_file(self.handle)
        return self.taken

    def let_go(self) -> None:
        """Give the lock back and go on following. Raises OSError."""
        handle = self._disk.open(self._path, "write")  # the same file: nobody replaces one that is locked
        self.close()
        self.handle, self.taken, self.ended = handle, False, bool(self.stopped)

    def reopen(self) -> bool:
        """Open the file anew: what another machine appended is sure to be seen only then. False where another file has the name
        by now. Raises OSError, and then all is as before."""
        handle = self._disk.open(self._path, "read")
        same = self._disk.facts(handle).inode == self._disk.facts(self.handle).inode
        self.close()
        self.handle = handle
        return same

    @property
    def gone(self) -> bool:
        """True once the file has lost its name; another one may have it."""
        return self._disk.facts(self.handle).links == 0

    def poll(self) -> list[Record]:
        """Return what was added. A record that is not whole yet is looked at again next time; `stopped` says why. Raises
        OSError or StoreError, and then all is read again next time."""
        return self._read_on(_one_by_one, _CHUNK_BYTES)

    def load(self) -> list[Loaded]:
        """As `poll`, for a whole journal: in large steps, most of it in columns."""
        return self._read_on(decode_bulk, _LOAD_BYTES)

    def _read_on(self, decode: Callable[..., list[R]], chunk_bytes: int) -> list[R]:
        records: list[R] = []
        if self.stopped == "version":
            return records
        size = self._disk.facts(self.handle).size
        start, read, going = self.position, self.read.copy(), True
        try:
            while going and self.position < size:
                found, stopped = self._decode(decode, min(chunk_bytes, size - self.position), size - self.position)
                records += found
                going = bool(found) and stopped in ("", "torn")  # torn: cut where the chunk ends, or the file
                self.stopped = stopped
        except BaseException:
            self.position, self.read = start, read
            raise
        return records

    def _decode(self, decode: Callable[..., list[R]], nbytes: int, left: int) -> tuple[list[R], str]:
        """Read so many bytes on, or one record where it is longer; `left` are there. Returns the records and why they end."""
        data = _read(self._disk, self.handle, self.position, nbytes)
        longer = record_bytes(data)
        if len(data) < longer <= left:
            head = bytes(data[:_HEAD_BYTES])
            if head == self._refused:
                return [], "damaged"
            data = _read(self._disk, self.handle, self.position, longer)
            self._refused = head
        state = Decoded(self.position)
        found = decode(data, writer=self.writer, generation=self.generation, offset=self.position, state=state)
        if found:
            self._refused = b""
        self.read.update(data[: state.end - self.position])
        self.position = state.end
        return found, state.stopped

    def allocated_bytes(self) -> int:
        return self._disk.facts(self.handle).allocated_bytes

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.close(self.handle)

    def _check_header(self) -> None:
        data = bytearray(min(HEADER_BYTES, self._disk.facts(self.handle).size))
        try:
            self._disk.read(self.handle, [memoryview(data)], 0)
            writer, generation, version = decode_journal_header(memoryview(data))
            if (writer, generation) != (self.writer, self.generation):
                raise ValueError("its header names another journal")
            if version != VERSION:
                self.stopped = "version"
            self.read.update(data)
        except ValueError as error:
            raise StoreError(
                f"journal {self._path} cannot be read: {error}", reason="journal-header", path=self._path
            ) from error


def _one_by_one(data: memoryview, *, writer: bytes, generation: int, offset: int, state: Decoded) -> list[Record]:
    return list(decode_records(data, writer=writer, generation=generation, offset=offset, state=state))


def _read(disk: Disk, handle: Handle, offset: int, nbytes: int) -> memoryview:
    data = memoryview(bytearray(nbytes))
    disk.read(handle, [data], offset)
    return data


@cache
def _host() -> bytes:
    """Return what names this machine since it was started; zeros where it does not say. Locks are worth as much as that: on a
    file system that several machines share, a lock that can be taken may still be held on another one."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
