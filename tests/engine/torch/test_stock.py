"""Models that are run as they are: the same tokens as transformers' own, for many requests at once, and a reason told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from held_cache import eventually
from reference import ask, engine_of, some_tokens, stock, stock_generate

from headstart.config import CacheConfig, Config, EngineConfig
from headstart.engine.torch import open_engine
from headstart.engine.torch.attention import Segment, Step
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import ScratchKV
from headstart.engine.torch.model import load_model
from headstart.engine.torch.stock import StockModel
from headstart.errors import ModelError
from odd_models import AS_THEY_ARE

Folders = Callable[..., Path]


def loaded(folder: Path) -> StockModel:
    model = load_model(folder, device="cpu", dtype="float32", on_progress=lambda *_: None)
    assert isinstance(model, StockModel)
    return model


@pytest.fixture(scope="module")
def model(tiny_model_folder: Folders) -> StockModel:
    return loaded(tiny_model_folder("bloom"))


@pytest.fixture
def engine(model: StockModel) -> Iterator[TorchEngine]:
    with engine_of(model, chunk_tokens=64) as engine:
        yield engine
        eventually(lambda: engine.load().kv_used_bytes == 0)


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_requests_at_once_get_what_transformers_generates_for_each(name: str, tiny_model_folder: Folders) -> None:
    kind, config, said, way = AS_THEY_ARE[name]
    folder = tiny_model_folder(kind, **config)
    model = loaded(folder)
    assert said in model.why
    assert model.way.name == way
    prompts = [some_tokens(count, seed=count) for count in (1, 40, 130, 90)]
    with engine_of(model, chunk_tokens=64) as engine:
        answers = [ask(engine, prompt, 8) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result().finish == "length", answer.last
            assert answer.tokens == stock_generate(stock(folder), prompt, 8)  # a fresh model: it may remember lengths


def test_aborts_free_what_a_request_keeps(engine: TorchEngine) -> None:
    answers = [ask(engine, some_tokens(200, seed=seed), 200, id=str(seed)) for seed in range(3)]
    answers[0].first_token.wait(60)
    for seed in range(3):
        engine.abort(str(seed))
    assert {answer.result().finish for answer in answers} == {"abort"}


def test_the_floor_is_measured_from_the_same_place_each_round(engine: TorchEngine) -> None:
    assert len(engine.measure_floor(some_tokens(100), 80, rounds=3)) == 3


def test_memory_is_counted_by_what_a_request_keeps(model: StockModel, engine: TorchEngine) -> None:
    # bloom: 3 layers, keys and values of 64 numbers in 4 bytes each
    assert model.shape.token_bytes == 3 * 2 * 64 * 4
    assert model.shape.region_bytes(100) == 100 * model.shape.token_bytes


def test_a_request_goes_on_only_from_where_it_stands(model: StockModel) -> None:
    kv = ScratchKV(model.shape, 30, model.device)
    tokens = some_tokens(30)
    model.forward(tokens[:10], Step([Segment(kv, 0, 10, 0)]), rows=[9])
    with pytest.raises(RuntimeError, match="where it does not stand"):
        model.forward(tokens[12:13], Step([Segment(kv, 0, 1, 12)]), rows=[0])


def test_what_sees_later_tokens_is_refused(tiny_model_folder: Folders) -> None:
    with pytest.raises(ModelError, match="depend on later tokens"):
        loaded(tiny_model_folder("bert"))


def test_an_engine_says_in_one_sentence_why_nothing_is_cached(tiny_model_folder: Folders, tmp_path: Path) -> None:
    config = Config(
        models_directory=tmp_path,
        cache=CacheConfig(directory=tmp_path / "kv", capacity="64MiB"),
        engine=EngineConfig(device="cpu", context=256, kv_memory="16MiB"),
    )
    kind, changes, said, _ = AS_THEY_ARE["llama, dynamic RoPE"]
    with open_engine(tiny_model_folder(kind, **changes), config, on_progress=lambda *_: None) as engine:
        assert engine.cache is None
        assert engine.info.cache.startswith("off for this model, because ")
        assert said in engine.info.cache
        assert ask(engine, some_tokens(100), 3).result().finish == "length"
