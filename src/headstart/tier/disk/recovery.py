"""Opening a directory: whose journals stand there, what they say, and what a crash left behind.

The lock of a journal comes before its last read: only a journal whose lock this process holds is a dead writer's, and until
the lock is given back nothing can be added to it or to its writer's segments. So those may be cut, punched and unlinked;
nothing of a living writer ever is. One dead writer is taken over for good, identity and sequence numbers included. Segments
that no journal speaks of are read by their extents' headers; what nobody can use is removed, so no crash leaves work for
people. A file that cannot be read costs what is in it and no more.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from headstart.errors import ExtentCorrupt, StoreError
from headstart.metrics import Counters
from headstart.policy.retention import Retention
from headstart.tier.base import ExtentId
from headstart.tier.disk.books import REMOVALS_KEPT, Books
from headstart.tier.disk.bulk import Loaded
from headstart.tier.disk.charges import charged_bytes
from headstart.tier.disk.directory import Directory, Listing
from headstart.tier.disk.door import Disk, FileFacts
from headstart.tier.disk.follow import Others
from headstart.tier.disk.journal import RESERVE_BYTES, Journal, JournalTail
from headstart.tier.disk.marker import Marker
from headstart.tier.disk.records import (
    SEQUENCES,
    WRITER_BYTES,
    SegmentName,
    SegmentOpened,
    Snapshot,
    Unknown,
    milliseconds,
)
from headstart.tier.disk.removal import METADATA_BYTES, give_back_left
from headstart.tier.disk.scan import scan_segment
from headstart.tier.disk.store import Store
from headstart.tier.disk.table import Segment

log = logging.getLogger(__name__)

_SEQUENCES_SKIPPED = 1 << 16  # behind a damaged journal, whose lost records may have named some
_LARGE_SHARE = 8  # a dead journal that takes more than such a part of the capacity is not left alone
_HIGHEST = SEQUENCES // 2  # sequence or generation that a writer goes on from: as many again are left
_FOREIGN = ("version", "unreadable", "error")  # why a journal stopped that is not simply torn
_REMOVAL_BYTES = 256  # about what one takes in a journal
_JOURNAL_BYTES = 8 << 10  # a journal's first block, and one that a folder may grow by
_TRIES = 16
_MANY, _LOOK_AT_ONCE, _LOOKERS = 256, 64, 4  # segments that are looked at by threads, by each at a time, and how many threads


def recover(
    disk: Disk,
    directory: Directory,
    *,
    capacity_bytes: int,
    min_free_bytes: int,
    sync: bool,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    counters: Counters,
    retention: Retention,
) -> tuple[Store, Others]:
    """Return the store of a prepared directory and the other writers on it. Raises OSError, leaving nothing open."""
    with ExitStack() as stack:
        if sync:
            directory.sync()
        listing = directory.list()
        for path in listing.temporary:
            directory.remove_if_abandoned(path)
        for path in listing.in_the_way:  # never opened; what a link leads to stays
            counters.add("files_in_the_way")
            with contextlib.suppress(OSError):
                disk.unlink(path)
        tails: list[JournalTail] = []
        stack.callback(_close_all, tails)
        books = Books(removals_kept=min(REMOVALS_KEPT, capacity_bytes // 64 // _REMOVAL_BYTES), retention=retention)
        now_ms = milliseconds(wall_clock())
        own: JournalTail | None = None
        unknown: list[Unknown] = []
        taken_in: list[JournalTail] = []
        next_sequence = 0
        dead: set[bytes] = set()
        for writer in list(listing.journals):
            tail = _open_journal(disk, directory, listing, writer, counters)
            if tail is None:
                continue
            tails.append(tail)
            records = _read(tail, counters)
            # One that speaks of what this version does not know is not cut where that begins.
            if tail.taken and tail.stopped not in _FOREIGN:
                dead.add(writer)
                counters.add("journals_torn", bool(tail.stopped))
                behind = _next_sequence(tail, records, listing)
                if own is None and max(behind, tail.generation) < _HIGHEST:
                    own, next_sequence = tail, behind
                elif _is_large(tail, capacity_bytes):
                    taken_in.append(tail)
                if tail is own or tail in taken_in:
                    unknown += [record for record in records if isinstance(record, Unknown)]
            books.apply(records, own=tail is own or tail in taken_in, now_ms=now_ms)
        books.finish_loading()
        books.next_sequence = next_sequence
        marker = Marker(disk, directory)
        reserve_bytes = min(RESERVE_BYTES, capacity_bytes // 64)
        if own is None:
            with marker.hold(charging=True) as only_one:
                if not only_one:
                    raise StoreError(marker.busy, reason="busy", path=directory.root)
                _require_room(disk, directory, capacity_bytes)
                journal = Journal.create(
                    disk,
                    directory,
                    [Snapshot(books.counter, 0), *unknown],
                    writer=secrets.token_bytes(WRITER_BYTES),
                    generation=0,
                    now_ms=milliseconds(wall_clock()),
                )
        else:
            tails.remove(own)
            journal = Journal.take_over(disk, directory, own, unknown)
        stack.callback(journal.close)
        if own is not None:
            for generation in listing.journals[own.writer]:
                if generation != own.generation:  # its writer died between the new and the old
                    directory.remove_if_abandoned(directory.journal_path(own.writer, generation))
        store = Store(
            disk,
            directory,
            books,
            journal,
            marker=marker,
            capacity_bytes=capacity_bytes,
            min_free_bytes=min_free_bytes,
            reserve_bytes=reserve_bytes,
            sync=sync,
            clock=clock,
            wall_clock=wall_clock,
            counters=counters,
            retention=retention,
        )
        stack.callback(store.files.close, 0)
        _settle(store, listing, dead)
        if taken_in or (own is not None and own.stopped and _is_large(own, capacity_bytes)):
            _take_in(store, tails, taken_in)
        for tail in [tail for tail in tails if tail.taken]:
            try:
                tail.let_go()
            except OSError:  # it is found again by the next look
                tails.remove(tail)
                tail.close()
        others = Others(disk, directory, tails, own_writer=journal.writer)
        store.other_journals_bytes = others.allocated_bytes
        store.incomplete = others.incomplete
        stack.pop_all()
        return store, others


def _require_room(disk: Disk, directory: Directory, capacity_bytes: int) -> None:
    """Make sure that a journal can be begun without going beyond the capacity. Who adds leaves room for some; what is above the
    capacity already was stored under a larger one, and is evicted by who has a journal. Raises StoreError, OSError."""
    charged = charged_bytes(disk, directory)
    if charged <= capacity_bytes < charged + _JOURNAL_BYTES:
        raise StoreError(
            f"{charged} of its {capacity_bytes} bytes are taken, and a journal needs {_JOURNAL_BYTES}; give it more",
            reason="full",
            path=directory.root,
        )


def _is_large(tail: JournalTail, capacity_bytes: int) -> bool:
    """Whether a journal takes a share of the capacity that no sane one does."""
    try:
        return tail.allocated_bytes() > capacity_bytes // _LARGE_SHARE
    except OSError:
        return False


def _take_in(store: Store, tails: list[JournalTail], taken_in: Sequence[JournalTail]) -> None:
    """Begin the own journal anew, without what is dead in it, and with what dead writers' say; theirs are removed then."""
    if not store.renew():
        return
    for tail in taken_in:
        with contextlib.suppress(OSError):  # it is taken in once more by the next open
            store.disk.unlink(store.directory.journal_path(tail.writer, tail.generation))
            tails.remove(tail)
            tail.close()
    store.counters.add("journals_taken_in", len(taken_in))


def _close_all(tails: Sequence[JournalTail]) -> None:
    for tail in tails:
        with contextlib.suppress(OSError):
            tail.close()


def _open_journal(disk: Disk, directory: Directory, listing: Listing, writer: bytes, counters: Counters) -> JournalTail | None:
    """Open a writer's newest journal, locked where the writer is dead. None: there is none that can be read now; one that is
    damaged from its start is removed, and leaves the listing, where its writer is dead."""
    newest: int | None = listing.journals[writer][-1]
    for _ in range(_TRIES):
        if newest is None:
            return None
        try:
            tail = JournalTail(disk, directory, writer=writer, generation=newest)
        except FileNotFoundError:  # renewed since it was listed
            newest = directory.list_journals().get(writer)
            continue
        except (OSError, StoreError) as error:
            counters.add("journals_unreadable")
            log.warning("disk tier %s: a journal is passed over: %s", directory.root, error)
            if isinstance(error, StoreError) and error.reason == "journal-header":
                paths = [directory.journal_path(writer, generation) for generation in reversed(listing.journals[writer])]
                if all(map(directory.remove_if_abandoned, paths)):  # older ones too: they know less
                    del listing.journals[writer]
            return None
        try:
            # Its writer may have renewed it, and died, between the list and the lock.
            if not tail.take() or ((newest := directory.list_journals().get(writer)) == tail.generation and not tail.gone):
                return tail
        except OSError:
            counters.add("lock_failed")
            newest = None
        tail.close()
    return None


def _read(tail: JournalTail, counters: Counters) -> list[Loaded]:
    try:
        return tail.load()
    except (OSError, StoreError):
        counters.add("journals_unreadable")
        tail.stopped = "error"
        return []


def _next_sequence(tail: JournalTail, records: Sequence[Loaded], listing: Listing) -> int:
    """Return the first sequence number behind all that a dead writer may have used."""
    said = [record.next_sequence for record in records if isinstance(record, Snapshot)]
    opened = [record.segment for record in records if isinstance(record, SegmentOpened)]
    used = [name.sequence + 1 for name in [*opened, *listing.segments] if name.writer == tail.writer]
    return max([0, *said, *used]) + (_SEQUENCES_SKIPPED if tail.stopped else 0)


def _settle(store: Store, listing: Listing, dead: set[bytes]) -> None:
    """Compare what journals say with the files: forget what is gone, count what is charged, and of dead writers cut what is
    torn and give back what nothing lives in. `dead`: their journals are locked."""
    short: list[ExtentId] = []
    opened = [segment for segment in store.books.segments.values() if segment.opened]
    for segment, seen in zip(opened, _see_all(store, opened), strict=True):
        try:
            short += _measure(store, segment, seen, dead)
        except (OSError, StoreError) as error:
            store.counters.add("segments_unreadable")
            log.warning("disk tier %s: segment %s: %s", store.directory.root, _name(store, segment.name), error)
            if not segment.gone:
                store.books.charge(segment, max(segment.allocated_bytes, segment.end))  # too high rather than too low
    if short:  # the journal outlived the bytes: without durability "data" a power loss does that
        store.remove(short, reason="lost")
    store.seal([s for s in opened if s.name.writer == store.writer and not s.sealed and not s.gone])
    _adopt_unknown(store, listing, dead)
    give_back_left(store)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A segment's file; `facts` are None where it is gone. `error`: why it cannot be used."""

    facts: FileFacts | None
    error: OSError | StoreError | None = None


def _see_all(store: Store, segments: Sequence[Segment]) -> Iterator[_Seen]:
    """Look at the files of segments: a few at a time where they are many, since each waits for the disk. Then one whose writer
    said that it was whole is not opened either, which would take most of the time: who first reads in it checks its header."""
    if len(segments) < _MANY:
        yield from (_see(store, segment, inside=True) for segment in segments)
        return
    with ThreadPoolExecutor(_LOOKERS, "disk-recovery") as pool:
        runs = [segments[at : at + _LOOK_AT_ONCE] for at in range(0, len(segments), _LOOK_AT_ONCE)]
        for seen in pool.map(lambda run: [_see(store, segment, inside=not segment.sealed) for segment in run], runs):
            yield from seen


def _see(store: Store, segment: Segment, *, inside: bool) -> _Seen:
    path = store.directory.segment_path(segment.name)
    try:
        facts = store.disk.stat(path)
    except FileNotFoundError:
        return _Seen(None)
    except OSError as error:
        return _Seen(None, error)
    if not inside:
        return _Seen(facts)
    try:
        store.files.check(segment, path)
    except (OSError, StoreError) as error:
        return _Seen(facts, error)
    return _Seen(facts)


def _measure(store: Store, segment: Segment, seen: _Seen, dead: set[bytes]) -> list[ExtentId]:
    """Count a segment, and cut it where its writer is dead; returns the extents that the file is too short for."""
    books, facts = store.books, seen.facts
    segment.sealed |= segment.name.writer in dead and segment.name.writer != store.writer  # who goes on for it begins new ones
    if facts is None:
        if seen.error is not None:
            raise seen.error
        books.forget_segment(segment)
        return []
    books.charge(segment, facts.allocated_bytes)
    if isinstance(seen.error, ExtentCorrupt):
        _drop(store, segment, seen.error, unlink=segment.settled)
        return []
    if seen.error is not None:
        raise seen.error
    if segment.name.writer in dead:
        _cut(store, segment, facts)
    if segment.end <= facts.size:
        return []
    return [books.id_of(row) for at, row in segment.rows.items() if at + books.place(row)[2] > facts.size]


def _drop(store: Store, segment: Segment, error: StoreError, *, unlink: bool) -> None:
    """Forget what is in a segment that cannot be used. The file goes, unless it is of another version: that one is charged."""
    store.counters.add("segments_dropped")
    log.warning("disk tier %s: segment %s is dropped: %s", store.directory.root, _name(store, segment.name), error)
    if unlink and error.facts.get("reason") != "version":
        store.unlink(segment)
        return
    charged = segment.allocated_bytes
    store.books.forget_segment(segment)
    store.books.charge(segment, charged)


def _cut(store: Store, segment: Segment, facts: FileFacts) -> None:
    """Cut what stands, or is charged, behind the last extent of a dead writer's segment."""
    if facts.size <= segment.end and facts.allocated_bytes <= segment.end + METADATA_BYTES:
        return
    handle = store.disk.open(store.directory.segment_path(segment.name), "write")
    try:
        store.disk.truncate(handle, min(facts.size, segment.end))
        store.counters.add("segments_cut")
        store.books.charge(segment, store.disk.facts(handle).allocated_bytes)
    finally:
        store.disk.close(handle)


def _adopt_unknown(store: Store, listing: Listing, dead: set[bytes]) -> None:
    """Take segments into the own journal whose writer is dead and whose journal is lost or damaged; charge all others."""
    known = {name for name, segment in store.books.segments.items() if segment.opened}
    unknown = sorted(listing.segments - known)
    if not unknown:
        return
    # Listed again: a journal that was renewed or removed during the first listing may have been missed, but not twice.
    writers = {*listing.journals, *store.directory.list_journals()}
    for name in unknown:
        segment = store.books.segment(name)
        try:
            store.books.charge(segment, store.disk.stat(store.directory.segment_path(name)).allocated_bytes)
            if name.writer in dead or name.writer not in writers:
                _adopt(store, segment)
        except FileNotFoundError:
            store.books.forget_segment(segment)
        except (OSError, StoreError) as error:
            store.counters.add("segments_unreadable")
            log.warning("disk tier %s: segment %s: %s", store.directory.root, _name(store, name), error)


def _adopt(store: Store, segment: Segment) -> None:
    handle = store.disk.open(store.directory.segment_path(segment.name), "read", bulk=True)
    try:
        records = scan_segment(store.disk, handle, segment.name)
    except ExtentCorrupt as error:
        _drop(store, segment, error, unlink=True)
        return
    finally:
        store.disk.close(handle)
    store.record(records)
    store.counters.add("segments_scanned")
    if segment.rows:
        _cut(store, segment, store.disk.stat(store.directory.segment_path(segment.name)))


def _name(store: Store, name: SegmentName) -> str:
    return store.directory.segment_path(name).name
