"""What a router asks a server for every second: how busy it is, how fast, and by which names its blocks go. One small object.

Speeds are in seconds: of a prompt's token and of a token for each one before it, of a decoding step, its sequences and the
tokens that they attend to, of a token read from a tier and of a read's start. What was not measured yet is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.api.served import Served
from headstart.api.service import Service
from headstart.block.keys import BLOCK_TOKENS
from headstart.cache.prefix_cache import CacheStatistics
from headstart.engine.base import PacedEngine, RoledEngine, StoringEngine
from headstart.errors import HeadstartError
from headstart.policy.loading import Computing, Reading


def worker_state(service: Service, *, trusted: bool) -> dict[str, Any]:
    """Return it. `trusted`: whether the asker is believed where it says whose requests are. Any thread."""
    status, health = service.health()
    told: dict[str, Any] = {
        "object": "headstart.worker",
        "instance": service.instance,
        "status": health["status"],
        "trusted": trusted,
    }
    served = service.served
    if served is None or status != 200:
        return told
    load = served.engine.load()
    info = served.engine.info
    statistics = None if served.cache is None else served.cache.statistics()
    told |= {
        "model": served.name,
        "models": list(service.names),
        "context_tokens": info.context_tokens,
        "running": load.running,
        "waiting": load.waiting,
        "counters": {name: count for name, count in load.counters.items() if name.endswith(("_tokens", "_bytes"))},
        "hit_tokens": _hit_tokens(load.counters, statistics),
    }
    if info.kv_bytes_per_token:
        capacity, used = load.kv_capacity_bytes, load.kv_used_bytes
        told["kv"] = {
            "token_bytes": info.kv_bytes_per_token,
            "capacity_tokens": capacity // info.kv_bytes_per_token,
            "used_tokens": used // info.kv_bytes_per_token,
        }
    if isinstance(served.engine, PacedEngine):
        told["waiting_tokens"] = served.engine.waiting_tokens()
        speeds = served.engine.speeds
        told["speeds"] = _speeds(speeds.computing, speeds.reading(), info.kv_bytes_per_token)
    if isinstance(served.engine, RoledEngine):
        told["handoff"] = _handoff(served.engine, load.counters)
    if served.cache is not None:
        told |= {
            "block_tokens": BLOCK_TOKENS,
            "roots": _roots(served),
            "representation": served.cache.representation.digest.hex(),
            "tiers": [tier.name for tier in (statistics.tiers if statistics is not None else ())],
        }
        if served.cache.events is not None:
            told["events"] = {"endpoint": served.cache.events[0], "replay": served.cache.events[1]}
    return told


def _roots(served: Served) -> dict[str, str]:
    """Return what the keys of a prompt begin with, by the model's name and those of its adapters."""
    assert served.cache is not None
    roots = {served.name: served.cache.identity.root().hex()}
    if isinstance(served.engine, StoringEngine):
        for adapter in served.engine.info.adapters:
            try:
                identity = served.engine.identity(adapter)
            except (HeadstartError, KeyError):
                continue
            if identity is not None:
                roots[adapter] = identity.root().hex()
    return roots


def _handoff(engine: RoledEngine, counters: Mapping[str, int]) -> dict[str, Any]:
    """Return what this worker does among others; and how fast KV came from them, None before any did."""
    came, took_us = counters.get("handoff_received_bytes", 0), counters.get("handoff_received_us", 0)
    rate = 1e6 * came / took_us if took_us else None
    return {"role": engine.role, "addresses": list(engine.addresses), "takes": engine.takes, "bytes_per_s": rate}


def _speeds(computing: Computing | None, reading: Mapping[str, Reading], token_bytes: int) -> dict[str, Any]:
    speeds: dict[str, Any] = {}
    if computing is not None:
        row_s, key_s, pass_s = computing.speed.costs
        speeds["prefill"] = [row_s + pass_s / computing.chunk_tokens, key_s]
        speeds["step"] = [pass_s, row_s, key_s]
        speeds["chunk_tokens"] = computing.chunk_tokens
    for tier, found in reading.items():
        byte_s, start_s = found.speed.costs
        speeds[tier] = [byte_s * token_bytes, start_s]
    return speeds


def _hit_tokens(counters: Mapping[str, int], statistics: CacheStatistics | None) -> dict[str, int]:
    """Return how many tokens were taken over, by where they lay; as the engine counts them until the cache has loaded any."""
    loaded = "loaded_tokens_"
    if statistics is not None:
        found = {name.removeprefix(loaded): count for name, count in statistics.counters.items() if name.startswith(loaded)}
        if found:
            return found
    return {name: counters.get(f"cached_{name}_tokens", 0) for name in ("memory", "disk")}
