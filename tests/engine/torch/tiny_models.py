"""Tiny random models of each kind that the torch engine serves, in float32, and stock transformers as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 211

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # far apart logits: a wrong number shows
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"kind": "LlamaConfig"},
    "llama-mha": {"kind": "LlamaConfig", "num_key_value_heads": 6},
    "llama-mqa": {"kind": "LlamaConfig", "num_key_value_heads": 1},
    "qwen2": {"kind": "Qwen2Config"},
    "qwen2-windows": {"kind": "Qwen2Config", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {"kind": "Qwen3Config"},
    "mistral": {"kind": "MistralConfig", "sliding_window": None},
    "mistral-window": {"kind": "MistralConfig", "sliding_window": 20},
}


def make_folder(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a random model of `kind` into `folder`; the same seed each time."""
    import transformers

    settings = {**_COMMON, **KINDS[kind], **changes}
    config = getattr(transformers, settings.pop("kind"))(**settings)
    torch.manual_seed(5)
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def stock(folder: Path, implementation: str = "sdpa") -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=implementation
    ).eval()


@torch.inference_mode()
def stock_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def stock_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    tokens = model.generate(
        torch.tensor([list(prompt)]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return [int(token) for token in tokens[0, len(prompt) :]]
