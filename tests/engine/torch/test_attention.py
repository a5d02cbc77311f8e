"""Our attention over packed batches gives stock transformers' logits, for every kind of model that is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import KINDS, loaded, some_tokens, stock, stock_logits

from headstart.engine.torch import attention
from headstart.engine.torch.attention import Prefix, Segment, Step
from headstart.engine.torch.kv_memory import ScratchKV
from headstart.errors import ModelError

Folders = Callable[..., Path]


@pytest.fixture(params=["C", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend by the C kernel, and without it."""
    if request.param == "torch":
        monkeypatch.setattr(attention, "kernel", lambda: None)
    elif attention.kernel() is None:
        pytest.skip("headstart was installed without its C kernel")


@pytest.fixture(params=list(KINDS))
def folder(request: pytest.FixtureRequest, tiny_model_folder: Folders) -> Path:
    kind, changes = KINDS[request.param]
    return tiny_model_folder(kind, **changes)


@pytest.mark.usefixtures("way")
def test_logits_equal_stock_transformers_whatever_the_chunks(folder: Path) -> None:
    _chunks_equal_stock(folder, "eager")


@pytest.mark.parametrize("kind", ["llama", "mistral, a short window"])
def test_stock_transformers_other_attention_gives_them_too(tiny_model_folder: Folders, kind: str) -> None:
    name, changes = KINDS[kind]
    _chunks_equal_stock(tiny_model_folder(name, **changes), "sdpa")


def _chunks_equal_stock(folder: Path, implementation: str) -> None:
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


@pytest.mark.usefixtures("way")
def test_requests_that_share_a_prefix_attend_it_as_if_it_were_their_own(folder: Path) -> None:
    model = loaded(folder)
    beginning = some_tokens(64)
    shared = ScratchKV(model.shape, 64, model.device)
    model.forward(beginning, Step([Segment(shared, 0, 64, 0)]), rows=[])
    prefix = Prefix(shared, 64)
    batch: list[int] = []
    segments, want = [], []
    # Decoding right behind the prefix, prefill there, a rest of 10, decoding far behind it; one beside them with KV of its own.
    for at, (computed, count) in enumerate([(64, 1), (64, 30), (80, 10), (0, 40), (100, 1)]):
        base = 64 if computed else 0
        prompt = [*beginning[:base], *some_tokens(computed + count - base, seed=at)]
        kv = ScratchKV(model.shape, computed + count - base, model.device)
        if computed > base:
            model.forward(prompt[base:computed], Step([Segment(kv, 0, computed - base, base, prefix)]), rows=[])
        segments.append(Segment(kv, len(batch), count, computed, prefix if base else None))
        batch += prompt[computed:]
        want.append(stock_logits(stock(folder), prompt)[computed:])
    before = shared.keys(0).clone()
    got = model.forward(batch, Step(segments), rows=range(len(batch)))
    assert (got - torch.cat(want)).abs().max() <= 1e-4
    last = [segment.start + segment.count - 1 for segment in segments]
    assert (model.forward(batch, Step(segments), rows=last) - torch.cat(want)[last]).abs().max() <= 1e-4
    assert torch.equal(shared.keys(0), before)


@pytest.mark.usefixtures("way")
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
    monkeypatch.setattr(attention, "kernel", lambda: None)
    monkeypatch.setattr(attention, "_FLASH_TYPES", frozenset())
    model, tokens = loaded(folder), some_tokens(90)
    want = stock_logits(stock(folder), tokens)
    kv = ScratchKV(model.shape, len(tokens), model.device)
    got = [
        model.forward(tokens[a:b], Step([Segment(kv, 0, b - a, a)]), rows=range(b - a))
        for a, b in ((0, 50), (50, 89), (89, 90))
    ]
    assert (torch.cat(got) - want).abs().max() <= 1e-4


@pytest.mark.usefixtures("way")
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


@pytest.mark.parametrize("keyword", ["position_bias", "block_table"])
def test_keywords_that_would_change_numbers_are_refused(keyword: str) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    q = k = torch.zeros(1, 1, 1, 16)
    with pytest.raises(ModelError, match=keyword):
        attention.attend(module, q, k, k, None, headstart=Step([]), **{keyword: torch.ones(1)})
    attention.attend(module, q, k, k, None, headstart=Step([]), **{keyword: None})


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("count", [511, 1024, 4099])
def test_long_runs_of_keys_that_threads_share_give_the_same(rows: int, count: int) -> None:
    q, k, v = (torch.randn(heads, length, 16) for heads, length in ((4, rows), (2, count), (2, count)))
    part = attention._unmasked(q[None], k, v, 0.25)
    scores = torch.einsum("hgrd,hnd->hgrn", q.view(2, 2, rows, 16), k).double() / 4
    assert (part.lse.view(2, 2, rows) - scores.logsumexp(-1)).abs().max() <= 1e-5
    want = torch.einsum("hgrn,hnd->hgrd", scores.softmax(-1), v.double())
    assert (part.out.view(2, 2, rows, 16) - want).abs().max() <= 1e-5


def test_a_model_that_makes_a_mask_of_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match="causal mask by a function of its own"):
        attention._sight(use_vmap=True)
