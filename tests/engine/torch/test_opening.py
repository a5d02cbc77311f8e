"""From a configuration to a running engine, also when memory is short or the cache cannot be had."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import pytest
import torch
from held_cache import eventually
from reference import ask, some_tokens

from headstart.config import CacheConfig, Config, EngineConfig
from headstart.engine import caching
from headstart.engine.torch import open_engine, opening
from headstart.engine.torch.engine import TorchEngine
from headstart.errors import ConfigError, HeadstartError, ModelError
from headstart.policy.placement import Room

Folders = Callable[..., Path]


def _config(tmp_path: Path, *, enabled: bool = True, directory: str = "kv", **engine: object) -> Config:
    return Config(
        models_directory=tmp_path / "models",
        cache=CacheConfig(directory=tmp_path / directory, enabled=enabled, capacity="64MiB", memory="16MiB"),
        engine=EngineConfig(**{"device": "cpu", "kv_memory": "16MiB", "max_running": 2, **engine}),  # type: ignore[arg-type]
    )


def _open(folder: Path, config: Config) -> TorchEngine:
    return open_engine(folder, config, on_progress=lambda stage, fraction: None)


def test_progress_ends_with_ready_and_the_engine_tells_what_it_is(tiny_model_folder: Folders, tmp_path: Path) -> None:
    stages: list[tuple[str, float | None]] = []
    config = _config(tmp_path, context=1000)
    with open_engine(tiny_model_folder("qwen3"), config, on_progress=lambda *stage: stages.append(stage)) as engine:
        assert stages[-1] == ("ready", 1.0)
        assert (engine.info.device, engine.info.dtype, engine.info.layers) == ("cpu", "float32", 3)
        assert engine.info.context_tokens == 1000
        assert engine.info.cache == "prefixes are kept in memory and on disk"
        assert engine.load().kv_used_bytes == 0


def test_what_was_saved_is_found_after_a_restart(tiny_model_folder: Folders, tmp_path: Path) -> None:
    prompt = some_tokens(300)
    with _open(tiny_model_folder("llama"), _config(tmp_path)) as engine:
        cold = ask(engine, prompt)
        cold.result()
        eventually(lambda: engine.load().kv_used_bytes == 0)
    with _open(tiny_model_folder("llama"), _config(tmp_path)) as engine:
        warm = ask(engine, prompt)
        receipt = warm.result().receipt
        assert receipt is not None
        assert receipt.cached_disk_tokens == 256
        assert receipt.bytes_read >= 256 * engine.info.kv_bytes_per_token
        assert warm.tokens == cold.tokens
        other = ask(engine, prompt, salt="someone else").result().receipt
        assert other is not None
        assert other.cached_tokens == 0


def test_a_context_that_kv_memory_cannot_hold_is_cut_to_what_it_can(
    tiny_model_folder: Folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, enabled=False, kv_memory="400000")  # 768 bytes a token
    with _open(tiny_model_folder("llama"), config) as engine:
        assert engine.info.context_tokens == 512
        assert "cut" in caplog.text
        assert ask(engine, some_tokens(511), 100).result().finish == "length"
    with pytest.raises(ModelError, match=r"64 tokens are one unit of .* MiB, and 128 tokens = .* MiB are the least"):
        _open(tiny_model_folder("llama"), _config(tmp_path, enabled=False, kv_memory="60000"))


@pytest.mark.parametrize(
    ("enabled", "free_mib", "want_kib"),
    [
        (False, 64, 16 * 1024),
        (True, 64, 12 * 1024),
        (True, 32, 4 * 1024),
        (True, 10, 2560),
    ],  # the memory tier takes 16 MiB, at most half
)
def test_kv_memory_is_a_share_of_what_the_memory_tier_leaves(
    tiny_model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool, free_mib: int, want_kib: int
) -> None:
    monkeypatch.setattr(opening, "available_bytes", lambda device: free_mib << 20)
    config = _config(tmp_path, enabled=enabled, kv_memory="auto", max_running=100)
    with _open(tiny_model_folder("llama"), config) as engine:
        assert engine.load().kv_capacity_bytes == want_kib << 10


def test_a_capacity_that_holds_hardly_anything_is_told(
    tiny_model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path)
    monkeypatch.setattr(caching, "_LEAST_PIECES", 5000)
    with _open(tiny_model_folder("llama"), config) as engine:
        said = engine.info.cache
    assert re.search(r"on disk; cache.capacity is 64 MiB and holds \d+ blocks of .* MiB: hardly any", said), said
    assert caplog.text.count("hardly any prompt will be kept") == 1


def test_a_capacity_below_the_least_names_the_setting_and_how_it_came_about(
    tiny_model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path)
    monkeypatch.setattr(caching, "rooms_of", lambda directories: [Room(1, 8 << 20)])
    small = replace(config, cache=replace(config.cache, capacity="10%"))
    with _open(tiny_model_folder("llama"), small) as engine:
        assert engine.info.cache.startswith(
            "prefixes are kept in memory; cache.capacity is 10% of a file system of 8 MiB = 0.8 MiB; "
            "at least 1 MiB is needed (--cache-capacity)"
        )


def test_a_write_budget_that_stops_every_save_is_told_where_prefixes_are_kept(
    tiny_model_folder: Folders, tmp_path: Path
) -> None:
    config = _config(tmp_path)
    small = replace(config, cache=replace(config.cache, write_budget="200KiB"))
    with _open(tiny_model_folder("llama"), small) as engine:
        assert engine.info.cache == (
            "prefixes are kept in memory and on disk where they are there already; cache.write_budget is 0.1953 MiB a day, of "
            "which a prompt gets less than one block of 0.04688 MiB: nothing is stored on disk"
        )


@pytest.mark.parametrize("context", [2, 64, 65])
def test_a_context_shorter_than_the_warm_up_can_be_served(tiny_model_folder: Folders, tmp_path: Path, context: int) -> None:
    config = _config(tmp_path, context=context, max_running=1, kv_memory="auto")
    with _open(tiny_model_folder("llama"), config) as engine:
        assert engine.info.context_tokens == context
        assert ask(engine, some_tokens(context - 1)).result().finish == "length"


def test_a_cache_directory_that_cannot_be_used_does_not_stop_the_engine(tiny_model_folder: Folders, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with _open(tiny_model_folder("llama"), _config(tmp_path, directory="file")) as engine:
        assert "no disk tier" in engine.info.cache
        assert ask(engine, some_tokens(100)).result().finish == "length"
    with _open(tiny_model_folder("llama"), _config(tmp_path, enabled=False)) as engine:
        assert engine.cache is None
        assert engine.info.cache == "off by configuration"


def test_a_size_that_is_no_size_is_a_configuration_error(tiny_model_folder: Folders, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        _open(tiny_model_folder("llama"), _config(tmp_path, kv_memory="plenty"))


@pytest.mark.parametrize(
    ("setting", "says"),
    [({"device": "cuda:99"}, "this machine has: auto"), ({"adapters": "sql=/nothing"}, "/nothing/adapter_config")],
)
def test_what_is_not_there_is_told_before_the_weights_are_read(
    tiny_model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], says: str
) -> None:
    monkeypatch.setattr(opening, "_load_identified", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(HeadstartError, match=says):
        _open(tiny_model_folder("llama"), _config(tmp_path, **setting))


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_model_that_changes_while_it_is_loaded_is_refused(
    tiny_model_folder: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, enabled: bool
) -> None:
    folder = copytree(tiny_model_folder("llama"), tmp_path / "model")
    real = opening.load_model

    def load_and_replace(*args: Any, **settings: Any) -> Any:
        model = real(*args, **settings)
        copy(folder / changed, folder / "new")
        (folder / "new").rename(folder / changed)
        return model

    monkeypatch.setattr(opening, "load_model", load_and_replace)
    with pytest.raises(ModelError, match="changed while it was loaded"):
        _open(folder, _config(tmp_path, enabled=enabled))


def test_weights_that_are_written_over_later_do_not_change_the_running_model(
    tiny_model_folder: Folders, tmp_path: Path
) -> None:
    folder = copytree(tiny_model_folder("llama"), tmp_path / "model")
    with _open(folder, _config(tmp_path, enabled=False)) as engine:
        before = engine.next_logits([1, 2, 3])
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-4096, 2)
            file.write(b"\x3f" * 4096)
        assert torch.equal(engine.next_logits([1, 2, 3]), before)


def test_hashing_a_checkpoint_is_a_stage_of_its_own(tiny_model_folder: Folders, tmp_path: Path) -> None:
    stages: list[str] = []
    with open_engine(tiny_model_folder("llama"), _config(tmp_path), on_progress=lambda stage, _: stages.append(stage)):
        assert "reading the weights' identity" in stages
