"""The object tier: a bucket of an object store behind the verbs of `tier.base`.

It is a pool whose files are objects (`object_disk`): the same journals, leases as time, tombstones, grace and collector.
Lookups and leases are in memory; following all writers is one listing every `look_s`; a read is one request for a part of an
object, or for all of it where that takes no longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from headstart.block.checks import PLAIN, Sealing
from headstart.block.extent import decode_header
from headstart.block.representation import Representation
from headstart.errors import TierUnavailable
from headstart.metrics import Counters
from headstart.policy.retention import Retention
from headstart.tier.base import ExtentId, WriteOutcome
from headstart.tier.base import Terms as SaveTerms
from headstart.tier.disk.directory import OBJECTS, Directory
from headstart.tier.disk.new_record import UNPLACED
from headstart.tier.disk.segment import ALIGNMENT, SegmentHeader
from headstart.tier.disk.tier import MIN_CAPACITY_BYTES
from headstart.tier.object.bucket import SLOWEST_BYTES_S, Bucket
from headstart.tier.object.collecting import Appointed, ObjectCollector
from headstart.tier.object.joining import firmest, groups_of, joined
from headstart.tier.object.object_disk import ObjectDisk
from headstart.tier.object.reading import ObjectReading
from headstart.tier.object.store import MOST_SHARE, ObjectStore
from headstart.tier.pool.terms import Election, Terms
from headstart.tier.pool.tier import PoolTier
from headstart.tier.pool.timing import Timing

# Services show at once what was put. Every look is a request, every beat an object.
TIMING = Timing(look_s=0.5, silent_s=15.0, beat_s=15.0, term_s=60.0, collect_s=5.0, list_s=600.0, verify_s=600.0)

_LARGEST_BYTES, _LARGEST_STATE_BYTES = 64 << 20, 256 << 20
_BLOCKS = 16


class ObjectTier(PoolTier):
    """Use `ObjectTier.open_bucket`. Safe from many threads; any number of processes, anywhere, may have it open."""

    name = "object"
    _called, _medium = "object store", "service"
    _slowest_bytes_s = SLOWEST_BYTES_S
    _opens_within = 2  # every extent is a segment, with records of its own
    _to_make, _to_mend = "make the bucket", "look after its endpoint and the network"
    _store: ObjectStore
    _bucket: Bucket

    def __init__(self, store: ObjectStore, terms: Election, collector: ObjectCollector) -> None:
        super().__init__(store, terms, collector)
        self._reading: ObjectReading = ObjectReading(store)

    @classmethod
    def open_bucket(
        cls,
        where: str | Bucket,
        *,
        capacity_bytes: int,
        timing: Timing = TIMING,
        read_only: bool = False,
        collects: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        retention: Retention | None = None,
        sealing: Sealing = PLAIN,
        background: bool = True,
    ) -> ObjectTier:
        """Open what a bucket, or a prefix in one, holds, or begin it there. `where`: a URL as `Bucket.open` takes it.
        `collects`: whether this process is the collector; None: whoever is elected. `sealing`, `background`: as for
        `PoolTier.open`.
        Raises TierUnavailable, FormatMismatch, ConfigError, MissingExtra."""
        if capacity_bytes < MIN_CAPACITY_BYTES:
            raise ValueError(f"an object store of {capacity_bytes} bytes holds nothing; give at least {MIN_CAPACITY_BYTES}")
        counters = where.counters if isinstance(where, Bucket) else Counters()
        bucket = where if isinstance(where, Bucket) else Bucket.open(where, counters=counters, answer_s=timing.answer_s)
        root = Path(bucket.where)
        disk = ObjectDisk(bucket, root)
        directory = Directory(disk, root, features=frozenset({OBJECTS}))
        store = ObjectStore(
            disk,
            directory,
            capacity_bytes=capacity_bytes,
            timing=timing,
            clock=clock,
            wall_clock=wall_clock,
            counters=counters,
            retention=Retention() if retention is None else retention,
            read_only=read_only,
            sealing=sealing,
        )
        election: Election
        if collects is None:
            election = Terms(disk, directory, silent_s=store.writers.silent_s, term_s=timing.term_s, clock=clock)
        else:
            election = Appointed(collects)
        tier = cls(store, election, ObjectCollector(store, election))
        tier._bucket = bucket
        tier._begin(background=background)
        return tier

    @property
    def request_bytes(self) -> int:
        """See `FarTier`."""
        return self._store.objects.fetching.request_bytes

    @property
    def gap_bytes(self) -> int:
        """See `FarTier`."""
        return self._store.objects.fetching.gap_bytes

    def stream(self, extent: ExtentId, offset: int, nbytes: int) -> Iterator[bytes | memoryview]:
        """See `FarTier`."""
        self._require_open()
        return self._reading.stream(extent, offset, nbytes)

    def max_extent_bytes(self, representation: Representation, *, state_bytes: int = 0) -> int:
        """Return the largest image that `write` takes: one that is put in some parts, or what sixteen blocks take."""
        most = max(_LARGEST_BYTES, _BLOCKS * 64 * (representation.bytes_per_token or 0) + 64 * ALIGNMENT)
        if representation.bytes_per_token is None or representation.state != "none":
            most = max(most, _LARGEST_STATE_BYTES)
        most = min(most, self._store.capacity_bytes // MOST_SHARE) // ALIGNMENT * ALIGNMENT
        return most - SegmentHeader(UNPLACED.segment, 0, 0, representation.encode(), representation.digest).header_bytes

    def write_all(
        self, images: Sequence[memoryview], representation: Representation, *, terms: Sequence[SaveTerms]
    ) -> list[WriteOutcome]:
        """As `write` for several, those that continue each other as one object. Where one is not stored, none behind it is told
        of."""
        headers = [decode_header(image, representation, self.sealing.at_the_door()) for image in images]
        outcomes: list[WriteOutcome | None] = [None] * len(images)
        outcome = WriteOutcome(stored=True, reason="present")
        for group in groups_of(images, headers, terms, most_bytes=self.max_extent_bytes(representation)):
            image = images[group[0]]
            if len(group) > 1:
                image = joined([images[i] for i in group], [headers[i] for i in group], representation)
            outcome = self.write(image, representation, terms=firmest([terms[i] for i in group]))
            for number in group:
                outcomes[number] = outcome
            if not outcome.stored:
                break
            if len(group) > 1 and outcome.reason == "written":
                self._counters.add("joined_extents", len(group))
                self._counters.add("joined_bytes", image.nbytes)
        stored = [one for one in takewhile(lambda one: one is not None and one.stored, outcomes) if one is not None]
        # One that was not tried is not there either, for the reason that stopped those before it, wherever they stood.
        return stored if len(stored) == len(images) else [*stored, outcome]

    def close(self) -> None:
        super().close()
        self._bucket.close()

    def _unavailable(self, error: OSError) -> TierUnavailable:
        why = error.strerror or "an error without a number"
        return TierUnavailable(
            f"object store {self.path} cannot be used ({why}); look after the bucket, and after endpoint, region and "
            "credentials in the environment",
            tier=self.name,
            path=self.path,
            errno=error.errno,
        )
