"""The door that every tier implements: immutable extents, found by (representation, key), read by range, written once.

A tier knows nothing of prefixes, engines or verification. It says where blocks lie, protects extents under a lease from
eviction, and moves bytes. All verbs are safe from many threads. Lookups and reads wait for no lock that is held across I/O;
writers of one tier may take turns.

Faults: verbs raise StoreError or OSError and nothing else; what fails for one extent in `lease` is that extent's False.
Whoever calls (the cache) turns them into a miss and a counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from headstart.block.representation import Representation

ExtentId = NewType("ExtentId", int)  # names one extent in one tier of this process; never reused while it lives


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each asked key lies: `extents[i]` is an ExtentId or -1 where absent, `positions[i]` the block's place in it."""

    extents: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """What a tier remembers of one extent."""

    id: ExtentId
    representation: bytes
    keys: tuple[bytes, ...]  # full keys where known cheaply, else the 16-byte prefixes that the index holds
    blocks: int
    header_bytes: int
    extent_bytes: int
    created_ms: int
    last_used: int  # value of the persisted counter, not a time
    retention: str


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Read from byte `offset` of an extent's image into `buffers`, in order and completely."""

    extent: ExtentId
    offset: int
    buffers: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """`stored`: the extent is in the tier after the call. `reason`: "written", "present" (already there), or why not: "full",
    "too-large", "stopped", "error"."""

    stored: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TierStatistics:
    name: str
    capacity_bytes: int
    allocated_bytes: int  # what the medium charges
    live_bytes: int
    extents: int
    blocks: int
    counters: dict[str, int]  # e.g. bytes_read, bytes_written, evicted_<reason>, quarantined_<reason>, write_failed_<reason>


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that `check` found wrong: where, and what."""

    where: str
    what: str


class Tier(Protocol):
    name: str
    trusted: bool  # bytes come from this process's own memory and need no verification

    def max_extent_bytes(self, representation: Representation) -> int:
        """Return the largest image that `write` takes."""
        ...

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> Placement:
        """Return where each key lies. Does not extend any block's life."""
        ...

    def info(self, extent: ExtentId) -> ExtentInfo | None: ...

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        """Protect extents from eviction; False for those that are gone. Counted: each True needs one release."""
        ...

    def release(self, extents: Sequence[ExtentId]) -> None: ...

    def read(self, reads: Sequence[ReadRange]) -> int:
        """Fill every buffer or raise; returns bytes read. The extents must be under a lease."""
        ...

    def write(self, image: memoryview, representation: Representation, *, retention: str = "default") -> WriteOutcome:
        """Put an extent's image (see block.extent; 4 KiB-aligned length) if any of its blocks is absent. When it returns
        stored=True under durability="data", the extent survives a power loss."""
        ...

    def touch(self, extents: Sequence[ExtentId]) -> None:
        """Note a use, in the order given: the first one given ends up the most recently used (heads outlive tails)."""
        ...

    def delete(self, extents: Sequence[ExtentId], *, reason: str) -> int:
        """Remove extents that are not under a lease; returns how many. `reason` is kept: "corrupt", "expired", "user" …

        What is "corrupt" goes even under a lease: from now on it is not found and not read, so that its blocks can be written
        anew at once; only its space may wait for the last release."""
        ...

    def scan(self) -> Iterator[ExtentInfo]: ...

    def statistics(self) -> TierStatistics: ...

    def check(self) -> list[Problem]:
        """Compare the books with the medium. Empty when all is well."""
        ...

    def close(self) -> None:
        """Flush what is pending and let go. Twice is fine."""
        ...
