"""A pool's books against what stands on the file system."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.errors import ExtentCorrupt
from headstart.tier.base import Problem
from headstart.tier.disk.check import check_index
from headstart.tier.pool.terms import TERMS

if TYPE_CHECKING:
    from headstart.tier.pool.store import PoolStore


_OPEN_ELSEWHERE = (".nfs", ".fuse_hidden")  # what clients call a file that went while somebody has it open


def check_pool(store: PoolStore) -> list[Problem]:
    """Compare segments, extents and index with the directory, changing nothing. Only what is sealed, or this process's own, is
    held against its file: others write meanwhile. Raises OSError."""
    store.look_surely()
    around = store.look_around()
    store.forget_missing(around)
    listing = around.listing
    problems = [
        Problem(str(path), "not a file of this pool")
        for path in [*listing.unknown, *listing.in_the_way]
        if path.name != TERMS and not path.name.startswith(_OPEN_ELSEWHERE)
    ]
    with store.lock:
        segments = [s for s in store.books.segments.values() if s.opened and not s.gone and s.rows and (s.sealed or s.recorded)]
        ends = {s: max(sum(store.books.place(row)[1:]) for row in s.rows.values()) for s in segments}
    for segment, end in ends.items():
        path = store.directory.segment_path(segment.name)
        try:
            with store.files.held(segment) as handle:
                size = store.disk.facts(handle).size
        except FileNotFoundError:
            if segment in store.appending.values():
                problems.append(Problem(str(path), "the segment's file is gone"))
            continue  # others' went since
        except ExtentCorrupt as error:
            problems.append(Problem(str(path), str(error)))
            continue
        if size < end:
            problems.append(Problem(str(path), f"an extent ends at byte {end}, the file at {size}"))
    with store.lock:
        live = sum(s.live_bytes for s in store.books.segments.values() if not s.gone)
        if live != store.books.live_bytes:
            problems.append(Problem("books", f"extents hold {live} bytes, {store.books.live_bytes} are counted"))
        problems += check_index(store.books, lambda segment: store.directory.segment_path(segment.name).name)
    return problems
