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

from headstart.block.checks import count_right
from headstart.block.extent import ExtentHeader, ExtentLayout, decode_header
from headstart.block.keys import BLOCK_TOKENS
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.arena import ALIGNMENT, is_aligned
from headstart.tier.base import ReadRange
from headstart.transfer import native
from headstart.transfer.batch import Start
from headstart.transfer.buffers import Bytes, Staging, flat, scatter, split, total_bytes
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

    def __init__(
        self, load: Load, source: int, span: Span, prompt: Prompt, into: KVView, *, layers: range, first: int, pieces: int
    ) -> None:
        """`first` … `first+pieces-1`: of the span's pieces, in each of `layers`."""
        self.load = load
        self.source = source
        self.span = span
        self.prompt = prompt
        self.into = into
        self.layers = layers
        self.start = span.start + first  # in what is loaded
        self.pieces = pieces
        self.urgency = (int(load.turn_s * 1e9), layers.start, self.start)

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
        self.load.ended(self.layers, pieces=self.pieces, fault=fault)

    def fault(self, reason: str, message: object, *, piece: int | None = None) -> Fault:
        piece = self.start if piece is None else piece
        return Fault(source=self.source, piece=piece, reason=reason, message=f"tier {self.span.tier.name!r}: {message}")

    def part(self, layer: int, offset: int, sizes: Sequence[int]) -> _Part:
        """Return where the first pieces go, whose bytes begin at `offset` of the extent's image."""
        nbytes, first = sum(sizes), self.load.first_piece + self.start
        buffers: Bytes = flat(self.into.buffers(layer, first, sizes)) if sizes else []
        if total_bytes(buffers) != nbytes:
            raise ValueError(
                f"the destination gave {total_bytes(buffers)} bytes for {len(sizes)} pieces from {first} on of layer {layer}, "
                f"which have {nbytes}"
            )
        return _Part(layer, offset, sizes, nbytes, buffers)

    def read(self, staging: Staging, parts: Sequence[_Part], *, head_bytes: int = 0) -> memoryview:
        """Read parts that lie one behind the other, and `head_bytes` before the first: into their buffers if all of it can go
        there directly, else into staging. Returns the head; each part learns where it is."""
        offset = parts[0].offset - head_bytes
        end = parts[-1].offset + parts[-1].nbytes
        into = self._direct(parts, head_bytes)
        if into is not None:
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
        sizes, buffers = part.sizes, part.buffers
        good = len(sizes) if self.span.tier.trusted else self._count_right(part, header)
        if part.staged is not None:
            nbytes = sum(sizes[:good])
            scatter(part.staged[:nbytes], buffers[:good] if isinstance(buffers, np.ndarray) else split(buffers, [nbytes])[0])
        if good == len(sizes):
            return None
        message = f"piece {self._in_extent(good)} of layer {part.layer} in extent {self.span.extent} is not what was written"
        return self.fault("corrupt", message, piece=self.start + good)

    def _count_right(self, part: _Part, header: ExtentHeader) -> int:
        if part.staged is not None:
            payload: Sequence[memoryview] = [part.staged]
        else:
            assert not isinstance(part.buffers, np.ndarray)  # which is never read into directly
            payload = part.buffers
        first, count, per_piece = self._in_extent(0), len(part.sizes), self.prompt.representation.blocks_per_piece
        return count_right(
            header.checks[part.layer, first : first + count].tobytes(),
            algorithm=header.algorithm,
            representation=self.prompt.digest,
            keys=header.keys[(first + 1) * per_piece - 1 : (first + count) * per_piece : per_piece],
            layer=part.layer,
            pieces=split(payload, part.sizes),
        )

    def _direct(self, parts: Sequence[_Part], head_bytes: int) -> list[memoryview] | None:
        """Return the destinations of parts one behind the other; None where a read cannot go right into them."""
        into: list[memoryview] = []
        end = parts[0].offset
        for part in parts:
            if isinstance(part.buffers, np.ndarray) or part.offset != end:
                return None
            into += part.buffers
            end += part.nbytes
        # A trusted tier copies from memory, which needs no alignment.
        if not self.span.tier.trusted and ((parts[0].offset - head_bytes) % ALIGNMENT or not all(map(is_aligned, into))):
            return None
        return into

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
        layers = range(prompt.representation.layers)
        super().__init__(load, source, span, prompt, into, layers=layers, first=0, pieces=span.pieces)
        self.alone = alone

    def attempt(self, staging: Staging, wanted: int) -> None:
        span, representation = self.span, self.prompt.representation
        shape = span.tier.shape(span.extent)
        if shape is None:
            raise StoreError(f"extent {span.extent} is gone")
        together = 0
        if not self.alone:
            together = read_with_head(representation, first=span.first, wanted=wanted, most_bytes=span.pool.request_bytes)
        part = self.part(0, shape.header_bytes, [representation.layer_bytes[0] or 0] * together)
        try:
            head = self.read(staging, [part], head_bytes=shape.header_bytes)
        except (StoreError, OSError):
            if not together:
                raise
            span.pool.submit([_HeadJob(self.load, self.source, span, self.prompt, self.into, alone=True)])
            return
        header = decode_header(head, representation)
        layout = header.layout(representation)
        fault = self.mismatch(header)
        if fault is None and (layout.header_bytes, layout.extent_bytes) != (shape.header_bytes, shape.extent_bytes):
            fault = self.fault("stale", f"extent {span.extent} has another size than the tier says")
        if fault is not None:
            self.end(fault)
            return
        fault = self.keep(part, header)
        rest = [
            self.job(header, layout, request)
            for request in requests(
                layout, first=span.first, pieces=span.pieces, done=together, most_bytes=span.pool.request_bytes
            )
        ]
        self.load.ended([0], pieces=together, nbytes=shape.header_bytes + part.nbytes, fault=fault)
        span.pool.submit(rest)

    def job(self, header: ExtentHeader, layout: ExtentLayout, request: Request) -> _RangeJob:
        return _RangeJob(self, header, layout, request)

    def mismatch(self, header: ExtentHeader) -> Fault | None:
        """Compare what the extent says it is with what was asked for: a collision of hashes is a miss."""
        blocks = self.prompt.representation.blocks_per_piece
        count = self.span.pieces * blocks
        there, here = self.span.first * blocks, self.span.start * blocks
        if header.keys[there : there + count] != tuple(self.prompt.keys[here : here + count]):
            return self.fault("stale", f"extent {self.span.extent} holds other blocks than the tier says")
        theirs = header.tokens[there * BLOCK_TOKENS : (there + count) * BLOCK_TOKENS]
        ours = self.prompt.tokens[here * BLOCK_TOKENS : (here + count) * BLOCK_TOKENS]
        if theirs.tobytes() != ours.tobytes():
            return self.fault("collision", f"extent {self.span.extent} has the keys but not the tokens of the prompt")
        return None


class _RangeJob(_Job):
    """Reads pieces that lie side by side: some of one layer, or those of several layers."""

    def __init__(self, head: _Job, header: ExtentHeader, layout: ExtentLayout, asked: Request) -> None:
        load, source, span, prompt, into = head.load, head.source, head.span, head.prompt, head.into
        super().__init__(load, source, span, prompt, into, layers=asked.layers, first=asked.first, pieces=asked.count)
        self.header = header
        self.layout = layout

    def attempt(self, staging: Staging, wanted: int) -> None:
        first = self._in_extent(0)
        parts = [
            self.part(layer, self.layout.piece_range(layer, first, wanted)[0], self.layout.piece_sizes(layer, first, wanted))
            for layer in self.layers
        ]
        try:
            self.read(staging, parts)
        except (StoreError, OSError):
            if self.pieces == 1 and len(self.layers) == 1:
                raise
            self._in_parts()
            return
        faults = [fault for part in parts if (fault := self.keep(part, self.header)) is not None]
        first_fault = min(faults, key=lambda fault: fault.piece, default=None)
        self.load.ended(self.layers, pieces=self.pieces, nbytes=sum(part.nbytes for part in parts), fault=first_fault)

    def _in_parts(self) -> None:
        """Read layer by layer, a layer piece by piece, so that what lies before the bad one is kept."""
        first = self.start - self.span.start
        if len(self.layers) > 1:
            parts = [Request(range(layer, layer + 1), first, self.pieces) for layer in self.layers]
        else:
            parts = [Request(self.layers, first + i, 1) for i in range(self.pieces)]
        self.span.pool.submit([_RangeJob(self, self.header, self.layout, part) for part in parts])
