"""A bounded memory in which every owner has a part of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Values by owner and key. Beyond `most_bytes`, of all owners together, whoever has the most loses what was not used for
    longest. Any number of threads may use one."""

    def __init__(self, most_bytes: int, *, nbytes: Callable[[K, V], int]) -> None:
        self._most_bytes = most_bytes
        self._nbytes = nbytes
        self._lock = Lock()
        self._by_owner: dict[str, OrderedDict[K, V]] = {}
        self._bytes: dict[str, int] = {}
        self._total_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._total_bytes

    @property
    def owners(self) -> int:
        return len(self._by_owner)

    def get(self, owner: str, keys: Sequence[K]) -> list[V | None]:
        """Return the value of each key, and note its use."""
        with self._lock:
            mine = self._by_owner.get(owner)
            if mine is None:
                return [None] * len(keys)
            found = [mine.get(key) for key in keys]
            for key, value in zip(keys, found, strict=True):
                if value is not None:
                    mine.move_to_end(key)
            return found

    def put(self, owner: str, values: Mapping[K, V]) -> None:
        with self._lock:
            mine = self._by_owner.setdefault(owner, OrderedDict())
            for key, value in values.items():
                if key in mine:
                    self._count(owner, -self._nbytes(key, mine.pop(key)))
                mine[key] = value
                self._count(owner, self._nbytes(key, value))
            while self._total_bytes > self._most_bytes:
                largest = max(self._bytes, key=self._bytes.__getitem__)
                self._count(largest, -self._nbytes(*self._by_owner[largest].popitem(last=False)))
                if not self._by_owner[largest]:
                    del self._by_owner[largest], self._bytes[largest]

    def _count(self, owner: str, nbytes: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + nbytes
        self._total_bytes += nbytes
