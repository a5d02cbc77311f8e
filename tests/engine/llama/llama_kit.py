"""What tests of the llama engine need to open one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from asking import Answer, eventually
from gguf_fixtures import Kind
from headstart.config import CacheConfig, Config, EngineConfig
from headstart.engine.base import GenerationRequest, Logprobs, Receipt, TokenEvent
from headstart.engine.llama import open_engine, opening
from headstart.engine.llama.engine import LlamaEngine

Made = Callable[[Kind], Path]
_LONG_S = 3600.0  # a long prompt on one core of a machine that has other things to do
WORDS = 250  # of a tiny model's vocabulary, so that prompts hold no special token


def config_of(directory: Path, *, cache: dict[str, Any] | None = None, **engine: Any) -> Config:
    settings = {"directory": directory / "kv", "capacity": "256MiB", "memory": "64MiB", "min_free": "0", **(cache or {})}
    return Config(
        models_directory=directory,
        cache=CacheConfig(**settings),
        engine=EngineConfig(**{"kv_memory": "16MiB", "max_running": 4, "context": 2048, "device": "cpu", **engine}),
    )


def opened(file: Path, directory: Path, *, cache: dict[str, Any] | None = None, **engine: Any) -> LlamaEngine:
    """Computing on one core: threads of a pass wait for one another, for long where tests run beside."""
    with patch.object(opening, "physical_cores", lambda: 1):
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


class Telling(Answer):
    """An answer with the log probabilities of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[Logprobs | None] = []

    def __call__(self, event: TokenEvent) -> None:
        if event.token is not None:
            self.logprobs.append(event.logprobs)
        super().__call__(event)


@dataclass(frozen=True, slots=True)
class Told:
    """An answer of another process."""

    tokens: list[int]
    logprobs: list[Logprobs | None]


def tell(engine: LlamaEngine, prompt: Sequence[int], max_tokens: int = 4, **more: Any) -> Telling:
    """Ask, alone: once nothing is held any more, and until the answer is there."""
    eventually(lambda: engine.load().kv_used_bytes == 0)
    answer = Telling()
    engine.submit(GenerationRequest("told", tuple(prompt), max_tokens, logprobs=20, **more), answer)
    assert answer._ended.wait(_LONG_S), "the request did not end"
    receipt_of(answer)
    return answer


def told_by_one_that_is_killed(file: Path, directory: Path, prompts: Sequence[Sequence[int]], **engine: Any) -> list[Told]:
    """Have another process compute `prompts`, one after the other and none from what is stored, save the first, and end by
    SIGKILL; return the answers."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    child = spawning.Process(target=_tell_and_wait, args=(theirs, file, directory, prompts, engine))
    child.start()
    theirs.close()  # so that the end of a child that fails is seen
    try:
        assert ours.poll(_LONG_S * len(prompts)), "nothing was told"
        told: list[Told] = ours.recv()
        return told
    finally:
        child.kill()
        child.join()
        ours.close()


def _tell_and_wait(
    done: Connection, file: Path, directory: Path, prompts: Sequence[Sequence[int]], settings: dict[str, Any]
) -> None:
    engine = opened(file, directory, **settings)
    answers = [tell(engine, prompt, use_cache=not number) for number, prompt in enumerate(prompts)]
    assert not any(receipt_of(answer).cached_tokens for answer in answers)
    saved(engine)
    done.send([Told(answer.tokens, answer.logprobs) for answer in answers])
    done.recv()  # never: it is killed
