"""What tests of the llama engine need to open one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asking import Answer, eventually
from headstart.config import CacheConfig, Config, EngineConfig
from headstart.engine.base import Receipt
from headstart.engine.llama import open_engine
from headstart.engine.llama.engine import LlamaEngine

WORDS = 250  # of a tiny model's vocabulary, so that prompts hold no special token


def config_of(directory: Path, *, cache: dict[str, Any] | None = None, **engine: Any) -> Config:
    settings = {"directory": directory / "kv", "capacity": "256MiB", "memory": "64MiB", "min_free": "0", **(cache or {})}
    return Config(
        models_directory=directory,
        cache=CacheConfig(**settings),
        engine=EngineConfig(**{"kv_memory": "16MiB", "max_running": 4, "context": 2048, "device": "cpu", **engine}),
    )


def opened(file: Path, directory: Path, *, cache: dict[str, Any] | None = None, **engine: Any) -> LlamaEngine:
    return open_engine(file, config_of(directory, cache=cache, **engine), on_progress=lambda *_: None)


def receipt_of(answer: Answer) -> Receipt:
    last = answer.result()
    assert last.error is None, last.error
    assert last.receipt is not None
    return last.receipt


def saved(engine: LlamaEngine) -> None:
    """Return once nothing is being saved any more."""
    assert engine.cache is not None
    cache = engine.cache

    def done() -> bool:
        counters = cache.statistics().counters
        return counters.get("save_calls", 0) == counters.get("saves_done", 0)

    eventually(done)
