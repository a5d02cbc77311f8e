"""The engine's side of the prefix cache: match and load into a request's KV, save from it. Translates; decides nothing.

Each load and each save holds a reference to the KV that it touches until no read or write can touch it any more; aborting a
request in the middle of a load therefore frees its memory with the last byte that lands, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS
from headstart.cache.prefix_cache import Lease, PrefixCache
from headstart.engine.serving.bridge import Bridge, Started, stretches_of
from headstart.engine.speeds import ReadAccount, Speeds
from headstart.engine.torch.branches import BranchKV
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory
from headstart.engine.torch.meeting import Meeting
from headstart.engine.torch.prefix_load import PrefixLoad
from headstart.policy.loading import Plan, lead_tokens, range_tokens


class PrefixBridge(Bridge[HostKV | DeviceKV | BranchKV]):
    """`memory`: where KV lies, and what loads and saves of a device pass through."""

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
        super().__init__(cache, speeds=speeds, timeout_s=timeout_s, hedge_after_s=hedge_after_s, wake=wake)
        self._memory = memory

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
    ) -> Started[PrefixLoad | Meeting]:
        """Begin to bring the longest stored prefix into `kv`. `identity`: of the blocks, where it is not the model's alone.
        `mix`: reading all of it has turned out too slow."""
        lease = self._cache.match(tokens, salt=salt, shared_tokens=shared_tokens, identity=identity)
        under_way: PrefixLoad | Meeting | None = None
        plan = None
        try:
            if lease.tokens:
                plan = self._plan(lease, prompt_tokens=len(tokens), ahead_s=ahead_s, mix=mix)
                under_way = self._begin(lease, plan, kv)
        finally:
            if not isinstance(under_way, Meeting):  # which reads more later
                lease.release()
        return Started(under_way, plan, lease.tokens, lease.beyond_tokens)

    def load_all(self, tokens: Sequence[int], kv: HostKV | DeviceKV, *, salt: str | bytes | None) -> PrefixLoad | None:
        """Return a load of all of the longest stored prefix into `kv`, whatever else would be sooner; None for a miss."""
        with self._cache.match(tokens, salt=salt) as lease:
            return self._load(lease, Plan("load", lease.tokens), kv) if lease.tokens else None

    def _source(self, kv: HostKV | DeviceKV | BranchKV, tokens: int) -> HostKV | BranchKV | None:
        if isinstance(kv, BranchKV):
            kv.retain()
            return kv
        host = self._passage(kv, tokens)
        if isinstance(kv, DeviceKV) and host is not None:
            kv.copy_to(host, tokens)
        return host

    def _passage(self, kv: HostKV | DeviceKV, tokens: int) -> HostKV | None:
        """Return host memory for a load or save of `kv`, with a reference: its own where it is in host memory."""
        if isinstance(kv, DeviceKV):
            return self._memory.allocate_host(tokens)
        kv.retain()
        return kv

    def _plan(self, lease: Lease, *, prompt_tokens: int, ahead_s: float, mix: bool) -> Plan:
        layers = len(self._memory.shape.layers)
        plan = self._planned(lease, prompt_tokens=prompt_tokens, layers=layers, ahead_s=ahead_s)
        if mix and plan.choice == "load" and (lead := lead_tokens(stretches_of(lease))) < lease.tokens:
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
