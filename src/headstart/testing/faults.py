"""A tier that fails as tiers do. What fails is said beforehand and counted; nothing is random, so a failing run repeats.

`FaultyTier` wraps any tier and lets its verbs fail or lie; `faulty_disk.py` does the same one floor below, to a disk.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import Literal

from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt
from headstart.tier.base import (
    DEFAULT_TERMS,
    ExtentId,
    ExtentInfo,
    Gone,
    Placement,
    Problem,
    ReadRange,
    Shape,
    Terms,
    Tier,
    TierStatistics,
    WriteOutcome,
)

TierVerb = Literal["locate", "lease", "release", "touch", "read", "write", "keep", "pin", "tend", "delete"]
TierFault = Literal["eio", "enospc", "corrupt", "short", "flip", "foreign", "stall"]
_ERRNO = {"eio": errno.EIO, "enospc": errno.ENOSPC}


@dataclass(frozen=True, slots=True)
class Fault:
    """Every `every`-th call of `verb`, from call number `start` on and at most `times` times, goes wrong by `kind`:

    eio, enospc   OSError
    corrupt       ExtentCorrupt, as a tier raises that looks into its own bytes
    short         a read fills half of what was asked for and returns that count
    flip          a read flips one bit and says nothing
    foreign       a read brings another extent's bytes (of this extent's next page, where it is the only one) and says nothing
    stall         the call waits until `heal`, at most `FaultyTier.stall_s`, then goes on
    """

    verb: TierVerb
    kind: TierFault
    every: int = 1
    start: int = 1
    times: int | None = None


class FaultyTier:
    """A tier with faults. `injected[verb, kind]` counts what was done, `calls[verb]` all calls. Never `trusted`: it may lie.

    `read_bytes_per_s`: a slow device: reads come at that rate, all of them together and one after the other, until `heal`."""

    trusted = False
    in_memory = False

    def __init__(self, inner: Tier, *faults: Fault, stall_s: float = 20.0) -> None:
        self.inner = inner
        self.name = inner.name
        self.sealing = inner.sealing
        self.stalled = Event()  # set once a call waits, so that a test need not sleep
        self.read_bytes_per_s: float | None = None
        self.bytes_read = 0
        self._free_s = 0.0  # when the slow device has read all that it was asked for so far
        self._stall_s = stall_s
        self._lock = Lock()
        self._resume = Event()
        self._faults = list(faults)
        self.calls: Counter[TierVerb] = Counter()
        self.injected: Counter[tuple[TierVerb, TierFault]] = Counter()

    def inject(self, *faults: Fault) -> None:
        """Add faults; their `start` counts calls from now."""
        with self._lock:
            self._faults += [replace(f, start=f.start + self.calls[f.verb]) for f in faults]
            self._resume.clear()

    def slow_down(self, read_bytes_per_s: float) -> None:
        with self._lock:
            self.read_bytes_per_s, self._free_s = read_bytes_per_s, 0.0
            self._resume.clear()

    def heal(self) -> None:
        """No more faults; let stalled calls go on."""
        with self._lock:
            self._faults.clear()
            self.read_bytes_per_s = None
            self.stalled.clear()
            self._resume.set()

    def max_extent_bytes(self, representation: Representation, *, state_bytes: int = 0) -> int:
        return self.inner.max_extent_bytes(representation, state_bytes=state_bytes)

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> Placement:
        self._strike("locate")
        return self.inner.locate(representation, keys)

    def info(self, extent: ExtentId) -> ExtentInfo | None:
        return self.inner.info(extent)

    def shape(self, extent: ExtentId) -> Shape | None:
        return self.inner.shape(extent)

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        self._strike("lease")
        return self.inner.lease(extents)

    def release(self, extents: Sequence[ExtentId]) -> None:
        self._strike("release")
        self.inner.release(extents)

    def read(self, reads: Sequence[ReadRange]) -> int:
        kind = self._strike("read")
        self._throttle(sum(buffer.nbytes for read in reads for buffer in read.buffers))
        if kind == "foreign":
            return self._read_elsewhere(reads)
        if kind == "short":
            return self.inner.read([half for half in map(_first_half, reads) if half.buffers])
        done = self.inner.read(reads)
        if kind == "flip":
            buffer = next(b for read in reads for b in read.buffers if len(b))
            buffer[len(buffer) // 2] ^= 0x10
        return done

    def write(self, image: memoryview, representation: Representation, *, terms: Terms = DEFAULT_TERMS) -> WriteOutcome:
        self._strike("write")
        return self.inner.write(image, representation, terms=terms)

    def touch(self, extents: Sequence[ExtentId]) -> None:
        self._strike("touch")
        self.inner.touch(extents)

    def keep(self, extents: Sequence[ExtentId], terms: Terms) -> None:
        self._strike("keep")
        self.inner.keep(extents, terms)

    def pin(self, extents: Sequence[ExtentId], *, until_ms: int | None) -> list[bool]:
        self._strike("pin")
        return self.inner.pin(extents, until_ms=until_ms)

    def unpin(self, extents: Sequence[ExtentId]) -> None:
        self.inner.unpin(extents)

    def removed(self, representation: bytes, keys: Sequence[bytes], *, before_ms: int) -> list[Gone | None]:
        return self.inner.removed(representation, keys, before_ms=before_ms)

    def representations(self) -> list[bytes]:
        return self.inner.representations()

    def tend(self) -> bool:
        self._strike("tend")
        return self.inner.tend()

    def delete(self, extents: Sequence[ExtentId], *, reason: str) -> int:
        self._strike("delete")
        return self.inner.delete(extents, reason=reason)

    def scan(self) -> Iterator[ExtentInfo]:
        return self.inner.scan()

    def statistics(self) -> TierStatistics:
        return self.inner.statistics()

    def check(self) -> list[Problem]:
        return self.inner.check()

    def close(self) -> None:
        self.heal()
        self.inner.close()

    def _strike(self, verb: TierVerb) -> TierFault | None:
        """Count the call and let it fail if it is its turn; return the kind of lie that the verb itself has to tell."""
        with self._lock:
            self.calls[verb] += 1
            fault = next((f for f in self._faults if self._due(f, verb)), None)
            if fault is None:
                return None
            self.injected[verb, fault.kind] += 1
            if fault.times is not None:
                self._faults.remove(fault)
                if fault.times > 1:
                    self._faults.append(replace(fault, times=fault.times - 1))
        if fault.kind in _ERRNO:
            raise OSError(_ERRNO[fault.kind], f"injected into {verb} of tier '{self.name}'")
        if fault.kind == "corrupt":
            raise ExtentCorrupt(f"injected into {verb} of tier '{self.name}'", reason="injected")
        if fault.kind == "stall":
            self.stalled.set()
            self._resume.wait(self._stall_s)
        return fault.kind

    def _throttle(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes
            if self.read_bytes_per_s is None:
                return
            now = time.monotonic()
            self._free_s = max(now, self._free_s) + nbytes / self.read_bytes_per_s
            left_s = self._free_s - now
        self._resume.wait(left_s)

    def _due(self, fault: Fault, verb: TierVerb) -> bool:
        turn = self.calls[verb] - fault.start
        return fault.verb == verb and turn >= 0 and turn % fault.every == 0

    def _read_elsewhere(self, reads: Sequence[ReadRange]) -> int:
        return sum(self._read_one_elsewhere(read) for read in reads)

    def _read_one_elsewhere(self, read: ReadRange) -> int:
        nbytes = sum(len(b) for b in read.buffers)
        for other in self.inner.scan():
            if other.id != read.extent and other.extent_bytes >= read.offset + nbytes and self.inner.lease([other.id])[0]:
                try:
                    return self.inner.read([replace(read, extent=other.id)])
                finally:
                    self.inner.release([other.id])
        done = self.inner.read([read])
        for buffer in read.buffers:  # no other extent is large enough: the same bytes, shifted
            buffer[:] = bytes(buffer[1:]) + bytes(buffer[:1])
        return done


def _first_half(read: ReadRange) -> ReadRange:
    left = sum(len(b) for b in read.buffers) // 2
    kept = []
    for buffer in read.buffers:
        if left:
            kept.append(buffer[:left])
            left -= len(kept[-1])
    return replace(read, buffers=kept)
