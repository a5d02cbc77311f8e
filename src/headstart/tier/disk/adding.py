"""Adding an extent: room first, then its bytes, then its record; segments are begun and sealed as they fill.

Everything here is called in the store's turn, by the only process that adds to the directory.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt
from headstart.tier.base import WriteOutcome
from headstart.tier.disk.charges import SEGMENT_FOLDERS_BYTES, has_room, make_room, measure_folders, survey
from headstart.tier.disk.door import Handle
from headstart.tier.disk.evicting import keep_within_quota
from headstart.tier.disk.records import (
    ExtentAdded,
    ExtentName,
    Record,
    RepresentationDeclared,
    SegmentName,
    SegmentSealed,
)
from headstart.tier.disk.removal import measure, measure_stale, measure_unexplained, unlink
from headstart.tier.disk.segment import SegmentHeader, segment_capacity
from headstart.tier.disk.table import Segment

if TYPE_CHECKING:
    from headstart.tier.disk.store import Store


def add_extent(
    store: Store, image: memoryview, representation: Representation, added: ExtentAdded, *, replacing: bool = False
) -> WriteOutcome:
    """Store an extent whose place is decided here. `replacing`: it is written in others' stead, so nothing gives way for it,
    it was last used when `added` says, and it lies in a file with its like, which has outlived others already. Raises OSError,
    and then it is not stored."""
    nbytes = image.nbytes
    segment = store.appending.get((representation.digest, replacing))
    if segment is not None and (segment.gone or segment.end + nbytes > segment.capacity_bytes):
        seal_segments(store, [segment])
        segment = None
    opening_bytes = _new_header(store, representation).header_bytes + SEGMENT_FOLDERS_BYTES
    needed = nbytes + store.slack_bytes + (opening_bytes if segment is None else 0)
    measure_stale(store)
    measure_folders(store)
    if store.incomplete:
        measure_unexplained(store)
    if store.marker.unsure:
        survey(store)
    if not (replacing or keep_within_quota(store, added.tenant, nbytes)):
        return store.refused("quota")
    if not (has_room(store, needed) if replacing else make_room(store, needed)):
        return store.refused("full")
    if segment is not None and segment.gone:  # evicted whole
        segment = None
        if not (has_room if replacing else make_room)(store, needed + opening_bytes):
            return store.refused("full")
    if segment is None:
        segment = _open_segment(store, _new_header(store, representation), replacing=replacing)
    offset = segment.end
    with store.lock:
        segment.end += nbytes  # whatever becomes of it: others may see a half of it, and a name is used once
    with _held(store, segment) as handle:
        try:
            store.disk.write(handle, image, offset)
            if store.sync:
                store.disk.sync(handle)
            placed = replace(
                added, extent=ExtentName(segment.name, offset), last_used=added.last_used or store.books.next_use()
            )
            store.append([placed])
        except OSError:
            with contextlib.suppress(OSError):
                store.disk.truncate(handle, offset)
            measure(store, segment)
            raise
        with store.lock:
            store.books.apply([placed], own=True)
            store.books.charge(segment, segment.allocated_bytes + nbytes)
            if store.sync:
                segment.synced_bytes = offset + nbytes
        try:
            facts = store.disk.facts(handle)
        except OSError:  # stored all the same
            store.counters.add("stat_failed")
            facts = None
    if facts is not None:
        with store.lock:
            store.books.charge(segment, facts.allocated_bytes)
    if facts is not None and facts.links == 0:
        store.lost_segment(segment)
        raise FileNotFoundError(errno.ENOENT, "the segment was removed", str(store.directory.segment_path(segment.name)))
    store.counters.add("bytes_written", nbytes)
    store.pauses.end()
    return WriteOutcome(stored=True, reason="written")


def seal_segments(store: Store, segments: Sequence[Segment]) -> None:
    """Say that nothing will be added to segments; a segment without a living extent is removed."""
    for segment in segments:
        store.appending = {name: one for name, one in store.appending.items() if one is not segment}
    sealed = [SegmentSealed(s.name, s.end) for s in segments if not s.gone and not s.sealed]
    try:
        store.append(sealed)
    except OSError:
        store.counters.add("seal_failed")  # it is said at the next open then
    with store.lock:
        store.books.apply(sealed, own=True)
    for segment in segments:
        if not segment.gone and not segment.rows:
            unlink(store, segment)


@contextmanager
def _held(store: Store, segment: Segment) -> Iterator[Handle]:
    try:
        handle = store.files.hold(segment)
    except ExtentCorrupt as error:  # its header rotted while it was closed: as if somebody had removed it
        unlink(store, segment)
        path = store.directory.segment_path(segment.name)
        raise FileNotFoundError(errno.ENOENT, str(error), str(path)) from error
    try:
        yield handle
    finally:
        store.files.let_go(segment)


def _new_header(store: Store, representation: Representation) -> SegmentHeader:
    return SegmentHeader(
        SegmentName(store.writer, store.books.next_sequence),
        segment_capacity(representation, capacity_bytes=store.capacity_bytes),
        store.now_ms(),
        representation.encode(),
        representation.digest,
    )


def _open_segment(store: Store, header: SegmentHeader, *, replacing: bool) -> Segment:
    with store.lock:
        store.books.next_sequence += 1  # also when what follows fails: a name is used once
        segment = store.books.segment(header.segment)
        segment.capacity_bytes = header.capacity_bytes
        segment.header_bytes = header.header_bytes
        segment.created_ms = header.created_ms
        segment.representation = header.digest
        declared = header.digest in store.books.declared  # others' journals may go before this one
    store.files.create(header, sync=store.sync)
    try:
        records: list[Record] = [] if declared else [RepresentationDeclared(header.representation)]
        records.append(store.books.opened_record(segment))
        store.append(records)
    except OSError:
        with contextlib.suppress(OSError):
            store.disk.unlink(store.directory.segment_path(segment.name))
        store.files.discard(segment)
        with store.lock:
            segment.gone = True
        raise
    finally:
        store.files.let_go(segment)
    with store.lock:
        store.books.apply(records, own=True)
    measure(store, segment)
    measure_folders(store)
    store.appending[header.digest, replacing] = segment
    return segment
