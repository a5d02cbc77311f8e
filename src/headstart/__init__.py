"""headstart: LLM inference that never computes the same prompt twice.

Importing this package does no work and pulls in no tensor library. The rooms are described in `docs/architecture.md`; the
two names most programs need are `headstart.cache.PrefixCache` and `headstart.config.Config`.
"""

__version__ = "0.1.0"
