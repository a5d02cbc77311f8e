"""A kit for your own tests: prompts that stay stable, engines without a model, disks that fail and crash, tier contracts."""

from headstart.testing.prefix_stable import assert_prefix_stable

__all__ = ["assert_prefix_stable"]
