"""The cache directory: its marker file, the names in it, and what stands there. Paths come from numbers and random bytes only.

<root>/headstart.json                                    format and version
<root>/segments/<2 hex>/<writer 32 hex>-<seq 8 hex>.seg   the folder is the sequence number's low byte
<root>/journals/<writer 32 hex>-<generation 8 hex>.log
<root>/journals/<32 hex>.tmp                              being written; renamed when whole
"""

from __future__ import annotations

import errno
import json
import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headstart.errors import FormatMismatch, NotThere, StoreError, TierUnavailable
from headstart.tier.disk.door import Disk, Handle
from headstart.tier.disk.records import GENERATIONS, SEQUENCES, SegmentName

FORMAT = "headstart"
VERSION = 1
FEATURES: frozenset[str] = frozenset()  # what a reader must know of to use the directory, beyond the version
POOL = "pool"  # the feature of a directory that many machines share, by the rules of `tier.pool`
OBJECTS = "objects"  # of a bucket, by the rules of `tier.object`
KEYED = "keyed"  # of either: some of what stands there has checks made with a key
MARKER = "headstart.json"
DEVICES = "devices.json"  # which other directories are one tier with this one; `tier.devices` reads and writes it
_SEGMENT = re.compile(r"([0-9a-f]{32})-([0-9a-f]{8})\.seg")
_JOURNAL = re.compile(r"([0-9a-f]{32})-([0-9a-f]{8})\.log")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.tmp")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_MAX_MARKER_BYTES = 64 << 10
_TRIES = 16
_SHARDS = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listing:
    """What stands in the directory. `journals`: each writer's generations, ascending. `in_the_way`: links, FIFOs and devices
    that have a name of ours. `unknown`: nothing of ours, or a folder that cannot be read."""

    segments: set[SegmentName] = field(default_factory=set)
    journals: dict[bytes, list[int]] = field(default_factory=dict)
    temporary: list[Path] = field(default_factory=list)
    in_the_way: list[Path] = field(default_factory=list)
    unknown: list[Path] = field(default_factory=list)


class Directory:
    """Names and listings under one root; every access goes through `disk`."""

    def __init__(self, disk: Disk, root: Path, *, features: frozenset[str] = FEATURES) -> None:
        """`features`: what the directory needs whoever uses it to know; one that needs more or less is refused."""
        self.root = root
        self._features = features
        self.journals = root / "journals"
        self.segments = root / "segments"
        self._shards: dict[int, Path] = {}  # as they are asked for: to make all of them takes as long as the rest of an opening
        self.rewritten = 0  # how often a marker that could not be read was written anew
        self._disk = disk

    def prepare(self) -> None:
        """Create what is missing. Raises FormatMismatch for another version, TierUnavailable (one sentence) otherwise."""
        try:
            self._make(self.root)
            self._check_marker()
            for path in (self.segments, self.journals):
                self._make(path)
                self._disk.make_directory(path)  # refuses a link, which only the root may be
        except OSError as error:
            raise unavailable(self.root, error) from error

    def mark(self, feature: str) -> None:
        """Have the marker say that whoever uses the directory must know of this as well. Raises OSError."""
        path = self.root / MARKER
        marker = self._read_marker(path)
        if marker is not None and feature not in marker.get("features", []):
            features = sorted({*marker.get("features", []), feature})
            self._write_marker((json.dumps(marker | {"features": features}, indent=1) + "\n").encode())

    def sync(self) -> None:
        """Return when the folders would survive a power loss, whoever made them. Raises OSError."""
        for path in (self.segments, self.journals, self.root):
            self._disk.sync_directory(path)
        with suppress(PermissionError):  # a parent that may be passed through but not read
            self._disk.sync_directory(self.root.parent)

    def require(self) -> None:
        """Make sure that a cache is there that this version reads, and change nothing. Raises NotThere where none is,
        FormatMismatch, TierUnavailable."""
        path = self.root / MARKER
        try:
            try:
                marker = self._read_marker(path)
            except FileNotFoundError:
                marker = None
            there = marker is not None or self._holds_files()
        except OSError as error:
            raise unavailable(self.root, error) from error
        if not there:
            raise NotThere(
                f"there is no cache in {self.root}; name another directory, or let `headstart serve` make one", path=self.root
            )
        if marker is not None:
            self._require_readable(marker, path)

    def segment_path(self, name: SegmentName) -> Path:
        return self._shard(name.sequence % _SHARDS) / name.file

    def segment_folders(self, names: Iterable[SegmentName]) -> set[Path]:
        """Return the folders that segments lie in; there may be a great many segments."""
        return {self._shard(number) for number in {name.sequence % _SHARDS for name in names}}

    def journal_path(self, writer: bytes, generation: int) -> Path:
        return self.journals / f"{writer.hex()}-{generation:08x}.log"

    def create_temporary(self, folder: Path) -> tuple[Path, Handle]:
        """Create a file to be renamed when it is whole. It is locked: a temporary file whose lock can be taken is abandoned,
        and whoever opens the directory removes it. Raises OSError, leaving nothing behind."""
        for _ in range(_TRIES):
            path = folder / f"{secrets.token_hex(16)}.tmp"
            handle = self._disk.open(path, "create")
            try:
                if self._disk.lock_file(handle) and self._disk.facts(handle).links:
                    return path, handle
            except BaseException:
                with suppress(OSError):
                    self._disk.unlink(path)
                self._disk.close(handle)
                raise
            self._disk.close(handle)  # another process opened the directory before it was locked, and removes it
        raise OSError(errno.EAGAIN, "temporary files vanish as soon as they are made", str(folder))

    def remove_if_abandoned(self, path: Path) -> bool:
        """Remove a file whose lock can be taken: who wrote it, or would go on with it, is dead. False: it may be there yet."""
        try:
            handle = self._disk.open(path, "write")
            try:
                if not self._disk.lock_file(handle) or self._disk.stat(path).inode != self._disk.facts(handle).inode:
                    return False
                self._disk.unlink(path)
                return True
            finally:
                self._disk.close(handle)
        except FileNotFoundError:
            return True
        except OSError:  # tried again by the next one who comes here
            return False

    def list(self) -> Listing:
        """Return what stands there: segments before journals, so that a segment's journal is never missed. Raises OSError."""
        listing = Listing()
        for entry in self._disk.entries(self.root):
            if _TEMPORARY.fullmatch(entry.name):
                listing.temporary.append(self.root / entry.name)
            elif entry.name not in (MARKER, DEVICES, self.segments.name, self.journals.name):
                listing.unknown.append(self.root / entry.name)
        self._list_segments(listing)
        for found in self._names(self.journals, _JOURNAL, listing):
            generation = int(found[2], 16)
            if generation < GENERATIONS:
                listing.journals.setdefault(bytes.fromhex(found[1]), []).append(generation)
            else:
                listing.unknown.append(self.journals / found[0])
        for generations in listing.journals.values():
            generations.sort()
        return listing

    def list_segments(self) -> set[SegmentName]:
        """Return the names of the segment files. Raises OSError."""
        listing = Listing()
        self._list_segments(listing)
        return listing.segments

    def folders(self) -> Sequence[Path]:
        """Return the folders that names of this cache stand in, the root included. Raises OSError."""
        inside = [self.segments / entry.name for entry in self._disk.entries(self.segments) if entry.is_directory]
        return [self.root, self.journals, self.segments, *(path for path in inside if _FOLDER.fullmatch(path.name))]

    def list_journals(self) -> dict[bytes, int]:
        """Return each writer's newest generation."""
        newest: dict[bytes, int] = {}
        for entry in self._disk.entries(self.journals):
            if (found := _JOURNAL.fullmatch(entry.name)) and not entry.is_strange and not entry.is_directory:
                writer, generation = bytes.fromhex(found[1]), int(found[2], 16)
                if generation < GENERATIONS:
                    newest[writer] = max(generation, newest.get(writer, 0))
        return newest

    def _shard(self, number: int) -> Path:
        folder = self._shards.get(number)
        if folder is None:
            folder = self._shards[number] = self.segments / f"{number:02x}"
        return folder

    def _list_segments(self, listing: Listing) -> None:
        for folder in self._disk.entries(self.segments):
            if not folder.is_directory or not _FOLDER.fullmatch(folder.name):
                strange = folder.is_strange and _FOLDER.fullmatch(folder.name)
                (listing.in_the_way if strange else listing.unknown).append(self.segments / folder.name)
                continue
            shard = int(folder.name, 16)
            for found in self._names(self.segments / folder.name, _SEGMENT, listing):
                name = SegmentName(bytes.fromhex(found[1]), int(found[2], 16))
                if name.sequence < SEQUENCES and name.sequence % _SHARDS == shard:
                    listing.segments.add(name)
                else:
                    listing.unknown.append(self.segments / folder.name / found[0])

    def _names(self, folder: Path, pattern: re.Pattern[str], listing: Listing) -> Iterator[re.Match[str]]:
        """Yield the names in a folder that are of a kind; no paths, which take longer to make than all the rest."""
        try:
            entries = self._disk.entries(folder)
        except OSError as error:
            if folder == self.journals:
                raise
            log.warning("disk tier %s: folder %s cannot be read (%s); what is in it is missed", self.root, folder.name, error)
            listing.unknown.append(folder)
            return
        for entry in entries:
            found = pattern.fullmatch(entry.name)
            if found and not entry.is_directory and not entry.is_strange:
                yield found
            elif entry.is_strange and (found or _TEMPORARY.fullmatch(entry.name)):
                listing.in_the_way.append(folder / entry.name)
            elif _TEMPORARY.fullmatch(entry.name):
                listing.temporary.append(folder / entry.name)
            else:
                listing.unknown.append(folder / entry.name)

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
            marker = self._read_marker(path)
        except FileNotFoundError:
            return self._write_marker(_marker(self._features))
        if marker is None and self._holds_files():
            # A rotten marker is no reason to lose what lies beside it: segments and journals carry versions of their own.
            log.warning("disk tier %s: %s could not be read and is written anew", self.root, MARKER)
            return self._rewrite_marker(path)
        if marker is None:
            raise TierUnavailable(
                f"{path} is not the marker of a headstart cache; choose another directory, or remove that file to use this one",
                tier="disk",
                path=path,
            )
        self._require_readable(marker, path)

    def _require_readable(self, marker: dict[str, Any], path: Path) -> None:
        if marker["version"] != VERSION:
            raise FormatMismatch(
                f"cache directory {self.root} has format version {marker['version']}, this headstart reads {VERSION}; "
                "choose another directory or remove this one",
                tier="disk",
                path=path,
                found=marker["version"],
                supported=VERSION,
            )
        found = set(marker.get("features", []))
        if found & {POOL, OBJECTS}:
            found.discard(KEYED)  # known here; extents say themselves whether it takes a key to read them
        if POOL in self._features ^ found and found <= FEATURES | {POOL}:
            raise FormatMismatch(
                f"{self.root} is a pool of many machines: give it as --pool, to `headstart cache` too, beside a directory"
                if POOL in found
                else f"{self.root} is a cache directory of one machine and cannot become a pool; choose another directory",
                tier="disk",
                path=path,
                found=sorted(found),
                supported=sorted(self._features),
            )
        if not found and OBJECTS in self._features:
            raise FormatMismatch(
                f"{self.root} holds a cache directory of one machine and cannot become an object store; choose another prefix",
                tier="object",
                path=path,
                found=[],
                supported=sorted(self._features),
            )
        unknown = sorted(found - self._features)
        if unknown:
            raise FormatMismatch(
                f"cache directory {self.root} uses {', '.join(unknown)}, which this headstart does not know; "
                "use a newer headstart or choose another directory",
                tier="disk",
                path=path,
                found=unknown,
                supported=sorted(self._features),
            )

    def _read_marker(self, path: Path) -> dict[str, Any] | None:
        """Return what the marker says; None where it cannot be read as one."""
        handle = self._disk.open(path, "read")
        try:
            data = bytearray(min(self._disk.facts(handle).size, _MAX_MARKER_BYTES))
            self._disk.read(handle, [memoryview(data)], 0)
            marker = json.loads(data)
        except (ValueError, StoreError, RecursionError):  # the last: it is nested too deeply
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                return None
            raise
        finally:
            self._disk.close(handle)
        if not isinstance(marker, dict) or marker.get("format") != FORMAT or not isinstance(marker.get("version"), int):
            return None
        features = marker.get("features", [])
        return marker if isinstance(features, list) and all(isinstance(name, str) for name in features) else None

    def _holds_files(self) -> bool:
        """Whether a segment or a journal stands here."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if self.list_journals():
                return True
            for folder in self._disk.entries(self.segments):
                if folder.is_directory and _FOLDER.fullmatch(folder.name):
                    inside = self._disk.entries(self.segments / folder.name)
                    if any(_SEGMENT.fullmatch(entry.name) for entry in inside):
                        return True
        return False

    def _rewrite_marker(self, path: Path) -> None:
        """Write the marker anew in place: other processes may hold its lock. Torn, it is written anew once more. What has
        another name as well may be somebody else's file: it stays as it is, under that name."""
        text = _marker(self._features)[:-1] + b" "  # whoever adds next measures anew: it may have been cut while somebody added
        handle = self._disk.open(path, "write")
        try:
            if self._disk.facts(handle).links > 1:
                self._write_marker(text)
                self.rewritten += 1
                return
            self._disk.write(handle, text, 0)
            self._disk.truncate(handle, len(text))
            self._disk.sync(handle)
            self.rewritten += 1
        finally:
            self._disk.close(handle)

    def _write_marker(self, text: bytes) -> None:
        temporary, handle = self.create_temporary(self.root)
        try:
            self._disk.write(handle, text, 0)
            self._disk.sync(handle)
            self._disk.rename(temporary, self.root / MARKER)
        except BaseException:
            with suppress(OSError):
                self._disk.unlink(temporary)
            raise
        finally:
            self._disk.close(handle)
        self._disk.sync_directory(self.root)


def _marker(features: frozenset[str]) -> bytes:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    marker = {"format": FORMAT, "version": VERSION, "features": sorted(features), "created": created}
    return (json.dumps(marker, indent=1) + "\n").encode()


def unavailable(root: Path, error: OSError) -> TierUnavailable:
    """Return the sentence for a directory that the system refuses: what, where, and the next step."""
    match error.errno:
        case errno.EROFS:
            why = "is on a read-only file system; choose another directory or remount it writable"
        case errno.ENOTDIR | errno.EEXIST:
            why = "is a file or lies below one, not a directory; choose another directory or move that file"
        case errno.ELOOP:
            why = f"has a link or a special file at {error.filename}; remove that, or choose another directory"
        case errno.EACCES | errno.EPERM:
            why = "may not be written by this user; change its owner or mode, or choose another directory"
        case errno.ENOSPC | errno.EDQUOT:
            why = "is on a full file system; free space or choose another directory"
        case _:
            why = f"cannot be used ({error.strerror or error}); check the disk or choose another directory"
    return TierUnavailable(f"cache directory {root} {why}", tier="disk", path=root, errno=error.errno)
