"""The engine's side of the prefix cache: match and load into a request's KV, save from it. Translates; decides nothing.

Each load and each save holds a reference to the KV that it touches until no read or write can touch it any more; aborting a
request in the middle of a load therefore frees its memory with the last byte that lands, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS
from headstart.cache.prefix_cache import Lease, PrefixCache, Ticket
from headstart.engine.serving.loading import stretches_of
from headstart.engine.speeds import ReadAccount, Speeds
from headstart.engine.torch.branches import BranchKV
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory, StateCopy
from headstart.engine.torch.meeting import Meeting
from headstart.engine.torch.prefix_load import PrefixLoad
from headstart.policy.loading import Plan, lead_tokens, plan_load, range_tokens

_PROMOTED_BYTES = 1 << 30  # at once, at most


@dataclass(frozen=True, slots=True)
class Started:
    """What brings `matched_tokens` into a request's KV, and by which plan. No plan: a miss. A plan and no load: it is computed.
    `beyond_tokens` more are stored, and of no use because no state stands behind them."""

    load: PrefixLoad | Meeting | None
    plan: Plan | None
    matched_tokens: int
    beyond_tokens: int


class PrefixBridge:
    """`wake` is called from other threads whenever a load or save has let go of KV.

    `hedge_after_s`: how late a layer may be at least before its load is given up as too slow."""

    def __init__(
        self,
        cache: PrefixCache,
        memory: KVMemory,
        *,
        speeds: Speeds,
        timeout_s: float,
        hedge_after_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._memory = memory
        self._speeds = speeds
        self._timeout_s = timeout_s
        self._hedge_after_s = hedge_after_s
        self._wake = wake

    @property
    def in_parts(self) -> bool:
        """Whether reading may stop anywhere for computing: a recurrent state is only there at the end, and pieces of several
        blocks stand for passes that are not cut (`deterministic`)."""
        representation = self._cache.representation
        return representation.state == "none" and representation.piece_tokens == BLOCK_TOKENS

    def start_load(
        self,
        tokens: Sequence[int],
        kv: HostKV | DeviceKV,
        *,
        salt: str | bytes | None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        ahead_s: float = 0.0,
        mix: bool = False,
    ) -> Started:
        """Begin to bring the longest stored prefix into `kv`. `identity`: of the blocks, where it is not the model's alone.
        `mix`: reading all of it has turned out too slow."""
        lease = self._cache.match(tokens, salt=salt, shared_tokens=shared_tokens, identity=identity)
        under_way: PrefixLoad | Meeting | None = None
        plan = None
        try:
            if lease.tokens:
                plan = self._plan(lease, suffix_tokens=len(tokens) - lease.tokens, ahead_s=ahead_s, mix=mix)
                under_way = self._begin(lease, plan, kv)
        finally:
            if not isinstance(under_way, Meeting):  # which reads more later
                lease.release()
        return Started(under_way, plan, lease.tokens, lease.beyond_tokens)

    def load_all(self, tokens: Sequence[int], kv: HostKV | DeviceKV, *, salt: str | bytes | None) -> PrefixLoad | None:
        """Return a load of all of the longest stored prefix into `kv`, whatever else would be sooner; None for a miss."""
        with self._cache.match(tokens, salt=salt) as lease:
            return self._load(lease, Plan("load", lease.tokens), kv) if lease.tokens else None

    def stored_tokens(
        self,
        tokens: Sequence[int],
        *,
        salt: str | bytes | None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
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
        kv: HostKV | DeviceKV | BranchKV,
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
        """Give the KV of `tokens` to the cache, and by n the state behind the first n tokens, written behind, and return the
        ticket. `own_tokens`: as many of them as this request gave before. `kv` may be released at once; of `states` this takes
        over the references. None: on a device, where no host memory is free to pass it through."""
        with ExitStack() as stack:
            for copy in (states or {}).values():
                stack.callback(copy.release)
            host: HostKV | BranchKV | None = kv if isinstance(kv, BranchKV) else self._passage(kv, len(tokens))
            if host is None:
                return None
            if isinstance(kv, BranchKV):
                kv.retain()
            stack.callback(host.release)
            if isinstance(kv, DeviceKV) and isinstance(host, HostKV):
                kv.copy_to(host, len(tokens))
            buffers = {n: copy.data for n, copy in states.items()} if states else None
            ticket = self._cache.save(
                tokens,
                host,
                salt=salt,
                shared_tokens=shared_tokens,
                identity=identity,
                retention=retention,
                tenant=tenant,
                session=session,
                keep_s=keep_s,
                states=buffers,
                own_tokens=own_tokens,
            )
            held = stack.pop_all()

        def let_go(*_: object) -> None:
            held.close()
            self._wake()

        ticket.add_done_callback(let_go)
        return ticket

    def _passage(self, kv: HostKV | DeviceKV, tokens: int) -> HostKV | None:
        """Return host memory for a load or save of `kv`, with a reference: its own where it is in host memory."""
        if isinstance(kv, DeviceKV):
            return self._memory.allocate_host(tokens)
        kv.retain()
        return kv

    def _plan(self, lease: Lease, *, suffix_tokens: int, ahead_s: float, mix: bool) -> Plan:
        stretches = stretches_of(lease)
        plan = plan_load(
            stretches,
            suffix_tokens=suffix_tokens,
            layers=len(self._memory.shape.layers),
            piece_tokens=self._cache.representation.piece_tokens,
            computing=self._speeds.computing,
            reading=self._speeds.reading(),
            ahead_s=ahead_s,
            in_parts=self.in_parts,
        )
        if mix and plan.choice == "load" and (lead := lead_tokens(stretches)) < lease.tokens:
            return replace(plan, choice="mixed", at_once_tokens=lead)
        return plan

    def _begin(self, lease: Lease, plan: Plan, kv: HostKV | DeviceKV) -> PrefixLoad | Meeting | None:
        """Start what the plan says; None where nothing is to be read, or there is no memory to pass through."""
        lead = self._load(lease, plan, kv) if plan.at_once_tokens else None
        if plan.choice != "mixed":
            return lead
        if plan.at_once_tokens and lead is None:
            return None
        stretches = stretches_of(lease)
        nbytes = sum(stretch.nbytes for stretch in stretches)
        slowest = max((one for one in stretches if not one.always), key=lambda one: one.nbytes, default=stretches[0])
        return Meeting(
            lease,
            kv,
            lead=lead,
            plan=plan,
            stretches=stretches,
            range_tokens=range_tokens(
                lease.tokens - plan.at_once_tokens,
                nbytes=nbytes * (lease.tokens - plan.at_once_tokens) // lease.tokens,
                reading=self._speeds.reading().get(slowest.tier),
                piece_tokens=BLOCK_TOKENS,
            ),
            speeds=self._speeds,
            allocate=self._memory.allocate_host,
            wake=self._wake,
        )

    def _load(self, lease: Lease, plan: Plan, kv: HostKV | DeviceKV) -> PrefixLoad | None:
        host = self._passage(kv, plan.at_once_tokens)
        if host is None:
            return None
        account = ReadAccount(self._speeds, stretches_of(lease), 0, plan.at_once_tokens)
        try:
            under_way = PrefixLoad(
                lease,
                kv,
                host,
                plan=plan,
                shape=self._memory.shape,
                timeout_s=self._timeout_s,
                least_s=self._hedge_after_s,
                account=account,
            )
        except BaseException:
            account.ended(0)
            host.release()
            raise
        under_way.add_done_callback(self._wake)
        return under_way
