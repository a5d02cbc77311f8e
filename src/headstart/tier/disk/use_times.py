"""When the counter of uses stood where: a use is a number, and rules ask how long ago it was. No I/O.

    (counter, time), (counter, time), …      a use is as old as the first note whose counter has reached it, at most

Notes are taken some seconds apart at best, and the older they are, the fewer are kept. A use that no note has reached counts
as now: nothing is called idle for longer than is known.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from headstart.tier.disk.records import UsesTimed

_KEPT = 256  # notes, at most
_Numbers = npt.NDArray[np.int64]


class UseTimes:
    """Whoever owns it holds the lock."""

    def __init__(self) -> None:
        self._notes: dict[int, int] = {}  # counter → time
        self._sorted: tuple[_Numbers, _Numbers] | None = None

    def note(self, notes: Iterable[tuple[int, int]]) -> None:
        """Take over notes of (counter, milliseconds since 1970), in any order."""
        for counter, time_ms in notes:
            self._notes[counter] = min(time_ms, self._notes.get(counter, time_ms))
        self._sorted = None
        while len(self._notes) > _KEPT:
            counters = sorted(self._notes)
            for counter in counters[1 : len(counters) // 2 : 2]:  # the first one stays: it says how old the oldest uses are
                del self._notes[counter]

    def __len__(self) -> int:
        return len(self._notes)

    @property
    def latest(self) -> int:
        """The highest counter that was noted, 0 where none was."""
        return max(self._notes, default=0)

    def record(self) -> UsesTimed | None:
        """Return all notes as a journal says them; None where there are none."""
        return UsesTimed(tuple(sorted(self._notes.items()))) if self._notes else None

    def of(self, uses: _Numbers, *, now_ms: int) -> _Numbers:
        """Return when uses were, in milliseconds since 1970."""
        if self._sorted is None:
            counters = np.array(sorted(self._notes), np.int64)
            times = np.array([self._notes[counter] for counter in counters.tolist()], np.int64)
            # A clock that was ahead: what was counted earlier was not used later.
            self._sorted = counters, np.minimum.accumulate(times[::-1])[::-1] if len(times) else times
        counters, times = self._sorted
        known = np.append(times, now_ms)[np.searchsorted(counters, uses)]
        used: _Numbers = np.minimum(known, now_ms)
        return used
