"""A model with layers that see only a window, of which vLLM keeps two groups of pages, under the real vLLM."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.vllm_server import connector, serving
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

_dice = random.Random(3)
PROMPT = [_dice.randrange(5, 500) for _ in range(900)]
STORED = 896


@pytest.fixture
def windowed(tiny_model_folder: Any, tmp_path: Path) -> Path:
    """A random Gemma 3: five layers with a window of 256 tokens, then one without."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        sliding_window=256,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        initializer_range=0.2,
    )
    folder = tmp_path / "model"
    Gemma3ForCausalLM(config).float().save_pretrained(folder)
    for file in tiny_model_folder("llama").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_after_a_restart_both_groups_are_restored_and_the_answer_is_the_same(windowed: Path, tmp_path: Path) -> None:
    with serving(windowed, log=tmp_path / "cold", transfer=connector(tmp_path / "kv")) as server:
        computed = server.ask(PROMPT)
        server.wait_for("headstart_saves", 2)  # with every chunk: what slides out of the window is gone at the prompt's end
    with serving(windowed, log=tmp_path / "hit", transfer=connector(tmp_path / "kv")) as server:
        found = server.ask(PROMPT)
        assert server.metric("headstart_loaded_tokens") == STORED, server.tail()
    assert found.tokens == computed.tokens
    assert found.logprobs == pytest.approx(computed.logprobs, abs=1e-3)
