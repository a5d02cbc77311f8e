"""Promises and pins as they are given: promises in memory at once and journalled in batches with the notes of use, pins
journalled before they count."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from headstart.policy.retention import FOREVER_MS
from headstart.tier.base import ExtentId, Terms
from headstart.tier.disk.evicting import PINNED_SHARE
from headstart.tier.disk.records import ExtentName, Pin, Pinned, Record, plausible_ms

if TYPE_CHECKING:
    from headstart.tier.disk.owner import Owner

BROKEN_INTERVAL_S = 60.0  # how often it is said that promises are being broken
_A_RECORD = 512
_CLASSES_SAID = 64

log = logging.getLogger(__name__)


class Promises:
    """Those of one open directory; what is journalled late is owned here."""

    def __init__(self, store: Owner) -> None:
        self._store = store
        self._unsaid: dict[ExtentName, ExtentId] = {}  # promises that are not journalled yet
        self._unknown: set[str] = set()  # classes that were used and mean nothing, and were said so
        self.expire_due = self._broken_due = store.clock()
        self._broken = [0, 0]  # extents and bytes since it was last said

    @property
    def pending(self) -> bool:
        return bool(self._unsaid)

    def keep(self, extents: Sequence[ExtentId], terms: Terms) -> None:
        """Promise extents what a save on these terms promises now."""
        store = self._store
        self._note_class(terms.retention)
        guaranteed_ms = max(store.retention.span(terms.retention).guaranteed_ms, round(terms.keep_s * 1000))
        until_ms = store.now_ms() + guaranteed_ms if guaranteed_ms else 0  # nothing is promised, so nothing is written down
        with store.lock:
            for extent in extents:
                row = store.books.row(extent)
                if row is not None and store.books.keep(row, until_ms, terms.retention):
                    self._unsaid[store.books.name(row)] = extent

    def flush(self, *, at_last: bool = False) -> None:
        """Journal what was promised, in turn. Where that takes more room, and another process is adding, it waits for the next
        time, unless there is none. Raises OSError, and then it waits as well."""
        store = self._store
        while self._unsaid:
            with store.lock:
                batch = list(self._unsaid.items())[:_A_RECORD]
                rows = [row for _, extent in batch if (row := store.books.row(extent)) is not None]
                records = store.books.terms_records(rows, now_ms=store.now_ms())
                for name, _ in batch:  # what is raised while the journal is being written is noted anew
                    del self._unsaid[name]
            journal = store.journal
            try:
                with ExitStack() as stack:
                    fits = at_last or journal.encoded_bytes(records) <= journal.room_bytes
                    if not (fits or stack.enter_context(store.charging(wait_s=0))):
                        raise OSError(errno.EAGAIN, "another process is adding", str(store.directory.root))
                    store.append(records)
            except OSError:
                with store.lock:
                    self._unsaid = dict(batch) | self._unsaid
                raise

    def pin(self, extents: Sequence[ExtentId], until_ms: int | None) -> list[bool]:
        """Pin extents, 0: unpin them. All processes together keep to what pins may take, so nobody else adds meanwhile. A pin
        that cannot be journalled is none."""
        store = self._store
        refused = [False] * len(extents)
        deadline_ms = FOREVER_MS if until_ms is None else plausible_ms(max(0, until_ms))
        try:
            with store.turn() as mine:
                if not mine:
                    return refused
                with store.charging() as alone:
                    if not alone:
                        return refused
                    pins, done = self._choose(extents, deadline_ms)
                    for first in range(0, len(pins), _A_RECORD):
                        records: list[Record] = [Pinned(tuple(pins[first : first + _A_RECORD]))]
                        store.append(records)
                        with store.lock:
                            store.books.apply(records, own=True)
                    return done
        except OSError:
            store.counters.add("pin_failed")
            return refused

    def may_be_carried(self, parts: Sequence[int], nbytes: int) -> bool:
        """Whether pins keep to what they may take if one extent of `nbytes` is pinned as these rows are, which then go. The
        books' lock is held."""
        books, now_ms = self._store.books, self._store.now_ms()
        pinned = [row for row in parts if books.is_pinned(row, now_ms)]
        grown_bytes = nbytes - sum(books.place(row)[2] for row in pinned)
        return not pinned or books.pinned_bytes(now_ms) + grown_bytes <= self._store.capacity_bytes // PINNED_SHARE

    def unpinned(self, extents: Sequence[ExtentId]) -> list[ExtentId]:
        """Return those of extents that are not pinned now."""
        store, now_ms = self._store, self._store.now_ms()
        with store.lock:
            rows = [(extent, store.books.row(extent)) for extent in extents]
            return [extent for extent, row in rows if row is None or not store.books.is_pinned(row, now_ms)]

    def broken(self, sizes: Sequence[int]) -> None:
        """Note that extents of these sizes went before they were promised to."""
        if not sizes:
            return
        store = self._store
        store.counters.add("guarantee_broken_extents", len(sizes))
        store.counters.add("guarantee_broken_bytes", sum(sizes))
        self._broken = [self._broken[0] + len(sizes), self._broken[1] + sum(sizes)]
        if store.clock() >= self._broken_due:
            self._broken_due = store.clock() + BROKEN_INTERVAL_S
            log.warning(
                "disk tier %s: %d extents (%d bytes) had to go before the time that their class is guaranteed; raise "
                "cache.capacity, or promise less in cache.retention",
                store.directory.root,
                *self._broken,
            )
            self._broken = [0, 0]

    def _choose(self, extents: Sequence[ExtentId], deadline_ms: int) -> tuple[list[Pin], list[bool]]:
        """Return the pins to journal, and for each extent whether it is pinned then."""
        store, pins, done = self._store, list[Pin](), list[bool]()
        now_ms, books = store.now_ms(), store.books
        with store.lock:
            parts = books.kept_by_pins(books.pinned(now_ms), holes=store.holes)
        left = store.capacity_bytes // PINNED_SHARE - sum(parts.values())
        for first in range(0, len(extents), _A_RECORD):
            with store.lock:  # for some at a time: lookups go on
                for extent in extents[first : first + _A_RECORD]:
                    row = books.row(extent)
                    if row is not None and deadline_ms > now_ms and not books.is_pinned(row, now_ms):
                        ((part, nbytes),) = books.kept_by_pins([row], holes=store.holes).items()
                        more = 0 if part in parts else nbytes
                        if more <= left:
                            parts[part] = nbytes
                            left -= more
                        else:
                            row = None
                    done.append(row is not None)
                    if row is not None:
                        pins.append(Pin(books.name(row), deadline_ms, books.next_use()))
        return pins, done

    def _note_class(self, retention: str) -> None:
        store = self._store
        if retention in store.retention.classes or retention in self._unknown or len(self._unknown) >= _CLASSES_SAID:
            return
        self._unknown.add(retention)
        store.counters.add("classes_unknown")
        log.warning(
            "disk tier %s: retention class %r is not configured and is kept as %r; name it in cache.retention",
            store.directory.root,
            retention,
            "default",
        )
