"""Several directories as one disk tier: each a cache directory of its own, so that a device that dies costs its own blocks.

Every device is asked where blocks lie, all at once; consecutive extents of a prompt go to different devices, so that reading
one prompt adds them up (`policy.placement`). A device that fails or hangs is passed over until it answers again. With one
directory every verb is the disk tier's own, called directly; another may join while running.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event, Lock, Thread

from headstart.block.checks import PLAIN
from headstart.block.layout import layout_of
from headstart.block.representation import Representation
from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.policy.retention import Retention
from headstart.tier.base import (
    DEFAULT_TERMS,
    ExtentId,
    ExtentInfo,
    Gone,
    OnChange,
    Placement,
    Problem,
    RawExtents,
    ReadRange,
    Shape,
    Terms,
    TierStatistics,
    WriteOutcome,
)
from headstart.tier.devices.asking import Asking, ids_of, inner_of, lane_of, named
from headstart.tier.devices.device import Device
from headstart.tier.devices.drain import Drain
from headstart.tier.devices.listing import name_of
from headstart.tier.devices.members import Capacities, Members, OpenDirectory
from headstart.tier.devices.writing import Writing
from headstart.tier.disk import DiskTier
from headstart.tier.disk.books import Removal
from headstart.tier.surveying import Survey

LOOK_S = 2.0  # how often the list of devices and their health are looked at
LAYER_BYTES = 512 << 10  # of one extent: reads of that size are near a device's full rate, and a prompt has enough of them
CHECK_S = 120.0
CLOSE_S = 25.0

log = logging.getLogger(__name__)


class DeviceTier:
    """Use `DeviceTier.open`. Safe from many threads; several processes may have the same directories open."""

    name = DiskTier.name
    trusted = False
    sealing = PLAIN
    in_memory = False

    def __init__(self, members: Members, counters: Counters, *, look_s: float, retention: Retention | None = None) -> None:
        self._members = members
        self._retention = retention
        self._counters = counters
        self._asking = Asking(members, counters)
        self._writing = Writing(self._asking, counters)
        self._drain = Drain(self, members, self._writing)
        self._next_tended = 0
        self._counted: dict[int, dict[str, int]] = {}  # by a device's serial, as last seen: counters stay when it goes
        self._counting = Lock()
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
        patient: bool = False,
        retention: Retention | None = None,
    ) -> DeviceTier:
        """Open directories as one tier, and those that were added to them by command. `open_directory` opens one with a
        capacity; `capacities` says how large each may be, given the file systems of all. Raises StoreError, OSError or
        ValueError where not one can be had; where some cannot, `warnings` says so.

        `patient`: for a reason that may pass (a full disk, a read-only mount, another process in the way) nothing is raised,
        and the tier has no device until one can be had. `retention`: what the directories are opened with, for `limit`."""
        if not directories:
            raise ValueError("a tier of no directory was asked for; name at least one")
        counters = Counters()
        members = Members(directories, open_directory=open_directory, capacities=capacities, counters=counters, clock=clock)
        members.start(patient=patient)
        return cls(members, counters, look_s=look_s, retention=retention)

    def limit(self, quotas: Mapping[str, str]) -> None:
        if self._retention is not None:
            self._retention.limit(quotas)

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
        return lane_of(extent)

    def max_extent_bytes(self, representation: Representation, *, state_bytes: int = 0) -> int:
        """Return the largest image that `write` takes. Short where there are several devices, so that a prompt has an extent
        for each; long enough that one layer is a good read. A boundary state comes on top: it cannot be cut."""
        limits = [tier.max_extent_bytes(representation) for tier in self._asking.tiers()]
        if not limits:
            raise StoreError("no device of the disk tier is there", reason="gone", tier=self.name)
        if len(self.devices) == 1:
            return limits[0]
        least = layout_of(representation, representation.blocks_per_piece).extent_bytes if not representation.varies else 0
        return min(*limits, max(least, representation.layers * LAYER_BYTES) + state_bytes)

    def locate(self, representation: bytes, keys: Sequence[bytes]) -> Placement:
        self._require_open()
        if (only := self._asking.only()) is not None:
            return only.locate(representation, keys)
        return self._asking.locate(representation, keys, self.devices)

    def info(self, extent: ExtentId) -> ExtentInfo | None:
        self._require_open()
        device, inner = self._asking.device_of(extent)
        if device is None or device.tier is None:
            return None
        return named(device, device.tier.info(inner))

    def shape(self, extent: ExtentId) -> Shape | None:
        self._require_open()
        device, inner = self._asking.device_of(extent)
        return None if device is None or device.tier is None else device.tier.shape(inner)

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        self._require_open()
        if (only := self._asking.only()) is not None:
            return only.lease(extents)
        groups = self._asking.by_device(extents)
        work = {
            device: partial(DiskTier.lease, extents=[one for _, one in group])
            for device, group in groups.items()
            if device.answers
        }

        def undo(device: Device, kept: list[bool]) -> None:
            if device.tier is not None:
                device.tier.release([inner for (_, inner), ok in zip(groups[device], kept, strict=True) if ok])

        leased = [False] * len(extents)
        for device, kept in self._asking.look_up(work, "lease", undo=undo).items():
            for (place, _), ok in zip(groups[device], kept, strict=True):
                leased[place] = ok
        return leased

    def release(self, extents: Sequence[ExtentId]) -> None:
        if (only := self._asking.only()) is not None:
            return only.release(extents)
        work = {
            device: partial(DiskTier.release, extents=[one for _, one in group])
            for device, group in self._asking.by_device(extents).items()
            if not device.gone
        }
        self._asking.look_up(work, "release")
        return None

    def read(self, reads: Sequence[ReadRange]) -> int:
        self._require_open()
        total = 0
        for read in reads:
            device, inner = self._asking.device_of(read.extent)
            if device is None or device.tier is None:
                raise StoreError("the extent's device is gone", reason="gone", tier=self.name, extent=read.extent)
            total += device.read(device.tier, read, inner)
        return total

    def raw(self, extents: Sequence[ExtentId]) -> RawExtents | None:
        device, _ = self._asking.device_of(extents[0])
        if self._closed or device is None or device.tier is None or not device.answers:
            return None
        raw = device.tier.raw([inner_of(extent) for extent in extents])
        if raw is None:
            return None
        return replace(raw, files=_Raw(device, device.tier, raw, device.reading.begin(watched=False)))

    def let_go_raw(self, raw: RawExtents, *, bytes_read: int) -> None:
        held = raw.files
        assert isinstance(held, _Raw)
        held.device.reading.end(held.token, bytes_read)
        held.tier.let_go_raw(held.raw, bytes_read=bytes_read)

    def write(self, image: memoryview, representation: Representation, *, terms: Terms = DEFAULT_TERMS) -> WriteOutcome:
        self._require_open()
        device = self._asking.only_device()
        if device is None or device.tier is None:
            return self._writing.write(image, representation, terms, limit_of=partial(self.max_extent_bytes, representation))
        with device.writing.busy() as done:
            outcome = device.tier.write(image, representation, terms=terms)
            done(image.nbytes if outcome.reason == "written" else 0)
        return outcome

    def keep(self, extents: Sequence[ExtentId], terms: Terms) -> None:
        self._require_open()
        self._asking.change_each(extents, lambda tier, inner: tier.keep(inner, terms), "keep")

    def pin(self, extents: Sequence[ExtentId], *, until_ms: int | None) -> list[bool]:
        self._require_open()
        pinned = [False] * len(extents)
        for group, done in self._asking.change_each(extents, lambda tier, inner: tier.pin(inner, until_ms=until_ms), "pin"):
            for (place, _), ok in zip(group, done, strict=True):
                pinned[place] = ok
        return pinned

    def unpin(self, extents: Sequence[ExtentId]) -> None:
        self._require_open()
        self._asking.change_each(extents, lambda tier, inner: tier.unpin(inner), "unpin")

    def touch(self, extents: Sequence[ExtentId]) -> None:
        """As the door says. All devices count uses together, so that the order holds between them too."""
        self._require_open()
        if (only := self._asking.only()) is not None:
            return only.touch(extents)
        first = self._asking.uses()
        uses = {extent: first + len(extents) - place for place, extent in enumerate(extents)}

        def touch(tier: DiskTier, uses: Sequence[tuple[ExtentId, int]]) -> None:
            for extent, use in reversed(uses):
                tier.count_uses_from(use - 1)
                tier.touch([extent])

        for device, group in self._asking.by_device(extents).items():
            numbered = [(inner, uses[extents[place]]) for place, inner in group]
            self._asking.change(device, partial(touch, uses=numbered), "touch")
        return None

    @contextmanager
    def moving(self) -> Iterator[bool]:
        """Keep other processes from moving extents to another tier, as the first device that answers knows."""
        tiers = self._asking.tiers()
        with tiers[0].moving() if tiers else nullcontext(False) as mine:
            yield mine

    def delete(self, extents: Sequence[ExtentId], *, reason: str) -> int:
        self._require_open()
        deleted = self._asking.change_each(extents, lambda tier, inner: tier.delete(inner, reason=reason), "delete")
        return sum(count for _, count in deleted)

    def tend(self) -> bool:
        self._require_open()
        if (only := self._asking.only()) is not None:
            return only.tend()
        more = False
        for _ in self.devices:  # until one has something to do
            self._next_tended += 1
            device = self.devices[self._next_tended % len(self.devices)]
            if device.answers and not device.changes.stuck:
                more = bool(self._asking.change(device, DiskTier.tend, "tend"))
            if more:
                break
        return self._drain.step() or more

    def watch(self, on_change: OnChange) -> None:
        self._members.watch(on_change)

    def refresh(self) -> None:
        """Take over what other processes did to the directories."""
        if (only := self._asking.only()) is not None:
            return only.refresh()
        self._asking.look_up({device: DiskTier.refresh for device in self.devices if device.answers}, "refresh")
        return None

    def look(self) -> None:
        """Look after the devices now: the list, what is gone, what is back. Done every few seconds anyway."""
        self._members.look()

    def scan(self) -> Iterator[ExtentInfo]:
        self._require_open()
        there = [(device, device.tier.scan()) for device in self.devices if device.tier is not None and device.answers]
        return chain.from_iterable((info for one in found if (info := named(device, one))) for device, found in there)

    def survey(self) -> Iterator[Survey]:
        self._require_open()
        for device in self.devices:
            if device.tier is not None and device.answers:
                for found in device.tier.survey():
                    yield replace(found, ids=ids_of(device, found.ids))

    def removals(self) -> list[Removal]:
        """Return the latest removals that are remembered, oldest first."""
        removals = chain.from_iterable(tier.removals() for tier in self._asking.tiers())
        return sorted(removals, key=lambda removal: removal.time_ms)

    def removed(self, representation: bytes, keys: Sequence[bytes], *, before_ms: int) -> list[Gone | None]:
        """As the door says; of several devices, what went last."""
        gone: list[Gone | None] = [None] * len(keys)
        asked = [device for device in self.devices if device.answers]
        work = {
            device: partial(DiskTier.removed, representation=representation, keys=keys, before_ms=before_ms) for device in asked
        }
        for found in self._asking.look_up(work, "removed").values():
            gone = [
                max(filter(None, pair), key=lambda one: one.time_ms, default=None) for pair in zip(gone, found, strict=True)
            ]
        return gone

    def representations(self) -> list[bytes]:
        return list(dict.fromkeys(chain.from_iterable(tier.representations() for tier in self._asking.tiers())))

    def representation(self, digest: bytes) -> Representation | None:
        """Return the representation of which extents are or were here."""
        found = (tier.representation(digest) for tier in self._asking.tiers())
        return next((one for one in found if one is not None), None)

    def statistics(self) -> TierStatistics:
        if (only := self._asking.only()) is not None:
            return only.statistics()
        counters = Counter(self._counters.snapshot())
        with self._counting:
            devices = self.devices
            each = tuple(map(_statistics, devices))
            self._counted |= {device.serial: one.counters for device, one in zip(devices, each, strict=True)}
            for counted in self._counted.values():
                counters.update(counted)
        each += tuple(TierStatistics(name_of(one.id), 0, 0, 0, 0, 0, {}, paused="not there") for one in self._members.missing)
        classes: Counter[str] = Counter()
        tenants: Counter[str] = Counter()
        for one in each:
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
            paused=(next((why for why in paused if why), "") if all(paused) else "") or self._members.waits_for,
            live_bytes_by_class=dict(classes),
            live_bytes_by_tenant=dict(tenants),
            devices=each,
        )

    def check(self) -> list[Problem]:
        self._require_open()
        if (only := self._asking.only()) is not None:
            return only.check()
        problems = []
        for device in self.devices:
            try:
                problems += device.change(DiskTier.check, patience_s=CHECK_S)
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

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError("the disk tier is closed", reason="closed", tier=self.name)

    def _keep_looking(self) -> None:
        while not self._stop.wait(self._look_s):
            try:
                self._members.look()
            except Exception:  # the thread's outer edge: devices must still be looked after
                self._counters.add("look_errors")
                log.exception("disk tier: looking after the devices failed unexpectedly")


@dataclass(frozen=True, slots=True)
class _Raw:
    """What the tier keeps with extents that are read straight from their files."""

    device: Device
    tier: DiskTier
    raw: RawExtents
    token: object


def _statistics(device: Device) -> TierStatistics:
    why = device.why_not()
    assert device.tier is not None, "only what is open is a device of the tier"
    found = device.tier.statistics()
    counters = Counter(found.counters)
    counters.update(device.counters.snapshot())
    return replace(found, name=name_of(device.id), counters=dict(counters), paused=found.paused or why)
