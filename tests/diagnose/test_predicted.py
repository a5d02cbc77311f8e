"""What `lint` says would be found again is what a running server counts: the same log, token for token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from api.serving import Listening, running_model
from diagnose.logs import clock, linted, turns, written
from headstart.cli.opening import open_model
from headstart.config import load_config
from headstart.render import Renderer


@pytest.fixture
def folder(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("llama")


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[Listening]:
    told = {
        "cache.directory": tmp_path / "kv",
        "cache.capacity": "256MiB",
        "cache.memory": "64MiB",
        "engine.kv_memory": "64MiB",
    }
    config = load_config(overrides={"model": str(folder), "models_directory": tmp_path, **told})
    with running_model(open_model(config, on_progress=lambda stage, fraction: None)) as server:
        yield server


def wait_until_saved(url: str) -> None:
    deadline = time.monotonic() + 60
    while any(
        line.startswith("headstart_saves_pending{") and not line.endswith(" 0.0")
        for line in httpx.get(f"{url}/metrics").text.splitlines()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_predicted_hits_are_those_that_the_server_counts(server: Listening, folder: Path, tmp_path: Path) -> None:
    requests = [*turns(4, tools=lambda n: []), *turns(3, system=clock, tools=lambda n: []), *turns(5, tools=lambda n: [])[4:]]
    lines = []
    for body in requests:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "max_tokens": 1}, timeout=120).json()
        wait_until_saved(server.url)
        lines.append({"body": body, "response": {"usage": answer["usage"]}})
    lint = linted(written(tmp_path / "log.jsonl", lines), renderer=Renderer.load(folder, light=True))
    assert lint.logged is not None
    assert lint.logged.requests == lint.logged.equal == len(requests)
    assert lint.logged.cached == lint.all.kept > 0
    assert lint.logged.tokens == lint.all.tokens
