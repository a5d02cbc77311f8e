"""PrefixCache: `match` a prompt, `load` what matched, `save` what was computed. A failing tier is a miss and a counter.

    lease = cache.match(tokens)              # longest stored prefix, protected while held
    load = lease.load(into=kv)               # reading starts at once, layer 0 of everything first
    load.wait(layer)                         # … before attending that layer
    lease.release()
    ticket = cache.save(tokens, source=kv)   # returns at once; written behind

No call here raises because a medium failed. ValueError is for wrong use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.tier.base import Problem, Tier, TierStatistics


class KVView(Protocol):
    """An engine's KV memory of one request, seen as pieces. The same shape serves loading (writable) and saving (readable)."""

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> Sequence[memoryview]:
        """Return buffers that together hold pieces first … first+len(sizes)-1 of `layer`, in order; `sizes[i]` is the bytes of
        piece first+i. When saving an opaque representation sizes are 0 and the view decides. Large aligned buffers are read
        into directly; others go through staging."""
        ...


class Load:
    """A load in flight. Every wait has a deadline.

    Attributes once done: `usable_tokens`, `bytes_read`, `tokens_by_tier` ({"memory": n, "disk": m}, only what was
    verified), `seconds`."""

    def wait(self, layer: int, timeout_s: float | None = None) -> None:
        """Return when `layer` is verified for every matched token. Raises LoadFailed on the first failure or when the
        deadline passes (`timed_out=True`: bytes may still land in the destination until `done`)."""
        raise NotImplementedError

    def result(self, timeout_s: float | None = None) -> int:
        """Wait for every read to end, good or bad; return the tokens that are good in all layers (≤ lease.tokens, whole
        pieces). Raises LoadFailed(timed_out=True, usable_tokens=0) when the deadline passes first."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Start no further reads. Reads under way still end; `result` then returns."""
        raise NotImplementedError

    def add_done_callback(self, callback: Callable[[Load], None]) -> None:
        """Call back once no read can touch the destination any more (at once if that is so already)."""
        raise NotImplementedError


class Lease:
    """The longest stored prefix of a prompt, protected from eviction until `release()` (twice is fine; also a context
    manager). `tokens`: how many tokens matched, a multiple of the piece; 0 for a miss. At least one token is left."""

    tokens: int

    def load(self, into: KVView) -> Load:
        """Start reading all matched pieces into `into`. Once per lease."""
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError


class Ticket:
    """What became of a save. `wait(timeout_s) -> SaveResult`; `done`; never raises for a medium that failed."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Tokens of the prompt that are in the slowest tier that takes writes now (`stored_tokens`), new bytes written, and, when
    something was not kept, why: "queue-full", "full", "error", "closed" …"""

    stored_tokens: int
    written_bytes: int
    reason: str | None


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    tiers: tuple[TierStatistics, ...]
    counters: dict[str, int]


class PrefixCache:
    """`tiers`: fastest first. One per process and representation; safe from many threads."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        identity: Identity,
        representation: Representation,
        save_queue_bytes: int = 1 << 30,
        load_timeout_s: float = 30.0,
    ) -> None:
        raise NotImplementedError

    def match(
        self,
        tokens: Sequence[int],
        *,
        salt: str | bytes | None = None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
    ) -> Lease:
        raise NotImplementedError

    def save(
        self,
        tokens: Sequence[int],
        source: KVView,
        *,
        salt: str | bytes | None = None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        retention: str = "default",
    ) -> Ticket:
        """Keep every full piece of `tokens` that some tier lacks. The source must stay valid until the ticket is done
        (`ticket.add_done_callback(region.release)`)."""
        raise NotImplementedError

    def statistics(self) -> CacheStatistics:
        raise NotImplementedError

    def check(self) -> list[Problem]:
        raise NotImplementedError

    def close(self) -> None:
        """Finish queued saves, join every thread, close the tiers. Twice is fine."""
        raise NotImplementedError
