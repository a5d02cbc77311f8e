"""One worker as the router knows it. For the event loop's thread alone."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from headstart.config import parse_endpoint
from headstart.errors import ConfigError
from headstart.policy.backing_off import BackingOff
from headstart.policy.routing.estimate import Speeds
from headstart.policy.speed import Sample, Speed, fitted

Role = Literal["both", "prefill", "decode"]
State = Literal["starting", "ready", "draining", "down"]
ROLES: tuple[str, ...] = get_args(Role)
STATES: tuple[State, ...] = get_args(State)

_LATELY_S = 300.0  # of which times are told
_KEPT = 1024  # times
_SAMPLES = 32
_ENOUGH = 3  # samples before measured speeds count
_FAILURES = 3  # in a row, before a worker that says it is well is let alone for a while
GUESSED = Speeds(prefill=Speed((2e-4, 0.0)), step=Speed((2e-2, 1e-3, 0.0)), disk=Speed((2e-5, 5e-3)), pool=Speed((4e-5, 1e-2)))


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker answers and what it is for. `events`, `replay`: its KV events and what was missed of them, for those that
    do not say so themselves."""

    url: str
    role: Role = "both"
    events: str | None = None
    replay: str | None = None

    @property
    def id(self) -> str:
        """Host and port, and the path where there is one."""
        parts = urlsplit(self.url)
        return parts.netloc + parts.path.rstrip("/").replace("/", "-")

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read "URL[,role=ROLE][,events=ENDPOINT][,replay=ENDPOINT]". Raises ConfigError.

        >>> Address.parse("http://10.0.0.5:8000,role=decode").id
        '10.0.0.5:8000'
        """
        url, *options = text.strip().split(",")
        given: dict[str, Any] = {}
        for option in options:
            name, _, value = option.partition("=")
            if name not in ("role", "events", "replay") or not value:
                raise ConfigError(f"worker {text!r}: {option!r} is not role=, events= or replay= and a value", worker=text)
            given[name] = value
        return cls.of(url, **given)

    @classmethod
    def of(cls, url: str, *, role: str = "both", events: str | None = None, replay: str | None = None) -> Address:
        """Raises ConfigError for what is no address of a worker."""
        parts = urlsplit(url)
        try:
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and parts.port != 0
        except ValueError:
            good = False
        if not good or not re.fullmatch(r"[\x21-\x7e]+", url):
            raise ConfigError(f"worker {url!r} is no address; write one like http://10.0.0.5:8000", worker=url)
        if "@" in parts.netloc:  # it would be told wherever the address is, and sent instead of the router's key
            raise ConfigError("a worker's address holds no user or password; give the key as server.router_key")
        if role not in ROLES:
            raise ConfigError(f"worker {url}: there is no role {role!r}; there are {', '.join(ROLES)}", worker=url)
        for endpoint in (events, replay):
            if endpoint is not None:
                parse_endpoint(endpoint)
        return cls(url.rstrip("/").removesuffix("/v1"), role, events, replay)  # type: ignore[arg-type]  # checked above


@dataclass(frozen=True, slots=True)
class Handoff:
    """A worker's part in handing prompts over (docs/prefill-decode.md). `addresses`: where others ask it to compute prompts, as
    they reach it; `takes`: whether it takes what others computed; `bytes_per_s`: how fast that came."""

    role: Role
    addresses: tuple[str, ...] = ()
    takes: bool = False
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says when it is asked. `ours`: it is a server of ours; of others only what their metrics tell is known, and
    None stands for the rest. `progress`: another number whenever its engine got any further, whatever its queue does.
    `trusted`: it believes the router whose requests are. `speeds`: as far as they were measured."""

    ours: bool
    ready: bool
    instance: str = ""
    models: tuple[str, ...] = ()
    running: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    kv_tokens: int | None = None
    kv_used: int | None = None
    progress: int | None = None
    speeds: Speeds | None = None
    roots: Mapping[str, bytes] = field(default_factory=dict)
    representation: bytes | None = None
    events: tuple[str, str] | None = None
    hit_tokens: Mapping[str, int] = field(default_factory=dict)
    trusted: bool = False
    context_tokens: int | None = None
    token_bytes: int = 1 << 16
    handoff: Handoff | None = None


class Times:
    """What took how long lately; bounded.

    >>> times = Times()
    >>> for n in range(1, 11):
    ...     times.add(float(n), now_s=100.0)
    >>> times.percentiles(now_s=150.0), times.percentiles(now_s=1000.0)
    ({'p50': 6.0, 'p90': 10.0}, {'p50': None, 'p90': None})
    """

    def __init__(self) -> None:
        self._taken: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, seconds: float, *, now_s: float) -> None:
        self._taken.append((now_s, seconds))

    def percentiles(self, *, now_s: float) -> dict[str, float | None]:
        taken = sorted(seconds for at_s, seconds in self._taken if now_s - at_s <= _LATELY_S)
        return {
            name: taken[min(len(taken) - 1, len(taken) * p // 100)] if taken else None for name, p in (("p50", 50), ("p90", 90))
        }


class Measured:
    """How fast a worker is that does not say so, from what its answers took."""

    def __init__(self) -> None:
        self._prefills: deque[Sample] = deque(maxlen=_SAMPLES)
        self._steps: deque[Sample] = deque(maxlen=_SAMPLES)

    def first_token(self, *, reused: int, tokens: int, seconds: float) -> None:
        """A prompt that nothing was queued before had its first token after so long."""
        if seconds > 0 and tokens > reused:
            self._prefills.append(Sample((tokens - reused, (tokens * tokens - reused * reused) / 2), seconds))

    def answered(self, *, steps: int, running: int, context: int, seconds: float) -> None:
        """So many steps of an answer took so long, beside `running` requests in all that attended to `context` tokens."""
        if seconds > 0 and steps > 0:
            self._steps.append(Sample((steps, steps * running, steps * context), seconds))

    def speeds(self) -> Speeds | None:
        """Return what is known; None while that is too little."""
        if len(self._prefills) < _ENOUGH:
            return None
        prefill = fitted(self._prefills)
        step = fitted(self._steps) if len(self._steps) >= _ENOUGH else None
        if prefill is None or not any(prefill.costs):
            return None
        return Speeds(prefill=prefill, step=step if step is not None and any(step.costs) else GUESSED.step)


@dataclass(eq=False, slots=True)
class Worker:
    """`report`: its latest, None before the first. `alive`: it answered lately. `flights`: for each request there what
    is called when the worker is lost. `moved_s`: when it was last seen to get further with what it has; `stuck`: that was too
    long ago, and it has answered nothing since, though it says that it is well; `trying`: asks it for something meanwhile.
    `lacks`: paths that it does not have. `following`: whatever keeps its events, while they are followed."""

    address: Address
    role: Role
    number: int
    id: str = field(init=False)
    alive: bool = False
    draining: bool = False
    wanted: Role | None = None  # which it is to be told
    report: Report | None = None
    why_down: str = "it has not answered yet"
    requests: int = 0
    failures: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    seen_ready: bool = False
    lives: int = 0  # how often all that it held was forgotten
    added_s: float = 0.0
    following: object | None = None
    flights: dict[str, Callable[[], None]] = field(default_factory=dict)
    moved_s: float = 0.0
    looked_s: float = 0.0  # when that was last looked for
    stuck: bool = False
    trying: asyncio.Task[None] | None = None
    lacks: set[str] = field(default_factory=set)
    doubted: asyncio.Event = field(default_factory=asyncio.Event)  # set to have it asked at once
    first_tokens: Times = field(default_factory=Times)
    tokens: Times = field(default_factory=Times)
    measured: Measured = field(default_factory=Measured)
    resting: BackingOff = field(default_factory=lambda: BackingOff(_FAILURES, 1.0, 30.0))

    def __post_init__(self) -> None:
        self.id = self.address.id

    def state(self, now_s: float) -> State:
        """Return how it is; `draining` only while it could be asked still."""
        if not self.alive or self.report is None:
            return "down" if self.seen_ready else "starting"
        if not self.report.ready:
            return "starting"
        if self.draining:
            return "draining"
        well = not self.stuck and (not self.resting.failures or self.resting.may(now_s))
        return "ready" if well else "down"

    @property
    def ours(self) -> bool:
        return self.report is not None and self.report.ours

    @property
    def trusted(self) -> bool:
        return self.report is not None and self.report.trusted

    def speeds(self) -> Speeds:
        """Return how fast it is: as it says, as its answers showed, or a guess."""
        told = None if self.report is None else self.report.speeds
        return told or self.measured.speeds() or GUESSED

    def told(self, now_s: float) -> dict[str, Any]:
        """Return what /router/workers says of it."""
        report = self.report or Report(ours=False, ready=False)
        speeds = self.speeds()
        in_flight = len(self.flights)
        return {
            "id": self.id,
            "url": self.address.url,
            "role": self.role,
            "state": self.state(now_s),
            "why": self.why_down if not self.alive or self.stuck else "",
            "models": list(report.models),
            "instance": report.instance,
            "in_flight": in_flight,
            "running": in_flight if report.running is None else report.running,
            "waiting": 0 if report.waiting is None else report.waiting,
            "waiting_tokens": 0 if report.waiting_tokens is None else report.waiting_tokens,
            "prefill_tokens_per_s": round(1.0 / max(1e-9, speeds.prefill_s(0, 1024) / 1024), 1),
            "decode_tokens_per_s": round(1.0 / max(1e-9, speeds.step.seconds(1, 1, 1024)), 1),
            "kv_tokens": report.kv_tokens,
            "kv_used_tokens": report.kv_used,
            "hit_tokens": dict(report.hit_tokens) or {"memory": self.cached_tokens},
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "events": self.following is not None,
            "requests": self.requests,
            "failures": self.failures,
            "first_token_s": self.first_tokens.percentiles(now_s=now_s),
            "token_s": self.tokens.percentiles(now_s=now_s),
        }


def endpoint_seen_from(endpoint: str, url: str) -> str:
    """Return a worker's endpoint as it can be reached from here: of one that listens everywhere, at the worker's own host."""
    host, port = parse_endpoint(endpoint)
    if port is None or host not in ("*", "0.0.0.0", "::"):
        return endpoint
    there = urlsplit(url).hostname or "127.0.0.1"
    return f"tcp://[{there}]:{port}" if ":" in there else f"tcp://{there}:{port}"


def with_guesses(speeds: Mapping[str, Sequence[float]], *, token_bytes: int, tiers: Sequence[str]) -> Speeds | None:
    """Return what a server of ours says of its speeds. Of tiers that it has and has not measured a gigabyte a second is
    expected; None before it has computed anything."""
    if "prefill" not in speeds or "step" not in speeds:
        return None

    def reading(tier: str) -> Speed | None:
        if tier in speeds:
            return Speed(tuple(speeds[tier]))
        return Speed((1e-9 * token_bytes, 5e-3)) if tier in tiers else None

    return Speeds(
        prefill=Speed(tuple(speeds["prefill"])),
        step=Speed(tuple(speeds["step"])),
        disk=reading("disk"),
        pool=reading("pool"),
    )
