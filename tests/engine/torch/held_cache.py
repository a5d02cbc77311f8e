"""A prefix cache in a dict whose loads go on only as far as the test lets them: for the engine's part in every race."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Condition
from typing import Any

from asking import eventually
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.cache.lease import Stretch
from headstart.errors import LoadFailed
from headstart.transfer.buffers import scatter

__all__ = ["eventually"]


class HeldLoad:
    """A load of `tokens` tokens. The test calls `bring(layer)`, `fail(usable_tokens=…)` and `end()`."""

    def __init__(self, cache: HeldCache, key: tuple[int, ...], into: Any, first: int, end: int) -> None:
        self._cache, self._key, self._into = cache, key, into
        self.first_tokens, self.end_tokens = first, end
        self._condition = Condition()
        self._brought: set[int] = set()
        self._state_there = False
        self.waited = False  # somebody has waited for a layer
        self._failed = False
        self._callbacks: list[Callable[[Any], None]] = []
        self.cancelled = False
        self.done = False
        self.usable_tokens = 0
        self.bytes_read = 0
        self.seconds = 0.0

    @property
    def tokens_by_tier(self) -> dict[str, int]:
        return {"disk": self.usable_tokens}

    def wait(self, layer: int, timeout_s: float | None = None) -> None:
        with self._condition:
            self.waited = self.waited or timeout_s != 0
            if not self._condition.wait_for(lambda: self._failed or layer in self._brought, timeout_s):
                raise LoadFailed("not there", timed_out=True, usable_tokens=0)
            if self._failed:
                raise LoadFailed("broken", timed_out=False, usable_tokens=0)

    def state(self, timeout_s: float | None = None) -> memoryview:
        with self._condition:
            if not self._condition.wait_for(lambda: self._failed or self._state_there, timeout_s):
                raise LoadFailed("not there", timed_out=True, usable_tokens=0)
            if self._failed:
                raise LoadFailed("broken", timed_out=False, usable_tokens=0)
            return memoryview(self._cache.states[self._key])

    def bring_state(self) -> None:
        with self._condition:
            self._state_there = True
            self._condition.notify_all()

    def result(self, timeout_s: float | None = None) -> int:
        with self._condition:
            if not self._condition.wait_for(lambda: self.done, timeout_s):
                raise LoadFailed("not done", timed_out=True, usable_tokens=0)
        return self.usable_tokens

    def cancel(self) -> None:
        self.cancelled = True

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        with self._condition:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback(self)

    def bring(self, *layers: int) -> None:
        for layer in layers:
            for first, piece in self._pieces(layer):
                scatter(memoryview(piece), self._into.buffers(layer, first, [len(piece)]))
                self.bytes_read += len(piece)
        with self._condition:
            self._brought.update(layers)
            if len(self._brought) == self._cache.representation.layers:
                self.usable_tokens = self.end_tokens - self.first_tokens
            self._condition.notify_all()

    def fail(self) -> None:
        with self._condition:
            self._failed = True
            self._condition.notify_all()

    def end(self, usable_tokens: int | None = None) -> None:
        """No read can touch the destination any more. Late bytes may have come until now: the test's to write."""
        with self._condition:
            self.done = True
            self.seconds = 0.1
            if usable_tokens is not None:
                self.usable_tokens = usable_tokens
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            callback(self)

    def _pieces(self, layer: int) -> list[tuple[int, bytes]]:
        numbered = list(enumerate(self._cache.stored[self._key][layer]))
        return numbered[self.first_tokens // BLOCK_TOKENS : self.end_tokens // BLOCK_TOKENS]

    def overwrite(self, byte: int) -> None:
        """Late bytes land."""
        for layer in range(self._cache.representation.layers):
            for first, piece in self._pieces(layer):
                scatter(memoryview(bytes([byte]) * len(piece)), self._into.buffers(layer, first, [len(piece)]))


class HeldLease:
    def __init__(self, cache: HeldCache, key: tuple[int, ...]) -> None:
        self._cache, self._key = cache, key
        self.tokens = len(key)
        self.beyond_tokens = 0
        self.releases = 0

    @property
    def stretches(self) -> list[Stretch]:
        nbytes = len(self._key) // BLOCK_TOKENS * sum(size or 0 for size in self._cache.representation.layer_bytes)
        return [Stretch("disk", len(self._key), nbytes, 1)] if self._key else []

    def load(self, into: Any, first_tokens: int = 0, end_tokens: int | None = None) -> HeldLoad:
        load = HeldLoad(self._cache, self._key, into, first_tokens, len(self._key) if end_tokens is None else end_tokens)
        with self._cache.condition:
            self._cache.loads.append(load)
            self._cache.condition.notify_all()
        return load

    def release(self) -> None:
        self.releases += 1

    def __enter__(self) -> HeldLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class HeldTicket:
    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []
        self.done = False
        self.refused = False

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def end(self) -> None:
        self.done = True
        for callback in self._callbacks:
            callback(self)


class HeldCache:
    """Saves are copied and done at once, unless `hold_saves`: then their tickets wait in `tickets`."""

    def __init__(self, representation: Representation) -> None:
        self.representation = representation
        self.stored: dict[tuple[int, ...], list[list[bytes]]] = {}  # prefix → layer → piece
        self.states: dict[tuple[int, ...], bytes] = {}
        self.loads: list[HeldLoad] = []
        self.leases: list[HeldLease] = []
        self.saves: list[tuple[int, ...]] = []
        self.terms: list[dict[str, object]] = []  # of each save
        self.own_tokens: list[int] = []
        self.tickets: list[HeldTicket] = []
        self.promoted: list[tuple[int, ...]] = []
        self.hold_saves = False
        self.condition = Condition()
        self.closed = 0

    def match(self, tokens: Sequence[int], **_: object) -> HeldLease:
        longest = (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        prefixes = (tuple(tokens[:length]) for length in range(longest, 0, -BLOCK_TOKENS))
        ends = self.stored if self.representation.state == "none" else self.states
        lease = HeldLease(self, next((prefix for prefix in prefixes if prefix in ends), ()))
        self.leases.append(lease)
        return lease

    def save(
        self,
        tokens: Sequence[int],
        source: Any,
        *,
        salt: str | None = None,
        shared_tokens: int = 0,
        identity: object = None,
        states: Mapping[int, memoryview] | None = None,
        own_tokens: int = 0,
        **terms: object,
    ) -> HeldTicket:
        whole = len(tokens) // BLOCK_TOKENS
        self.terms.append(terms)
        self.own_tokens.append(own_tokens)
        self.saves.append(tuple(tokens))
        for count, state in (states or {}).items():
            self.states[tuple(tokens[:count])] = bytes(state)
        for pieces in range(1, whole + 1):
            self.stored[tuple(tokens[: pieces * BLOCK_TOKENS])] = [
                [b"".join(map(bytes, source.buffers(layer, first, [size]))) for first in range(pieces)]
                for layer, size in enumerate(self.representation.layer_bytes)
                if size is not None
            ]
        ticket = HeldTicket()
        if self.hold_saves:
            self.tickets.append(ticket)
        else:
            ticket.end()
        return ticket

    def promote(self, tokens: Sequence[int], *, most_bytes: int, **_: object) -> bool:
        self.promoted.append(tuple(tokens))
        return True

    def next_load(self, number: int = 0) -> HeldLoad:
        with self.condition:
            assert self.condition.wait_for(lambda: len(self.loads) > number, 30), "no load was started"
            return self.loads[number]

    def close(self) -> None:
        self.closed += 1
