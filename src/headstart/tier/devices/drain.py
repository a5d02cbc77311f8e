"""Emptying a device that is to leave: what a cache without it would still hold is carried over, the rest goes with it.

An extent is read under a lease, checked to the last byte, written to another device and only then removed; so at every moment
it is found somewhere. One process at a time does that for a device, extent by extent.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from headstart.block.whole import aligned, examine
from headstart.errors import ExtentCorrupt, StoreError
from headstart.policy.placement import worth_moving
from headstart.tier.base import ExtentId, ExtentInfo, ReadRange, Terms
from headstart.tier.devices.device import Device
from headstart.tier.devices.members import Members
from headstart.tier.devices.writing import Writing
from headstart.tier.disk import DiskTier
from headstart.tier.disk.directory import DEVICES
from headstart.tier.disk.door import Handle, RealDisk

if TYPE_CHECKING:
    from headstart.tier.devices.tier import DeviceTier

_READ_S = 15.0  # how long an extent may take to be read
_TRIES = 3  # with an extent that is in use, or that no device takes now

log = logging.getLogger(__name__)


class Drain:
    """Carries over, one extent a `step`. For one thread."""

    def __init__(self, tier: DeviceTier, members: Members, writing: Writing) -> None:
        self._tier = tier
        self._members = members
        self._writing = writing
        self._disk = RealDisk()
        self._left: dict[int, list[ExtentInfo]] = {}  # serial → what is still to be carried over, the next one last
        self._tries: dict[ExtentId, int] = {}

    def step(self) -> bool:
        """Carry one extent over; False where no device is being drained or nothing is left to carry."""
        device = next((one for one in self._members.devices if one.state == "draining" and one.answers), None)
        if device is None:
            self._left.clear()
            return False
        try:
            handle = device.change(lambda _: self._lock(device), undo=self._unlock)
        except (StoreError, OSError):
            return False
        if handle is None:  # another process is at it
            return False
        try:
            return self._step(device)
        except (StoreError, OSError) as error:
            log.warning("disk tier: draining device %s failed (%s); tried again", device.path, error)
            return False
        finally:
            device.changes.hand_over(lambda: self._unlock(handle))

    def _lock(self, device: Device) -> Handle | None:
        handle = self._disk.open(device.path / DEVICES, "write")
        try:
            if self._disk.lock_file(handle) and self._disk.facts(handle).links:
                return handle
        except BaseException:
            self._unlock(handle)
            raise
        self._unlock(handle)
        return None

    def _unlock(self, handle: Handle | None) -> None:
        if handle is not None:
            with suppress(OSError):
                self._disk.close(handle)

    def _step(self, device: Device) -> bool:
        left = self._left.get(device.serial)
        if not left:  # at the beginning, and again at the end: other processes may have written there meanwhile
            device.change(DiskTier.refresh)
            left = [info for info in self._plan(device) if self._tries.get(info.id, 0) < _TRIES]
            self._left[device.serial] = left
        while left:
            info = left.pop()
            if self._tier.info(info.id) is None:
                continue
            try:
                done = self._carry(device, info)
            except (StoreError, OSError) as error:
                log.warning("disk tier: carrying over from device %s failed (%s); tried again", device.path, error)
                done = False
            if not done:
                self._tries[info.id] = self._tries.get(info.id, 0) + 1
                if self._tries[info.id] < _TRIES:
                    left.insert(0, info)
            return True
        self._members.mark_drained(device)
        del self._left[device.serial]
        self._tries.clear()
        extents = device.tier.statistics().extents if device.tier is not None else 0
        if extents:
            log.warning(
                "disk tier: %d extents stay on device %s: not worth their room elsewhere, or in use", extents, device.path
            )
        log.warning("disk tier: device %s is drained and can be removed", device.path)
        return False

    def _plan(self, device: Device) -> list[ExtentInfo]:
        """Return what is worth carrying over: the least recently used first, so that their order stays."""
        everything = list(self._tier.scan())
        leaving = [info for info in everything if self._tier.lane(info.id) == device.serial]
        active = {one.serial for one in self._members.devices if one.state == "active"}
        staying = [info for info in everything if self._tier.lane(info.id) in active]
        room = sum(one.capacity_bytes for one in self._members.devices if one.serial in active)
        cutoff = worth_moving(
            [(info.last_used, info.extent_bytes) for info in leaving if not _pinned(info)],
            [(info.last_used, info.extent_bytes) for info in staying],
            room * 9 // 10 - sum(info.extent_bytes for info in leaving if _pinned(info)),
        )
        chosen = [info for info in leaving if _pinned(info) or (cutoff is not None and info.last_used >= cutoff)]
        return sorted(chosen, key=lambda info: -info.last_used)

    def _carry(self, device: Device, info: ExtentInfo) -> bool:
        """Copy one extent to another device and remove it here. False where it is to be tried again."""
        representation = self._tier.representation(info.representation)
        if representation is None or self._tier.lease([info.id]) != [True]:
            return False
        image = aligned(info.extent_bytes)
        try:
            device.change(lambda _: self._tier.read([ReadRange(info.id, 0, [image])]), patience_s=_READ_S)
            examine(image, representation)
        except ExtentCorrupt as error:
            log.warning("disk tier: an extent on device %s is not what was written (%s)", device.path, error)
            self._tier.delete([info.id], reason="corrupt")
            return True
        finally:
            self._tier.release([info.id])
        there = self._writing.carry_over(image, representation, Terms(info.retention, info.tenant))
        if not there:
            return False
        if _pinned(info):
            if not all(self._tier.pin(there, until_ms=info.pinned_until_ms)):
                return False  # it stays here, pinned
            self._tier.unpin([info.id])
        return self._tier.delete([info.id], reason="moved") == 1


def _pinned(info: ExtentInfo) -> bool:
    return info.pinned_until_ms is not None
