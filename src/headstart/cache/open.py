"""From configuration to a cache. A tier that cannot be had is left out and said so: a broken directory never stops a server."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig, parse_size
from headstart.errors import StoreError
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier

_log = logging.getLogger(__name__)


def open_cache(config: CacheConfig, *, identity: Identity, representation: Representation) -> PrefixCache:
    """Return a cache over the tiers that `config` asks for, memory first. Without any (switched off, or none could be
    opened) it is a cache that never hits. A size of 0 switches a tier off. Raises ConfigError for a size that is no size,
    never for a medium: what went wrong stands in `warnings`, one sentence a tier, and in the log."""
    tiers: list[Tier] = []
    warnings: list[str] = []
    directory = config.directory.expanduser()
    memory_bytes = parse_size(config.memory) if config.enabled else 0
    if memory_bytes:
        try:
            tiers.append(MemoryTier(memory_bytes))
        except (OSError, MemoryError, ValueError) as error:
            warnings.append(f"no memory tier of {config.memory}: {error}; change cache.memory")
    if config.enabled:
        try:
            capacity_bytes = parse_size(config.capacity, of_bytes=_file_system_bytes(directory))
            if capacity_bytes:
                tiers.append(DiskTier.open(directory, capacity_bytes=capacity_bytes, durability=config.durability))
        except (StoreError, OSError, ValueError) as error:
            warnings.append(f"no disk tier, so prompts are forgotten with the process: {error}")
    for warning in warnings:
        _log.warning("%s", warning)
    return PrefixCache(
        tiers,
        identity=identity,
        representation=representation,
        load_timeout_s=config.load_timeout_s,
        warnings=warnings,
    )


def _file_system_bytes(directory: Path) -> int:
    """Return the size of the file system that `directory` is or will be on."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(there).total
