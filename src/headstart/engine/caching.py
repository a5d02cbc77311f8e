"""The cache of an engine, and what is said of it: where prefixes are kept, and what is wrong with that."""

from __future__ import annotations

import logging
from dataclasses import replace

from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache.asked import capacities_of, write_budget_bytes
from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig
from headstart.policy.admission import DAY_S, keeps_new
from headstart.tier.base import TierStatistics
from headstart.tier.devices.rooms import rooms_of
from headstart.tier.disk.tier import MIN_CAPACITY_BYTES

_log = logging.getLogger(__name__)

_LEAST_PIECES = 16  # on disk; below, hardly any prompt is kept


def open_told(settings: CacheConfig, *, identity: Identity, representation: Representation) -> tuple[PrefixCache | None, str]:
    """Return the cache, or None where there is no tier, and one sentence about it; behind "; " what is wrong with it."""
    wrong: list[str] = []
    capacity, told = _disk_capacity(settings)
    if 0 < capacity < MIN_CAPACITY_BYTES:
        wrong.append(
            f"cache.capacity {told}; at least {_mib(MIN_CAPACITY_BYTES)} is needed (--cache-capacity), "
            "so there is no disk tier and prompts are forgotten with the process"
        )
        settings = replace(settings, capacity="0")
    cache = open_cache(settings, identity=identity, representation=representation)
    tiers = {tier.name: tier for tier in cache.statistics().tiers}
    piece = sum(nbytes or 0 for nbytes in representation.layer_bytes)
    if "disk" in tiers and capacity and (held := capacity // piece) < _LEAST_PIECES:
        wrong.append(
            f"cache.capacity {told} and holds {held} block{'' if held == 1 else 's'} of {_mib(piece)}: "
            "hardly any prompt will be kept"
        )
    budget = write_budget_bytes(settings, settings.directories) if "disk" in tiers else None
    writes = budget is None or keeps_new([], budget_bytes=budget, block_bytes=piece, now_s=DAY_S)
    if budget is not None and not writes:
        wrong.append(
            f"cache.write_budget is {_mib(budget)} a day, of which a prompt gets less than one block of {_mib(piece)}: "
            "nothing is stored on disk"
        )
    for sentence in wrong:  # the cache has logged its own
        _log.warning("%s", sentence)
    wrong += cache.warnings
    if not tiers:
        cache.close()
        return None, "; ".join(("off", *wrong))
    places = " and ".join(_place(tier, writes=writes) for tier in tiers.values())
    return cache, "; ".join((f"prefixes are kept {places}", *wrong))


def _place(tier: TierStatistics, *, writes: bool) -> str:
    if tier.name == "pool":
        return "in the pool"
    if tier.name == "object":
        return "in the object store"
    if tier.name != "disk":
        return f"in {tier.name}"
    if not writes:
        return "on disk where they are there already"
    return "on disk" if tier.capacity_bytes else "on disk once it can be opened"


def _disk_capacity(config: CacheConfig) -> tuple[int, str]:
    """Return the disk tier's capacity in bytes, all directories together, and in words how the setting comes to it; 0 where
    that cannot be known."""
    rooms = [room for room in rooms_of(config.directories) if room is not None]
    if not rooms:
        return 0, ""  # the cache will say what is wrong with the directories
    capacity = sum(capacities_of(config, rooms))
    sizes = {room.device: room.total_bytes for room in rooms}
    share = ""
    if config.capacity.strip().endswith("%"):
        which = "a file system" if len(sizes) == 1 else f"{len(sizes)} file systems"
        share = f"{config.capacity} of {which} of {_mib(sum(sizes.values()))} = "
    return capacity, f"is {share}{_mib(capacity)}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.4g} MiB" if nbytes >= 1 << 14 else f"{nbytes} bytes"
