"""The door that every tier implements: immutable extents, found by (representation, key), read by range, written once.

A tier knows nothing of prefixes, engines or verification. It says where blocks lie, protects extents under a lease from
eviction, and moves bytes. All verbs are safe from many threads. Lookups and reads wait for no lock that is held across I/O;
writers of one tier may take turns.

Faults: verbs raise StoreError or OSError and nothing else; what fails for one extent in `lease` is that extent's False.
Whoever calls (the cache) turns them into a miss and a counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from headstart.block.checks import Sealing
from headstart.block.representation import Representation

MOVED = "moved"  # why an extent is removed that lies elsewhere now: its blocks are not gone
ExtentId = NewType("ExtentId", int)  # names one extent in one tier of this process; never reused while it lives


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each asked key lies: `extents[i]` is an ExtentId or -1 where absent, `positions[i]` the block's place in it.
    `states[i]`: an extent that ends with that block and carries a boundary state, -1 where none does; it need not be the one
    that the block is found in. None: no block of this representation ends with a state."""

    extents: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    states: npt.NDArray[np.int64] | None = None

    def holds(self, *, state: bool) -> bool:
        """Whether all keys are there, and, with `state`, a boundary state behind the last one."""
        there = bool((self.extents >= 0).all())
        return there and not (state and (self.states is None or self.states[-1] < 0))

    def ids(self) -> list[ExtentId]:
        """Return the extents that the keys are found in, in their order, and the one with the last one's state."""
        found = self.extents.tolist() + ([] if self.states is None else self.states[-1:].tolist())
        return [ExtentId(extent) for extent in dict.fromkeys(found) if extent >= 0]


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms something is kept. `retention`: a class of 1 to 64 printable bytes, which promises a time and may set a
    ceiling (`policy.retention`). `tenant`: whose quota it counts towards, at most 255 bytes in UTF-8; "" where there are no
    tenants. `session`: the conversation it belongs to, "" where unknown; only ever compared for equality. `keep_s`: seconds
    that are promised at least, where the class promises less; its ceiling holds all the same. Raises ValueError for a tenant, a
    session or a time that can be none: whoever writes, in another thread, could tell nobody."""

    retention: str = "default"
    tenant: str = ""
    session: str = ""
    keep_s: float = 0.0

    def __post_init__(self) -> None:
        for what, name in (("tenant", self.tenant), ("session", self.session)):
            if not isinstance(name, str):
                raise ValueError(f"a {what} is given as {type(name).__name__}; give text")
        encoded = self.tenant.encode("utf-8", "surrogatepass")
        if len(encoded) > _MAX_TENANT_BYTES or encoded.decode("utf-8", "replace") != self.tenant:  # a lone surrogate
            raise ValueError(f"tenant {self.tenant[:40]!r} is no name of at most {_MAX_TENANT_BYTES} bytes in UTF-8")
        if not 0 <= self.keep_s < float("inf"):
            raise ValueError(f"keep_s is {self.keep_s}; promise 0 seconds or more, and an end")


_MAX_TENANT_BYTES = 255
DEFAULT_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """What a tier remembers of one extent. Times are milliseconds since 1970, for people and for promises; order is
    `last_used`. `guaranteed_until_ms`: until then it is not evicted while anything else may go. `expires_ms`: when it goes
    whether or not there is room, unless what continues it is younger; None: never. `pinned_until_ms`: None where it is not
    pinned."""

    id: ExtentId
    representation: bytes
    keys: tuple[bytes, ...]  # full keys where known cheaply, else the 16-byte prefixes that the index holds
    blocks: int
    header_bytes: int
    extent_bytes: int
    created_ms: int
    last_used: int  # value of the persisted counter, not a time
    retention: str
    tenant: str = ""
    parent: bytes = b""  # first 16 bytes of the key before the first block, or of the root
    guaranteed_until_ms: int = 0
    expires_ms: int | None = None
    pinned_until_ms: int | None = None
    state: bool = False  # it ends with a boundary state
    leased: bool = False  # by this process
    used_ms: int | None = None  # when it was used last, about, and not later than that; None where that is not known
    where: str = ""  # the place in words: a file of the tier and an offset; "" in memory
    check_key: int = 0  # which key its checks were made with; 0: none


@dataclass(frozen=True, slots=True)
class Shape:
    """How large an extent is and its header, as the tier remembers it: what is known before anything is read."""

    blocks: int
    header_bytes: int
    extent_bytes: int


@dataclass(frozen=True, slots=True)
class ReadRange:
    """Read from byte `offset` of an extent's image into `buffers`, in order and completely."""

    extent: ExtentId
    offset: int
    buffers: Sequence[memoryview]


@dataclass(frozen=True, slots=True, eq=False)
class RawExtents:
    """Extents in their files, which are held open until the tier's `let_go_raw`: entry i of a column is extent i's.
    `descriptors` bypass the page cache. `until_s`: by `time.monotonic`; what is read later is asked for through `read`."""

    descriptors: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    extent_bytes: npt.NDArray[np.int64]
    header_bytes: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    files: object  # the tier's own
    until_s: float = math.inf


class RawTier(Protocol):
    """A tier whose extents may also be read straight from their files."""

    def raw(self, extents: Sequence[ExtentId]) -> RawExtents | None:
        """Return where leased extents of one lane lie and hold their files open, or None where only `read` may read one of
        them. Never raises."""
        ...

    def let_go_raw(self, raw: RawExtents, *, bytes_read: int) -> None: ...


@runtime_checkable
class LanedTier(Protocol):
    """A tier on several devices."""

    @property
    def lanes(self) -> int:
        """How many devices take writes now."""
        ...

    def lane(self, extent: ExtentId) -> int:
        """Return a number for the device that an extent is read from: each is given reading threads of its own."""
        ...


@runtime_checkable
class FarTier(Protocol):
    """A tier where every request takes long, whatever it brings."""

    @property
    def request_bytes(self) -> int:
        """How much is asked for at once at most, as far as is known now."""
        ...

    @property
    def gap_bytes(self) -> int:
        """How many bytes come in no more time than another request takes."""
        ...

    def stream(self, extent: ExtentId, offset: int, nbytes: int) -> Iterator[bytes | memoryview]:
        """Ask for a part of a leased extent's image at once and yield its bytes, in order, as they come or many at
        once. Raises what `read` does, also in between."""
        ...


@runtime_checkable
class KeyedTier(Protocol):
    """A tier where others write as well, with keys of their own."""

    def hidden_since(self, representation: bytes, keys: Sequence[bytes]) -> list[int | None]:
        """Return for each key when the block came, in milliseconds since 1970, if it lies here with checks that are not
        believed, and so is not found; None if it does not."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks of one extent that came or went: `keys` as in `ExtentInfo`."""

    representation: bytes
    keys: Sequence[bytes]
    came: bool


OnChange = Callable[[Change | None], None]


@dataclass(frozen=True, slots=True)
class Gone:
    """That a block was taken away, in milliseconds since 1970, and why: as `delete` was told, or "capacity", "full", "min-free"
    (room was needed), "quota", "expired", "corrupt"."""

    time_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """`stored`: the extent is in the tier after the call. `reason`: "written", "present" (already there), or why not: "full",
    "too-large", "stopped", "error", "quota" (the tenant's other extents may not go), "budget" (not worth today's writes)."""

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
    written_day_bytes: int = 0  # of what is there, how much was written in the last 24 hours, by whatever process
    paused: str = ""  # why nothing is stored now; "" while it is
    live_bytes_by_class: dict[str, int] = field(default_factory=dict)
    live_bytes_by_tenant: dict[str, int] = field(default_factory=dict)
    devices: tuple[TierStatistics, ...] = ()  # where a tier lies on several, each of them, also one that is not there


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that `check` found wrong: where, and what."""

    where: str
    what: str


class Tier(Protocol):
    name: str
    trusted: bool  # bytes come from this process's own memory and need no verification
    in_memory: bool  # they lie in this machine's memory: no medium to wait for, to wear out or to bring them from
    sealing: Sealing  # whose checks are believed of what lies there

    def max_extent_bytes(self, representation: Representation, *, state_bytes: int = 0) -> int:
        """Return the largest image that `write` takes, given how much of it is a boundary state."""
        ...

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> Placement:
        """Return where each key lies. Does not extend any block's life."""
        ...

    def info(self, extent: ExtentId) -> ExtentInfo | None: ...

    def shape(self, extent: ExtentId) -> Shape | None:
        """Return a part of `info` at a small part of its cost: it is asked for at every read of a header."""
        ...

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        """Protect extents from eviction; False for those that are gone. Counted: each True needs one release."""
        ...

    def release(self, extents: Sequence[ExtentId]) -> None: ...

    def read(self, reads: Sequence[ReadRange]) -> int:
        """Fill every buffer or raise; returns bytes read. The extents must be under a lease."""
        ...

    def write(self, image: memoryview, representation: Representation, *, terms: Terms = DEFAULT_TERMS) -> WriteOutcome:
        """Put an extent's image (see block.extent; 4 KiB-aligned length) if any of its blocks is absent. Its checks are XXH3's
        or such as `sealing` writes, which it gets. When it returns stored=True under durability="data", the extent survives a
        power loss."""
        ...

    def keep(self, extents: Sequence[ExtentId], terms: Terms) -> None:
        """Promise extents at least what writing them now on these terms would promise. No promise is ever shortened.

        A tier that forgets with its process promises nothing."""
        ...

    def pin(self, extents: Sequence[ExtentId], *, until_ms: int | None) -> list[bool]:
        """Keep extents from being evicted until a wall-clock time, None: until unpinned. False for those that are gone and for
        those that would leave too little to everything else; always by a tier that forgets with its process. What is pinned is
        not deleted either, unless it is "corrupt"."""
        ...

    def unpin(self, extents: Sequence[ExtentId]) -> None: ...

    def touch(self, extents: Sequence[ExtentId]) -> None:
        """Note a use, in the order given: the first one given ends up the most recently used (heads outlive tails)."""
        ...

    def delete(self, extents: Sequence[ExtentId], *, reason: str) -> int:
        """Remove extents that are not under a lease; returns how many. `reason` is kept: "corrupt", "expired", "user" …

        What is "corrupt" goes even under a lease: from now on it is not found and not read, so that its blocks can be written
        anew at once; only its space may wait for the last release."""
        ...

    def removed(self, representation: bytes, keys: Sequence[bytes], *, before_ms: int) -> list[Gone | None]:
        """Return for each key when, up to `before_ms`, an extent with it was taken away last, as far as that is remembered:
        the latest some thousands of extents. What was only written elsewhere, or joined to others, was not taken away."""
        ...

    def representations(self) -> list[bytes]:
        """Return the digests of the representations of which extents are, or were, here."""
        ...

    def tend(self) -> bool:
        """Do one small piece of upkeep (expire, join short runs, note uses durably), at most some tens of milliseconds or one
        extent's rewriting; True while there is more to do. Whoever owns the tier calls it when nothing else waits."""
        ...

    def scan(self) -> Iterator[ExtentInfo]: ...

    def statistics(self) -> TierStatistics: ...

    def check(self) -> list[Problem]:
        """Compare the books with the medium. Empty when all is well."""
        ...

    def close(self) -> None:
        """Flush what is pending and let go. Twice is fine."""
        ...


@runtime_checkable
class LimitedTier(Tier, Protocol):
    """A tier that goes by tenants' quotas."""

    def limit(self, quotas: Mapping[str, str]) -> None:
        """Have these quotas hold from now on. A tenant that is over its own gives way with its next write, or when room is
        needed. Takes no time."""
        ...


@runtime_checkable
class WatchedTier(Tier, Protocol):
    """A tier that says what changes in it."""

    def watch(self, on_change: OnChange) -> None:
        """Have `on_change` called with every change from now on, None for more than can be told one by one. It is called under
        the tier's lock: it must be quick, not raise and not call back. A second call replaces the first."""
        ...
