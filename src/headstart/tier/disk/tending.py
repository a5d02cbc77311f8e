"""What a directory needs when nobody waits: one small step a call."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from headstart.errors import StoreError
from headstart.tier.disk.charges import give_back
from headstart.tier.disk.doubles import Doubles
from headstart.tier.disk.evicting import expire
from headstart.tier.disk.joining import Joiner, Reader
from headstart.tier.disk.removal import give_back_left, give_back_waiting
from headstart.tier.disk.store import Store


class Tending:
    """`joiner` is told what is used. One thread tends at a time; another one is told that there is nothing to do."""

    def __init__(self, store: Store, tier: Reader) -> None:
        self.joiner = Joiner(store, tier)
        self._store = store
        self._doubles = Doubles(store)
        self._tending = Lock()

    def step(self) -> bool:
        """Do what is due and does not take longer than writing one extent anew; True while there is more. A step that fails is
        a counter."""
        self._store.try_again()
        if self._store.stopped or self._store.forked or not self._tending.acquire(blocking=False):
            return False
        steps: tuple[Callable[[], bool], ...] = (self._in_turn, self.joiner.join)
        try:
            return any(step() for step in steps)
        except (OSError, StoreError):
            self._store.counters.add("tend_failed")
            return False
        finally:
            self._tending.release()

    def close(self) -> None:
        if self._tending.acquire(blocking=False):  # else whoever tends just now meets what is closed
            self.joiner.rest()

    def _in_turn(self) -> bool:
        """What only changes books and journal; a writer goes first."""
        store = self._store
        with store.turn(wait_s=0) as mine:
            if not mine:
                return False
            give_back_waiting(store)
            give_back_left(store)
            if store.upkeep.touches_due:
                store.upkeep.flush_touches()
            return expire(store) or give_back(store) or self._doubles.drop()
