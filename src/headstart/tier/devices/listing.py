"""The list of devices: `devices.json`, the same in every directory of a set, highest revision first (docs/format.md).

Strictly read: what is not understood is refused as a whole. A path in it is only a claim: whoever uses it makes sure that the
directory there says of itself that it is that device of that set.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from headstart.errors import StoreError
from headstart.tier.disk.directory import DEVICES, Directory
from headstart.tier.disk.door import Disk, RealDisk

State = Literal["active", "draining", "drained", "removed"]
FORMAT, VERSION = "headstart devices", 1
_ID = re.compile(r"[0-9a-f]{32}")
_MAX_BYTES = 1 << 20
_MAX_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """One device of a set. `id` names it wherever it is mounted."""

    id: str
    path: Path
    state: State = "active"


@dataclass(frozen=True, slots=True)
class DeviceList:
    """What one directory says: `this` is the id of the directory itself."""

    set: str
    revision: int
    this: str
    devices: tuple[Entry, ...]

    def at(self, path: Path) -> Entry | None:
        """Return the entry whose directory is `path`."""
        return next((entry for entry in self.devices if entry.path == path), None)

    def with_entry(self, entry: Entry) -> DeviceList:
        """Return the next revision, in which `entry` stands in place of those with its id or path."""
        others = [one for one in self.devices if entry.id != one.id and entry.path != one.path]
        return replace(self, revision=self.revision + 1, devices=(*others, entry))

    def without(self, entry: Entry) -> DeviceList:
        """Return the list less one that was never written down."""
        return replace(self, devices=tuple(one for one in self.devices if one.id != entry.id))

    def says_the_same(self, other: DeviceList) -> bool:
        return replace(self, this="") == replace(other, this="")

    @property
    def used(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.devices if entry.state != "removed")

    def encode(self) -> bytes:
        devices = [{"id": one.id, "path": str(one.path), "state": one.state} for one in self.devices]
        content = {"format": FORMAT, "version": VERSION, "set": self.set, "revision": self.revision, "this": self.this}
        return (json.dumps(content | {"devices": devices}, indent=1) + "\n").encode()


def decode_list(data: bytes) -> DeviceList:
    """Return the list in `data`. Raises ValueError, with the reason, for anything that is not exactly one."""
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    found = _members(content, {"format": str, "version": int, "set": str, "revision": int, "this": str, "devices": list})
    if (found["format"], found["version"]) != (FORMAT, VERSION):
        raise ValueError(f"it is {found['format']!r} version {found['version']}, not {FORMAT!r} version {VERSION}")
    devices = tuple(_entry(one) for one in found["devices"])
    ids, paths = {one.id for one in devices}, {one.path for one in devices}
    if not 0 < found["revision"] < 1 << 53 or not 0 < len(devices) <= _MAX_DEVICES:
        raise ValueError("its revision or its number of devices is out of range")
    if len(ids) < len(devices) or len(paths) < len(devices) or found["this"] not in ids or not _ID.fullmatch(found["set"]):
        raise ValueError("it names a device twice, or not itself")
    return DeviceList(found["set"], found["revision"], found["this"], devices)


def read_list(root: Path, disk: Disk | None = None) -> DeviceList | None:
    """Return what a directory says; None where it has no list. Raises OSError, and StoreError for a list that is none."""
    disk = disk or RealDisk()
    path = root / DEVICES
    try:
        handle = disk.open(path, "read")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        data = bytearray(min(disk.facts(handle).size, _MAX_BYTES + 1))
        disk.read(handle, [memoryview(data)], 0)
    finally:
        disk.close(handle)
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError("it is too long")
        return decode_list(bytes(data))
    except ValueError as error:
        raise StoreError(
            f"{path} is no list of devices: {error}; remove it to use the directory by itself", path=path
        ) from error


def write_list(root: Path, listed: DeviceList, disk: Disk | None = None) -> None:
    """Put a list in place as a whole. Raises OSError."""
    disk = disk or RealDisk()
    temporary, handle = Directory(disk, root).create_temporary(root)
    try:
        disk.write(handle, listed.encode(), 0)
        disk.sync(handle)
        disk.rename(temporary, root / DEVICES)
    except BaseException:
        with suppress(OSError):
            disk.unlink(temporary)
        raise
    finally:
        disk.close(handle)
    disk.sync_directory(root)


def newest(lists: Iterable[DeviceList]) -> DeviceList | None:
    """Return the list that counts; of two with one revision any, but the same one for everybody."""
    return max(lists, key=lambda one: (one.revision, replace(one, this="").encode()), default=None)


def new_set() -> DeviceList:
    return DeviceList(secrets.token_hex(16), 0, "", ())


def new_entry(path: Path) -> Entry:
    return Entry(secrets.token_hex(16), path)


def settle(configured: Sequence[Path], lists: Mapping[Path, DeviceList]) -> tuple[DeviceList, list[str]]:
    """Return the list to go by, and sentences about what in the configuration it does not follow.

    Once there is a list it rules: configuration adds to it (and says where a device is mounted now), only a command removes.
    The revision is raised where the list has to be written anew. `lists`: what the directories say that could be read."""
    said: list[str] = []
    home = next((lists[path] for path in configured if path in lists), None)
    same = [one for one in lists.values() if home is not None and one.set == home.set]
    current = newest(same) or new_set()
    for path in configured:
        own, known = lists.get(path), current.at(path)
        if own is not None and own.set != current.set:
            said.append(f"{path} belongs to another set of devices and is left out; remove {path / DEVICES} to use it here")
        elif own is not None and (known is None or known.id != own.this):
            moved = next((one for one in current.devices if one.id == own.this), None)
            current = current.with_entry(replace(moved, path=path) if moved else Entry(own.this, path))
        elif known is None and not can_be_listed(path):
            said.append(f"{path!r} is left out of several devices: its name cannot be printed; give it another name")
        elif known is None:
            current = current.with_entry(new_entry(path))
        if (known := current.at(path)) is not None and known.state == "removed":
            said.append(
                f"cache.directory names {path}, which was removed by command; take it out of the configuration or add it again"
            )
    return current, said


def name_of(device_id: str) -> str:
    """Return what a device is called in metrics, where paths are not told."""
    return device_id[:8]


def can_be_listed(path: Path) -> bool:
    """Whether a path may stand in a list: absolute, and of letters that can be told in a log."""
    return path.is_absolute() and str(path).isprintable() and ".." not in path.parts


def _entry(content: Any) -> Entry:
    found = _members(content, {"id": str, "path": str, "state": str})
    path = Path(found["path"])
    if not _ID.fullmatch(found["id"]) or not can_be_listed(path):
        raise ValueError(f"{found['id']!r} at {found['path']!r} is no device")
    if found["state"] not in get_args(State):
        raise ValueError(f"a device cannot be {found['state']!r}")
    return Entry(found["id"], path, found["state"])


def _members(content: Any, wanted: Mapping[str, type]) -> dict[str, Any]:
    """Return an object that has exactly the `wanted` members."""
    if not isinstance(content, dict) or content.keys() != wanted.keys():
        raise ValueError(f"an object with {', '.join(wanted)} was expected")
    for name, kind in wanted.items():
        if type(content[name]) is not kind:
            raise ValueError(f"{name!r} is no {kind.__name__}")
    return content
