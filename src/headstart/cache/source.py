"""A tier as the cache uses it: every failure is a counter and a miss, and no caller waits long for an answer.

A tier that is not trusted lies on a medium that may hang; what an engine's thread asks of it is asked on a thread of the
source's own, with patience. Memory is asked directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from headstart.cache.faults import Quarantine, counted
from headstart.cache.lookup_thread import Late, LookupThread
from headstart.metrics import Counters
from headstart.tier.base import ExtentId, Placement, Tier
from headstart.transfer.io_pool import IOPool

_READ_THREADS = 16  # a disk's rate at requests of some hundred KB takes that depth
_COPY_THREADS = 2  # memory is copied, not waited for
T = TypeVar("T")


class Source:
    """A tier, the threads that read from it and look things up in it, and the extents of it that are avoided."""

    def __init__(self, tier: Tier, *, counters: Counters, patience_s: float) -> None:
        self.tier = tier
        self.pool = IOPool(tier.name, threads=_COPY_THREADS if tier.trusted else _READ_THREADS)
        self.quarantine = Quarantine(tier, counters)
        self._counters = counters
        self._patience_s = patience_s
        self._lookups = None if tier.trusted else LookupThread(tier.name)

    def hangs(self, longest_read_s: float) -> bool:
        """True while an answer, or for `longest_read_s` a read, is overdue."""
        return self.pool.stalled_s() > longest_read_s or (self._lookups is not None and self._lookups.stuck)

    def locate(self, representation: bytes, keys: Sequence[bytes], *, deadline: float) -> Placement | None:
        """Return where the keys lie; None if the tier fails, or does not say so by `deadline` (monotonic)."""
        return self._ask("locate", lambda: self.tier.locate(representation, keys), deadline, late="match_timed_out")

    def lease(self, extents: Sequence[ExtentId], *, deadline: float) -> list[bool]:
        """Protect extents; False for those that are gone, and for all if the tier fails or the deadline passes."""

        def undo(kept: Sequence[bool]) -> None:
            with counted(self._counters, self.tier, "release"):
                self.tier.release([extent for extent, ok in zip(extents, kept, strict=True) if ok])

        kept = self._ask("lease", lambda: self.tier.lease(extents), deadline, late="match_timed_out", undo=undo)
        return [False] * len(extents) if kept is None else kept

    def release(self, extents: Sequence[ExtentId]) -> None:
        """Let extents go; where the medium hangs, once it answers again."""
        if extents:
            deadline = time.monotonic() + self._patience_s
            self._ask("release", lambda: self.tier.release(extents), deadline, late="release_timed_out")

    def close(self, deadline: float, *, tier_too: bool) -> None:
        """End the threads and close the tier, unless that is left as it is. What hangs beyond `deadline` is left behind."""
        self.pool.close(max(0.0, deadline - time.monotonic()))
        if tier_too:
            self._ask("close", self.tier.close, deadline, late="close_timed_out")
        if self._lookups is not None:
            self._lookups.close(deadline - time.monotonic())

    def _ask(
        self, verb: str, work: Callable[[], T], deadline: float, *, late: str, undo: Callable[[T], None] | None = None
    ) -> T | None:
        with counted(self._counters, self.tier, verb):
            if self._lookups is None:
                return work()
            try:
                return self._lookups.ask(work, patience_s=deadline - time.monotonic(), undo=undo)
            except Late:
                self._counters.add(f"{late}_{self.tier.name}")
        return None
