"""Who of those that wait runs next, as soon as there is a place and KV memory for it. In which order: `policy.fairness`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic

from headstart.engine.serving.bridge import Bridge
from headstart.engine.serving.ending import Endings
from headstart.engine.serving.parts import KV, Loads, Rooms
from headstart.engine.serving.preempting import Preemption
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.sequence import S
from headstart.engine.serving.sharing import Offer, best_offer
from headstart.metrics import Counters

_log = logging.getLogger(__name__)

_AHEAD = 2  # who wait and whose stored prefixes are read meanwhile


class Admission(Generic[S]):
    """For the engine's thread. `patience_s`: how long loads and saves that go on without their requests are waited for."""

    def __init__(
        self,
        roster: Roster[S],
        rooms: Rooms[S],
        preemption: Preemption[S],
        loads: Loads[S],
        endings: Endings[S],
        bridge: Bridge[Any] | None,
        counters: Counters,
        *,
        max_running: int,
        patience_s: float,
        gives: Callable[[S], int] | None,
    ) -> None:
        """`gives`: how many tokens of a running request's beginning others may hold together with it; None: nobody shares."""
        self._gives = gives
        self._roster = roster
        self._rooms = rooms
        self._preemption = preemption
        self._loads = loads
        self._endings = endings
        self._bridge = bridge
        self._counters = counters
        self._max_running = max_running
        self._patience_s = patience_s
        self._starved_s: float | None = None  # since when nothing runs and the next one finds no memory
        self._claimant: S | None = None  # to whom one gave way: it goes before its equals

    def admit(self) -> None:
        """Let in who can run, and see to the stored prefixes of those who come next."""
        self._let_in()
        self._look_ahead()

    def _let_in(self) -> None:
        """Give KV to those who wait, in turn, and start their loads. Nobody overtakes one who finds no memory; but who will
        share what another one is still loading or computing stays until it is there, and holds up nobody."""
        if len(self._roster.running) >= self._max_running and not self._preemption.may_place(self._roster.waiting):
            return
        for sequence in self._in_turn():
            offer, kv = self._find_kv(sequence)
            if kv is not None:
                self._starved_s = None
            elif offer is not None and not offer.ready:
                continue
            elif (kv := self._spare_for(sequence)) is None:
                return
            self._roster.start(sequence)
            ahead, sequence.kv = sequence.kv is not None, kv
            if self._claimant is sequence:
                self._claimant = None
            if sequence.admitted_s is None:
                sequence.admitted_s = sequence.running_s
                self._counters.add("prompt_tokens", sequence.prompt_tokens)
            if ahead:
                self._loads.count_hit(sequence)
                continue  # what is stored of it is there, or on its way
            if kv.shared_tokens:
                sequence.computed = kv.shared_tokens
                self._loads.found(sequence, memory_tokens=kv.shared_tokens)
                self._counters.add("prefixes_shared")
            else:
                self._loads.start(sequence)

    def _in_turn(self) -> list[S]:
        """Return those who wait in the order in which they are let in."""
        if not self._roster.waiting:
            return []
        pledged: Counter[str] = Counter()
        for one in self._roster.running:
            pledged[one.request.tenant] += one.pending
        waiting = {one.number: one for one in self._roster.waiting}
        turns = self._roster.shares.queue([one.turn for one in waiting.values()], pledged=pledged)
        order = [waiting[turn.number] for turn in turns]
        claimant = self._claimant
        if claimant is not None and claimant.number in waiting:
            order.remove(claimant)
            above = sum(one.request.priority > claimant.request.priority for one in order)
            order.insert(above, claimant)
        return order

    def _find_kv(self, sequence: S) -> tuple[Offer[S] | None, KV | None]:
        """Return what others have of this one's beginning, and its KV if there is a place and memory for it now, whoever must
        give way for that."""
        while True:
            offer = self._offer(sequence) if sequence.kv is None else None
            if (offer is not None and not offer.ready) or (sequence.kv is None and self._owed_before(sequence)):
                return offer, None
            if placed := len(self._roster.running) < self._max_running:
                kv = sequence.kv or self._rooms.first(sequence, offer)
                if kv is not None:
                    return offer, kv
                if self._preemption.take_back(spare=sequence):
                    continue
            if (placed and self._rooms.coming_free()) or not self._preemption.give_place(sequence):
                return offer, None
            self._claimant = sequence

    def _owed_before(self, sequence: S) -> bool:
        """Whether one that runs and ranks higher waits for room to grow: what memory comes free is for that one first."""
        return any(one.stalled and one.standing.rank < sequence.standing.rank for one in self._roster.running)

    def _look_ahead(self) -> None:
        """Have what is stored of those who are next read while others are computed: into their own KV where there is memory
        for that, else into the memory tier. Once for each."""
        waiting = self._roster.waiting
        if self._bridge is None or not self._roster.running or all(one.looked_ahead for one in waiting):
            return
        for sequence in self._in_turn()[:_AHEAD]:
            if sequence.looked_ahead or not sequence.use_cache or not sequence.reload:
                continue
            sequence.looked_ahead = True
            if self._offer(sequence) is not None or not self._stored(sequence):
                continue
            sequence.kv = None if self._owed_before(sequence) else self._rooms.first(sequence, None)
            if sequence.kv is None:
                self._loads.promote(sequence.tokens, sequence.request.salt, sequence.request.shared_tokens, sequence.identity)
                continue
            self._loads.start(sequence)
            if sequence.load is None:  # it is to be computed
                self._rooms.give_back(sequence)

    def _stored(self, sequence: S) -> int:
        """Return how many of its tokens the cache has, or had when it was asked."""
        assert self._bridge is not None
        if sequence.stored is None:
            try:
                sequence.stored = self._bridge.stored_tokens(
                    sequence.tokens,
                    salt=sequence.request.salt,
                    shared_tokens=sequence.request.shared_tokens,
                    identity=sequence.identity,
                )
            except Exception:  # noqa: BLE001 - as where it is loaded, which will fail, be counted and logged again
                sequence.stored = 0
            sequence.note_known(sequence.stored)
        return sequence.stored

    def _offer(self, sequence: S) -> Offer[S] | None:
        """Return what a running request has of this one's beginning, unless the cache has more."""
        if self._bridge is None or not sequence.use_cache or self._gives is None:
            return None
        offer = best_offer(sequence, self._roster.running, gives=self._gives)
        if offer is None or offer.tokens < self._stored(sequence):
            return None
        if offer.giver.recurrent and not offer.ready:
            offer.giver.awaited.add(offer.tokens)
        return offer

    def _spare_for(self, sequence: S) -> KV | None:
        """Return memory beyond the capacity once nothing runs and still none comes free: reads or writes that never end hold
        it. One request at a time then goes on without the cache, whose reads could take this memory, too. Where there is no
        such memory either, end the request: nobody waits for ever."""
        if self._roster.running:
            return None
        now = time.monotonic()
        if self._starved_s is None:
            self._starved_s = now
        waited = not sequence.reload or sequence.mix  # for its load, before it had to have fresh memory
        if not waited and now < self._starved_s + self._patience_s:
            return None
        kv = self._rooms.spare(sequence)
        if kv is None:
            self._counters.add("requests_starved")
            self._endings.end(
                sequence, "error", error="there was no memory for this request's KV for too long; send it again later"
            )
            self._roster.wake.set()  # for those behind it
            return None
        sequence.use_cache = False
        sequence.notes.append("reads or writes that do not end hold the KV memory; computed beside it, without the cache")
        self._counters.add("spare_memory_used")
        return kv
