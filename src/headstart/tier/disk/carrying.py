"""Extents written anew, as they are, out of a file that is to go. Nothing gives way for it.

    read, verified → new extent: bytes, journal → (sync) → old one removed, unless somebody reads it

While both exist a block is found in either, and a crash leaves both, as with joined ones (`doubles`). Called in the store's
turn by who holds the marker's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headstart.block.representation import Representation
from headstart.block.whole import aligned, examine
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.base import MOVED, ExtentId
from headstart.tier.disk.adding import add_extent
from headstart.tier.disk.doubles import carry_over
from headstart.tier.disk.durable import sync_places
from headstart.tier.disk.records import ExtentName
from headstart.tier.disk.removal import QUARANTINE, remove
from headstart.tier.disk.scrub import require_same
from headstart.tier.disk.table import Segment

if TYPE_CHECKING:
    from headstart.tier.disk.store import Store

_Place = tuple[Segment, int, int]


def carry(store: Store, extents: Sequence[ExtentId]) -> list[ExtentId]:
    """Return those of `extents` that lie elsewhere now, or were found to be corrupt and are gone. The first one that cannot be
    written anew ends it."""
    written: list[ExtentId] = []
    places: list[_Place] = []
    corrupt: list[ExtentId] = []
    try:
        for extent in extents:
            try:
                place = _write_anew(store, extent)
            except ExtentCorrupt:
                corrupt.append(extent)
                continue
            if place is None:
                break
            written.append(extent)
            places.append(place)
        # What a power loss could no longer touch must not become what was written last.
        done = remove(store, written, reason=MOVED) if sync_places(store, places) else []
        done += remove(store, corrupt, reason=QUARANTINE)
    except (OSError, StoreError):
        store.counters.add("carry_failed")
        return []
    store.counters.add(f"removed_{MOVED}", len(done) - len(corrupt))
    store.counters.add(f"quarantined_{QUARANTINE}", len(corrupt))
    store.counters.add("moved_bytes", sum(nbytes for _, _, nbytes in places))
    return done


def _write_anew(store: Store, extent: ExtentId) -> _Place | None:
    """Return where an extent lies now as well; None where it is gone, or there is no room. Raises ExtentCorrupt, OSError."""
    books = store.books
    with store.lock:
        row = books.row(extent)
        if row is None or books.leases(row):
            return None
        record, info, (segment, offset, nbytes) = books.added_record(row), books.info(row), books.place(row)
        encoded = books.representations.get(segment.representation)
    if encoded is None:
        return None
    representation = Representation.decode(encoded)
    image = aligned(nbytes)
    with store.files.held(segment) as handle:
        store.disk.read(handle, [image], offset)
    require_same(examine(image, representation), info)
    if not add_extent(store, image, representation, record, replacing=True).stored:
        return None
    target = store.appending[representation.digest, True]
    carry_over(store, [extent], ExtentName(target.name, target.end - nbytes))
    return target, target.end - nbytes, nbytes
