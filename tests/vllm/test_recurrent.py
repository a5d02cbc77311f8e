"""A model with recurrent layers, whose states vLLM keeps at the edges of blocks, under the real vLLM."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.vllm_server import connector, serving
from transformers import Lfm2Config, Lfm2ForCausalLM

_dice = random.Random(3)
PROMPT = [_dice.randrange(5, 500) for _ in range(900)]
OTHER = PROMPT[:700] + [_dice.randrange(5, 500) for _ in range(100)]


@pytest.fixture
def recurrent(tiny_model_folder: Any, tmp_path: Path) -> Path:
    """A random LFM2: three layers of short convolutions and one with attention."""
    torch.manual_seed(1)
    config = Lfm2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        layer_types=["conv", "full_attention", "conv", "conv"],
        block_dim=256,  # these two are said by checkpoints, and read by vLLM alone
        conv_dim=256,
        block_multiple_of=16,
        initializer_range=0.2,
    )
    folder = tmp_path / "model"
    Lfm2ForCausalLM(config).float().save_pretrained(folder)
    for file in tiny_model_folder("llama").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_after_a_restart_states_and_kv_are_restored_and_the_answers_are_the_same(recurrent: Path, tmp_path: Path) -> None:
    transfer = connector(tmp_path / "kv", **{"cache.save_every": 512})
    with serving(recurrent, log=tmp_path / "cold", transfer=transfer) as server:
        computed = server.ask(PROMPT, tokens=150)  # which comes by 1,024
        next_turn, parting = server.ask([*PROMPT, *computed.tokens, 7]), server.ask(OTHER)
        server.wait_for("headstart_saves", 4)
        assert server.metric("headstart_saves_dropped") == 0, server.tail()
    with serving(recurrent, log=tmp_path / "hit", transfer=transfer) as server:
        found = server.ask(PROMPT, tokens=150)
        assert server.metric("headstart_loaded_tokens") == 896, server.tail()
        server.forget()
        assert server.ask([*PROMPT, *computed.tokens, 7]).tokens == next_turn.tokens
        assert server.metric("headstart_loaded_tokens") == 896 + 1024
        server.forget()
        assert server.ask(OTHER).tokens == parting.tokens
        assert server.metric("headstart_loaded_tokens") == 896 + 1024 + 768
        assert server.metric("headstart_loads_failed") == 0
    assert found.tokens == computed.tokens
    assert found.logprobs == pytest.approx(computed.logprobs, abs=1e-3)
