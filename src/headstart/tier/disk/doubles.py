"""Extents of which all is in another one as well: what is left by a crash between writing a joined extent and removing the old
ones, or by a reader who held one of those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from headstart.tier.base import ExtentId
from headstart.tier.disk.books import Books
from headstart.tier.disk.durable import sync_places
from headstart.tier.disk.records import PREFIX_BYTES, ClassRaised, ExtentName, Pinned, Record
from headstart.tier.disk.removal import remove

if TYPE_CHECKING:
    from headstart.tier.disk.store import Store

JOINED = "joined"  # why they are removed
DOUBLES_INTERVAL_S = 30.0
_AT_ONCE = 64


class Doubles:
    """When they are looked for next."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due = store.clock()

    def drop(self) -> bool:
        """Now and then: remove some, once the larger extent is promised as much; True while there are more. In turn. Raises
        OSError."""
        store = self._store
        if store.clock() < self._due:
            return False
        self._due = store.clock() + DOUBLES_INTERVAL_S
        with store.lock:
            books = store.books
            found = [pair for pair in find_doubles(books) if _pins_fit(store, *pair)]
            pairs = [(books.id_of(smaller), books.id_of(larger)) for smaller, larger in found[:_AT_ONCE]]
            places = [books.place(larger) for _, larger in found[:_AT_ONCE]]
        going = [smaller for smaller, larger in pairs if _carried(store, smaller, larger)]
        if not sync_places(store, places):
            return False
        removed = remove(store, going, reason=JOINED)
        store.counters.add(f"removed_{JOINED}", len(removed))
        if len(found) > _AT_ONCE and removed:
            self._due = store.clock()
            return True
        return False


def find_doubles(books: Books) -> Iterator[tuple[int, int]]:
    """Yield (row of an extent, row of one that has all of its blocks, and its boundary state if it carries one), each of the
    former once. Of two alike it is the one with the lower name, so that no two processes remove both. What is promised longer
    than the other may live is no double."""
    seen: set[int] = set()
    for pair in {pair for rows in books.sharing() for pair in combinations(sorted(rows), 2)}:
        smaller, larger = sorted(pair, key=lambda row: (len(books.prefixes(row)), books.has_state(row), books.name(row)))
        if smaller not in seen and _covers(books, larger, smaller):
            seen.add(smaller)
            yield smaller, larger


def _carried(store: Store, smaller: ExtentId, larger: ExtentId) -> bool:
    """Have the larger extent promised as much; False where its pin would take too much by now. Raises OSError."""
    with store.lock:
        rows = store.books.row(smaller), store.books.row(larger)
        if rows[0] is None or rows[1] is None or not _pins_fit(store, rows[0], rows[1]):
            return False
        name = store.books.name(rows[1])
    carry_over(store, [smaller], name)
    return True


def _pins_fit(store: Store, smaller: int, larger: int) -> bool:
    books = store.books
    return books.is_pinned(larger, store.now_ms()) or store.promises.may_be_carried([smaller], books.place(larger)[2])


def carry_over(store: Store, extents: Sequence[ExtentId], name: ExtentName) -> None:
    """Promise the extent of that name what the others were promised, pins included. In turn. Raises OSError."""
    with store.lock:
        books, now_ms = store.books, store.now_ms()
        row = books.segment(name.segment).rows.get(name.offset)
        rows = [row for extent in extents if (row := books.row(extent)) is not None]
        if row is None:
            return
        has = books.info(row)
        records: list[Record] = []
        for record in books.terms_records(rows, now_ms=now_ms):
            if isinstance(record, ClassRaised):
                raises = [raised._replace(extent=name) for raised in record.raises]
                raises = [
                    r for r in raises if r.until_ms > max(has.guaranteed_until_ms, now_ms) or r.retention != has.retention
                ]
                records += [replace(record, raises=tuple(raises))] if raises else []
            elif isinstance(record, Pinned):
                pins = [pin._replace(extent=name) for pin in record.pins if pin.until_ms > now_ms]
                records += [Pinned(tuple(pins))] if pins else []
    store.append(records)
    with store.lock:
        store.books.apply(records, own=True)


def _covers(books: Books, larger: int, smaller: int) -> bool:
    inner, outer = books.prefixes(smaller), books.prefixes(larger)
    at = outer.find(inner)
    while at % PREFIX_BYTES and at >= 0:
        at = outer.find(inner, at + 1)
    if at < 0:
        return False
    if books.has_state(smaller) and not (outer.endswith(inner) and books.has_state(larger)):
        return False
    dies_ms = books.info(larger).expires_ms
    return dies_ms is None or books.info(smaller).guaranteed_until_ms <= dies_ms
