"""What is left of a load once its headers are known, as one batch for the C reader.

    head jobs ──▶ `Gathering`, until the last head has ended ──▶ tables ──▶ a worker on every thread of the pool
                                                                            └ C: read, verify, (copy) ─▶ whole layers told here
                                                                            └ handed back ─▶ the portable job of that request

The C reader says only what went well. Whatever else becomes of a request is found out by reading it again the portable way, so
faults, cancelling and closing mean the same on both paths. Where a destination, a file or a representation does not suit the
C reader, everything goes the portable way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock
from typing import cast

import numpy as np
import numpy.typing as npt

from headstart.tier.arena import ALIGNMENT
from headstart.tier.base import RawExtent, RawTier
from headstart.transfer import native
from headstart.transfer.buffers import Staging, flat
from headstart.transfer.io_pool import IOPool
from headstart.transfer.load import KVView, Load
from headstart.transfer.plan import Prompt, Request, Rest

_SLICE_NS = (
    20_000_000  # how long a worker stays away from its pool, which then sees that it lives, and may have more urgent jobs
)
_ALGORITHM = "xxh3-128"  # the only one that it knows
_log = logging.getLogger(__name__)

Table = npt.NDArray[np.void]


class Gathering:
    """Collects what the heads of one load on one pool leave to read; with the last of them it starts the reading."""

    def __init__(self, load: Load, prompt: Prompt, into: KVView, pool: IOPool, *, heads: int) -> None:
        self.load = load
        self.prompt = prompt
        self.into = into
        self.pool = pool
        self._lock = Lock()
        self._heads = heads
        self._rests: list[Rest] = []

    def ended(self, rest: Rest | None) -> None:
        """Note that a head has ended, with None badly. Never raises."""
        with self._lock:
            self._heads -= 1
            if rest is not None and rest.requests:
                self._rests.append(rest)
            if self._heads or not self._rests:
                return
        batch = self._batch()
        if batch is None:
            self.pool.submit([job for rest in self._rests for job in rest.jobs()])
        else:
            self.pool.submit([_Worker(batch) for _ in range(self.pool.threads)])

    def _batch(self) -> Batch | None:
        """Return the batch, or None where something does not suit the C reader."""
        raws: list[RawExtent] = []
        tier = cast(RawTier, self._rests[0].head.span.tier)  # a pool is one tier's
        try:
            reader = native.reader()
            if reader is None or any(rest.header.algorithm != _ALGORITHM for rest in self._rests):
                return None
            destination = _destination(self.into, self.load)
            if destination is None:
                return None
            for rest in self._rests:
                raw = tier.raw(rest.head.span.extent)
                if raw is None:
                    break
                raws.append(raw)
            else:
                return Batch(reader, self, tier, self._rests, raws, *destination)
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
        gathering: Gathering,
        tier: RawTier,
        rests: Sequence[Rest],
        raws: Sequence[RawExtent],
        layers: Table,
        memory: Sequence[npt.NDArray[np.uint8]],
    ) -> None:
        load, prompt = gathering.load, gathering.prompt
        count, per_piece = prompt.representation.layers, prompt.representation.blocks_per_piece
        self.pool = gathering.pool
        self.load = load
        self._reader = reader
        self._tier = tier
        self._raws = raws
        self._memory = memory
        self._lock = Lock()
        self._workers = gathering.pool.threads
        self._error: Exception | None = None
        requests, parts, self._jobs = _tables(rests, raws)
        checks = np.zeros((count, load.pieces, 16), np.uint8)
        for rest in rests:
            span = rest.head.span
            checks[:, span.start : span.start + span.pieces] = rest.header.checks[:, span.first : span.first + span.pieces]
        self._left = np.bincount(parts["layer"], minlength=count).astype(np.int64)
        self._told = self._left == 0
        self._ended = np.zeros(count, np.int64)
        self._bytes = np.zeros(count, np.int64)
        self._closing = np.zeros(1, np.int64)
        self._staging_bytes = _staging_bytes(layers, parts, requests)
        self._tables: dict[str, npt.NDArray[np.generic]] = {
            "layers": layers,
            "parts": parts,
            "requests": requests,
            "digest": np.frombuffer(prompt.digest, np.uint8),
            "keys": np.frombuffer(b"".join(prompt.keys[per_piece - 1 : load.pieces * per_piece : per_piece]), np.uint8),
            "checks": checks,
            "left": self._left,
            "pieces_ended": self._ended,
            "bytes_read": self._bytes,
            "limit": load.wanted_before,
            "cancelled": load.stopped,
            "closing": self._closing,
        }
        self._batch = reader.batch()
        for name, table in self._tables.items():
            setattr(self._batch, name, table.ctypes.data)
        self._batch.request_count = len(requests)
        self._batch.piece_count = load.pieces

    def work(self, staging: Staging | None) -> bool:
        """Read until nothing is left (then False) or a slice of time is over. Without staging nothing is read any more."""
        memory = np.zeros(0, np.uint8) if staging is None else np.frombuffer(staging.take(self._staging_bytes), np.uint8)
        while True:
            outcome, handed = self._reader.work(self._batch, memory.ctypes.data, memory.nbytes, _SLICE_NS)
            if handed is not None:
                self._portably(handed, staging)
            self._tell()
            if outcome in (native.NONE_LEFT, native.TIME_IS_UP):
                return outcome == native.TIME_IS_UP

    def abandon(self, error: Exception) -> None:
        """Tell the load that nothing more is read."""
        self._error = error
        self._closing[0] = 1
        while self.work(None):
            pass

    def leave(self) -> None:
        """Note that a worker is gone for good; the last one lets go of the files."""
        with self._lock:
            self._workers -= 1
            if self._workers:
                return
        nbytes = int(self._bytes.sum())
        for raw in self._raws:
            self._tier.let_go_raw(raw, bytes_read=nbytes)
            nbytes = 0

    def _tell(self) -> None:
        with self._lock:
            ready = np.flatnonzero((self._left == 0) & ~self._told).tolist()
            self._told[ready] = True
        for layer in ready:
            if self._ended[layer]:
                self.load.ended([layer], pieces=int(self._ended[layer]), nbytes=int(self._bytes[layer]))

    def _portably(self, number: int, staging: Staging | None) -> None:
        rest, request = self._jobs[number]
        job = rest.job(request)
        try:
            if self._error is not None or staging is None:
                job.abandon(self._error or RuntimeError("a worker has no staging"))
            else:
                job.run(staging)
        except Exception as error:  # noqa: BLE001 - as in the pool: the load must be told of every piece
            self.pool.counters.add("job_errors")
            _log.exception("a read job failed unexpectedly")
            job.abandon(error)


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


def _tables(rests: Sequence[Rest], raws: Sequence[RawExtent]) -> tuple[Table, Table, list[tuple[Rest, Request]]]:
    """Return the requests, layer after layer and from the head of the prompt on; their parts; and which each of them is.

    Extents of one length differ only in where they start, so that each length is laid out once, and then moved."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, rest in enumerate(rests):
        alike.setdefault((rest.layout.layer_offsets, rest.requests, rest.head.span.first), []).append(number)
    all_parts, all_requests, jobs, order = [], [], [], []
    parts_before = 0
    for numbers in alike.values():
        rest = rests[numbers[0]]
        layout, first = rest.layout, rest.head.span.first
        parts = [
            (layout.piece_range(layer, first + request.first, request.count)[0], layer, request.first, request.count, 0)
            for request in rest.requests
            for layer in request.layers
        ]
        ends = np.cumsum([len(request.layers) for request in rest.requests])
        requests = [
            (0, end - len(request.layers), len(request.layers), request.first, request.count, 0)
            for end, request in zip(ends.tolist(), rest.requests, strict=True)
        ]
        moved_parts = np.tile(np.array(parts, native.PART), (len(numbers), 1))
        moved = np.tile(np.array(requests, native.REQUEST), (len(numbers), 1))
        starts = np.array([rests[number].head.span.start for number in numbers])[:, np.newaxis]
        moved_parts["offset"] += np.array([raws[number].offset for number in numbers])[:, np.newaxis]
        moved_parts["start"] += starts
        moved["descriptor"] = np.array([raws[number].descriptor for number in numbers])[:, np.newaxis]
        moved["start"] += starts
        moved["first_part"] += parts_before + len(parts) * np.arange(len(numbers))[:, np.newaxis]
        parts_before += moved_parts.size
        all_parts.append(moved_parts.ravel())
        all_requests.append(moved.ravel())
        order += [request.layers.start for request in rest.requests] * len(numbers)
        jobs += [(rests[number], request) for number in numbers for request in rest.requests]
    table = np.concatenate(all_requests)
    sequence = np.lexsort((table["start"], np.array(order)))
    return table[sequence], np.concatenate(all_parts), [jobs[number] for number in sequence.tolist()]


def _staging_bytes(layers: Table, parts: Table, requests: Table) -> int:
    """Return how much a request may need that does not go straight into its destination."""
    first, last = parts[requests["first_part"]], parts[requests["first_part"] + requests["parts"] - 1]
    ends = last["offset"] + last["pieces"] * layers["piece_bytes"][last["layer"]]
    return int((ends - first["offset"]).max()) + 2 * ALIGNMENT
