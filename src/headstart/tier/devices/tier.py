"""Several directories as one disk tier: each a cache directory of its own, so that a device that dies costs its own blocks.

    extent id = serial of the device (11 bits) ‖ the device's own id (52 bits)

Every device is asked where blocks lie, all at once; consecutive extents of a prompt go to different devices, so that reading
one prompt adds them up (`policy.placement`). A device that fails or hangs is passed over until it answers again. With one
directory every verb is the disk tier's own, called directly; another may join while running.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Condition, Event, Thread
from typing import TypeVar

import numpy as np

from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.layout import layout_of
from headstart.block.representation import Representation
from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.tier.base import (
    DEFAULT_TERMS,
    ExtentId,
    ExtentInfo,
    Placement,
    Problem,
    RawExtent,
    ReadRange,
    Terms,
    TierStatistics,
    WriteOutcome,
)
from headstart.tier.devices.device import CHANGE_PATIENCE_S, LOOKUP_PATIENCE_S, Device
from headstart.tier.devices.drain import Drain
from headstart.tier.devices.members import Capacities, Members, OpenDirectory
from headstart.tier.devices.placer import Placer
from headstart.tier.disk import DiskTier
from headstart.tier.disk.books import Removal

LOOK_S = 2.0  # how often the list of devices and their health are looked at
LAYER_BYTES = 512 << 10  # of one extent: reads of that size are near a device's full rate, and a prompt has enough of them
CHECK_S = 120.0
CLOSE_S = 25.0
_SERIAL_SHIFT = 52

log = logging.getLogger(__name__)
T = TypeVar("T")


class DeviceTier:
    """Use `DeviceTier.open`. Safe from many threads; several processes may have the same directories open."""

    name = DiskTier.name
    trusted = False

    def __init__(self, members: Members, counters: Counters, *, look_s: float) -> None:
        self._members = members
        self._counters = counters
        self._drain = Drain(self, members)
        self._condition = Condition()
        self._writing: set[tuple[bytes, bytes, bytes]] = set()
        self._placer = Placer()
        self._next_tended = 0
        self._closed = False
        self._stop = Event()
        self._look_s = look_s
        self._thread = Thread(target=self._keep_looking, name="disk-devices", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        directories: Sequence[Path],
        *,
        open_directory: OpenDirectory,
        capacities: Capacities,
        clock: Callable[[], float] = time.monotonic,
        look_s: float = LOOK_S,
    ) -> DeviceTier:
        """Open directories as one tier, and those that were added to them by command. `open_directory` opens one with a
        capacity; `capacities` says how large each may be, given all. Raises StoreError where not one can be had; where some
        cannot, `warnings` says so."""
        if not directories:
            raise ValueError("a tier of no directory was asked for; name at least one")
        counters = Counters()
        members = Members(directories, open_directory=open_directory, capacities=capacities, counters=counters, clock=clock)
        members.start()
        return cls(members, counters, look_s=look_s)

    @property
    def warnings(self) -> list[str]:
        return list(self._members.warnings)

    @property
    def devices(self) -> tuple[Device, ...]:
        return self._members.devices

    @property
    def lanes(self) -> int:
        return sum(device.takes_writes for device in self.devices)

    def lane(self, extent: ExtentId) -> int:
        """Return which device an extent is read from: each is given threads of its own."""
        return extent >> _SERIAL_SHIFT

    def max_extent_bytes(self, representation: Representation) -> int:
        """Return the largest image that `write` takes. Short where there are several devices, so that a prompt has an extent
        for each; long enough that one layer is a good read."""
        tiers = self._tiers()
        limits = [tier.max_extent_bytes(representation) for tier in tiers]
        if not limits:
            raise self._nobody()
        if len(self.devices) == 1:
            return limits[0]
        least = layout_of(representation, representation.blocks_per_piece).extent_bytes if not representation.varies else 0
        return min(*limits, max(least, representation.layers * LAYER_BYTES))

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> Placement:
        self._require_open()
        if (only := self._only()) is not None:
            return only.locate(representation, keys)
        return self._locate(representation, keys, self.devices)

    def _locate(self, representation: bytes, keys: Sequence[bytes], devices: Sequence[Device]) -> Placement:
        extents = np.full(len(keys), -1, np.int64)
        positions = np.zeros(len(keys), np.int32)
        asked = [device for device in devices if device.answers]
        answers = self._look_up({device: lambda tier: tier.locate(representation, keys) for device in asked}, "locate")
        # Where two have a block: not from one that is about to leave, and rather from one that is not busy.
        for device in sorted(answers, key=lambda device: (device.state != "active", device.reading.under_way)):
            found = answers[device]
            take = (extents < 0) & (found.extents >= 0) & (found.extents < 1 << _SERIAL_SHIFT)
            extents[take] = found.extents[take] | device.serial << _SERIAL_SHIFT
            positions[take] = found.positions[take]
        return Placement(extents, positions)

    def info(self, extent: ExtentId) -> ExtentInfo | None:
        self._require_open()
        device, inner = self._device_of(extent)
        if device is None or device.tier is None:
            return None
        return _named(device, device.tier.info(inner))

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        self._require_open()
        if (only := self._only()) is not None:
            return only.lease(extents)
        groups = self._by_device(extents)
        work = {
            device: partial(DiskTier.lease, extents=[one for _, one in group])
            for device, group in groups.items()
            if device.answers
        }

        def undo(device: Device, kept: list[bool]) -> None:
            if device.tier is not None:
                device.tier.release([inner for (_, inner), ok in zip(groups[device], kept, strict=True) if ok])

        leased = [False] * len(extents)
        for device, kept in self._look_up(work, "lease", undo=undo).items():
            for (place, _), ok in zip(groups[device], kept, strict=True):
                leased[place] = ok
        return leased

    def release(self, extents: Sequence[ExtentId]) -> None:
        if (only := self._only()) is not None:
            return only.release(extents)
        work = {
            device: partial(DiskTier.release, extents=[one for _, one in group])
            for device, group in self._by_device(extents).items()
            if not device.gone
        }
        self._look_up(work, "release")
        return None

    def read(self, reads: Sequence[ReadRange]) -> int:
        self._require_open()
        total = 0
        for read in reads:
            device, inner = self._device_of(read.extent)
            if device is None or device.tier is None:
                raise StoreError("the extent's device is gone", reason="gone", tier=self.name, extent=read.extent)
            total += device.read(device.tier, read, inner)
        return total

    def raw(self, extent: ExtentId) -> RawExtent | None:
        device, inner = self._device_of(extent)
        if self._closed or device is None or device.tier is None or not device.answers:
            return None
        raw = device.tier.raw(inner)
        if raw is None:
            return None
        return replace(raw, extent=extent, file=_Raw(device, device.tier, raw, device.reading.begin(watched=False)))

    def let_go_raw(self, raw: RawExtent, *, bytes_read: int) -> None:
        held = raw.file
        assert isinstance(held, _Raw)
        held.device.reading.end(held.token, bytes_read)
        held.tier.let_go_raw(held.raw, bytes_read=bytes_read)

    def write(self, image: memoryview, representation: Representation, *, terms: Terms = DEFAULT_TERMS) -> WriteOutcome:
        self._require_open()
        if (device := self._only_device()) is not None and (only := device.tier) is not None:
            with device.writing.busy() as done:
                outcome = only.write(image, representation, terms=terms)
                done(image.nbytes if outcome.reason == "written" else 0)
            return outcome
        header = decode_header(image, representation)
        if image.nbytes > self.max_extent_bytes(representation):
            return self._refused("too-large")
        return self._write(image, representation, header, terms, present_on=self.devices)

    def carry_over(self, image: memoryview, representation: Representation, terms: Terms) -> list[ExtentId]:
        """Write an extent to a device that stays, unless its blocks are on such; return where they are, nothing if nobody
        takes it. It may be longer than what is written otherwise: it was written when there were other devices."""
        header = decode_header(image, representation)
        staying = [device for device in self.devices if device.state == "active"]
        if not self._write(image, representation, header, terms, present_on=staying).stored:
            return []
        found = self._locate(representation.digest, header.keys, staying).extents
        return [ExtentId(one) for one in dict.fromkeys(found.tolist())] if (found >= 0).all() else []

    def _write(
        self,
        image: memoryview,
        representation: Representation,
        header: ExtentHeader,
        terms: Terms,
        *,
        present_on: Sequence[Device],
    ) -> WriteOutcome:
        with self._writing_alone((representation.digest, header.keys[0], header.keys[-1])) as alone:
            if not alone:
                return self._refused("stopped")
            if (self._locate(representation.digest, header.keys, present_on).extents >= 0).all():
                return WriteOutcome(stored=True, reason="present")
            outcome = WriteOutcome(stored=False, reason="stopped")
            for device in self._placer.choose(self.devices, image.nbytes, parent=header.parent, last=header.keys[-1]):
                outcome = self._write_to(device, image, representation, header.keys, terms)
                if outcome.stored or outcome.reason not in ("full", "stopped", "error"):
                    break
            return outcome

    def keep(self, extents: Sequence[ExtentId], terms: Terms) -> None:
        self._require_open()
        self._change_each(extents, lambda tier, inner: tier.keep(inner, terms), "keep")

    def pin(self, extents: Sequence[ExtentId], *, until_ms: int | None) -> list[bool]:
        self._require_open()
        pinned = [False] * len(extents)
        for group, done in self._change_each(extents, lambda tier, inner: tier.pin(inner, until_ms=until_ms), "pin"):
            for (place, _), ok in zip(group, done, strict=True):
                pinned[place] = ok
        return pinned

    def unpin(self, extents: Sequence[ExtentId]) -> None:
        self._require_open()
        self._change_each(extents, lambda tier, inner: tier.unpin(inner), "unpin")

    def touch(self, extents: Sequence[ExtentId]) -> None:
        """As the door says. All devices count uses together, so that the order holds between them too."""
        self._require_open()
        if (only := self._only()) is not None:
            return only.touch(extents)
        first = max((tier.uses for tier in self._tiers()), default=0)
        uses = {extent: first + len(extents) - place for place, extent in enumerate(extents)}

        def touch(tier: DiskTier, uses: Sequence[tuple[ExtentId, int]]) -> None:
            for extent, use in reversed(uses):
                tier.count_uses_from(use - 1)
                tier.touch([extent])

        for device, group in self._by_device(extents).items():
            numbered = [(inner, uses[extents[place]]) for place, inner in group]
            self._change(device, partial(touch, uses=numbered), "touch")
        return None

    def delete(self, extents: Sequence[ExtentId], *, reason: str) -> int:
        self._require_open()
        return sum(
            done for _, done in self._change_each(extents, lambda tier, inner: tier.delete(inner, reason=reason), "delete")
        )

    def tend(self) -> bool:
        self._require_open()
        if (only := self._only()) is not None:
            return only.tend()
        devices = [device for device in self.devices if device.answers and not device.changes.stuck]
        if not devices:
            return False
        self._next_tended += 1
        device = devices[self._next_tended % len(devices)]
        more = bool(self._change(device, lambda tier: tier.tend(), "tend"))
        return self._drain.step() or more

    def refresh(self) -> None:
        """Take over what other processes did to the directories."""
        if (only := self._only()) is not None:
            return only.refresh()
        self._look_up({device: lambda tier: tier.refresh() for device in self.devices if device.answers}, "refresh")
        return None

    def look(self) -> None:
        """Look after the devices now: the list, what is gone, what is back. Done every few seconds anyway."""
        self._members.look()

    def scan(self) -> Iterator[ExtentInfo]:
        self._require_open()
        there = [(device, device.tier.scan()) for device in self.devices if device.tier is not None and device.answers]
        return chain.from_iterable((info for one in found if (info := _named(device, one))) for device, found in there)

    def removals(self) -> list[Removal]:
        """Return the latest removals that are remembered, oldest first."""
        return sorted(chain.from_iterable(tier.removals() for tier in self._tiers()), key=lambda removal: removal.time_ms)

    def representation(self, digest: bytes) -> Representation | None:
        """Return the representation of which extents are or were here."""
        found = (tier.representation(digest) for tier in self._tiers())
        return next((one for one in found if one is not None), None)

    def statistics(self) -> TierStatistics:
        if (only := self._only()) is not None:
            return only.statistics()
        each = tuple(_statistics(device) for device in self.devices)
        counters = Counter(self._counters.snapshot())
        classes: Counter[str] = Counter()
        tenants: Counter[str] = Counter()
        for one in each:
            counters.update(one.counters)
            classes.update(one.live_bytes_by_class)
            tenants.update(one.live_bytes_by_tenant)
        paused = [one.paused for one in each]
        return TierStatistics(
            name=self.name,
            capacity_bytes=sum(one.capacity_bytes for one in each),
            allocated_bytes=sum(one.allocated_bytes for one in each),
            live_bytes=sum(one.live_bytes for one in each),
            extents=sum(one.extents for one in each),
            blocks=sum(one.blocks for one in each),
            counters=dict(counters),
            written_day_bytes=sum(one.written_day_bytes for one in each),
            paused=next((why for why in paused if why), "") if all(paused) else "",
            live_bytes_by_class=dict(classes),
            live_bytes_by_tenant=dict(tenants),
            devices=each,
        )

    def check(self) -> list[Problem]:
        self._require_open()
        if (only := self._only()) is not None:
            return only.check()
        problems = []
        for device in self.devices:
            try:
                problems += device.change(lambda tier: tier.check(), patience_s=CHECK_S)
            except (StoreError, OSError) as error:
                problems.append(Problem(str(device.path), str(error)))
        return problems

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._members.close(time.monotonic() + CLOSE_S)
        self._thread.join(1.0)  # it may be waiting for a device that hangs

    def __repr__(self) -> str:
        return f"<DeviceTier of {', '.join(map(repr, self.devices)) or 'no device'}>"

    # Devices.

    def _only_device(self) -> Device | None:
        devices = self._members.devices
        return devices[0] if len(devices) == 1 and self._members.single else None

    def _only(self) -> DiskTier | None:
        """Return the disk tier where there is one directory by itself: nothing is added to what it does."""
        device = self._only_device()
        return None if device is None else device.tier

    def _tiers(self) -> list[DiskTier]:
        return [device.tier for device in self.devices if device.tier is not None and not device.gone]

    def _device_of(self, extent: ExtentId) -> tuple[Device | None, ExtentId]:
        serial = extent >> _SERIAL_SHIFT
        device = next((device for device in self.devices if device.serial == serial), None)
        return device, ExtentId(extent & ((1 << _SERIAL_SHIFT) - 1))

    def _by_device(self, extents: Sequence[ExtentId]) -> dict[Device, list[tuple[int, ExtentId]]]:
        """Return (place in `extents`, the device's own id) by device."""
        groups: dict[Device, list[tuple[int, ExtentId]]] = {}
        for place, extent in enumerate(extents):
            device, inner = self._device_of(extent)
            if device is not None:
                groups.setdefault(device, []).append((place, inner))
        return groups

    def _look_up(
        self,
        work: Mapping[Device, Callable[[DiskTier], T]],
        verb: str,
        *,
        undo: Callable[[Device, T], None] | None = None,
    ) -> dict[Device, T]:
        """Ask devices side by side; return what those said that did not fail and were not late."""
        futures: dict[Device, Future[T]] = {device: device.look_up(ask) for device, ask in work.items()}
        deadline = time.monotonic() + LOOKUP_PATIENCE_S
        answers: dict[Device, T] = {}
        for device, future in futures.items():
            late = None if undo is None else partial(undo, device)
            with self._counted(device, verb):
                answers[device] = device.answer_of(future, deadline=deadline, undo=late)
        return answers

    def _change(self, device: Device, work: Callable[[DiskTier], T], verb: str) -> T | None:
        with self._counted(device, verb):
            return device.change(work)
        return None

    def _change_each(
        self, extents: Sequence[ExtentId], work: Callable[[DiskTier, list[ExtentId]], T], verb: str
    ) -> list[tuple[list[tuple[int, ExtentId]], T]]:
        """Have a verb done by the devices that have the extents, one after the other; return what each said of its group."""
        if (only := self._only()) is not None:
            return [(list(enumerate(extents)), work(only, list(extents)))]
        done = []
        for device, group in self._by_device(extents).items():
            with self._counted(device, verb):
                done.append((group, device.change(partial(_with, work, [inner for _, inner in group]))))
        return done

    @contextmanager
    def _counted(self, device: Device, verb: str) -> Iterator[None]:
        """A device that fails costs what it has, and a counter."""
        try:
            yield
        except (StoreError, OSError) as error:
            self._counters.add(f"device_failed_{verb}")
            log.debug("disk tier: device %s failed in %s: %s", device.path, verb, error)

    # Writing.

    def _write_to(
        self,
        device: Device,
        image: memoryview,
        representation: Representation,
        keys: Sequence[bytes],
        terms: Terms,
    ) -> WriteOutcome:
        uses = max((tier.uses for tier in self._tiers()), default=0)

        def write(tier: DiskTier) -> WriteOutcome:
            tier.count_uses_from(uses)
            with device.writing.busy() as done:
                outcome = tier.write(image, representation, terms=terms)
                done(image.nbytes if outcome.reason == "written" else 0)
            return outcome

        def undo(outcome: WriteOutcome) -> None:
            # Its image was given to somebody else meanwhile, so what lies there may be anything (the checks would tell).
            if outcome.reason == "written" and device.tier is not None:
                found = device.tier.locate(representation.digest, keys).extents
                with suppress(StoreError, OSError):
                    device.tier.delete([ExtentId(one) for one in set(found.tolist()) if one >= 0], reason="corrupt")

        try:
            outcome = device.change(write, patience_s=CHANGE_PATIENCE_S, undo=undo)
        except (StoreError, OSError) as error:
            if isinstance(error, StoreError) and error.facts.get("reason") not in ("hangs", "gone", "closed"):
                raise
            self._counters.add("device_failed_write")
            outcome = WriteOutcome(stored=False, reason="error")
        if not outcome.stored and outcome.reason in ("stopped", "error"):
            device.refuse()
        return outcome

    @contextmanager
    def _writing_alone(self, what: tuple[bytes, bytes, bytes]) -> Iterator[bool]:
        """Be the only thread that writes this run: each device alone would store it once, but two could both."""
        with self._condition:
            alone = self._condition.wait_for(lambda: what not in self._writing, CHANGE_PATIENCE_S)
            if alone:
                self._writing.add(what)
        try:
            yield alone
        finally:
            if alone:
                with self._condition:
                    self._writing.discard(what)
                    self._condition.notify_all()

    def _refused(self, reason: str) -> WriteOutcome:
        self._counters.add(f"write_failed_{reason}")
        return WriteOutcome(stored=False, reason=reason)

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError("the disk tier is closed", reason="closed", tier=self.name)

    def _nobody(self) -> StoreError:
        return StoreError("no device of the disk tier is there", reason="gone", tier=self.name)

    def _keep_looking(self) -> None:
        while not self._stop.wait(self._look_s):
            try:
                self._members.look()
            except Exception:  # the thread's outer edge: devices must still be looked after
                self._counters.add("look_errors")
                log.exception("disk tier: looking after the devices failed unexpectedly")


@dataclass(frozen=True, slots=True)
class _Raw:
    """What the tier keeps with an extent that is read straight from its file."""

    device: Device
    tier: DiskTier
    raw: RawExtent
    token: object


def _with(work: Callable[[DiskTier, list[ExtentId]], T], extents: list[ExtentId], tier: DiskTier) -> T:
    return work(tier, extents)


def _named(device: Device, info: ExtentInfo | None) -> ExtentInfo | None:
    """Return what a device says of an extent, under the name that it has in the tier."""
    if info is None:
        return None
    return replace(info, id=ExtentId(info.id | device.serial << _SERIAL_SHIFT))


def _statistics(device: Device) -> TierStatistics:
    why = device.why_not()
    if device.tier is None:
        return TierStatistics(str(device.path), device.capacity_bytes, 0, 0, 0, 0, device.counters.snapshot(), paused=why)
    found = device.tier.statistics()
    counters = Counter(found.counters)
    counters.update(device.counters.snapshot())
    return replace(found, name=str(device.path), counters=dict(counters), paused=found.paused or why)
