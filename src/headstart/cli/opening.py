"""From a configuration to a model that answers: the folder, the engine with its cache, the renderer. For `serve` and `run`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec

from headstart.api.keys import Key, read_keys
from headstart.api.served import Served
from headstart.api.shared import SharedFile, SharedPrefixes
from headstart.cli.progress import OnProgress
from headstart.config import CacheConfig, Config, parse_quotas, prefer_sleeping_threads
from headstart.engine.base import Engine, Sampling
from headstart.engine.handoff import opened
from headstart.engine.models import ModelFolder, resolve_model
from headstart.errors import ConfigError, ModelError
from headstart.render import GGUFRenderer, Renderer
from headstart.render.answers import Family, family_named, family_of

log = logging.getLogger("headstart")


def open_model(config: Config, *, on_progress: OnProgress) -> Served:
    """Return the configured model, ready to answer. Takes as long as the model is large; raises ModelError or MissingExtra.

    A cache directory that cannot be used is no error: the engine serves without and says so in `info.cache`."""

    prefer_sleeping_threads()  # before libraries that compute are imported

    def part(stage: str, fraction: float | None) -> None:
        if stage != "ready":  # a part that is ready is not yet the whole
            on_progress(stage, fraction)

    found = resolve_model(config.model, config.models_directory, on_progress=part)
    return _open_gguf(found, config, part) if found.is_gguf else _open_folder(found, config, part)


def _refuse_roles(config: Config, what: str) -> None:
    """Raise ConfigError where prompts are to be handed over and the engine cannot."""
    if config.server.role != "both" or config.handoff.listen:
        raise ConfigError(
            f"{what} computes prompts and answers in one place; leave --role and [handoff] out", key="server.role"
        )


def _open_folder(folder: ModelFolder, config: Config, part: OnProgress) -> Served:
    part("importing torch and transformers", None)
    with suppress(ImportError):  # whoever needs what is missing says so, with what to install
        _import_libraries()
    part("loading the tokenizer", None)
    renderer = Renderer.load(folder.path)
    renderer.warm_up()
    file = config.server.shared_prefixes
    shared = SharedPrefixes() if file is None else SharedFile(file, renderer)
    settings = _with_disk_quotas(config)
    engine: Engine
    cache = None
    if config.engine.engine == "vllm":
        from headstart.engine.vllm import open_engine as open_vllm

        _refuse_roles(config, "vLLM, which has connectors of its own for that,")
        engine = open_vllm(folder.path, settings, on_progress=part)
    else:
        from headstart.engine.torch import open_engine

        torch_engine = open_engine(folder.path, settings, on_progress=part)
        cache = torch_engine.cache
        try:
            engine = opened(torch_engine, cache, settings)
        except BaseException:
            torch_engine.close()
            raise
    return Served(
        name=folder.name,
        engine=engine,
        renderer=renderer,
        defaults=sampling_defaults(folder.path),
        note=folder.note,
        cache=cache,
        shared=shared,
        answers=answers_of(renderer, config.server.answers),
    )


def _open_gguf(file: ModelFolder, config: Config, part: OnProgress) -> Served:
    from headstart.engine.llama import open_engine

    _refuse_roles(config, "the engine of GGUF models")
    for key, given in (("adapters", config.engine.adapters), ("deterministic", config.engine.deterministic)):
        if given:
            raise ConfigError(f"engine.{key} is not for GGUF models; leave it out, or serve a folder", key=f"engine.{key}")
    if config.engine.engine == "vllm":
        raise ConfigError(
            "GGUF models are not served through vLLM here; leave --engine out, or serve a folder", key="engine.engine"
        )
    engine = open_engine(file.path, _with_disk_quotas(config), on_progress=part)
    try:
        part("reading the tokenizer", None)
        renderer = GGUFRenderer(engine.weights.vocabulary, template=engine.weights.chat_template)
        renderer.warm_up()
        declared = config.server.shared_prefixes
        shared = SharedPrefixes() if declared is None else SharedFile(declared, renderer)
        answers = answers_of(renderer, config.server.answers)
    except BaseException:
        engine.close()
        raise
    return Served(
        name=file.name,
        engine=engine,
        renderer=renderer,
        defaults=_gguf_defaults(engine.weights.metadata),
        note=file.note,
        cache=engine.cache,
        shared=shared,
        answers=answers,
    )


def answers_of(renderer: Renderer, named: str) -> Family | None:
    """Return how the model's answers are read: as `server.answers` says, as the model does, or as its chat template tells."""
    family = family_named(named) if named != "auto" else family_of(renderer.template, own=renderer.response_template)
    if family is not None and find_spec("transformers") is None:
        log.warning("reasoning and tool calls are given as text: to read them, pip install 'headstart[render]'")
        return None
    return family


def _with_disk_quotas(config: Config) -> Config:
    """Return the configuration with what keys say of their tenants' share of the disk; cache.quotas goes first."""
    if config.server.keys is None:
        return config
    quotas = disk_quotas(config.cache, read_keys(config.server.keys))
    told = ", ".join(f"{tenant}={size}" for tenant, size in quotas.items())
    return replace(config, cache=replace(config.cache, quotas=told))


def disk_quotas(cache: CacheConfig, keys: Mapping[str, Key]) -> dict[str, str]:
    """Return what tenants may have of the disk: what keys say, and before that `cache.quotas`."""
    return {key.tenant: key.disk for key in keys.values() if key.disk is not None} | parse_quotas(cache.quotas)


def _import_libraries() -> None:
    """Import what takes seconds ahead of its use, so that the stages tell where the time goes."""
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


class _GenerationConfig(msgspec.Struct):
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def sampling_defaults(folder: Path) -> Sampling:
    """Return what `generation_config.json` recommends: greedy unless it says to sample. Raises ModelError."""
    file = folder / "generation_config.json"
    try:
        said = msgspec.json.decode(file.read_bytes(), type=_GenerationConfig)
    except FileNotFoundError:
        return Sampling()
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}; fetch the model again", path=file) from error
    penalty = said.repetition_penalty or 1.0
    if not said.do_sample:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        repetition_penalty=penalty,
        min_p=said.min_p or 0.0,
        temperature=1.0 if said.temperature is None else said.temperature,
        top_p=1.0 if said.top_p is None else said.top_p,
        top_k=0 if said.top_k is None else said.top_k,
    )


def _gguf_defaults(metadata: Callable[[str], str | None]) -> Sampling:
    """Return what a GGUF recommends under `general.sampling`: greedy unless it names a temperature."""

    def number(name: str, default: float) -> float:
        try:
            return float(metadata(f"general.sampling.{name}") or default)
        except ValueError:
            return default

    penalty = number("penalty_repeat", 1.0)
    if metadata("general.sampling.temp") is None:
        return Sampling(repetition_penalty=penalty)
    return Sampling(
        repetition_penalty=penalty,
        min_p=number("min_p", 0.0),
        temperature=number("temp", 1.0),
        top_p=number("top_p", 1.0),
        top_k=int(number("top_k", 0)),
    )
