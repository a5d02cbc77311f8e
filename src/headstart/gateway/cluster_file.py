"""cluster.toml: what `headstart up` starts. Read and checked here, with the same errors as the configuration has.

model = "smollm2-135m"

[[workers]]
count = 2
arguments = ["--kv-memory", "2GiB"]
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from headstart.config import nearest
from headstart.errors import ConfigError
from headstart.gateway.launching import Spec
from headstart.policy.planning import DAYS, Delays, Limits, Targets, Window

Few = Annotated[int, Meta(ge=0, le=1024)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Clock = Annotated[str, Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkersTable:
    """Workers that are alike. `arguments`: flags of `headstart serve`; `command`: what is run instead of it, with {model},
    {host} and {port} in it; `cpus`, `gpus`, `resources`: what one takes of a machine, for Ray."""

    count: Few = 1
    role: Role = "both"
    arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: Annotated[float, Meta(ge=0)] = 1.0
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RouterTable:
    """`arguments`: further flags of `headstart route`."""

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolTable:
    """A directory that all workers share; it is made where it is not there."""

    directory: Annotated[str, Meta(min_length=1)] = ""
    capacity: str = ""


@dataclass(frozen=True, slots=True)
class WindowTable:
    """Other bounds at some hours of the local day: `start` and `end` as "22:00"; `days` on which it begins, all if empty."""

    start: Clock
    end: Clock
    minimum: Annotated[int, Meta(ge=1, le=1024)] = 1
    maximum: Annotated[int, Meta(ge=1, le=1024)] = 8
    days: tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...] = ()


@dataclass(frozen=True, slots=True)
class PlannerTable:
    """`every_s`: how often it looks; `dry_run`: it only says what it would do; `metrics_port`: where its metrics are told."""

    enabled: bool = True
    dry_run: bool = False
    first_token_s: Seconds = 2.0
    token_s: Seconds = 0.1
    minimum: Annotated[int, Meta(ge=1, le=1024)] = 1
    maximum: Annotated[int, Meta(ge=1, le=1024)] = 8
    every_s: Seconds = 10.0
    start_s: Seconds = 60.0
    warm_s: Seconds = 300.0
    settle_s: Seconds = 600.0
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    windows: tuple[WindowTable, ...] = ()

    @property
    def targets(self) -> Targets:
        return Targets(self.first_token_s, self.token_s)

    @property
    def limits(self) -> Limits:
        return Limits(self.minimum, self.maximum, tuple(_window(one) for one in self.windows))

    @property
    def delays(self) -> Delays:
        return Delays(self.start_s, self.warm_s, self.settle_s)


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """`directory`: where what runs is written down, and the logs. `launcher`: local processes, or Ray; `ray_address`: of its
    cluster, "" for the one that this machine belongs to."""

    model: Annotated[str, Meta(min_length=1)] = "smollm2-135m"
    directory: str = "~/.cache/headstart/cluster"
    launcher: Literal["local", "ray"] = "local"
    ray_address: str = ""
    workers: tuple[WorkersTable, ...] = (WorkersTable(),)
    router: RouterTable = RouterTable()
    pool: PoolTable | None = None
    planner: PlannerTable | None = None

    @property
    def folder(self) -> Path:
        return Path(self.directory).expanduser()

    def specs(self) -> list[Spec]:
        """Return the workers that there are at first."""
        return [self.spec(table) for table in self.workers for _ in range(table.count)]

    def spec(self, table: WorkersTable) -> Spec:
        if table.command:
            command = tuple(word.replace("{model}", self.model) for word in table.command)
        else:
            command = (sys.executable, "-m", "headstart.cli", "serve", self.model, "--host", "{host}", "--port", "0")
            command += ("--usage-keep", "0")  # the router keeps the usage log
            if self.pool is not None:
                command += ("--pool", str(Path(self.pool.directory).expanduser()))
                command += ("--pool-capacity", self.pool.capacity) if self.pool.capacity else ()
            if self.launcher == "local" and find_spec("zmq") is not None:
                command += ("--cache-kv-events", "ipc://{folder}/events.sock")  # so that the router knows what was evicted
            if any(one.role != "both" for one in self.workers):  # KV goes straight from worker to worker
                command += ("--role", table.role, "--handoff-listen", "ipc://{folder}/handoff.sock")
            command += table.arguments
        return Spec(table.role, command, dict(table.environment), table.cpus, table.gpus, dict(table.resources))

    def spec_for(self, role: str) -> Spec:
        """Return what the planner starts in a role: workers of that role as they are declared, or else the first ones."""
        table = next((one for one in self.workers if one.role == role), self.workers[0])
        spec = self.spec(table)
        return Spec(role, spec.command, spec.environment, spec.cpus, spec.gpus, spec.resources)


def read_cluster(path: Path) -> ClusterFile:
    """Return what a file says. Raises ConfigError naming the key, and for an unknown one the nearest right name."""
    try:
        with path.expanduser().open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cluster file {path} cannot be read: {error.strerror}", path=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster file {path} is not valid TOML: {error}", path=path) from error
    cluster: ClusterFile = _table(ClusterFile, content, "", path)
    if not cluster.workers:
        raise ConfigError(f"cluster file {path} names no workers; write [[workers]] with a count", path=path)
    if cluster.pool is not None and not cluster.pool.directory:
        raise ConfigError(f"cluster file {path}: [pool] wants a directory that all workers share", key="pool.directory")
    planner = cluster.planner
    for table, where in [(planner, "planner")] + [(one, "planner.windows") for one in (planner.windows if planner else ())]:
        if table is not None and table.minimum > table.maximum:
            raise ConfigError(
                f"cluster file {path}: {where}.minimum {table.minimum} is more than its maximum {table.maximum}", key=where
            )
    if planner is not None and not any(table.count for table in cluster.workers):
        raise ConfigError(f"cluster file {path}: a planner needs a worker to look at; write a count of 1 or more", path=path)
    return cluster


def _table(cls: type, content: Mapping[str, Any], prefix: str, path: Path) -> Any:
    """Return a table as its class, each key checked by its own type."""
    hints = get_type_hints(cls, include_extras=True)
    names = [item.name for item in fields(cls)]
    given: dict[str, Any] = {}
    for name, value in content.items():
        key = prefix + name
        if name not in names:
            hint = nearest(name, names)
            raise ConfigError(f"cluster file {path}: unknown key {key!r}; {hint}", key=key)
        inner, many = _inner(hints[name])
        if inner is not None and isinstance(value, list if many else dict):
            tables: list[Any] = value if isinstance(value, list) else [value]
            if all(isinstance(one, dict) for one in tables):
                read = tuple(_table(inner, one, f"{key}.", path) for one in tables)
                given[name] = read if many else read[0]
                continue
        if inner is not None:
            brackets = f"[[{key}]]" if many else f"[{key}]"
            raise ConfigError(f"cluster file {path}: {key!r} is a table; write {brackets} above its keys", key=key)
        try:
            given[name] = msgspec.convert(value, hints[name])
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"cluster file {path}: {key!r} cannot be {value!r}: {_told(error, hints[name])}", key=key
            ) from error
    try:
        return cls(**given)
    except TypeError:
        missing = [name for name in ("start", "end") if name in names and name not in given]
        raise ConfigError(
            f"cluster file {path}: [[{prefix.rstrip('.')}]] has no {' and no '.join(missing)}", key=prefix
        ) from None


def _told(error: msgspec.ValidationError, kind: Any) -> str:
    """Return what is wrong with a value, and where few are right which those are."""
    text = str(error).replace("`", "")
    if text.startswith("Invalid enum value"):
        return f"write one of {', '.join(_words(kind))}"
    return 'write a time such as "22:00"' if text.startswith("Expected str matching") else text


def _words(kind: Any) -> tuple[str, ...]:
    """Return the words that a type allows."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((words for one in get_args(kind) if (words := _words(one))), ())


def _inner(kind: Any) -> tuple[type | None, bool]:
    """Return the class of a table, and whether there are many of it."""
    for one in (kind, *get_args(kind)):
        if isinstance(one, type) and one.__name__.endswith("Table"):
            return one, kind is not one and getattr(kind, "__origin__", None) is tuple
    return None, False


def _window(table: WindowTable) -> Window:
    start, end = (int(text[:2]) * 60 + int(text[3:]) for text in (table.start, table.end))
    days = frozenset(DAYS.index(day) for day in table.days)
    return Window(start, end, minimum=table.minimum, maximum=table.maximum, days=days)
