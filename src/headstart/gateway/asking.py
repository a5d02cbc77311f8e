"""Asking a worker how it is: a server of ours in one call, any other by its health and its metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Annotated, Any, TypeAlias

import msgspec

from headstart.block.keys import KEY_BYTES
from headstart.errors import ConfigError
from headstart.gateway.connections import Answer, Connections, Lost, NotTaken
from headstart.gateway.worker import Address, Handoff, Report, Role, endpoint_seen_from, with_guesses

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_STARTED = "process_start_time_seconds"
_ENGINES = ("vllm:", "sglang:")
_COSTS = {"prefill": 2, "step": 3, "disk": 2, "pool": 2}  # how many a speed has
_NONSENSE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, msgspec.MsgspecError)
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^\n]*\})? ([-+0-9.eE]+|NaN)(?: \d+)?$", re.MULTILINE | re.ASCII)

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # what choosing reckons with has room in a float


class Unwell(Exception):
    """The worker cannot be asked, or says what no worker says. `gone`: nothing listens there."""

    def __init__(self, why: str, *, gone: bool = False) -> None:
        super().__init__(why)
        self.gone = gone


class _Handoff(msgspec.Struct):
    role: Role
    addresses: list[str] = []
    takes: bool = False
    bytes_per_s: float | None = None


class _Told(msgspec.Struct):
    object: str
    instance: str
    status: str
    trusted: bool = False
    models: list[str] = []
    running: _Count = 0
    waiting: _Count = 0
    waiting_tokens: _Count | None = None
    context_tokens: _Count | None = None
    kv: dict[str, _Count] = {}
    counters: dict[str, int] = {}
    speeds: dict[str, Any] = {}
    roots: dict[str, str] = {}
    representation: str = ""
    block_tokens: int = 64
    tiers: list[str] = []
    hit_tokens: dict[str, int] = {}
    events: dict[str, str] | None = None
    handoff: _Handoff | None = None


async def ask(client: Connections, address: Address, headers: Mapping[str, str], known: Report | None) -> Report:
    """Return how a worker is. `known`: what it said before, of which names are taken over where it is the same process. Raises
    Unwell."""
    try:
        if known is None or known.ours:
            response = await _get(client, f"{address.url}/v1/headstart/worker", headers)
            if response.status == 200:
                return _ours(response.content, address)
            if response.status in (401, 403):
                raise Unwell(f"it refuses the router's key (HTTP {response.status}); give both the same server.router_key")
        return await _foreign(client, address, headers, known)
    except NotTaken as error:
        raise Unwell("it does not answer in time" if error.late else str(error), gone=error.refused) from error
    except (Lost, ConfigError, *_NONSENSE) as error:
        raise Unwell(f"it answers what cannot be read: {type(error).__name__}: {str(error)[:256]}") from error


async def _get(client: Connections, url: str, headers: Mapping[str, str]) -> Answer:
    return await client.ask("GET", url, headers=headers)


def _ours(content: bytes, address: Address) -> Report:
    told = msgspec.json.decode(content, type=_Told)
    if told.object != "headstart.worker":
        raise ValueError("it says that it is something else")
    if told.block_tokens != 64:
        raise ValueError(f"its blocks have {told.block_tokens} tokens, those here 64; use workers of one version")
    events = address.events, address.replay
    if told.events is not None and events[0] is None:
        events = told.events["endpoint"], told.events.get("replay")
    endpoint, replay = (None if one is None else endpoint_seen_from(one, address.url) for one in events)
    return Report(
        ours=True,
        ready=told.status == "ok",
        instance=told.instance,
        models=tuple(told.models),
        running=told.running,
        waiting=told.waiting,
        waiting_tokens=told.waiting_tokens,
        kv_tokens=told.kv.get("capacity_tokens") or None,
        kv_used=told.kv.get("used_tokens"),
        progress=hash((told.running, *told.kv.items(), *told.counters.items())),
        speeds=with_guesses(_speeds(told.speeds), token_bytes=told.kv.get("token_bytes", 1 << 16), tiers=told.tiers),
        roots={name: _root(root) for name, root in told.roots.items()},
        representation=bytes.fromhex(told.representation) or None,
        events=None if endpoint is None else (endpoint, replay or ""),
        hit_tokens=told.hit_tokens,
        trusted=told.trusted,
        context_tokens=told.context_tokens,
        token_bytes=told.kv.get("token_bytes", 1 << 16),
        handoff=None if told.handoff is None else _handoff(told.handoff, address),
    )


def _root(told: str) -> bytes:
    root = bytes.fromhex(told)
    if len(root) != KEY_BYTES:
        raise ValueError(f"a root of its keys has {len(root)} bytes, not {KEY_BYTES}")
    return root


def _speeds(told: dict[str, Any]) -> dict[str, Any]:
    """Return them. Raises ValueError for costs that are none, which every estimate would fail on."""
    for name, count in _COSTS.items():
        costs = told.get(name, [0.0] * count)
        if not isinstance(costs, list) or len(costs) != count or not all(_is_cost(one) for one in costs):
            raise ValueError(f"its speed {name} has not {count} costs of 0 or more")
    return told


def _is_cost(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value) and value >= 0


def _handoff(told: _Handoff, address: Address) -> Handoff:
    addresses = tuple(endpoint_seen_from(one, address.url) for one in told.addresses)
    return Handoff(told.role, addresses, told.takes, told.bytes_per_s)


async def _foreign(client: Connections, address: Address, headers: Mapping[str, str], known: Report | None) -> Report:
    health = await _get(client, f"{address.url}/health", headers)
    if health.status == 404:  # not every server has one
        health = await _get(client, f"{address.url}/v1/models", headers)
    if health.status != 200:
        return Report(ours=False, ready=False, models=() if known is None else known.models)
    metrics = await _get(client, f"{address.url}/metrics", headers)
    sums: dict[str, float] = {}
    told: list[tuple[str, str]] = []  # of the engine
    if metrics.status == 200:
        for name, value in _SAMPLE.findall(metrics.content.decode(errors="replace")):
            if name.startswith(_ENGINES) and name not in _WAITING:
                told.append((name, value))
            if name in _RUNNING or name in _WAITING or name == _STARTED:
                sums[name] = sums.get(name, 0.0) + float(value)
    instance = str(sums.get(_STARTED, ""))
    models, context = ((), None) if known is None else (known.models, known.context_tokens)
    if not models or known is None or known.instance != instance:
        models, context = await _models(client, address, headers)
    return Report(
        ours=False,
        ready=True,
        instance=instance,
        models=models,
        running=_first(sums, _RUNNING),
        waiting=_first(sums, _WAITING),
        progress=hash(tuple(told)) if told else None,
        events=None if address.events is None else (address.events, address.replay or ""),
        context_tokens=context,
    )


async def _models(client: Connections, address: Address, headers: Mapping[str, str]) -> tuple[tuple[str, ...], int | None]:
    listed = await _get(client, f"{address.url}/v1/models", headers)
    if listed.status != 200:
        raise ValueError(f"it answers {listed.status} to /v1/models")
    models = msgspec.json.decode(listed.content)["data"]
    contexts = [one["max_model_len"] for one in models if isinstance(one.get("max_model_len"), int)]
    return tuple(str(one["id"]) for one in models), min(contexts, default=None)


def _first(sums: Mapping[str, float], names: tuple[str, ...]) -> int | None:
    return next((int(sums[name]) for name in names if name in sums), None)
