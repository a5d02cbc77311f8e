"""Who waits and who runs. What other threads hand in lies here under a lock; the engine's thread alone moves it on.

submit ─▶ mail ─▶ waiting ─▶ running ─▶ gone            `known`: all of them, until their last event
"""

from __future__ import annotations

from collections import deque
from threading import Event, Lock

from headstart.engine.torch.sequence import Sequence


class Roster:
    def __init__(self) -> None:
        self.lock = Lock()  # guards the next two
        self.mail: deque[Sequence] = deque()
        self.known: dict[str, Sequence] = {}
        self.wake = Event()  # set by any thread that has something for the engine's
        self.closing = False
        # The engine's thread alone:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival

    def take_mail(self) -> list[Sequence]:
        """Move what was submitted to those who wait; return all that were aborted and not yet ended."""
        with self.lock:
            self.waiting.extend(sequence for sequence in self.mail if not sequence.ended)
            self.mail.clear()
            return [sequence for sequence in self.known.values() if sequence.aborted]

    def start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It waits again, before all others."""
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def all(self) -> list[Sequence]:
        with self.lock:
            return list(self.known.values())

    def forget(self, sequence: Sequence) -> None:
        """Its last event is next."""
        with self.lock:
            self.known.pop(sequence.request.id, None)
