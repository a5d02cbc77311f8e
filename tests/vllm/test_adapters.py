"""LoRA adapters under the real vLLM: each by its content, never another's blocks nor the model's own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from benchmarks.vllm_server import connector, serving
from safetensors.torch import save_file

_dice = random.Random(8)
PROMPT = [_dice.randrange(5, 500) for _ in range(300)]
STORED = 256
RANK, WIDTH, HEADS = 8, 256, 4  # of the tiny model


def adapter(folder: Path, *, seed: int) -> Path:
    """Write an adapter in peft's format, large enough that the answers are others."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for name, width in (("q_proj", WIDTH), ("v_proj", WIDTH // 2)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, WIDTH, generator=draw) * 0.2
            tensors[f"{at}.lora_B.weight"] = torch.randn(width, RANK, generator=draw) * 0.2
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def test_an_adapter_s_blocks_are_found_by_its_content_and_by_nothing_else(tiny_model_folder: Any, tmp_path: Path) -> None:
    model: Path = tiny_model_folder("llama", hidden_size=WIDTH, head_dim=WIDTH // HEADS)
    folders = {"one": adapter(tmp_path / "a", seed=1), "other": adapter(tmp_path / "b", seed=2)}
    folders["copy"] = adapter(tmp_path / "c", seed=1)  # the first one's content, under another name and elsewhere
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    arguments = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "3", "--lora-modules", *modules]
    with serving(model, log=tmp_path / "log", transfer=connector(tmp_path / "kv"), arguments=arguments) as server:
        answers = {}
        for saves, name in enumerate(("it", "one", "other"), 1):
            answers[name] = server.ask(PROMPT, model=name)
            server.wait_for("headstart_saves", saves)
        assert server.metric("headstart_matched_tokens") == 0, server.tail()
        assert len({answer.tokens for answer in answers.values()}) == 3
        # vLLM's own memory knows adapters by their names, the store by their content.
        assert server.ask(PROMPT, model="copy").tokens == answers["one"].tokens
        assert server.metric("headstart_loaded_tokens") == STORED, server.tail()
        server.forget()
        for loads, name in enumerate(answers, 2):
            assert server.ask(PROMPT, model=name).tokens == answers[name].tokens
            assert server.metric("headstart_loaded_tokens") == loads * STORED
