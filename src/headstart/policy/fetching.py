"""How much is asked for at once where every request takes long, and what is better brought along than asked around. Pure.

one request for n bytes takes  latency + n / rate        latency × rate  bytes more cost less than another request;
                                                         with four times that four fifths of the time bring bytes
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LARGE_BYTES = 1 << 20  # below that the time says little of the rate
_REQUEST_BYTES = (4 << 20, 16 << 20)  # at least and at most
_GAP_BYTES = (256 << 10, 4 << 20)
_STEP_BYTES = 256 << 10  # what follows from this changes in steps, and so not with every request
_TIMES = 4
_SHARE = 0.1  # of the newest request in what is remembered


@dataclass(slots=True)
class Fetching:
    """What requests took so far. Not exact from many threads at once, and need not be.

    >>> fetching = Fetching()
    >>> fetching.request_bytes >> 20
    4
    >>> fetching.note(8 << 20, first_s=0.025, seconds=0.105)
    >>> fetching.request_bytes >> 20, fetching.gap_bytes >> 10
    (10, 2560)
    """

    latency_s: float = math.nan
    rate_bytes_s: float = math.nan

    def note(self, nbytes: int, *, first_s: float, seconds: float) -> None:
        """Take one request into account. `first_s`: until something came; `seconds`: until all was there."""
        self.latency_s = _blend(self.latency_s, first_s)
        if nbytes >= _LARGE_BYTES:
            self.rate_bytes_s = _blend(self.rate_bytes_s, nbytes / max(seconds - first_s, seconds / 10, 1e-6))

    @property
    def request_bytes(self) -> int:
        """So much is asked for at once at most: what is smaller is fetched whole."""
        return self._within(_TIMES, _REQUEST_BYTES)

    @property
    def gap_bytes(self) -> int:
        """So many bytes that nobody wants are brought along rather than asking twice."""
        return self._within(1, _GAP_BYTES)

    def _within(self, times: int, bounds: tuple[int, int]) -> int:
        least, most = bounds
        if math.isnan(self.latency_s) or math.isnan(self.rate_bytes_s):
            return least
        nbytes = times * self.latency_s * self.rate_bytes_s
        return int(min(max(nbytes, least), most)) // _STEP_BYTES * _STEP_BYTES


def _blend(old: float, new: float) -> float:
    return new if math.isnan(old) else old + _SHARE * (new - old)
