"""HeadstartHiCache: SGLang's storage contract (v0, v1, v2) over the store. Nothing here raises on the data path.

SGLang's threads that call it die of an exception, and the engine with them: what goes wrong is a missed page, counted and
logged. Only what is wrong at the start (settings, an unknown model) raises, and refuses the attachment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.cache.rule_follower import follow
from headstart.config import load_config
from headstart.connect.sglang.pages import PageStore, PageStores, named_by_pages
from headstart.connect.sglang.pools import HostPool, bytes_of
from headstart.engine.checkpoint import identity_of
from headstart.errors import ConfigError
from headstart.metrics import Counters

_KV = "kv"
_PATIENCE_S = 2.0  # of lookups: SGLang's storage threads wait for them, and none that computes
_OWN = ("model", "version")
_WHERE = 'in "headstart" of --hicache-storage-backend-extra-config'
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def _never_raises(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a method return `otherwise(*arguments)` where it fails."""

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def safe(self: HeadstartHiCache, *arguments: Any, **named: Any) -> Any:
            try:
                return method(self, *arguments, **named)
            except Exception:  # noqa: BLE001 - the engine's edge
                self.counters.add("errors")
                _log.exception("%s failed; it counts as a miss", method.__name__)
                return otherwise(*arguments, **named)

        return safe

    return around


def _no_pages(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _no_transfers(transfers: Sequence[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or []) for transfer in transfers}


class HeadstartHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang tells no types here
    """See `HiCacheStorage`. Settings stand under "headstart" in the extra configuration, by their own names; "model" is the
    folder of the weights where SGLang was given a name, "version" a text for weights that no file tells."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        given = dict((storage_config.extra_config or {}).get("headstart") or {})
        own = {name: given.pop(name, None) for name in _OWN}
        read = partial(load_config, overrides={**given, "cache.memory": "0"})  # the host pool is the memory tier
        config = read()
        if config.cache.kv_events:
            _log.warning(
                "cache.kv_events is left out: pages come without their tokens, so no router could use what is told of them; "
                "SGLang tells of its own memory with --kv-events-config"
            )
            config = replace(config, cache=replace(config.cache, kv_events=""))
        model, version = own["model"] or storage_config.model_name, own["version"]
        identity = named_by_pages(_identity_of(model, version, digests=config.models_directory.expanduser() / "digests.json"))
        self.counters = Counters()
        self._config = storage_config

        def opened(representation: Representation) -> PrefixCache:
            cache = open_cache(config.cache, identity=identity, representation=representation, match_timeout_s=_PATIENCE_S)
            follow(read, config.cache.tiering.rules, cache)
            return cache

        self._stores = PageStores(opened)
        self._pools: dict[str, HostPool] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pools[_KV] = HostPool(_KV, mem_pool_host, self._config)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        self._pools[name] = HostPool(name, host_pool, self._config)

    def on_host_pools_registered(self) -> None:
        """Open what will be used. Raises ConfigError for settings that cannot be."""
        for pool in self._pools.values():
            self._stores.of(pool.representation())

    # v0: one flat page each, in tensors of the caller.

    @_never_raises(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self._get_flat([key], [target_location])[0]

    @_never_raises(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        return self._get_flat(keys, target_locations)

    @_never_raises(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self._set_flat([key], [value])

    @_never_raises(lambda *_, **__: False)
    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return self._set_flat(keys, values)

    @_never_raises(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return self._kv_store().has(key)

    @_never_raises(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._kv_store().leading(keys)

    # v1: KV in the host pool.

    @_never_raises(_no_pages)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._load(self._pools[_KV], keys, host_indices)

    @_never_raises(_no_pages)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._save(self._pools[_KV], keys, host_indices)

    # v2: any pool.

    @_never_raises(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Pages that are there with all that they need: those prefixes of which every pool's part is stored."""
        kv_pages = self._kv_store().leading(keys)
        hits = {_KV: kv_pages} if kv_pages else {}
        restorable = range(1, kv_pages + 1)
        lengths = list(restorable)
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # another form of the same pages: it gates nothing, and none of it is kept here
            store = self._store(self._pools[str(transfer.name)])
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                there = store.leading(keys[:kv_pages])
                possible = set(range(1, there + 1))
            else:
                window = max(1, len(transfer.keys or ()))
                present = [store.has(key) for key in keys[:kv_pages]]
                possible = {length for length in restorable if all(present[max(0, length - window) : length])}
            if possible:
                hits[transfer.name] = max(possible)
            lengths = [length for length in lengths if length in possible]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    @_never_raises(_no_transfers)
    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, self._load)

    @_never_raises(_no_transfers)
    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._each(transfers, self._save)

    def clear(self) -> bool:
        """Refuse: the store is not this engine's alone. `headstart cache rm` empties it."""
        _log.warning("the store is kept, others may use it; `headstart cache rm --all` empties it")
        return False

    def close(self) -> None:
        """Write what is queued and let go. Twice is fine."""
        self._stores.close()

    def _store(self, pool: HostPool, *, flat: bool | None = None) -> PageStore:
        return self._stores.of(pool.representation(flat=flat))

    def _kv_store(self) -> PageStore:
        """Where KV is kept by the interface that SGLang was told to use."""
        in_parts = bool((self._config.extra_config or {}).get("interface_v1", 0))
        return self._store(self._pools[_KV], flat=None if in_parts else True)

    def _get_flat(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        store = self._store(self._pools[_KV], flat=True)
        good = store.load(keys, [[bytes_of(target)] for target in targets])
        self.counters.add("pages_loaded", sum(good))
        return [target if ok else None for target, ok in zip(targets, good, strict=True)]

    def _set_flat(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> bool:
        pool = self._pools[_KV]
        if not self._writes(pool):
            return True
        pages = [value.contiguous() for value in values]  # held until they are written
        return all(self._store(pool, flat=True).save(keys, [[bytes_of(page)] for page in pages]))

    def _load(self, pool: HostPool, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        good = pool.load(self._store(pool), keys, indices)
        self.counters.add("pages_loaded", sum(good))
        return good

    def _save(self, pool: HostPool, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        if not self._writes(pool):
            return [True] * len(keys)
        stored = pool.save(self._store(pool), keys, indices)
        self.counters.add("pages_saved", sum(stored))
        return stored

    def _writes(self, pool: HostPool) -> bool:
        """Whether this rank writes: what all ranks hold alike is written by one."""
        return pool.every_rank_writes or bool(self._config.is_storage_writer)

    def _each(
        self, transfers: Sequence[PoolTransfer], act: Callable[[HostPool, Sequence[str], torch.Tensor], list[bool]]
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys, indices = transfer.keys or [], transfer.host_indices
            pool = self._pools.get(str(transfer.name))
            if pool is None or indices is None or indices.numel() != len(keys) * pool.page_tokens:
                self.counters.add("wrong_transfers")
                _log.error("pool %s: %d keys do not go with its indices", transfer.name, len(keys))
                results[transfer.name] = [False] * len(keys)
                continue
            results[transfer.name] = _no_pages(keys)  # what stands if it fails
            results[transfer.name] = _tried(partial(act, pool, keys, indices), _no_pages(keys), self.counters)
        return results


def _tried(work: Callable[[], _T], otherwise: _T, counters: Counters) -> _T:
    """One pool that fails takes no other along."""
    try:
        return work()
    except Exception:  # noqa: BLE001 - the engine's edge
        counters.add("errors")
        _log.exception("a pool's transfer failed; its pages count as missed")
        return otherwise


def _identity_of(model: str | None, version: str | None, *, digests: Path) -> Identity:
    """Return what the weights mean. Raises ConfigError where that cannot be known, ModelError for a folder that is not one."""
    folder = Path(str(model)).expanduser() if model else None
    if folder is not None and folder.is_dir():
        identity = identity_of(folder, digests=digests)
        return identity if version is None else Identity(identity.weights, identity.architecture, version=version)
    if version:
        return Identity(weights=b"version", architecture=str(model).encode(), version=version)
    raise ConfigError(
        f'{model!r} is no folder, so what its weights are cannot be known; give the folder as "model" {_WHERE}, or a "version" '
        "that changes with them",
        key="model",
    )
