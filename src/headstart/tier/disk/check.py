"""Books against medium: what a person would have to know before trusting either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from headstart.errors import ExtentCorrupt
from headstart.tier.base import Problem
from headstart.tier.disk.books import Books
from headstart.tier.disk.records import PREFIX_BYTES
from headstart.tier.disk.removal import METADATA_BYTES, alone, give_back_left, give_back_waiting, measure_stale
from headstart.tier.disk.store import Store
from headstart.tier.disk.table import Segment


def check_store(store: Store) -> list[Problem]:
    """Compare segments, extents and index with the directory. The caller has the turn, so nothing of this process changes;
    segments of other living writers may grow meanwhile and are not measured."""
    measure_stale(store)
    give_back_waiting(store)
    give_back_left(store)
    problems = list(_check_names(store))
    if not store.reads_back():
        problems.append(Problem("journal", "the own journal is not what was written; it is begun anew"))
    return problems + check_files(store)


def check_files(store: Store) -> list[Problem]:
    """The same for the segments that journals speak of, and no other files. Changes nothing."""
    with store.lock:
        segments = [s for s in store.books.segments.values() if s.opened and not s.gone]
    problems: list[Problem] = []
    for segment in segments:
        problems += _check_segment(store, segment)
    with store.lock:
        total = sum(s.allocated_bytes for s in store.books.segments.values())  # also what only another version can read
        if total != store.books.allocated_bytes:
            problems.append(Problem("books", f"segments are charged {total} bytes, {store.books.allocated_bytes} are counted"))
        live = sum(s.live_bytes for s in segments)
        if live != store.books.live_bytes:
            problems.append(Problem("books", f"extents hold {live} bytes, {store.books.live_bytes} are counted"))
        problems += check_index(store.books, lambda segment: store.directory.segment_path(segment.name).name)
    return problems


def _check_names(store: Store) -> Iterator[Problem]:
    listing = store.directory.list()
    for path in [*listing.unknown, *listing.in_the_way]:
        yield Problem(str(path), "not a file of this cache")
    for path in listing.temporary:
        if not store.directory.remove_if_abandoned(path) and _abandoned(store, path):
            yield Problem(str(path), "left behind by a writer that died, and cannot be removed")
    with store.lock:
        known = {s.name for s in store.books.segments.values() if s.opened and not s.gone}
    for name in sorted(listing.segments - known):
        path = store.directory.segment_path(name)
        if name.writer == store.writer or name.writer not in listing.journals:
            yield Problem(str(path), "a segment that no journal speaks of")
        elif not _abandoned(store, store.directory.journal_path(name.writer, listing.journals[name.writer][-1])):
            yield Problem(str(path), "a segment that its living writer's journal does not explain: it is damaged")


def _check_segment(store: Store, segment: Segment) -> Iterator[Problem]:
    path = store.directory.segment_path(segment.name)
    try:
        facts = store.disk.stat(path)
    except FileNotFoundError:
        with store.lock:  # one in which nothing is alive may be removed by whoever comes first
            if segment.rows or segment in store.appending.values():
                yield Problem(str(path), "the segment's file is gone")
        return
    try:
        with store.files.held(segment):
            pass  # opening it checks its header
    except ExtentCorrupt as error:
        yield Problem(str(path), str(error))
    with store.lock:
        extents = sorted(store.books.place(row)[1:] for row in segment.rows.values())
        charged, end, own = segment.allocated_bytes, segment.end, segment.name.writer == store.writer
    if own and not segment.stale and abs(facts.allocated_bytes - charged) > METADATA_BYTES:
        yield Problem(str(path), f"the file system charges {facts.allocated_bytes} bytes, {charged} are counted")
    if own and facts.size > end:
        yield Problem(str(path), f"{facts.size - end} bytes stand behind the last extent")
    last = segment.header_bytes
    for offset, nbytes in extents:
        if offset < last:
            yield Problem(str(path), f"extents overlap at byte {offset}")
        last = offset + nbytes
    if last > facts.size and extents:
        yield Problem(str(path), f"an extent ends at byte {last}, the file at {facts.size}")
    if segment.settled and segment not in store.appending.values():
        used = segment.header_bytes + sum(nbytes for _, nbytes in extents)
        if not extents and not any(place[0] is segment for place in store.waiting):
            yield Problem(str(path), "no extent is left in it, and the file is still there")
        elif store.holes and facts.allocated_bytes > used + METADATA_BYTES and (kept := _kept_bytes(store, segment)) > used:
            yield Problem(str(path), f"the file system charges {kept} bytes, its extents take {used}")


def _kept_bytes(store: Store, segment: Segment) -> int:
    """Return what a segment is charged for while nobody reads or removes anything in it; 0 where somebody does."""
    with alone(store, segment, segment.header_bytes, max(segment.end - segment.header_bytes, 1)) as handle:
        return 0 if handle is None else max(0, store.disk.facts(handle).allocated_bytes - METADATA_BYTES)


def _abandoned(store: Store, path: Path) -> bool:
    """Whether nobody is writing that file now."""
    try:
        handle = store.disk.open(path, "write")
    except FileNotFoundError:
        return False
    try:
        return store.disk.lock_file(handle)
    finally:
        store.disk.close(handle)


def check_index(books: Books, name_of: Callable[[Segment], str]) -> Iterator[Problem]:
    """Compare what lives with what is found. The books' lock is held."""
    for row in books.living().tolist():
        segment, offset, _ = books.place(row)
        where = f"{name_of(segment)}, byte {offset}"
        if segment.rows.get(offset) != row or segment.gone:
            yield Problem(where, "an extent is alive whose segment does not have it")
        prefixes = books.prefixes(row)
        keys = [prefixes[at : at + PREFIX_BYTES] for at in range(0, len(prefixes), PREFIX_BYTES)]
        ids, positions = books.locate(segment.index, keys)
        if (ids < 0).any():
            yield Problem(where, "blocks of a living extent are not found")
        states = books.states(segment.index, keys[-1:])
        if books.has_state(row) and (states is None or states[0] < 0):
            yield Problem(where, "the boundary state of a living extent is not found")
        mine = ids == books.id_of(row)
        if (positions[mine] != mine.nonzero()[0]).any():
            yield Problem(where, "blocks are found at other positions than theirs")
