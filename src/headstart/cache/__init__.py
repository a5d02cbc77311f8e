"""The heart: match, load, save. The one door that engines and connectors use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.cache.prefix_cache import PrefixCache

__all__ = ["PrefixCache"]


def __getattr__(name: str) -> Any:
    """Import the cache when it is asked for: `headstart cache ls` needs parts of this room, and starts without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headstart.cache.prefix_cache import PrefixCache

    return PrefixCache
