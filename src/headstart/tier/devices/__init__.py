"""Several directories, on as many devices as there are, as one disk tier."""

from headstart.tier.devices.changing import add_device, devices_of, drain_device, remove_device
from headstart.tier.devices.listing import Entry
from headstart.tier.devices.tier import DeviceTier

__all__ = ["DeviceTier", "Entry", "add_device", "devices_of", "drain_device", "remove_device"]
