"""Requests that give way to others, when memory or places are short: their blocks go to the cache, and they go on from there.

    running ─▶ its whole blocks are saved, its KV freed ─▶ waiting ─▶ matched, loaded, the rest computed ─▶ running

A request that gives way keeps its tokens and its sampler, so nothing is emitted twice and its answer stays the same. Without
a cache it computes again what it had. Who gives way: `policy.preemption`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Several
from typing import Generic

from headstart.engine.serving.ending import Endings
from headstart.engine.serving.parts import Loads, Rooms
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.sequence import S
from headstart.metrics import Counters
from headstart.policy.preemption import Standing, gives_memory, gives_place


class Preemption(Generic[S]):
    """For the engine's thread. `patience_s`: how long a request waits before equals give their place to it."""

    def __init__(
        self,
        roster: Roster[S],
        rooms: Rooms[S],
        loads: Loads[S],
        endings: Endings[S],
        counters: Counters,
        *,
        patience_s: float,
    ) -> None:
        self._roster = roster
        self._rooms = rooms
        self._loads = loads
        self._endings = endings
        self._counters = counters
        self._patience_s = patience_s
        self._last_s = -math.inf  # when an equal last gave its place

    def make_room(self) -> None:
        """Give every running request room for its next token, the first in rank first. Who gets none sits out the next step."""
        for sequence in sorted(self._roster.running, key=lambda one: one.standing.rank):
            if sequence.kv is not None:  # it may have given way to one before it
                sequence.stalled = not self._has_room(sequence)

    def take_back(self, *, spare: S | None = None) -> bool:
        """Take the KV of one who waits and had it for reading ahead, the last in rank first, but not of `spare`; return
        whether one had any. It reads again once it runs."""
        holding = [one for one in self._roster.waiting if one.kv is not None and one is not spare]
        if not holding:
            return False
        loser = max(holding, key=lambda one: one.standing.rank)
        self._loads.drop(loser)
        self._rooms.give_back(loser)
        loser.computed = 0
        if not loser.hit_counted:  # else it is what it found before it gave way
            loser.cached_memory_tokens = loser.cached_disk_tokens = 0
        self._counters.add("read_ahead_in_vain")
        return True

    def may_place(self, waiting: Several[S]) -> bool:
        """Return whether one of those who wait might get a place though all are taken."""
        now, lowest = time.monotonic(), min((one.request.priority for one in self._roster.running), default=0)
        return any(one.request.priority > lowest or now - one.waiting_s >= self._patience_s for one in waiting)

    def give_place(self, to: S) -> bool:
        """Let one of those who run give its place to `to`, who waits; return whether one did. For its memory alone nobody does
        while memory is coming free."""
        victim = gives_place(
            [one.standing for one in self._roster.running],
            to=to.standing,
            now_s=time.monotonic(),
            patience_s=self._patience_s,
            last_s=self._last_s,
        )
        if victim is not None:
            if victim.priority == to.request.priority:
                self._last_s = time.monotonic()
            self._give_way(self._of(victim), "place")
        return victim is not None

    def _has_room(self, sequence: S) -> bool:
        while not sequence.has_room and not self._rooms.grow(sequence):
            if self._rooms.coming_free():
                return False
            if self.take_back():
                continue
            victim = gives_memory([one.standing for one in self._roster.running])
            if victim is None:  # it is alone, and a larger region beside its own is more than there is
                sequence.whole = True
            loser = sequence if victim is None else self._of(victim)
            self._give_way(loser, "memory")
            if loser is sequence:
                return False
        return True

    def _give_way(self, sequence: S, why: str) -> None:
        sequence.preemptions += 1
        self._counters.add(f"preempted_{why}")
        if sequence.load is not None:
            self._loads.drop(sequence)  # nothing of it counts, so there is nothing to save
        else:
            sequence.reached = max(sequence.reached, sequence.computed)
            self._endings.save(sequence)
        self._rooms.give_back(sequence)
        sequence.computed = 0
        sequence.stored = None
        sequence.stalled = False
        sequence.passed_over = 0
        self._roster.put_back(sequence)

    def _of(self, standing: Standing) -> S:
        return next(one for one in self._roster.running if one.number == standing.number)
