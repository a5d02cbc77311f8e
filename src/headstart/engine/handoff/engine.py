"""An engine whose prompts may be computed by another worker, and which computes prompts for others.

submit ─ prefill_at? ─no─▶ the engine
           │ yes              ▲
           └───▶ taking ──────┘ asks another worker's `prefill`, whose engine says what is computed as it is (`outgoing`)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import Config, made_by, warn_of_readers
from headstart.engine.base import EngineLoad, GenerationRequest, Role, TokenEvent
from headstart.engine.handoff.prefill import PrefillServer
from headstart.engine.handoff.receiving import WINDOW_BYTES
from headstart.engine.handoff.taking import Side, Taking
from headstart.engine.serving.door import ServingEngine
from headstart.engine.serving.limits import refuse_impossible
from headstart.engine.speeds import Speeds
from headstart.errors import ConfigError, RequestError
from headstart.metrics import Counters
from headstart.transfer.wire.address import is_local
from headstart.transfer.wire.remote import RemoteMemory

_log = logging.getLogger(__name__)

MOST_AT_ONCE = 64
_LEAST_SECRET_BYTES = 16


class HandoffEngine:
    """See `engine.base.Engine`; takes `inner` over, and all that is asked of it besides goes on to it. `role` may be changed at
    any time: what is under way ends as it began.

    `listen`: where others may ask for prompts, if anywhere. `secret`: what all workers know, b"" for none; only this machine's
    workers are talked to then. `timeout_s`: how long another worker may do nothing before it counts as lost.
    `nixl`: whether KV goes to and from other machines by NIXL, where the other side does so too."""

    def __init__(
        self,
        inner: ServingEngine[Any],
        cache: PrefixCache,
        *,
        role: Role = "both",
        listen: Sequence[str] = (),
        secret: bytes = b"",
        timeout_s: float = 10.0,
        nixl: bool = False,
    ) -> None:
        for address in listen:
            if not secret and not is_local(address):
                raise ConfigError(
                    f"{address} can be reached by others, who would get the KV of any prompt; give all workers one "
                    "--handoff-secret FILE, or listen on this machine alone",
                    key="handoff.listen",
                )
        if nixl and not secret:
            raise ConfigError(
                "NIXL lets others write into this process's memory; give all workers one --handoff-secret FILE",
                key="handoff.nixl",
            )
        self.inner = inner
        self.info = inner.info
        self.role = role
        self._cache = cache
        self._secret = secret
        self._timeout_s = timeout_s
        self._counters = Counters()
        self._lock = Lock()
        self._under_way: dict[str, Taking] = {}
        self._memory = RemoteMemory(region_bytes=WINDOW_BYTES) if nixl else None
        self._side = Side(inner, cache, self._counters, secret, timeout_s, self.identity, self._memory)
        self._closed = False
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="handoff-decode")
        self._server = None
        if listen:
            self._server = PrefillServer(
                self,
                cache,
                addresses=listen,
                secret=secret,
                timeout_s=timeout_s,
                counters=self._counters,
                serves=lambda: self.role != "decode",
                identity=self.identity,
                wake=inner.wake,
                memory=self._memory,
            )
        self.addresses: tuple[str, ...] = () if self._server is None else self._server.addresses

    @property
    def takes(self) -> bool:
        """See `RoledEngine`."""
        return self.role != "prefill" and self._cache.expects

    @property
    def failed(self) -> str | None:
        return self.inner.failed

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        """See `Engine.submit`."""
        if request.prefill_at is None or self.role == "prefill" or not request.max_tokens or not request.use_cache:
            self.inner.submit(replace(request, prefill_at=None), on_event)
            return
        refuse_impossible(request, self.info)
        with self._lock:
            if request.id in self._under_way:
                raise RequestError(f"a request with id {request.id!r} is still running; use another id", param="id")
            busy = self._closed or len(self._under_way) >= MOST_AT_ONCE
            if not busy:
                forget = partial(self._forget, request.id)
                taking = self._under_way[request.id] = Taking(self._side, request, on_event, forget=forget)
        if busy:
            self._counters.add("handoff_busy")
            self.inner.submit(replace(request, prefill_at=None), on_event)
            return
        try:
            self._threads.submit(taking.run)
        except RuntimeError:  # closed just now
            self._forget(request.id)
            self.inner.submit(replace(request, prefill_at=None), on_event)

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        with self._lock:
            taking = self._under_way.get(request_id)
        if taking is not None:
            taking.abort()
        self.inner.abort(request_id)

    def load(self) -> EngineLoad:
        """See `Engine.load`. Prompts that are computed elsewhere wait."""
        load = self.inner.load()
        with self._lock:
            waiting = len(self._under_way)
        return replace(load, waiting=load.waiting + waiting, counters=load.counters | self._counters.snapshot())

    @property
    def speeds(self) -> Speeds:
        """See `PacedEngine`."""
        return self.inner.speeds

    def waiting_tokens(self) -> int:
        """See `PacedEngine`."""
        return self.inner.waiting_tokens()

    def close(self) -> None:
        """See `Engine.close`."""
        with self._lock:
            self._closed = True
            under_way = list(self._under_way.values())
        for taking in under_way:
            taking.abort()
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(wait=True)
        if self._memory is not None:
            self._memory.close()
        self.inner.close()

    def identity(self, adapter: str | None) -> Identity | None:
        """See `StoringEngine`."""
        named = getattr(self.inner, "identity", None)
        return None if named is None or adapter is None else named(adapter)

    def measure_floor(self, prompt: Sequence[int], cached_tokens: int, rounds: int) -> list[float]:
        """See `MeasuredEngine`."""
        floor: list[float] = self.inner.measure_floor(prompt, cached_tokens, rounds)  # type: ignore[attr-defined]
        return floor

    def next_logits(self, tokens: Sequence[int]) -> Any:
        """See `MeasuredEngine`."""
        return self.inner.next_logits(tokens)  # type: ignore[attr-defined]

    def __enter__(self) -> HandoffEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._under_way.pop(request_id, None)


def opened(inner: ServingEngine[Any], cache: PrefixCache | None, config: Config) -> ServingEngine[Any] | HandoffEngine:
    """Return the engine as `config` asks for it: itself, or one that computes prompts for others and has them computed by
    others. Raises ConfigError."""
    settings = config.handoff
    if not (settings.listen or settings.secret or config.server.role != "both"):
        return inner
    representation = None if cache is None else cache.representation
    if cache is None or representation is None or representation.state != "none" or representation.varies:
        why = inner.info.cache if cache is None else "its states are not handed over"
        raise ConfigError(
            f"{inner.info.model} cannot hand prompts over ({why}); leave [handoff] and --role out", key="server.role"
        )
    if not cache.expects:
        why = (
            "KV that comes from others goes to a memory tier of this process's own: set cache.memory, and no cache.node_memory"
        )
        if config.server.role == "decode":
            raise ConfigError(why, key="server.role")
        _log.warning("prompts are computed for others, and none taken from them: %s", why)
    listen = [one for part in settings.listen.split(",") if (one := part.strip())]
    if config.server.role == "prefill" and not listen:
        raise ConfigError(
            'a worker that computes prompts for others must be reached: give --handoff-listen "ipc:///run/headstart.sock"',
            key="handoff.listen",
        )
    engine = HandoffEngine(
        inner,
        cache,
        role=config.server.role,
        listen=listen,
        secret=b"" if settings.secret is None else _secret(settings.secret),
        timeout_s=settings.timeout_s,
        nixl=settings.nixl,
    )
    where = f", other workers ask for prompts at {', '.join(engine.addresses)}" if engine.addresses else ""
    _log.info("role %s%s", engine.role, where)
    return engine


def _secret(file: Path) -> bytes:
    try:
        secret = file.read_bytes().strip()
        warn_of_readers(file)
    except OSError as error:
        raise ConfigError(
            f"handoff.secret: {file} cannot be read ({error.strerror}); write it with: {made_by(file)}",
            key="handoff.secret",
        ) from error
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ConfigError(
            f"handoff.secret: {file} has {len(secret)} bytes, {_LEAST_SECRET_BYTES} are the least; write it with: "
            f"{made_by(file)}",
            key="handoff.secret",
        )
    return secret
