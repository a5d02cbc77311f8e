"""A tier as the cache uses it: every failure is a counter and a miss, and no caller waits long for an answer.

A tier that is not in memory lies on a medium that may hang; what an engine's thread asks of it is asked on a thread of the
source's own, with patience. Memory is asked directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headstart.cache.faults import Quarantine, counted
from headstart.metrics import Counters
from headstart.tier.base import ExtentId, LanedTier, Placement, Tier
from headstart.tier.lookup_thread import Late, LookupThread, Patience
from headstart.transfer.io_pool import IOPool

_READ_THREADS = 16  # a disk's rate at requests of some hundred KB takes that depth
_LANE_THREADS = 8  # where there are several devices, each
_MOST_WRITES = 8  # under way: each holds an extent in memory
_COPY_THREADS = 2  # memory is copied, not waited for
T = TypeVar("T")


class Source:
    """A tier, the threads that read from it and look things up in it, and the extents of it that are avoided.

    A tier on several devices has reading threads for each, made when it is first read from: a device that hangs then takes
    none of the others' and costs only what lies on it."""

    def __init__(self, tier: Tier, *, counters: Counters, patience_s: float) -> None:
        self.tier = tier
        self._laned = tier if isinstance(tier, LanedTier) else None
        self._pools_lock = Lock()
        threads = _COPY_THREADS if tier.in_memory else _READ_THREADS
        self._pools = {0: IOPool(tier.name, threads=threads)}
        self.quarantine = Quarantine(tier, counters)
        self.counters = counters
        self._patience_s = patience_s
        self._closed = False
        self._lookups = None if tier.in_memory else LookupThread(tier.name)

    @property
    def writes_at_once(self) -> int:
        """How many writes are under way at best: on several devices two for each, since a fast one gets more of them."""
        lanes = 1 if self._laned is None else self._laned.lanes
        return min(2 * lanes, _MOST_WRITES) if lanes > 1 else 1

    def pool_of(self, extent: ExtentId) -> IOPool:
        """Return the threads that read `extent`."""
        if self._laned is None:
            return self._pools[0]
        lane = self._laned.lane(extent)
        with self._pools_lock:
            pool = self._pools.get(lane)
            if pool is None:
                pool = self._pools[lane] = IOPool(f"{self.tier.name}-{lane}", threads=_LANE_THREADS)
                if self._closed:
                    pool.close(0.0)  # it abandons what it is given
        return pool

    def warm(self) -> None:
        """Have the reading threads touch their memory."""
        for pool in self._all_pools():
            pool.warm()

    @property
    def is_read(self) -> bool:
        """Whether something is read from the tier just now."""
        return any(pool.stalled_s() > 0 for pool in self._all_pools())

    def hangs(self, longest_read_s: float) -> bool:
        """True while an answer, or on every device a read for `longest_read_s`, is overdue."""
        stalled = all(pool.stalled_s() > longest_read_s for pool in self._all_pools())
        return stalled or (self._lookups is not None and self._lookups.stuck)

    def locate(
        self, representation: bytes, keys: Sequence[bytes], patience: Patience, *, longest_read_s: float = float("inf")
    ) -> Placement | None:
        """Return where the keys lie, less what lies on a device on which a read is overdue; None if the tier fails, or does
        not say so in time."""
        placement = self._ask("locate", lambda: self.tier.locate(representation, keys), patience, late="match_timed_out")
        if placement is None or self._laned is None:
            return placement
        with self._pools_lock:
            stalled = [lane for lane, pool in self._pools.items() if pool.stalled_s() > longest_read_s]
        if not stalled:
            return placement
        laned = self._laned

        def answering(extents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            lanes = np.array([laned.lane(ExtentId(extent)) for extent in extents.tolist()])
            return np.where(np.isin(lanes, stalled), -1, extents)

        states = None if placement.states is None else answering(placement.states)
        return Placement(answering(placement.extents), placement.positions, states)

    def lease(self, extents: Sequence[ExtentId], patience: Patience) -> list[bool]:
        """Protect extents; False for those that are gone, and for all if the tier fails or patience runs out."""

        def undo(kept: Sequence[bool]) -> None:
            with counted(self.counters, self.tier, "release"):
                self.tier.release([extent for extent, ok in zip(extents, kept, strict=True) if ok])

        kept = self._ask("lease", lambda: self.tier.lease(extents), patience, late="match_timed_out", undo=undo)
        return [False] * len(extents) if kept is None else kept

    def release(self, extents: Sequence[ExtentId]) -> None:
        """Let extents go; where the medium hangs, once it answers again."""
        if extents:
            self._ask("release", lambda: self.tier.release(extents), Patience(self._patience_s), late="release_timed_out")

    def close(self, deadline: float, *, tier_too: bool) -> None:
        """End the threads and close the tier, unless that is left as it is. What hangs beyond `deadline` is left behind."""
        with self._pools_lock:
            self._closed = True
        for pool in self._all_pools():
            pool.close(max(0.0, deadline - time.monotonic()))
        if tier_too:
            self._ask("close", self.tier.close, Patience(deadline - time.monotonic()), late="close_timed_out")
        if self._lookups is not None:
            self._lookups.close(deadline - time.monotonic())

    def _all_pools(self) -> list[IOPool]:
        with self._pools_lock:
            return list(self._pools.values())

    def _ask(
        self, verb: str, work: Callable[[], T], patience: Patience, *, late: str, undo: Callable[[T], None] | None = None
    ) -> T | None:
        with counted(self.counters, self.tier, verb):
            if self._lookups is None:
                return work()
            try:
                return self._lookups.answer(self._lookups.hand_over(work), patience, undo=undo)
            except Late:
                self.counters.add(f"{late}_{self.tier.name}")
        return None
