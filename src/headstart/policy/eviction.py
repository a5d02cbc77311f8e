"""Which extents give way. Pure: numbers in, victims out.

promised to nobody  →  promised (then a promise is broken)  →  for ever (pins that take too much)
                    →  those before an extent that may not go
in each: the least recently used first, and an extent never before those that continue it

Where a file only goes as a whole, one is emptied: what is worth keeping in it is written anew before, as far as that is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headstart.policy.retention import FOREVER_MS

_UNPROMISED, _PROMISED, _FOR_EVER, _LAST = 0, 1, 2, 3
CARRIED_SHARE = 5 / 8  # of a file, at most, is written anew to give back the rest
_ROUNDS = 32  # each looks twice as far up; parents that lie in a circle, as only a damaged journal says, must end too

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Worth:
    """How much each candidate is worth keeping, in columns; `held` ones may not go at all. An extent is worth at least as much
    as those that continue it, which could not be found without it."""

    held: npt.NDArray[np.bool_]
    group: _Numbers
    last_used: _Numbers
    promised_ms: _Numbers  # until then
    depth: _Numbers  # how many candidates it continues

    def of_groups(self, member: _Numbers, groups: int) -> Worth:
        """Return the worth of wholes that only go together: candidate i belongs to `member[i]`."""
        held = np.zeros(groups, np.bool_)
        np.logical_or.at(held, member, self.held)

        def most(column: _Numbers) -> _Numbers:
            found = np.zeros(groups, np.int64)
            np.maximum.at(found, member, column)
            return found

        return Worth(held, most(self.group), most(self.last_used), most(self.promised_ms), most(self.depth))


def worth_of(
    *, last_used: _Numbers, promised_ms: _Numbers, held: npt.NDArray[np.bool_], parents: _Numbers, now_ms: int
) -> Worth:
    """Weigh candidates. `last_used`: a counter that grows with every use. `parents[i]`: which candidate the i-th continues, or
    -1. 100,000 of them in chains of 100 take about 30 ms.

    >>> worth = worth_of(last_used=np.array([3, 7]), promised_ms=np.array([0, 90]), held=np.array([False, False]),
    ...                  parents=np.array([-1, 0]), now_ms=50)
    >>> worth.last_used.tolist(), worth.promised_ms.tolist(), worth.depth.tolist()
    ([7, 7], [90, 90], [0, 1])
    """
    kept = np.where(promised_ms >= FOREVER_MS, _FOR_EVER, np.where(promised_ms > now_ms, _PROMISED, _UNPROMISED))
    group = np.where(held, _LAST, kept).astype(np.int64)
    last_used, promised_ms = last_used.astype(np.int64), promised_ms.astype(np.int64)  # copies
    depth = most_of_descendants([group, last_used, promised_ms], parents)
    return Worth(held, group, last_used, promised_ms, depth)


def most_of_descendants(columns: list[_Numbers], parents: _Numbers) -> _Numbers:
    """Raise each number of each column, in place, to the highest among the candidate and all that continue it; returns how many
    candidates each one continues. In each round every candidate hands what it knows of 1, 2, 4 … generations below it to the
    one as many generations above."""
    above = parents.astype(np.int64)
    depth = (above >= 0).astype(np.int64)
    for _ in range(_ROUNDS):
        lower = np.flatnonzero(above >= 0)
        if not len(lower):
            break
        upper = above[lower]
        for column in columns:
            np.maximum.at(column, upper, column[lower])
        depth[lower] += depth[upper]
        above[lower] = above[upper]
    return depth


def choose_victims(*, worth: Worth, nbytes: _Numbers, needed_bytes: int, wanted_bytes: int = 0) -> _Numbers:
    """Return the indices of candidates to remove, the least worthy first, until `needed_bytes` come free, and up to
    `wanted_bytes` as long as no promise is broken for those. All that may go where that is not enough: the caller compares
    the sum.

    >>> nobody = np.array([-1, -1, -1])
    >>> worth = worth_of(last_used=np.array([7, 3, 5]), promised_ms=np.array([0, 0, 0]), parents=nobody, now_ms=1,
    ...                  held=np.array([False, True, False]))
    >>> choose_victims(worth=worth, nbytes=np.array([10, 10, 10]), needed_bytes=8).tolist()
    [2]
    """
    if needed_bytes <= 0:
        return np.empty(0, np.int64)
    free = np.flatnonzero(~worth.held)
    order = free[_least_worthy_first(worth, free)]
    freed = np.cumsum(nbytes[order])
    needed = int(np.searchsorted(freed, needed_bytes)) + 1
    wanted = int(np.searchsorted(freed, wanted_bytes)) + 1 if wanted_bytes > needed_bytes else needed
    unpromised = int(np.count_nonzero(worth.group[free] == _UNPROMISED))
    return order[: max(needed, min(wanted, unpromised))].astype(np.int64)


@dataclass(frozen=True, slots=True)
class Files:
    """What candidates lie in: candidate i in file `member[i]`. `stays`: files that cannot go now."""

    member: _Numbers
    charged: _Numbers
    stays: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Emptying:
    """Candidates of one file: those that go with it, and those that are written anew before, the worthiest first."""

    gone: _Numbers
    carried: _Numbers


def choose_emptying(
    *, worth: Worth, nbytes: _Numbers, files: Files, needed_bytes: int, cold_bytes: int, room_bytes: int, budget_bytes: int
) -> Emptying | None:
    """Return which file goes, where space comes back in whole files only, for `needed_bytes`. None: all of them stay.

    *Cold* is what would go first if each could go alone, `cold_bytes` of it: of what nobody was promised, unless that is less
    than what is needed. The file with the largest share of it goes, and of the rest in it what fits into `room_bytes` and
    `budget_bytes` is carried. What is promised is carried even beyond the budget, as long as promises can be kept at all; where
    there is no room for that, another file goes if one can.

    >>> worth = Worth(held=np.zeros(4, bool), group=np.array([0, 0, 0, 0]), last_used=np.array([1, 9, 2, 3]),
    ...               promised_ms=np.zeros(4), depth=np.zeros(4))
    >>> files = Files(member=np.array([0, 0, 1, 1]), charged=np.array([8, 8]), stays=np.zeros(2, bool))
    >>> chosen = choose_emptying(worth=worth, nbytes=np.array([6, 2, 4, 4]), files=files, needed_bytes=8, cold_bytes=10,
    ...                          room_bytes=9, budget_bytes=9)
    >>> chosen.gone.tolist(), chosen.carried.tolist()
    ([0], [1])
    """
    member, charged = files.member, files.charged
    free = np.flatnonzero(~worth.held)
    unpromised_bytes = int(nbytes[free[worth.group[free] == _UNPROMISED]].sum())
    keeps_promises = unpromised_bytes >= needed_bytes
    order = free[_least_worthy_first(worth, free)]
    wanted = min(cold_bytes, unpromised_bytes) if keeps_promises else cold_bytes
    hot = np.ones(len(nbytes), np.bool_)
    hot[order[: int(np.searchsorted(np.cumsum(nbytes[order]), wanted)) + 1]] = False

    def inside(chosen: npt.NDArray[np.bool_]) -> _Numbers:
        return np.bincount(member[chosen], weights=nbytes[chosen], minlength=len(charged)).astype(np.int64)

    most_bytes = np.minimum(CARRIED_SHARE * charged, room_bytes)
    for given_up in (_UNPROMISED, _PROMISED, _FOR_EVER)[0 if keeps_promises else 1 :]:
        firm = hot & (worth.group > given_up)
        possible = np.flatnonzero(~files.stays & (inside(firm) <= most_bytes))
        if len(possible):
            break
    else:
        return None
    file = possible[np.argmin(inside(hot)[possible] / charged[possible])]
    here = np.flatnonzero(member == file)
    kept = here[hot[here]]
    kept = kept[_least_worthy_first(worth, kept)][::-1]
    carried = kept[(np.cumsum(nbytes[kept]) <= min(most_bytes[file], budget_bytes)) | firm[kept]]
    return Emptying(gone=np.setdiff1d(here, carried), carried=carried)


def _least_worthy_first(worth: Worth, some: _Numbers) -> _Numbers:
    return np.lexsort((-worth.depth[some], worth.last_used[some], worth.group[some]))
