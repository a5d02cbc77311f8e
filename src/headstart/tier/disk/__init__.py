"""The disk tier: extents in append-only segment files, everything that changes in append-only journals."""

from headstart.tier.disk.door import Disk, RealDisk
from headstart.tier.disk.tier import DiskTier

__all__ = ["Disk", "DiskTier", "RealDisk"]
