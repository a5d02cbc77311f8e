"""Whether what is found would survive a power loss. What this process adds under durability "data" would; what others added, or
this process's predecessor did without syncing, is synced before it is called stored. Called in the store's turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headstart.errors import ExtentCorrupt
from headstart.tier.base import ExtentId
from headstart.tier.disk.table import Segment

if TYPE_CHECKING:
    from headstart.tier.disk.store import Store


def sync_found(store: Store, representation: bytes, keys: Sequence[bytes]) -> bool:
    """Sync the bytes and records of extents that hold those blocks, as far as that is not known to be done. False where one of
    them turns out to be gone. Raises OSError where it cannot be synced."""
    with store.lock:
        ids = store.books.locate(representation, keys)[0].tolist()
        if (states := store.books.states(representation, keys)) is not None:
            ids += states[-1:].tolist()
        rows = [store.books.row(ExtentId(extent)) for extent in set(ids) if extent >= 0]
        places = [store.books.place(row) for row in rows if row is not None]
    return sync_places(store, places)


def sync_places(store: Store, places: Sequence[tuple[Segment, int, int]]) -> bool:
    """The same for extents at (segment, offset, extent_bytes), whatever is found in them."""
    behind = {s.number: s for s, offset, nbytes in places if offset + nbytes > s.synced_bytes}
    if not behind:
        return True
    directory, ends = store.directory, {segment.number: segment.end for segment in behind.values()}
    for segment in behind.values():
        try:
            with store.files.held(segment) as handle:
                store.disk.sync(handle)
        except (FileNotFoundError, ExtentCorrupt):
            store.lost_segment(segment)
            return False
        store.disk.sync_directory(directory.segment_path(segment.name).parent)
    store.disk.sync_directory(directory.segments)
    store.upkeep.journal.sync()
    if not store.sync_others():
        return False
    store.disk.sync_directory(directory.journals)
    for segment in behind.values():
        segment.synced_bytes = max(segment.synced_bytes, ends[segment.number])
    return True
