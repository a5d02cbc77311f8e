"""Which conversation is likely to go on next, so that its prefix is brought to memory while nothing else is to be done. Pure.

People and agents answer at a pace of their own. One that came back is expected again after about the time that it took before:
from half of that until twice of it. Then it is given up until it comes back.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_EARLY = 0.5  # of the usual pause: so long before, it may be looked for
_KEPT = 4  # pauses that are remembered


@dataclass(frozen=True, slots=True)
class Pace:
    """When a conversation's last answer ended, and the pauses before its latest requests, oldest first."""

    ended_s: float
    pauses_s: tuple[float, ...] = ()

    def after(self, *, started_s: float, ended_s: float) -> Pace:
        """Return the pace after one more request."""
        return Pace(ended_s, (*self.pauses_s, max(0.0, started_s - self.ended_s))[-_KEPT:])

    @property
    def due_s(self) -> float | None:
        """When its next request is expected; None before it has come back."""
        return self.ended_s + statistics.median(self.pauses_s) if self.pauses_s else None


def expected(paces: Sequence[Pace], *, now_s: float) -> list[int]:
    """Return which conversations may go on about now, the one that is due first first.

    >>> expected([Pace(100.0, (10.0, 12.0)), Pace(90.0, (30.0,)), Pace(109.0, (60.0,)), Pace(100.0)], now_s=110.0)
    [0, 1]
    """
    found = []
    for i, pace in enumerate(paces):
        due_s = pace.due_s
        if due_s is not None and due_s - _EARLY * (due_s - pace.ended_s) <= now_s <= due_s + (due_s - pace.ended_s):
            found.append((due_s, i))
    return [i for _, i in sorted(found)]
