"""Latent attention: both forms give stock transformers' logits, what is kept is the latent alone, and the engine serves it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import ask, engine_of, loaded, some_tokens, stock, stock_greedy, stock_logits

from headstart.block.identity import Identity
from headstart.cache import PrefixCache
from headstart.engine.exactness import same_tokens
from headstart.engine.torch import mla
from headstart.engine.torch.attention import Prefix, Segment, Step
from headstart.engine.torch.kv_memory import ScratchKV
from headstart.engine.torch.packing import PackedLinear
from headstart.errors import ModelError
from headstart.tier.disk import DiskTier
from model_fixtures import LATENT_KINDS

Folders = Callable[..., Path]


@pytest.fixture(params=list(LATENT_KINDS))
def folder(request: pytest.FixtureRequest, tiny_model_folder: Folders) -> Path:
    kind, changes = LATENT_KINDS[request.param]
    return tiny_model_folder(kind, **changes)


def test_one_latent_a_token_and_layer_is_kept_and_nothing_of_any_head(folder: Path) -> None:
    model = loaded(folder)
    text = model.config
    assert [(layer.strips, layer.width) for layer in model.shape.layers] == [(1, 32 + 8)] * text.num_hidden_layers
    representation = model.shape.representation(query_heads=model.heads)
    assert (representation.kind, representation.shard) == ("mla", "replicated")
    assert representation.layer_bytes == (64 * (32 + 8) * 4,) * text.num_hidden_layers


@pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("at_once", [64, 1 << 20])  # tokens whose keys and values are made together
def test_either_form_gives_the_logits_of_stock_transformers(
    folder: Path, absorbed: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(folder)
    monkeypatch.setattr(mla, "absorbs", lambda *_, **__: absorbed)
    heads = next(module for module in model.module.modules() if isinstance(module, mla.Heads))
    shape = heads.shape
    monkeypatch.setattr(mla, "_EXPANDED_BYTES", at_once * 4 * heads.heads * (shape.nope + shape.rope + shape.value))
    beginning = some_tokens(128)
    shared = ScratchKV(model.shape, 128, model.device)
    model.forward(beginning, Step([Segment(shared, 0, 128, 0)]), rows=[])
    prefix = Prefix(shared, 128)
    # Beside the requests that share: one with KV of its own, whose new tokens are more than are expanded at once.
    kvs = [ScratchKV(model.shape, 200, model.device) for _ in range(3)]
    prompts = [[*beginning, *some_tokens(100, seed=1)], [*beginning, *some_tokens(3, seed=2)], some_tokens(190, seed=3)]
    model.forward(prompts[0][128:210], Step([Segment(kvs[0], 0, 82, 128, prefix)]), rows=[])
    model.forward(prompts[2][:50], Step([Segment(kvs[2], 0, 50, 0)]), rows=[])
    segments = [Segment(kvs[0], 0, 18, 210, prefix), Segment(kvs[1], 18, 3, 128, prefix), Segment(kvs[2], 21, 140, 50)]
    batch = [*prompts[0][210:], *prompts[1][128:], *prompts[2][50:]]
    want = [stock_logits(stock(folder), prompt)[-one.count :] for prompt, one in zip(prompts, segments, strict=True)]
    assert (model.forward(batch, Step(segments), rows=range(len(batch))) - torch.cat(want)).abs().max() <= 1e-4


def test_both_forms_are_used_and_in_one_step(tiny_model_folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, changes = LATENT_KINDS["deepseek-v3, RoPE in halves"]
    model = loaded(tiny_model_folder(kind, **changes))
    used: list[str] = []
    for name in ("_absorbed", "_expanded"):
        stock_form = getattr(mla.Heads, name)
        monkeypatch.setattr(mla.Heads, name, lambda *given, form=stock_form, name=name: (used.append(name), form(*given))[1])
    old = ScratchKV(model.shape, 101, model.device)
    model.forward(some_tokens(100), Step([Segment(old, 0, 100, 0)]), rows=[])
    assert set(used) == {"_expanded"}
    used.clear()
    fresh = ScratchKV(model.shape, 100, model.device)
    model.forward(some_tokens(101), Step([Segment(fresh, 0, 100, 0), Segment(old, 100, 1, 100)]), rows=range(101))
    assert used == ["_expanded", "_absorbed"] * 3


def test_the_projection_from_the_latent_is_not_packed_and_not_held_twice(tiny_model_folder: Folders) -> None:
    kind, changes = LATENT_KINDS["deepseek-v3, RoPE in halves"]
    model = loaded(tiny_model_folder(kind, **changes))
    layer = model.module.model.layers[0].self_attn
    assert isinstance(layer.o_proj, PackedLinear)
    assert isinstance(layer.kv_b_proj, mla.Heads)
    names = [name for name, _ in model.module.named_parameters(remove_duplicate=False) if "layers.0.self_attn.kv_b" in name]
    assert names == ["model.layers.0.self_attn.kv_b_proj.weight"]


def test_stock_attention_goes_on_working(folder: Path) -> None:
    module = stock(folder)
    tokens = some_tokens(40)
    want = stock_logits(module, tokens)
    assert mla.attach(module)
    assert torch.equal(stock_logits(module, tokens), want)


def test_an_index_that_is_not_as_we_know_it_is_refused(tiny_model_folder: Folders) -> None:
    kind, changes = LATENT_KINDS["deepseek-v3, RoPE in halves"]
    module = stock(tiny_model_folder(kind, **changes))
    module.model.layers[1].self_attn.indexer = torch.nn.Identity()
    with pytest.raises(ModelError, match="index of its own"):
        mla.attach(module)


def test_a_projection_that_is_not_as_we_know_it_has_its_keys_and_values_kept(tiny_model_folder: Folders) -> None:
    kind, changes = LATENT_KINDS["deepseek-v3, RoPE in halves"]
    module = stock(tiny_model_folder(kind, **changes))
    for layer in module.model.layers:
        plain = layer.self_attn.kv_b_proj
        with_bias = torch.nn.Linear(plain.in_features, plain.out_features)
        layer.self_attn.kv_b_proj = with_bias.requires_grad_(False)
    from headstart.engine.torch.attention import register
    from headstart.engine.torch.model import TorchModel, probe

    register()
    want = stock_logits(copy.deepcopy(module), some_tokens(50))[-1]
    model = TorchModel(module, name="odd")
    probe(model)
    assert {(layer.strips, layer.width, layer.key_width) for layer in model.shape.layers} == {(4, 24 + 16, 24)}
    assert (model.next_logits(some_tokens(50), chunk_tokens=20) - want).abs().max() <= 1e-4


def test_a_model_with_recurrent_layers_beside_latent_attention_keeps_a_state_and_latents(tiny_model_folder: Folders) -> None:
    _, latent = LATENT_KINDS["deepseek-v2, YaRN, experts behind a dense layer"]
    changes: dict[str, Any] = {
        **latent,
        "rope_parameters": None,
        "num_hidden_layers": 3,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    folder = tiny_model_folder("kimi_linear", **changes)
    model, tokens = loaded(folder), some_tokens(90)
    assert [(layer.number, layer.strips, layer.width) for layer in model.shape.layers] == [(1, 1, 32 + 8)]
    assert model.shape.representation(query_heads=model.heads).state == "required"
    assert (model.next_logits(tokens, chunk_tokens=40) - stock_logits(stock(folder), tokens)[-1]).abs().max() <= 1e-4


def test_requests_get_the_tokens_of_stock_transformers(folder: Path) -> None:
    model, module = loaded(folder), stock(folder)
    beginning = some_tokens(130)
    prompts = [beginning, [*beginning[:100], *some_tokens(30, seed=2)], [*beginning, *some_tokens(40, seed=3)], some_tokens(5)]
    with engine_of(model, chunk_tokens=64, cache=None) as engine:
        answers = [ask(engine, prompt, 12) for prompt in prompts]
        for answer, prompt in zip(answers, prompts, strict=True):
            assert answer.result().finish == "length"
            want = stock_greedy(module, prompt, 12)
            assert same_tokens(lambda tokens: stock_logits(module, tokens)[-1], prompt, want, answer.tokens, tolerance=1e-4)


def test_the_disk_holds_576_numbers_a_token_and_layer_and_little_beside(tiny_model_folder: Folders, tmp_path: Path) -> None:
    kind, changes = LATENT_KINDS["deepseek-v3, RoPE in halves"]
    as_published = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "num_hidden_layers": 2}
    model = loaded(tiny_model_folder(kind, **{**changes, **as_published}))
    representation = model.shape.representation(query_heads=model.heads)
    identity = Identity(weights=b"w" * 32, architecture=b"{}")
    tier = DiskTier.open(tmp_path, capacity_bytes=256 << 20)
    cache = PrefixCache([tier], identity=identity, representation=representation)
    with engine_of(model, context=2048, cache=cache) as engine:
        ask(engine, some_tokens(1 + 16 * 64), 1).result()
    tier = DiskTier.open(tmp_path, capacity_bytes=256 << 20)
    try:
        (extent,) = tier.scan()
        assert (extent.representation, extent.blocks) == (representation.digest, 16)
        numbers = 576 * 4 * 2 * (16 * 64)
        assert extent.extent_bytes == extent.header_bytes + numbers
        assert tier.statistics().live_bytes <= 1.02 * numbers
        allocated = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
        assert numbers <= allocated <= 1.02 * numbers
    finally:
        tier.close()
