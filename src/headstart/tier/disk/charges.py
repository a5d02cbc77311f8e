"""What the file system charges for the directory, and room in it: below the capacity, and beside what is to stay free.

Everything here is called in the store's turn, and where it says so by who holds the marker's lock.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headstart.tier.disk.directory import DEVICES, MARKER, Directory
from headstart.tier.disk.door import Disk
from headstart.tier.disk.evicting import ahead_bytes, evict
from headstart.tier.disk.removal import measure

if TYPE_CHECKING:
    from headstart.tier.disk.store import Store

SEGMENT_FOLDERS_BYTES = 8192  # what the folders may take when a segment gets its name
KEPT_SHARE = 8  # such a part of the capacity is not given back to somebody else who fills the disk
_GIVE_BACK_S = 1.0  # until then space that was given back may not show yet


def survey(store: Store) -> None:
    """Measure every file and folder of the directory anew, whoever made it and whether or not a journal speaks of it; what
    somebody who died was still writing goes. The marker's lock is held. Raises OSError."""
    listing = store.directory.list()
    writing = [path for path in listing.temporary if not store.directory.remove_if_abandoned(path)]
    with store.lock:
        charged = [s for s in store.books.segments.values() if s.allocated_bytes or (s.opened and not s.gone)]
        there = [store.books.segment(name) for name in listing.segments]
    for segment in {s.number: s for s in [*charged, *there]}.values():
        measure(store, segment)
    journals = remains = 0
    for writer, generations in listing.journals.items():
        for generation in generations:
            nbytes = _charged(store.disk, store.directory.journal_path(writer, generation))
            if writer == store.writer and generation == store.upkeep.journal.generation:
                continue
            if generation == generations[-1]:
                journals += nbytes
            else:
                remains += nbytes
    for path in [*writing, store.directory.root / MARKER, store.directory.root / DEVICES]:
        remains += _charged(store.disk, path)
    store.other_journals_bytes, store.remains_bytes = journals, remains
    store.folders = {path: _charged(store.disk, path) for path in store.directory.folders()}
    store.marker.unsure = False


def charged_bytes(disk: Disk, directory: Directory) -> int:
    """Return what the file system charges for all files of a cache and their folders. Raises OSError."""
    listing = directory.list()
    paths = [directory.root / MARKER, directory.root / DEVICES, *directory.folders(), *listing.temporary]
    paths += [directory.segment_path(name) for name in listing.segments]
    paths += [directory.journal_path(writer, n) for writer, numbers in listing.journals.items() for n in numbers]
    return sum(_charged(disk, path) for path in paths)


def measure_folders(store: Store) -> None:
    """Measure the folders that all names come and go in, and those of segments that were not there before."""
    directory = store.directory
    with store.lock:
        there = directory.segment_folders(s.name for s in store.books.segments.values() if s.opened and not s.gone)
    for path in {directory.root, directory.journals, directory.segments} | (there - store.folders.keys()):
        try:
            store.folders[path] = store.disk.stat(path).allocated_bytes
        except OSError:
            store.counters.add("stat_failed")


def has_room(store: Store, needed_bytes: int) -> bool:
    """Whether so many bytes more fit without anything giving way. The marker's lock is held. Raises OSError."""
    return store.allocated_bytes + needed_bytes <= store.capacity_bytes and _short(store, needed_bytes) <= 0


def make_room(store: Store, needed_bytes: int) -> bool:
    """Evict until so many bytes more fit below the capacity and beside what is to stay free. False where they do not. The
    marker's lock is held. Raises OSError."""
    missing = store.allocated_bytes + needed_bytes + ahead_bytes(store) - store.capacity_bytes
    evicted = missing <= 0 or evict(store, missing, "capacity")
    if not evicted and (store.pauses.why or store.allocated_bytes + needed_bytes > store.capacity_bytes):
        return False
    short = _short(store, needed_bytes)
    if short <= 0:
        return True
    others = short > needed_bytes  # somebody else took of it; else it is enough to give way for what is new
    if others and store.books.live_bytes - short < store.capacity_bytes // KEPT_SHARE:
        store.pause(f"all but {gib(store.min_free_bytes)} of its file system is taken, and so much is to stay free")
    elif store.clock() >= store.give_back_due:
        evict(store, short, "min-free")
        if _short(store, needed_bytes) <= 0:
            return True
        store.give_back_due = store.clock() + _GIVE_BACK_S
    return False


def give_back(store: Store) -> bool:
    """Evict a batch where somebody else fills the disk; True while more may be due. Raises OSError."""
    spare = store.books.live_bytes - store.capacity_bytes // KEPT_SHARE
    short = min(_short(store, 0), spare)
    if short <= 0 or store.clock() < store.give_back_due:
        return False
    store.give_back_due = store.clock() + _GIVE_BACK_S  # a file system may show late what it has got back
    return evict(store, min(short, max(1, store.capacity_bytes // 64)), "min-free")


def gib(nbytes: int) -> str:
    """Return a size for people.

    >>> gib(27 << 30), gib(1 << 20)
    ('27 GiB', '0.000977 GiB')
    """
    return f"{nbytes / (1 << 30):,.3g} GiB"


def _short(store: Store, needed_bytes: int) -> int:
    """Return how much must become free before so many bytes may be taken from the file system."""
    if not store.min_free_bytes:
        return 0
    return store.min_free_bytes + needed_bytes - store.disk.space(store.directory.root).available_bytes


def _charged(disk: Disk, path: Path) -> int:
    try:
        return disk.stat(path).allocated_bytes
    except FileNotFoundError:
        return 0
