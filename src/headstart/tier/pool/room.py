"""How much of the pool is taken, and whether a writer may begin another segment: one capacity for all, without asking anybody.

A segment that is not sealed counts as full. So a writer needs room only when it begins one, and what others began since its
last look is all it can miss: together they pass the capacity by at most one segment each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headstart.block.representation import Representation
from headstart.tier.disk.records import SegmentName
from headstart.tier.disk.segment import ALIGNMENT, segment_capacity
from headstart.tier.disk.table import Segment

if TYPE_CHECKING:
    from headstart.tier.pool.store import PoolStore

_SILENT_BEATS = 12  # a writer that has said nothing for so long adds nothing either
MOST_SHARE = 8  # of the capacity a segment takes at most such a part
_LOOKS = 32


class Room:
    """Reckons with what the books say; no I/O but for looking whether files that hold nothing any more are gone."""

    def __init__(self, store: PoolStore) -> None:
        self._store = store
        self._window_ends = float("-inf")
        self._left_bytes = 0  # what may be begun until then, the last one whole
        self._dead_since: dict[SegmentName, float] = {}  # when it was first seen that nothing lives in them any more

    def taken_bytes(self) -> int:
        """Return what all files take."""
        with self._store.lock:
            return sum(s.end for s in self._segments()) + self._store.journals_bytes

    def reserved_bytes(self) -> int:
        """Return what they take if every segment that is not sealed becomes full."""
        with self._store.lock:
            return sum(map(reserved, self._segments())) + self._store.journals_bytes + self._store.unsaid_bytes

    def may_open(self, segment_bytes: int, *, replacing: bool = False) -> bool:
        """Whether a segment of that size may be begun now; where files are emptied, another one is left for what is written
        anew (`replacing`). Where others do so as well, what they do within the time that it takes to be seen must fit, too:
        each takes its share of what is left in such a window, but one at least."""
        needed = segment_bytes if replacing or not self._store.empties else 2 * segment_bytes
        if not self._fits(needed):
            self._forget_removed()
            if not self._fits(needed):
                return False
        store, now = self._store, self._store.clock()
        others = store.writers.writing(silent_s=_SILENT_BEATS * store.timing.beat_s)
        if replacing or not others:
            return True
        if now >= self._window_ends:
            free_bytes = store.capacity_bytes - self.reserved_bytes()
            self._left_bytes = max(segment_bytes, free_bytes // (2 * (1 + others)) // segment_bytes * segment_bytes)
            self._window_ends = now + 2 * store.timing.visible_s
        return self._left_bytes > 0

    def opened(self, segment_bytes: int) -> None:
        self._left_bytes -= segment_bytes

    def _fits(self, nbytes: int) -> bool:
        return self.reserved_bytes() + nbytes <= self._store.capacity_bytes

    def _segments(self) -> list[Segment]:
        return [s for s in self._store.books.segments.values() if s.opened and not s.gone]

    def note_dead(self, segments: Sequence[Segment], *, long_ago: bool = False) -> None:
        """Note in which sealed segments nothing lives now; `long_ago`: since when is not known. The store's lock is held."""
        since = float("-inf") if long_ago else self._store.clock()
        self._dead_since = {segment.name: self._dead_since.get(segment.name, since) for segment in segments}

    def _forget_removed(self) -> None:
        """Look whether segments in which nothing lives are gone: nobody says so. Only where the grace is over, the first ones
        first, some at once: where a look is a request, there are too many to ask for all of them at each write."""
        store, now, gone = self._store, self._store.clock(), list[Segment]()
        with store.lock:
            dead = [s for s in self._segments() if s.sealed and not s.rows]
            self.note_dead(dead)
            due = [s for s in dead if now - self._dead_since[s.name] >= store.timing.grace_s]
            due = sorted(due, key=lambda s: self._dead_since[s.name])[:_LOOKS]
        with suppress(OSError):
            for segment in due:
                try:
                    store.disk.stat(store.directory.segment_path(segment.name))
                except FileNotFoundError:
                    gone.append(segment)
                else:
                    self._dead_since[segment.name] = now - store.timing.grace_s + store.timing.collect_s
            store.lost(gone)


def pool_segment_capacity(representation: Representation, *, capacity_bytes: int) -> int:
    """Return the size of segments: as on a disk, but at most an eighth of the capacity, since several writers begin some
    each."""
    size = segment_capacity(representation, capacity_bytes=capacity_bytes)
    return min(size, capacity_bytes // MOST_SHARE // ALIGNMENT * ALIGNMENT)


def reserved(segment: Segment) -> int:
    """Return what a segment takes at most."""
    return segment.end if segment.sealed else max(segment.end, segment.capacity_bytes)
