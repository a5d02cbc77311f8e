"""Passes outside of any request: the floor of a hit, which is the same suffix computed over KV that already lies in memory and
what no cache can beat; and those of warming up, which tell how fast prompts are computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from headstart.block.keys import BLOCK_TOKENS
from headstart.engine.torch.attention import Segment, Step
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory
from headstart.engine.torch.model import Model
from headstart.engine.torch.prefix import PrefixBridge
from headstart.errors import RequestError

_WARM_PREFIX = 1024


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
        state = None if kv.state is None else kv.state.bytes.clone()
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
    load = bridge.load_all(tokens, kv, salt=None)
    if load is None:
        return 0
    try:
        return load.finish(timeout_s).tokens
    finally:
        load.release()


def warm_up(model: Model, memory: KVMemory, *, context_tokens: int) -> list[tuple[int, float, float]]:
    """Return (rows, rows × keys, seconds) of passes over a piece without and behind a prefix, after one of each kind that pays
    for what is made on first use. What the KV behind a prefix holds does not matter for that; here it is whatever is there.
    Models that keep more of a prefix than KV go on from a real one only, which would take too long here."""
    rows = min(BLOCK_TOKENS, context_tokens - 1)
    plain = bool(model.shape.layers) and model.shape.state is None
    behind = max(0, min(_WARM_PREFIX, context_tokens - 1 - rows)) if plain else 0
    kv = memory.allocate(behind + rows + 1)
    if kv is None:
        return []  # somebody is served already
    try:
        measured = []
        tokens = [1] * (behind + rows + 1)
        _compute(model, kv, tokens[: rows + 1], first=0, chunk_tokens=rows)
        for first in (0, behind):
            started = time.perf_counter()
            _compute(model, kv, tokens[: first + rows], first=first, chunk_tokens=rows)
            measured.append((rows, ((first + rows) ** 2 - first**2) / 2, time.perf_counter() - started))
        return measured
    finally:
        kv.release()


def _compute(model: Model, kv: HostKV | DeviceKV, tokens: Sequence[int], *, first: int, chunk_tokens: int) -> None:
    """Compute tokens[first:] in chunks, and the last one's best successor."""
    while first < len(tokens):
        count = min(chunk_tokens, len(tokens) - first)
        step = Step([Segment(kv, 0, count, first)])
        model.forward(tokens[first : first + count], step, rows=[count - 1]).argmax(dim=-1).tolist()
        first += count
