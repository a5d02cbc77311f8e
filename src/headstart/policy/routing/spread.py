"""Prefixes that many requests share and then leave: kept on several workers, so that none is the only one to answer them. Pure.

Where a prompt's known part ends tells them apart. The turns of a session each end further on than the one before. Requests that
have a system prompt in common all end at the same block, and that block's key is what is counted here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

_KEPT = 4096  # keys; the least lately asked for goes first
_ENOUGH = 2  # requests a worker, before anything is said
_MOST = 1.6  # times the mean: what a worker may have of one prefix


class Spread:
    """Counts by key and worker, halved now and then so that what was goes by.

    >>> spread = Spread()
    >>> for _ in range(40):
    ...     spread.sent(7, 0, of=4)
    >>> spread.among(7, range(4)), spread.among(7, range(4), idle=[3])
    ([1, 2, 3], [3])
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[int, dict[int, float]] = OrderedDict()

    def is_hot(self, key: int | None, *, workers: int) -> bool:
        """Whether so many ask for it that `among` leaves anybody out."""
        return key is not None and sum(self._counts.get(key, {}).values()) >= _ENOUGH * workers

    def among(self, key: int | None, workers: Sequence[int], *, idle: Collection[int] = ()) -> list[int]:
        """Return those of `workers` that may take it; all, where none may. `idle`: those that have nothing to do. What is asked
        for so often is computed once on each of them, so that afterwards whoever is free is as good as any."""
        if key is None or not self.is_hot(key, workers=len(workers)):
            return list(workers)
        counts = self._counts[key]
        if lacking := [worker for worker in workers if worker in idle and worker not in counts]:
            return lacking
        most = _MOST * (sum(counts.values()) + 1) / len(workers) - 1
        return [worker for worker in workers if counts.get(worker, 0.0) <= most] or list(workers)

    def sent(self, key: int | None, worker: int, *, of: int) -> None:
        """Such a request went to the worker."""
        if key is None:
            return
        counts = self._counts.setdefault(key, {})
        self._counts.move_to_end(key)
        counts[worker] = counts.get(worker, 0.0) + 1
        if sum(counts.values()) > 16 * _ENOUGH * of:
            for one in counts:
                counts[one] /= 2
        if len(self._counts) > _KEPT:
            self._counts.popitem(last=False)

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        for counts in self._counts.values():
            counts.pop(worker, None)
