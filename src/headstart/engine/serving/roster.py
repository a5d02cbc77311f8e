"""Who waits and who runs. What other threads hand in lies here under a lock; the engine's thread alone moves it on.

submit ─▶ mail ─▶ waiting ◀─▶ running ─▶ gone            `known`: all of them, until their last event
"""

from __future__ import annotations

import time
from collections import deque
from threading import Event, Lock
from typing import Generic

from headstart.engine.serving.sequence import S
from headstart.policy.fairness import FairShares


class Roster(Generic[S]):
    def __init__(self) -> None:
        self.lock = Lock()  # guards the next three
        self.mail: deque[S] = deque()
        self.known: dict[str, S] = {}
        self._posted = 0
        self.wake = Event()  # set by any thread that has something for the engine's
        self.closing = False
        # The engine's thread alone:
        self.waiting: list[S] = []
        self.running: list[S] = []
        self.shares = FairShares()  # of the tenants of all of them

    def post(self, sequence: S) -> None:
        """Hand in a request. Under the lock."""
        sequence.number = self._posted
        self._posted += 1
        self.known[sequence.request.id] = sequence
        self.mail.append(sequence)

    def take_mail(self) -> list[S]:
        """Move what was handed in to those who wait; return all that nobody wants any more and that have not ended."""
        with self.lock:
            new = [sequence for sequence in self.mail if not sequence.ended]
            self.mail.clear()
            over = [sequence for sequence in self.known.values() if sequence.over]
        for sequence in new:
            sequence.waiting_s = sequence.submitted_s
            self.waiting.append(sequence)
            self.shares.enter(sequence.request.tenant)
        return over

    def start(self, sequence: S) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.running_s = time.monotonic()

    def put_back(self, sequence: S) -> None:
        """It waits again, at its old place: requests of a tenant are in order of arrival."""
        self.running.remove(sequence)
        self.waiting.append(sequence)
        sequence.waiting_s = time.monotonic()

    def remove(self, sequence: S) -> None:
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
                self.shares.leave(sequence.request.tenant)

    def all(self) -> list[S]:
        with self.lock:
            return list(self.known.values())

    def forget(self, sequence: S) -> None:
        """Its last event is next."""
        with self.lock:
            self.known.pop(sequence.request.id, None)
