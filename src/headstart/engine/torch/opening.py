"""From a folder and a configuration to a running engine: model, KV memory, cache, warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS
from headstart.cache.open import memory_to_come
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import Config, parse_adapters, parse_size
from headstart.engine.base import EngineInfo
from headstart.engine.caching import open_told
from headstart.engine.checkpoint import identity_of, weight_files
from headstart.engine.torch.deterministic import make_deterministic
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.hardware import available_bytes, choose_device, keep_freed_memory, use_physical_cores
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.lora import Adapter, Adapters, read_adapter
from headstart.engine.torch.model import Model, TorchModel, load_model
from headstart.engine.torch.stock import StockModel
from headstart.errors import ConfigError, ModelError

_log = logging.getLogger(__name__)

_LEAST_CONTEXT = 128  # tokens; below, nothing useful fits
_STATE_COPIES = 4  # of a recurrent state, on their way into the cache beside the one request that always fits


def open_engine(folder: Path, config: Config, *, on_progress: Callable[[str, float | None], None]) -> TorchEngine:
    """See `headstart.engine.torch.open_engine`."""
    use_physical_cores()
    keep_freed_memory()
    choose_device(config.engine.device)  # what is wrong with little things is told before the weights are read, for minutes
    adapters = {name: read_adapter(path) for name, path in parse_adapters(config.engine.adapters).items()}
    identity, model = _load_identified(folder, config, on_progress)
    if adapters:
        _add_adapters(model, adapters)
    if config.engine.deterministic:
        _log.info("deterministic, so slower: one request a pass; the bits hold for %s", make_deterministic(model))
    on_progress("preparing memory", None)
    context, capacity = _plan_memory(model, config)
    try:
        device = None if model.device.type == "cpu" else model.device
        memory = KVMemory(model.shape, capacity, context_tokens=context, device=device)
    except (OSError, MemoryError) as error:
        raise ConfigError(
            f"{capacity} bytes of KV memory cannot be had ({error}); lower engine.kv_memory", key="engine.kv_memory"
        ) from error
    memory.touch(context)  # one request's worth; the engine does the rest when it is idle
    cache, said = _open_cache(identity, config, model)
    if cache is not None:
        cache.warm()
        if adapters and isinstance(model, TorchModel) and model.adapters is not None:
            for digest in model.adapters.digests.values():
                cache.know(replace(cache.identity, adapters=(digest,)))
    engine = TorchEngine(
        model,
        memory,
        info=EngineInfo(
            model=model.name,
            context_tokens=context,
            vocabulary=model.vocabulary,
            device=model.device.type,
            dtype=str(model.dtype).removeprefix("torch."),
            layers=model.layers,
            kv_bytes_per_token=model.shape.token_bytes,
            cache=said,
            adapters=tuple(adapters),
        ),
        cache=cache,
        max_running=config.engine.max_running,
        chunk_tokens=config.engine.prefill_chunk,
        load_timeout_s=config.cache.load_timeout_s,
        save_every=config.cache.save_every,
        deterministic=config.engine.deterministic,
    )
    on_progress("warming up", None)
    engine.warm_up()
    on_progress("ready", 1.0)
    return engine


def _add_adapters(model: Model, adapters: dict[str, Adapter]) -> None:
    if isinstance(model, StockModel) or model.mixers is not None or any(layer.latent for layer in model.shape.layers):
        raise ModelError(f"adapters are not served with {model.name}, which is not plain attention; leave engine.adapters out")
    if model.name in adapters:
        raise ConfigError(f"engine.adapters: {model.name!r} is the model's own name; take another", key="engine.adapters")
    model.adapters = Adapters(model.module, adapters)
    model.adapters.probe(model)


def _load_identified(
    folder: Path, config: Config, on_progress: Callable[[str, float | None], None]
) -> tuple[Identity | None, Model]:
    """Return the model and the identity of the very bytes that it was loaded from; no identity where nothing is cached.

    The KV of other weights must never be saved under an identity, so a folder that changes meanwhile is refused."""
    before = _facts(folder)
    identity = None
    if config.cache.enabled:
        on_progress("reading the weights' identity", None)
        identity = identity_of(folder, digests=config.models_directory.expanduser() / "digests.json")
    model = load_model(
        folder,
        device=config.engine.device,
        dtype=config.engine.dtype,
        on_progress=on_progress,
        context=config.engine.context,
    )
    if _facts(folder) != before:
        raise ModelError(f"{folder} changed while it was loaded; start again when it is complete", path=folder)
    return identity, model


def _facts(folder: Path) -> list[tuple[str, int, int, int, int, int]]:
    """What differs, whenever the bytes of the configuration or of weights do."""
    try:
        facts = [(path.name, path.stat()) for path in (folder / "config.json", *weight_files(folder))]
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}", path=folder, errno=error.errno) from error
    return [(name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in facts]


def _plan_memory(model: Model, config: Config) -> tuple[int, int]:
    """Return the context in tokens and the bytes of KV memory. One full context always fits: it is cut to what there is.

    "auto" is a full context for each request that may run, within a quarter of the free memory, or one within half; what
    the memory tier will take is not free, though on a small machine at least half is left to the engine."""
    context = min(model.context_tokens, config.engine.context or model.context_tokens)
    copies = 0 if model.shape.state is None else _STATE_COPIES * model.shape.state.nbytes
    one = model.shape.region_bytes(context) + copies
    if config.engine.kv_memory == "auto":
        free = available_bytes(model.device)
        if config.cache.enabled and model.device.type == "cpu":
            free -= min(memory_to_come(config.cache), free // 2)
        capacity = min(config.engine.max_running * one, max(free // 4, min(one, free // 2)))
    else:
        capacity = parse_size(config.engine.kv_memory)
    if capacity < one:
        fits = _tokens_that_fit(model, capacity - copies, below=context)
        if fits < min(_LEAST_CONTEXT, context):
            least = min(_LEAST_CONTEXT, context)
            raise ModelError(
                f"{_mib(capacity)} of KV memory are too little for {model.name}: {BLOCK_TOKENS} tokens are one unit of "
                f"{_mib(model.shape.region_bytes(BLOCK_TOKENS))}, and {least} tokens = {_mib(model.shape.region_bytes(least))} "
                "are the least; set engine.kv_memory higher or take a smaller model",
                capacity_bytes=capacity,
            )
        _log.warning(
            "KV memory of %d bytes holds %d tokens of %s: the context is cut from %d to that",
            capacity,
            fits,
            model.name,
            context,
        )
        context = fits
    return context, capacity


def _tokens_that_fit(model: Model, capacity: int, *, below: int) -> int:
    tokens = min(below, capacity // model.shape.token_bytes) // BLOCK_TOKENS * BLOCK_TOKENS
    while tokens and model.shape.region_bytes(tokens) > capacity:  # layers are rounded up to whole OS pages
        tokens -= BLOCK_TOKENS
    return tokens


def _open_cache(identity: Identity | None, config: Config, model: Model) -> tuple[PrefixCache | None, str]:
    """Return the cache, or None, and one sentence about it; behind "; " what is wrong with it."""
    if identity is None:
        return None, "off by configuration"
    if isinstance(model, StockModel):
        return None, f"off for this model, because {model.why.replace('; ', ', ')}"
    return open_told(config.cache, identity=identity, representation=model.shape.representation(query_heads=model.heads))


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.4g} MiB" if nbytes >= 1 << 14 else f"{nbytes} bytes"
