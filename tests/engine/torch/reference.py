"""Stock transformers as the reference, and what tests of the torch engine need to drive one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from asking import Answer, ask, some_tokens
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import EngineInfo
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.model import TorchModel, load_model
from headstart.engine.torch.stock import StockModel
from model_fixtures import LATENT_KINDS

__all__ = ["Answer", "ask", "some_tokens"]

_IN_TURN = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
_INDEX = {"moe_intermediate_size": 32, "index_topk": 24, "index_n_heads": 16, "index_head_dim": 16}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, a KV head for each query head": ("llama", {"num_key_value_heads": 4}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows in some layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "mistral, a short window": ("mistral", {"sliding_window": 20}),
    "gemma2, capped scores, windows in turn": ("gemma2", {"sliding_window": 20, "attn_logit_softcapping": 5.0}),
    "gemma3, windows in turn": ("gemma3_text", {"sliding_window": 20, "layer_types": _IN_TURN}),
    "gpt-oss, sinks, experts, windows in turn": ("gpt_oss", {"sliding_window": 20, "layer_types": _IN_TURN, **_EXPERTS}),
    "mixtral, experts": ("mixtral", _EXPERTS),
    "qwen2-moe, windows told by the mask alone": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, **_EXPERTS},
    ),
    "qwen3-moe": ("qwen3_moe", _EXPERTS),
    "phi, RoPE on a part": ("phi", {"partial_rotary_factor": 0.5}),
    "olmo2, norms behind": ("olmo2", {}),
    "mimo-v2-flash, values narrower than keys, layers with more heads": (
        "mimo_v2_flash",
        {"v_head_dim": 8, "sliding_window": 20, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "llama4, attention in chunks, queries scaled by position": (
        "llama4_text",
        {
            "attention_chunk_size": 48,
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "moe_layers": [1],
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 16,
            "attn_scale": 0.5,
        },
    ),
    "gemma3n, layers that attend the KV of another": (
        "gemma3n_text",
        {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
            "laurel_rank": 8,
        },
    ),
    "gemma4, wider heads in some layers, and some that attend the KV of another": (
        "gemma4_text",
        {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
        },
    ),
    "deepseek-v3.2, keys chosen by an index": (
        "deepseek_v32",
        {
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            **_ROUTED,
            **_INDEX,
        },
    ),
    "glm-moe-dsa, layers that take the choice of the one before": (
        "glm_moe_dsa",
        {
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
            **_ROUTED,
            **_INDEX,
        },
    ),
    "stablelm, layers that pass nothing on to attention": ("stablelm", {"partial_rotary_factor": 0.5}),
    "nemotron, layers that pass nothing on to attention": ("nemotron", {}),
    **LATENT_KINDS,
}


def stock(folder: Path, implementation: str = "eager") -> Any:
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation=implementation).eval()


@torch.inference_mode()
def stock_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def stock_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens, going on past any stop token."""
    tokens = list(prompt)
    cache = None
    for _ in range(count):
        fresh = tokens if cache is None else tokens[-1:]
        output = model(torch.tensor([fresh]), cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache
        tokens.append(int(output.logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def stock_generate(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' own `generate` gives, going on past any stop token."""
    model.generation_config.eos_token_id = None
    tokens = model.generate(torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False, pad_token_id=2)
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


def loaded(folder: Path) -> TorchModel:
    """The model, which must be served through our attention."""
    model = load_model(folder, device="cpu", dtype="float32", on_progress=lambda *_: None)
    assert isinstance(model, TorchModel), model.why
    return model


def engine_of(
    model: TorchModel | StockModel,
    *,
    context: int = 512,
    full_contexts: float = 3,
    cache: PrefixCache | None = None,
    memory: KVMemory | None = None,
    hedge_after_s: float = 60.0,
    **settings: Any,
) -> TorchEngine:
    """Loads are waited for however long they are held, unless a test says otherwise."""
    info = EngineInfo(
        model="tiny",
        context_tokens=context,
        vocabulary=model.vocabulary,
        device="cpu",
        dtype="float32",
        layers=model.layers,
        kv_bytes_per_token=model.shape.token_bytes,
        cache="",
    )
    memory = memory or KVMemory(model.shape, int(full_contexts * model.shape.region_bytes(context)), context_tokens=context)
    return TorchEngine(model, memory, info=info, cache=cache, hedge_after_s=hedge_after_s, **settings)


class _NoThread:
    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool:
        return False


@contextmanager
def stepped(model: TorchModel, **settings: Any) -> Iterator[TorchEngine]:
    """An engine without a thread of its own: the test says `engine._round()`, which takes in what is new and runs a step."""
    with patch("headstart.engine.serving.door.Thread", _NoThread):
        engine = engine_of(model, **settings)
    try:
        yield engine
    finally:
        engine._roster.closing = True
        engine._serve()
        engine.close()


def finish(engine: TorchEngine, *answers: Answer, rounds: int = 5000) -> None:
    """Run steps until all of them have ended."""
    for _ in range(rounds):
        if all(answer.last is not None for answer in answers):
            return
        if not engine._round():
            engine._roster.wake.wait(0.005)  # for a save or load that goes on behind
            engine._roster.wake.clear()
    raise AssertionError("requests did not end")


def running(engine: TorchEngine) -> list[str]:
    return [sequence.request.id for sequence in engine._roster.running]
