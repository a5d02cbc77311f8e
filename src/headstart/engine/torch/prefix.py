"""The engine's side of the prefix cache: match and load into a request's KV, save from it. Translates; decides nothing.

Each load and each save holds a reference to the KV that it touches until no read or write can touch it any more; aborting a
request in the middle of a load therefore frees its memory with the last byte that lands, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.cache.prefix_cache import Lease, Load, PrefixCache, Ticket
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory, KVShape
from headstart.engine.torch.sharing import BranchKV


class PrefixLoad:
    """A load under way into a request's KV. `tokens` is what matched, `failed` that it will not become all of it.

    Two references to host memory: one until no read can touch it any more, one until the engine calls `release`."""

    def __init__(self, lease: Lease, kv: HostKV | DeviceKV, host: HostKV, *, shape: KVShape, timeout_s: float) -> None:
        self.tokens = lease.tokens
        self.failed = False
        self.done = False  # no read can touch the host memory any more
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + timeout_s
        self._device_kv = kv if isinstance(kv, DeviceKV) else None
        self._host = host
        self._shape = shape
        self._copied = 0  # layers that are on the device
        self._load: Load = lease.load(into=host)
        host.retain()

    @property
    def overdue(self) -> bool:
        return time.monotonic() >= self.deadline_s

    def wait(self, layer: int, timeout_s: float) -> None:
        """Return when the model's layer `layer` may be attended. Raises LoadFailed."""
        layer = self._shape.place(layer)
        self._load.wait(layer, timeout_s=max(0.0, min(timeout_s, self.deadline_s - time.monotonic())))
        self._to_device(layer + 1, self.tokens)

    def outcome(self) -> Outcome:
        """Return what came of it; only when `done`, or after `wait` returned for every layer."""
        usable = min(self._load.usable_tokens, self.tokens)
        self._to_device(len(self._shape.layers), usable)
        by_tier = self._load.tokens_by_tier
        memory = min(usable, by_tier.get("memory", 0))
        return Outcome(
            memory_tokens=memory,
            disk_tokens=usable - memory,
            bytes_read=self._load.bytes_read,
            seconds=self._load.seconds or time.monotonic() - self.started_s,
        )

    def finish(self, timeout_s: float) -> Outcome:
        """Wait for every read to end and return what came of it. Raises LoadFailed when that takes too long."""
        self._load.result(timeout_s=timeout_s)
        return self.outcome()

    def add_done_callback(self, callback: Callable[[Load], None]) -> None:
        self._load.add_done_callback(callback)

    def cancel(self) -> None:
        self._load.cancel()

    def release(self) -> None:
        """The engine is through with it. Reads under way keep the memory that they touch."""
        self._host.release()

    def _to_device(self, layers: int, tokens: int) -> None:
        if self._device_kv is not None and tokens:
            for layer in range(self._copied, layers):
                self._device_kv.copy_layer(layer, of=self._host, tokens=tokens)
            self._copied = max(self._copied, layers)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens that are good in all layers, by tier; all bytes read for them; seconds from start to the last byte."""

    memory_tokens: int
    disk_tokens: int
    bytes_read: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.memory_tokens + self.disk_tokens


class PrefixBridge:
    """`wake` is called from other threads whenever a load or save has let go of KV."""

    def __init__(self, cache: PrefixCache, memory: KVMemory, *, timeout_s: float, wake: Callable[[], None]) -> None:
        self._cache = cache
        self._memory = memory
        self._timeout_s = timeout_s
        self._wake = wake

    def start_load(self, tokens: Sequence[int], kv: HostKV | DeviceKV, *, salt: str | None) -> PrefixLoad | None:
        """Return a load of the longest stored prefix into `kv`, or None for a miss."""
        lease = self._cache.match(tokens, salt=salt)
        host = self._passage(kv, lease.tokens) if lease.tokens else None
        if host is None:
            lease.release()
            return None
        try:
            loading = PrefixLoad(lease, kv, host, shape=self._memory.shape, timeout_s=self._timeout_s)
        except BaseException:
            lease.release()
            host.release()
            raise

        def let_go(*_: object) -> None:
            lease.release()
            host.release()
            loading.done = True
            self._wake()

        loading.add_done_callback(let_go)
        return loading

    def stored_tokens(self, tokens: Sequence[int], *, salt: str | None) -> int:
        """Return how many of `tokens` a load would bring now."""
        lease = self._cache.match(tokens, salt=salt)
        try:
            return lease.tokens
        finally:
            lease.release()

    def save(
        self,
        tokens: Sequence[int],
        kv: HostKV | DeviceKV | BranchKV,
        *,
        salt: str | None,
        retention: str,
        tenant: str,
        session: str,
    ) -> Ticket | None:
        """Give the KV of `tokens` to the cache, written behind, and return its ticket. `kv` may be released at once. None: on a
        device, where no host memory is free to pass it through."""
        host: HostKV | BranchKV | None = kv if isinstance(kv, BranchKV) else self._passage(kv, len(tokens))
        if host is None:
            return None
        if isinstance(kv, BranchKV):
            kv.retain()
        try:
            if isinstance(kv, DeviceKV) and isinstance(host, HostKV):
                kv.copy_to(host, len(tokens))
            ticket = self._cache.save(tokens, host, salt=salt, retention=retention, tenant=tenant, session=session)
        except BaseException:
            host.release()
            raise

        def let_go(*_: object) -> None:
            host.release()
            self._wake()

        ticket.add_done_callback(let_go)
        return ticket

    def _passage(self, kv: HostKV | DeviceKV, tokens: int) -> HostKV | None:
        """Return host memory for a load or save of `kv`, with a reference: its own where it is in host memory."""
        if isinstance(kv, DeviceKV):
            return self._memory.allocate_host(tokens)
        kv.retain()
        return kv
