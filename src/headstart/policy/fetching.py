"""How much of an object is fetched at once: where a round trip takes longer than the bytes do, all of it. Pure.

one request for n bytes takes  latency + n / rate        so up to  latency × rate  bytes more cost less than another request
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_SMALL_BYTES, _LARGE_BYTES = 64 << 10, 1 << 20
_LEAST_WHOLE_BYTES, _MOST_WHOLE_BYTES = 4 << 20, 16 << 20  # the former is one request in any case
_SHARE = 0.1  # of the newest request in what is remembered


@dataclass(slots=True)
class Fetching:
    """What requests took so far. Not exact from many threads at once, and need not be.

    >>> fetching = Fetching()
    >>> fetching.note(4096, 0.060)
    >>> fetching.note(8 << 20, 0.100)
    >>> round(fetching.whole_bytes / 1e6, 1)
    12.6
    """

    latency_s: float = math.nan
    rate_bytes_s: float = math.nan

    def note(self, nbytes: int, seconds: float) -> None:
        """Take one request into account."""
        if nbytes <= _SMALL_BYTES:
            self.latency_s = _blend(self.latency_s, seconds)
        elif nbytes >= _LARGE_BYTES:
            latency_s = 0.0 if math.isnan(self.latency_s) else self.latency_s
            self.rate_bytes_s = _blend(self.rate_bytes_s, nbytes / max(seconds - latency_s, seconds / 10, 1e-6))

    @property
    def whole_bytes(self) -> int:
        """Objects of up to so many bytes are fetched whole, whatever part of them is wanted."""
        if math.isnan(self.latency_s) or math.isnan(self.rate_bytes_s):
            return _LEAST_WHOLE_BYTES
        return int(min(max(self.latency_s * self.rate_bytes_s, _LEAST_WHOLE_BYTES), _MOST_WHOLE_BYTES))


def _blend(old: float, new: float) -> float:
    return new if math.isnan(old) else old + _SHARE * (new - old)
