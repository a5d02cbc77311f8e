"""What a configuration asks of a cache: which tiers, how large, how much written. Opens nothing, and imports little."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headstart.config import ANY_DISK_BYTES, CacheConfig, parse_size
from headstart.policy.placement import Room, split_evenly, split_total
from headstart.tier.devices.rooms import rooms_of


def tier_names(config: CacheConfig) -> tuple[str, ...]:
    """Return which tiers a configuration asks for, fastest first."""
    if not config.enabled:
        return ()
    asked = {
        "memory": parse_size(config.memory) > 0 or parse_size(config.node_memory) > 0,
        "disk": parse_size(config.capacity, of_bytes=ANY_DISK_BYTES) > 0,
        "pool": config.pool is not None,
        "object": bool(config.object_store),
    }
    return tuple(name for name, wanted in asked.items() if wanted)


def capacities_of(config: CacheConfig, rooms: Sequence[Room]) -> list[int]:
    """Return what each directory may hold by configuration, given the file systems that they lie on."""
    if config.capacity.strip().endswith("%"):
        return [parse_size(config.capacity, of_bytes=nbytes) for nbytes in split_evenly(rooms, 1.0)]
    return split_total(rooms, parse_size(config.capacity))


def write_budget_bytes(config: CacheConfig, directories: Sequence[Path]) -> int | None:
    """Return what may be written a day; None for any amount, and where no file system says how large it is."""
    if config.write_budget == "unlimited":
        return None
    sizes = {room.device: room.total_bytes for room in rooms_of(directories) if room is not None}
    return parse_size(config.write_budget, of_bytes=sum(sizes.values())) or None
