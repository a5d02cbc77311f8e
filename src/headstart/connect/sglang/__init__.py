"""SGLang under the store: a HiCache storage backend for `--hicache-storage-backend dynamic` (docs/engines.md).

Importing it imports SGLang."""

from headstart.connect.sglang.backend import HeadstartHiCache

__all__ = ["HeadstartHiCache"]
