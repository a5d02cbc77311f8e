"""The llama engine's side of the prefix cache: match and read into host memory, save. Translates; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.llama.cells import SequenceKV
from headstart.engine.llama.reading import PrefixRead
from headstart.engine.serving.bridge import Bridge, Started
from headstart.engine.speeds import Speeds
from headstart.tier.arena import Arena


class CacheBridge(Bridge[SequenceKV]):
    """`passage`: host memory that reads pass through. What a save finds missing is copied out of the KV later."""

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
        super().__init__(cache, speeds=speeds, timeout_s=timeout_s, hedge_after_s=hedge_after_s, wake=wake)
        self._passage = passage

    def start_read(
        self,
        tokens: Sequence[int],
        *,
        salt: str | bytes | None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        ahead_s: float = 0.0,
    ) -> Started[PrefixRead]:
        """Begin to read the longest stored prefix of `tokens`, unless computing it is sooner."""
        lease = self._cache.match(tokens, salt=salt, shared_tokens=shared_tokens, identity=identity)
        read, plan = None, None
        try:
            if lease.tokens:
                # The suffix cannot begin before all of a run is there.
                plan = self._planned(lease, prompt_tokens=len(tokens), layers=1, ahead_s=ahead_s)
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

    def _source(self, kv: SequenceKV, tokens: int) -> SequenceKV:
        kv.retain()
        return kv
