"""What a model can do is known when it is opened: it is cached, or runs without and says why, or is refused in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headstart.config import CacheConfig, Config, EngineConfig
from headstart.engine.base import GenerationRequest, TokenEvent
from headstart.engine.torch import open_engine
from headstart.engine.torch.engine import TorchEngine
from headstart.errors import ModelError
from model_fixtures import LATENT_KINDS
from odd_models import AS_THEY_ARE, RECURRENT

Folders = Callable[..., Path]

CACHED: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("llama", {}),
    "windows": ("mistral", {"sliding_window": 20}),
    "latent attention": LATENT_KINDS["deepseek-v3, queries of low rank, YaRN, grouped experts"],
    "recurrent layers": RECURRENT["lfm2, short convolutions"],
}


@contextmanager
def opened(folder: Path, directory: Path) -> Iterator[TorchEngine]:
    cache = CacheConfig(directory=directory / "kv", capacity="64MiB", memory="16MiB")
    config = Config(models_directory=directory, cache=cache, engine=EngineConfig(device="cpu", context=512, kv_memory="32MiB"))
    with open_engine(folder, config, on_progress=lambda *_: None) as engine:
        yield engine


def cached_tokens(engine: TorchEngine) -> int:
    """Of a prompt of 200 tokens, once what was asked before is saved."""
    events: list[TokenEvent] = []
    ended = Event()

    def take(event: TokenEvent) -> None:
        events.append(event)
        if event.finish is not None:
            ended.set()

    engine.submit(GenerationRequest("one", tuple(range(100, 300)), 3), take)
    assert ended.wait(60)
    assert events[-1].finish == "length", events[-1].error
    assert events[-1].receipt is not None
    return events[-1].receipt.cached_tokens


@pytest.mark.parametrize("name", CACHED)
def test_what_can_be_cached_is(name: str, tiny_model_folder: Folders, tmp_path: Path) -> None:
    kind, changes = CACHED[name]
    with opened(tiny_model_folder(kind, **changes), tmp_path) as engine:
        assert engine.info.cache.startswith("prefixes are kept")
        assert cached_tokens(engine) == 0
    with opened(tiny_model_folder(kind, **changes), tmp_path) as engine:  # closing has ended the saves
        assert cached_tokens(engine) == 192


def test_what_cannot_be_cached_runs_without_and_says_why(tiny_model_folder: Folders, tmp_path: Path) -> None:
    kind, changes, said, _ = AS_THEY_ARE["bloom, ALiBi"]
    with opened(tiny_model_folder(kind, **changes), tmp_path) as engine:
        assert engine.cache is None
        assert engine.info.cache.startswith("off for this model, because")
        assert said in engine.info.cache
        assert cached_tokens(engine) == cached_tokens(engine) == 0


def test_what_attends_across_two_texts_is_refused_in_a_sentence(tiny_model_folder: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(ModelError, match="an encoder-decoder; use a decoder"), opened(folder, tmp_path):
        pass
