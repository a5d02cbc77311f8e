"""The writing side of an object tier: as a pool's, but that every extent is an object of its own.

    extent's object is put → one journal object: segment opened, extent added, segment sealed → found under its keys

A segment that holds one extent and is sealed at once gives its space back by itself, so nothing is ever written anew for that.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from headstart.block.representation import Representation
from headstart.block.whole import examine
from headstart.errors import ExtentCorrupt
from headstart.tier.base import Terms
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk
from headstart.tier.disk.files import SegmentFiles
from headstart.tier.disk.new_record import record_of
from headstart.tier.disk.records import (
    ExtentAdded,
    ExtentName,
    Record,
    RepresentationDeclared,
    SegmentName,
    SegmentOpened,
    SegmentSealed,
)
from headstart.tier.disk.segment import SegmentHeader, decode_segment_header, encode_segment_header
from headstart.tier.object.object_disk import ObjectDisk
from headstart.tier.object.segments import ObjectSegments
from headstart.tier.pool.store import Attempt, Image, PoolStore

MOST_SHARE = 8  # of the capacity an extent takes at most such a part
_MOST_BYTES = 4 << 30  # of an extent, whatever the capacity
_UNSAID_SHARE = 128
# Objects of a journal: whoever follows lists them all, a thousand a request. The larger it is, the more of them there may be.
LEAST_APPENDS, MOST_APPENDS = 128, 768
_SNAPSHOT_BYTES = 32 << 10


class ObjectStore(PoolStore):
    """Its `disk` is an `ObjectDisk`."""

    tier = "object"
    empties = False
    late = False  # objects are put whole
    _appends = 0  # objects of the own journal
    _doubtful = False  # a generation of it may yet be put

    @property
    def objects(self) -> ObjectDisk:
        assert isinstance(self.disk, ObjectDisk)
        return self.disk

    @property
    def unsaid_bytes(self) -> int:
        """Objects are charged to the byte, so nothing of a segment is left over for that."""
        return max(super().unsaid_bytes, self.capacity_bytes // _UNSAID_SHARE)

    def register(self) -> None:
        super().register()
        self._appends = 1

    def renew(self) -> None:
        """As the pool's. Raises OSError; then the next generation may still be put, and who goes on takes another name."""
        try:
            super().renew()
        except OSError:
            self._doubtful = True
            raise
        self._appends = 1

    def append(self, records: Sequence[Record]) -> None:
        super().append(records)
        self._appends += bool(records)

    def write_extent(
        self,
        image: Image,
        representation: Representation,
        added: ExtentAdded,
        *,
        attempt: Attempt,
        replacing: bool = False,
    ) -> ExtentName | None:
        """Put an extent's object and say so; None where there is no room. In turn. Raises OSError, StoreError, and then it is
        not stored, though an object may stand there that nobody speaks of."""
        self._require_registered()
        with self.lock:
            name = SegmentName(self.writer, self.books.next_sequence)
        header = SegmentHeader(name, 0, self.now_ms(), representation.encode(), representation.digest)
        end = header.header_bytes + added.extent_bytes
        if not self.room.may_open(end) and not (self.make_room(end) and self.room.may_open(end)):
            return None
        with self.lock:
            self.books.next_sequence += 1  # also when what follows fails: a name is used once
        header = replace(header, capacity_bytes=end)
        path = self.directory.segment_path(name)
        try:
            self.objects.put_segment(path, [encode_segment_header(header), *image])
            if attempt.given_up:
                raise OSError(errno.ETIMEDOUT, "the write took too long")
        except OSError:
            with suppress(OSError):
                self.disk.unlink(path)
            raise
        last_used = added.last_used or self.books.next_use()
        placed = replace(added, extent=ExtentName(name, header.header_bytes), last_used=last_used)
        self._say(header, placed)
        self.room.opened(end)
        self.counters.add("bytes_written", added.extent_bytes)
        return placed.extent

    def adopt(self, path: Path) -> Literal["adopted", "foreign", "strange"]:
        """Say of a segment that no journal speaks of what stands in it, read whole and verified; "strange" where that is not
        what its name says, or longer than anything that is written, "foreign" where its key is not known here: who has it may
        take it up. In turn. Raises OSError."""
        try:
            if self.objects.segment_bytes(path) > min(self.capacity_bytes // MOST_SHARE, _MOST_BYTES):
                self.counters.add("adopt_failed")
                return "strange"
            data = self.objects.get_segment(path)
            header = decode_segment_header(data)
            representation, image = Representation.decode(header.representation), data[header.header_bytes :]
            extent = examine(image, representation, self.sealing.at_the_door())
            added = record_of(image, extent, representation, Terms(extent.retention), steady_ms=self.steady_ms)
        except FileNotFoundError:
            return "strange"
        except (ExtentCorrupt, ValueError) as error:
            if isinstance(error, ExtentCorrupt) and error.facts.get("reason") == "key":
                self.counters.add("adopt_refused_key")
                return "foreign"
            self.counters.add("adopt_failed")
            return "strange"
        if header.segment.file != path.name or header.digest != representation.digest:
            return "strange"
        self._say(header, replace(added, extent=ExtentName(header.segment, header.header_bytes)))
        self.counters.add("segments_adopted")
        return "adopted"

    def _say(self, header: SegmentHeader, placed: ExtentAdded) -> None:
        """Journal a segment and the extent in it. Raises OSError; others may have seen it then, so the object stays."""
        records: list[Record] = [  # declared each time: the journal may be another one by now
            RepresentationDeclared(header.representation),
            SegmentOpened(header.segment, header.header_bytes, header.capacity_bytes, header.created_ms, header.digest),
            placed,
            SegmentSealed(header.segment, header.capacity_bytes),
        ]
        self.append(records)
        with self.lock:
            self.books.apply(records, own=True)

    def _require_registered(self) -> None:
        if not self._doubtful:
            super()._require_registered()
            return
        self.register()
        self._doubtful = False
        self.counters.add("registered_again")

    def _has_grown(self) -> bool:
        """A long journal is written anew, and read anew by all others, less often."""
        most = min(max(LEAST_APPENDS, self.books.snapshot_bytes() // _SNAPSHOT_BYTES), MOST_APPENDS)
        return self._appends >= most or super()._has_grown()

    def _files_of(self, disk: Disk, directory: Directory) -> SegmentFiles:
        assert isinstance(disk, ObjectDisk)
        return ObjectSegments(disk, directory)
