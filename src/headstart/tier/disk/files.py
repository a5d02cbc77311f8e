"""Open segment files: each opened once, its header checked, kept open while somebody holds it and for a while after."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition

from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk, Handle, OpenMode
from headstart.tier.disk.pause import ONLY_READABLE
from headstart.tier.disk.records import SegmentName
from headstart.tier.disk.segment import SegmentHeader, decode_segment_header, encode_segment_header
from headstart.tier.disk.table import Segment

MAX_IDLE_FILES = 256
_SHARE_OF_FILES = 8  # such a part of the files that the process may have open is kept idle; a file has two descriptors


@dataclass(slots=True)
class _Open:
    handle: Handle
    holds: int = 0
    discarded: bool = False


class SegmentFiles:
    """Handles of segment files by name. A handle is never closed under somebody who holds it."""

    def __init__(self, disk: Disk, directory: Directory, *, max_idle: int = MAX_IDLE_FILES, mode: OpenMode = "write") -> None:
        self._mode: OpenMode = mode
        self._disk = disk
        self._directory = directory
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_idle = max_idle if allowed == resource.RLIM_INFINITY else min(max_idle, allowed // _SHARE_OF_FILES)
        self._closed = False
        self._changed = Condition()
        self._open: OrderedDict[SegmentName, _Open] = OrderedDict()  # longest unused first

    def hold(self, segment: Segment) -> Handle:
        """Return the segment's handle and keep it open until `let_go`. Raises OSError (ENOENT: the file is gone) or
        ExtentCorrupt(reason="segment-…") where the file is not the segment that the journals speak of."""
        with self._changed:
            if self._closed:
                raise StoreError("the disk tier is closed", reason="closed")
            opened = self._open.get(segment.name)
            if opened is not None:
                opened.holds += 1
                self._open.move_to_end(segment.name)
                return opened.handle
        return self._keep(segment.name, self._open_checked(segment))

    def hold_raw(self, segments: Iterable[Segment], descriptor_of: Callable[[Handle], int | None]) -> list[int] | None:
        """Hold each of `segments`, once, and return their descriptors. None, and nothing is held, where one cannot be held or
        has no descriptor: whoever reads it in another way meets that too, counts it and draws the consequences."""
        held: list[Segment] = []
        descriptors: list[int] = []
        try:
            for segment in segments:
                handle = self.hold(segment)
                held.append(segment)
                descriptor = descriptor_of(handle)
                if descriptor is None:
                    break
                descriptors.append(descriptor)
            else:
                return descriptors
        except (StoreError, OSError):
            pass
        for segment in held:
            self.let_go(segment)
        return None

    def hold_again(self, segment: Segment, times: int) -> bool:
        """Hold a handle that is held `times` more, until as many `let_go`. False: the tier closes, and nothing is held."""
        with self._changed:
            if not self._closed:
                self._open[segment.name].holds += times
            return not self._closed

    def let_go(self, segment: Segment, times: int = 1) -> None:
        with self._changed:
            opened = self._open[segment.name]
            opened.holds -= times
            closing = []
            if not opened.holds:
                self._changed.notify_all()
            if not opened.holds and opened.discarded:
                closing.append(self._open.pop(segment.name))
            elif len(self._open) > self._max_idle:
                idle = [name for name, o in self._open.items() if not o.holds][: len(self._open) - self._max_idle]
                closing += [self._open.pop(name) for name in idle]
        for one in closing:
            self._close(one.handle)

    @contextmanager
    def held(self, segment: Segment) -> Iterator[Handle]:
        handle = self.hold(segment)
        try:
            yield handle
        finally:
            self.let_go(segment)

    def create(self, header: SegmentHeader, *, sync: bool) -> Handle:
        """Create a segment file with its header and hold it. Raises OSError, leaving nothing behind."""
        path = self._directory.segment_path(header.segment)
        self._disk.make_directory(path.parent)
        handle = self._disk.open(path, "create", bulk=True)
        try:
            self._disk.write(handle, encode_segment_header(header), 0)
            if sync:
                self._disk.sync(handle)
                self._disk.sync_directory(path.parent)
                self._disk.sync_directory(path.parent.parent)
        except BaseException:
            with suppress(OSError):
                self._disk.unlink(path)
            self._disk.close(handle)
            raise
        return self._keep(header.segment, handle)

    def discard(self, segment: Segment) -> None:
        """Close the segment's file, now or when the last hold ends."""
        with self._changed:
            opened = self._open.get(segment.name)
            if opened is None:
                return
            opened.discarded = True
            if opened.holds:
                return
            del self._open[segment.name]
        self._close(opened.handle)

    def only_read(self) -> None:
        """Open files for reading from now on."""
        self._mode = "read"

    def close_idle(self) -> bool:
        """Close the files that nobody holds, and be told whether there were any."""
        with self._changed:
            idle = [name for name, opened in self._open.items() if not opened.holds]
            handles = [self._open.pop(name).handle for name in idle]
        for handle in handles:
            self._close(handle)
        return bool(handles)

    def close(self, timeout_s: float) -> bool:
        """Close every file, waiting for those that are held. False: some are held still and close when their holds end."""
        with self._changed:
            self._closed = True
            done = self._changed.wait_for(lambda: not any(o.holds for o in self._open.values()), timeout_s)
            closing = [name for name, o in self._open.items() if not o.holds]
            handles = [self._open.pop(name).handle for name in closing]
            for opened in self._open.values():
                opened.discarded = True
        for handle in handles:
            self._close(handle)
        return done

    def _keep(self, name: SegmentName, handle: Handle) -> Handle:
        with self._changed:
            opened = self._open.get(name)
            if opened is None:
                opened = self._open[name] = _Open(handle, discarded=self._closed)
            opened.holds += 1
        if opened.handle != handle:  # another thread opened it meanwhile
            self._close(handle)
        return opened.handle

    def _close(self, handle: Handle) -> None:
        with suppress(OSError):  # what was done with it is done
            self._disk.close(handle)

    def check(self, segment: Segment, path: Path) -> None:
        """Raise what `hold` would raise. Nothing is kept open, for when thousands are looked at. `path`: the segment's."""
        handle = self._disk.open(path, "read")
        self._close(self._checked(segment, handle))

    def _open_checked(self, segment: Segment) -> Handle:
        path = self._directory.segment_path(segment.name)
        try:
            handle = self._disk.open(path, self._mode, bulk=True)
        except OSError as error:
            if error.errno not in ONLY_READABLE:
                raise
            handle = self._disk.open(path, "read", bulk=True)
        return self._checked(segment, handle)

    def _checked(self, segment: Segment, handle: Handle) -> Handle:
        try:
            size = self._disk.facts(handle).size
            data = bytearray(min(segment.header_bytes, size))
            try:
                self._disk.read(handle, [memoryview(data)], 0)
            except StoreError as error:  # cut since its size was asked: whoever removes a file cuts it first
                raise ExtentCorrupt("a segment file ends inside its header", reason="truncated") from error
            header = decode_segment_header(memoryview(data))
            if (header.segment, header.digest) != (segment.name, segment.representation):
                raise ExtentCorrupt("a segment file is not the one that its name says", reason="segment-name")
        except BaseException:
            self._close(handle)
            raise
        return handle
