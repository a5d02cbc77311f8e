"""Where two sequences part, where they meet again, and part again. Pure; arrays of token ids (or of characters) only.

    A  ▓▓▓▓▓▓▓▓▓▓▓ aaa ▓▓▓▓▓▓▓▓▓▓▓▓▓▓ ▓▓▓▓▓▓
    B  ▓▓▓▓▓▓▓▓▓▓▓ bb  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓ cc ▓▓▓▓▓▓▓
                   hunk               hunk

They have met again where `run` units in a row are the same, or all that is left of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.uint32]
_NEAR = 4096  # units that are looked through first
_PRIME = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class Hunk:
    """A[a:a_end] stands where B has B[b:b_end]; before it both are the same since the hunk before."""

    a: int
    a_end: int
    b: int
    b_end: int


def common(a: npt.NDArray[np.unsignedinteger[Any]], b: npt.NDArray[np.unsignedinteger[Any]]) -> int:
    """Return how many units `a` and `b` begin with alike."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def hunks(a: Units, b: Units, *, run: int = 8, most: int = 64) -> Iterator[Hunk]:
    """Yield the differences in order, at most `most` of them. There is none where one is the beginning of the other."""
    i = j = common(a, b)
    while i < len(a) and j < len(b) and most > 0:
        met_a, met_b = _met(a[i:], b[j:], run)
        yield Hunk(i, i + met_a, j, j + met_b)
        i, j, most = i + met_a, j + met_b, most - 1
        more = common(a[i:], b[j:])
        i, j = i + more, j + more


def _met(a: Units, b: Units, run: int) -> tuple[int, int]:
    """Return the nearest place where both go on alike; their ends where they do not."""
    near = _nearest(a[:_NEAR], b[:_NEAR], run)
    if near is not None and sum(near) <= _NEAR:
        return near  # what is farther away than this is no nearer
    tail = common(a[::-1], b[::-1])
    ends = (len(a) - tail, len(b) - tail)
    found = _nearest(a, b, run)
    return ends if found is None or (tail and sum(ends) <= sum(found)) else found


def _nearest(a: Units, b: Units, run: int) -> tuple[int, int] | None:
    """Return the places in `a` and `b`, together as early as can be, from which `run` units are alike."""
    if len(a) < run or len(b) < run:
        return None
    values, first = np.unique(_runs(a, run), return_index=True)  # the first place of each
    theirs = _runs(b, run)
    found = np.minimum(np.searchsorted(values, theirs), len(values) - 1)
    places = np.flatnonzero(values[found] == theirs)
    for k in places[np.argsort(first[found[places]] + places, kind="stable")]:
        x, y = int(first[found[k]]), int(k)
        if np.array_equal(a[x : x + run], b[y : y + run]):  # a hash is only a hint
            return x, y
    return None


def _runs(units: Units, run: int) -> npt.NDArray[np.uint64]:
    """Return a hash of the `run` units from each place on."""
    wide = units.astype(np.uint64)
    count = len(units) - run + 1
    value = np.zeros(count, np.uint64)
    for k in range(run):
        value = value * _PRIME + wide[k : k + count] + np.uint64(1)
    return value
