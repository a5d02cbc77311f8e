"""What the object tier's tests share: a bucket in memory, and machines on it with clocks that stand still until they are told.

The bucket is obstore's own, so keys, ranges, listings and conditional puts are the library's; only the network is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import obstore.store
import pool_kit

from headstart.metrics import Counters
from headstart.tier.object import Bucket, ObjectTier
from headstart.tier.pool import Timing

CAPACITY = 8 << 20
NO_GRACE = Timing(grace_s=0.0, collect_s=0.2)


def bucket_over(store: obstore.store.MemoryStore) -> Bucket:
    return Bucket(store, where="bucket/prefix", counters=Counters())


class Machine(pool_kit.Machine):
    """As a pool's."""

    def __init__(
        self, store: obstore.store.MemoryStore, *, ahead_s: float = 0.0, bucket: Bucket | None = None, **options: Any
    ) -> None:
        self.clock = pool_kit.Clock(5000.0 + 3 * ahead_s)
        self.wall = pool_kit.Clock(1.9e9 + ahead_s)
        self.bucket = bucket_over(store) if bucket is None else bucket
        settings: dict[str, Any] = {"capacity_bytes": CAPACITY, "timing": pool_kit.TIMING} | options
        self.tier = ObjectTier.open_bucket(self.bucket, clock=self.clock, wall_clock=self.wall, background=False, **settings)


class FaultyBucket(Bucket):
    """Fails as a service does: `fault(verb)` says what is raised before a call, or, for "late", after it had its effect."""

    def __init__(self, store: obstore.store.MemoryStore) -> None:
        super().__init__(store, where="bucket/prefix", counters=Counters())
        self.faults: dict[str, OSError] = {}
        self.late = False

    def _fail(self, verb: str) -> None:
        if verb in self.faults:
            self.counters.add("object_request_failed")
            raise self.faults[verb]

    def _put(self, key: str, data: Any, **how: Any) -> None:
        verb = "put journal" if key.startswith("journals/") else "put"
        if not self.late:
            self._fail(verb)
        super()._put(key, data, **how)
        self._fail(verb)

    def create(self, key: str, data: bytes) -> None:
        self._fail("create")
        super().create(key, data)

    def get(self, key: str) -> memoryview:
        self._fail("read" if key.startswith("segments/") else "get")
        return super().get(key)

    def read(self, key: str, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail("read")
        return super().read(key, buffers, offset)

    def stream(self, key: str, offset: int, nbytes: int, *, at_once: bool) -> Iterator[bytes | memoryview]:
        self._fail("read")
        return super().stream(key, offset, nbytes, at_once=at_once)

    def sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        self._fail("list")
        return super().sizes(folder)
