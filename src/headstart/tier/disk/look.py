"""A cache directory looked at from outside: what its journals say, and its extents' bytes. Nothing in it is changed.

Not a file is created, renewed or taken over, so it works beside any number of writers, on a read-only file system, and for a
directory whose writers are all dead. A reader's lock on an extent's bytes is all that others can notice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headstart.block.checks import PLAIN, Sealing
from headstart.block.representation import Representation
from headstart.block.whole import aligned
from headstart.errors import ExtentCorrupt, StoreError
from headstart.policy.retention import Retention
from headstart.tier.base import ExtentId, ExtentInfo
from headstart.tier.columns import ExtentColumns
from headstart.tier.disk.books import Books, Removal
from headstart.tier.disk.directory import FEATURES, POOL, Directory
from headstart.tier.disk.door import Disk, RealDisk
from headstart.tier.disk.files import SegmentFiles
from headstart.tier.disk.follow import follow_all
from headstart.tier.surveying import Survey

_PART_BYTES = 8 << 20


class Look:
    """Use as a context manager. Not safe from many threads."""

    def __init__(
        self,
        root: Path,
        *,
        retention: Retention | None = None,
        disk: Disk | None = None,
        pool: bool = False,
        sealing: Sealing = PLAIN,
    ) -> None:
        """Read what is there. `retention`: what classes promise. `pool`: it is one that many machines share. `sealing`: whose
        checks are believed. Raises NotThere, FormatMismatch, TierUnavailable, OSError."""
        self.root = root
        self.sealing = sealing
        self._disk = RealDisk() if disk is None else disk
        self.pool = pool
        self._directory = Directory(self._disk, root, features=frozenset({POOL}) if pool else FEATURES)
        self._directory.require()
        self._books = Books(retention=retention, key_ids=sealing.key_ids)
        self._others = follow_all(self._disk, self._directory, self._books)
        self._files = SegmentFiles(self._disk, self._directory, mode="read")
        self._charged = 0
        self._unexplained = 0
        try:
            self._compare()
        except BaseException:
            self.close()
            raise

    @property
    def incomplete(self) -> bool:
        """Whether a journal cannot be read to its end, so that there may be more than is seen."""
        return self._others.incomplete

    @property
    def charged_bytes(self) -> int:
        """What the file system charged for the directory's files when they were looked at."""
        return self._charged

    @property
    def unexplained_files(self) -> int:
        """Segment files that no journal speaks of; the next opening by a writer takes them in or removes them."""
        return self._unexplained

    @property
    def segments(self) -> int:
        return sum(segment.opened and not segment.gone for segment in self._books.segments.values())

    def extents(self, some: npt.NDArray[np.int64] | None = None) -> list[ExtentInfo]:
        """Return all extents, or those that have these places among all."""
        rows = self._books.living()
        return self._books.infos(rows if some is None else rows[some])

    def columns(self) -> ExtentColumns:
        """Return what prefixes are made of, of all extents."""
        return self._books.columns(self._books.living())

    def survey(self, *, now_ms: int) -> Survey:
        """Return what rules may ask of all extents."""
        return self._books.survey(self._books.living(), "pool" if self.pool else "disk", now_ms=now_ms)

    def removals(self) -> list[Removal]:
        """Return the latest removals that are remembered, oldest first."""
        return sorted(self._books.removals, key=lambda removal: removal.time_ms)

    def representation(self, digest: bytes) -> Representation | None:
        """Return what is stored under that digest; None where no journal declares it, or in a way that this version refuses."""
        with suppress(KeyError, ExtentCorrupt):
            return Representation.decode(self._books.representations[digest])
        return None

    def where(self, extent: ExtentId) -> tuple[Path, int] | None:
        """Return an extent's file and offset."""
        row = self._books.row(extent)
        if row is None:
            return None
        segment, offset, _ = self._books.place(row)
        return self._directory.segment_path(segment.name), offset

    def read(self, extent: ExtentId, *, on_bytes: Callable[[int], None] = lambda nbytes: None) -> memoryview | None:
        """Return the whole image of an extent as it lies there, not verified; None where it was removed meanwhile. `on_bytes`
        is told of every part that was read, and may take its time. Raises ExtentCorrupt where the file is not what it should
        be or ends too early, OSError where it cannot be read."""
        row = self._books.row(extent)
        if row is None:
            return None
        segment, offset, nbytes = self._books.place(row)
        try:
            handle = self._files.hold(segment)
        except FileNotFoundError:
            return None
        try:
            if not self._disk.lock_range(handle, offset, nbytes, exclusive=False):
                return None  # somebody is removing it
            try:
                # It may have been removed before its bytes were locked; then a journal says so by now.
                self._books.apply(self._others.poll(), own=False)
                self._books.apply(self._others.look_for_new(), own=False)
                if self._books.row(extent) is None or not self._disk.facts(handle).links:
                    return None
                image = aligned(nbytes)
                for at in range(0, nbytes, _PART_BYTES):
                    part = image[at : at + _PART_BYTES]
                    self._disk.read(handle, [part], offset + at)
                    on_bytes(part.nbytes)
                return image
            except StoreError as error:
                if error.facts.get("reason") != "short-read":
                    raise
                raise ExtentCorrupt(f"{self._directory.segment_path(segment.name)}: {error}", reason="short-read") from error
            finally:
                with suppress(OSError):
                    self._disk.unlock_range(handle, offset, nbytes)
        finally:
            self._files.let_go(segment)

    def close(self) -> None:
        self._files.close(0)
        self._others.close()

    def __enter__(self) -> Look:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compare(self) -> None:
        """Forget what journals say of files that are gone, and count what is charged."""
        there = self._directory.list_segments()
        for segment in list(self._books.segments.values()):
            if segment.opened and segment.name not in there:
                self._books.forget_segment(segment)
        for name in there:
            with suppress(FileNotFoundError):
                self._charged += self._disk.stat(self._directory.segment_path(name)).allocated_bytes
        known = {segment.name for segment in self._books.segments.values() if segment.opened}
        self._unexplained = len(there - known)
        self._charged += self._others.allocated_bytes + 4096  # the marker
