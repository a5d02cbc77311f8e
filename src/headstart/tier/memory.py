"""The memory tier: whole extent images, the same bytes as on a medium, in one arena of huge pages. Gone with the process.

The least recently used extent that no lease protects gives way first: what a class guarantees, pins and quotas are for tiers
that outlive the process, and here nothing is promised. Its bytes were sealed in this process and lie in this
process's memory, hence `trusted`: whoever loads from here need not verify them again.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from threading import Lock

import numpy as np

from headstart.block.checks import PLAIN
from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.representation import Representation
from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.tier.arena import ALIGNMENT, Arena, Region
from headstart.tier.base import (
    DEFAULT_TERMS,
    MOVED,
    Change,
    ExtentId,
    ExtentInfo,
    Gone,
    OnChange,
    Placement,
    Problem,
    ReadRange,
    Shape,
    Terms,
    TierStatistics,
    WriteOutcome,
)
from headstart.tier.index import PREFIX_BYTES

_REMOVALS_KEPT = 4096  # extents
_AHEAD_BYTES = 128 << 20  # that are ready for the next saves: 5,000 tokens of a small model
_TOUCHED_BYTES = 8 << 20  # of it in one step, some 10 ms
_POSITION_BITS = 24  # an index entry packs extent id and the block's place in it into one int


@dataclass(slots=True)
class _Extent:
    id: ExtentId
    representation: bytes
    keys: tuple[bytes, ...]
    header_bytes: int
    region: Region
    created_ms: int
    retention: str
    tenant: str
    parent: bytes
    last_used: int
    used_ms: int
    state: bool = False  # it ends with a boundary state
    leases: int = 0


class _Places:
    """Where the blocks of one representation lie: extent id and position, packed. A block that several extents hold is found in
    the one that came first; `states` are by the last key of the extents that carry one, first come first."""

    def __init__(self) -> None:
        self.found: dict[bytes, int] = {}
        self.again: dict[bytes, list[int]] = {}  # where else, in the order in which they came
        self.states: dict[bytes, list[ExtentId]] = {}

    def enter(self, extent: _Extent) -> None:
        for position, key in enumerate(extent.keys):
            packed = extent.id << _POSITION_BITS | position
            if self.found.setdefault(key, packed) != packed:
                self.again.setdefault(key, []).append(packed)
        if extent.state:
            self.states.setdefault(extent.keys[-1], []).append(extent.id)

    def leave(self, extent: _Extent) -> None:
        for position, key in enumerate(extent.keys):
            packed = extent.id << _POSITION_BITS | position
            others = self.again.get(key)
            if self.found[key] != packed:
                assert others is not None, "a block is found where it is, or it is there once more"
                others.remove(packed)
            elif others:
                self.found[key] = others.pop(0)
            else:
                del self.found[key]
            if others is not None and not others:
                del self.again[key]
        if extent.state:
            with_state = self.states[extent.keys[-1]]
            with_state.remove(extent.id)
            if not with_state:
                del self.states[extent.keys[-1]]

    def holds(self, keys: Sequence[bytes], *, state: bool) -> bool:
        return all(key in self.found for key in keys) and not (state and keys[-1] not in self.states)


class MemoryTier:
    """Extents in memory, at most `capacity_bytes` of them. See `Tier` for the verbs.

    One short lock guards the books; bytes are copied outside it, into and out of regions that are retained meanwhile."""

    name = "memory"
    trusted = True
    sealing = PLAIN
    in_memory = True

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < ALIGNMENT:
            raise ValueError(f"a memory tier of {capacity_bytes} bytes holds nothing; give at least {ALIGNMENT}")
        self._capacity_bytes = capacity_bytes
        # Not touched at start: gigabytes of page faults would delay it by seconds; `tend` does what is needed next.
        self._arena = Arena(capacity_bytes // ALIGNMENT * ALIGNMENT, name="memory tier")
        self._lock = Lock()
        self._closed = False
        self._extents: OrderedDict[ExtentId, _Extent] = OrderedDict()  # least recently used first
        self._places: dict[bytes, _Places] = {}  # by representation
        self._next_id = 0
        self._uses = 0
        self._leased_bytes = 0
        self._reserved_bytes = 0
        self._counters = Counters()
        self._on_change: OnChange | None = None
        self._removals: deque[tuple[Gone, bytes, tuple[bytes, ...]]] = deque(maxlen=_REMOVALS_KEPT)  # oldest first

    def max_extent_bytes(self, representation: Representation, *, state_bytes: int = 0) -> int:
        """Return the largest image that `write` takes."""
        return self._arena.capacity_bytes

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> Placement:
        with self._lock:
            places = self._places.get(representation, _NOWHERE)
            found = np.fromiter(map(places.found.get, keys, repeat(-1)), np.int64, len(keys))
            states = None
            if places.states:
                states = np.array([places.states.get(key, _NO_STATE)[0] for key in keys], np.int64)
        positions = np.where(found < 0, 0, found & ((1 << _POSITION_BITS) - 1)).astype(np.int32)
        return Placement(found >> _POSITION_BITS, positions, states)

    def info(self, extent: ExtentId) -> ExtentInfo | None:
        with self._lock:
            found = self._extents.get(extent)
            return None if found is None else _info(found)

    def shape(self, extent: ExtentId) -> Shape | None:
        with self._lock:
            found = self._extents.get(extent)
            return None if found is None else Shape(len(found.keys), found.header_bytes, found.region.nbytes)

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        with self._lock:
            found = [self._extents.get(extent) for extent in extents]
            for one in found:
                if one is not None:
                    one.leases += 1
                    if one.leases == 1:
                        self._leased_bytes += one.region.nbytes
            return [one is not None for one in found]

    def release(self, extents: Sequence[ExtentId]) -> None:
        with self._lock:
            for extent in extents:
                found = self._extents.get(extent)
                if found is None or found.leases == 0:
                    continue
                found.leases -= 1
                if found.leases == 0:
                    self._leased_bytes -= found.region.nbytes
                    if self._closed:
                        self._remove(found, "")

    def read(self, reads: Sequence[ReadRange]) -> int:
        total = 0
        for read in reads:
            with self._lock:
                found = self._extents.get(read.extent)
                if found is None:
                    raise StoreError(f"tier {self.name!r}: extent {read.extent} is gone", tier=self.name, extent=read.extent)
                region = found.region
                region.retain()
            try:
                total += _scatter(region, read)
            finally:
                region.release()
        self._counters.add("bytes_read", total)
        return total

    def write(self, image: memoryview, representation: Representation, *, terms: Terms = DEFAULT_TERMS) -> WriteOutcome:
        header = decode_header(image, representation)
        if image.nbytes > self._arena.capacity_bytes:
            return self._refused("too-large")
        with self._lock:
            if self._closed:
                return self._refused("stopped")
            if self._holds(header):
                return WriteOutcome(stored=True, reason="present")
            region = self._make_room(image.nbytes)
        if region is None:
            return self._refused("full")
        np.copyto(np.frombuffer(region.view, np.uint8), np.frombuffer(image, np.uint8))
        with self._lock:
            return self._enter(header, region, representation, terms)

    def reserve(self, nbytes: int) -> Region | None:
        """Return room for an image to be made in place, or None where there is none; `adopt` or `let_go` takes it back."""
        with self._lock:
            if self._closed or not 0 < nbytes <= self._arena.capacity_bytes:
                return None
            region = self._make_room(nbytes)
            if region is not None:
                self._reserved_bytes += region.nbytes
            return region

    def let_go(self, region: Region) -> None:
        """Give reserved room back."""
        with self._lock:
            self._reserved_bytes -= region.nbytes
        region.release()

    def adopt(self, region: Region, representation: Representation, *, terms: Terms = DEFAULT_TERMS) -> ExtentId | None:
        """Take a whole image in, in the reserved room that it was made in, under a lease for the caller; None where its blocks
        are here already or nothing is taken any more."""
        header = decode_header(region.view, representation)
        with self._lock:
            self._reserved_bytes -= region.nbytes
            if self._enter(header, region, representation, terms).reason != "written":
                return None
            extent = self._extents[ExtentId(self._next_id)]
            extent.leases = 1
            self._leased_bytes += region.nbytes
            return extent.id

    def keep(self, extents: Sequence[ExtentId], terms: Terms) -> None:
        """Promise nothing: it could not be kept beyond the process."""

    def pin(self, extents: Sequence[ExtentId], *, until_ms: int | None) -> list[bool]:
        return [False] * len(extents)

    def unpin(self, extents: Sequence[ExtentId]) -> None:
        """Nothing is ever pinned here."""

    def removed(self, representation: bytes, keys: Sequence[bytes], *, before_ms: int) -> list[Gone | None]:
        with self._lock:
            removals = [one for one in self._removals if one[1] == representation and one[0].time_ms <= before_ms]
        wanted = set(keys)
        gone: dict[bytes, Gone] = {}
        for how, _, those in removals:
            gone.update(dict.fromkeys(wanted.intersection(those), how))
        return [gone.get(key) for key in keys]

    def representations(self) -> list[bytes]:
        with self._lock:
            return list(self._places)

    def tend(self) -> bool:
        """Have the system clear what memory the next saves take now, not while the answers behind them are computed."""
        return self._arena.touch_ahead(_AHEAD_BYTES, at_once=_TOUCHED_BYTES)

    def watch(self, on_change: OnChange) -> None:
        with self._lock:
            self._on_change = on_change

    def touch(self, extents: Sequence[ExtentId]) -> None:
        with self._lock:
            for extent in reversed(extents):
                found = self._extents.get(extent)
                if found is not None:
                    self._uses += 1
                    found.last_used = self._uses
                    found.used_ms = _now_ms()
                    self._extents.move_to_end(extent)

    def delete(self, extents: Sequence[ExtentId], *, reason: str) -> int:
        with self._lock:
            found = [one for extent in dict.fromkeys(extents) if (one := self._extents.get(extent))]
            if reason != "corrupt":
                found = [one for one in found if not one.leases]
            for one in found:
                self._remove(one, reason)
        if found:
            self._counters.add(f"deleted_{reason}", len(found))
        return len(found)

    def scan(self) -> Iterator[ExtentInfo]:
        with self._lock:
            found = [_info(extent) for extent in self._extents.values()]
        return iter(found)

    def statistics(self) -> TierStatistics:
        with self._lock:
            return TierStatistics(
                name=self.name,
                capacity_bytes=self._capacity_bytes,
                allocated_bytes=self._arena.used_bytes,
                live_bytes=sum(extent.region.nbytes for extent in self._extents.values()),
                extents=len(self._extents),
                blocks=sum(len(extent.keys) for extent in self._extents.values()),
                counters=self._counters.snapshot(),
            )

    def check(self) -> list[Problem]:
        """Compare index, extents and arena. Only meaningful while nothing is being written or read."""
        problems = []
        with self._lock:
            for places in self._places.values():
                every = [*places.found.items(), *((key, packed) for key, some in places.again.items() for packed in some)]
                for key, packed in every:
                    extent = self._extents.get(ExtentId(packed >> _POSITION_BITS))
                    position = packed & ((1 << _POSITION_BITS) - 1)
                    if extent is None or position >= len(extent.keys) or extent.keys[position] != key:
                        problems.append(Problem(f"memory, block {key.hex()[:16]}", "the index points at an extent without it"))
                for key, with_state in ((key, one) for key, some in places.states.items() for one in some):
                    extent = self._extents.get(with_state)
                    if extent is None or not extent.state or extent.keys[-1] != key:
                        problems.append(Problem(f"memory, block {key.hex()[:16]}", "no state stands behind it"))
            held = sum(-(-extent.region.nbytes // ALIGNMENT) * ALIGNMENT for extent in self._extents.values())
            held += self._reserved_bytes
            if held != self._arena.used_bytes:
                problems.append(Problem("memory", f"extents hold {held} bytes, the arena counts {self._arena.used_bytes}"))
            leased = sum(extent.region.nbytes for extent in self._extents.values() if extent.leases)
            if leased != self._leased_bytes:
                problems.append(Problem("memory", f"{leased} bytes are under a lease, {self._leased_bytes} are counted"))
        return problems

    def close(self) -> None:
        """Take no more writes and forget what no lease holds. What is leased stays readable until it is released."""
        with self._lock:
            self._closed = True
            for extent in [extent for extent in self._extents.values() if not extent.leases]:
                self._remove(extent, "")
            self._arena.close()

    def __repr__(self) -> str:
        return f"<MemoryTier {self._arena.used_bytes} of {self._capacity_bytes} bytes used>"

    def _refused(self, reason: str) -> WriteOutcome:
        self._counters.add(f"write_failed_{reason}")
        return WriteOutcome(stored=False, reason=reason)

    def _enter(self, header: ExtentHeader, region: Region, representation: Representation, terms: Terms) -> WriteOutcome:
        """Take over a region with a whole image, unless a twin has overtaken it. Under the lock."""
        if self._closed or self._holds(header):
            region.release()
            return self._refused("stopped") if self._closed else WriteOutcome(stored=True, reason="present")
        self._next_id += 1
        self._uses += 1
        extent = _Extent(
            id=ExtentId(self._next_id),
            representation=header.representation,
            keys=header.keys,
            header_bytes=header.layout(representation).header_bytes,
            region=region,
            created_ms=header.created_ms,
            retention=terms.retention,
            tenant=terms.tenant,
            parent=header.parent[:PREFIX_BYTES],
            last_used=self._uses,
            used_ms=_now_ms(),
            state=header.state_bytes > 0,
        )
        self._extents[extent.id] = extent
        self._places.setdefault(extent.representation, _Places()).enter(extent)
        self._changed(extent, came=True)
        self._counters.add("bytes_written", region.nbytes)
        return WriteOutcome(stored=True, reason="written")

    def _holds(self, header: ExtentHeader) -> bool:
        return self._places.get(header.representation, _NOWHERE).holds(header.keys, state=header.state_bytes > 0)

    def _make_room(self, nbytes: int) -> Region | None:
        """Evict, oldest first, until `nbytes` lie free in one run; None, and nothing evicted, where leases leave too little."""
        if nbytes > self._arena.capacity_bytes - self._leased_bytes - self._reserved_bytes:
            return None
        region = self._arena.allocate(nbytes)
        if region is None:
            for extent in [extent for extent in self._extents.values() if not extent.leases]:
                self._remove(extent, "capacity")
                self._counters.add("evicted_capacity")
                region = self._arena.allocate(nbytes)
                if region is not None:
                    break
        return region

    def _remove(self, extent: _Extent, reason: str) -> None:
        del self._extents[extent.id]
        if not self._closed and reason != MOVED:
            self._removals.append((Gone(_now_ms(), reason), extent.representation, extent.keys))
        if extent.leases:
            self._leased_bytes -= extent.region.nbytes
        self._places[extent.representation].leave(extent)
        extent.region.release()
        self._changed(extent, came=False)

    def _changed(self, extent: _Extent, *, came: bool) -> None:
        if self._on_change is not None and not self._closed:
            self._on_change(Change(extent.representation, extent.keys, came))


_NOWHERE = _Places()
_NO_STATE = [ExtentId(-1)]


def _scatter(region: Region, read: ReadRange) -> int:
    nbytes = sum(buffer.nbytes for buffer in read.buffers)
    if read.offset < 0 or read.offset + nbytes > region.nbytes:
        raise StoreError(
            f"tier 'memory': bytes {read.offset} to {read.offset + nbytes} of an extent of {region.nbytes} were asked for",
            tier="memory",
            extent=read.extent,
        )
    source = np.frombuffer(region.view, np.uint8)
    at = read.offset
    for buffer in read.buffers:
        if buffer.nbytes:
            np.copyto(np.frombuffer(buffer, np.uint8), source[at : at + buffer.nbytes])  # without the GIL
            at += buffer.nbytes
    return nbytes


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _info(extent: _Extent) -> ExtentInfo:
    return ExtentInfo(
        id=extent.id,
        representation=extent.representation,
        keys=extent.keys,
        blocks=len(extent.keys),
        header_bytes=extent.header_bytes,
        extent_bytes=extent.region.nbytes,
        created_ms=extent.created_ms,
        last_used=extent.last_used,
        retention=extent.retention,
        tenant=extent.tenant,
        parent=extent.parent,
        state=extent.state,
        leased=extent.leases > 0,
        used_ms=extent.used_ms,
    )
