"""Saves from vLLM's pages: copied out before the step that filled them ends, then kept behind vLLM's back.

No block is read after that, so whether it is freed, given to another request or overwritten meanwhile is nobody's concern. What
is copied and waits is bounded; what comes when it is full is dropped and counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread

from headstart.cache.prefix_cache import PrefixCache
from headstart.connect.vllm.layout import Layout
from headstart.connect.vllm.loading import Region, moves_of, moves_of_states
from headstart.connect.vllm.memory import Host, Memory
from headstart.connect.vllm.messages import SaveOrder
from headstart.connect.vllm.statistics import Taking

MOST_BYTES = 1 << 30  # copied out and not yet written
_PATIENCE_S = 60.0
_CLOSING_S = 20.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Copied:
    order: SaveOrder
    region: Region
    host: Host
    there: Callable[[], None]


class Keeper:
    """`keep` is for the thread that computes and returns when the pages may go."""

    def __init__(self, cache: PrefixCache, layout: Layout, memory: Memory, *, taking: Taking) -> None:
        self._cache = cache
        self._layout = layout
        self._memory = memory
        self._counters = taking.counters
        self._lock = Lock()
        self._held_bytes = 0
        self._closing = False
        self._queue: SimpleQueue[_Copied | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="connector-save", daemon=True)
        self._thread.start()

    def keep(self, order: SaveOrder) -> None:
        if not self._layout.writes:
            return
        step = self._layout.representation.piece_tokens
        first = order.first // step
        region = Region(
            self._layout.representation.layer_bytes, first=first, pieces=len(order.prompt.tokens) // 4 // step - first
        )
        nbytes = self._nbytes(region)
        with self._lock:
            full = self._held_bytes and self._held_bytes + nbytes > MOST_BYTES
            if full or self._closing:
                self._counters.add("saves_dropped")
                return
            self._held_bytes += nbytes
        try:
            host = self._memory.host(nbytes)
        except (MemoryError, OSError, RuntimeError):  # torch's own, where no memory can be pinned
            self._counters.add("saves_dropped")
            with self._lock:
                self._held_bytes -= nbytes
            return
        region.host = host.bytes
        moves = moves_of(self._layout, region, order.tables, skip=0)
        moves += moves_of_states(self._layout, self._memory.page_bytes, order.states, offset=region.nbytes)
        self._queue.put(_Copied(order, region, host, self._memory.copy_out(moves, host)))

    def close(self) -> None:
        """Write what waits, for some seconds; what is left is dropped."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(_CLOSING_S)
        while True:
            try:
                left = self._queue.get_nowait()
            except Empty:
                return
            if left is not None:
                self._counters.add("saves_dropped")

    def _work(self) -> None:
        while (copied := self._queue.get()) is not None:
            try:
                kept = self._write(copied)
            except Exception:  # noqa: BLE001 - the thread's outer edge: what fails here must not end all saving
                _log.exception("a save failed unexpectedly")
                kept = False
            self._counters.add("saves")
            if not kept:
                self._counters.add("saves_dropped")

    def _write(self, copied: _Copied) -> bool:
        """Return whether all of it is stored."""
        copied.there()
        prompt, first = copied.order.prompt, copied.order.first
        identity = prompt.identity(self._cache.identity)
        tokens = prompt.array
        # What comes before must be there, or what is saved now could never be found; and stay so until it is written.
        lease = self._cache.match(
            tokens[:first], salt=prompt.salt, identity=identity, leave=0, contents=prompt.contents, ahead=True
        )
        with lease:
            if lease.tokens < first:
                self._give_back(copied)
                return False
            ticket = self._cache.save(
                tokens,
                copied.region,
                salt=prompt.salt,
                identity=identity,
                retention=prompt.retention,
                tenant=prompt.tenant,
                session=prompt.session,
                contents=prompt.contents,
                own_tokens=first,
                states=self._states(copied),
            )
            ticket.add_done_callback(lambda _: self._give_back(copied))  # not before: it reads from there
            result = ticket.wait(_PATIENCE_S)
        self._counters.add("saved_bytes", result.written_bytes)
        return result.reason is None

    def _states(self, copied: _Copied) -> dict[int, memoryview] | None:
        if not self._layout.state_bytes:
            return None
        at = copied.region.nbytes
        return {len(copied.order.prompt.tokens) // 4: copied.host.bytes[at : at + self._layout.state_bytes].data}

    def _nbytes(self, region: Region) -> int:
        return region.nbytes + self._layout.state_bytes

    def _give_back(self, copied: _Copied) -> None:
        copied.host.release()
        with self._lock:
            self._held_bytes -= self._nbytes(copied.region)
