"""Asking the devices of a tier: which one has an extent, all at once or one after the other, and never longer than patience.

    extent id = serial of the device (11 bits) ‖ the device's own id (52 bits)

A device that fails or is late costs what it has, and a counter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.tier.base import ExtentId, ExtentInfo, Placement
from headstart.tier.devices.device import LOOKUP_PATIENCE_S, Device
from headstart.tier.devices.members import Members
from headstart.tier.disk import DiskTier
from headstart.tier.lookup_thread import Patience

_SERIAL_SHIFT = 52

log = logging.getLogger(__name__)
T = TypeVar("T")


class Asking:
    """Safe from many threads."""

    def __init__(self, members: Members, counters: Counters) -> None:
        self._members = members
        self._counters = counters

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._members.devices

    def only_device(self) -> Device | None:
        """Return the device where there is one directory by itself."""
        devices = self._members.devices
        return devices[0] if len(devices) == 1 and self._members.single else None

    def only(self) -> DiskTier | None:
        """Return the disk tier where there is one directory by itself: nothing is added to what it does."""
        device = self.only_device()
        return None if device is None else device.tier

    def tiers(self) -> list[DiskTier]:
        return [device.tier for device in self.devices if device.tier is not None and not device.gone]

    def uses(self) -> int:
        """Return the highest counter of uses: all devices count together, so that what is used now is the latest on each."""
        return max((tier.uses for tier in self.tiers()), default=0)

    def device_of(self, extent: ExtentId) -> tuple[Device | None, ExtentId]:
        serial = lane_of(extent)
        device = next((device for device in self.devices if device.serial == serial), None)
        return device, inner_of(extent)

    def by_device(self, extents: Sequence[ExtentId]) -> dict[Device, list[tuple[int, ExtentId]]]:
        """Return (place in `extents`, the device's own id) by device."""
        groups: dict[Device, list[tuple[int, ExtentId]]] = {}
        for place, extent in enumerate(extents):
            device, inner = self.device_of(extent)
            if device is not None:
                groups.setdefault(device, []).append((place, inner))
        return groups

    def locate(
        self,
        representation: bytes,
        keys: Sequence[bytes],
        devices: Sequence[Device],
        *,
        patience_s: float = LOOKUP_PATIENCE_S,
    ) -> Placement:
        extents = np.full(len(keys), -1, np.int64)
        positions = np.zeros(len(keys), np.int32)
        states: npt.NDArray[np.int64] | None = None
        asked = [device for device in devices if device.answers]
        work = {device: lambda tier: tier.locate(representation, keys) for device in asked}
        answers = self.look_up(work, "locate", patience_s=patience_s)
        # Where two have a block: not from one that is about to leave, and rather from one that is not busy.
        for device in sorted(answers, key=lambda device: (device.state != "active", device.reading.under_way)):
            found = answers[device]
            take = (extents < 0) & (found.extents >= 0) & (found.extents < 1 << _SERIAL_SHIFT)
            extents[take] = found.extents[take] | device.serial << _SERIAL_SHIFT
            positions[take] = found.positions[take]
            if found.states is not None:
                states = np.full(len(keys), -1, np.int64) if states is None else states
                take = (states < 0) & (found.states >= 0) & (found.states < 1 << _SERIAL_SHIFT)
                states[take] = found.states[take] | device.serial << _SERIAL_SHIFT
        return Placement(extents, positions, states)

    def look_up(
        self,
        work: Mapping[Device, Callable[[DiskTier], T]],
        verb: str,
        *,
        undo: Callable[[Device, T], None] | None = None,
        patience_s: float = LOOKUP_PATIENCE_S,
    ) -> dict[Device, T]:
        """Ask devices side by side; return what those said that did not fail and were not late."""
        futures: dict[Device, Future[T]] = {device: device.look_up(ask) for device, ask in work.items()}
        patience = Patience(patience_s)
        answers: dict[Device, T] = {}
        for device, future in futures.items():
            late = None if undo is None else partial(undo, device)
            with self._counted(device, verb):
                answers[device] = device.answer_of(future, patience, undo=late)
        return answers

    def change(self, device: Device, work: Callable[[DiskTier], T], verb: str) -> T | None:
        with self._counted(device, verb):
            return device.change(work)
        return None

    def change_each(
        self, extents: Sequence[ExtentId], work: Callable[[DiskTier, list[ExtentId]], T], verb: str
    ) -> list[tuple[list[tuple[int, ExtentId]], T]]:
        """Have a verb done by the devices that have the extents, one after the other; return what each said of its group."""
        if (only := self.only()) is not None:
            return [(list(enumerate(extents)), work(only, list(extents)))]
        done = []
        for device, group in self.by_device(extents).items():
            with self._counted(device, verb):
                done.append((group, device.change(partial(_with, work, [inner for _, inner in group]))))
        return done

    @contextmanager
    def _counted(self, device: Device, verb: str) -> Iterator[None]:
        try:
            yield
        except (StoreError, OSError) as error:
            self._counters.add(f"device_failed_{verb}")
            log.debug("disk tier: device %s failed in %s: %s", device.path, verb, error)


def lane_of(extent: ExtentId) -> int:
    return extent >> _SERIAL_SHIFT


def inner_of(extent: ExtentId) -> ExtentId:
    """Return the device's own id of an extent."""
    return ExtentId(extent & ((1 << _SERIAL_SHIFT) - 1))


def ids_of(device: Device, inner: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """As `named` for many at once."""
    return inner | device.serial << _SERIAL_SHIFT


def named(device: Device, info: ExtentInfo | None) -> ExtentInfo | None:
    """Return what a device says of an extent, under the name that it has in the tier."""
    if info is None:
        return None
    return replace(info, id=ExtentId(info.id | device.serial << _SERIAL_SHIFT))


def _with(work: Callable[[DiskTier, list[ExtentId]], T], extents: list[ExtentId], tier: DiskTier) -> T:
    return work(tier, extents)
