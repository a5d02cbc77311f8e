"""Which short runs of one chain become one long run. Pure.

A layer of a run is one read. Reads of some 400 KB and more go at a disk's full rate, reads of 98 KB at 70 % of it, so only runs
below that size are worth writing anew, and only where the result is above it. Then a short byte is written anew once in its
life, and a long one only beside half as many short ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

KNEE_BYTES = 384 << 10  # of one layer: the smallest read that was as fast as longer ones
USED_AGAIN = 3  # times: one request notes the use of what it saves twice, at the end of its prompt and of its answer
IDLE_S = 60.0  # since its last use a conversation counts as paused
LONG_PER_SHORT = 2  # bytes that are long enough already, at most, for a short one that is joined to them

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Run(Generic[Name]):
    """One extent as this choice sees it. `parent` and `last`: keys of the block before its first, and of its last one.
    `family`: only runs with the same can be joined (layout, tenant). `ends`: nothing may be joined behind it."""

    name: Name
    parent: bytes
    last: bytes
    nbytes: int
    family: Hashable
    ends: bool = False


def chains(runs: Sequence[Run[Name]]) -> list[list[Run[Name]]]:
    """Return the runs in the order of their prompts, each following the one before. Where several follow, a chain ends: what is
    before is shared by prompts that part here, and outlives each of them.

    >>> one, two = Run("b", b"1", b"2", 10, None), Run("a", b"0", b"1", 10, None)
    >>> [[run.name for run in chain] for chain in chains([one, two])]
    [['a', 'b']]
    """
    behind: dict[tuple[Hashable, bytes], list[Run[Name]]] = {}
    for run in runs:
        behind.setdefault((run.family, run.parent), []).append(run)

    def next_of(run: Run[Name]) -> Run[Name] | None:
        following = [] if run.ends else behind.get((run.family, run.last), [])
        return following[0] if len(following) == 1 else None

    followers = {run.name for run in map(next_of, runs) if run is not None}
    found = []
    taken: set[Name] = set()  # blocks may lie in two runs, so two may precede one
    for run in runs:
        if run.name in followers:
            continue
        chain: list[Run[Name]] = []
        at: Run[Name] | None = run
        while at is not None and at.name not in taken:
            taken.add(at.name)
            chain.append(at)
            at = next_of(at)
        found.append(chain)
    return found


def choose_joins(nbytes: Sequence[int], *, layers: int, most_bytes: int) -> list[range]:
    """Return which neighbours of a chain become one, given the size of each run. No result is larger than `most_bytes`.

    Short runs that stand side by side become one, if that is then long enough. Where they are not, or where a short one stands
    alone, the smaller neighbour joins them if it is at most `LONG_PER_SHORT` times as large. Where no run can be as long as a
    disk wants, in a small cache, half of the longest is long enough.

    >>> choose_joins([900 << 10, 100 << 10, 100 << 10, 200 << 10, 2 << 20], layers=1, most_bytes=64 << 20)
    [range(1, 4)]
    """
    knee = min(KNEE_BYTES * layers, most_bytes // 2)
    groups: list[range] = []
    start = taken = 0
    while start < len(nbytes):
        end, short = start, 0
        while end < len(nbytes) and nbytes[end] < knee and short + nbytes[end] <= most_bytes:
            short += nbytes[end]
            end += 1
        group = range(start, end)
        start = max(end, start + 1)
        if group and (short < knee or len(group) == 1):
            group = _with_neighbour(nbytes, group, short, lowest=taken, most_bytes=most_bytes)
        if len(group) > 1 and sum(nbytes[run] for run in group) >= knee:
            groups.append(group)
            start = taken = group.stop
    return groups


def _with_neighbour(nbytes: Sequence[int], group: range, short: int, *, lowest: int, most_bytes: int) -> range:
    """Return the group with the smaller run beside it that may join it, or as it is."""
    sides = []
    if group.start > lowest:
        sides.append((nbytes[group.start - 1], range(group.start - 1, group.stop)))
    if group.stop < len(nbytes):
        sides.append((nbytes[group.stop], range(group.start, group.stop + 1)))
    fitting = [side for side in sides if side[0] <= LONG_PER_SHORT * short and side[0] + short <= most_bytes]
    return min(fitting, key=lambda side: side[0])[1] if fitting else group
