"""Reads from a bucket: as from a pool, and as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headstart.tier.base import ExtentId
from headstart.tier.pool.reading import PoolReading

if TYPE_CHECKING:
    from headstart.tier.object.store import ObjectStore


class ObjectReading(PoolReading):
    """Safe from many threads."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self._objects = store.objects

    def stream(self, extent: ExtentId, offset: int, nbytes: int) -> Iterator[bytes | memoryview]:
        """Ask for a part of a leased extent at once and yield its bytes, for as long as the lease holds: as they come where the
        extent begins, with what is waited for first, and elsewhere when all of them are there, which costs less. Nothing is
        tried twice, and no conclusion is drawn from what fails: `read` does both."""
        held = self._held_for(extent, offset, nbytes)
        with self._store.files.held(held.segment) as handle:
            for chunk in self._objects.stream_segment(handle, held.offset + offset, nbytes, at_once=offset > 0):
                self._require_time(held, extent)
                self._store.counters.add("bytes_read", len(chunk))
                yield chunk
