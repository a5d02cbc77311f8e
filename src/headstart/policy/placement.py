"""Which device takes the next extent, what each may hold, and what is worth carrying over from one that leaves. Pure.

What limits a reader is the device that its prompt's last bytes come from. So a prompt is spread until reading it takes every
device equally long by its measured rate; prompts of one extent are spread in the same proportion over time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_ALIKE = 0.75  # of the fastest: differences below this are noise, and splitting evenly is better than following them
_LEAST = 0.02  # of the fastest: what a device counts as at least, or one bad measurement would never be corrected
_HALF_LIFE_S = 20.0
_ENOUGH_S = 1.0
_UNKNOWN = 1e9  # bytes a second, for all alike
_FULL_COSTS = 2.0  # times, where something has to go for it: rather elsewhere, but not at the price of a lopsided prompt
_AHEAD_EXTENTS = 4  # a device that was given more than these few extents too much is not made to wait for all of it


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that can take the extent. Rates in bytes a second, None where nothing was measured yet. `chain_bytes`: what it
    has of this prompt already; `ahead_s`: how many seconds of reading more it was given lately than the others."""

    read_rate: float | None = None
    write_rate: float | None = None
    chain_bytes: int = 0
    ahead_s: float = 0.0
    has_room: bool = True


@dataclass(frozen=True, slots=True)
class Estimate:
    """A device's rate in one direction, from what was moved while it was busy; what is some seconds of work old counts half."""

    moved_bytes: float = 0.0
    busy_s: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes a second; None before there is enough to go by: the first requests may be a burst."""
        return self.moved_bytes / self.busy_s if self.busy_s >= _ENOUGH_S and self.moved_bytes else None

    def with_sample(self, nbytes: int, busy_s: float) -> Estimate:
        """Return the estimate after `nbytes` more took `busy_s`."""
        kept = 0.5 ** (busy_s / _HALF_LIFE_S)
        return Estimate(self.moved_bytes * kept + nbytes, self.busy_s * kept + busy_s)


def rates(candidates: Sequence[Candidate]) -> list[float]:
    """Return what each device counts as, in bytes a second of reading. Nothing measured anywhere: all count alike.

    >>> rates([Candidate(read_rate=2e8), Candidate(read_rate=1e8), Candidate(read_rate=1.9e8)])
    [200000000.0, 100000000.0, 200000000.0]
    """
    ratios = [c.read_rate / c.write_rate for c in candidates if c.read_rate and c.write_rate]
    ratio = statistics.median(ratios) if ratios else 1.0
    known = [c.read_rate or (c.write_rate * ratio if c.write_rate else None) for c in candidates]
    measured = [rate for rate in known if rate]
    if not measured:
        return [_UNKNOWN] * len(candidates)
    best, usual = max(measured), statistics.fmean(measured)
    filled = [rate or usual for rate in known]
    return [best if rate >= _ALIKE * best else max(rate, _LEAST * best) for rate in filled]


def order(candidates: Sequence[Candidate], nbytes: int) -> list[int]:
    """Return the candidates by how soon the prompt would be read if they took the extent, the best first.

    That devices are even over all prompts matters at a prompt's beginning; the longer it is, the more its own evenness does."""
    costs = []
    young = nbytes / (nbytes + sum(candidate.chain_bytes for candidate in candidates))
    for candidate, rate in zip(candidates, rates(candidates), strict=True):
        own_s = nbytes / rate
        ahead_s = min(candidate.ahead_s, _AHEAD_EXTENTS * own_s)
        costs.append(candidate.chain_bytes / rate + young * ahead_s + own_s * (1.0 if candidate.has_room else _FULL_COSTS))
    return sorted(range(len(costs)), key=lambda i: costs[i])


@dataclass(frozen=True, slots=True)
class Room:
    """A directory's file system: `device` tells it from others, `total_bytes` is its size."""

    device: int
    total_bytes: int


def split_evenly(rooms: Sequence[Room], share: float) -> list[int]:
    """Return what each directory may hold where `share` (0 to 1) of every file system is meant: directories on one file
    system share it."""
    there = [room.device for room in rooms]
    return [int(room.total_bytes * share / there.count(room.device)) for room in rooms]


def split_total(rooms: Sequence[Room], total_bytes: int) -> list[int]:
    """Return what each directory may hold of `total_bytes`, in proportion to its file system, which counts once.

    >>> split_total([Room(1, 300), Room(1, 300), Room(2, 100)], 800)
    [300, 300, 200]
    """
    weights = split_evenly(rooms, 1.0)
    whole = sum(weights)
    if not whole:
        return [total_bytes // len(rooms)] * len(rooms)
    return [total_bytes * weight // whole for weight in weights]


def worth_moving(leaving: Sequence[tuple[int, int]], staying: Sequence[tuple[int, int]], room_bytes: int) -> int | None:
    """Return the last use from which on extents of a device that leaves are worth carrying over: those that a cache of
    `room_bytes` with all of them would still hold. None: not one. Extents are (last used, bytes)."""
    held = 0
    cutoff = None
    for used, nbytes, leaves in sorted(
        [(used, nbytes, True) for used, nbytes in leaving] + [(used, nbytes, False) for used, nbytes in staying], reverse=True
    ):
        held += nbytes
        if held > room_bytes:
            break
        if leaves:
            cutoff = used
    return cutoff
