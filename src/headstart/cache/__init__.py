"""The heart: match, load, save. The one door that engines and connectors use."""

from headstart.cache.prefix_cache import PrefixCache

__all__ = ["PrefixCache"]
