"""The node's memory tier: one for all processes of a machine, and for those that come after them."""

from headstart.tier.node.tier import NodeTier, bytes_to_come, open_node_tier

__all__ = ["NodeTier", "bytes_to_come", "open_node_tier"]
