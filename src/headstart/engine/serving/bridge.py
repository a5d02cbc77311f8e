"""An engine's side of the prefix cache, as far as all engines have it alike: what is stored, what is decided, what is saved.

Each save holds a reference to the KV that it reads until nothing can read it any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS
from headstart.cache.prefix_cache import KVView, Lease, PrefixCache
from headstart.cache.ticket import Ticket
from headstart.engine.serving.parts import StateCopy
from headstart.engine.speeds import Speeds
from headstart.policy.loading import Plan, Stretch, plan_load

MEMORY = "memory"  # the tier whose tokens are told apart from those of all others
_PROMOTED_BYTES = 1 << 30  # at once, at most
L_co = TypeVar("L_co", covariant=True)
K_contra = TypeVar("K_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Started(Generic[L_co]):
    """What brings `matched_tokens` to a request, and by which plan. No plan: a miss. A plan and no load: it is computed.
    `beyond_tokens` more are stored, and of no use because no state stands behind them."""

    load: L_co | None
    plan: Plan | None
    matched_tokens: int
    beyond_tokens: int


class Held(KVView, Protocol):
    """KV that a save reads, with a reference."""

    def release(self) -> None: ...


class Bridge(ABC, Generic[K_contra]):
    """`K_contra`: an engine's KV of one request. `wake` is called from other threads whenever a load or save has let go of KV.

    `timeout_s`: how long a load may take; `hedge_after_s`: how late it may be at least before it is given up as too slow."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        speeds: Speeds,
        timeout_s: float,
        hedge_after_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._speeds = speeds
        self._timeout_s = timeout_s
        self._hedge_after_s = hedge_after_s
        self._wake = wake

    @property
    def in_parts(self) -> bool:
        """Whether reading may stop anywhere for computing: a recurrent state is only there at the end, and pieces of several
        blocks stand for passes that are not cut."""
        representation = self._cache.representation
        return representation.state == "none" and representation.piece_tokens == BLOCK_TOKENS

    def stored_tokens(
        self, tokens: Sequence[int], *, salt: str | bytes | None, shared_tokens: int = 0, identity: Identity | None = None
    ) -> int:
        """Return how many of `tokens` a load would bring now."""
        with self._cache.match(tokens, salt=salt, shared_tokens=shared_tokens, identity=identity, ahead=True) as lease:
            return lease.tokens

    def promote(
        self, tokens: Sequence[int], *, salt: str | bytes | None, shared_tokens: int = 0, identity: Identity | None
    ) -> bool:
        """Have what is stored of `tokens` brought to the memory tier; see `PrefixCache.promote`."""
        return self._cache.promote(
            tokens, most_bytes=_PROMOTED_BYTES, salt=salt, shared_tokens=shared_tokens, identity=identity
        )

    def save(
        self,
        tokens: Sequence[int],
        kv: K_contra,
        *,
        salt: str | bytes | None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        retention: str,
        tenant: str,
        session: str,
        keep_s: float,
        own_tokens: int,
        memory_only: bool,
        states: Mapping[int, StateCopy] | None = None,
    ) -> Ticket | None:
        """Give the KV of `tokens` to the cache, and by n the state behind the first n tokens, written behind, and return the
        ticket. `own_tokens`: as many of them as this request gave before. `kv` may be released at once; of `states` this takes
        over the references. None: it cannot be taken now."""
        with ExitStack() as stack:
            for copy in (states or {}).values():
                stack.callback(copy.release)
            source = self._source(kv, len(tokens))
            if source is None:
                return None
            stack.callback(source.release)
            ticket = self._cache.save(
                tokens,
                source,
                salt=salt,
                shared_tokens=shared_tokens,
                identity=identity,
                retention=retention,
                tenant=tenant,
                session=session,
                keep_s=keep_s,
                states={n: copy.data for n, copy in states.items()} if states else None,
                own_tokens=own_tokens,
                memory_only=memory_only,
            )
            held = stack.pop_all()

        def let_go(*_: object) -> None:
            held.close()
            self._wake()

        ticket.add_done_callback(let_go)
        return ticket

    @abstractmethod
    def _source(self, kv: K_contra, tokens: int) -> Held | None:
        """Return what a save of the first `tokens` tokens reads, with a reference of its own; None where there is no memory for
        that now."""

    def _planned(self, lease: Lease, *, prompt_tokens: int, layers: int, ahead_s: float) -> Plan:
        """`layers`: in how many steps the suffix can follow a load."""
        return plan_load(
            stretches_of(lease),
            suffix_tokens=prompt_tokens - lease.tokens,
            layers=layers,
            piece_tokens=self._cache.representation.piece_tokens,
            computing=self._speeds.computing,
            reading=self._speeds.reading(),
            ahead_s=ahead_s,
            in_parts=self.in_parts,
        )


def stretches_of(lease: Lease) -> list[Stretch]:
    """Return what matched as `policy.loading` sees it."""
    return [Stretch(one.tier, one.tokens, one.nbytes, always=one.tier == MEMORY) for one in lease.stretches]
