"""The own journal and what is due for it now and then: notes of use, reading it back, a new generation. In the store's turn."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from headstart.errors import StoreError
from headstart.tier.disk.evicting import drop_files, evict
from headstart.tier.disk.journal import Journal
from headstart.tier.disk.records import ExtentName, Record, Touched
from headstart.tier.disk.removal import give_back_waiting

if TYPE_CHECKING:
    from headstart.tier.disk.store import Store

TOUCH_INTERVAL_S = 5.0
VERIFY_INTERVAL_S = 10.0  # how often the own journal is read back: what is wrong in it, others cannot follow
_VERIFY_SHARE = 1 / 100  # of the time at most: that of millions of extents has hundreds of megabytes
RENEW_BYTES = 4 << 20  # a journal that grew by this much, more than half of it dead, starts anew
_USES_A_RECORD = 4096
_BLOCK_BYTES = 4096


class Upkeep:
    """Owns the journal. `allocated_bytes`: what the file system charges for it."""

    def __init__(self, store: Store, journal: Journal, *, reserve_bytes: int, sync: bool) -> None:
        self.journal = journal
        self.allocated_bytes = journal.allocated_bytes
        self._store = store
        self._sync = sync
        self.reserve_bytes = reserve_bytes  # kept ahead: a removal, which frees space, must fit when the disk is full
        self._touched: dict[ExtentName, int] = {}
        self._touch_due = store.clock() + TOUCH_INTERVAL_S
        self._verify_due = store.clock() + VERIFY_INTERVAL_S
        self._renew_bytes = min(RENEW_BYTES, store.capacity_bytes // 32)
        self.renew_at = journal.size + self._renew_bytes

    def append(self, records: Sequence[Record]) -> None:
        """Write records to the own journal. Raises OSError; then none of them counts here, whatever others have seen."""
        if not records:
            return
        if self.journal.broken:
            self.begin()
        nbytes = self.journal.encoded_bytes(records)
        with ExitStack() as stack:
            if nbytes > self.journal.room_bytes:
                stack.enter_context(self._store.charging_or_error())
                self._make_room(nbytes)
            try:
                self.journal.append(records, sync=self._sync)
            except OSError:
                self._store.marker.unsure = True
                raise
            finally:
                self._measure()
        if self._store.marker.held and self.journal.room_bytes < self.reserve_bytes // 2:
            self.reserve_ahead()

    def begin(self) -> None:
        """Go on in a new generation of the journal that says what the books say. Raises OSError, and then the old one stays."""
        store = self._store
        with store.charging_or_error():
            records = self.snapshot()
            needed = self.journal.encoded_bytes(records) + _BLOCK_BYTES
            if needed > (spare := store.capacity_bytes - store.allocated_bytes) and not self._is_over:
                drop_files(store, needed - spare)
                records = self.snapshot()
            most = None if self._is_over else store.capacity_bytes - store.allocated_bytes
            self.journal = self.journal.renew(records, now_ms=store.now_ms(), most_bytes=most)
            self.renew_at = self.journal.size + self._renew_bytes
            self._measure()
            self.reserve_ahead()

    def reads_back(self) -> bool:
        """Whether others can follow the own journal; one that is begun anew before the next change counts as well."""
        return self.journal.broken or self.journal.reads_back()

    def reserve_ahead(self) -> None:
        """Keep space behind the journal's end, as far as the capacity and the disk have it. The marker's lock is held."""
        with contextlib.suppress(OSError):  # then the append that needs it will say so
            self._reserve(self.reserve_bytes, at_least=0)

    def note_use(self, extent: ExtentName, used: int) -> None:
        """Remember a use until it is journalled. The books' lock is held."""
        self._touched[extent] = used

    @property
    def touches_due(self) -> bool:
        return self._store.clock() >= self._touch_due

    def flush_touches(self) -> None:
        """Journal uses, and what was promised since the last time."""
        store = self._store
        self._touch_due = store.clock() + TOUCH_INTERVAL_S
        try:
            store.promises.flush()
        except OSError:
            store.counters.add("touch_failed")
            return
        with store.lock:
            uses, self._touched = list(self._touched.items()), {}
            timed = store.books.time_uses(store.now_ms())
            store.books.apply(timed, own=True)  # whether or not there is room to journal it
        batches = [uses[first : first + _USES_A_RECORD] for first in range(0, len(uses), _USES_A_RECORD)]
        said: list[list[Record]] = [[Touched(tuple(batch))] for batch in batches] or [[]]
        said[-1] += timed
        for records in filter(None, said):
            if store.allocated_bytes + store.slack_bytes > store.capacity_bytes:
                return  # the order of use is kept in memory; it is not worth an extent
            try:
                with ExitStack() as stack:
                    fits = self.journal.encoded_bytes(records) <= self.journal.room_bytes
                    if not fits and not stack.enter_context(store.charging(wait_s=0)):
                        return  # as above: nobody waits for it
                    self.append(records)
            except OSError:
                store.counters.add("touch_failed")
                return

    def tidy(self) -> None:
        """What can wait until an extent is stored, and does not change that it is: give back, journal touches, renew."""
        try:
            give_back_waiting(self._store)
            with self._store.lock:
                self._store.books.forget_long_gone()
            if (self._touched or self._store.promises.pending) and self.touches_due:
                self.flush_touches()
            if self.journal.size >= self.renew_at:
                self.renew_at = self.journal.size + self._renew_bytes
                self._renew(only_if_dead=True)
            self.verify()
        except (OSError, StoreError):
            self._store.counters.add("tidy_failed")

    def verify(self) -> None:
        """Start the journal anew if it is not what was written, now and then: others read it, this process never does."""
        begun = self._store.clock()
        if begun < self._verify_due:
            return
        if not self.journal.lost and not self.reads_back():
            self._store.counters.add("journal_damaged")
            self._renew(only_if_dead=False)
        now = self._store.clock()
        self._verify_due = now + max(VERIFY_INTERVAL_S, (now - begun) / _VERIFY_SHARE)

    def snapshot(self) -> list[Record]:
        parts, records = self._store.books.snapshot(self._store.now_ms()), list[Record]()
        while True:
            with self._store.lock:  # for one part at a time: lookups go on
                part = next(parts, None)
            if part is None:
                return records
            records += part

    def _renew(self, *, only_if_dead: bool) -> None:
        """Start the journal anew, if it is mostly dead, where there is room."""
        store = self._store
        with store.lock:
            live = store.books.snapshot_bytes()
        if only_if_dead and live * 2 > self.journal.size:
            return
        missing = store.allocated_bytes + live + store.slack_bytes - store.capacity_bytes
        if missing > 0 and not evict(store, missing, "capacity"):
            return
        try:
            self.begin()
        except OSError:
            store.counters.add("journal_renew_failed")
            return
        store.counters.add("journal_renewed")

    @property
    def _is_over(self) -> bool:
        """Whether the capacity was lowered below what is there: then what frees space may take a little first."""
        return self._store.allocated_bytes > self._store.capacity_bytes

    def _make_room(self, nbytes: int) -> None:
        try:
            self._reserve(max(nbytes, self.reserve_bytes), at_least=nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            drop_files(self._store, nbytes + _BLOCK_BYTES)
            self._reserve(nbytes, at_least=nbytes)

    def _reserve(self, nbytes: int, *, at_least: int) -> None:
        store = self._store
        if not self._is_over:
            spare = store.capacity_bytes - store.allocated_bytes
            nbytes = min(nbytes, self.journal.room_bytes + spare // _BLOCK_BYTES * _BLOCK_BYTES)
        if nbytes < at_least:
            raise OSError(errno.ENOSPC, "the capacity leaves no room for the journal", str(store.directory.root))
        try:
            if nbytes > self.journal.room_bytes:
                self.journal.reserve(nbytes)
        finally:
            self._measure()

    def _measure(self) -> None:
        with contextlib.suppress(OSError):  # what is written is written, whatever it is charged
            self.allocated_bytes = self.journal.allocated_bytes
