"""The pool: one directory on a file system that many machines share. Each writes files of its own, all read all."""

from headstart.tier.pool.tier import PoolTier
from headstart.tier.pool.timing import Timing

__all__ = ["PoolTier", "Timing"]
