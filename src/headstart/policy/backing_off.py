"""When something that failed several times in a row is tried again: after a while, which is longer each time. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BackingOff:
    """`patience`: failures in a row before anything is held back. Then one at a time may try, after `least_s`, twice as long,
    … at most `most_s`. Time is passed in, in seconds.

    >>> trying = BackingOff(patience=2, least_s=1.0, most_s=60.0)
    >>> trying.failed(0.0), trying.may(0.0), trying.failed(0.0), trying.may(0.5), trying.may(1.0)
    (None, True, None, False, True)
    >>> trying.tries(1.0), trying.may(1.5), trying.came(), trying.may(1.5)
    (None, False, None, True)
    """

    patience: int
    least_s: float
    most_s: float
    failures: int = 0
    until_s: float = 0.0

    def may(self, now_s: float) -> bool:
        return self.failures < self.patience or now_s >= self.until_s

    def tries(self, now_s: float) -> None:
        """Note that one tries: until it is known what came of it, or the time is over, no other may."""
        if self.failures >= self.patience:
            self.until_s = now_s + self._pause_s()

    def failed(self, now_s: float) -> None:
        self.failures += 1
        if self.failures >= self.patience:
            self.until_s = now_s + self._pause_s()

    def came(self) -> None:
        self.failures = 0

    def _pause_s(self) -> float:
        return min(self.most_s, self.least_s * 2.0 ** min(self.failures - self.patience, 30))
