"""Configuration: one TOML file, every key also an environment variable and a flag. The only place that reads the environment.

    [cache]                      HEADSTART_CACHE_DIRECTORY=/mnt/kv     --cache-directory /mnt/kv
    directory = "/mnt/kv"

Later wins: defaults, file, environment, flags. Unknown keys are refused with the nearest right name. Sizes are written
"20GiB", "500MB" or a number of bytes; a capacity may also be "10%" of the file system.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class CacheConfig:
    enabled: bool = True
    directory: Path = Path("~/.cache/headstart/kv")
    capacity: str = "10%"  # of the file system, or a size
    memory: str = "2GiB"  # the memory tier; "0" turns it off
    durability: Literal["none", "data"] = "none"
    load_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    device: str = "auto"  # auto | cpu | cuda | mps
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    kv_memory: str = "auto"  # bytes for KV of running requests
    max_running: int = 8
    prefill_chunk: int = 1024  # tokens
    context: int | None = None  # limit below the model's own


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    max_waiting: int = 256


@dataclass(frozen=True, slots=True)
class Config:
    model: str = "smollm2-135m"
    models_directory: Path = Path("~/.cache/headstart/models")
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def load_config(file: Path | None = None, *, overrides: dict[str, object] | None = None) -> Config:
    """Return the configuration from defaults, `file` (or $HEADSTART_CONFIG), HEADSTART_* and `overrides` ("cache.memory": "1GiB").

    Raises ConfigError naming the key, where it was set and the nearest right name."""
    raise NotImplementedError


def parse_size(text: str, *, of_bytes: int | None = None) -> int:
    """Return bytes for "20GiB", "500MB", "4096" or, with `of_bytes`, "10%". Raises ConfigError."""
    raise NotImplementedError
