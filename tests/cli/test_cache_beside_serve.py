"""`headstart cache` beside a real server on one directory: it sees what the server saved, and the server what it removed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from api.serving import running_model
from asking import eventually
from headstart.cli.opening import open_model
from headstart.config import load_config


def command(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "headstart.cli", "cache", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_prefix_is_listed_pinned_checked_and_removed_while_the_server_runs(
    tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config = load_config(
        overrides={
            "model": str(tiny_model_folder("llama")),
            "models_directory": tmp_path,
            "cache.directory": tmp_path / "kv",
            "cache.capacity": "64MiB",
            "cache.memory": "0",
            "engine.kv_memory": "64MiB",
        }
    )
    here = ("--directory", str(tmp_path / "kv"))
    with running_model(open_model(config, on_progress=lambda stage, fraction: None)) as server:

        def cached_tokens() -> int:
            body = {"model": "any", "prompt": list(range(200)), "max_tokens": 1}
            usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached_tokens() == 0
        deadline = time.monotonic() + 60
        while not (found := command("ls", *here)["prefixes"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found[0]["tokens"] >= 192
        eventually(lambda: cached_tokens() == 192)  # a machine that is busy may find a lookup late, and computes
        command("pin", found[0]["key"], *here)
        assert command("verify", *here)["faults"] == []
        command("unpin", found[0]["key"], *here)
        command("rm", "--all", "--yes", *here)
        assert cached_tokens() == 0
