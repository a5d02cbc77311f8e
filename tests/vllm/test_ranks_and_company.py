"""Two ranks that split each block, mode observe, and another connector beside ours, under the real vLLM."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.vllm_server import connector, serving

_dice = random.Random(4)
PROMPT = [_dice.randrange(5, 500) for _ in range(700)]
STORED = 640


def tiny(tiny_model_folder: Any) -> Path:
    folder: Path = tiny_model_folder("llama", hidden_size=256, head_dim=64)
    return folder


def test_two_ranks_find_their_parts_after_a_restart(tiny_model_folder: Any, tmp_path: Path) -> None:
    model, two = tiny(tiny_model_folder), ["--tensor-parallel-size", "2"]
    with serving(model, log=tmp_path / "cold", transfer=connector(tmp_path / "kv"), arguments=two) as server:
        computed = server.ask(PROMPT)
        server.wait_for("headstart_saves", 2)  # one a rank
    with serving(model, log=tmp_path / "hit", transfer=connector(tmp_path / "kv"), arguments=two) as server:
        assert server.ask(PROMPT).tokens == computed.tokens
        assert server.metric("headstart_loads") == 2, server.tail()
        assert server.metric("headstart_loaded_tokens") == STORED


def test_observing_tells_what_a_store_would_bring_and_writes_nothing(tiny_model_folder: Any, tmp_path: Path) -> None:
    transfer = connector(tmp_path / "kv", mode="observe")
    with serving(tiny(tiny_model_folder), log=tmp_path / "log", transfer=transfer) as server:
        computed = server.ask(PROMPT)
        server.forget()
        assert server.ask(PROMPT).tokens == computed.tokens
        assert server.metric("headstart_observed_tokens") == STORED, server.tail()
        assert server.metric("headstart_observed_saved_milliseconds") > 0
        assert server.metric("headstart_matched_tokens") == server.metric("headstart_loads") == 0
    assert not (tmp_path / "kv").exists()


def test_beside_another_connector_both_do_their_work(tiny_model_folder: Any, tmp_path: Path) -> None:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    (tmp_path / "example").mkdir()
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [connector(tmp_path / "kv"), example]},
    }
    model = tiny(tiny_model_folder)
    with serving(model, log=tmp_path / "cold", transfer=both) as server:
        computed = server.ask(PROMPT)
        server.wait_for("headstart_saves", 1)
    with serving(model, log=tmp_path / "hit", transfer=both) as server:
        assert server.ask(PROMPT).tokens == computed.tokens
        assert server.metric("headstart_loaded_tokens") == STORED, server.tail()
    assert any((tmp_path / "example").iterdir())
