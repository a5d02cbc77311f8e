"""Loads into vLLM's pages: asynchronous and whole, over staging memory, so that a read that hangs can be left behind.

    order ─▶ queue ─▶ match ─▶ read range 0 ─▶ copy in ─▶ … ─▶ ended(request, blocks that lack something)
                               └ read range 1 meanwhile

Each order ends exactly once: by the thread that brings it, by its deadline, or because its request is over. Whoever comes
first marks it under the lock that also covers each copy into vLLM's pages; after that nothing of it is copied any more.

States of recurrent layers stand behind the whole prefix and come with its last range. Without them, or with less before them,
nothing of a load counts: there is no other place from which the request could go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread

import numpy as np
import numpy.typing as npt

from headstart.cache.prefix_cache import Lease, Load, PrefixCache
from headstart.connect.vllm.layout import Layout
from headstart.connect.vllm.memory import Host, Memory, Move
from headstart.connect.vllm.messages import LoadOrder, Prompt, StateBlocks
from headstart.connect.vllm.statistics import Taking
from headstart.errors import LoadFailed
from headstart.tier.arena import ALIGNMENT

RANGE_BYTES = 128 << 20  # read at once; two of them are under way
_CATCH_UP_S = 0.5
_LOOKS = 4  # at least, so that a machine on which nothing gets its turn is not mistaken for a prefix that is gone
_LOOK_AGAIN_S = 0.02
_TROUBLE_S = 60.0  # for so long what failed to load is not matched again, so that less is found here than elsewhere
NULL_BLOCK = 0  # vLLM's placeholder for a page that nobody attends to, as before a sliding window
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """`lacking`: blocks that do not hold what they should, None where all is well. `tokens`: of the prompt that are there."""

    request: str
    lacking: tuple[int, ...] | None
    tokens: int


@dataclass(slots=True)
class _Bringing:
    order: LoadOrder
    deadline: float
    started: float
    lock: Lock = field(default_factory=Lock)
    over: bool = False  # nothing may be copied any more
    tokens: int = 0  # from the prompt's start that are in vLLM's pages
    trouble: str = ""


class Region:
    """KVView over host memory that holds whole pieces from `first` on, layer behind layer."""

    def __init__(self, layer_bytes: Sequence[int | None], *, first: int, pieces: int) -> None:
        self.first = first
        self.pieces = pieces
        self.offsets: list[int] = []
        self._sizes = [nbytes or 0 for nbytes in layer_bytes]
        end = 0
        for nbytes in self._sizes:
            self.offsets.append(end)
            end += -(-nbytes * pieces // ALIGNMENT) * ALIGNMENT
        self.nbytes = end
        self.host: npt.NDArray[np.uint8] | None = None

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        at, nbytes = first - self.first, self._sizes[layer]
        if self.host is None or not 0 <= at <= at + len(sizes) <= self.pieces:
            raise LookupError(f"pieces {first} to {first + len(sizes)} are not here; {self.pieces} from {self.first} on are")
        start = self.offsets[layer] + at * nbytes
        return [self.host[start : start + nbytes * len(sizes)].data]


def moves_of(layout: Layout, region: Region, tables: Sequence[Sequence[int]], *, skip: int) -> list[Move]:
    """Return which pages of a region belong to which blocks. `tables` begin with the region's first piece; pages within the
    prompt's first `skip` tokens are left out, and so is what nobody attends to."""
    moves = []
    for group, table in zip(layout.groups, tables, strict=True):
        before = region.first * layout.pages(group)  # pages of the prompt before the region
        done = skip // group.block_tokens
        pages = [
            page for page in range(region.pieces * layout.pages(group)) if before + page >= done and table[page] != NULL_BLOCK
        ]
        if pages:
            blocks = [table[page] for page in pages]
            moves += [Move(layer, blocks, pages, region.offsets[layer]) for layer in group.layers]
    return moves


def moves_of_states(layout: Layout, page_bytes: Sequence[int], blocks: StateBlocks, *, offset: int) -> list[Move]:
    """Return which bytes of host memory, from `offset` on, are the states in `blocks`: group by group, layer by layer."""
    moves = []
    for layers, block in zip(layout.states, blocks, strict=True):
        for layer in layers:
            moves.append(Move(layer, [block], [0], offset))
            offset += page_bytes[layer]
    return moves


class Loader:
    """`counts`: whether tokens are counted here; of several ranks with parts of the same tokens only one does."""

    def __init__(
        self, cache: PrefixCache, layout: Layout, memory: Memory, *, timeout_s: float, taking: Taking, counts: bool
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._memory = memory
        self._timeout_s = timeout_s
        self._counters = taking.counters
        self._counts = counts
        self._lock = Lock()
        self._under_way: dict[str, _Bringing] = {}
        self._ended: list[Ended] = []
        self._troubled_until = 0.0
        self._queue: SimpleQueue[_Bringing | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="connector-load", daemon=True)
        self._thread.start()

    def start(self, orders: Sequence[LoadOrder]) -> None:
        """Queue loads. Returns at once."""
        self._memory.fence()
        now = time.monotonic()
        for order in orders:
            within_s = self._timeout_s if order.within_s is None else min(self._timeout_s, order.within_s)
            bringing = _Bringing(order, deadline=now + within_s, started=now)
            with self._lock:
                self._under_way[order.request] = bringing
            self._queue.put(bringing)

    def ended(self, *, over: set[str], now: float) -> list[Ended]:
        """Return the loads that have ended since the last call, each once. Those of requests that are `over`, and those that
        are past their deadline at `now`, end here."""
        with self._lock:
            late = [one for one in self._under_way.values() if now >= one.deadline or one.order.request in over]
        for one in late:
            if one.order.request in over:
                self._end(one, cancelled=True)
            else:
                one.trouble = f"it took longer than {one.deadline - one.started:.1f} s, in which computing is sooner"
                if one.deadline - one.started >= self._timeout_s:
                    one.trouble = "it took longer than cache.load_timeout_s"
                self._end(one)
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End what is under way, and the thread; one that hangs in a medium is left behind."""
        with self._lock:
            left = list(self._under_way.values())
        for one in left:
            self._end(one, cancelled=True)
        self._queue.put(None)
        self._thread.join(2.0)

    def _work(self) -> None:
        while (bringing := self._queue.get()) is not None:
            if bringing.over:
                continue
            try:
                self._bring(bringing)
            except Exception:  # noqa: BLE001 - the thread's outer edge: a request must not wait for ever
                _log.exception("a load failed unexpectedly; what is missing is computed")
            self._end(bringing)

    def _bring(self, bringing: _Bringing) -> None:
        prompt, representation = bringing.order.prompt, self._layout.representation
        step = representation.piece_tokens
        piece_bytes = sum(nbytes or 0 for nbytes in representation.layer_bytes)
        at_once = max(1, RANGE_BYTES // piece_bytes)
        with self._found(prompt) as lease:
            if self._layout.state_bytes and lease.tokens < len(prompt.tokens) // 4:
                return  # the blocks are for states behind all of it
            first, end = bringing.order.skip // step, lease.tokens // step
            bringing.tokens = first * step
            ahead: list[tuple[Load, Region, Host]] = []
            try:
                while (first < end or ahead) and not bringing.over:
                    while first < end and len(ahead) < 2:
                        pieces = min(at_once, end - first)
                        ahead.append(self._read(lease, first=first, pieces=pieces))
                        first += pieces
                    if not self._copy_in(bringing, *ahead.pop(0)):
                        break
            finally:
                for load, _, host in ahead:
                    load.cancel()
                    load.add_done_callback(lambda _, host=host: host.release())  # type: ignore[misc]

    def _found(self, prompt: Prompt) -> Lease:
        """Return a lease on what the scheduler has found and holds. Where less is found here, what other processes have moved
        is not known here yet: that is waited for, unless the disk fails anyway."""
        asked = len(prompt.tokens) // 4
        troubled = time.monotonic() < self._troubled_until
        until = time.monotonic() + (0.0 if troubled else _CATCH_UP_S)
        looks = 0
        while True:
            looks += 1
            lease = self._cache.match(
                prompt.array,
                salt=prompt.salt,
                identity=prompt.identity(self._cache.identity),
                leave=0,
                contents=prompt.contents,
            )
            if lease.tokens >= asked or (time.monotonic() >= until and (troubled or looks >= _LOOKS)):
                return lease
            lease.release()
            time.sleep(_LOOK_AGAIN_S)

    def _read(self, lease: Lease, *, first: int, pieces: int) -> tuple[Load, Region, Host]:
        region = Region(self._layout.representation.layer_bytes, first=first, pieces=pieces)
        host = self._memory.host(region.nbytes + self._layout.state_bytes)
        region.host = host.bytes
        step = self._layout.representation.piece_tokens
        return lease.load(into=region, first_tokens=first * step, end_tokens=(first + pieces) * step), region, host

    def _copy_in(self, bringing: _Bringing, load: Load, region: Region, host: Host) -> bool:
        """Wait for a range and copy it into vLLM's pages; False where there is no use in going on."""
        step = self._layout.representation.piece_tokens
        try:
            usable = load.result(max(0.0, bringing.deadline - time.monotonic())) // step
        except LoadFailed as error:  # too late: what still comes goes into memory that is ours
            bringing.trouble = error.message
            load.cancel()
            load.add_done_callback(lambda _: host.release())
            return False
        if load.faults:
            bringing.trouble = load.faults[0].message
            self._troubled_until = time.monotonic() + _TROUBLE_S
        try:
            good = Region(self._layout.representation.layer_bytes, first=region.first, pieces=usable)
            good.offsets = region.offsets
            tables = [
                table[region.first * self._layout.pages(group) : (region.first + usable) * self._layout.pages(group)]
                for group, table in zip(self._layout.groups, bringing.order.tables, strict=True)
            ]
            moves = moves_of(self._layout, good, tables, skip=bringing.order.skip)
            there = (region.first + usable) * step
            if self._layout.state_bytes:
                if there == len(bringing.order.prompt.tokens) // 4:
                    moves += self._states(bringing, load, host, at=region.nbytes)
                else:
                    there = bringing.tokens  # nothing counts before the states
            with bringing.lock:
                if bringing.over:
                    return False
                self._memory.copy_in(moves, host)
                bringing.tokens = there
            self._counters.add("loaded_bytes", load.bytes_read)
        finally:
            host.release()
        return usable == region.pieces

    def _states(self, bringing: _Bringing, load: Load, host: Host, *, at: int) -> list[Move]:
        """Put the states that a load which is done has brought into host memory, from byte `at` on."""
        state = load.state(0.0)
        if state.nbytes != self._layout.state_bytes:  # a check was right: whoever wrote it had the same representation
            raise ValueError(f"states of {state.nbytes} bytes were stored, {self._layout.state_bytes} are expected")
        host.bytes[at : at + state.nbytes] = np.frombuffer(state, np.uint8)
        return moves_of_states(self._layout, self._memory.page_bytes, bringing.order.states, offset=at)

    def _end(self, bringing: _Bringing, *, cancelled: bool = False) -> None:
        """Take a load from the books, once, and say what came of it."""
        with bringing.lock:
            if bringing.over:
                return
            bringing.over = True
            tokens = bringing.tokens
        order = bringing.order
        asked = len(order.prompt.tokens) // 4
        lacking: tuple[int, ...] | None = None
        self._counters.add("loads")
        self._counters.add("load_milliseconds", round(1000 * (time.monotonic() - bringing.started)))
        if cancelled:
            self._counters.add("loads_cancelled")
        elif tokens < asked:
            self._counters.add("loads_failed")
            trouble = bringing.trouble or "it is not found any more"
            _log.warning("a load brought %d of %d tokens: %s; the rest is computed", tokens, asked, trouble)
            lacking = tuple(
                block
                for group, table in zip(self._layout.groups, order.tables, strict=True)
                for block in table[max(tokens, order.skip) // group.block_tokens : asked // group.block_tokens]
                if block != NULL_BLOCK
            )
        if not cancelled and self._counts:
            self._counters.add("loaded_tokens", max(0, tokens - order.skip))
        with self._lock:
            if self._under_way.get(order.request) is bringing:
                del self._under_way[order.request]
            self._ended.append(Ended(order.request, lacking, tokens))
