"""A load's reads from one pool as one batch for the C reader.

    start ──▶ tables ──▶ a worker on every thread ──▶ C: heads first, then layer after layer: read, verify, (copy)
                           ├ a head was read ─▶ header decoded and compared here; from then on C reads the rest of its extent
                           ├ a layer has ended ─▶ the load is told
                           └ handed back ─▶ the portable job of that request, or of the whole span (`span.py`)

The C reader says only what went well. Whatever else becomes of a request is found out by reading it again the portable way, so
that faults, cancelling and closing mean the same on both paths. Where a destination or a file does not suit the C reader,
everything goes the portable way from the start.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from threading import Condition
from typing import cast

import numpy as np
import numpy.typing as npt

from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.layout import ExtentLayout
from headstart.errors import ExtentCorrupt
from headstart.tier.arena import ALIGNMENT
from headstart.tier.base import RawExtent, RawTier
from headstart.transfer import native
from headstart.transfer.buffers import Staging, flat
from headstart.transfer.io_pool import IOPool
from headstart.transfer.load import KVView, Load
from headstart.transfer.native import HeaderIs, Outcome
from headstart.transfer.plan import Head, Prompt, Request, expected_layout, read_with_head, requests

_SLICE_S = 0.02  # how long a worker stays away from its pool, which then sees that it lives, and may have more urgent jobs
_MAY_HAVE_ENDED = (Outcome.LAYER_ENDED, Outcome.HANDED_BACK)
_ALGORITHM = "xxh3-128"  # the only one that C knows
_log = logging.getLogger(__name__)

Table = npt.NDArray[np.void]


class Start:
    """The job that lays out a batch and starts its workers, or queues the heads where something does not suit."""

    def __init__(self, load: Load, prompt: Prompt, into: KVView, pool: IOPool, heads: Sequence[Head]) -> None:
        self.urgency = heads[0].urgency
        self._load = load
        self._prompt = prompt
        self._into = into
        self._pool = pool
        self._heads = heads

    def run(self, staging: Staging) -> None:
        batch = self._batch()
        if batch is None:
            self._pool.submit(self._heads)
            return
        workers = [_Worker(batch) for _ in range(self._pool.threads)]
        self._pool.submit(workers[1:])
        self._pool.submit(workers[:1])

    def abandon(self, error: Exception) -> None:
        for head in self._heads:
            head.abandon(error)

    def _batch(self) -> Batch | None:
        raws: list[RawExtent] = []
        tier = cast(RawTier, self._heads[0].span.tier)  # a pool is one tier's
        try:
            reader = native.reader()
            destination = _destination(self._into, self._load)
            if reader is None or destination is None:
                return None
            for head in self._heads:
                raw = tier.raw(head.span.extent)
                if raw is None:
                    break
                raws.append(raw)
            else:
                return Batch(reader, self._load, self._prompt, self._pool, tier, self._heads, raws, *destination)
        except Exception:  # noqa: BLE001 - an engine's view may raise anything: the portable way meets it again, and tells
            _log.debug("a load is read the portable way", exc_info=True)
        for raw in raws:
            tier.let_go_raw(raw, bytes_read=0)
        return None


class Batch:
    """The tables of one batch, and who works on them. Everything that C has the address of is kept here."""

    def __init__(
        self,
        reader: native.Reader,
        load: Load,
        prompt: Prompt,
        pool: IOPool,
        tier: RawTier,
        heads: Sequence[Head],
        raws: Sequence[RawExtent],
        layers: Table,
        memory: Sequence[npt.NDArray[np.uint8]],
    ) -> None:
        count, per_piece = prompt.representation.layers, prompt.representation.blocks_per_piece
        self.load = load
        self.pool = pool
        self._reader = reader
        self._prompt = prompt
        self._tier = tier
        self._heads = heads
        self._raws = raws
        self._memory = memory
        self._changed = Condition()
        self._workers = pool.threads
        self._error: Exception | None = None
        self._waiting: deque[int] = deque()  # requests whose extent's header was not known when their turn came
        self._headers: list[ExtentHeader | None] = [None] * len(heads)
        self._plans = [_Plan.of(prompt, head, raw) for head, raw in zip(heads, raws, strict=True)]
        table, parts, self._which = _tables(heads, raws, self._plans)
        self._request_extents: list[int] = table["extent"].tolist()
        self._states = np.zeros(len(heads), np.int32)
        self._checks = np.zeros((count, load.pieces, 16), np.uint8)
        self._left = np.bincount(parts["layer"], minlength=count).astype(np.int64)
        self._told = self._left == 0
        self._ended = np.zeros(count, np.int64)
        self._bytes = np.zeros(count, np.int64)
        self._closing = np.zeros(1, np.int64)
        self._staging_bytes = _staging_bytes(layers, parts, table)
        keys = b"".join(prompt.keys[per_piece - 1 : load.pieces * per_piece : per_piece])
        self._tables: dict[str, npt.NDArray[np.generic]] = {
            "layers": layers,
            "parts": parts,
            "requests": table,
            "states": self._states,
            "digest": np.frombuffer(prompt.digest, np.uint8),
            "keys": np.frombuffer(keys, np.uint8),
            "checks": self._checks,
            "left": self._left,
            "pieces_ended": self._ended,
            "bytes_read": self._bytes,
            "limit": load.wanted_before,
            "cancelled": load.stopped,
            "closing": self._closing,
        }
        self._batch = reader.batch()
        for name, array in self._tables.items():
            setattr(self._batch, name, array.ctypes.data)
        self._batch.request_count = len(table)
        self._batch.piece_count = load.pieces

    def work(self, staging: Staging | None) -> bool:
        """Read until nothing is left (then False) or a slice of time is over. Without staging nothing is read any more, and
        what waits for a head is left to whoever is reading that."""
        memory = memoryview(b"") if staging is None else staging.take(self._staging_bytes)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        while True:
            first = self._take_ready() if self._waiting else -1
            outcome, number = self._reader.work(self._batch, address, memory.nbytes, int(_SLICE_S * 1e9), first)
            if outcome is Outcome.HEAD_READ:
                self._head(number, memory, address)
            elif outcome is Outcome.HANDED_BACK:
                self._hand_back(number, staging)
            elif outcome is Outcome.NOT_YET:
                self._waiting.append(number)
            if outcome in _MAY_HAVE_ENDED:
                self._tell()
            if outcome is Outcome.TIME_IS_UP:
                return True
            if outcome is Outcome.NONE_LEFT and (staging is None or not self._waiting):
                return False
            if staging is not None and outcome in (Outcome.NOT_YET, Outcome.NONE_LEFT):
                with self._changed:
                    if not self._changed.wait_for(lambda: not self._waiting or self._ready() is not None, _SLICE_S):
                        return True

    def abandon(self, error: Exception) -> None:
        """Tell the load that nothing more is read."""
        self._error = error
        self._closing[0] = 1
        while self.work(None):
            pass

    def leave(self) -> None:
        """Note that a worker is gone for good; the last one lets go of the files."""
        with self._changed:
            self._workers -= 1
            if self._workers:
                return
        nbytes = int(self._bytes.sum())
        for raw in self._raws:
            self._tier.let_go_raw(raw, bytes_read=nbytes)
            nbytes = 0

    def _head(self, number: int, memory: memoryview, address: int) -> None:
        """Decode and compare a header that lies in staging. What is not as it should be, the portable way will say."""
        extent = self._request_extents[number]
        head, raw, plan = self._heads[extent], self._raws[extent], self._plans[extent]
        at = raw.offset % ALIGNMENT
        try:
            header = decode_header(memory[at : at + raw.header_bytes], self._prompt.representation)
            layout = header.layout(self._prompt.representation)
            right = header.algorithm == _ALGORITHM and head.mismatch(header) is None
            right = right and (layout.layer_offsets, layout.extent_bytes) == (plan.layout.layer_offsets, raw.extent_bytes)
        except ExtentCorrupt:
            right = False
        if not right:
            self._leave_to_portable(number)
            return
        span = head.span
        self._headers[extent] = header
        self._checks[:, span.start : span.start + span.pieces] = header.checks[:, span.first : span.first + span.pieces]
        good, ended = self._reader.settle(self._batch, number, address, HeaderIs.KNOWN)
        with self._changed:
            self._changed.notify_all()
        if ended:
            self._tell()
        if not good:
            self.pool.submit([head.job(header, plan.layout, Request(range(1), 0, plan.together))])

    def _leave_to_portable(self, number: int) -> None:
        """Take a whole span out of the batch."""
        extent = self._request_extents[number]
        self._reader.settle(self._batch, number, 0, HeaderIs.PORTABLE)
        with self._changed:
            self._changed.notify_all()
        self._tell()
        head = self._heads[extent]
        if self._error is None:
            self.pool.submit([head])
        else:
            head.abandon(self._error)

    def _hand_back(self, number: int, staging: Staging | None) -> None:
        extent = self._request_extents[number]
        which = self._which[number]
        if which < 0:
            self._leave_to_portable(number)
            return
        plan = self._plans[extent]
        header = self._headers[extent]
        assert header is not None  # or it would not have been its turn yet
        job = self._heads[extent].job(header, plan.layout, plan.requests[which])
        try:
            if self._error is not None or staging is None:
                job.abandon(self._error or RuntimeError("a worker has no staging"))
            else:
                job.run(staging)
        except Exception as error:  # noqa: BLE001 - as in the pool: the load must be told of every piece
            self.pool.counters.add("job_errors")
            _log.exception("a read job failed unexpectedly")
            job.abandon(error)

    def _ready(self) -> int | None:
        """Return a waiting request whose extent's header is known by now."""
        return next((n for n in list(self._waiting) if self._states[self._request_extents[n]]), None)

    def _take_ready(self) -> int:
        with self._changed:
            number = self._ready()
            if number is None:
                return -1
            self._waiting.remove(number)
            return number

    def _tell(self) -> None:
        with self._changed:
            ready = np.flatnonzero((self._left == 0) & ~self._told).tolist()
            self._told[ready] = True
        for layer in ready:
            if self._ended[layer]:
                self.load.ended([layer], pieces=int(self._ended[layer]), nbytes=int(self._bytes[layer]))


class _Worker:
    """A thread's part in a batch: a job that queues itself again until nothing is left."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.urgency = (int(batch.load.started * 1e9), 0, 0)

    def run(self, staging: Staging) -> None:
        if self._batch.work(staging):
            self._batch.pool.submit([self])
        else:
            self._batch.leave()

    def abandon(self, error: Exception) -> None:
        self._batch.abandon(error)
        self._batch.leave()


class _Plan:
    """How an extent will be read if it is what its tier says."""

    __slots__ = ("layout", "requests", "together")

    def __init__(self, layout: ExtentLayout, together: int, rest: tuple[Request, ...]) -> None:
        self.layout = layout
        self.together = together  # pieces of layer 0 that come with the header
        self.requests = rest

    @classmethod
    def of(cls, prompt: Prompt, head: Head, raw: RawExtent) -> _Plan:
        span = head.span
        layout = expected_layout(prompt.representation, raw.blocks, raw.header_bytes)
        together = read_with_head(prompt.representation, header_bytes=raw.header_bytes, first=span.first, wanted=span.pieces)
        return cls(layout, together, requests(layout, first=span.first, pieces=span.pieces, done=together))


def _destination(into: KVView, load: Load) -> tuple[Table, list[npt.NDArray[np.uint8]]] | None:
    """Return where each layer's pieces go, and the memory itself. None where that is not one buffer or one array of rows."""
    layers = []
    memory = []
    for layer, nbytes in enumerate(load.representation.layer_bytes):
        assert nbytes is not None
        buffers = flat(into.buffers(layer, 0, [nbytes] * load.pieces))
        if not isinstance(buffers, np.ndarray):
            if len(buffers) != 1:
                return None
            buffers = np.frombuffer(buffers[0], np.uint8)
        if buffers.nbytes != load.pieces * nbytes or buffers.dtype != np.uint8 or not buffers.flags.writeable:
            return None
        if buffers.ndim == 1:
            buffers = buffers.reshape(load.pieces, nbytes)
        if buffers.ndim == 2:
            buffers = buffers[:, np.newaxis]
        if buffers.ndim != 3 or buffers.shape[0] != load.pieces or (buffers.strides[2] != 1 and buffers.shape[2] > 1):
            return None
        address, (_, rows, row_bytes) = buffers.__array_interface__["data"][0], buffers.shape
        strides = buffers.strides[0], buffers.strides[1] if rows > 1 else row_bytes
        direct = not any(number % ALIGNMENT for number in (address, *strides, row_bytes))
        layers.append((address, nbytes, strides[0], rows, row_bytes, strides[1], direct))
        memory.append(buffers)
    return np.array(layers, native.LAYER), memory


def _tables(heads: Sequence[Head], raws: Sequence[RawExtent], plans: Sequence[_Plan]) -> tuple[Table, Table, list[int]]:
    """Return the requests, heads first, then layer after layer, each from the head of the prompt on; their parts; and which of
    its extent's requests each of them is, -1 for a head.

    Extents of one length differ only in where they start, so that each length is laid out once, and then moved."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, (head, plan) in enumerate(zip(heads, plans, strict=True)):
        alike.setdefault((id(plan.layout), id(plan.requests), head.span.first), []).append(number)
    all_parts, all_requests, turns, which = [], [], [], []
    parts_before = 0
    for numbers in alike.values():
        head, plan = heads[numbers[0]], plans[numbers[0]]
        first = head.span.first
        asked = [Request(range(bool(plan.together)), 0, plan.together), *plan.requests]
        parts = [
            (plan.layout.piece_range(layer, first + request.first, request.count)[0], layer, request.first, request.count, 0)
            for request in asked
            for layer in request.layers
        ]
        counts = np.array([len(request.layers) for request in asked])
        moved_parts = np.tile(np.array(parts, native.PART), (len(numbers), 1))
        moved = np.zeros((len(numbers), len(asked)), native.REQUEST)
        starts = np.array([heads[number].span.start for number in numbers])[:, None]
        offsets = np.array([raws[number].offset for number in numbers])[:, None]
        moved_parts["offset"] += offsets
        moved_parts["start"] += starts
        moved["descriptor"] = np.array([raws[number].descriptor for number in numbers])[:, None]
        moved["extent"] = np.array(numbers)[:, None]
        moved["start"] = starts + [request.first for request in asked]
        moved["pieces"] = [max(1, request.count) for request in asked]
        moved["parts"] = counts
        moved["first_part"] = np.cumsum(counts) - counts + parts_before + len(parts) * np.arange(len(numbers))[:, None]
        moved["head_bytes"][:, 0] = plan.layout.header_bytes
        at = np.array([part[0] for part in parts])[np.minimum(np.cumsum(counts) - counts, len(parts) - 1)]
        moved["offset"] = offsets + at
        moved["offset"][:, 0] = offsets[:, 0]
        parts_before += moved_parts.size
        all_parts.append(moved_parts.ravel())
        all_requests.append(moved.ravel())
        turns.append(np.tile([-1, *(request.layers.start for request in plan.requests)], len(numbers)))
        which.append(np.tile(np.arange(len(asked)) - 1, len(numbers)))
    table = np.concatenate(all_requests)
    order = np.lexsort((table["start"], np.concatenate(turns)))
    return table[order], np.concatenate(all_parts), np.concatenate(which)[order].tolist()


def _staging_bytes(layers: Table, parts: Table, table: Table) -> int:
    """Return how much a request may need that does not go straight into its destination."""
    last = parts[np.maximum(0, table["first_part"] + table["parts"] - 1)]
    ends = last["offset"] + last["pieces"] * layers["piece_bytes"][last["layer"]]
    ends = np.where(table["parts"] > 0, ends, table["offset"] + table["head_bytes"])
    return int((ends - table["offset"]).max()) + 2 * ALIGNMENT
