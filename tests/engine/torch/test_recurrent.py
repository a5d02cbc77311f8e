"""Models with recurrent layers: each request has its own state, wherever its rows stand in a batch and whatever is given up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from held_cache import eventually
from reference import ask, engine_of, loaded, some_tokens, stock, stock_generate, stock_logits

from headstart.engine.exactness import same_tokens
from headstart.engine.torch.attention import Segment, Step
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import ScratchKV
from headstart.engine.torch.model import TorchModel
from headstart.engine.torch.recurrent import Way
from odd_models import RECURRENT

Folders = Callable[..., Path]
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def model(tiny_model_folder: Folders) -> TorchModel:
    kind, config = RECURRENT["qwen3.5, gated delta nets"]
    return loaded(tiny_model_folder(kind, **config))


@pytest.fixture
def engine(model: TorchModel) -> Iterator[TorchEngine]:
    with engine_of(model, chunk_tokens=64) as engine:
        yield engine
        eventually(lambda: engine.load().kv_used_bytes == 0)


class Request:
    """One request's state and KV outside of an engine."""

    def __init__(self, model: TorchModel, tokens: list[int]) -> None:
        self.tokens = tokens
        self.kv = ScratchKV(model.shape, len(tokens), model.device)
        self.first = 0


def forward(model: TorchModel, *parts: tuple[Request, int], before_layer: Callable[[int], None] | None = None) -> torch.Tensor:
    """Compute the next tokens of some requests in one pass; return the logits of all of them."""
    tokens: list[int] = []
    segments = []
    for request, count in parts:
        segments.append(Segment(request.kv, len(tokens), count, request.first))
        tokens += request.tokens[request.first : request.first + count]
    logits = model.forward(tokens, Step(segments, before_layer), rows=range(len(tokens)))
    for request, count in parts:
        request.first += count
    return logits


SLOW = {"bamba, Mamba2", "nemotron-h, Mamba2 and layers without either"}  # much as others are


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.soak) if name in SLOW else name for name in RECURRENT])
def test_requests_at_once_get_what_transformers_generates_for_each(name: str, tiny_model_folder: Folders) -> None:
    kind, config = RECURRENT[name]
    folder = tiny_model_folder(kind, **config)
    reference, model = stock(folder), loaded(folder)
    prompts = [some_tokens(count, seed=count) for count in (1, 65, 150, 64)]
    with engine_of(model, chunk_tokens=64) as engine:
        answers = [ask(engine, prompt, 10) for prompt in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.result().finish == "length", answer.last
            want = stock_generate(reference, prompt, 10)
            assert same_tokens(
                lambda tokens: stock_logits(reference, tokens)[-1], prompt, want, answer.tokens, tolerance=TOLERANCE
            )


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("lfm2, short convolutions", Way.SEGMENTS),
        ("jamba, Mamba whose scan begins with nothing", Way.SCAN),
        ("zamba, Mamba that goes on by single rows", Way.ROWS),
    ],
)
def test_how_mixers_go_on_from_a_state_is_found_by_trying(name: str, way: Way, tiny_model_folder: Folders) -> None:
    kind, config = RECURRENT[name]
    mixers = loaded(tiny_model_folder(kind, **config)).mixers
    assert mixers is not None
    assert mixers.way is way


def test_rows_of_several_requests_in_one_pass_leave_each_its_own_state(model: TorchModel) -> None:
    one, other = some_tokens(40, seed=1), some_tokens(40, seed=2)
    apart = [model.next_logits(one), model.next_logits(other)]
    a, b = Request(model, one), Request(model, other)
    forward(model, (a, 20), (b, 3))
    forward(model, (b, 30), (a, 1))
    forward(model, (a, 18), (b, 6))
    logits = forward(model, (b, 1), (a, 1))
    assert torch.allclose(logits[0], apart[1], atol=TOLERANCE)
    assert torch.allclose(logits[1], apart[0], atol=TOLERANCE)


def test_a_pass_that_is_given_up_leaves_states_as_they_were(model: TorchModel) -> None:
    class GivenUp(Exception):
        pass

    def give_up(layer: int) -> None:
        raise GivenUp

    tokens = some_tokens(50, seed=3)
    request = Request(model, tokens)
    forward(model, (request, 30), before_layer=lambda layer: None)
    before = request.kv.state.bytes.clone()  # type: ignore[union-attr]
    with pytest.raises(GivenUp):
        forward(model, (request, 20), before_layer=give_up)
    assert torch.equal(request.kv.state.bytes, before)  # type: ignore[union-attr]
    logits = forward(model, (request, 20), before_layer=lambda layer: None)
    assert torch.allclose(logits[-1], model.next_logits(tokens), atol=TOLERANCE)


def test_a_first_pass_that_is_given_up_begins_anew(model: TorchModel) -> None:
    def give_up(layer: int) -> None:
        raise KeyboardInterrupt

    request = Request(model, some_tokens(30, seed=4))
    with pytest.raises(KeyboardInterrupt):
        forward(model, (request, 30), before_layer=give_up)
    logits = forward(model, (request, 30))
    assert torch.allclose(logits[-1], model.next_logits(request.tokens), atol=TOLERANCE)


def test_a_state_that_stands_elsewhere_is_not_gone_on_from(model: TorchModel) -> None:
    request = Request(model, some_tokens(30, seed=5))
    forward(model, (request, 10))
    request.first = 12
    with pytest.raises(RuntimeError, match="stands at token 10, and is asked to go on from token 12"):
        forward(model, (request, 1))


def test_a_state_goes_through_bytes_and_back(model: TorchModel) -> None:
    request, other = (Request(model, some_tokens(40, seed=6)) for _ in "ab")
    forward(model, (request, 33), (other, 33))
    assert request.kv.state is not None
    assert other.kv.state is not None
    data = request.kv.state.bytes.clone()
    forward(model, (request, 3))
    request.kv.state.take(data, 33)
    request.first = 33
    assert torch.equal(forward(model, (request, 7)), forward(model, (other, 7)))
    with pytest.raises(ValueError, match="not this model's"):
        other.kv.state.take(data[:-64], 33)


def test_aborts_amid_other_requests_free_everything_and_disturb_nobody(engine: TorchEngine, model: TorchModel) -> None:
    long = [ask(engine, some_tokens(300, seed=seed), 100, id=f"long {seed}") for seed in (1, 2)]
    prompt = some_tokens(70, seed=7)
    answer = ask(engine, prompt, 20)
    long[0].first_token.wait(60)
    engine.abort("long 1")
    engine.abort("long 2")
    assert {one.result().finish for one in long} == {"abort"}
    assert answer.result().finish == "length"
    alone = ask(engine, prompt, 20)
    alone.result()
    assert same_tokens(engine.next_logits, prompt, alone.tokens, answer.tokens, tolerance=TOLERANCE)


def test_a_model_without_any_attention_leaves_no_bytes_of_others_where_its_blocks_are(tiny_model_folder: Folders) -> None:
    kind, config = RECURRENT["mamba2, no attention at all"]
    model = loaded(tiny_model_folder(kind, **config))
    request = Request(model, some_tokens(20))
    request.kv.keys(0).fill_(7.0)
    request.kv.values(0).fill_(7.0)
    forward(model, (request, 20))
    assert not request.kv.keys(0).any()
    assert not request.kv.values(0).any()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.soak) if name in SLOW else name for name in RECURRENT])
def test_a_request_reads_nothing_of_what_another_left_in_its_memory(name: str, tiny_model_folder: Folders) -> None:
    kind, config = RECURRENT[name]
    model = loaded(tiny_model_folder(kind, **config))
    for count in (1, 9):
        clean, dirty = (Request(model, some_tokens(count + 1, vocabulary=model.vocabulary)) for _ in "ab")
        for plane in dirty.kv._planes:
            plane.fill_(float("nan"))
        assert dirty.kv.state is not None
        dirty.kv.state._live.fill_(0xFF)  # NaN in every float
        dirty.kv.state._kept.fill_(0xFF)
        assert torch.equal(forward(model, (clean, count)), forward(model, (dirty, count)))
        assert torch.equal(forward(model, (clean, 1)), forward(model, (dirty, 1)))
