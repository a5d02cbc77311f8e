"""Tenants and the usage log of a real `headstart serve`, through memory, disk, a kill and a restart."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai

from api.test_real_server import Child, serving
from headstart.api.keys import append_key, make_key

PROMPT = "What is the same in every request stands first, and long enough for some blocks. " * 30


class Asked:
    """What of a prompt was cached, by tier."""

    def __init__(self, server: Child, key: str, **more: Any) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0, **more)
        assert answer.usage is not None
        details = answer.usage.model_dump()["prompt_tokens_details"]
        self.cached, self.written = details["cached_tokens"], details["cache_write_tokens"]
        self.disk, self.prompt = details["cached_disk_tokens"], answer.usage.prompt_tokens
        assert 0 <= self.cached + self.written <= self.prompt


def metric(server: Child, key: str, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", headers={"x-api-key": key}, timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def usage(folder: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "headstart.cli", "usage", "--usage-log", str(folder / "usage"), "--json"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    total: dict[str, int] = json.loads(done.stdout)["total"]
    return total


def test_five_tenants_one_prompt_through_memory_disk_and_a_restart(
    tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    made = [make_key({"tenant": f"t{n}"}) for n in range(6)]
    operator = make_key({"tenant": "ops", "operator": True})
    for one in (*made, operator):
        append_key(tmp_path / "keys.jsonl", one.key)
    *five, sixth = (one.text for one in made)
    arguments = [str(tiny_model_folder("llama")), "--keys", str(tmp_path / "keys.jsonl")]
    arguments += ["--cache-directory", str(tmp_path / "kv"), "--cache-capacity", "256MiB", "--cache-memory", "64MiB"]
    with serving(tmp_path, *arguments) as server:
        server.until_ready()
        first = [Asked(server, key) for key in five]
        assert [one.cached for one in first] == [0] * 5
        assert all(one.written == one.prompt // 64 * 64 for one in first)
        until(lambda: metric(server, operator.text, "headstart_saves_pending") == 0)
        again = [Asked(server, key) for key in five]
        assert all(one.cached > 0 and one.disk == 0 and one.written == 0 for one in again)
        assert Asked(server, five[0], extra_body={"cache_salt": "own"}).cached == 0
        until(lambda: metric(server, operator.text, "headstart_saves_pending") == 0)
        until(lambda: usage(tmp_path)["requests"] == 11)
        sums = usage(tmp_path)
        for name, counter in (
            ("engine_prompt", "vllm:prompt_tokens_total"),
            ("engine_generated", "vllm:generation_tokens_total"),
            ("engine_cached_memory", "vllm:prefix_cache_hits_total"),
            ("engine_cached_disk", "vllm:external_prefix_cache_hits_total"),
            ("engine_written", "headstart_engine_written_tokens_total"),
            ("engine_kept_output", "headstart_engine_kept_output_tokens_total"),
        ):
            assert sums[name] == metric(server, operator.text, counter), name
        server.end(signal.SIGKILL)
    assert usage(tmp_path) == sums
    with serving(tmp_path, *arguments) as server:
        server.until_ready()
        assert Asked(server, sixth).cached == 0
        restored = [Asked(server, key) for key in five]
        assert [one.cached for one in restored] == [one.disk for one in restored] == [one.cached for one in again]
        server.end(signal.SIGTERM)
    assert usage(tmp_path)["requests"] == 17
    log = (tmp_path / "serve.log").read_text()
    assert not any(one.text in log for one in made)
