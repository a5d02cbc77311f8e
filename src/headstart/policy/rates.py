"""How much may come in a minute: a bucket that fills evenly and may be overdrawn by what is only known afterwards. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """`per_minute` may come at once after a minute of nothing; then they come back evenly. Time is passed in, in seconds.

    >>> bucket = Bucket(60, now_s=0.0)
    >>> bucket.wait_s(0.0), bucket.take(60, 0.0), bucket.wait_s(0.0), bucket.wait_s(1.0)
    (0.0, None, 1.0, 0.0)
    """

    per_minute: int
    now_s: float
    level: float = -1.0

    def __post_init__(self) -> None:
        self.level = float(self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Take so much, whether it is there or not; a negative amount gives back."""
        self._fill(now_s)
        self.level = min(float(self.per_minute), self.level - amount)

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """Return in how many seconds so much is there; what is more than ever is there at once: when the bucket is full."""
        self._fill(now_s)
        missing = min(amount, float(self.per_minute)) - self.level
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def change(self, per_minute: int, now_s: float) -> None:
        """Go on with another rate; what is there stays, as far as it may."""
        self._fill(now_s)
        self.per_minute = per_minute
        self.level = min(self.level, float(per_minute))

    def _fill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self.now_s)
        self.now_s = max(self.now_s, now_s)
        self.level = min(float(self.per_minute), self.level + passed_s * self.per_minute / MINUTE_S)
