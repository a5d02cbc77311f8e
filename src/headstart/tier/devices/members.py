"""Which devices there are now: opened at the start, followed while running, looked for again when they were gone.

`look` is called every few seconds by a thread of the tier's own, so that nothing here waits in a lookup or a write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

from headstart.errors import StoreError, TierUnavailable
from headstart.metrics import Counters
from headstart.tier.devices.device import Device
from headstart.tier.devices.listing import DeviceList, Entry, State, newest, read_list, settle, write_list
from headstart.tier.disk import DiskTier
from headstart.tier.disk.directory import DEVICES, MARKER
from headstart.tier.lookup_thread import Late

OPEN_S = 60.0  # how long opening waits for a device; one that takes longer joins when it is open
RETRY_S = 10.0  # how often a device that is not there is looked for
_LIST_S = 5.0
_MAX_SERIAL = 2047
_MOST_WARNINGS = 100

OpenDirectory = Callable[[Path, int], DiskTier]
Capacities = Callable[[Sequence[Path]], Sequence[int]]

log = logging.getLogger(__name__)


class Members:
    """`devices` is replaced as a whole, never changed: whoever took it goes on with what it took."""

    def __init__(
        self,
        configured: Sequence[Path],
        *,
        open_directory: OpenDirectory,
        capacities: Capacities,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.devices: tuple[Device, ...] = ()
        self.warnings: list[str] = []
        self.closed = False
        self._configured = list(dict.fromkeys(path.absolute() for path in configured))
        self._open_directory = open_directory
        self._capacities = capacities
        self._counters = counters
        self._clock = clock
        self._lock = Lock()
        self._serial = 0
        self._listed: DeviceList | None = None
        self._seen: dict[str, tuple[int, int]] = {}  # device id → time and inode of the list that was read there
        self._new: set[str] = set()  # ids that no directory had when the list was settled: those may be made
        self._opening: dict[str, Future[None]] = {}
        self._said: set[str] = set()
        self._retry_due = 0.0

    @property
    def single(self) -> bool:
        """Whether this is one directory by itself, and always was."""
        return self._listed is None

    def start(self) -> None:
        """Open every device. Raises StoreError where not one can be had."""
        devices = {path: self._device(path) for path in self._configured}
        lists = self._read_lists(devices)
        if len(devices) == 1 and not lists:
            self._start_single(devices[self._configured[0]])
            return
        for _ in range(2):  # the second time with what the devices say that only a list names
            self._listed, said = settle(self._configured, lists)
            more = {one.path: self._device(one.path) for one in self._listed.used if one.path not in devices}
            if not more:
                break
            devices |= more
            lists |= self._read_lists(more)
        assert self._listed is not None
        for sentence in said:
            self._warn(sentence)
        stored = {entry.id for one in lists.values() for entry in one.devices}
        self._new = {entry.id for entry in self._listed.devices} - stored
        used = {entry.path: entry for entry in self._listed.used}
        for path, device in devices.items():
            if path not in used:
                device.close(time.monotonic())
        self._open([(devices[path], entry) for path, entry in used.items()])
        if not self.devices:
            self.close(time.monotonic() + 1.0)
            raise TierUnavailable(f"no device of {len(used)} can be used: {'; '.join(self.warnings)}", tier="disk")
        self._publish()

    def look(self) -> None:
        """Follow the list, let go of what is gone, try what failed, look for what is missing."""
        self._follow_list()
        if self.single:
            return
        self._drop([device for device in self.devices if device.gone])
        if self._clock() < self._retry_due:
            return
        self._retry_due = self._clock() + RETRY_S
        for device in self.devices:
            if device.out:
                device.probe()
        self._find_missing()

    def mark(self, device: Device, state: State) -> None:
        """Say in the list what has become of a device."""
        self._follow_list()
        if self._listed is None:
            return
        entry = next((one for one in self._listed.devices if one.id == device.id), None)
        if entry is not None and entry.state == device.state != state:
            self._listed = self._listed.with_entry(replace(entry, state=state))
            device.state = state
            self._publish()

    def close(self, deadline: float) -> None:
        self.closed = True
        with self._lock:
            devices, self.devices = self.devices, ()
        for device in devices:  # all begin before one is waited for
            if device.tier is not None:
                device.changes.hand_over(device.tier.close)
        for device in devices:
            device.close(deadline)

    # Opening.

    def _device(self, path: Path) -> Device:
        if self._serial > _MAX_SERIAL:
            raise TierUnavailable("devices came and went too often; restart to use them again", tier="disk")
        device = Device(self._serial, path, clock=self._clock)
        self._serial += 1
        return device

    def _start_single(self, device: Device) -> None:
        device.capacity_bytes = self._capacities([device.path])[0]
        try:
            device.opened(self._open_directory(device.path, device.capacity_bytes))
        except BaseException:
            device.close(time.monotonic() + 1.0)
            raise
        self.devices = (device,)

    def _open(self, chosen: Sequence[tuple[Device, Entry]]) -> None:
        """Open devices side by side. What fails, or takes too long, is said and goes without."""
        assert self._listed is not None
        used = [entry.path for entry in self._listed.used]
        capacities = dict(zip(used, self._capacities(used), strict=True))
        futures = []
        for device, entry in chosen:
            device.id, device.state, device.capacity_bytes = entry.id, entry.state, capacities[entry.path]
            future = device.changes.hand_over(partial(self._open_one, device, entry))
            self._opening[entry.id] = future
            futures.append((device, entry, future))
        deadline = time.monotonic() + OPEN_S
        for device, entry, future in futures:
            try:
                device.changes.answer(future, patience_s=deadline - time.monotonic())
            except Late:
                self._warn(f"device {entry.path} is not open yet; the others go on without it")
                continue
            except (StoreError, OSError, ValueError) as error:
                self._warn(f"{error} (the other devices go on, and this one is tried again every {RETRY_S:.0f} s)")
                device.close(time.monotonic() + 1.0)
            self._opening.pop(entry.id, None)
        for device in self.devices:
            if device.tier is not None and capacities.get(device.path, device.capacity_bytes) != device.capacity_bytes:
                device.capacity_bytes = capacities[device.path]
                with suppress(StoreError, OSError):
                    device.change(partial(DiskTier.resize, capacity_bytes=device.capacity_bytes))

    def _open_one(self, device: Device, entry: Entry) -> None:
        """Open the directory of an entry, on the device's own thread, once it has shown that it is that device."""
        assert self._listed is not None
        if entry.id not in self._new:
            self._require_itself(entry, self._listed)
        tier = self._open_directory(entry.path, device.capacity_bytes)
        device.opened(tier)
        self._new.discard(entry.id)  # should it be gone one day, nothing is begun anew in its place
        with self._lock:
            if not self.closed:
                self.devices = tuple(sorted((*self.devices, device), key=lambda one: one.serial))
                self._said = {one for one in self._said if str(entry.path) not in one}  # it may be said again
                return
        tier.close()

    def _require_itself(self, entry: Entry, listed: DeviceList) -> None:
        if not (entry.path / MARKER).exists():
            raise TierUnavailable(
                f"there is no cache in {entry.path}, where a device of this tier lay: mount it, or remove the device",
                tier="disk",
                path=entry.path,
            )
        try:
            own = read_list(entry.path)
        except StoreError:  # rot: it is as if there were none
            own = None
        itself = own is not None and (own.set, own.this) == (listed.set, entry.id)
        if not itself and (own is not None or entry.path not in self._configured):
            raise TierUnavailable(
                f"{entry.path} does not say of itself that it is this device, so it is left alone; name it in cache.directory",
                tier="disk",
                path=entry.path,
            )

    def _find_missing(self) -> None:
        if self._listed is None or self.closed:
            return
        for entry_id, future in list(self._opening.items()):  # those that were late
            if future.done():
                del self._opening[entry_id]
        here = {device.id for device in self.devices} | self._opening.keys()
        missing = [entry for entry in self._listed.used if entry.id not in here]
        try:
            self._open([(self._device(entry.path), entry) for entry in missing])
        except TierUnavailable as error:
            self._warn(str(error))
        if any(device.id == entry.id for device in self.devices for entry in missing):
            self._publish()

    def _drop(self, devices: Sequence[Device]) -> None:
        if devices:
            with self._lock:
                self.devices = tuple(device for device in self.devices if device not in devices)
            for device in devices:
                self._counters.add("devices_lost")
                device.close(time.monotonic() + 1.0)
            self._retry_due = 0.0

    # The list.

    def _read_lists(self, devices: dict[Path, Device]) -> dict[Path, DeviceList]:
        futures = {path: device.changes.hand_over(partial(read_list, path)) for path, device in devices.items()}
        deadline = time.monotonic() + _LIST_S
        lists = {}
        for path, future in futures.items():
            try:
                found = devices[path].changes.answer(future, patience_s=deadline - time.monotonic())
            except Late:
                self._warn(f"device {path} does not answer")
            except (OSError, StoreError) as error:
                self._warn(str(error))
            else:
                if found is not None:
                    lists[path] = found
        return lists

    def _follow_list(self) -> None:
        """Take over a newer list from any device, and give it to those that have an older one."""
        found = []
        for device in self.devices:
            if device.changes.stuck:
                continue
            with suppress(OSError, Late):
                if (read := device.changes.ask(partial(self._read_changed, device), patience_s=1.0)) is not None:
                    found.append(read)
        if self._listed is not None:
            found = [one for one in found if one.set == self._listed.set]
        latest = newest([*found, *([self._listed] if self._listed is not None else [])])
        if latest is None or (self._listed is not None and latest.revision <= self._listed.revision):
            return
        if self._listed is None:
            home = latest.at(self.devices[0].path) if self.devices else None
            if home is None:
                return
            self.devices[0].id = home.id
        self._listed = latest
        self._apply()
        self._publish()

    def _read_changed(self, device: Device) -> DeviceList | None:
        try:
            facts = (device.path / DEVICES).stat()
        except FileNotFoundError:
            return None
        if self._seen.get(device.path.name + device.id) == (seen := (facts.st_mtime_ns, facts.st_ino)):
            return None
        self._seen[device.path.name + device.id] = seen
        try:
            return read_list(device.path)
        except StoreError as error:
            self._warn(str(error))
            return None

    def _apply(self) -> None:
        assert self._listed is not None
        states = {entry.id: entry.state for entry in self._listed.devices}
        for device in self.devices:
            device.state = states.get(device.id, "removed")
        removed = [device for device in self.devices if device.state == "removed"]
        with self._lock:
            self.devices = tuple(device for device in self.devices if device not in removed)
        for device in removed:
            log.warning("disk tier: device %s was removed from the tier", device.path)
            device.close(time.monotonic() + 5.0)
        self._find_missing()

    def _publish(self) -> None:
        """Write the list wherever an older one, or none, stands."""
        listed = self._listed
        assert listed is not None
        if listed.revision == 0:
            return
        for device in self.devices:
            try:
                device.change(partial(_write_newer, device, listed), patience_s=_LIST_S)
            except (OSError, StoreError):
                self._counters.add("devices_list_failed")

    def _warn(self, sentence: str) -> None:
        """Say something, once."""
        if sentence not in self._said:
            self._said.add(sentence)
            if len(self.warnings) < _MOST_WARNINGS:
                self.warnings.append(sentence)
            log.warning("disk tier: %s", sentence)


def _write_newer(device: Device, listed: DeviceList, _: DiskTier) -> None:
    try:
        there = read_list(device.path)
    except StoreError:
        there = None
    if there is None or there.set != listed.set or there.this != device.id or there.revision < listed.revision:
        write_list(device.path, replace(listed, this=device.id))
