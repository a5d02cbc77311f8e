"""A bounded memory in which every owner has a part of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
_OWNER_BYTES = 1024  # of books for each owner, whatever it has


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
        self._by_size: list[tuple[int, str]] = []

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
            if owner not in self._by_owner:
                self._by_owner[owner] = OrderedDict()
                self._count(owner, _OWNER_BYTES)
            mine = self._by_owner[owner]
            for key, value in values.items():
                if key in mine:
                    self._count(owner, -self._nbytes(key, mine.pop(key)))
                mine[key] = value
                self._count(owner, self._nbytes(key, value))
            heappush(self._by_size, (-self._bytes[owner], owner))
            while self._total_bytes > self._most_bytes:
                self._forget_one(self._largest())
            if len(self._by_size) > 2 * len(self._bytes) + 64:
                self._by_size = [(-nbytes, one) for one, nbytes in self._bytes.items()]
                heapify(self._by_size)

    def _largest(self) -> str:
        """Return who has the most. What stands in the heap may be out of date, but of everybody the present size is there."""
        while True:
            negative, owner = self._by_size[0]
            if self._bytes.get(owner) == -negative:
                return owner
            heappop(self._by_size)

    def _forget_one(self, owner: str) -> None:
        mine = self._by_owner[owner]
        if mine:
            self._count(owner, -self._nbytes(*mine.popitem(last=False)))
        if mine:
            heappush(self._by_size, (-self._bytes[owner], owner))
        else:
            self._total_bytes -= self._bytes.pop(owner)
            del self._by_owner[owner]

    def _count(self, owner: str, nbytes: int) -> None:
        self._bytes[owner] = self._bytes.get(owner, 0) + nbytes
        self._total_bytes += nbytes
