"""Our attention over packed batches gives stock transformers' logits, for every kind of model that is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import KINDS, loaded, some_tokens, stock, stock_logits

from headstart.engine.torch import attention
from headstart.engine.torch.attention import Segment, Step
from headstart.engine.torch.model import ScratchKV
from headstart.errors import ModelError

Folders = Callable[..., Path]


@pytest.fixture(params=list(KINDS))
def folder(request: pytest.FixtureRequest, tiny_model_folder: Folders) -> Path:
    kind, changes = KINDS[request.param]
    return tiny_model_folder(kind, **changes)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_logits_equal_stock_transformers_whatever_the_chunks(folder: Path, implementation: str) -> None:
    model, tokens = loaded(folder), some_tokens(200)
    want = stock_logits(stock(folder, implementation), tokens)
    kv = ScratchKV(model.shape, len(tokens), model.device)
    got, first = [], 0
    for count in (1, 5, 64, 1, 1, 19, 20, 21, 68):  # prefill, decode, below, at and above a window
        step = Step([Segment(kv, 0, count, first)])
        got.append(model.forward(tokens[first : first + count], step, rows=range(count)))
        first += count
    assert first == len(tokens)
    assert (torch.cat(got) - want).abs().max() <= 1e-4


def test_packed_requests_do_not_see_each_other(folder: Path) -> None:
    model = loaded(folder)
    prompts = [some_tokens(count, seed=count) for count in (1, 30, 64, 91)]
    computed = [0, 29, 10, 60]  # fresh, decoding, a long rest, a short rest
    want = [stock_logits(stock(folder), prompt)[-1] for prompt in prompts]
    kvs = [ScratchKV(model.shape, len(prompt), model.device) for prompt in prompts]
    for prompt, first, kv in zip(prompts, computed, kvs, strict=True):
        if first:
            model.forward(prompt[:first], Step([Segment(kv, 0, first, 0)]), rows=[])
    batch: list[int] = []
    segments, rows = [], []
    for prompt, first, kv in zip(prompts, computed, kvs, strict=True):
        segments.append(Segment(kv, len(batch), len(prompt) - first, first))
        batch += prompt[first:]
        rows.append(len(batch) - 1)
    got = model.forward(batch, Step(segments), rows=rows)
    assert (got - torch.stack(want)).abs().max() <= 1e-4


def test_the_masked_path_of_other_devices_gives_the_same_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_FLASH_TYPES", frozenset())
    model, tokens = loaded(folder), some_tokens(90)
    want = stock_logits(stock(folder), tokens)
    kv = ScratchKV(model.shape, len(tokens), model.device)
    got = [
        model.forward(tokens[a:b], Step([Segment(kv, 0, b - a, a)]), rows=range(b - a))
        for a, b in ((0, 50), (50, 89), (89, 90))
    ]
    assert (torch.cat(got) - want).abs().max() <= 1e-4


def test_running_a_step_again_gives_the_same_bytes(folder: Path) -> None:
    model, tokens = loaded(folder), some_tokens(80)
    kv = ScratchKV(model.shape, len(tokens), model.device)
    model.forward(tokens[:50], Step([Segment(kv, 0, 50, 0)]), rows=[])
    again = Step([Segment(kv, 0, 30, 50)])
    first = model.forward(tokens[50:], again, rows=[29])
    keys = kv.keys(1).clone()
    assert torch.equal(model.forward(tokens[50:], again, rows=[29]), first)
    assert torch.equal(kv.keys(1), keys)


def test_a_step_that_is_given_up_midway_leaves_the_model_usable(tiny_model_folder: Folders) -> None:
    model, tokens = loaded(tiny_model_folder("llama")), some_tokens(40)
    kv = ScratchKV(model.shape, len(tokens), model.device)

    def give_up(layer: int) -> None:
        if layer == 1:
            raise LookupError("no such layer yet")

    segments = [Segment(kv, 0, 40, 0)]
    with pytest.raises(LookupError):
        model.forward(tokens, Step(segments, give_up), rows=[39])
    got = model.forward(tokens, Step(segments), rows=[39])
    assert (got[0] - model.next_logits(tokens)).abs().max() <= 1e-5


@pytest.mark.parametrize("keyword", ["softcap", "s_aux", "position_bias"])
def test_keywords_that_would_change_numbers_are_refused(keyword: str) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    q = k = torch.zeros(1, 1, 1, 16)
    with pytest.raises(ModelError, match=keyword):
        attention.attend(module, q, k, k, None, headstart=Step([]), **{keyword: torch.ones(1)})
    attention.attend(module, q, k, k, None, headstart=Step([]), **{keyword: None})
