"""The object tier: extents as objects in a bucket that any number of machines share. A pool whose files are objects."""

from headstart.tier.object.bucket import Bucket
from headstart.tier.object.tier import ObjectTier

__all__ = ["Bucket", "ObjectTier"]
