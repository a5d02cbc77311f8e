"""Opening a directory: whose journals stand there, what they say, and what a crash left behind.

One dead writer is taken over, identity and sequence numbers included: its torn journal tail is cut, torn bytes behind the last
extent of its open segment are cut, and the segment is sealed. Other journals are read as they are. Segments that no journal
speaks of are read by their extents' headers; what nobody can use is removed, so no crash leaves work for people.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from headstart.errors import ExtentCorrupt, StoreError
from headstart.metrics import Counters
from headstart.tier.base import ExtentId
from headstart.tier.disk.books import REMOVALS_KEPT, Books, Segment
from headstart.tier.disk.directory import Directory, Listing
from headstart.tier.disk.door import Disk
from headstart.tier.disk.follow import Others
from headstart.tier.disk.journal import RESERVE_BYTES, Journal, JournalTail
from headstart.tier.disk.records import WRITER_BYTES, Record, SegmentName, Snapshot
from headstart.tier.disk.scan import scan_segment
from headstart.tier.disk.store import Store

log = logging.getLogger(__name__)

_SEQUENCES_SKIPPED = 1 << 16  # behind a damaged journal, whose lost records may have named some
_FOREIGN = ("unreadable", "error")  # why a journal stopped that is not simply torn
_REMOVAL_BYTES = 256  # about what one takes in a journal


def recover(
    disk: Disk,
    directory: Directory,
    *,
    capacity_bytes: int,
    sync: bool,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    counters: Counters,
) -> tuple[Store, Others]:
    """Return the store of a prepared directory and the other writers on it. Raises OSError."""
    listing = directory.list()
    for path in listing.temporary:
        _remove_if_abandoned(disk, path)
    tails = _open_tails(disk, directory, listing, counters)
    books = Books(removals_kept=min(REMOVALS_KEPT, capacity_bytes // 64 // _REMOVAL_BYTES))
    own: JournalTail | None = None
    for tail in tails:
        mine = own is None and tail.take()
        records = _read(tail, counters)
        # One that speaks of what this version does not know is not cut where that begins.
        if mine and tail.stopped not in _FOREIGN:
            own = tail
        books.apply(records, own=tail is own)
    # After reading, so that a writer who is taken over by somebody else just now does not count as dead.
    dead = {t.writer for t in tails if t is not own and t.stopped not in _FOREIGN and _is_dead(disk, directory, t)}
    counters.add("journals_torn", sum(bool(tail.stopped) for tail in tails if tail is own or tail.writer in dead))
    books.finish_loading()
    reserve_bytes = min(RESERVE_BYTES, capacity_bytes // 64)
    journal = _own_journal(disk, directory, own, listing, books, reserve_bytes=reserve_bytes, now_ms=int(wall_clock() * 1000))
    store = Store(
        disk,
        directory,
        books,
        journal,
        capacity_bytes=capacity_bytes,
        reserve_bytes=reserve_bytes,
        sync=sync,
        clock=clock,
        wall_clock=wall_clock,
        counters=counters,
    )
    others = Others(disk, directory, [tail for tail in tails if tail is not own], own_writer=journal.writer)
    store.other_journals_bytes = others.allocated_bytes
    _measure_segments(store, dead)
    _adopt_unknown(store, listing, dead)
    store.make_room()
    return store, others


def _open_tails(disk: Disk, directory: Directory, listing: Listing, counters: Counters) -> list[JournalTail]:
    tails = []
    for writer, generations in listing.journals.items():
        for generation in reversed(generations):
            try:
                tails.append(JournalTail(disk, directory, writer=writer, generation=generation))
                break
            except FileNotFoundError:
                continue
            except StoreError as error:
                counters.add("journals_unreadable")
                log.warning("disk tier %s: %s; what it says is lost", directory.root, error)
                if error.reason != "journal-version":
                    _remove_if_abandoned(disk, directory.journal_path(writer, generation))
    return tails


def _read(tail: JournalTail, counters: Counters) -> list[Record]:
    try:
        return tail.poll()
    except (OSError, StoreError):
        counters.add("journals_unreadable")
        tail.stopped = "error"
        return []


def _remove_if_abandoned(disk: Disk, path: Path) -> None:
    """Remove a file whose lock can be taken: who wrote it, or would go on with it, is dead."""
    with contextlib.suppress(FileNotFoundError):
        handle = disk.open(path, "write")
        try:
            if disk.lock_file(handle):
                disk.unlink(path)
        finally:
            disk.close(handle)


def _is_dead(disk: Disk, directory: Directory, tail: JournalTail) -> bool:
    try:
        probe = JournalTail(disk, directory, writer=tail.writer, generation=tail.generation)
    except (FileNotFoundError, StoreError):
        return False
    try:
        return probe.take()
    finally:
        probe.close()


def _own_journal(
    disk: Disk,
    directory: Directory,
    own: JournalTail | None,
    listing: Listing,
    books: Books,
    *,
    reserve_bytes: int,
    now_ms: int,
) -> Journal:
    if own is None:
        return Journal.create(
            disk,
            directory,
            [Snapshot(books.counter, 0)],
            writer=secrets.token_bytes(WRITER_BYTES),
            generation=0,
            now_ms=now_ms,
            reserve_bytes=reserve_bytes,
        )
    for generation in listing.journals[own.writer]:
        if generation != own.generation:  # its writer died between the new and the old
            _remove_if_abandoned(disk, directory.journal_path(own.writer, generation))
    if own.stopped:
        books.next_sequence += _SEQUENCES_SKIPPED
    on_disk = [name.sequence + 1 for name in listing.segments if name.writer == own.writer]
    books.next_sequence = max([books.next_sequence, *on_disk])
    return Journal.take_over(disk, directory, own, reserve_bytes=reserve_bytes)


def _measure_segments(store: Store, dead: set[bytes]) -> None:
    """Compare what journals say with the files: forget what is gone, cut what is torn, count what is charged."""
    books, short, unsealed = store.books, list[ExtentId](), list[Segment]()
    for segment in list(books.segments.values()):
        if not segment.opened:
            continue
        path = store.directory.segment_path(segment.name)
        try:
            facts = store.disk.stat(path)
        except FileNotFoundError:
            books.forget_segment(segment)
            continue
        try:
            with store.files.held(segment):
                pass  # opening it checks its header
        except ExtentCorrupt as error:
            log.warning("disk tier %s: segment %s is dropped: %s", store.directory.root, path.name, error)
            store.counters.add("segments_dropped")
            store.unlink(segment)
            continue
        books.charge(segment, facts.allocated_bytes)
        segment.sealed |= segment.name.writer in dead  # whoever takes that writer over begins new ones
        if segment.name.writer == store.writer and not segment.sealed:
            unsealed.append(segment)
        if segment.settled and facts.size > segment.end:
            _cut(store, segment)
        if segment.end > facts.size:
            short += [books.id_of(row) for at, row in segment.rows.items() if at + books.place(row)[2] > facts.size]
    if short:  # the journal outlived the bytes: without durability "data" a power loss does that
        store.remove(short, reason="lost")
    store.seal(unsealed)


def _cut(store: Store, segment: Segment) -> None:
    """Cut what stands behind the last extent of a segment that nobody adds to any more."""
    handle = store.disk.open(store.directory.segment_path(segment.name), "write")
    try:
        if store.disk.facts(handle).size > segment.end:
            store.disk.truncate(handle, segment.end)
            store.books.charge(segment, store.disk.facts(handle).allocated_bytes)
            store.counters.add("segments_cut")
    finally:
        store.disk.close(handle)


def _adopt_unknown(store: Store, listing: Listing, dead: set[bytes]) -> None:
    """Take segments into the own journal whose writer is dead and whose journal is lost or damaged."""
    known = {name for name, segment in store.books.segments.items() if segment.opened}
    unknown = sorted(listing.segments - known)
    if not unknown:
        return
    writers = store.directory.list_journals()  # again: one that was renewed during the first listing may have been missed
    for name in unknown:
        if name.writer == store.writer or name.writer in dead or name.writer not in writers:
            _adopt(store, name)


def _adopt(store: Store, name: SegmentName) -> None:
    try:
        handle = store.disk.open(store.directory.segment_path(name), "read", bulk=True)
    except FileNotFoundError:
        return
    try:
        records = scan_segment(store.disk, handle, name)
    except (ExtentCorrupt, StoreError) as error:
        log.warning("disk tier %s: segment %s is dropped: %s", store.directory.root, name.sequence, error)
        store.counters.add("segments_dropped")
        store.unlink(store.books.segment(name))
        return
    finally:
        store.disk.close(handle)
    store.record(records)
    store.counters.add("segments_scanned")
    segment = store.books.segment(name)
    if segment.rows:
        _cut(store, segment)
    else:
        store.unlink(segment)
