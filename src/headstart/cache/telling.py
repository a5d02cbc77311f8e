"""What is stored, told as it changes: the tiers' changes as KV events (`headstart.events`), for routers.

    tier ─(blocks came, went)─▶ queue ─▶ this thread: are they there now? ─▶ stored, with tokens | removed ─▶ Publisher

A change only says where to look: stored is what a tier finds now, and removed what it does not, so that neither a block that
lies in a second extent, or in another tier of the medium, nor one that came back is told wrong. Tokens stand in the extents'
headers, which are read for it. What cannot be told one by one, because the queue ran over or a device came or went, is told
anew: everything cleared, then what is there.

Nobody waits for this thread. The first block of an adapter's prompts is known as such once its identity was told (`know`).
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from threading import Lock, Thread

from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.cache.faults import counted
from headstart.events import MEMORY, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored, Event, Publisher
from headstart.metrics import Counters
from headstart.tier.base import Change, ExtentId, ExtentInfo, FarTier, ReadRange, Tier, WatchedTier

_MAX_CHANGES = 4096
_MAX_ADAPTERS = 1024
_EVENTS_A_BATCH = 16  # of one extent each, at most some thousand tokens
_NAME_BYTES = 16
_IDLE_S = 1.0
_log = logging.getLogger(__name__)


class Telling:
    """Owns the publisher and the thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        identity: Identity,
        representation: Representation,
        publisher: Publisher,
        counters: Counters,
    ) -> None:
        # Of a tier where every header that is read is a request nothing is told: all workers share it, and it may be large.
        self._tiers = [tier for tier in tiers if isinstance(tier, WatchedTier) and not isinstance(tier, FarTier)]
        self._representation = representation
        self._publisher = publisher
        self._counters = counters
        self._roots: dict[bytes, str | None] = {identity.root(): None}
        self._lock = Lock()
        self._changes: deque[tuple[Tier, Change]] = deque()
        self._anew = True  # everything is to be told again
        self._closing = False
        for tier in self._tiers:
            tier.watch(partial(self._note, tier))
        self._thread = Thread(target=self._work, name="kv-events", daemon=True)
        self._thread.start()

    def know(self, identity: Identity) -> None:
        """Note that prompts may begin with this identity."""
        with self._lock:
            if identity.adapters and len(self._roots) < _MAX_ADAPTERS:
                self._roots.setdefault(identity.root(), "+".join(digest.hex() for digest in identity.adapters))

    def close(self, timeout_s: float) -> None:
        """Tell what is known by now, and end."""
        self._closing = True
        self._publisher.wake()
        self._thread.join(max(0.0, timeout_s))

    def _note(self, tier: Tier, change: Change | None) -> None:
        """Called under a tier's lock."""
        with self._lock:
            if change is None or len(self._changes) >= _MAX_CHANGES:
                self._anew = True
                self._changes.clear()
            elif change.representation != self._representation.digest or self._anew:
                return
            else:
                self._changes.append((tier, change))
                if len(self._changes) > 1:
                    return  # it has been woken
        self._publisher.wake()

    def _work(self) -> None:
        while True:
            try:
                closing = self._closing
                self._tell()
                self._answer()
                if closing:
                    break
                self._publisher.wait(_IDLE_S)
            except Exception:  # noqa: BLE001 - the thread's outer edge: events must still be told
                self._counters.add("event_errors")
                _log.exception("telling what is stored failed unexpectedly; it is told anew")
                with self._lock:
                    self._anew = True
                self._publisher.wait(_IDLE_S)
        self._publisher.close()

    def _tell(self) -> None:
        with self._lock:
            anew, self._anew = self._anew, False
            changes = [] if anew else list(self._changes)
            self._changes.clear()
        if anew:
            self._counters.add("events_told_anew")
            for events in self._everything():
                self._publish(events)
        for events in _batched(event for tier, change in changes for event in self._changed(tier, change)):
            self._publish(events)

    def _publish(self, events: Sequence[Event]) -> None:
        self._publisher.publish(events)
        self._counters.add("events", len(events))

    def _answer(self) -> None:
        while (request := self._publisher.asked()) is not None:
            client, number = request
            self._counters.add("event_replays")
            if number and self._publisher.holds(number):
                self._publisher.again(client, number)
            else:  # from the beginning, or from before what is still kept
                self._publisher.instead(client, self._everything())

    def _everything(self) -> Iterator[list[Event]]:
        """Yield, in batches, what a subscriber that knows nothing has to be told; parents before children."""
        yield [AllBlocksCleared()]
        for tier in self._tiers:
            infos: list[ExtentInfo] = []
            with counted(self._counters, tier, "scan"):
                mine, believed = self._representation.digest, tier.sealing.key_ids
                infos = [i for i in tier.scan() if i.representation == mine and i.check_key in believed]
            yield from _batched(self._stored(tier, (info.id for info in _parents_first(infos))))

    def _changed(self, tier: Tier, change: Change) -> Iterator[Event]:
        with counted(self._counters, tier, "locate"):
            placement = tier.locate(change.representation, change.keys)
            if change.came:
                yield from self._stored(tier, dict.fromkeys(placement.ids()))
                return
            absent = placement.extents < 0
            for other in self._tiers:  # it may have been moved, and routers know media alone
                if other is not tier and _medium(other) == _medium(tier):
                    with counted(self._counters, other, "locate"):
                        absent &= other.locate(change.representation, change.keys).extents < 0
            gone = [key[:_NAME_BYTES] for key, is_gone in zip(change.keys, absent.tolist(), strict=True) if is_gone]
            if gone:
                yield BlockRemoved(gone, _medium(tier))

    def _stored(self, tier: Tier, extents: Iterable[ExtentId]) -> Iterator[BlockStored]:
        for extent in extents:
            header = self._header(tier, extent)
            if header is None:
                continue
            parent: bytes | None = header.parent[:_NAME_BYTES]
            with self._lock:
                begins = header.parent in self._roots
                adapter = self._roots.get(header.parent)
            yield BlockStored(
                block_hashes=[key[:_NAME_BYTES] for key in header.keys],
                parent_block_hash=None if begins else parent,
                token_ids=header.tokens.tolist(),
                block_size=BLOCK_TOKENS,
                lora_id=None,
                medium=_medium(tier),
                lora_name=adapter,
            )

    def _header(self, tier: Tier, extent: ExtentId) -> ExtentHeader | None:
        """Read an extent's header; None where it went meanwhile or cannot be read: then nobody else can use it either."""
        with counted(self._counters, tier, "read"):
            shape = tier.shape(extent)
            if shape is None or not tier.lease([extent])[0]:
                return None
            try:
                head = memoryview(bytearray(shape.header_bytes))
                tier.read([ReadRange(extent, 0, [head])])
                return decode_header(head, self._representation, tier.sealing)
            finally:
                tier.release([extent])
        return None


def _medium(tier: Tier) -> str:
    return MEMORY if tier.in_memory else STORAGE


def _batched(events: Iterable[Event]) -> Iterator[list[Event]]:
    batch: list[Event] = []
    for event in events:
        batch.append(event)
        if len(batch) == _EVENTS_A_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _parents_first(infos: Sequence[ExtentInfo]) -> Iterator[ExtentInfo]:
    held = {key[:_NAME_BYTES] for info in infos for key in info.keys}
    children: dict[bytes, list[ExtentInfo]] = defaultdict(list)
    for info in infos:
        children[info.parent].append(info)
    turn = deque(info for parent in [parent for parent in children if parent not in held] for info in children.pop(parent))
    while turn:
        info = turn.popleft()
        yield info
        for key in info.keys:
            turn.extend(children.pop(key[:_NAME_BYTES], ()))
