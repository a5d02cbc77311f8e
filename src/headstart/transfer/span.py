"""Reading one run of pieces out of one extent: the header and the first of layer 0 in one read, then layer after layer.

    head job ──▶ header decoded, its keys and tokens compared with the prompt's ──▶ a job for each request of `plan.py`
                 └ first pieces of layer 0 verified                                 └ read, verify, (copy), tell the load

This is the portable way, which always works. Where there is a C reader, `batch.py` takes what the heads leave.

Pieces are read straight into the destination where direct I/O can go there, else through the thread's staging buffer, and
counted as good only once verified. Bytes from a trusted tier are this process's own and are not verified again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headstart.block.extent import ExtentHeader, ExtentLayout, decode_header, piece_check
from headstart.block.keys import BLOCK_TOKENS
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.arena import ALIGNMENT
from headstart.tier.base import ReadRange
from headstart.transfer import native
from headstart.transfer.batch import Start
from headstart.transfer.buffers import Bytes, Staging, flat, is_aligned, scatter, split, total_bytes
from headstart.transfer.io_pool import IOPool
from headstart.transfer.load import Fault, KVView, Load
from headstart.transfer.plan import Prompt, Request, Span, read_with_head, requests
from headstart.transfer.state import StateSpan, start_reading_state


def start_reading(load: Load, spans: Sequence[Span], prompt: Prompt, into: KVView, *, state: StateSpan | None = None) -> None:
    """Queue the head job of every span; each queues the rest of its extent once the header is known to be the right one. Where
    there is a C reader, it reads the heads as well. `state`: where the state lies that the load brings, first of all."""
    if state is not None:
        start_reading_state(load, state, source=len(spans), representation=prompt.representation)
    jobs: dict[IOPool, list[_HeadJob]] = {}
    for source, span in enumerate(spans):
        jobs.setdefault(span.pool, []).append(_HeadJob(load, source, span, prompt, into))
    for pool, heads in jobs.items():
        # By type: a tier that only passes on what it does not know may break bytes on their way, and must be asked for them.
        suits = hasattr(type(heads[0].span.tier), "raw") and not prompt.representation.varies
        pool.submit([Start(load, prompt, into, pool, heads)] if suits and native.reader() is not None else heads)


class _Job:
    """One read of a span. What can raise comes before the first word to the load; so the load is told exactly once, by `run`
    or, after an exception, by `abandon`."""

    layer = 0

    def __init__(self, load: Load, source: int, span: Span, prompt: Prompt, into: KVView) -> None:
        self.load = load
        self.source = source
        self.span = span
        self.prompt = prompt
        self.into = into
        self.start = span.start  # in what is loaded
        self.pieces = span.pieces

    @property
    def urgency(self) -> tuple[int, ...]:
        return (int(self.load.started * 1e9), self.layer, self.start)

    def run(self, staging: Staging) -> None:
        wanted = self.load.wanted(self.start, self.pieces)
        if not wanted:
            self.end(None)
            return
        try:
            self.attempt(staging, wanted)
        except ExtentCorrupt as error:
            self.end(self.fault("corrupt", error))
        except (StoreError, OSError) as error:
            self.end(self.fault("read", error))

    def abandon(self, error: BaseException) -> None:
        self.end(self.fault("closed" if isinstance(error, StoreError) else "error", error))

    def attempt(self, staging: Staging, wanted: int) -> None:
        """Read the first `wanted` pieces and tell the load."""
        raise NotImplementedError

    def end(self, fault: Fault | None) -> None:
        """Tell the load that everything this job was to bring has ended."""
        raise NotImplementedError

    def fault(self, reason: str, message: object, *, piece: int | None = None) -> Fault:
        piece = self.start if piece is None else piece
        return Fault(source=self.source, piece=piece, reason=reason, message=f"tier {self.span.tier.name!r}: {message}")

    def destination(self, layer: int, sizes: Sequence[int]) -> Bytes:
        buffers: Bytes = flat(self.into.buffers(layer, self.load.first_piece + self.start, sizes)) if sizes else []
        if total_bytes(buffers) != sum(sizes):
            raise ValueError(
                f"the destination gave {total_bytes(buffers)} bytes for {len(sizes)} pieces from "
                f"{self.load.first_piece + self.start} on of layer {layer}, which have {sum(sizes)}"
            )
        return buffers

    def read(self, staging: Staging, parts: Sequence[_Part], *, head_bytes: int = 0) -> memoryview:
        """Read parts that lie one behind the other, and `head_bytes` before the first: into their buffers if all of it can go
        there directly, else into staging. Returns the head; each part learns where it is."""
        offset = parts[0].offset - head_bytes
        end = offset + head_bytes
        # A trusted tier copies from memory, which needs no alignment.
        at_once = self.span.tier.trusted or end % ALIGNMENT == 0
        into: list[memoryview] = []
        for part in parts:
            at_once = at_once and part.offset == end and not isinstance(part.buffers, np.ndarray)
            at_once = at_once and (self.span.tier.trusted or is_aligned(part.buffers))
            end = part.offset + part.nbytes
            if at_once:
                into += part.buffers
        if at_once:
            head = staging.take(head_bytes)
            self._fill(offset, [head, *into] if head_bytes else into, end - offset)
            return head
        start = offset - offset % ALIGNMENT
        bounce = staging.take(end - start + -(end - start) % ALIGNMENT)
        self._fill(start, [bounce], bounce.nbytes)
        for part in parts:
            part.staged = bounce[part.offset - start : part.offset - start + part.nbytes]
        return bounce[offset - start : offset - start + head_bytes]

    def keep(self, part: _Part, header: ExtentHeader) -> Fault | None:
        """Verify pieces that have arrived, copy the good ones out of staging; return the fault of the first bad one."""
        sizes = part.sizes
        good = len(sizes)
        if not self.span.tier.trusted:
            good = self._verified(part, header)
        if part.staged is not None:
            nbytes = sum(sizes[:good])
            buffers = part.buffers
            kept = buffers[:good] if isinstance(buffers, np.ndarray) else split(buffers, [nbytes])[0]
            scatter(part.staged[:nbytes], kept)
        if good == len(sizes):
            return None
        message = f"piece {self._in_extent(good)} of layer {part.layer} in extent {self.span.extent} is not what was written"
        return self.fault("corrupt", message, piece=self.start + good)

    def _verified(self, part: _Part, header: ExtentHeader) -> int:
        if part.staged is not None:
            payload = [part.staged]
        else:
            assert not isinstance(part.buffers, np.ndarray)  # which is never read into directly
            payload = part.buffers
        for i, buffers in enumerate(split(payload, part.sizes)):
            piece = self._in_extent(i)
            check = piece_check(
                algorithm=header.algorithm,
                representation=self.prompt.digest,
                key=header.keys[(piece + 1) * self.prompt.representation.blocks_per_piece - 1],
                layer=part.layer,
                buffers=buffers,
            )
            if check != header.checks[part.layer, piece].tobytes():
                return i
        return len(part.sizes)

    def _in_extent(self, i: int) -> int:
        return self.span.first + (self.start - self.span.start) + i

    def _fill(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> None:
        got = self.span.tier.read([ReadRange(self.span.extent, offset, buffers)])
        if got != nbytes:
            raise StoreError(f"a read of {nbytes} bytes at {offset} of extent {self.span.extent} gave {got}")


@dataclass(slots=True)
class _Part:
    """Pieces of one layer that lie side by side: where in the extent's image, and where they go."""

    layer: int
    offset: int
    sizes: Sequence[int]
    nbytes: int
    buffers: Bytes
    staged: memoryview | None = None  # what was read, where it has to be copied to its destination


class _HeadJob(_Job):
    """Reads the header, and with it the first pieces of layer 0 where they lie right behind it; queues the rest.

    `alone`: the header only, after the two together could not be read."""

    def __init__(self, load: Load, source: int, span: Span, prompt: Prompt, into: KVView, *, alone: bool = False) -> None:
        super().__init__(load, source, span, prompt, into)
        self.alone = alone

    def attempt(self, staging: Staging, wanted: int) -> None:
        span, representation = self.span, self.prompt.representation
        info = span.tier.info(span.extent)
        if info is None:
            raise StoreError(f"extent {span.extent} is gone")
        together = 0
        if not self.alone:
            together = read_with_head(representation, header_bytes=info.header_bytes, first=span.first, wanted=wanted)
        sizes = [representation.layer_bytes[0] or 0] * together
        part = _Part(0, info.header_bytes, sizes, sum(sizes), self.destination(0, sizes))
        try:
            head = self.read(staging, [part], head_bytes=info.header_bytes)
        except (StoreError, OSError):
            if not together:
                raise
            span.pool.submit([_HeadJob(self.load, self.source, span, self.prompt, self.into, alone=True)])
            return
        # A copy: the header outlives the staging buffer that it lies in.
        header = decode_header(bytes(head), representation)
        layout = header.layout(representation)
        fault = self.mismatch(header)
        if fault is None and (layout.header_bytes, layout.extent_bytes) != (info.header_bytes, info.extent_bytes):
            fault = self.fault("stale", f"extent {span.extent} has another size than the tier says")
        if fault is not None:
            self.end(fault)
            return
        fault = self.keep(part, header)
        rest = [
            self.job(header, layout, request)
            for request in requests(layout, first=span.first, pieces=span.pieces, done=together)
        ]
        self.load.ended([0], pieces=together, nbytes=info.header_bytes + part.nbytes, fault=fault)
        span.pool.submit(rest)

    def end(self, fault: Fault | None) -> None:
        self.load.ended(range(self.prompt.representation.layers), pieces=self.pieces, fault=fault)

    def job(self, header: ExtentHeader, layout: ExtentLayout, request: Request) -> _RangeJob:
        return _RangeJob(self, header, layout, request.layers, first=request.first, pieces=request.count)

    def mismatch(self, header: ExtentHeader) -> Fault | None:
        """Compare what the extent says it is with what was asked for: a collision of hashes is a miss."""
        blocks = self.prompt.representation.blocks_per_piece
        count = self.span.pieces * blocks
        there, here = self.span.first * blocks, self.span.start * blocks
        if header.keys[there : there + count] != tuple(self.prompt.keys[here : here + count]):
            return self.fault("stale", f"extent {self.span.extent} holds other blocks than the tier says")
        theirs = header.tokens[there * BLOCK_TOKENS : (there + count) * BLOCK_TOKENS]
        ours = self.prompt.tokens[here * BLOCK_TOKENS : (here + count) * BLOCK_TOKENS]
        if len(theirs) != len(ours) or not (theirs == ours).all():
            return self.fault("collision", f"extent {self.span.extent} has the keys but not the tokens of the prompt")
        return None


class _RangeJob(_Job):
    """Reads pieces that lie side by side: some of one layer, or those of several layers."""

    def __init__(
        self, head: _Job, header: ExtentHeader, layout: ExtentLayout, layers: range, *, first: int, pieces: int
    ) -> None:
        super().__init__(head.load, head.source, head.span, head.prompt, head.into)
        self.header = header
        self.layout = layout
        self.layers = layers
        self.layer = layers.start
        self.start = head.span.start + first
        self.pieces = pieces

    def attempt(self, staging: Staging, wanted: int) -> None:
        if wanted < self.pieces and len(self.layers) > 1:
            self._in_parts()  # what is wanted does not lie side by side
            return
        first = self._in_extent(0)
        parts = []
        for layer in self.layers:
            offset, nbytes = self.layout.piece_range(layer, first, wanted)
            sizes = self.layout.piece_sizes(layer, first, wanted)
            parts.append(_Part(layer, offset, sizes, nbytes, self.destination(layer, sizes)))
        try:
            self.read(staging, parts)
        except (StoreError, OSError):
            if self.pieces == 1 and len(self.layers) == 1:
                raise
            self._in_parts()
            return
        faults = [self.keep(part, self.header) for part in parts]
        for part, fault in zip(parts, faults, strict=True):
            self.load.ended([part.layer], pieces=self.pieces, nbytes=part.nbytes, fault=fault)

    def end(self, fault: Fault | None) -> None:
        self.load.ended(self.layers, pieces=self.pieces, fault=fault)

    def _in_parts(self) -> None:
        """Read layer by layer, a layer piece by piece, so that what lies before the bad one is kept."""
        first = self.start - self.span.start
        if len(self.layers) > 1:
            parts = [self._part(range(layer, layer + 1), first, self.pieces) for layer in self.layers]
        else:
            parts = [self._part(self.layers, first + i, 1) for i in range(self.pieces)]
        self.span.pool.submit(parts)

    def _part(self, layers: range, first: int, pieces: int) -> _RangeJob:
        return _RangeJob(self, self.header, self.layout, layers, first=first, pieces=pieces)
