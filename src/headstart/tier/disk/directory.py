"""The cache directory: its marker file, the names in it, and what stands there. Paths come from numbers and random bytes only.

<root>/headstart.json                                    format and version
<root>/segments/<2 hex>/<writer 32 hex>-<seq 8 hex>.seg   the folder is the sequence number's low byte
<root>/journals/<writer 32 hex>-<generation 8 hex>.log
<root>/journals/<32 hex>.tmp                              being written; renamed when whole
"""

from __future__ import annotations

import errno
import json
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from headstart.errors import FormatMismatch, TierUnavailable
from headstart.tier.disk.door import Disk
from headstart.tier.disk.records import SegmentName

FORMAT = "headstart"
VERSION = 1
MARKER = "headstart.json"
_SEGMENT = re.compile(r"([0-9a-f]{32})-([0-9a-f]{8})\.seg")
_JOURNAL = re.compile(r"([0-9a-f]{32})-([0-9a-f]{8})\.log")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.tmp")
_MAX_MARKER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Listing:
    """What stands in the directory. `journals`: each writer's generations, ascending. `unknown`: nothing of ours."""

    segments: set[SegmentName] = field(default_factory=set)
    journals: dict[bytes, list[int]] = field(default_factory=dict)
    temporary: list[Path] = field(default_factory=list)
    unknown: list[Path] = field(default_factory=list)


class Directory:
    """Names and listings under one root; every access goes through `disk`."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self.root = root
        self.journals = root / "journals"
        self.segments = root / "segments"
        self._disk = disk

    def prepare(self) -> None:
        """Create what is missing. Raises FormatMismatch for another version, TierUnavailable (one sentence) otherwise."""
        try:
            self._make(self.root)
            self._check_marker()
            for path in (self.segments, self.journals):
                self._make(path)
        except OSError as error:
            raise unavailable(self.root, error) from error

    def segment_path(self, name: SegmentName) -> Path:
        return self.segments / f"{name.sequence & 0xFF:02x}" / f"{name.writer.hex()}-{name.sequence:08x}.seg"

    def journal_path(self, writer: bytes, generation: int) -> Path:
        return self.journals / f"{writer.hex()}-{generation:08x}.log"

    def temporary_path(self) -> Path:
        return self.journals / f"{secrets.token_hex(16)}.tmp"

    def list(self) -> Listing:
        """Return what stands there: segments before journals, so that a segment's journal is never missed."""
        listing = Listing()
        for entry in self._disk.entries(self.root):
            if _TEMPORARY.fullmatch(entry.name):
                listing.temporary.append(self.root / entry.name)
            elif entry.name not in (MARKER, self.segments.name, self.journals.name):
                listing.unknown.append(self.root / entry.name)
        for folder in self._disk.entries(self.segments):
            if not folder.is_directory or not re.fullmatch(r"[0-9a-f]{2}", folder.name):
                listing.unknown.append(self.segments / folder.name)
                continue
            for path, found in self._names(self.segments / folder.name, _SEGMENT, listing):
                name = SegmentName(bytes.fromhex(found[1]), int(found[2], 16))
                if path == self.segment_path(name):
                    listing.segments.add(name)
                else:
                    listing.unknown.append(path)
        for _, found in self._names(self.journals, _JOURNAL, listing):
            listing.journals.setdefault(bytes.fromhex(found[1]), []).append(int(found[2], 16))
        for generations in listing.journals.values():
            generations.sort()
        return listing

    def list_journals(self) -> dict[bytes, int]:
        """Return each writer's newest generation."""
        newest: dict[bytes, int] = {}
        for entry in self._disk.entries(self.journals):
            if found := _JOURNAL.fullmatch(entry.name):
                writer, generation = bytes.fromhex(found[1]), int(found[2], 16)
                newest[writer] = max(generation, newest.get(writer, 0))
        return newest

    def _names(self, folder: Path, pattern: re.Pattern[str], listing: Listing) -> Iterator[tuple[Path, re.Match[str]]]:
        for entry in self._disk.entries(folder):
            path = folder / entry.name
            found = pattern.fullmatch(entry.name)
            if found and not entry.is_directory:
                yield path, found
            elif _TEMPORARY.fullmatch(entry.name):
                listing.temporary.append(path)
            else:
                listing.unknown.append(path)

    def _make(self, path: Path) -> None:
        try:
            self._disk.stat(path)
        except FileNotFoundError:
            if path.parent != path:
                self._make(path.parent)
            self._disk.make_directory(path)
            with suppress(PermissionError):  # a parent that may be passed through but not read
                self._disk.sync_directory(path.parent)

    def _check_marker(self) -> None:
        path = self.root / MARKER
        try:
            handle = self._disk.open(path, "read")
        except FileNotFoundError:
            return self._write_marker()
        try:
            size = self._disk.facts(handle).size
            data = bytearray(min(size, _MAX_MARKER_BYTES))
            self._disk.read(handle, [memoryview(data)], 0)
        finally:
            self._disk.close(handle)
        try:
            marker = json.loads(data)
        except ValueError:
            marker = None
        if not isinstance(marker, dict) or marker.get("format") != FORMAT:
            raise TierUnavailable(
                f"{path} is not the marker of a headstart cache; choose another directory, or remove that file to use this one",
                tier="disk",
                path=path,
            )
        if marker.get("version") != VERSION:
            raise FormatMismatch(
                f"cache directory {self.root} has format version {marker.get('version')}, this headstart reads {VERSION}; "
                "choose another directory or remove this one",
                tier="disk",
                path=path,
                found=marker.get("version"),
                supported=VERSION,
            )

    def _write_marker(self) -> None:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"format": FORMAT, "version": VERSION, "created": created}, indent=1) + "\n"
        temporary = self.root / f"{secrets.token_hex(16)}.tmp"
        handle = self._disk.open(temporary, "create")
        try:
            self._disk.write(handle, text.encode(), 0)
            self._disk.sync(handle)
        finally:
            self._disk.close(handle)
        try:
            self._disk.rename(temporary, self.root / MARKER)
        except FileNotFoundError:
            self._disk.stat(self.root / MARKER)  # another process cleaned up at its start; then it has written a marker
        self._disk.sync_directory(self.root)


def unavailable(root: Path, error: OSError) -> TierUnavailable:
    """Return the sentence for a directory that the system refuses: what, where, and the next step."""
    match error.errno:
        case errno.EROFS:
            why = "is on a read-only file system; choose another directory or remount it writable"
        case errno.ENOTDIR | errno.EEXIST:
            why = "is a file or lies below one, not a directory; choose another directory or move that file"
        case errno.EACCES | errno.EPERM:
            why = "may not be written by this user; change its owner or mode, or choose another directory"
        case errno.ENOSPC | errno.EDQUOT:
            why = "is on a full file system; free space or choose another directory"
        case _:
            why = f"cannot be used ({error.strerror or error}); check the disk or choose another directory"
    return TierUnavailable(f"cache directory {root} {why}", tier="disk", path=root, errno=error.errno)
