"""Changing which devices there are: by command, whether or not a process runs on them, and by a process with other directories.

    gather ─▶ lock one device's marker ─▶ gather again ─▶ edit ─▶ write the next revision to every device that answers

The device that is locked is the same for everybody, so that of two changes at once none is lost. What hangs is asked with
patience: a dead device is what somebody may want to remove.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from headstart.errors import StoreError, TierUnavailable
from headstart.tier.devices.listing import (
    DeviceList,
    Entry,
    State,
    can_be_listed,
    new_entry,
    new_set,
    newest,
    read_list,
    settle,
    write_list,
)
from headstart.tier.disk.directory import DEVICES, MARKER, Directory
from headstart.tier.disk.door import RealDisk
from headstart.tier.disk.marker import Marker
from headstart.tier.lookup_thread import Late, ask_apart

T = TypeVar("T")
ASK_S = 5.0  # how long a directory is waited for
_TRIES = 8  # until the device that is locked is the one that everybody locks


@dataclass(frozen=True, slots=True)
class Gathered:
    """What directories say. `latest`: the list that counts; None where there is none."""

    latest: DeviceList | None
    lists: Mapping[Path, DeviceList]
    failed: Mapping[Path, Exception]


def devices_of(home: Path) -> tuple[Entry, ...]:
    """Return the devices of the set that the directory `home` belongs to; itself alone where it has no list. Raises OSError,
    and StoreError where its list is none or it does not answer."""
    home = home.absolute()
    latest = _gather(home).latest
    return latest.devices if latest is not None else (Entry("", home),)


def add_device(home: Path, path: Path) -> Entry:
    """Add a directory to the set of `home`, made where it is missing. Running processes begin to use it within seconds. What
    it holds already is kept. Raises NotThere where `home` is no cache, TierUnavailable."""
    home, path = home.absolute(), path.absolute()
    if not can_be_listed(path) or not can_be_listed(home):
        raise TierUnavailable(f"{path!r} or {home!r} has a name that cannot be printed; rename it", tier="disk", path=path)
    _one(home, Directory(RealDisk(), home).require)

    def edit(listed: DeviceList) -> DeviceList:
        known, theirs = listed.at(path), _one(path, partial(read_list, path))
        if theirs is not None and theirs.set != listed.set:
            raise TierUnavailable(f"{path} belongs to another set of devices; remove it there first", tier="disk", path=path)
        if known is not None and known.state == "active" and theirs is not None:
            return listed
        _one(path, Directory(RealDisk(), path).prepare)
        return listed.with_entry(Entry(theirs.this, path) if theirs is not None else new_entry(path))

    return _entry(_change(home, edit), path)


def drain_device(home: Path, path: Path) -> Entry:
    """Let nothing new go to a device and have what is worth it carried over to the others. Raises TierUnavailable."""
    return _put(home, path, "draining", unless=("draining", "drained"))


def mark_drained(path: Path) -> Entry:
    """Say that a device has been drained, unless somebody has decided otherwise meanwhile. Raises TierUnavailable."""
    return _put(path, path, "drained", unless=("active", "drained", "removed"))


def remove_device(home: Path, path: Path, *, even_if_not_drained: bool = False) -> Entry:
    """Take a device out of its set; its files stay, as a cache directory of their own. Raises TierUnavailable where it was not
    drained, unless it is certain that it is no longer there."""

    def may_go(known: Entry) -> None:
        if known.state in ("drained", "removed") or even_if_not_drained:
            return
        there = ask_apart({known.path: (known.path / MARKER).exists}, patience_s=ASK_S)[known.path]
        if there is not False:
            raise TierUnavailable(
                f"{known.path} has not been drained; drain it first, or say that its blocks may go",
                tier="disk",
                path=known.path,
            )

    entry = _put(home, path, "removed", require=may_go)
    with suppress(OSError, StoreError):
        _one(entry.path, (entry.path / DEVICES).unlink)
    return entry


def enrol(configured: Sequence[Path]) -> tuple[DeviceList, list[str]]:
    """Return the list that a process goes by that is configured with several directories, or with one that has a list: written
    down where configuration adds to it, directories that are new being made. Also sentences about what went otherwise. Raises
    TierUnavailable where not one directory can be used."""
    found = _lists(configured)
    home = next((path for path in configured if path in found.lists), None)
    said: list[str] = []

    def edit(listed: DeviceList) -> DeviceList:
        nonlocal said
        all_found = _lists([*configured, *(one.path for one in listed.used)])
        said = [_told(path, error) for path, error in all_found.failed.items()]
        settled, more = settle(configured, all_found.lists)
        stored = {one.id for each in all_found.lists.values() for one in each.devices}
        new = [one for one in settled.devices if one.id not in stored]
        made = ask_apart({one: Directory(RealDisk(), one.path).prepare for one in new}, patience_s=ASK_S)
        for one, error in made.items():
            if error is not None:
                settled = settled.without(one)
                more.append(_told(one.path, error))
        said += more
        return settled

    if home is None:
        made = ask_apart({path: Directory(RealDisk(), path).prepare for path in configured}, patience_s=ASK_S)
        home = next((path for path in configured if made[path] is None), None)
        if home is None:
            reasons = "; ".join(_told(path, error) for path, error in made.items() if error is not None)
            raise TierUnavailable(f"no device of {len(configured)} can be used: {reasons}", tier="disk")
    return _change(home, edit, strict=False), said


def _put(
    home: Path,
    path: Path,
    state: State,
    *,
    unless: Sequence[State] = (),
    require: Callable[[Entry], None] = lambda entry: None,
) -> Entry:
    """Put a device into a state, unless it is in one of others; `require` raises where that may not be."""
    home, path = home.absolute(), path.absolute()

    def edit(listed: DeviceList) -> DeviceList:
        known = _entry(listed, path)
        require(known)
        if known.state == state or known.state in unless:
            return listed
        changed = listed.with_entry(replace(known, state=state))
        if all(one.state != "active" for one in changed.used):
            raise TierUnavailable(f"{path} is the last device of its set; add another one first", tier="disk", path=path)
        return changed

    return _entry(_change(home, edit), path)


def _change(home: Path, edit: Callable[[DeviceList], DeviceList], *, strict: bool = True) -> DeviceList:
    """Have the list changed by nobody else meanwhile; returns what it is then. `edit` gets one of `home` alone, of revision 0,
    where there is none yet. `strict`: a list of `home` that cannot be read is an error, and not as good as none."""
    for _ in range(_TRIES):
        found = _gather(home, strict=strict)
        if found.latest is not None and edit(found.latest).says_the_same(found.latest):
            return found.latest
        places = _places(found, home)
        with ExitStack() as stack:
            _lock(stack, places)
            found = _gather(home, strict=strict)
            if _places(found, home) != places:
                continue
            changed = edit(found.latest or new_set().with_entry(new_entry(home)))
            if found.latest is None or not changed.says_the_same(found.latest):
                _publish(changed, silent=[path for path, error in found.failed.items() if isinstance(error, Late)])
            return changed
    raise _busy(home)


def _places(found: Gathered, home: Path) -> list[Path]:
    """Return the directories of which whoever changes the list locks the first that can be locked: the same for everybody."""
    there = [] if found.latest is None else [one for one in found.latest.used if one.path in found.lists]
    return [one.path for one in sorted(there, key=lambda one: one.id)] or [home]


def _lock(stack: ExitStack, places: Sequence[Path]) -> None:
    disk, why = RealDisk(), ""
    for place in places:
        try:
            mine = stack.enter_context(Marker(disk, Directory(disk, place)).hold(charging=False))
        except OSError as error:  # on a read-only file system, perhaps
            why = why or f"{place / MARKER} cannot be locked ({error.strerror})"
            continue
        if not mine:
            raise _busy(place)
        return
    raise TierUnavailable(f"the devices cannot be changed: {why}; check the disk", tier="disk")


def _busy(place: Path) -> TierUnavailable:
    return TierUnavailable(f"{place} is being changed by other processes for too long; try again", tier="disk", path=place)


def _publish(listed: DeviceList, *, silent: Sequence[Path]) -> None:
    """Write a list into every directory that it uses and that answers; the others learn of it from them."""
    work = {one.path: partial(_write, one, listed) for one in listed.used if one.path not in silent}
    answers = ask_apart(work, patience_s=ASK_S)
    if all(isinstance(answer, Exception) for answer in answers.values()):
        reasons = "; ".join(_told(path, error) for path, error in answers.items() if error is not None)
        raise TierUnavailable(f"no device of the set can be written to: {reasons}", tier="disk")


def _write(entry: Entry, listed: DeviceList) -> None:
    os.stat(entry.path / MARKER)  # nothing is begun anew below a mount point
    write_list(entry.path, replace(listed, this=entry.id))


def _gather(home: Path, *, strict: bool = True) -> Gathered:
    """Return what the directories of the set of `home` say. Raises OSError, StoreError where `home` itself cannot be read."""
    found = _lists([home])
    for error in found.failed.values() if strict else ():
        raise _late(home) if isinstance(error, Late) else error
    own = found.lists.get(home)
    if own is None:
        return found
    found = _lists([home, *(one.path for one in own.used)])
    same = [one for one in found.lists.values() if one.set == own.set]
    latest = newest([own, *same])
    return replace(found, latest=latest, lists={path: one for path, one in found.lists.items() if one.set == own.set})


def _lists(paths: Iterable[Path]) -> Gathered:
    answers = ask_apart({path: partial(read_list, path) for path in paths}, patience_s=ASK_S)
    lists = {path: answer for path, answer in answers.items() if isinstance(answer, DeviceList)}
    failed = {path: answer for path, answer in answers.items() if isinstance(answer, Exception)}
    return Gathered(None, lists, failed)


def _one(path: Path, work: Callable[[], T]) -> T:
    """Have something done in a directory that may hang. Raises what it raises, and TierUnavailable where it takes too long."""
    answer = ask_apart({path: work}, patience_s=ASK_S)[path]
    if isinstance(answer, Exception):
        raise _late(path) if isinstance(answer, Late) else answer
    return answer


def _entry(listed: DeviceList, path: Path) -> Entry:
    entry = listed.at(path)
    if entry is None:
        names = ", ".join(str(one.path) for one in listed.devices)
        raise TierUnavailable(f"{path} is no device of this cache; its devices are {names}", tier="disk", path=path)
    return entry


def _late(path: Path) -> TierUnavailable:
    return TierUnavailable(f"{path} does not answer; check its disk or mount", tier="disk", path=path)


def _told(path: Path, error: Exception) -> str:
    if isinstance(error, Late):
        return f"device {path} does not answer"
    return str(error) if isinstance(error, StoreError) else f"{path}: {error}"
