"""From configuration to a cache. A tier that cannot be had is left out and said so: a broken directory never stops a server."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache.asked import capacities_of, write_budget_bytes
from headstart.cache.check_keys import sealing_of
from headstart.cache.prefix_cache import MATCH_TIMEOUT_S, PrefixCache
from headstart.config import ANY_DISK_BYTES, CacheConfig, parse_size, require_budget
from headstart.errors import HeadstartError, StoreError
from headstart.events import Publisher
from headstart.policy.retention import Retention
from headstart.policy.rule_text import parse_rules
from headstart.tier.base import Tier
from headstart.tier.devices import DeviceTier
from headstart.tier.devices.rooms import room_of
from headstart.tier.disk import DiskTier
from headstart.tier.lookup_thread import Late, ask_apart
from headstart.tier.memory import MemoryTier
from headstart.tier.node import bytes_to_come, open_node_tier
from headstart.tier.object import ObjectTier
from headstart.tier.pool import PoolTier, Timing

_POOL_PATIENCE_S = 15.0  # for a mount to answer at all

_log = logging.getLogger(__name__)


def open_cache(
    config: CacheConfig, *, identity: Identity, representation: Representation, match_timeout_s: float = MATCH_TIMEOUT_S
) -> PrefixCache:
    """Return a cache over the tiers that `config` asks for, memory first. Without any (switched off, or none could be
    opened) it is a cache that never hits. A size of 0 switches a tier off. Raises ConfigError for a size, a rule of tiers
    or a key of checks that is none, MissingExtra without what such a key needs, never for a medium: what went wrong stands in
    `warnings`, one sentence a tier, and in the log."""
    return open_caches(config, identity=identity, representations=[representation], match_timeout_s=match_timeout_s)[0]


def open_caches(
    config: CacheConfig,
    *,
    identity: Identity,
    representations: Sequence[Representation],
    match_timeout_s: float = MATCH_TIMEOUT_S,
) -> list[PrefixCache]:
    """Return a cache for each representation, all over the same tiers, as `open_cache` does for one: for whoever has to know
    what is stored of several shards. Closing one closes the tiers of all."""
    policy = parse_rules(config.tiering.rules)
    if config.enabled and (config.pool is not None or config.object_store):
        sealing_of(config)  # what is wrong with it must not end in a pool that is merely not there
    tiers: list[Tier] = []
    warnings: list[str] = []
    logged: list[str] = []  # by the tier itself
    budget_bytes: int | None = None
    if config.enabled:
        tiers += _open_memory(config, warnings)
        require_budget(config.write_budget)
        try:
            if parse_size(config.capacity, of_bytes=ANY_DISK_BYTES):
                disk = _open_disk(config)
                tiers.append(disk)
                logged = disk.warnings
                directories = [device.path for device in disk.devices] or config.directories
                budget_bytes = write_budget_bytes(config, directories)
        except (StoreError, OSError, ValueError) as error:
            warnings.append(f"no disk tier until a restart, so prompts are forgotten with the process: {error}")
    if config.enabled and config.pool is not None:
        try:
            tiers.append(open_pool(config, config.pool))
        except (StoreError, OSError, ValueError) as error:
            warnings.append(f"no pool until a restart, so prefixes are not shared: {error}")
    if config.enabled and config.object_store:
        try:
            tiers.append(open_object_store(config))
        except (HeadstartError, OSError, ValueError) as error:
            warnings.append(f"no object store until a restart, so prefixes are not shared there: {error}")
    publisher = None
    if config.enabled and config.kv_events and tiers:
        try:
            publisher = _publisher(config.kv_events)
        except OSError as error:
            warnings.append(f"no KV events: {error.strerror}; stop what listens there, or change cache.kv_events")
    for warning in warnings:
        _log.warning("%s", warning)
    caches = [
        PrefixCache(
            tiers,
            identity=identity,
            representation=one,
            load_timeout_s=config.load_timeout_s,
            match_timeout_s=match_timeout_s,
            write_budget_bytes=budget_bytes,
            warnings=[*warnings, *logged],
            publisher=publisher if number == 0 else None,
            moves=number == 0,
        )
        for number, one in enumerate(representations)
    ]
    for cache in caches:
        cache.apply_rules(policy)
    return caches


def _publisher(endpoint: str) -> Publisher:
    """Return the publisher of KV events. Raises OSError where its address is taken, ConfigError, MissingExtra."""
    publisher = Publisher(endpoint)
    _log.info("KV events at %s, what was missed of them at %s", publisher.endpoint, publisher.replay_endpoint)
    return publisher


def _open_memory(config: CacheConfig, warnings: list[str]) -> list[Tier]:
    """Return the node's memory tier, or where that is not asked for or cannot be had the process's own; at most one."""
    node_bytes, memory_bytes = parse_size(config.node_memory), parse_size(config.memory)
    if node_bytes:
        try:
            node = open_node_tier(config.node_path, capacity_bytes=node_bytes)
        except (StoreError, OSError, ValueError) as error:
            warnings.append(f"no memory tier for all processes until a restart: {error}")
        else:
            _log.info("memory tier of all processes: %s at %s", _size(node_bytes), config.node_path)
            return [node]
    if memory_bytes:
        try:
            return [MemoryTier(memory_bytes)]
        except (OSError, MemoryError, ValueError) as error:
            warnings.append(f"no memory tier of {config.memory}: {error}; change cache.memory")
    return []


def _open_disk(config: CacheConfig) -> DeviceTier:
    """Return the disk tier over all its directories. Raises StoreError, OSError, ValueError where not one can be had."""

    retention = Retention.of(config.retention, config.quotas)

    def open_directory(directory: Path, capacity_bytes: int) -> DiskTier:
        room = room_of(directory)
        min_free_bytes = parse_size(config.min_free, of_bytes=room.total_bytes)
        tier = DiskTier.open(
            directory,
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes,
            durability=config.durability,
            retention=retention,
        )
        _log.info(
            "disk tier: %s of %s at %s, keeps %s free, now %s used",
            _size(capacity_bytes),
            _size(room.total_bytes),
            directory,
            _size(min_free_bytes),
            _size(tier.statistics().allocated_bytes),
        )
        return tier

    return DeviceTier.open(
        config.directories,
        open_directory=open_directory,
        capacities=lambda rooms: capacities_of(config, rooms),
        patient=True,
        retention=retention,
    )


def open_pool(config: CacheConfig, path: Path) -> PoolTier:
    """Return the tier that many machines share. Raises StoreError, OSError, ValueError where it cannot be had."""
    size = ask_apart({path: lambda: shutil.disk_usage(path).total}, patience_s=_POOL_PATIENCE_S)[path]
    if isinstance(size, Late):
        raise StoreError(f"pool {path} does not answer; look after its mount", reason="hangs", path=path)
    if isinstance(size, FileNotFoundError):
        raise StoreError(f"pool {path} is not there; mount its file system, or make the directory", path=path)
    if isinstance(size, Exception):
        raise size
    capacity_bytes = parse_size(config.pool_capacity, of_bytes=size)
    tier = PoolTier.open(
        path,
        capacity_bytes=capacity_bytes,
        timing=Timing.where_seen_after(config.pool_visible_s),
        read_only=config.pool_read_only,
        retention=Retention.of(config.retention, config.quotas),
        sealing=sealing_of(config),
    )
    found = tier.statistics()
    _log.info(
        "pool: %s at %s, now %s of %d prefixes' runs", _size(capacity_bytes), path, _size(found.live_bytes), found.extents
    )
    return tier


def open_object_store(config: CacheConfig, *, passing: bool = False) -> ObjectTier:
    """Return the tier in a bucket. `passing`: for a command, beside a server that may be the configured collector. Raises
    HeadstartError, OSError, ValueError where it cannot be had."""
    capacity_bytes = parse_size(config.object_capacity)
    tier = ObjectTier.open_bucket(
        config.object_store,
        capacity_bytes=capacity_bytes,
        read_only=config.object_read_only,
        collects={"yes": not passing, "no": False}.get(config.object_collects),
        retention=Retention.of(config.retention, config.quotas),
        sealing=sealing_of(config),
    )
    found = tier.statistics()
    _log.info(
        "object store: %s at %s, now %s of %d prefixes' runs",
        _size(capacity_bytes),
        tier.path,
        _size(found.live_bytes),
        found.extents,
    )
    return tier


def memory_to_come(config: CacheConfig) -> int:
    """Return how much memory the memory tier may take beyond what is taken by now, for whoever plans the rest."""
    if not config.enabled:
        return 0
    node_bytes = parse_size(config.node_memory)
    return bytes_to_come(config.node_path, node_bytes) if node_bytes else parse_size(config.memory)


def _size(nbytes: int) -> str:
    """Return a size for people, in the largest of KiB, MiB and GiB of which it has one."""
    name, unit = next((one for one in (("GiB", 1 << 30), ("MiB", 1 << 20)) if nbytes >= one[1]), ("KiB", 1 << 10))
    return f"{nbytes / unit:,.4g} {name}"
