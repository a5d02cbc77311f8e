"""A real `headstart serve` follows the rules of tiers in its configuration file, and keeps the old ones where new are wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from asking import eventually
from headstart.cli.server_process import ServerProcess

pytestmark = pytest.mark.cluster
PROMPT = {"model": "any", "prompt": list(range(200)), "max_tokens": 1}


def test_a_running_server_takes_up_rules_as_its_file_is_saved(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    file, pool = tmp_path / "headstart.toml", tmp_path / "pool"
    pool.mkdir()
    settings = {
        "directory": str(tmp_path / "disk"),
        "capacity": "64MiB",
        "memory": "0",
        "pool": str(pool),
        "pool_capacity": "64MiB",
    }

    def save_rules(*rules: str) -> None:
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        temporary = file.with_suffix(".new")
        temporary.write_text("\n".join(["[cache]", *lines, "[cache.tiering]", f"rules = {json.dumps(rules)}", ""]))
        temporary.replace(file)  # as editors save

    save_rules("write to disk")
    arguments = [
        str(tiny_model_folder("llama")),
        "--config",
        str(file),
        "--models-directory",
        str(tmp_path),
        "--kv-memory",
        "64MiB",
    ]
    log = tmp_path / "log"
    with ServerProcess(arguments, log=log, ready_timeout_s=120) as server:
        assert httpx.get(f"{server.url}/health").json()["tiering"] == "1 rule"
        assert httpx.post(f"{server.url}/v1/completions", json=PROMPT, timeout=60).status_code == 200
        eventually(lambda: server.metric("headstart_tier_extents", tier="disk") == 1)
        assert server.metric("headstart_tier_extents", tier="pool") == 0

        save_rules("write to disk", "move to poool")
        eventually(lambda: server.metric("headstart_cache_tiering_rules_refused_total") == 1)
        assert "later ones are wrong" in httpx.get(f"{server.url}/health").json()["tiering"]
        assert log.read_text().count("did you mean 'pool'?") == 1
        assert server.metric("headstart_tier_extents", tier="disk") == 1

        save_rules("write to disk", "move to pool")
        eventually(lambda: server.metric("headstart_tier_extents", tier="disk") == 0)
        assert (
            server.metric("headstart_cache_tiering_moved_extents_total")
            == server.metric("headstart_tier_extents", tier="pool")
            == 1
        )
        assert httpx.get(f"{server.url}/health").json()["tiering"] == "2 rules"

        assert server._process is not None
        os.kill(server._process.pid, signal.SIGHUP)  # which reads the file again, and ends nothing
        answer = httpx.post(f"{server.url}/v1/completions", json=PROMPT, timeout=60).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] in (
            0,
            192,
        )  # read late on a busy machine, it is computed
