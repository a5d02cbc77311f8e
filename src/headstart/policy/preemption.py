"""Who gives its place to another request, when memory or places are short. Pure.

Requests rank by priority, then by age: the oldest of the highest priority is first. Nobody goes round in circles, because

- memory to grow is taken only from those who rank lower, so the first never gives any;
- whoever waits takes a place from lower priorities at once, and from its own only after a long wait and only of those who
  gave none yet or are younger; so of equals each gives way to a younger one at most once;
- the first of those who run gives its place to a higher priority alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """A request. `number`: in order of arrival, no two alike; `preemptions`: how often it gave way already; `since_s`: since
    when it runs or waits."""

    number: int
    priority: int
    preemptions: int = 0
    since_s: float = 0.0

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first."""
        return (-self.priority, self.number)


def gives_memory(running: Sequence[Standing]) -> Standing | None:
    """Return who gives up its memory so that one of those who run can grow: the last in rank, which may be that one itself;
    None where it runs alone."""
    return max(running, key=lambda one: one.rank) if len(running) > 1 else None


def gives_place(
    running: Sequence[Standing], *, to: Standing, now_s: float, patience_s: float, last_s: float
) -> Standing | None:
    """Return who of those who run gives its place to `to`, who waits; None where it goes on waiting. `last_s`: when an equal
    did so last: one at a time, or where many wait all would change places at once, and every answer would pause."""
    if not running:
        return None
    lowest = max(running, key=lambda one: one.rank)
    if lowest.priority < to.priority:
        return lowest
    if now_s - max(to.since_s, last_s) < patience_s:
        return None
    first = min(running, key=lambda one: one.rank)
    equals = [
        one
        for one in running
        if one.priority == to.priority
        and one is not first
        and now_s - one.since_s >= patience_s
        and (one.preemptions == 0 or one.number > to.number)
    ]
    return max(equals, key=lambda one: one.rank, default=None)
