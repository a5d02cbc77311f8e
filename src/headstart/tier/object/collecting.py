"""The collector of an object tier: as a pool's, but space comes back extent by extent, and who collects may be configured."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headstart.policy.eviction import Emptying, choose_victims
from headstart.tier.disk.directory import Listing
from headstart.tier.disk.evicting import Weighed
from headstart.tier.disk.table import Segment
from headstart.tier.object.store import ObjectStore
from headstart.tier.pool.collecting import Collector
from headstart.tier.pool.store import PoolStore
from headstart.tier.pool.terms import Election

_SHARE = 64  # such a part of the capacity is freed at once: a full bucket does not choose anew for every extent
_ADOPTING_S = 5.0

log = logging.getLogger(__name__)


class Appointed:
    """Who collects where that is configured instead of elected, because the service has no conditional puts."""

    def __init__(self, collects: bool) -> None:
        self._collects = collects

    def prepare(self) -> None:
        pass

    def hold(self, writer: bytes) -> bool:
        return self._collects

    def resign(self, writer: bytes) -> None:
        pass


class ObjectCollector(Collector):
    """Removes the least worthy extents themselves: each is an object."""

    _said = False
    _adopt_until = 0.0

    def __init__(self, store: PoolStore, terms: Election) -> None:
        super().__init__(store, terms)
        self._foreign: set[Path] = set()  # segments whose key is not known here: not fetched again

    @property
    def _objects_store(self) -> ObjectStore:
        assert isinstance(self._store, ObjectStore)
        return self._store

    def _elected(self) -> bool:
        try:
            return super()._elected()
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
        self.holds = False
        if not self._said:
            self._said = True
            log.warning(
                "object store %s has no conditional put (If-None-Match), so nobody can be elected to collect; say "
                'cache.object_collects = "yes" on one machine and "no" on the others',
                self._store.directory.root,
            )
        return False

    def _tidy(self, listing: Listing) -> None:
        self._adopt_until = self._store.clock() + _ADOPTING_S
        super()._tidy(listing)
        self._foreign.intersection_update(self._unknown_since)  # not those that are gone

    def _end_unexplained(self, path: Path) -> None:
        """A segment that no journal speaks of is whole, as it was put: it is taken up again, unless it is no segment."""
        store = self._objects_store
        if path in self._foreign:
            return
        if path.suffix == ".seg":
            if store.clock() > self._adopt_until:
                self._list_due = store.clock()  # the others next time, so that nobody waits for long
                return
            became = store.adopt(path)
            if became == "foreign":
                self._foreign.add(path)
            if became != "strange":
                return
        super()._end_unexplained(path)

    def _unreadable(self) -> Sequence[Path]:
        return self._objects_store.objects.headless_journals()

    def _unlink(self, segments: Sequence[Segment]) -> None:
        """Delete them with a request for a thousand: whoever follows waits for it."""
        store = self._objects_store
        try:
            store.objects.delete_segments([store.directory.segment_path(segment.name) for segment in segments])
        except OSError:
            store.counters.add("unlink_failed")
            return
        store.forget(segments)
        store.counters.add("segments_collected", len(segments))

    def _choose(self, weighed: Weighed, needed_bytes: int) -> tuple[list[Segment], Emptying | None]:
        segments = [self._store.books.numbered(int(number)) for number in np.unique(weighed.segments)]
        going = choose_victims(
            worth=weighed.worth,
            nbytes=weighed.nbytes,
            needed_bytes=needed_bytes,
            wanted_bytes=self._store.capacity_bytes // _SHARE,
        )
        return segments, Emptying(gone=going, carried=np.empty(0, np.int64)) if len(going) else None
