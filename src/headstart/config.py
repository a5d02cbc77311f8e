"""Configuration: one TOML file, every key also an environment variable and a flag. The only place that reads the environment.

    [cache]                      HEADSTART_CACHE_DIRECTORY=/mnt/kv     --cache-directory /mnt/kv
    directory = "/mnt/kv"

Later wins: defaults, file, environment, flags. Unknown keys are refused with the nearest right name. Sizes are written
"20GiB", "500MB" or a number of bytes; a capacity may also be "10%" of the file system.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from headstart.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
Size = Annotated[str, Meta(extra={"size": ()})]  # `size` names the words and forms allowed beside a number of bytes
SizeOrAuto = Annotated[str, Meta(extra={"size": ("auto",)})]
Budget = Annotated[str, Meta(extra={"size": ("unlimited", "%"), "check": "budget"})]
Kept = Annotated[str, Meta(extra={"size": ("%",), "check": "kept"})]
SizeOrShare = Annotated[str, Meta(extra={"size": ("%",)})]
Spans = Annotated[str, Meta(extra={"check": "retention"})]
Quotas = Annotated[str, Meta(extra={"check": "quotas"})]
Endpoint = Annotated[str, Meta(extra={"check": "endpoint"})]
Bucket = Annotated[str, Meta(extra={"check": "bucket"})]
Endpoints = Annotated[str, Meta(extra={"check": "endpoints"})]
Folders = Annotated[str, Meta(extra={"check": "folders"})]
Aliases = Annotated[str, Meta(extra={"check": "aliases"})]
Rules = Annotated[str, Meta(extra={"check": "rules"})]
CANONICAL_RULES = ("billing-header", "cache-control", "text-parts", "reasoning", "tool-arguments", "generated-tokens")
CANONICAL = ", ".join(CANONICAL_RULES)
RETENTION = "agent=3d..30d, chat=7d..30d, default=0s.."


@dataclass(frozen=True, slots=True)
class TieringConfig:
    rules: Annotated[
        tuple[str, ...],
        Meta(
            extra={"lines": True},
            description="rules by which what is stored moves between tiers, and where saves go; a server follows changes",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class CacheConfig:
    enabled: Annotated[bool, Meta(description="keep the KV of prompts for later requests and restarts")] = True
    directory: Annotated[
        Path | tuple[Path, ...],
        Meta(
            extra={"paths": True},
            description="where the disk tier lies, as private as the prompts; several (a list, or a:b) are one tier",
        ),
    ] = Path("~/.cache/headstart/kv")
    capacity: Annotated[SizeOrShare, Meta(description="of the disk tier: a size, or a share of the file system")] = "10%"
    min_free: Annotated[Kept, Meta(description="what is left free to others on the file system: a size, or a share of it")] = (
        "10%"
    )
    memory: Annotated[Size, Meta(description='of the memory tier in front of the disk; "0" turns it off')] = "2GiB"
    node_memory: Annotated[
        Size,
        Meta(
            description='of one memory tier for all processes of the machine, which stays when they end; "0": each has its own'
        ),
    ] = "0"
    node_directory: Annotated[
        Path | None,
        Meta(description="where that lies, on a file system in memory; /dev/shm/headstart-UID by default"),
    ] = None
    retention: Annotated[
        Spans, Meta(description="how long each class of prompts is promised to stay, and after how long it goes in any case")
    ] = RETENTION
    quotas: Annotated[Quotas, Meta(description='most of the disk tier a tenant may have, e.g. "acme=20GiB, *=10%"')] = ""
    durability: Annotated[Literal["none", "data"], Meta(description='"none" or "data", which survives a power loss')] = "none"
    write_budget: Annotated[
        Budget, Meta(description='what may be written to disk a day: a size, a share of the file system, or "unlimited"')
    ] = "30%"
    pool: Annotated[
        Path | None,
        Meta(description="a directory on a file system that many machines share, whose prefixes all of them read and write"),
    ] = None
    pool_capacity: Annotated[
        SizeOrShare, Meta(description="of the pool, for all machines together: a size, or a share of its file system")
    ] = "80%"
    pool_read_only: Annotated[bool, Meta(description="read what others store in the pool, and store nothing there")] = False
    pool_visible_s: Annotated[
        float,
        Meta(ge=0, le=600, description="after how long every machine sees what one wrote: the attribute cache of the mounts"),
    ] = 1.0
    object_store: Annotated[
        Bucket,
        Meta(
            description="a bucket, or a prefix in one, that many machines share behind all other tiers, e.g. "
            '"s3://bucket/prefix", gs://…, az://…; credentials are the service\'s environment variables; "" for none'
        ),
    ] = ""
    object_capacity: Annotated[Size, Meta(description="of the object store, for all machines together")] = "100GiB"
    object_read_only: Annotated[
        bool, Meta(description="read what others store in the object store, and store nothing there")
    ] = False
    object_collects: Annotated[
        Literal["elected", "yes", "no"],
        Meta(description='whether this process removes what has to go: "elected" of all by a conditional put, "yes" or "no"'),
    ] = "elected"
    check_key_file: Annotated[
        Path | None,
        Meta(
            description="file with the key, 64 hex digits, that checks in pool and object store are made with; what was "
            "written without it is not read. Further lines: older keys that are still believed"
        ),
    ] = None
    kv_events: Annotated[
        Endpoint,
        Meta(description='where what is stored is told to routers, as vLLM does, e.g. "tcp://127.0.0.1:5557"; "" for nowhere'),
    ] = ""
    save_every: Annotated[Count, Meta(description="tokens of a long prompt after which what is computed so far is kept")] = 2048
    load_timeout_s: Annotated[float, Meta(gt=0, le=3600, description="after which a load is given up and computed instead")] = (
        30.0
    )

    tiering: TieringConfig = field(default_factory=TieringConfig)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories of the disk tier, at least one."""
        paths = self.directory if isinstance(self.directory, tuple) else (self.directory,)
        return tuple(path.expanduser() for path in paths)

    @property
    def has_node_memory(self) -> bool:
        """Whether the processes of this machine are to have one memory tier together."""
        return self.enabled and parse_size(self.node_memory) > 0

    @property
    def node_path(self) -> Path:
        """The directory of the memory tier that all processes of this user on this machine share."""
        return Path(f"/dev/shm/headstart-{os.geteuid()}") if self.node_directory is None else self.node_directory.expanduser()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    engine: Annotated[
        Literal["auto", "vllm"],
        Meta(description='"auto", or "vllm" for the real vLLM as a child, with headstart\'s store under it'),
    ] = "auto"
    python: Annotated[str, Meta(description="with vllm: the Python of the environment that has it; this one if empty")] = ""
    vllm_arguments: Annotated[
        str, Meta(extra={"check": "words"}, description="with vllm: what else it is started with, as on its command line")
    ] = ""
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto, cpu, cuda, cuda:N or mps")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="auto, float32, bfloat16 or float16, for weights and KV"),
    ] = "auto"
    kv_memory: Annotated[SizeOrAuto, Meta(description="bytes for the KV of running requests")] = "auto"
    max_running: Annotated[Count, Meta(description="requests computed at once")] = 8
    prefill_chunk: Annotated[Count, Meta(description="tokens of a prompt computed in one step")] = 1024
    context: Annotated[Count | None, Meta(description="limit on prompt and answer in tokens, below the model's own")] = None
    kv_type: Annotated[
        Literal["auto", "f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"],
        Meta(description="of GGUF models: auto (f16), or how KV is quantised; torch's is dtype"),
    ] = "auto"
    libllama: Annotated[
        str,
        Meta(
            description="of GGUF models: path of libllama.so, for a build with CUDA, Metal, ROCm or Vulkan; else the package's"
        ),
    ] = ""
    adapters: Annotated[
        Folders, Meta(description='LoRA adapters beside the model, by the name that requests give as model: "sql=/a, chat=/b"')
    ] = ""
    deterministic: Annotated[
        bool, Meta(description="logits equal to the bit, hit or cold and whatever else runs; CPUs only, slower")
    ] = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: Annotated[str, Meta(min_length=1, description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one")] = 8000
    allow_remote: Annotated[
        bool, Meta(description="listen on an address that other machines reach though no keys are asked for")
    ] = False
    keys: Annotated[
        Path | None, Meta(description="file of API keys, which headstart keys writes; without one nobody is asked for a key")
    ] = None
    max_waiting: Annotated[Count, Meta(description="requests that may wait; more are answered 429")] = 256
    alias: Annotated[Aliases, Meta(description='names that requests may give as model: "gpt-4o=smollm2-135m, fast=sql"')] = ""
    strict_models: Annotated[
        bool, Meta(description="refuse requests for a model of another name, which else get the one served")
    ] = False
    answers: Annotated[
        str, Meta(description="how reasoning and tool calls are written: auto, none, or the name of a family of models")
    ] = "auto"
    deadline_s: Annotated[
        float | None, Meta(gt=0, le=86400, description="the longest that a request may take; a header may ask for less")
    ] = None
    shared_prefixes: Annotated[
        Path | None, Meta(description="file of prompts whose stored beginnings all tenants share, a JSON object a line")
    ] = None
    usage_log: Annotated[Path, Meta(description="folder of the usage log, a line for each request")] = Path(
        "~/.cache/headstart/usage"
    )
    traces: Annotated[
        str, Meta(description='where OpenTelemetry traces go by OTLP over HTTP, such as "http://127.0.0.1:4318/v1/traces"')
    ] = ""
    usage_keep: Annotated[Size, Meta(description='of the usage log; the oldest files go, and "0" keeps no log')] = "1GiB"
    keep_prompts: Annotated[
        bool,
        Meta(description="keep the token ids of the latest prompts and answers in memory: headstart why is then exact"),
    ] = False
    role: Annotated[
        Literal["both", "prefill", "decode"],
        Meta(description="both, prefill (computes prompts for others) or decode (has prompts computed where a router says)"),
    ] = "both"
    router_key: Annotated[
        Path | None,
        Meta(description="file with the secret of the router in front: who has it is believed whose requests are"),
    ] = None
    canonical: Annotated[
        Rules, Meta(description='rules by which differences between requests that mean nothing are taken out; none: ""')
    ] = CANONICAL

    @property
    def canonical_rules(self) -> tuple[str, ...]:
        return parse_rules(self.canonical)


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    listen: Annotated[
        Endpoints,
        Meta(
            description="where other workers ask for the KV of prompts that are computed here: "
            '"ipc:///path" on this machine, "tcp://host:port" beyond it, or both; "" for nowhere'
        ),
    ] = ""
    secret: Annotated[
        Path | None, Meta(description="file with what all workers know of each other; needed beyond this machine")
    ] = None
    timeout_s: Annotated[
        float, Meta(gt=0, le=600, description="after which another worker that does nothing is given up, and its part computed")
    ] = 10.0
    nixl: Annotated[
        bool,
        Meta(description="KV goes between machines by NIXL (RDMA where the network has it), with workers that do so too"),
    ] = False


@dataclass(frozen=True, slots=True)
class RouteConfig:
    addresses: Annotated[
        str,
        Meta(description='addresses of workers, with spaces between: "http://10.0.0.5:8000 http://10.0.0.6:8000,role=decode"'),
    ] = ""
    tokenizer: Annotated[
        str, Meta(description="alias, GGUF file, directory or hub name whose tokenizer counts prompts; empty asks workers")
    ] = ""
    max_workers: Annotated[int, Meta(ge=1, le=1024, description="workers that there may be at once")] = 64
    blocks: Annotated[Count, Meta(description="blocks of which it is remembered which worker has them")] = 1 << 20
    poll_s: Annotated[float, Meta(gt=0, le=60, description="how often each worker is asked how it is")] = 1.0
    dead_after_s: Annotated[
        float,
        Meta(gt=0, le=600, description="after which a worker that is silent is taken out; what waits there is sent on"),
    ] = 10.0
    stuck_after_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="after which a worker that says it is well, but gets no further with what it has, is taken out",
        ),
    ] = 300.0
    patience_s: Annotated[
        float, Meta(ge=0, le=3600, description="how long a request waits for a worker while there is none that could take it")
    ] = 30.0


@dataclass(frozen=True, slots=True)
class Config:
    model: Annotated[str, Meta(min_length=1, description="alias, GGUF file, directory or hub name")] = "smollm2-135m"
    models_directory: Annotated[Path, Meta(description="where fetched and converted models lie")] = Path(
        "~/.cache/headstart/models"
    )
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    route: RouteConfig = field(default_factory=RouteConfig)


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration key: what it is called in the file, the environment and on the command line."""

    key: str
    type: Any
    default: Any
    help: str

    @property
    def variable(self) -> str:
        return "HEADSTART_" + self.key.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """Names of engine, server, route, node, pool and object store settings are clear without their section; else `cache`
        is kept, or --memory would mislead."""
        if self.switches_off:
            return "--no-" + self.key.removesuffix(".enabled")
        name = self.key.removeprefix("engine.").removeprefix("server.").removeprefix("route.")
        name = name.removeprefix("cache.") if name.startswith(("cache.pool", "cache.object_", "cache.node_")) else name
        return "--" + name.replace(".", "-").replace("_", "-")

    @property
    def metavar(self) -> str:
        """What stands for a value in --help."""
        if _size_forms(self.type) is not None:
            return "SIZE"
        return {Path: "PATH", int: "N", type(None): "N", float: "SECONDS"}.get(
            type(self.default), self.key.rpartition(".")[2].upper()
        )

    @property
    def switches_off(self) -> bool:
        """Whether the flag takes no value and turns a section off that is on by default."""
        return self.key.endswith(".enabled")

    @property
    def switches_on(self) -> bool:
        """Whether the flag takes no value and turns something on that is off by default."""
        return self.default is False


def load_config(
    file: Path | None = None, *, overrides: Mapping[str, object] | None = None, overrides_from: str | None = None
) -> Config:
    """Return the configuration from defaults, `file` (or $HEADSTART_CONFIG), HEADSTART_* and `overrides`.

    Overrides are what flags give: {"cache.memory": "1GiB"}; `overrides_from` says where they stand if they are not flags
    ("in …"). A leading ~ in a path is the home directory. Raises ConfigError naming the key, where it was set and the nearest
    right name."""
    file = config_file_of(file)
    chosen: dict[str, Any] = {key: _expanded(setting.default) for key, setting in settings().items()}
    if file is not None:
        chosen |= _from_file(file)
    chosen |= _from_environment(os.environ)
    for key, value in (overrides or {}).items():
        chosen[key] = _converted(key, value, where=overrides_from or _where_flag(key), strict=False)
    return _assemble(chosen)


def config_file_of(file: Path | None) -> Path | None:
    """Return the configuration file: the one that is named, or else $HEADSTART_CONFIG."""
    named = os.environ.get("HEADSTART_CONFIG")
    return Path(named) if file is None and named else file


def hand_on(file: Path) -> None:
    """Have processes that this one starts read the same configuration file."""
    os.environ["HEADSTART_CONFIG"] = str(file.expanduser().absolute())


def state_of(file: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file does: for who follows one while running. None where there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@cache
def settings() -> dict[str, Setting]:
    """Return every setting by key, in the order in which they are declared."""
    return {setting.key: setting for setting in _settings_of(Config, "")}


def parse_size(text: str, *, of_bytes: int | None = None) -> int:
    """Return bytes for "20GiB", "500MB", "4096" or, with `of_bytes`, "10%". Raises ConfigError.

    >>> parse_size("1.5KiB"), parse_size("2MB"), parse_size("10%", of_bytes=5000)
    (1536, 2000000, 500)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*|%)", text.strip().lower())
    if found is not None:
        number, unit = float(found[1]), found[2]
        if unit == "%" and of_bytes is not None:
            if number > 100:
                raise ConfigError(f"{text!r} is more than there is; write a share of at most 100%", text=text)
            return int(of_bytes * number / 100)
        if unit in _UNITS:
            return int(found[1]) * _UNITS[unit] if "." not in found[1] else int(number * _UNITS[unit])
    share = ', or a share such as "10%"' if of_bytes is not None else ""
    raise ConfigError(f'{text!r} is not a size; write "20GiB", "500MB" or a number of bytes{share}', text=text)


def parse_retention(text: str) -> dict[str, tuple[int, int | None]]:
    """Return for each class (guaranteed, ceiling) in milliseconds, None where there is no ceiling. Raises ConfigError.

    >>> parse_retention("agent=3d..30d, default=0s..")
    {'agent': (259200000, 2592000000), 'default': (0, None)}
    """
    spans = {}
    for name, span in _pairs(text, 'write "agent=3d..30d, default=0s.."'):
        guaranteed, dots, ceiling = span.partition("..")
        if not dots:
            raise ConfigError(f'{name}={span}: write two times, as in "7d..30d", or "7d.." without a ceiling', text=text)
        low, high = parse_duration_ms(guaranteed), parse_duration_ms(ceiling) if ceiling else None
        if high is not None and high < max(low, 1):
            raise ConfigError(f"{name}={span}: the ceiling is below what is guaranteed; write the longer time last", text=text)
        spans[name] = (low, high)
    return spans


def parse_duration_ms(text: str) -> int:
    """Return milliseconds for "90s", "12h", "3d" or "2w". Raises ConfigError.

    >>> parse_duration_ms("1.5h")
    5400000
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    if found is None or found[2] not in _DURATIONS_MS:
        raise ConfigError(f'{text!r} is not a time; write a number and s, m, h, d or w, as in "90s", "12h", "3d"', text=text)
    return min(round(float(found[1]) * _DURATIONS_MS[found[2]]), _MAX_DURATION_MS)


def parse_quotas(text: str) -> dict[str, str]:
    """Return for each tenant a size or a share, which `parse_size` takes; "*" is every other one. Raises ConfigError.

    >>> parse_quotas("acme=20GiB, *=10%")
    {'acme': '20GiB', '*': '10%'}
    """
    quotas = dict(_pairs(text, 'write "acme=20GiB, *=10%"'))
    for size in quotas.values():
        parse_size(size, of_bytes=100)
    return quotas


def parse_rules(text: str) -> tuple[str, ...]:
    """Return the named rules of canonical form. Raises ConfigError for a name that is none.

    >>> parse_rules("text-parts, cache-control")
    ('text-parts', 'cache-control')
    """
    names = tuple(name for part in text.split(",") if (name := part.strip()))
    for name in names:
        if name not in CANONICAL_RULES:
            near = get_close_matches(name, CANONICAL_RULES, n=1)
            known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(CANONICAL_RULES)}"
            raise ConfigError(f"there is no rule {name!r}; {known}", text=text)
    return names


def longest_promise_s(retention: str) -> float:
    """Return the longest time that a class guarantees, of those that are named and those that are built in."""
    spans = parse_retention(RETENTION) | parse_retention(retention)
    return max(guaranteed for guaranteed, _ in spans.values()) / 1000


def require_budget(text: str) -> None:
    """Raise ConfigError for a write budget by which nothing is ever written.

    >>> require_budget("30%")
    """
    if text != "unlimited" and not parse_size(text, of_bytes=ANY_DISK_BYTES):
        raise ConfigError('it keeps nothing; write "unlimited" for no limit, or cache.capacity = "0" to do without the disk')


def parse_aliases(text: str) -> dict[str, str]:
    """Return for each name the one that it means. Raises ConfigError.

    >>> parse_aliases("gpt-4o=smollm2-135m, fast=sql")
    {'gpt-4o': 'smollm2-135m', 'fast': 'sql'}
    """
    return dict(_pairs(text, 'write "gpt-4o=smollm2-135m, fast=sql"'))


def parse_adapters(text: str) -> dict[str, Path]:
    """Return the folder of each adapter. Raises ConfigError.

    >>> parse_adapters("sql=/srv/sql, chat=/srv/chat")
    {'sql': PosixPath('/srv/sql'), 'chat': PosixPath('/srv/chat')}
    """
    return {name: Path(folder).expanduser() for name, folder in _pairs(text, 'write "sql=/srv/sql, chat=/srv/chat"')}


@dataclass(frozen=True, slots=True)
class ModelPlaces:
    """Where other programs keep the models that they have downloaded."""

    ollama: tuple[Path, ...]
    lm_studio: tuple[Path, ...]
    hugging_face: Path


def model_places() -> ModelPlaces:
    """Return those places, as these programs' own variables say."""
    home = Path("~").expanduser()
    ollama = os.environ.get("OLLAMA_MODELS")
    hub = os.environ.get("HF_HUB_CACHE") or f"{os.environ.get('HF_HOME') or home / '.cache/huggingface'}/hub"
    return ModelPlaces(
        ollama=(Path(ollama),) if ollama else (home / ".ollama/models", _OLLAMA_SERVICE),
        lm_studio=(home / ".lmstudio/models", home / ".cache/lm-studio/models"),
        hugging_face=Path(hub).expanduser(),
    )


def parse_endpoint(text: str) -> tuple[str, int | None]:
    """Return host and port of a TCP endpoint, the path and None of a local one. Raises ConfigError.

    >>> parse_endpoint("tcp://127.0.0.1:5557"), parse_endpoint("ipc:///run/kv")
    (('127.0.0.1', 5557), ('/run/kv', None))
    """
    if text.startswith("ipc:///"):
        return text.removeprefix("ipc://"), None
    found = re.fullmatch(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[^\s:/*\[\]]+):(\d{1,5})", text)
    if found is None or int(found[2]) > _LAST_PORT - 1:  # the one behind it is taken too
        raise ConfigError('write "tcp://127.0.0.1:5557" or "ipc:///path"', text=text)
    return found[1].strip("[]"), int(found[2])


def require_bucket(text: str) -> None:
    """Raise ConfigError for what names no bucket, and for what holds a secret: it would stand in logs.

    >>> require_bucket("s3://bucket/prefix")
    """
    found = re.fullmatch(r"([a-z0-9]+)://([^/\s]*)(/\S*)?", text)
    if text and (found is None or found[1] not in _BUCKETS or not (found[2] or found[1] == "file")):
        raise ConfigError('write "s3://bucket/prefix", or the same with gs, az or abfs', text=text)
    if re.search(r"[?#]|:[^/]*@", text):
        raise ConfigError("credentials belong into the service's environment variables, not into the address")


def parse_words(text: str) -> list[str]:
    """Return the words of a command line. Raises ConfigError.

    >>> parse_words("--max-num-seqs 3 --name 'a b'")
    ['--max-num-seqs', '3', '--name', 'a b']
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"a quotation mark is not closed ({error})", text=text) from error


def made_by(file: Path) -> str:
    """Return the command that writes a secret into `file` which nobody else can read."""
    return f"(umask 077; openssl rand -hex 32 > {file})"


def warn_of_readers(file: Path) -> None:
    """Log a warning where other users may read the secret in `file`. It is no error: what mounts secrets makes them so."""
    if file.stat().st_mode & 0o077:
        logging.getLogger("headstart").warning("%s can be read by other users of this machine; chmod 600 %s", file, file)


def prefer_sleeping_threads() -> None:
    """Ask OpenMP to let idle workers sleep. Must run before torch is imported, or it has no effect.

    By default they spin between two operations, which takes the cores from the threads that read and verify the next layer
    while this one is being computed. Someone who set the variable knows better and is left alone."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_WRITE = {
    "bool": "write true or false",
    "int": "write a whole number",
    "float": "write a number",
    "str": 'write a text in "quotes"',
}
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


_DURATIONS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
ANY_DISK_BYTES = 1 << 50  # to see whether a share of a disk is anything at all
_LAST_PORT = 65_535
_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")  # of the account that its installer makes on Linux
_BUCKETS = {"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "file"}
_MAX_DURATION_MS = 1000 * 366 * 86_400_000


def _require_a_rest(text: str) -> None:
    if text.strip().endswith("%") and parse_size(text, of_bytes=ANY_DISK_BYTES) == ANY_DISK_BYTES:
        raise ConfigError('nothing could be stored; write less than 100%, or cache.capacity = "0" to do without the disk')


_CHECKS: dict[str | None, Callable[[str], object]] = {
    "budget": require_budget,
    "kept": _require_a_rest,
    "retention": parse_retention,
    "quotas": parse_quotas,
    "folders": parse_adapters,
    "words": parse_words,
    "aliases": parse_aliases,
    "rules": parse_rules,
    "bucket": require_bucket,
    "endpoint": lambda text: text and parse_endpoint(text),
    "endpoints": lambda text: [parse_endpoint(one) for part in text.split(",") if (one := part.strip())],
}


def _pairs(text: str, example: str) -> Iterable[tuple[str, str]]:
    """Yield ("name", "value") of "name=value, name=value"."""
    seen = set()
    for pair in filter(None, map(str.strip, text.split(","))):
        found = re.fullmatch(r"([^\s=]{1,64})\s*=\s*(\S.*)", pair)
        if found is None or not found[1].isprintable():
            raise ConfigError(f"{pair!r} is not a name of at most 64 letters, = and a value; {example}", text=text)
        if found[1] in seen:
            raise ConfigError(f"{found[1]!r} is named twice; write one value for it", text=text)
        seen.add(found[1])
        yield found[1], found[2]


def _settings_of(cls: type, prefix: str) -> Iterable[Setting]:
    hints = get_type_hints(cls, include_extras=True)
    for item in fields(cls):
        if is_dataclass(hints[item.name]):
            yield from _settings_of(hints[item.name], f"{prefix}{item.name}.")
        else:
            metas = [arg for arg in get_args(hints[item.name]) if isinstance(arg, Meta)]
            description = next(meta.description for meta in metas if meta.description)
            yield Setting(f"{prefix}{item.name}", hints[item.name], item.default, description)


def _from_file(file: Path) -> dict[str, Any]:
    try:
        with file.expanduser().open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error.strerror}", path=file) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file} is not valid TOML: {error}", path=file) from error
    where = f"in {file}"
    return {key: _converted(key, value, where=where, strict=True) for key, value in _flat(content, "", where)}


def _flat(table: Mapping[str, Any], prefix: str, where: str) -> Iterable[tuple[str, Any]]:
    """Yield ("section.name", value) for every leaf; an empty unknown table is a leaf too, so that it is refused."""
    sections = {key.rsplit(".", 1)[0] for key in settings() if "." in key}
    for name, value in table.items():
        key = prefix + name
        if key in sections and not isinstance(value, dict):
            raise ConfigError(f"configuration key {key!r} {where} is a section; write [{key}] above its keys", key=key)
        if isinstance(value, dict) and (value or key in sections):
            yield from _flat(value, f"{key}.", where)
        else:
            yield key, value


def environment_with(values: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with `values` put in, for a child."""
    return {**os.environ, **values}


def keep_from_children(variable: str) -> None:
    """Take a variable out of this process's environment, and so out of that of all it starts from now on."""
    os.environ.pop(variable, None)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    by_variable = {setting.variable: setting for setting in settings().values()}
    chosen = {}
    for variable, text in environment.items():
        if not variable.startswith("HEADSTART_") or variable == "HEADSTART_CONFIG" or _is_service_link(variable, environment):
            continue
        setting = by_variable.get(variable)
        if setting is None:
            raise ConfigError(
                f"unknown environment variable {variable}; {nearest(variable, by_variable)}", key=variable, where="environment"
            )
        chosen[setting.key] = _converted(setting.key, text, where=f"in environment variable {variable}", strict=False)
    return chosen


def _is_service_link(variable: str, environment: Mapping[str, str]) -> bool:
    """Kubernetes sets HEADSTART_SERVICE_HOST, HEADSTART_PORT and the like in pods beside a service called "headstart"."""
    return "KUBERNETES_SERVICE_HOST" in environment and variable.startswith(("HEADSTART_SERVICE_", "HEADSTART_PORT"))


def _where_flag(key: str) -> str:
    return f"given as {settings()[key].flag}" if key in settings() else "given as an override"


def _converted(key: str, value: object, *, where: str, strict: bool) -> Any:
    """Return `value` as the key's type. Text from the environment and from flags is read leniently ("8000", "true")."""
    setting = settings().get(key)
    if setting is None:
        raise ConfigError(f"unknown configuration key {key!r} {where}; {nearest(key, settings())}", key=key, where=where)
    sizes = _size_forms(setting.type)
    if sizes is not None and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    try:
        converted: Any
        if _extra(setting.type, "paths"):
            converted = _paths(value, strict=strict)
        elif _extra(setting.type, "lines"):
            converted = _lines(value)
        else:
            converted = msgspec.convert(value, setting.type, strict=strict, dec_hook=_path)
        if sizes is not None and converted not in sizes:
            parse_size(converted, of_bytes=100 if "%" in sizes else None)
        if check := _CHECKS.get(_extra(setting.type, "check")):
            check(converted)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(
            f"configuration key {key!r} {where} cannot be {_shown(setting, value)}: {_told(error)} ({setting.help})",
            key=key,
            where=where,
        ) from error
    return _expanded(converted)


def _shown(setting: Setting, value: object) -> str:
    """Return a value for an error, but for one that may hold a password."""
    hides = _extra(setting.type, "check") == "bucket" and bool({"@", "?"} & set(str(value)))
    return "what was given" if hides else repr(value)


def _paths(value: object, *, strict: bool) -> Path | tuple[Path, ...]:
    """Return one path, or several: a list in the file, separated by colons where there are only texts."""
    if isinstance(value, str) and not strict:
        value = value.split(os.pathsep)
    if not isinstance(value, (list, tuple)):
        value = [value]
    found = tuple(dict.fromkeys(_path(Path, one) for one in value))
    if not found:
        raise msgspec.ValidationError("Expected a path")
    return found if len(found) > 1 else found[0]


def _lines(value: object) -> tuple[str, ...]:
    """Return texts: a list in the file, separated by semicolons where there is only one text."""
    if isinstance(value, str):
        value = [line for part in value.split(";") if (line := part.strip())]
    if not isinstance(value, (list, tuple)) or not all(isinstance(line, str) for line in value):
        raise msgspec.ValidationError('write a list of texts, as in ["…", "…"]')
    return tuple(value)


def _expanded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_expanded, value))
    return value.expanduser() if isinstance(value, Path) else value


def _size_forms(kind: Any) -> tuple[str, ...] | None:
    forms: tuple[str, ...] | None = _extra(kind, "size")
    return forms


def _extra(kind: Any, name: str) -> Any:
    for meta in get_args(kind):
        if isinstance(meta, Meta) and meta.extra and name in meta.extra:
            return meta.extra[name]
    return None


def _told(error: Exception) -> str:
    """Turn "Expected `int`, got `str`" into what to write instead."""
    text = str(error).replace("`", "")
    if text.startswith(("Invalid enum value", "Expected str matching")):
        return "it is none of these"
    if bound := re.fullmatch(r"Expected (int|float) (>=|<=|>|<) (\S+)", text):
        return f"{_WRITE[bound[1]]} {_BOUNDS[bound[2]]} {bound[3]}"
    expected = re.fullmatch(r"Expected (\w+)(?: \| null)?(, got \w+)?", text)
    return _WRITE.get(expected[1], text) if expected else text


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, (str, Path)) and str(value):
        return Path(value)
    raise msgspec.ValidationError("Expected a path")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint at the right name for a wrong one.

    >>> nearest("modle", ["model", "workers"])
    "did you mean 'model'?"
    """
    names = list(names)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known are " + ", ".join(names)


def _assemble(chosen: Mapping[str, Any]) -> Config:
    def section(cls: type, prefix: str) -> Any:
        hints = get_type_hints(cls)
        return cls(
            **{
                item.name: section(hints[item.name], f"{prefix}{item.name}.")
                if is_dataclass(hints[item.name])
                else chosen[prefix + item.name]
                for item in fields(cls)
            }
        )

    config: Config = section(Config, "")
    if config.cache.kv_events and not config.server.allow_remote and not _is_private(config.cache.kv_events):
        raise ConfigError(
            f"cache.kv_events: {config.cache.kv_events} can be reached by others, who would read every prompt's tokens there; "
            "take 127.0.0.1, or say --allow-remote",
            key="cache.kv_events",
        )
    return config


def _is_private(endpoint: str) -> bool:
    """Whether only this machine's users reach an endpoint."""
    host, port = parse_endpoint(endpoint)
    try:
        return port is None or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
