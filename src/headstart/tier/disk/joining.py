"""Short runs of one chain joined into long ones.

    read under lease → verify every piece → new extent: bytes, journal → old ones removed, unless somebody reads them

Nothing gives way for it. While both exist a block is found in either, and a crash leaves both: such `doubles` are removed
later, by any process. Two processes may read the same chain at once, but only one at a time replaces, and the other one then
no longer finds it as it was.
"""

from __future__ import annotations

import errno
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Protocol

from headstart.block.extent import ExtentHeader, decode_header, verify_chain
from headstart.block.joining import Joined, finish, join_headers, verify_part
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt, StoreError
from headstart.policy.joining import IDLE_S, USED_AGAIN, Run, chains, choose_joins
from headstart.tier.arena import Arena
from headstart.tier.base import ExtentId, ExtentInfo, ReadRange
from headstart.tier.disk.adding import add_extent
from headstart.tier.disk.doubles import JOINED, carry_over, find_doubles
from headstart.tier.disk.durable import sync_places
from headstart.tier.disk.records import BOUNDARY_STATE, PREFIX_BYTES, ExtentAdded, ExtentName
from headstart.tier.disk.removal import remove
from headstart.tier.disk.store import Store

_TRACKED = 16_384  # extents whose uses are counted; the one used longest ago is forgotten
_MOST_BYTES = 64 << 20  # of an extent, as saves write them: long enough to read, short enough to place
_MOST_BLOCKS = 1024  # bounds the header, which is read whole however little of an extent is wanted


class Reader(Protocol):
    """The part of a tier by which extents are read and given up."""

    def max_extent_bytes(self, representation: Representation, *, state_bytes: int = 0) -> int: ...
    def lease(self, extents: Sequence[ExtentId]) -> list[bool]: ...
    def release(self, extents: Sequence[ExtentId]) -> None: ...
    def read(self, reads: Sequence[ReadRange]) -> int: ...
    def delete(self, extents: Sequence[ExtentId], *, reason: str) -> int: ...


@dataclass(frozen=True, slots=True)
class _Use:
    """When this process last saw an extent used, and the use counter's value then: a higher one is another process's use."""

    at: float
    counter: int


class Joiner:
    """Knows what was used again, and rewrites one extent at a time. `note_use` is safe from many threads, the rest is for one
    at a time."""

    def __init__(self, store: Store, tier: Reader) -> None:
        self._store = store
        self._tier = tier
        self._lock = Lock()
        self._counts: OrderedDict[ExtentId, int] = OrderedDict()
        self._used: OrderedDict[ExtentId, _Use] = OrderedDict()  # since their chain was last looked at; longest ago first
        self._groups: deque[tuple[ExtentId, ...]] = deque()
        self._representations: dict[bytes, Representation] = {}
        self._arena: Arena | None = None

    def note_use(self, extents: Sequence[ExtentId]) -> None:
        """Count a use of extents. No I/O."""
        now, books = self._store.clock(), self._store.books
        with self._store.lock:
            uses = [(e, _Use(now, books.last_used(row))) for e in extents if (row := books.row(e)) is not None]
        with self._lock:
            for extent, use in uses:
                self._counts[extent] = self._counts.pop(extent, 0) + 1
                self._used.pop(extent, None)
                self._used[extent] = use
            while len(self._counts) > _TRACKED:
                self._used.pop(self._counts.popitem(last=False)[0], None)

    def join(self) -> bool:
        """Join one group of runs that has gone idle; True while there is another one. Raises StoreError, OSError."""
        if not self._groups:
            self._groups += self._choose()
        if not self._groups:
            self.rest()
            return False
        group = self._groups.popleft()
        if nbytes := self._rewrite(group):
            self._store.counters.add("joined_extents", len(group))
            self._store.counters.add("joined_bytes", nbytes)
        return bool(self._groups)

    def take_up_all(self) -> None:
        """Let `join` go through everything that nobody leases: what a process has seen used says nothing to one that was only
        just opened to tidy up."""
        books = self._store.books
        with self._store.lock:
            self._groups.extend(self._groups_of([books.id_of(row) for row in books.living().tolist() if not books.leases(row)]))

    def rest(self) -> None:
        """Give back the memory that extents are copied through: some time may pass until it is needed again."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    # What to join; where books are read, under the store's lock.

    def _choose(self) -> list[tuple[ExtentId, ...]]:
        """Return groups of what was used again, and not for a while."""
        now, books = self._store.clock(), self._store.books
        idle: list[ExtentId] = []
        with self._lock, self._store.lock:
            while self._used:
                extent, use = next(iter(self._used.items()))
                if use.at > now - IDLE_S:
                    break
                del self._used[extent]
                row = books.row(extent)
                if row is None:
                    self._counts.pop(extent, None)
                elif books.last_used(row) > use.counter:  # by another process, at some time since
                    self._used[extent] = _Use(now, books.last_used(row))
                elif self._counts.get(extent, 0) >= USED_AGAIN and not books.leases(row):
                    idle.append(extent)
            return self._groups_of(idle)

    def _groups_of(self, idle: Sequence[ExtentId]) -> list[tuple[ExtentId, ...]]:
        books = self._store.books
        found = chains(list(self._runs(idle)))
        digests = [books.place(row)[0].representation for c in found if (row := books.row(c[0].name)) is not None]
        limits = [(self._representation(digest).layers, self._most_bytes(digest)) for digest in digests]
        return [
            tuple(run.name for run in chain[group.start : group.stop])
            for chain, (layers, most_bytes) in zip(found, limits, strict=True)
            for group in choose_joins([run.nbytes for run in chain], layers=layers, most_bytes=most_bytes)
        ]

    def _runs(self, extents: Sequence[ExtentId]) -> Iterator[Run[ExtentId]]:
        books = self._store.books
        for extent in extents:
            row = books.row(extent)
            if row is None:
                continue
            record, digest = books.added_record(row), books.place(row)[0].representation
            if record.flags & ~BOUNDARY_STATE or digest not in books.representations:
                continue  # what a later version means by it would be lost
            yield Run(
                extent,
                record.parent,
                record.prefixes[-PREFIX_BYTES:],
                record.extent_bytes,
                family=(digest, record.tenant, record.fields),
                ends=bool(record.flags),
            )

    def _representation(self, digest: bytes) -> Representation:
        found = self._representations.get(digest)
        if found is None:
            found = self._representations[digest] = Representation.decode(self._store.books.representations[digest])
        return found

    def _most_bytes(self, digest: bytes) -> int:
        """Return how long a run may become."""
        representation = self._representation(digest)
        most = min(_MOST_BYTES, self._tier.max_extent_bytes(representation))
        per_token = representation.bytes_per_token
        return most if per_token is None else min(most, _MOST_BLOCKS * BLOCK_TOKENS * per_token)

    # Writing anew.

    def _rewrite(self, extents: Sequence[ExtentId]) -> int:
        """Write consecutive extents as one and remove them; returns the new one's bytes, 0 where it was not written."""
        try:
            with ExitStack() as stack:
                return self._copy(extents, stack)
        except StoreError as error:
            reason = "corrupt" if isinstance(error, ExtentCorrupt) else str(error.facts.get("reason", "error"))
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, "other").lower()
        self._store.counters.add(f"join_failed_{reason}")
        return 0

    def _copy(self, extents: Sequence[ExtentId], stack: ExitStack) -> int:
        """The same; memory is given back with `stack`. Raises StoreError, OSError, and then the old ones stay."""
        store = self._store
        infos = self._infos(extents)
        if infos is None:
            return 0
        if store.allocated_bytes + sum(i.extent_bytes for i in infos) + store.slack_bytes > store.capacity_bytes:
            store.counters.add("join_failed_full")
            return 0
        with store.lock:
            representation = self._representation(infos[0].representation)
        leased = self._tier.lease(extents)
        try:
            if not all(leased):
                return 0
            headers = [self._header(info, representation) for info in infos]
            joined = join_headers(headers, representation, retention=_firmest(infos).retention)
            image = self._memory(joined.layout.extent_bytes, stack)
            for part, info in enumerate(infos):
                reads = [ReadRange(info.id, m.source, [image[m.target : m.target + m.nbytes]]) for m in joined.moves(part)]
                with self._giving_up(info.id):
                    self._tier.read(reads)
                    verify_part(image, joined, part)
        finally:
            self._tier.release([extent for extent, ok in zip(extents, leased, strict=True) if ok])
        finish(image, joined)
        return self._replace(extents, joined, image)

    def _infos(self, extents: Sequence[ExtentId]) -> list[ExtentInfo] | None:
        """Return what is known of extents; None where one is gone or another tenant's, or where one would outlive its time
        beside the others, or not live so long as it is promised, or where pins would take too much."""
        books = self._store.books
        with self._store.lock:
            rows = [row for extent in extents if (row := books.row(extent)) is not None]
            infos = [books.info(row) for row in rows]
            pinnable = self._store.promises.may_be_carried(rows, sum(info.extent_bytes for info in infos))
        ends = [info.expires_ms for info in infos if info.expires_ms is not None]
        if len(infos) < len(extents) or len({info.tenant for info in infos}) > 1:  # each counts towards its own quota
            return None
        if not pinnable:
            return None
        if ends and (len({info.retention for info in infos}) > 1 or min(ends) < _firmest(infos).guaranteed_until_ms):
            return None
        return infos

    def _header(self, info: ExtentInfo, representation: Representation) -> ExtentHeader:
        data = memoryview(bytearray(info.header_bytes))
        with self._giving_up(info.id):
            self._tier.read([ReadRange(info.id, 0, [data])])
            header = decode_header(data, representation)
            if tuple(key[:PREFIX_BYTES] for key in header.keys) != info.keys or not verify_chain(header):
                raise ExtentCorrupt("an extent is not the one that the journal speaks of", reason="stale")
        return header

    @contextmanager
    def _giving_up(self, extent: ExtentId) -> Iterator[None]:
        """Give an extent up where its bytes are found to be wrong."""
        try:
            yield
        except ExtentCorrupt:
            self._tier.delete([extent], reason="corrupt")
            raise

    def _memory(self, nbytes: int, stack: ExitStack) -> memoryview:
        if self._arena is None or self._arena.capacity_bytes < nbytes:
            self.rest()
            self._arena = Arena(max(nbytes, _MOST_BYTES), name="joining")
        region = self._arena.allocate(nbytes)
        assert region is not None, "one extent at a time is copied"
        stack.callback(region.release)
        return region.view

    def _replace(self, extents: Sequence[ExtentId], joined: Joined, image: memoryview) -> int:
        """Store the new extent and remove the old ones, if they are still as they were; returns its bytes. Raises OSError:
        then both may be there."""
        store = self._store
        with store.turn() as mine:
            if not mine:
                return 0
            with store.charging() as alone:
                added = self._added(extents, joined) if alone else None
                if added is None or not add_extent(store, image, joined.representation, added, replacing=True).stored:
                    return 0
                segment = store.appending[joined.representation.digest, True]
                offset = segment.end - image.nbytes
                carry_over(store, extents, ExtentName(segment.name, offset))
                # What a power loss could no longer touch must not become what was written last.
                if not sync_places(store, [(segment, offset, image.nbytes)]):
                    return 0
                removed = remove(store, extents, reason=JOINED)
                store.counters.add(f"removed_{JOINED}", len(removed))
                store.upkeep.tidy()
        return image.nbytes

    def _added(self, extents: Sequence[ExtentId], joined: Joined) -> ExtentAdded | None:
        """Return the new extent's record; None where one of the old ones is gone, is read here, or has been joined by another
        process."""
        store, infos = self._store, self._infos(extents)
        if infos is None:
            return None
        with store.lock:
            books = store.books
            rows = [row for extent in extents if (row := books.row(extent)) is not None and not books.leases(row)]
            if len(rows) < len(extents) or any(smaller in rows for smaller, _ in find_doubles(books)):
                return None
            records = [books.added_record(row) for row in rows]
        return replace(
            records[0],
            extent_bytes=joined.layout.extent_bytes,
            header_bytes=joined.layout.header_bytes,
            created_ms=min(record.created_ms for record in records),
            last_used=max(record.last_used for record in records),
            retention=_firmest(infos).retention,
            prefixes=b"".join(record.prefixes for record in records),
            flags=records[-1].flags,
        )


def _firmest(infos: Sequence[ExtentInfo]) -> ExtentInfo:
    return max(infos, key=lambda info: info.guaranteed_until_ms)
