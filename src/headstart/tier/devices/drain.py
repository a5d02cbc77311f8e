"""Emptying a device that is to leave: what a cache without it would still hold is carried over, the rest goes with it.

An extent is read under a lease, checked to the last byte, written to another device and only then removed; so at every moment
it is found somewhere. One process at a time does that for a device, extent by extent.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headstart.block.whole import aligned, examine
from headstart.errors import ExtentCorrupt, StoreError
from headstart.policy.placement import worth_moving
from headstart.tier.base import ExtentId, ExtentInfo, ReadRange, Terms
from headstart.tier.devices.device import Device
from headstart.tier.devices.members import Members
from headstart.tier.disk.directory import DEVICES
from headstart.tier.disk.door import RealDisk

if TYPE_CHECKING:
    from headstart.tier.devices.tier import DeviceTier

_TRIES = 3  # with an extent that is in use, or that no device takes now

log = logging.getLogger(__name__)


class Drain:
    """Carries over, one extent a `step`. For one thread."""

    def __init__(self, tier: DeviceTier, members: Members) -> None:
        self._tier = tier
        self._members = members
        self._left: dict[int, list[ExtentInfo]] = {}  # serial → what is still to be carried over, the next one last
        self._tries: dict[ExtentId, int] = {}

    def step(self) -> bool:
        """Carry one extent over; False where no device is being drained or nothing is left to carry."""
        device = next((one for one in self._members.devices if one.state == "draining" and one.answers), None)
        if device is None:
            return False
        disk = RealDisk()
        try:
            handle = disk.open(device.path / DEVICES, "write")
        except OSError:
            return False
        try:
            if not disk.lock_file(handle):  # another process is at it
                return False
            return self._step(device)
        except (StoreError, OSError) as error:
            log.warning("disk tier: carrying over from device %s failed (%s); tried again", device.path, error)
            return False
        finally:
            disk.close(handle)

    def _step(self, device: Device) -> bool:
        if device.serial not in self._left:
            self._left[device.serial] = self._plan(device)
        left = self._left[device.serial]
        while left:
            info = left.pop()
            if self._tier.info(info.id) is None:
                continue
            if not self._carry(device, info) and self._tries.setdefault(info.id, 1) < _TRIES:
                self._tries[info.id] += 1
                left.insert(0, info)
            return True
        del self._left[device.serial]
        self._tries.clear()
        extents = device.tier.statistics().extents if device.tier is not None else 0
        if extents:
            log.warning(
                "disk tier: %d extents stay on device %s: not worth their room elsewhere, or in use", extents, device.path
            )
        log.warning("disk tier: device %s is drained and can be removed", device.path)
        self._members.mark(device, "drained")
        return False

    def _plan(self, device: Device) -> list[ExtentInfo]:
        """Return what is worth carrying over: the least recently used first, so that their order stays."""
        everything = list(self._tier.scan())
        leaving = [info for info in everything if self._tier.lane(info.id) == device.serial]
        active = {one.serial for one in self._members.devices if one.state == "active"}
        staying = [info for info in everything if self._tier.lane(info.id) in active]
        room = sum(one.capacity_bytes for one in self._members.devices if one.serial in active)
        cutoff = worth_moving(
            [(info.last_used, info.extent_bytes) for info in leaving if not _promised(info)],
            [(info.last_used, info.extent_bytes) for info in staying],
            room * 9 // 10 - sum(info.extent_bytes for info in leaving if _promised(info)),
        )
        chosen = [info for info in leaving if _promised(info) or (cutoff is not None and info.last_used >= cutoff)]
        return sorted(chosen, key=lambda info: -info.last_used)

    def _carry(self, device: Device, info: ExtentInfo) -> bool:
        """Copy one extent to another device and remove it here. False where it is to be tried again."""
        representation = self._tier.representation(info.representation)
        if representation is None or self._tier.lease([info.id]) != [True]:
            return False
        try:
            image = aligned(info.extent_bytes)
            self._tier.read([ReadRange(info.id, 0, [image])])
            examine(image, representation)
        except ExtentCorrupt as error:
            log.warning("disk tier: an extent on device %s is not what was written (%s)", device.path, error)
            image = None
        finally:
            self._tier.release([info.id])
        if image is None:
            self._tier.delete([info.id], reason="corrupt")
            return True
        there = self._tier.carry_over(image, representation, Terms(info.retention, info.tenant))
        if not there:
            return False
        if info.pinned_until_ms is not None:
            self._tier.pin(there, until_ms=info.pinned_until_ms)
            self._tier.unpin([info.id])
        return self._tier.delete([info.id], reason="moved") == 1


def _promised(info: ExtentInfo) -> bool:
    return info.pinned_until_ms is not None
