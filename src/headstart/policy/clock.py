"""What time it is for promises: a clock that is set once and then never jumps. Pure: clocks are passed in."""

from __future__ import annotations

from collections.abc import Callable


class SteadyClock:
    """Wall-clock time as it was when this was made, and what has passed since by a clock that only goes forward.

    So a wall clock that is set while the process runs ends no promise early and draws none out.

    >>> ticks, wall = iter([5.0, 65.0]), iter([1000.0])
    >>> clock = SteadyClock(lambda: next(ticks), lambda: next(wall))
    >>> clock.now_s()
    1060.0
    """

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._ahead_s = wall_clock() - clock()

    def now_s(self) -> float:
        return self._clock() + self._ahead_s

    def steady_s(self, wall_s: float) -> float:
        """Return when that was which the wall clock noted as `wall_s`: as long ago as the wall clock says it is, and never
        later than now. The difference of two of its readings is right even where both are off."""
        return self.now_s() - max(0.0, self._wall_clock() - wall_s)
