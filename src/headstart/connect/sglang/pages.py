"""Pages of SGLang in the store, each by the name that SGLang gives it. Knows neither SGLang nor tensors.

A backend is given no token ids: a page's name is a hash that SGLang has chained over its prefix. So a page is kept as a prompt
of its own, of one block, whose 64 "tokens" spell the name (decision 0025):

    page name ──SHA-256──▶ 8 numbers, eight times over ──▶ the one block of a prompt; its key is H(identity, those numbers)

Nothing here raises because a medium failed. What was handed over is read or written until the call returns, and no longer.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
import numpy.typing as npt

from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.cache.lease import Lease
from headstart.cache.prefix_cache import Load, PrefixCache, Ticket
from headstart.errors import LoadFailed

_NAMES = b"\0sglang page names 1"
_SAVES_AT_ONCE = 32  # half of what may wait in a cache's queue
_TOLD_EVERY_S = 60.0
_log = logging.getLogger(__name__)

Parts = Sequence[memoryview]  # of one page, in order


def named_by_pages(identity: Identity) -> Identity:
    """Return the identity under which pages are kept: never that of prompts of real tokens."""
    return replace(identity, architecture=identity.architecture + _NAMES)


class PageStore:
    """Pages of one representation, a piece each. Safe from several threads."""

    def __init__(self, cache: PrefixCache) -> None:
        assert cache.representation.piece_tokens == BLOCK_TOKENS, "a page is one piece"
        self._cache = cache

    @property
    def representation(self) -> Representation:
        return self._cache.representation

    def leading(self, names: Sequence[str]) -> int:
        """Return how many of `names` are stored, from the first on."""
        for count, name in enumerate(names):
            if not self.has(name):
                return count
        return len(names)

    def has(self, name: str) -> bool:
        with self._cache.match(_spelled(name), leave=0, ahead=True) as lease:
            return lease.tokens > 0

    def load(self, names: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Read pages into `pages`, all side by side; return which of them are good. Bytes of the others are undefined."""
        begun: list[tuple[Lease, Load | None]] = []
        try:
            for name, parts in zip(names, pages, strict=True):
                lease = self._cache.match(_spelled(name), leave=0)
                begun.append((lease, lease.load(into=_View(parts)) if lease.tokens else None))
        finally:
            good = [load is not None and _ended(load) for _, load in begun]
            for lease, _ in begun:
                lease.release()
        return good

    def save(self, names: Sequence[str], pages: Sequence[Parts]) -> list[bool]:
        """Write pages; return which of them are stored now."""
        stored: list[bool] = []
        for first in range(0, len(names), _SAVES_AT_ONCE):
            some = slice(first, first + _SAVES_AT_ONCE)
            tickets = [
                self._cache.save(_spelled(name), _View(parts)) for name, parts in zip(names[some], pages[some], strict=True)
            ]
            stored += [_settled(ticket) for ticket in tickets]
        return stored

    def close(self) -> None:
        self._cache.close()


class PageStores:
    """A `PageStore` for each representation, opened when it is first wanted."""

    def __init__(self, open_cache: Callable[[Representation], PrefixCache]) -> None:
        self._open_cache = open_cache
        self._lock = Lock()
        self._stores: dict[bytes, PageStore] = {}
        self._closed = False

    def of(self, representation: Representation) -> PageStore:
        with self._lock:
            if self._closed:
                raise RuntimeError("the store is closed")
            store = self._stores.get(representation.digest)
            if store is None:
                store = self._stores[representation.digest] = PageStore(self._open_cache(representation))
            return store

    def close(self) -> None:
        with self._lock:
            self._closed = True
            stores, self._stores = self._stores, {}
        for store in stores.values():
            store.close()


@dataclass(frozen=True, slots=True)
class _View:
    """One page as a KVView: one piece of one layer."""

    parts: Parts

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> Parts:
        return self.parts


def _spelled(name: str) -> npt.NDArray[np.uint32]:
    numbers = np.frombuffer(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest(), "<u4")
    return np.tile(numbers, BLOCK_TOKENS // len(numbers))


def _ended(load: Load) -> bool:
    """Wait until nothing is read any more, however long a medium hangs: the memory is another's then. True if all is good."""
    while True:
        try:
            return load.result(_TOLD_EVERY_S) > 0
        except LoadFailed:
            load.cancel()
            _log.warning("a read has been under way for %.0f s; its page is not given back before it ends", _since(load))


def _since(load: Load) -> float:
    return time.monotonic() - load.started


def _settled(ticket: Ticket) -> bool:
    """Wait until nothing is read from the page any more. True if it is stored."""
    while True:
        result = ticket.wait(_TOLD_EVERY_S)
        if ticket.done:
            return result.stored_tokens == BLOCK_TOKENS
        _log.warning("a write has been under way for %.0f s; its page is not given back before it ends", _TOLD_EVERY_S)
