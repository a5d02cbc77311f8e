"""How fast this engine computes prompts and its tiers are read, measured while serving. Safe from several threads.

A tier's rate is what came while anything was asked of it, over that time, so loads that share it do not look slow. What is not
there when nobody waits for it any longer counts too, as if it had come just then: a device that hangs never ends a read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

from headstart.metrics import Counters
from headstart.policy.loading import Computing, Reading, Stretch
from headstart.policy.speed import Sample, Speed, fitted

_SAMPLES = 32
_ENOUGH = 3  # samples before a tier's speed counts as known, …
_ENOUGH_S = 1.0  # … or seconds of them
_STALE_S = 60.0
_ALONE = 0.5  # of the time of the read before it, which a read that was under way beside it takes at least to be a sample


class Speeds:
    """`counters` get what was estimated and by how much that was off."""

    def __init__(self, counters: Counters, *, chunk_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._lock = Lock()
        self._first_passes: list[Sample] = []  # of warming up; they tell apart what equal chunks do not
        self._passes: deque[Sample] = deque(maxlen=_SAMPLES)
        self._unsettled = (0.0, 0.0, 0.0, 0.0)  # rows, rows × keys, passes, seconds of passes whose end was not seen
        self._computing: Computing | None = None  # as it was when it was last asked for
        self._fitted = True  # and whether no pass came after that
        self._tiers: dict[str, _Tier] = {}

    def passed(self, rows: int, row_keys: float, seconds: float, *, settled: bool = True, first: bool = False) -> None:
        """Note a forward pass of `rows` rows that saw `row_keys` keys in all. `settled`: its end was waited for, and with it
        that of those before it; a device may still be at it otherwise. `first`: while warming up."""
        with self._lock:
            rows_, row_keys_, passes_, seconds_ = self._unsettled
            self._unsettled = (rows_ + rows, row_keys_ + row_keys, passes_ + 1, seconds_ + seconds)
            if not settled:
                return
            *quantities, seconds = self._unsettled
            self._unsettled = (0.0, 0.0, 0.0, 0.0)
            if seconds <= 0:
                return
            if self._computing is not None and not first:
                estimate_s = self._computing.speed.seconds(*quantities)
                self._counters.add("compute_estimated_ms", round(1000 * estimate_s))
                self._counters.add("compute_estimate_off_ms", round(1000 * abs(seconds - estimate_s)))
            (self._first_passes if first else self._passes).append(Sample(tuple(quantities), seconds))
            self._fitted = False

    @property
    def computing(self) -> Computing | None:
        """How fast prompts are computed, by all passes so far; None before the first."""
        with self._lock:
            if not self._fitted:  # here, not after each pass: it takes as long as a pass of a tiny model
                self._fitted = True
                speed = fitted([*self._first_passes, *self._passes])
                self._computing = None if speed is None else Computing(speed, self._chunk_tokens)
            return self._computing

    def reading(self) -> dict[str, Reading]:
        """Return the speed of every tier that is known."""
        now = self._clock()
        with self._lock:
            found = {name: tier.reading(now) for name, tier in self._tiers.items()}
        return {name: reading for name, reading in found.items() if reading is not None}

    def asked(self, tier: str, nbytes: int) -> None:
        """Note that a load of so many bytes of a tier begins."""
        with self._lock:
            self._tiers.setdefault(tier, _Tier()).began(nbytes, self._clock())

    def came(self, tier: str, nbytes: int | None, *, asked_bytes: int) -> None:
        """Note that a load has ended, with so many bytes of those that it had asked for; None: that tells nothing."""
        with self._lock:
            self._tiers[tier].ended(asked_bytes, nbytes, self._clock())

    def waited(self, tier: str, nbytes: int) -> None:
        """Note that not even `nbytes` have come so far of what was asked of a tier."""
        with self._lock:
            self._tiers[tier].late(nbytes, self._clock())

    def loaded(self, seconds: float, *, estimate_s: float) -> None:
        """Note that a load took so long."""
        self._counters.add("load_estimated_ms", round(1000 * estimate_s))
        self._counters.add("load_estimate_off_ms", round(1000 * abs(seconds - estimate_s)))


class ReadAccount:
    """One load, of tokens `first` … `end`-1 of what matched, as it is noted: each tier's bytes when it begins and when it has
    ended. Of memory only where nothing else is asked."""

    def __init__(self, speeds: Speeds, stretches: Sequence[Stretch], first: int, end: int) -> None:
        self.cancelled = False  # what comes is then no measure of anything
        self._speeds = speeds
        parts = list(within(stretches, first, end))
        asked = [part for part in parts if not part.always] or parts
        self._bytes: dict[str, int] = {}
        for part in asked:
            self._bytes[part.tier] = self._bytes.get(part.tier, 0) + part.nbytes
        self._aside = sum(part.nbytes for part in parts) - sum(self._bytes.values())
        for tier, nbytes in self._bytes.items():
            speeds.asked(tier, nbytes)

    def late(self, part: int, *, of: int) -> None:
        """Note that not even `part` parts `of` so many have come yet."""
        for tier, nbytes in self._bytes.items():
            self._speeds.waited(tier, nbytes * part // of)

    def ended(self, nbytes: int) -> None:
        """Note that the load is over and has read so many bytes in all."""
        asked = sum(self._bytes.values())
        came = min(asked, max(0, nbytes - self._aside))
        for tier, its in self._bytes.items():
            self._speeds.came(tier, None if self.cancelled else came * its // max(1, asked), asked_bytes=its)


def within(stretches: Sequence[Stretch], first: int, end: int) -> Iterator[Stretch]:
    """Yield what lies in tokens `first` … `end`-1 of each stretch."""
    at = 0
    for one in stretches:
        tokens = min(end, at + one.tokens) - max(first, at)
        if tokens > 0:
            yield Stretch(one.tier, tokens, one.nbytes * tokens // one.tokens, one.always)
        at += one.tokens


@dataclass(slots=True)
class _Tier:
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    speed: Speed | None = None
    sampled_s: float = 0.0  # seconds of all samples together
    last_s: float = 0.0  # when the last one was taken
    under_way: int = 0
    asked_bytes: int = 0  # of loads under way
    mark_s: float = 0.0  # since when what has come is not in a sample yet
    starts: int = 0

    def began(self, nbytes: int, now: float) -> None:
        if not self.under_way:
            self.mark_s, self.starts = now, 1
        self.under_way += 1
        self.asked_bytes += nbytes

    def ended(self, asked_bytes: int, nbytes: int | None, now: float) -> None:
        self.under_way -= 1
        self.asked_bytes -= asked_bytes
        if nbytes is None:
            self.mark_s, self.starts = now, 0
            return
        self._sample(nbytes, now)

    def late(self, nbytes: int, now: float) -> None:
        seconds = now - self.mark_s
        expected_s = 0.0 if self.speed is None else self.speed.seconds(nbytes, self.starts)
        if self.under_way and seconds > expected_s:
            self._sample(nbytes, now)

    def _sample(self, nbytes: int, now: float) -> None:
        seconds = now - self.mark_s
        if nbytes > 0 and seconds > 0:
            sample = Sample((nbytes, self.starts), seconds)
            if self.samples and not self.starts and seconds < _ALONE * self.samples[-1].seconds:
                # The rest of what was read beside the one before, most of which came in that one's time.
                last = self.samples.pop()
                sample = Sample((last.quantities[0] + nbytes, last.quantities[1]), last.seconds + seconds)
            self.samples.append(sample)
            self.speed = fitted(self.samples)
            self.sampled_s += seconds
            self.last_s = now
        self.mark_s, self.starts = now, 0

    def reading(self, now: float) -> Reading | None:
        if self.speed is None or (len(self.samples) < _ENOUGH and self.sampled_s < _ENOUGH_S):
            return None
        return Reading(self.speed, self.asked_bytes, stale=now - self.last_s > _STALE_S)
