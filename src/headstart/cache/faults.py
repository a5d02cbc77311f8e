"""What becomes of a tier's failures: a counter, a miss, and no endless retry.

An extent that failed to load is not matched again: for a minute after an error while reading, for good when its bytes were
wrong. The latter is deleted as soon as no lease protects it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.tier.base import ExtentId, Tier

_AVOID_S = 60.0
_MAX_ENTRIES = 4096  # the oldest is forgotten first: it is then tried again, fails again and is remembered again
_FOR_GOOD = float("inf")
_log = logging.getLogger(__name__)


@contextmanager
def counted(counters: Counters, tier: Tier, verb: str) -> Iterator[None]:
    """Turn a tier's failure into the counter `tier_failed_<verb>`; what the block was to bring is then missing."""
    try:
        yield
    except (StoreError, OSError) as error:
        counters.add(f"tier_failed_{verb}")
        _log.warning("tier %r failed in %s: %s", tier.name, verb, error)


class Quarantine:
    """Extents of one tier that this process avoids. Safe from many threads."""

    def __init__(self, tier: Tier, counters: Counters) -> None:
        self._tier = tier
        self._counters = counters
        self._lock = Lock()
        self._until: dict[ExtentId, float] = {}  # in the order in which they were avoided

    def avoid(self, extent: ExtentId, *, for_good: bool) -> None:
        with self._lock:
            until = max(self._until.pop(extent, 0.0), _FOR_GOOD if for_good else time.monotonic() + _AVOID_S)
            self._until[extent] = until
            if len(self._until) > _MAX_ENTRIES:
                del self._until[next(iter(self._until))]

    def avoided(self) -> list[ExtentId]:
        if not self._until:  # the usual case takes no lock
            return []
        now = time.monotonic()
        with self._lock:
            self._until = {extent: until for extent, until in self._until.items() if until > now}
            return list(self._until)

    def delete_corrupt(self, extents: Sequence[ExtentId]) -> None:
        """Delete those of `extents` that were found corrupt, unless a lease still protects them: its release asks again."""
        with self._lock:
            corrupt = [extent for extent in extents if self._until.get(extent) == _FOR_GOOD]
        for extent in corrupt:
            with counted(self._counters, self._tier, "delete"):
                if self._tier.delete([extent], reason="corrupt") or self._tier.info(extent) is None:
                    with self._lock:
                        self._until.pop(extent, None)  # ids are not used again
