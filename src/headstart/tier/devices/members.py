"""Which devices there are now: opened at the start, followed while running, looked for again when they were gone.

`look` is called every few seconds by a thread of the tier's own, so that nothing here waits in a lookup or a write. Whatever
may hang is done on the threads of the device that it is about.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

from headstart.errors import StoreError, TierUnavailable
from headstart.metrics import Counters
from headstart.policy.placement import Room
from headstart.tier.base import OnChange
from headstart.tier.devices.changing import enrol, mark_drained
from headstart.tier.devices.device import Device
from headstart.tier.devices.listing import DeviceList, Entry, newest, read_list, write_list
from headstart.tier.devices.rooms import PATIENCE_S, room_of
from headstart.tier.disk import DiskTier
from headstart.tier.disk.directory import DEVICES, MARKER
from headstart.tier.disk.pause import may_pass, why
from headstart.tier.lookup_thread import Late, Patience, ask_apart

OPEN_S = 60.0  # how long opening waits for a device; one that takes longer joins when it is open
OPEN_ALONE_S = 600.0  # and how long for the only one, which has shown that it answers
RETRY_S = 10.0  # how often a device that is not there is looked for
_LIST_S = 5.0
_READ_LIST_S = 1.0
_MAX_SERIAL = 2047
_MOST_WARNINGS = 100

OpenDirectory = Callable[[Path, int], DiskTier]
Capacities = Callable[[Sequence[Room]], Sequence[int]]
T = TypeVar("T")

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
        self._on_change: OnChange | None = None
        self._configured = list(dict.fromkeys(path.absolute() for path in configured))
        self._open_directory = open_directory
        self._capacities = capacities
        self._counters = counters
        self._clock = clock
        self._lock = Lock()
        self._looking = Lock()
        self._next_serial = 0
        self._listed: DeviceList | None = None
        self._seen: dict[Path, tuple[int, int]] = {}  # time and inode of the list that was read there
        self._rooms: dict[str, Room] = {}  # device id → what it lay on when it was last there
        self._late: dict[str, tuple[Device, Future[None]]] = {}  # device id → one that is being opened for too long
        self._said: set[str] = set()
        self._retry_due = 0.0
        self._not_begun = ""  # why no device could be had at the start, where it is tried again

    @property
    def single(self) -> bool:
        """Whether this is one directory by itself, always was, and was opened once: then its extents' ids are the tier's."""
        return self._listed is None and self._next_serial <= 1

    @property
    def waits_for(self) -> str:
        """Why there is no device yet; "" where there is, or was."""
        return self._not_begun

    @property
    def missing(self) -> tuple[Entry, ...]:
        """The devices that should be there and are not."""
        here = {device.id for device in self.devices}
        return () if self._listed is None else tuple(entry for entry in self._listed.used if entry.id not in here)

    def start(self, *, patient: bool) -> None:
        """Open every device. Raises StoreError, OSError or ValueError where not one can be had. `patient`: what may pass by
        itself is said, and `look` tries again."""
        try:
            self._begin(patient=patient)
        except (StoreError, OSError) as error:
            if not (patient and may_pass(error)):
                raise
            self._wait_for(error)

    def _begin(self, *, patient: bool) -> None:
        try:
            if len(self._configured) == 1 and not self._has_list(self._configured[0]):
                self._start_single(Device(self._configured[0], clock=self._clock))
                return
            self._listed, said = enrol(self._configured)
            for sentence in said:
                self._warn(sentence)
            self._open(self._listed.used)
            if not self.devices and patient:
                return  # they are looked for as those are that went
            if not self.devices:
                told = "; ".join(self.warnings)
                raise TierUnavailable(f"no device of {len(self._listed.used)} can be used: {told}", tier="disk")
            self._resize()
            self._publish()
        except BaseException:
            self._give_up_all(time.monotonic() + 1.0)
            raise

    def _begin_again(self) -> None:
        self._retry_due = self._clock() + RETRY_S
        self._late.clear()
        try:
            self._begin(patient=True)
        except (StoreError, OSError, ValueError) as error:
            self._wait_for(error)
            return
        self._not_begun = ""
        if self.devices:
            log.warning("disk tier: %s can be used now", ", ".join(str(device.path) for device in self.devices))

    def _wait_for(self, error: StoreError | OSError | ValueError) -> None:
        self._not_begun = f"it could not be opened yet ({why(error)}), and is tried again every {RETRY_S:.0f} s"
        self._retry_due = self._clock() + RETRY_S
        said = f"no disk tier yet, so prompts are forgotten with the process; it is tried again every {RETRY_S:.0f} s: {error}"
        if said not in self._said:
            self._said.add(said)
            log.warning("%s", said)

    def look(self) -> None:
        """Follow the list, let go of what is gone, try what failed, look for what is missing."""
        if not self._looking.acquire(blocking=False):
            return  # somebody is at it
        try:
            if self._not_begun:
                if self._clock() >= self._retry_due and not self.closed:
                    self._begin_again()
                return
            self._follow_list()
            self._reopen_what_may_be_written()
            if self._listed is None:
                if any(device.gone for device in self.devices):
                    self._drop(self.devices)
                    self._begin_again()
                return
            self._drop([device for device in self.devices if device.gone])
            if self._clock() < self._retry_due:
                return
            self._retry_due = self._clock() + RETRY_S
            for device in self.devices:
                if device.out:
                    device.probe()
            self._find_missing()
        finally:
            self._looking.release()

    def _reopen_what_may_be_written(self) -> None:
        """Let go of a device that could only be read when it was opened and now takes a write; it is opened anew."""
        if self._clock() < self._retry_due or not any(
            device.tier is not None and device.tier.only_read for device in self.devices
        ):
            return
        if self._listed is None:
            self._retry_due = self._clock() + RETRY_S
        for device in self.devices:
            if device.tier is None or not device.tier.only_read:
                continue
            try:
                device.change(DiskTier.probe)
            except (OSError, StoreError):
                continue
            log.warning("disk tier: %s may be written again", device.path)
            self._let_go([device])
            if self._listed is None:
                self._begin_again()

    def mark_drained(self, device: Device) -> None:
        """Say in the list that a device has been drained; `look` follows it. Raises OSError, StoreError."""
        device.change(lambda _: mark_drained(device.path))
        device.state = "drained"

    def watch(self, on_change: OnChange) -> None:
        """Have changes told of every device, those that join later too."""
        with self._lock:
            self._on_change = on_change
            for device in self.devices:
                if device.tier is not None:
                    device.tier.watch(on_change)

    def close(self, deadline: float) -> None:
        self.closed = True
        self._give_up_all(deadline)

    def _give_up_all(self, deadline: float) -> None:
        with self._lock:
            devices, self.devices = self.devices, ()
        for device in devices:  # all begin before one is waited for
            if device.tier is not None:
                device.changes.hand_over(device.tier.close)
        for device in (*devices, *(late for late, _ in self._late.values())):
            device.close(deadline)

    # Opening.

    def _has_list(self, path: Path) -> bool:
        """Whether the only directory that is configured belongs to a set. Raises TierUnavailable where it does not answer."""
        answer = ask_apart({path: partial(read_list, path)}, patience_s=_LIST_S)[path]
        if isinstance(answer, Late):
            raise _hangs(path)
        if isinstance(answer, StoreError):
            self._warn(str(answer))
        return isinstance(answer, DeviceList)

    def _start_single(self, device: Device) -> None:
        try:
            device.room = device.changes.ask(partial(room_of, device.path), patience_s=PATIENCE_S)
            device.capacity_bytes = self._capacities([device.room])[0]
            opening = partial(self._open_directory, device.path, device.capacity_bytes)
            tier = device.changes.ask(opening, patience_s=OPEN_ALONE_S, undo=DiskTier.close)
        except Late:
            device.close(time.monotonic())
            raise _hangs(device.path) from None
        except BaseException:
            device.close(time.monotonic() + 1.0)
            raise
        device.opened(tier)
        self._join(device)

    def _open(self, entries: Sequence[Entry]) -> None:
        """Open devices side by side. What fails, or takes too long, is said and goes without."""
        devices = [(entry, Device(entry.path, clock=self._clock)) for entry in entries]
        measured = self._brought(
            [(entry, device, device.changes.hand_over(partial(self._measure, device, entry))) for entry, device in devices],
            patience_s=PATIENCE_S,
        )
        shares = self._shares()
        opening = []
        for entry, device in measured:
            device.id, device.state, device.capacity_bytes = entry.id, entry.state, shares[entry.id]
            opening.append((entry, device, device.changes.hand_over(partial(self._open_one, device, entry))))
        for _, device in self._brought(opening, patience_s=OPEN_S):
            self._join(device)

    def _brought(self, asked: Sequence[tuple[Entry, Device, Future[None]]], *, patience_s: float) -> list[tuple[Entry, Device]]:
        """Wait for what devices are asked for; return those that did it. The others are said, and given up or waited for."""
        done = []
        patience = Patience(patience_s)
        for entry, device, future in asked:
            try:
                device.changes.answer(future, patience)
            except Late:
                self._warn(f"device {entry.path} does not answer yet; the others go on without it")
                self._late[entry.id] = (device, future)
            except (StoreError, OSError, ValueError) as error:
                self._give_up(device, error)
            else:
                done.append((entry, device))
        return done

    def _give_up(self, device: Device, error: BaseException | None) -> None:
        if error is not None:
            self._warn(f"{error} (the other devices go on, and this one is tried again every {RETRY_S:.0f} s)")
        device.close(time.monotonic() + 1.0)

    def _measure(self, device: Device, entry: Entry) -> None:
        self._require_itself(entry)
        self._rooms[entry.id] = room_of(entry.path)

    def _open_one(self, device: Device, entry: Entry) -> None:
        """Open the directory of an entry, on the device's own thread, once it has shown that it is that device."""
        self._require_itself(entry)
        tier = self._open_directory(entry.path, device.capacity_bytes)
        device.opened(tier)

    def _join(self, device: Device) -> None:
        """Let an open device be one of the tier's. Only now it takes a number: ids of extents begin with it, and there are not
        many."""
        with self._lock:
            joins = not self.closed and self._next_serial <= _MAX_SERIAL
            if joins:
                device.serial = self._next_serial
                self._next_serial += 1
                self.devices = (*self.devices, device)
                if self._on_change is not None and device.tier is not None:
                    device.tier.watch(self._on_change)
        if joins:
            self._tell_anew()
            self._said = {one for one in self._said if str(device.path) not in one}  # it may be said again
            return
        device.close(time.monotonic() + 1.0)
        if not self.closed:
            self._warn("devices came and went too often; restart to use them again")

    def _require_itself(self, entry: Entry) -> None:
        listed = self._listed
        assert listed is not None
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
        before = self.devices
        for entry_id, (device, future) in list(self._late.items()):
            if future.done():
                del self._late[entry_id]
                if device.tier is not None:
                    self._join(device)
                else:
                    self._give_up(device, future.exception())
        if missing := [entry for entry in self.missing if entry.id not in self._late]:
            self._open(missing)
        self._resize()
        if any(device not in before for device in self.devices):
            self._publish()

    def _drop(self, devices: Sequence[Device]) -> None:
        if devices:
            self._counters.add("devices_lost", len(devices))
            self._let_go(devices)

    def _let_go(self, devices: Sequence[Device]) -> None:
        with self._lock:
            self.devices = tuple(device for device in self.devices if device not in devices)
        for device in devices:
            device.close(time.monotonic() + 1.0)
        self._tell_anew()
        self._retry_due = 0.0

    def _tell_anew(self) -> None:
        """A device came or went, and with it more than is told block by block."""
        if self._on_change is not None:
            self._on_change(None)

    # How much each may hold.

    def _shares(self) -> dict[str, int]:
        """Return what each device may hold, by its id. One that is not there keeps what was meant for it."""
        assert self._listed is not None
        used = self._listed.used
        usual = int(statistics.fmean(room.total_bytes for room in self._rooms.values())) if self._rooms else 0
        rooms = [self._rooms.get(entry.id) or Room(-1 - number, usual) for number, entry in enumerate(used)]
        return dict(zip((entry.id for entry in used), self._capacities(rooms), strict=True))

    def _resize(self) -> None:
        """Have each device keep to its share of what all may hold."""
        shares = self._shares()
        whole_bytes = sum(shares.values())
        for device in self.devices:
            capacity_bytes = shares.get(device.id, device.capacity_bytes)
            if (device.capacity_bytes, device.whole_bytes) == (capacity_bytes, whole_bytes):
                continue
            try:
                device.change(partial(DiskTier.resize, capacity_bytes=capacity_bytes, whole_bytes=whole_bytes))
            except (StoreError, OSError):
                self._counters.add("device_failed_resize")  # it is tried again
            else:
                device.capacity_bytes, device.whole_bytes = capacity_bytes, whole_bytes

    # The list.

    def _follow_list(self) -> None:
        """Take over a newer list from any device, and give it to those that have an older one."""
        futures = {device: device.lookups.hand_over(partial(self._read_changed, device)) for device in self.devices}
        patience = Patience(_READ_LIST_S)
        found = []
        for device, future in futures.items():
            try:
                read = device.lookups.answer(future, patience)
            except (OSError, Late):
                continue
            if read is not None and (self._listed is None or read.set == self._listed.set):
                found.append(read)
        listed = self._listed
        latest = newest([*found, *([] if listed is None else [listed])])
        if latest is None or (listed is not None and latest.says_the_same(listed)):
            return
        if listed is None:
            home = latest.at(self.devices[0].path) if self.devices else None
            if home is None:
                return
            self.devices[0].id = home.id
            if (room := self.devices[0].room) is not None:
                self._rooms[home.id] = room
        self._listed = latest
        self._apply()
        self._publish()

    def _read_changed(self, device: Device) -> DeviceList | None:
        """Return the list of a device if it is another one than was last read there."""
        try:
            facts = (device.path / DEVICES).stat()
        except FileNotFoundError:
            return None
        if self._seen.get(device.path) == (seen := (facts.st_mtime_ns, facts.st_ino)):
            return None
        read = None
        try:
            read = read_list(device.path)
        except StoreError as error:
            self._warn(str(error))
        self._seen[device.path] = seen
        return read

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
        if removed:
            self._tell_anew()
        self._find_missing()

    def _publish(self) -> None:
        """Write the list wherever an older one, or none, stands."""
        assert self._listed is not None
        for device in self.devices:
            try:
                device.change(partial(_write_newer, device, self._listed), patience_s=_LIST_S)
            except (OSError, StoreError):
                self._counters.add("devices_list_failed")

    def _warn(self, sentence: str) -> None:
        """Say something, once."""
        if sentence not in self._said:
            self._said.add(sentence)
            if len(self.warnings) < _MOST_WARNINGS:
                self.warnings.append(sentence)
            log.warning("disk tier: %s", sentence)


def _hangs(path: Path) -> TierUnavailable:
    return TierUnavailable(f"cache directory {path} does not answer; check its disk or mount", tier="disk", path=path)


def _write_newer(device: Device, listed: DeviceList, _: DiskTier) -> None:
    try:
        there = read_list(device.path)
    except StoreError:
        there = None
    if there is None or there.set != listed.set or there.this != device.id or there.revision < listed.revision:
        write_list(device.path, replace(listed, this=device.id))
