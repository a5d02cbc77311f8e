"""What becomes of a tier's failures: a counter, a miss, and no endless retry.

An extent that failed to load is not matched again: for a minute after an error while reading, for good when its bytes were
wrong. The latter is deleted, by the saver's thread, and deleted again until the tier has really let go of it: so that a save
that follows writes its blocks anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.tier.base import ExtentId, Tier

_AVOID_S = 60.0
_SAID_S = 60.0  # how often it is said that something was wrong
_PLACES_SAID = 3
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
        # A tier says itself, once, that nothing of it is there.
        level = logging.DEBUG if isinstance(error, StoreError) and error.facts.get("reason") == "gone" else logging.WARNING
        _log.log(level, "tier %r failed in %s: %s", tier.name, verb, error)


class Quarantine:
    """Extents of one tier that this process avoids. Safe from many threads."""

    def __init__(self, tier: Tier, counters: Counters) -> None:
        self._tier = tier
        self._counters = counters
        self._lock = Lock()
        self._until: dict[ExtentId, float] = {}  # in the order in which they were avoided
        self._dropped = 0  # what was wrong, since it was last said
        self._places: list[str] = []  # where some of it lay
        self._say_due = time.monotonic()

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

    def corrupt(self) -> list[ExtentId]:
        """Return what is avoided for good. A save counts it as absent; what may be read again in a minute it does not."""
        with self._lock:
            return [extent for extent, until in self._until.items() if until == _FOR_GOOD]

    def delete_corrupt(self) -> None:
        """Ask the tier to delete what is avoided for good; what it has let go of needs no avoiding any more. Raises nothing:
        no save fails for what is wrong already."""
        try:
            self._delete_corrupt()
        except Exception:  # noqa: BLE001 - whatever a wrong extent does to its tier must not end all saving
            self._counters.add("tier_failed_delete")
            _log.exception("tier %r failed in delete in a way that it did not expect", self._tier.name)

    def _delete_corrupt(self) -> None:
        corrupt = self.corrupt()
        if corrupt:
            with counted(self._counters, self._tier, "delete"):
                places = {extent: info.where for extent in corrupt if (info := self._tier.info(extent)) is not None}
                self._tier.delete(corrupt, reason="corrupt")
                gone = [extent for extent in corrupt if self._tier.info(extent) is None]
                with self._lock:
                    for extent in gone:
                        self._until.pop(extent, None)  # ids are not used again
                    lay = [places[extent] for extent in gone if extent in places]
                    self._dropped += len(lay)
                    self._places = (self._places + lay)[:_PLACES_SAID]
                self._say_dropped()

    def _say_dropped(self) -> None:
        """Tell the log of what was wrong: a disk that rots is its owner's business, though every answer is right."""
        with self._lock:
            if not self._dropped or time.monotonic() < self._say_due:
                return
            self._say_due = time.monotonic() + _SAID_S
            dropped, self._dropped = self._dropped, 0
            some, self._places = "; ".join(self._places), []
        more = "; …" if dropped > _PLACES_SAID else ""
        _log.warning(
            "tier %r: %d extents were not what was written there and were dropped, to be computed anew: %s%s; check the disk, "
            "`headstart cache verify` reads the rest",
            self._tier.name,
            dropped,
            some,
            more,
        )
