"""The floor of a hit: the same suffix computed over KV that already lies in the request's memory. What no cache can beat."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headstart.engine.torch.attention import Segment, Step
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory
from headstart.engine.torch.model import Model
from headstart.engine.torch.prefix import PrefixBridge
from headstart.errors import RequestError


def measure_floor(
    model: Model,
    memory: KVMemory,
    bridge: PrefixBridge | None,
    prompt: Sequence[int],
    *,
    cached_tokens: int,
    rounds: int,
    chunk_tokens: int,
) -> list[float]:
    """Return seconds to the first token, one a round. The prefix comes from the cache as far as it is there, else it is
    computed first, unmeasured. Raises RequestError when KV memory is taken by running requests."""
    if not 0 <= cached_tokens < len(prompt):
        raise ValueError(f"cached_tokens must lie in 0 … {len(prompt) - 1}, got {cached_tokens}")
    kv = memory.allocate(len(prompt))
    if kv is None:
        raise RequestError("the floor cannot be measured while running requests hold the KV memory; try again when idle")
    try:
        here = 0 if bridge is None else _loaded(bridge, prompt[:cached_tokens], kv, timeout_s=30.0)
        _compute(model, kv, prompt[:cached_tokens], first=here, chunk_tokens=chunk_tokens)
        state = None if kv.state is None else kv.state.copied()
        seconds = []
        for number in range(rounds):
            if kv.state is not None and state is not None:
                kv.state.take(state, cached_tokens)
            elif kv.stock is not None and number:  # what it keeps cannot be cut back
                _compute(model, kv, prompt[:cached_tokens], first=0, chunk_tokens=chunk_tokens)
            started = time.perf_counter()
            _compute(model, kv, prompt, first=cached_tokens, chunk_tokens=chunk_tokens)
            seconds.append(time.perf_counter() - started)
        return seconds
    finally:
        kv.release()


def _loaded(bridge: PrefixBridge, tokens: Sequence[int], kv: HostKV | DeviceKV, *, timeout_s: float) -> int:
    load = bridge.start_load(tokens, kv, salt=None)
    if load is None:
        return 0
    try:
        return load.finish(timeout_s).tokens
    finally:
        load.release()


def _compute(model: Model, kv: HostKV | DeviceKV, tokens: Sequence[int], *, first: int, chunk_tokens: int) -> None:
    """Compute tokens[first:] in chunks, and the last one's best successor."""
    while first < len(tokens):
        count = min(chunk_tokens, len(tokens) - first)
        step = Step([Segment(kv, 0, count, first)])
        model.forward(tokens[first : first + count], step, rows=[count - 1]).argmax(dim=-1).tolist()
        first += count
