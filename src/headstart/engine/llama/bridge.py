"""The llama engine's side of the prefix cache: match, read into host memory, save. Translates; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import Lease, PrefixCache, Ticket
from headstart.engine.llama.cells import SequenceKV
from headstart.engine.llama.reading import PrefixRead
from headstart.engine.serving.loading import stretches_of
from headstart.engine.serving.parts import StateCopy
from headstart.engine.speeds import Speeds
from headstart.policy.loading import Plan, plan_load
from headstart.tier.arena import Arena

_PROMOTED_BYTES = 1 << 30  # at once, at most


@dataclass(frozen=True, slots=True)
class Started:
    """What brings `matched_tokens` to a request, and by which plan. No plan: a miss. A plan and no read: it is computed.
    `beyond_tokens` more are stored, and of no use because no state stands behind them."""

    read: PrefixRead | None
    plan: Plan | None
    matched_tokens: int
    beyond_tokens: int


class CacheBridge:
    """`passage`: host memory that reads pass through. `wake` is called from other threads whenever something has come or was
    let go of."""

    def __init__(
        self,
        cache: PrefixCache,
        passage: Arena,
        *,
        speeds: Speeds,
        timeout_s: float,
        hedge_after_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._passage = passage
        self._speeds = speeds
        self._timeout_s = timeout_s
        self._hedge_after_s = hedge_after_s
        self._wake = wake

    @property
    def in_parts(self) -> bool:
        """Whether a part of what matched is of use: of a recurrent model it is not."""
        return self._cache.representation.state == "none"

    def start_read(
        self,
        tokens: Sequence[int],
        *,
        salt: str | bytes | None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        ahead_s: float = 0.0,
    ) -> Started:
        """Begin to read the longest stored prefix of `tokens`, unless computing it is sooner."""
        lease = self._cache.match(tokens, salt=salt, shared_tokens=shared_tokens, identity=identity)
        read, plan = None, None
        try:
            if lease.tokens:
                plan = self._plan(lease, suffix_tokens=len(tokens) - lease.tokens, ahead_s=ahead_s)
                if plan.choice != "compute" or plan.at_once_tokens:
                    read = PrefixRead(
                        lease,
                        self._passage,
                        plan=plan,
                        representation=self._cache.representation,
                        speeds=self._speeds,
                        timeout_s=self._timeout_s,
                        least_s=self._hedge_after_s,
                        wake=self._wake,
                    )
        finally:
            if read is None:  # which reads more later
                lease.release()
        return Started(read, plan, lease.tokens, lease.beyond_tokens)

    def stored_tokens(
        self, tokens: Sequence[int], *, salt: str | bytes | None, shared_tokens: int = 0, identity: Identity | None = None
    ) -> int:
        """Return how many of `tokens` a load would bring now."""
        with self._cache.match(tokens, salt=salt, shared_tokens=shared_tokens, identity=identity, ahead=True) as lease:
            return lease.tokens

    def promote(
        self, tokens: Sequence[int], *, salt: str | bytes | None, shared_tokens: int = 0, identity: Identity | None
    ) -> bool:
        """See `PrefixCache.promote`."""
        return self._cache.promote(
            tokens, most_bytes=_PROMOTED_BYTES, salt=salt, shared_tokens=shared_tokens, identity=identity
        )

    def save(
        self,
        tokens: Sequence[int],
        kv: SequenceKV,
        *,
        salt: str | bytes | None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        retention: str,
        tenant: str,
        session: str,
        keep_s: float,
        own_tokens: int,
        states: Mapping[int, StateCopy] | None = None,
    ) -> Ticket | None:
        """See `serving.parts.Bridge`. What is missing is copied out of `kv` later, for which this holds it."""
        with ExitStack() as stack:
            for copy in (states or {}).values():
                stack.callback(copy.release)
            kv.retain()
            stack.callback(kv.release)
            ticket = self._cache.save(
                tokens,
                kv,
                salt=salt,
                shared_tokens=shared_tokens,
                identity=identity,
                retention=retention,
                tenant=tenant,
                session=session,
                keep_s=keep_s,
                states={n: copy.data for n, copy in states.items()} if states else None,
                own_tokens=own_tokens,
            )
            held = stack.pop_all()

        def let_go(*_: object) -> None:
            held.close()
            self._wake()

        ticket.add_done_callback(let_go)
        return ticket

    def _plan(self, lease: Lease, *, suffix_tokens: int, ahead_s: float) -> Plan:
        return plan_load(
            stretches_of(lease),
            suffix_tokens=suffix_tokens,
            layers=1,  # the suffix cannot begin before all of a run is there
            piece_tokens=self._cache.representation.piece_tokens,
            computing=self._speeds.computing,
            reading=self._speeds.reading(),
            ahead_s=ahead_s,
            in_parts=self.in_parts,
        )
