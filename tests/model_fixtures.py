"""Models for tests, as folders that `headstart.engine` and `headstart.render` read like any other.

`smollm2_folder`: the real demo model, made once in the repository's ignored `models/` folder; mark its tests `real_model`.
`tiny_model_folder(kind, **config)`: a random model of some 100,000 weights, equal in every run, with a ChatML template and
a byte-level tokenizer (of fewer words than the embedding has rows, as real models have). A session builds each (kind, config)
once; leave the folder unchanged, copy it to spoil it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = Path(__file__).parent.parent / "models"

CHATML = (
    "{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% if loop.first and tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = (
    "The cache keeps what was computed once and reads it back while the model already runs.",
    "A prefix is found by its tokens, block after block, and never by its name.",
    "def match(tokens): return [key for key in chain(tokens) if key in index]",
    "Größe, naïve café, 日本語の文章, Привет мир, 😀 👩‍👩‍👧 🎉, ∀x ∈ ℝ.",
)

_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,  # wide enough that greedy tokens depend on the whole prompt
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4}
_ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}

# Latent attention: of a token, 512 + 64 numbers are kept in models that people run, and here 32 + 8.
LATENT_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2, YaRN, experts behind a dense layer": (
        "deepseek_v2",
        {**_LATENT, **_ROUTED, "q_lora_rank": None, "v_head_dim": 16, "first_k_dense_replace": 1, "rope_parameters": _YARN},
    ),
    "deepseek-v2, queries of low rank, biases": (
        "deepseek_v2",
        {**_LATENT, **_ROUTED, "q_lora_rank": 24, "v_head_dim": 8, "first_k_dense_replace": 3, "attention_bias": True},
    ),
    "deepseek-v3, queries of low rank, YaRN, grouped experts": (
        "deepseek_v3",
        {
            **_LATENT,
            **_ROUTED,
            "q_lora_rank": 24,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
            "rope_parameters": _YARN,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek-v3, RoPE in halves": (
        "deepseek_v3",
        {
            **_LATENT,
            **_ROUTED,
            "q_lora_rank": None,
            "v_head_dim": 16,
            "first_k_dense_replace": 3,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
        },
    ),
    "glm4-moe-lite, values wider than keys": (
        "glm4_moe_lite",
        {**_LATENT, **_ROUTED, "q_lora_rank": 24, "v_head_dim": 32},
    ),
    "longcat-flash, two attentions a layer": (
        "longcat_flash",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "v_head_dim": 16,
            "num_layers": 2,
            "ffn_hidden_size": 64,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 32,
        },
    ),
}


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    from headstart.engine.models import resolve_model

    return resolve_model("smollm2-135m", MODELS, on_progress=lambda stage, fraction: None).path


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    built: dict[str, Path] = {}

    def folder(kind: str = "llama", **config: Any) -> Path:
        name = json.dumps([kind, config], sort_keys=True)
        if name not in built:
            built[name] = build_tiny_model(tmp_path_factory.mktemp(kind), kind, **config)
        return built[name]

    return folder


def build_tiny_model(folder: Path, kind: str, **config: Any) -> Path:
    """Save a random model of `kind` (llama, qwen2, qwen3, mistral) in `folder`; `config` overrides its configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, about themselves
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2024)
            extra = {"sliding_window": None} if kind == "mistral" else {}
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**_TINY, **extra, **config}))
            with torch.no_grad():  # biases and norms of a fresh model are 0 and 1, which hides mistakes with them
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
        model.float().save_pretrained(folder)
    return save_tiny_tokenizer(folder)


def save_tiny_tokenizer(folder: Path) -> Path:
    """Save a byte-level tokenizer on the spot, with its chat template; needs no torch."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_TINY["vocab_size"],
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder
