"""Which extents give way. Pure: numbers in, victims out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def choose_victims(
    *,
    last_used: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    leased: npt.NDArray[np.bool_],
    needed_bytes: int,
) -> npt.NDArray[np.int64]:
    """Return the indices of candidates to remove, least recently used first, until `needed_bytes` come free. All that may go
    where that is not enough: the caller compares the sum.

    `last_used` is a counter that grows with every use. A use counts the head of a prompt after its tail, so the tail of a
    prefix gives way before its head, without which it could not be found.

    >>> choose_victims(
    ...     last_used=np.array([7, 3, 5]), nbytes=np.array([10, 10, 10]), leased=np.array([False, True, False]), needed_bytes=8
    ... ).tolist()
    [2]
    """
    if needed_bytes <= 0:
        return np.empty(0, np.int64)
    free = np.flatnonzero(~leased)
    order = free[np.argsort(last_used[free], kind="stable")]
    freed = np.cumsum(nbytes[order])
    return order[: int(np.searchsorted(freed, needed_bytes)) + 1].astype(np.int64)
