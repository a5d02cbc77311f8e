"""A real model, two servers and a notebook over one memory tier: what one computed all hit, also after both were killed."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.cli.server_process import ServerProcess
from headstart.connect.transformers import open_store

pytestmark = [pytest.mark.cluster, pytest.mark.real_model]

TOKENS, WHOLE = 700, 640


@pytest.fixture
def node() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="headstart-test-", dir="/dev/shm"))
    yield folder / "node"
    shutil.rmtree(folder)


def ask(server: ServerProcess, prompt: list[int]) -> tuple[str, int]:
    """Return the answer and how many tokens of the prompt were found."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def saved(server: ServerProcess) -> None:
    deadline = time.monotonic() + 120
    while server.metric("headstart_cache_saves_done_total") < server.metric("headstart_cache_save_calls_total"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_servers_and_a_notebook_share_one_memory_that_outlives_them(smollm2_folder: Path, node: Path, tmp_path: Path) -> None:
    shared = ["--node-memory", "48MiB", "--node-directory", str(node)]
    arguments = [str(smollm2_folder), "--cache-capacity", "0", "--context", "2048", *shared]
    draw = random.Random(7)
    prompt = [draw.randrange(1000, 40_000) for _ in range(TOKENS)]
    with (
        ServerProcess(arguments, log=tmp_path / "one.log") as one,
        ServerProcess(arguments, log=tmp_path / "two.log") as two,
    ):
        text, cached = ask(one, prompt)
        assert cached == 0
        saved(one)
        assert ask(two, prompt) == (text, WHOLE)
        assert two.metric("headstart_cache_loaded_tokens_total", tier="memory") == WHOLE
        assert two.metric("headstart_tier_live_bytes", tier="memory") == one.metric("headstart_tier_live_bytes", tier="memory")
        one.kill()
        two.kill()
        one.start()
        assert ask(one, prompt) == (text, WHOLE)
        model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
        settings = {"cache.capacity": "0", "cache.node_memory": "48MiB", "cache.node_directory": str(node)}
        with open_store(model, settings) as store, store.cache(torch.tensor(prompt)) as cache:
            assert cache.cached_tokens == WHOLE
            assert [tier.name for tier in store.statistics().tiers] == ["memory"]
        command = [sys.executable, "-m", "headstart.cli", "cache", "rm", "--all", "--yes", "--directory", str(node)]
        subprocess.run(command, check=True, capture_output=True)
        assert ask(one, prompt) == (text, 0)
