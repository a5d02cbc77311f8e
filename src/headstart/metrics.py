"""Counters that rooms keep and that the server exposes. A counter only grows; nothing here can raise into a caller's path."""

from __future__ import annotations

from collections import Counter
from threading import Lock


class Counters:
    """Thread-safe named counters.

    >>> counters = Counters()
    >>> counters.add("bytes_read", 4096)
    >>> counters.snapshot()
    {'bytes_read': 4096}
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def get(self, name: str) -> int:
        with self._lock:
            return self._values[name]

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._values)
