"""Segments in a bucket, opened without asking for them: a journal says that they are there and how long they are."""

from __future__ import annotations

from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Handle
from headstart.tier.disk.files import SegmentFiles
from headstart.tier.disk.table import Segment
from headstart.tier.object.object_disk import ObjectDisk


class ObjectSegments(SegmentFiles):
    """As files. What stands in an object is checked piece by piece when it is read; its header would cost a request of its own,
    and says no more than its name does."""

    def __init__(self, objects: ObjectDisk, directory: Directory) -> None:
        super().__init__(objects, directory)
        self._objects = objects
        self._names = directory

    def _open_checked(self, segment: Segment) -> Handle:
        return self._objects.open_segment(self._names.segment_path(segment.name), segment.end)
