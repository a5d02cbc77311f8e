"""From a folder and a configuration to a vLLM that runs with the connector, and an engine in front of it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from headstart.config import Config, load_config, parse_adapters, parse_words
from headstart.engine.base import EngineInfo
from headstart.engine.checkpoint import read_config
from headstart.engine.vllm.engine import VLLMEngine
from headstart.engine.vllm.process import VLLMProcess
from headstart.errors import ConfigError, MissingExtra, ModelError

_log = logging.getLogger(__name__)
_NAME = "headstart"
_NOT_ITS = ("enabled", "memory")  # settings of the cache that are not for vLLM
_CHECK = (
    "import importlib.util as u, sys; "
    "sys.exit(0 if u.find_spec('vllm') and u.find_spec('headstart') else 3 if u.find_spec('headstart') else 4)"
)
_CHECK_S = 60.0
_LINE = 60  # characters of vLLM's last line that a stage shows


def open_engine(folder: Path, config: Config, *, on_progress: Callable[[str, float | None], None]) -> VLLMEngine:
    """Start vLLM on `folder` from the environment of `engine.python`, wait until it answers, and return the engine in front.

    Raises MissingExtra where vLLM or headstart is not installed there, ConfigError for settings that vLLM has not, ModelError
    with vLLM's last words when it does not start."""
    on_progress("looking for vLLM", None)
    python = config.engine.python or sys.executable
    _require_vllm(python)
    if config.engine.deterministic:
        raise ConfigError("engine.deterministic is not for vLLM; leave it out", key="engine.deterministic")
    process = VLLMProcess(lambda port: command(python, folder, config, port=port))

    def tell(line: str) -> None:
        on_progress(f"starting vLLM: {line[-_LINE:]}" if line else "starting vLLM", None)

    process.start(on_progress=tell)
    try:
        return VLLMEngine(process, _info(process.url, folder, config), model=_NAME)
    except BaseException:
        process.end()
        raise


def command(python: str, folder: Path, config: Config, *, port: int) -> list[str]:
    """Return how vLLM is started: what headstart's settings say, then `engine.vllm_arguments`, which win."""
    arguments = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", _NAME]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", config.engine.dtype]
    arguments += ["--enable-prompt-tokens-details", "--scheduling-policy", "priority", "--generation-config", "vllm"]
    if config.engine.context is not None:
        arguments += ["--max-model-len", str(config.engine.context)]
    if adapters := parse_adapters(config.engine.adapters):
        arguments += ["--enable-lora", "--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    if config.cache.enabled:
        arguments += ["--kv-transfer-config", json.dumps(transfer_config(config))]
    return arguments + parse_words(config.engine.vllm_arguments)


def transfer_config(config: Config) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config` for a configuration: the store that `serve` would have without vLLM. Rules of tiers
    that stand where vLLM's workers read them too ($HEADSTART_CONFIG, the environment) are left to them: they follow changes."""
    cache = asdict(config.cache)
    tiering = {f"cache.tiering.{name}": value for name, value in cache.pop("tiering").items()}
    if config.cache.tiering == load_config().cache.tiering:
        tiering = {}
    chosen = tiering | {f"cache.{name}": value for name, value in cache.items() if name not in _NOT_ITS and value is not None}
    extra: dict[str, Any] = {
        **{key: str(value.expanduser()) if isinstance(value, Path) else value for key, value in chosen.items()},
        "cache.directory": [str(path) for path in config.cache.directories],
        "models_directory": str(config.models_directory.expanduser()),
    }
    return {
        "kv_connector": "HeadstartConnector",
        "kv_connector_module_path": "headstart.connect.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _require_vllm(python: str) -> None:
    try:
        code = subprocess.run([python, "-c", _CHECK], timeout=_CHECK_S, capture_output=True, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{python} cannot be run ({error}); let engine.python name the Python of an environment with vLLM",
            key="engine.python",
        ) from error
    if code == 3:
        raise MissingExtra(
            f"there is no vLLM for {python}: pip install vllm, or name another environment's Python in engine.python",
            extra="vllm",
        )
    if code:
        raise MissingExtra(
            f"headstart is not installed beside the vLLM of {python}: {python} -m pip install --no-deps headstart", extra="vllm"
        )


def _info(url: str, folder: Path, config: Config) -> EngineInfo:
    """Ask the server what it serves. Raises ModelError."""
    try:
        models = httpx.get(f"{url}/v1/models", timeout=30.0, trust_env=False).raise_for_status().json()["data"]
        context = int(next(model["max_model_len"] for model in models if model["id"] == _NAME))
    except (httpx.HTTPError, KeyError, ValueError, TypeError, StopIteration) as error:
        raise ModelError(f"vLLM does not tell what it serves: {error!r}; is it 0.32 or later?") from error
    described = read_config(folder)
    text = described.get("text_config")
    described = text if isinstance(text, dict) else described
    return EngineInfo(
        model=folder.name,
        context_tokens=context,
        vocabulary=int(str(described.get("vocab_size", 1 << 31))),
        device="vllm",
        dtype=config.engine.dtype,
        layers=int(str(described.get("num_hidden_layers", 0))),
        kv_bytes_per_token=0,
        cache="prefixes are kept by vLLM in memory and by headstart on disk"
        if config.cache.enabled
        else "off by configuration",
        adapters=tuple(parse_adapters(config.engine.adapters)),
    )
