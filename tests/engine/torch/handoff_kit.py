"""Two workers of one tiny model in this process, and a wire between them that can be cut, stalled and spoilt."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reference import engine_of

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.handoff import HandoffEngine
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.model import TorchModel
from headstart.tier.base import Tier
from headstart.tier.memory import MemoryTier

IDENTITY = Identity(weights=bytes(32), architecture=b"{}")
CONTEXT = 1024


def cache_of(
    model: TorchModel, *, memory_bytes: int = 32 << 20, identity: Identity = IDENTITY, pool: Tier | None = None
) -> PrefixCache:
    representation = model.shape.representation(query_heads=model.heads)
    tiers: list[Tier] = [MemoryTier(memory_bytes)]
    return PrefixCache(tiers + ([] if pool is None else [pool]), identity=identity, representation=representation)


def worker(
    model: TorchModel,
    *,
    memory_bytes: int = 32 << 20,
    identity: Identity = IDENTITY,
    pool: Tier | None = None,
    engine: dict[str, Any] | None = None,
    **handoff: Any,
) -> HandoffEngine:
    """A worker with a cache of its own. The model may be that of another worker: its weights are only read."""
    cache = cache_of(model, memory_bytes=memory_bytes, identity=identity, pool=pool)
    settings = {"context": CONTEXT, "chunk_tokens": 128, **(engine or {})}
    return HandoffEngine(engine_of(model, cache=cache, **settings), cache, **handoff)


@contextmanager
def pair(model: Callable[[], TorchModel], path: Path, **decoding: Any) -> Iterator[tuple[HandoffEngine, HandoffEngine]]:
    """One that computes prompts and listens in both ways, and one that decodes."""
    listen = [f"ipc://{path}/p.sock", "tcp://127.0.0.1:0"]
    with worker(model(), role="prefill", listen=listen) as prefill, worker(model(), role="decode", **decoding) as decode:
        yield prefill, decode
        for one in (prefill, decode):
            counters = one.load().counters
            assert not counters.get("handoff_faults"), counters
            assert not counters.get("engine_faults"), counters
            assert not counters.get("step_faults"), counters


def alone(model: TorchModel) -> TorchEngine:
    return engine_of(model, context=CONTEXT, chunk_tokens=128)


class Wire:
    """Passes on what two workers send. What comes from `address` goes through `spoil`, with the number of its first byte: it
    returns what is passed on, and if that is less the connection ends; it may wait."""

    def __init__(self, address: str, spoil: Callable[[int, bytes], bytes]) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._to = (host, int(port))
        self._spoil = spoil
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def close(self) -> None:
        for one in [self._listener, *self._sockets]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _take(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._to)
            except OSError:
                return
            self._sockets += [here, there]
            threading.Thread(target=self._pass, args=(here, there, lambda _, data: data), daemon=True).start()
            threading.Thread(target=self._pass, args=(there, here, self._spoil), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, spoil: Callable[[int, bytes], bytes]) -> None:
        at = 0
        with suppress(OSError):
            while data := source.recv(4096):
                spoilt = spoil(at, data)
                at += len(data)
                to.sendall(spoilt)
                if len(spoilt) < len(data):
                    break
        for one in (source, to):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def wire(address: str, spoil: Callable[[int, bytes], bytes]) -> Iterator[str]:
    between = Wire(address, spoil)
    try:
        yield between.address
    finally:
        between.close()
