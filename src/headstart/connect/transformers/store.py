"""The store under one model object: opened once, asked for a cache for each prompt, closed at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch

from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import CacheStatistics, PrefixCache
from headstart.cache.rule_follower import follow
from headstart.config import load_config
from headstart.connect.transformers.cache import HeadstartCache
from headstart.connect.transformers.identity import identity_of_model, marks
from headstart.engine.torch.facts import name_of_cache, signature
from headstart.engine.torch.kv_memory import KVShape, LayerKV
from headstart.errors import ModelError

_log = logging.getLogger(__name__)
_PROBE = (0, 1)  # any two tokens: only shapes are looked at
_WINDOWS_TOO = {"full_attention", "sliding_attention"}
_NO_STATES = ("it keeps states beside keys and values", "headstart serve caches many such models")


def open_store(model: Any, settings: Mapping[str, object] | None = None) -> Store:
    """Open the store under a causal language model of transformers.

    `settings` by their names: {"cache.directory": "/mnt/kv", "cache.capacity": "20GiB"}; what is left out comes from the file
    and the environment as everywhere (docs/reference.md). Raises ModelError for a model whose cache is more than keys and
    values, or that is training; ConfigError. A directory that cannot be used is no error: nothing is found then, the log
    says why."""
    read = partial(load_config, overrides=settings)
    config = read()
    shape = _shape_of(model)
    identity = identity_of_model(model, digests=config.models_directory.expanduser() / "digests.json")
    text = model.config.get_text_config(decoder=True)
    representation = shape.representation(query_heads=text.num_attention_heads)
    cache = open_cache(config.cache, identity=identity, representation=representation)
    follow(read, config.cache.tiering.rules, cache)
    return Store(model, shape, cache, load_timeout_s=config.cache.load_timeout_s)


class Store:
    """Use `open_store`. Also a context manager; closing twice is fine."""

    def __init__(self, model: Any, shape: KVShape, cache: PrefixCache, *, load_timeout_s: float) -> None:
        self._model = model
        self._shape = shape
        self._cache = cache
        self._load_timeout_s = load_timeout_s
        self._marks = marks(model)

    def cache(
        self,
        input_ids: torch.Tensor | Sequence[int],
        *,
        salt: str | None = None,
        retention: str = "default",
    ) -> HeadstartCache:
        """Return a cache for one generation that begins with `input_ids` ([n] or [1, n]); its beginning is being read already.

        Give the same ids to `generate`. Raises ValueError for a batch, and when the model's weights have changed since the
        store was opened: what is stored is not theirs."""
        tokens = _one_row(input_ids)
        if marks(self._model) != self._marks:
            raise ValueError("the model's weights have changed since the store was opened; open another one")
        return HeadstartCache(
            self._model,
            self._shape,
            self._cache,
            tokens,
            salt=salt,
            retention=retention,
            load_timeout_s=self._load_timeout_s,
            unchanged=lambda: marks(self._model) == self._marks,
        )

    def statistics(self) -> CacheStatistics:
        return self._cache.statistics()

    def close(self) -> None:
        """Write what is queued, and let go of the directory."""
        self._cache.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store under {type(self._model).__name__} over {self._cache!r}>"


def _one_row(input_ids: torch.Tensor | Sequence[int]) -> list[int]:
    ids = torch.as_tensor(input_ids)
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or not ids.numel() or ids.is_floating_point():
        raise ValueError(f"input_ids have shape {tuple(ids.shape)}; give the ids of one sequence, [n] or [1, n]")
    tokens: list[int] = ids.tolist()
    return tokens


def _shape_of(model: Any) -> KVShape:
    """Return what the model keeps of each token, found by a pass over two. Raises ModelError."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    name = type(model).__name__
    if getattr(model, "training", False):
        raise ModelError(f"{name} is in training mode, where dropout changes its keys and values; call model.eval()")
    argument = name_of_cache(model)
    config = model.config
    if argument is None or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} takes no cache of keys and values; give a causal language model")
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) - _WINDOWS_TOO
    if kinds:
        raise ModelError(f"{name} has layers of {', '.join(sorted(kinds))}: {_NO_STATES[0]}; {_NO_STATES[1]}")
    probe = DynamicCache()
    options = {"logits_to_keep": 1} if "logits_to_keep" in signature(model).parameters else {}
    with torch.no_grad():
        model(input_ids=torch.tensor([_PROBE], device=model.device), use_cache=True, **{argument: probe}, **options)
    layers, dtypes = [], set()
    for number, layer in enumerate(probe.layers):
        if type(layer) is not DynamicLayer or not layer.is_initialized or layer.keys.shape[-2] != len(_PROBE):
            raise ModelError(f"layer {number} of {name} keeps no keys and values of its own; {_NO_STATES[1]}")
        keys, values = layer.keys, layer.values
        dtypes |= {keys.dtype, values.dtype}
        layers.append(LayerKV.of(number, keys.shape[1], keys.shape[-1], values.shape[-1], latent=False))
    if len(dtypes) != 1 or len(layers) != text.num_hidden_layers:
        raise ModelError(f"{name} keeps {len(layers)} layers in {len(dtypes)} dtypes; {_NO_STATES[1]}")
    return KVShape(tuple(layers), dtypes.pop())
