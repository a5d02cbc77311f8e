"""Whose turn it is: higher priorities first, tenants of one priority in fair shares, each tenant's own as they came. Pure.

A tenant's *time* is the work that was done for it, in tokens; who has the least goes next. So of two tenants that always have
something waiting each gets half, however many requests the other one sends. A tenant that comes back starts at the least time
of those that are there: nobody saves up turns by being away, and nobody is made to pay for having been alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

_GENERATED = 1  # what a token of the answer costs beside having been computed: its weights are read for it alone


@dataclass(frozen=True, slots=True)
class Turn:
    """One who wants a turn. `number`: in order of arrival, no two alike; `tokens`: the work that its turn will be;
    `passed_over`: how many turns others of its tenant had since its own last one."""

    number: int
    tenant: str
    priority: int
    tokens: int
    passed_over: int = 0


class FairShares:
    """The times of all tenants. A tenant is there while it has requests, waiting or running.

    >>> shares = FairShares()
    >>> for tenant in ("a", "a", "b"):
    ...     shares.enter(tenant)
    >>> shares.charge("a", computed=100)
    >>> [turn.tenant for turn in shares.queue([Turn(0, "a", 0, 10), Turn(1, "a", 0, 10), Turn(2, "b", 0, 10)])]
    ['b', 'a', 'a']
    """

    def __init__(self) -> None:
        self._times: dict[str, int] = {}
        self._requests: Counter[str] = Counter()
        self._least = 0  # of those that are there; goes forward only

    def enter(self, tenant: str) -> None:
        """One more request of the tenant is there."""
        if not self._requests[tenant]:
            self._times[tenant] = max(self._times.get(tenant, 0), self._least)
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One of its requests has ended."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant]
            if not self._requests:
                self._least = max(self._times.values())
            self._move_on()

    def charge(self, tenant: str, *, computed: int, generated: int = 0) -> None:
        self._times[tenant] += computed + _GENERATED * generated
        self._move_on()

    def queue(self, turns: Sequence[Turn], *, pledged: Mapping[str, int] | None = None) -> list[Turn]:
        """Return `turns` in the order in which requests are let in. `pledged`: work in tokens that is sure to be done for a
        tenant, so that its first request does not bring in all others before anything was charged."""
        return self._in_shares(turns, pledged or {}, by_arrival=True)

    def prefills(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return prompts in the order in which they are computed: of a tenant the shortest, and every other turn the oldest;
        so a short one waits for one turn of a long one, and the long one gets every other turn however many short ones come."""
        return self._in_shares(turns, {}, by_arrival=False)

    def _in_shares(self, turns: Sequence[Turn], pledged: Mapping[str, int], *, by_arrival: bool) -> list[Turn]:
        levels: defaultdict[int, defaultdict[str, list[Turn]]] = defaultdict(lambda: defaultdict(list))
        for turn in turns:
            levels[turn.priority][turn.tenant].append(turn)
        order: list[Turn] = []
        times = {turn.tenant: self._times.get(turn.tenant, 0) + pledged.get(turn.tenant, 0) for turn in turns}
        for _, tenants in sorted(levels.items(), reverse=True):
            queues = {tenant: deque(_own_order(own, by_arrival=by_arrival)) for tenant, own in tenants.items()}
            heads = [(times[tenant], queue[0].number, tenant) for tenant, queue in queues.items()]
            heapify(heads)
            while heads:
                _, _, tenant = heads[0]
                turn = queues[tenant].popleft()
                order.append(turn)
                times[tenant] += turn.tokens
                if queues[tenant]:
                    heapreplace(heads, (times[tenant], queues[tenant][0].number, tenant))
                else:
                    heappop(heads)
        return order

    def _move_on(self) -> None:
        if self._requests:
            self._least = max(self._least, min(self._times[tenant] for tenant in self._requests))
        # Whoever is away and not ahead would start at the least time anyway.
        away = [tenant for tenant, time in self._times.items() if tenant not in self._requests and time <= self._least]
        for tenant in away:
            del self._times[tenant]


def _own_order(turns: Sequence[Turn], *, by_arrival: bool) -> list[Turn]:
    by_age = sorted(turns, key=lambda turn: turn.number)
    if by_arrival:
        return by_age
    by_length = sorted(turns, key=lambda turn: (turn.tokens, turn.number))
    oldest = by_age[0]
    if not oldest.passed_over:
        return by_length
    return [oldest, *(turn for turn in by_length if turn is not oldest)]
