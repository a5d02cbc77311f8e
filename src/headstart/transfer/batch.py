"""A load's reads from one pool as one batch for the C reader.

    start ──▶ tables of the heads ──▶ a worker on every thread ──▶ C: heads first, then layer after layer: read, verify, (copy)
         └──▶ the other tables, while heads are read
                           ├ a head was read that is not exactly as expected ─▶ decoded and compared here
                           ├ a layer has ended ─▶ the load is told
                           └ handed back ─▶ the portable job of that request, or of the whole span (`span.py`)

The C reader says only what went well. Whatever else becomes of a request is found out by reading it again the portable way, so
that faults, cancelling and closing mean the same on both paths. Where a destination or a file does not suit the C reader,
everything goes the portable way from the start.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from threading import Condition
from typing import cast

import numpy as np
import numpy.typing as npt

from headstart.block.checks import XXH3
from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.keys import BLOCK_TOKENS
from headstart.errors import ExtentCorrupt
from headstart.tier.arena import ALIGNMENT
from headstart.tier.base import RawExtents, RawTier
from headstart.transfer import native
from headstart.transfer.buffers import Staging
from headstart.transfer.io_pool import IOPool
from headstart.transfer.load import KVView, Load
from headstart.transfer.native import HeaderIs, Outcome
from headstart.transfer.plan import Heads, Prompt, Request
from headstart.transfer.tables import Plan, Table, alike, destination_of, expected, lay_out

_SLICE_S = 0.02  # how long a worker stays away from its pool where jobs wait there, which may be more urgent
_ALONE_S = 0.2  # where none waits: then the pool only sees that it lives
_MAY_HAVE_ENDED = (Outcome.LAYER_ENDED, Outcome.HANDED_BACK, Outcome.HEAD_WRONG)
_log = logging.getLogger(__name__)


class Start:
    """The job that lays out a batch and starts its workers, or queues the heads where something does not suit."""

    def __init__(self, load: Load, prompt: Prompt, into: KVView, pool: IOPool, heads: Heads) -> None:
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
        *workers, last = (_Worker(batch) for _ in range(batch.workers))
        # Behind the other workers: when a thread comes to it, they are reading, and need the interpreter no more.
        self._pool.submit([*workers, _Rest(batch, last)])

    def abandon(self, error: BaseException) -> None:
        for head in self._heads:
            head.abandon(error)

    def _batch(self) -> Batch | None:
        raw: RawExtents | None = None
        tier = cast(RawTier, self._heads.spans[0].tier)  # a pool is one tier's, and one lane's
        try:
            reader = native.reader()
            destination = destination_of(self._into, self._load, range(1))
            if reader is None or destination is None:
                return None
            raw = tier.raw([span.extent for span in self._heads.spans])
            if raw is None:
                return None
            return Batch(reader, self._load, self._prompt, self._into, self._pool, tier, self._heads, raw, *destination)
        except Exception:  # noqa: BLE001 - an engine's view may raise anything: the portable way meets it again, and tells
            _log.debug("a load is read the portable way", exc_info=True)
        if raw is not None:
            tier.let_go_raw(raw, bytes_read=0)
        return None


class Batch:
    """The tables of one batch, and who works on them. Everything that C has the address of is kept here."""

    def __init__(
        self,
        reader: native.Reader,
        load: Load,
        prompt: Prompt,
        into: KVView,
        pool: IOPool,
        tier: RawTier,
        heads: Heads,
        raw: RawExtents,
        first_layer: Table,
        memory: list[object],
    ) -> None:
        """`first_layer`: where layer 0 goes, in `memory`."""
        count, per_piece = prompt.representation.layers, prompt.representation.blocks_per_piece
        self.load = load
        self.pool = pool
        self._reader = reader
        self._prompt = prompt
        self._into = into
        self._tier = tier
        self._heads = heads
        self._raw = raw
        self._memory = memory
        self._changed = Condition()
        self._rest_taken = False  # somebody lays out what comes behind the heads, or has
        self._rest_left = False  # it is not this reader's
        self._no_rest: BaseException | None = None  # nor anybody's: why
        self._error: BaseException | None = None
        self._waiting: deque[int] = deque()  # requests whose extent's header was not known when their turn came
        self._headers: list[ExtentHeader | None] = [None] * len(heads)
        self._groups = alike(prompt.representation, raw, heads.spans)
        plans: dict[int, Plan] = {}
        self._left = np.zeros(count, np.int64)
        for group in self._groups:
            plans |= dict.fromkeys(group.numbers.tolist(), group.plan)
            self._left += group.plan.counts * len(group.numbers)
        self._plans = [plans[number] for number in range(len(heads))]
        # The heads are laid out now, so that they are being read while the rest is.
        table = np.zeros(sum(len(group.plan.asked) * len(group.numbers) for group in self._groups), native.REQUEST)
        self.workers = min(pool.threads, len(table))  # a thread that would find nothing to read is not woken
        self._workers = self.workers
        parts = np.zeros(sum(len(group.plan.parts) * len(group.numbers) for group in self._groups), native.PART)
        first, first_parts, self._which = lay_out(self._groups, raw, rest=False, first_part=0)
        table[: len(first)], parts[: len(first_parts)] = first, first_parts
        self._parts_of_heads = len(first_parts)
        self._request_extents: list[int] = first["extent"].tolist()
        self._states = np.zeros(len(heads), np.int32)
        self._checks = np.zeros((count, load.pieces, 16), np.uint8)
        self._never_read = np.zeros(count, np.int64)  # parts that no reader will come to
        self._told = self._left == 0
        self._ended = np.zeros(count, np.int64)
        self._bytes = np.zeros(count, np.int64)
        self._closing = np.zeros(1, np.int64)
        self._staging_bytes = (
            max(group.plan.most_bytes for group in self._groups) + 2 * ALIGNMENT
        )  # where direct I/O begins and ends
        blocks = load.pieces * per_piece
        layers = np.zeros(count, native.LAYER)
        layers[:1] = first_layer
        self._tables: dict[str, npt.NDArray[np.generic]] = {
            "layers": layers,
            "parts": parts,
            "extents": expected(self._groups),
            "requests": table,
            "states": self._states,
            "digest": np.frombuffer(prompt.digest, np.uint8),
            "keys": np.frombuffer(b"".join(prompt.keys[:blocks]), np.uint8),
            "tokens": np.ascontiguousarray(prompt.tokens[: blocks * BLOCK_TOKENS], np.uint32),
            "checks": self._checks,
            "left": self._left,
            "pieces_ended": self._ended,
            "bytes_read": self._bytes,
            "limit": load.wanted_before,
            "cancelled": load.stopped,
            "closing": self._closing,
            "waiting": pool.waiting,
        }
        self._batch = reader.batch()
        for name, array in self._tables.items():
            setattr(self._batch, name, array.ctypes.data)
        if raw.until_s < math.inf:
            self._batch.until_ns = int(raw.until_s * 1e9)
        self._batch.request_count = len(table)
        self._batch.laid_out = len(first)
        self._batch.piece_count = load.pieces
        self._batch.layer_count = count
        self._batch.blocks_per_piece = per_piece

    def lay_out_rest(self) -> None:
        """Lay out what comes behind the heads. Never raises."""
        if not self._take_rest():
            return
        heads, first_part = len(self._heads), self._parts_of_heads
        if not self._find_other_layers():
            self._leave_rest(None)
            return
        try:
            table, parts, which = lay_out(self._groups, self._raw, rest=True, first_part=first_part)
            self._tables["requests"][heads:], self._tables["parts"][first_part:] = table, parts
            self._request_extents += table["extent"].tolist()
            self._which += which
        except BaseException as error:  # noqa: BLE001 - as in the pool: the load must be told of every piece
            self.pool.counters.add("job_errors")
            _log.exception("a load could not be laid out")
            self._leave_rest(error)
            return
        self._reader.go_on(self._batch)

    def _find_other_layers(self) -> bool:
        """Ask where the layers behind layer 0 go, for which the heads did not wait; False where that does not suit."""
        try:
            found = destination_of(self._into, self.load, range(1, len(self._left)))
        except Exception:  # noqa: BLE001 - an engine's view may raise anything: the portable way meets it again, and tells
            _log.debug("a load is read on the portable way", exc_info=True)
            return False
        if found is None:
            return False
        self._tables["layers"][1:] = found[0]
        self._memory += found[1]
        return True

    def work(self, staging: Staging | None) -> bool:
        """Read until nothing is left (then False) or a slice of time is over. Without staging nothing is read any more, and
        what waits for a head is left to whoever is reading that."""
        memory = memoryview(b"") if staging is None else staging.take(self._staging_bytes)
        address = native.address_of(memory) if memory.nbytes else 0
        while True:
            first = self._take_ready() if self._waiting else -1
            outcome, number = self._reader.work(
                self._batch, address, memory.nbytes, int(_SLICE_S * 1e9), int(_ALONE_S * 1e9), first
            )
            if outcome is Outcome.HEAD_READ:
                self._head(number, memory, address)
            elif outcome is Outcome.HEAD_WRONG:
                self._reread_head(number)
            elif outcome is Outcome.HANDED_BACK:
                self._hand_back(number, staging)
            elif outcome is Outcome.NOT_YET:
                self._waiting.append(number)
            if outcome in _MAY_HAVE_ENDED or outcome is Outcome.NONE_LEFT:
                self._tell()
            if outcome is Outcome.TIME_IS_UP:
                return True
            if outcome is Outcome.NONE_LEFT and (staging is None or not self._waiting):
                return False
            if staging is not None and outcome in (Outcome.NOT_YET, Outcome.NONE_LEFT):
                with self._changed:
                    if not self._changed.wait_for(lambda: not self._waiting or self._ready() is not None, _SLICE_S):
                        return True

    def abandon(self, error: BaseException) -> None:
        """Tell the load that nothing more is read."""
        self._error = error
        self._closing[0] = 1
        if self._take_rest():
            self._leave_rest(error)
        while self.work(None):
            pass

    def leave(self) -> None:
        """Note that a worker is gone for good; the last one lets go of the files."""
        with self._changed:
            self._workers -= 1
            if self._workers:
                return
        if self._rest_left:
            self._hand_over_rest()
        self._tier.let_go_raw(self._raw, bytes_read=int(self._bytes.sum()))

    def _take_rest(self) -> bool:
        with self._changed:
            mine, self._rest_taken = not self._rest_taken, True
        return mine

    def _leave_rest(self, error: BaseException | None) -> None:
        """Read nothing behind the heads here: it is left to the portable way, or, with an error, not read at all. That is done
        when all heads have ended, since only then it is known which extents the portable way has taken over already."""
        self._rest_left = True
        self._no_rest, self._error = error, self._error or error
        self._closing[0] = 1
        never = sum((plan.counts for plan in self._plans), np.zeros_like(self._never_read))
        never[0] -= sum(bool(plan.together) for plan in self._plans)
        self._never_read += never  # at once: whoever tells meanwhile may take a part of it for all that is left
        self._batch.request_count = len(self._heads)  # whoever comes to this end tells with the numbers from above

    def _hand_over_rest(self) -> None:
        for extent in np.flatnonzero(self._states != HeaderIs.PORTABLE).tolist():
            plan = self._plans[extent]
            head, header = self._heads[extent], self._header(extent)
            jobs = [head.job(header, plan.layout, request) for request in plan.requests]
            if self._no_rest is None:
                self.pool.submit(jobs)
            else:
                for job in jobs:
                    job.abandon(self._no_rest)

    def _head(self, number: int, memory: memoryview, address: int) -> None:
        """Decode and compare a header that lies in staging and that C did not take for right: another retention class's name is
        longer, say. What is not as it should be, the portable way will say."""
        extent = self._request_extents[number]
        head, plan = self._heads[extent], self._plans[extent]
        at = int(self._raw.offsets[extent]) % ALIGNMENT
        try:
            header = decode_header(memory[at : at + plan.layout.header_bytes], self._prompt.representation)
            layout = header.layout(self._prompt.representation)
            right = header.algorithm is XXH3 and head.mismatch(header) is None  # C knows no other
            right = right and layout.layer_offsets == plan.layout.layer_offsets
            right = right and layout.extent_bytes == int(self._raw.extent_bytes[extent])
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
            self._reread_head(number)

    def _reread_head(self, number: int) -> None:
        """Have the pieces of layer 0 read that came with a header and were not right."""
        extent = self._request_extents[number]
        plan = self._plans[extent]
        job = self._heads[extent].job(self._header(extent), plan.layout, Request(range(1), 0, plan.together))
        self.pool.submit([job])

    def _header(self, extent: int) -> ExtentHeader:
        """Return what is known of a header that was found to be right: of the blocks that are wanted."""
        found = self._headers[extent]
        if found is not None:
            return found
        span, blocks, representation = self._heads.spans[extent], int(self._raw.blocks[extent]), self._prompt.representation
        per_piece = representation.blocks_per_piece
        keys = [b""] * blocks
        keys[span.first * per_piece : (span.first + span.pieces) * per_piece] = self._prompt.keys[
            span.start * per_piece : (span.start + span.pieces) * per_piece
        ]
        checks = np.zeros((representation.layers, blocks // per_piece, 16), np.uint8)
        checks[:, span.first : span.first + span.pieces] = self._checks[:, span.start : span.start + span.pieces]
        return ExtentHeader(self._prompt.digest, b"", tuple(keys), np.zeros(0, np.uint32), checks)

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
        job = self._heads[extent].job(self._header(extent), plan.layout, plan.requests[which])
        try:
            if self._error is not None or staging is None:
                job.abandon(self._error or RuntimeError("a worker has no staging"))
            else:
                job.run(staging)
        except BaseException as error:  # noqa: BLE001 - as in the pool: the load must be told of every piece
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
            ready = np.flatnonzero((self._left == self._never_read) & ~self._told).tolist()
            self._told[ready] = True
        for layer in ready:
            if self._ended[layer]:
                self.load.ended([layer], pieces=int(self._ended[layer]), nbytes=int(self._bytes[layer]))


class _Worker:
    """A thread's part in a batch: a job that queues itself again until nothing is left."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.urgency = (int(batch.load.turn_s * 1e9), 0, 0)

    def run(self, staging: Staging) -> None:
        if self._batch.work(staging):
            self._batch.pool.submit([self])
        else:
            self._batch.leave()

    def abandon(self, error: BaseException) -> None:
        self._batch.abandon(error)
        self._batch.leave()


class _Rest:
    """The job that lays out what comes behind the heads; then it is a worker like the others."""

    def __init__(self, batch: Batch, worker: _Worker) -> None:
        self._batch = batch
        self._worker = worker
        self.urgency = worker.urgency

    def run(self, staging: Staging) -> None:
        self._batch.lay_out_rest()
        self._worker.run(staging)

    def abandon(self, error: BaseException) -> None:
        self._worker.abandon(error)
