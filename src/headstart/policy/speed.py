"""How long something takes, told from how long the like of it took: a sum of costs, each in proportion to a quantity. Pure.

    seconds ≈ cost₁·quantity₁ + cost₂·quantity₂ + …      none of the costs below 0

Of a forward pass the quantities are (rows, rows × keys before them, passes), of reading (bytes, starts). They add up over what
is done together, so a pass that prefills beside decoding is a sample like any other. What several of them would explain equally
well is put down to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

_HALF_LIFE = 12  # samples after which one counts half: a machine's speed changes with what else runs on it
_ROUNDS = 3  # of weighing outliers down
_RIDGE = 1e-12  # for quantities that never varied apart
_BETTER = 1e-6  # by which share more quantities must explain more to be taken


@dataclass(frozen=True, slots=True)
class Sample:
    """`quantities` of work took `seconds`, above 0."""

    quantities: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Speed:
    """`costs`: seconds for a unit of each quantity. `spread`: half of the samples were off by no more than this share."""

    costs: tuple[float, ...]
    spread: float = 0.0

    def seconds(self, *quantities: float) -> float:
        total = 0.0
        for cost, quantity in zip(self.costs, quantities, strict=True):
            total += cost * quantity
        return total


def fitted(samples: Sequence[Sample]) -> Speed | None:
    """Return the costs that explain the samples best, the latest counting most; None without any.

    It is relative errors that are made small, so a short step tells as much as a long one. Outliers are weighed down by how far
    they are from where half of the samples lie above and half below.

    >>> speed = fitted([Sample((10, 1), 0.3), Sample((20, 1), 0.5), Sample((40, 1), 0.9)])
    >>> round(speed.seconds(100, 1), 6)
    2.1
    """
    if not samples:
        return None
    work = np.array([sample.quantities for sample in samples], np.float64)
    work /= np.array([sample.seconds for sample in samples])[:, None]
    ages = np.arange(len(samples))[::-1]
    recent = 0.5 ** (ages / _HALF_LIFE)
    weights = recent
    for _ in range(_ROUNDS):
        costs = _non_negative(work, weights)
        told = work @ costs
        if told.all():
            costs = costs * _weighted_median(1.0 / told, recent)
        off = np.abs(work @ costs - 1.0)
        usual = _weighted_median(off, recent)
        weights = recent / np.maximum(1.0, (off / max(2.0 * usual, 0.02)) ** 2)
    return Speed(tuple(_non_negative(work, weights).tolist()), usual)


def _non_negative(work: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return costs ≥ 0 for which work @ costs is nearest to 1: the best of all choices of which are 0, as there are so few."""
    size = np.maximum(np.abs(work).max(axis=0), 1e-300)
    rows = work / size * np.sqrt(weights)[:, None]
    wanted = np.sqrt(weights)
    best, least = np.zeros(work.shape[1]), float(wanted @ wanted)
    for count in range(1, work.shape[1] + 1):
        for which in combinations(range(work.shape[1]), count):
            some = rows[:, which]
            some_costs = np.linalg.solve(some.T @ some + _RIDGE * np.eye(count), some.T @ wanted)
            if (some_costs < 0).any():
                continue
            error = float(np.sum((some @ some_costs - wanted) ** 2))
            if error < least - _BETTER * float(wanted @ wanted):
                best, least = np.zeros(work.shape[1]), error
                best[list(which)] = some_costs
    costs: npt.NDArray[np.float64] = best / size
    return costs


def _weighted_median(values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> float:
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(passed, passed[-1] / 2.0))])
