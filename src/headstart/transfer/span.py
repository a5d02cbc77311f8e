"""Reading one run of pieces out of one extent: the header and the first of layer 0 in one read, then layer after layer.

    head job ──▶ header decoded, its keys and tokens compared with the prompt's ──▶ a job for each request of `plan.py`
                 └ what came with it: verified                                      └ read, verify, (copy), tell the load

This is the portable way, which always works. Where there is a C reader, `batch.py` takes what the heads leave.

Pieces are read straight into the destination where direct I/O can go there, else through the thread's staging buffer, and
counted as good only once verified. Bytes from a trusted tier are this process's own and are not verified again.

From a far tier requests are few and large. Their bytes are taken as they come, and the load is told of layers meanwhile; what
did not come is asked for again in parts, by reads like any other tier's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from headstart.block.checks import count_right
from headstart.block.extent import ExtentHeader, ExtentLayout, decode_header
from headstart.block.keys import BLOCK_TOKENS
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.arena import ALIGNMENT, is_aligned
from headstart.tier.base import FarTier, ReadRange
from headstart.transfer import native
from headstart.transfer.batch import Start
from headstart.transfer.buffers import Bytes, Coming, Staging, flat, scatter, split, total_bytes
from headstart.transfer.io_pool import IOPool
from headstart.transfer.load import Fault, KVView, Load
from headstart.transfer.plan import Prompt, Request, Span, expected_layout, far_requests, read_with_head, requests
from headstart.transfer.state import StateSpan, start_reading_state
from headstart.transfer.taking import Taking

_NOTHING = Request(range(0), 0, 0)
_TOLD_BYTES = 1 << 20  # of a request that is still coming: the load is told of so much at once
_log = logging.getLogger(__name__)


def start_reading(load: Load, spans: Sequence[Span], prompt: Prompt, into: KVView, *, state: StateSpan | None = None) -> None:
    """Queue the head job of every span; each queues the rest of its extent once the header is known to be the right one. Where
    there is a C reader, it reads the heads as well. `state`: where the state lies that the load brings, first of all."""
    if state is not None:
        start_reading_state(load, state, source=len(spans), representation=prompt.representation)
    sources: dict[IOPool, list[int]] = {}
    for source, span in enumerate(spans):
        sources.setdefault(span.pool, []).append(source)
    taking = Taking(load, prompt, into)
    for pool, numbers in sources.items():
        heads = _Heads(numbers, [spans[source] for source in numbers], partial(_HeadJob, load, prompt, into, taking))
        # By type: a tier that only passes on what it does not know may break bytes on their way, and must be asked for them.
        span = heads.spans[0]
        suits = hasattr(type(span.tier), "raw") and span.far is None and not prompt.representation.varies
        pool.submit([Start(load, prompt, into, pool, heads)] if suits and native.reader() is not None else heads)


class _Heads:
    """The head jobs of spans, with their numbers in the load; each takes 1.5 µs, which nothing waits for if none is made."""

    def __init__(self, sources: Sequence[int], spans: Sequence[Span], make: Callable[[int, Span], _HeadJob]) -> None:
        self.spans = spans
        self._sources = sources
        self._make = make

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, number: int, /) -> _HeadJob:
        return self._make(self._sources[number], self.spans[number])

    def __iter__(self) -> Iterator[_HeadJob]:
        return map(self._make, self._sources, self.spans)


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

    def read(
        self, staging: Staging, parts: Sequence[_Part], *, offset: int, head_bytes: int = 0
    ) -> tuple[memoryview, Iterator[_Part]]:
        """Read from `offset` on `head_bytes` and parts that lie behind them in their order: into their buffers if all of it can
        go there directly, else into staging. Returns the head, and the parts, each as it is there; it has to be kept before
        the next one is asked for."""
        end = parts[-1].offset + parts[-1].nbytes if parts else offset + head_bytes
        into = self._direct(parts, offset, head_bytes)
        if into is not None:
            head = staging.take(head_bytes)
            self._fill(offset, [head, *into] if head_bytes else into, end - offset)
            return head, iter(parts)
        start = offset - offset % ALIGNMENT
        bounce = staging.take(end - start + -(end - start) % ALIGNMENT)
        self._fill(start, [bounce], bounce.nbytes)
        for part in parts:
            part.staged = bounce[part.offset - start : part.offset - start + part.nbytes]
        return bounce[offset - start : offset - start + head_bytes], iter(parts)

    def stream(self, far: FarTier, offset: int, end: int) -> Coming:
        """Ask a far tier for a part of the extent, in one request."""
        return Coming(far.stream(self.span.extent, offset, end - offset), at=offset)

    def as_it_comes(self, coming: Coming, staging: Staging, parts: Sequence[_Part]) -> Iterator[_Part]:
        """As `read`, from a stream, while parts are asked for. What lies between them is thrown away."""
        bounce = staging.take(max((part.nbytes for part in parts if isinstance(part.buffers, np.ndarray)), default=0))
        for part in parts:
            if isinstance(part.buffers, np.ndarray):
                part.staged = bounce[: part.nbytes]
                coming.fill(part.offset, [part.staged])
            else:
                coming.fill(part.offset, part.buffers)
            yield part
        coming.end()

    def keep(self, part: _Part, header: ExtentHeader) -> Fault | None:
        """Verify pieces that have arrived, copy the good ones out of staging; return the fault of the first bad one."""
        sizes, buffers = part.sizes, part.buffers
        good = len(sizes) if self.span.tier.trusted else self._count_right(part, header)
        if part.staged is not None:
            nbytes = sum(sizes[:good])
            scatter(part.staged[:nbytes], buffers[:good] if isinstance(buffers, np.ndarray) else split(buffers, [nbytes])[0])
        if good == len(sizes):
            return None
        return self.not_right(part.layer, good)

    def not_right(self, layer: int, i: int) -> Fault:
        message = f"piece {self._in_extent(i)} of layer {layer} in extent {self.span.extent} is not what was written"
        return self.fault("corrupt", message, piece=self.start + i)

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

    def _direct(self, parts: Sequence[_Part], offset: int, head_bytes: int) -> list[memoryview] | None:
        """Return the destinations of parts one behind the other; None where a read cannot go right into them."""
        into: list[memoryview] = []
        end = offset + head_bytes
        for part in parts:
            if isinstance(part.buffers, np.ndarray) or part.offset != end:
                return None
            into += part.buffers
            end += part.nbytes
        # A trusted tier copies from memory, which needs no alignment.
        if not self.span.tier.trusted and (offset % ALIGNMENT or not all(map(is_aligned, into))):
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
    """Reads the header, and with it what of the first layers lies right behind it; queues the rest.

    `taking`: the load's. `alone`: the header only, after the two together could not be read."""

    def __init__(
        self, load: Load, prompt: Prompt, into: KVView, taking: Taking, source: int, span: Span, *, alone: bool = False
    ) -> None:
        layers = range(prompt.representation.layers)
        super().__init__(load, source, span, prompt, into, layers=layers, first=0, pieces=span.pieces)
        self.taking = taking
        self.alone = alone

    def attempt(self, staging: Staging, wanted: int) -> None:
        span, representation = self.span, self.prompt.representation
        shape = span.tier.shape(span.extent)
        if shape is None:
            raise StoreError(f"extent {span.extent} is gone")
        parts: list[_Part] = []  # that come with the header, where they lie as expected
        stream: Coming | None = None  # that brings them, or
        coming: Iterator[_Part] = iter(())  # they themselves
        expected, planned = None, None
        far = None if self.alone else span.far
        end = shape.header_bytes
        if not (self.alone or representation.varies):
            expected = expected_layout(representation, shape.blocks, shape.header_bytes)
            planned = self._planned(expected, wanted)
            if far is None:
                places = (_place(expected, layer, span.first, planned[0].count) for layer in planned[0].layers)
                parts = [self.part(layer, *place) for layer, place in zip(planned[0].layers, places, strict=True)]
            elif planned[0].layers:
                end = _end(expected, planned[0], span.first)
        try:
            if far is None:
                head, coming = self.read(staging, parts, offset=0, head_bytes=shape.header_bytes)
            else:
                stream = self.stream(far, 0, end)
                head = staging.take(shape.header_bytes)
                stream.fill(0, [head])
        except (StoreError, OSError):
            if self.alone or not (parts or far):
                raise
            self._again()
            return
        header = decode_header(head, representation, span.tier.sealing)
        layout = header.layout(representation)
        fault = self.mismatch(header)
        if fault is None and (layout.header_bytes, layout.extent_bytes) != (shape.header_bytes, shape.extent_bytes):
            fault = self.fault("stale", f"extent {span.extent} has another size than the tier says")
        if fault is not None:
            self.end(fault)
            return
        if expected is not None and layout.layer_offsets != expected.layer_offsets:
            self._again()
            return
        first, *rest = self._planned(layout, 0) if planned is None else planned
        self.load.ended([], pieces=0, nbytes=shape.header_bytes)
        if rest:
            span.pool.submit([_Rest(self, header, layout, rest)])
        if first.layers:
            job = self.job(header, layout, first)
            job.arriving, job.coming = stream, None if stream is not None else coming
            _run(job, staging)
        elif stream is not None:
            stream.end()

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

    def _planned(self, layout: ExtentLayout, with_head: int) -> Sequence[Request]:
        """Return how the extent is read. The first request comes with the header: of a near tier some of so many pieces of
        layer 0, of a far one what fits, and nothing where `with_head` is 0."""
        far, first, pieces = self.span.far, self.span.first, self.span.pieces
        if far is not None:
            planned = far_requests(layout, first=first, pieces=pieces, most_bytes=far.request_bytes, gap_bytes=far.gap_bytes)
            return planned if with_head or not planned[0].layers else [_NOTHING, *planned]
        together = read_with_head(self.prompt.representation, first=first, wanted=with_head) if with_head else 0
        return [Request(range(bool(together)), 0, together), *requests(layout, first=first, pieces=pieces, done=together)]

    def _again(self) -> None:
        self.span.pool.submit([_HeadJob(self.load, self.prompt, self.into, self.taking, self.source, self.span, alone=True)])


def _run(job: _RangeJob, staging: Staging) -> None:
    """Run a job that is not the pool's, but ends as one: the load is told exactly once."""
    try:
        job.run(staging)
    except BaseException as error:  # noqa: BLE001 - as in the pool: the load must be told of every piece
        job.span.pool.counters.add("job_errors")
        _log.exception("a read job failed unexpectedly")
        job.abandon(error)


class _Rest:
    """What of a span is still to be read: a job that queues itself again before it reads its next request.

    So the queue holds a job for each extent, in the same order as if it held all requests. Those would be made when the heads
    come in, thousands of them, while the device waits."""

    def __init__(self, head: _HeadJob, header: ExtentHeader, layout: ExtentLayout, requests: Sequence[Request]) -> None:
        self._head = head
        self._header = header
        self._layout = layout
        self._requests = requests
        self._done = 0

    @property
    def urgency(self) -> tuple[int, ...]:
        request = self._requests[self._done]
        return self._head.urgency[0], request.layers.start, self._head.start + request.first

    def run(self, staging: Staging) -> None:
        job = self._next()
        if self._done < len(self._requests):
            job.span.pool.submit([self])  # from here on it may be another thread's
        _run(job, staging)

    def abandon(self, error: BaseException) -> None:
        while self._done < len(self._requests):
            self._next().abandon(error)

    def _next(self) -> _RangeJob:
        request = self._requests[self._done]
        self._done += 1
        return self._head.job(self._header, self._layout, request)


class _RangeJob(_Job):
    """Reads pieces that lie side by side: some of one layer, or those of several layers. `layers`: those of which the load was
    told nothing yet. `coming`: its parts, where they are there already; `arriving`: the stream that brings them, where it has
    begun. `apart`: by a plain read, after what it is a part of could not be read."""

    coming: Iterator[_Part] | None = None
    arriving: Coming | None = None

    def __init__(
        self, head: _HeadJob | _RangeJob, header: ExtentHeader, layout: ExtentLayout, asked: Request, *, apart: bool = False
    ) -> None:
        load, source, span, prompt, into = head.load, head.source, head.span, head.prompt, head.into
        super().__init__(load, source, span, prompt, into, layers=asked.layers, first=asked.first, pieces=asked.count)
        self.header = header
        self.layout = layout
        self.taking: Taking = head.taking
        self.apart = apart

    def attempt(self, staging: Staging, wanted: int) -> None:
        layers, nbytes = 0, 0  # that have come, and that the load is not told of yet
        fault: Fault | None = None
        good = self.start + self.pieces  # the first piece that is not
        try:
            for count, size, found in self._arrive(staging, wanted):
                if found is not None and found.piece < good:
                    fault, good = found, found.piece
                layers, nbytes = layers + count, nbytes + size
                if nbytes >= _TOLD_BYTES:
                    self._tell(layers, nbytes, fault)
                    layers, nbytes, fault = 0, 0, None
        except (StoreError, OSError):
            if layers:
                self._tell(layers, nbytes, fault)
            if self.pieces == 1 and len(self.layers) == 1 and (self.apart or self.span.far is None):
                raise
            self._in_parts()
            return
        if layers:
            self._tell(layers, nbytes, fault)

    def _arrive(self, staging: Staging, wanted: int) -> Iterator[tuple[int, int, Fault | None]]:
        """Yield how many more layers have come and were verified, how many bytes they are, and the first fault in them."""
        far = None if self.apart else self.span.far
        if far is not None and self.taking.suits(self.header):
            yield from self._taken(far)
            return
        for part in self.coming or self._read(far, staging, wanted):
            yield 1, part.nbytes, self.keep(part, self.header)

    def _read(self, far: FarTier | None, staging: Staging, wanted: int) -> Iterator[_Part]:
        first = self._in_extent(0)
        parts = [self.part(layer, *_place(self.layout, layer, first, wanted)) for layer in self.layers]
        if far is not None:
            return self.as_it_comes(self._begun(far), staging, parts)
        return self.read(staging, parts, offset=parts[0].offset)[1]

    def _begun(self, far: FarTier) -> Coming:
        """Return the stream that brings all of it."""
        if self.arriving is not None:
            return self.arriving
        start = self.layout.piece_range(self.layers[0], self._in_extent(0), self.pieces)[0]
        return self.stream(far, start, _end(self.layout, self._asked(), self.span.first))

    def _taken(self, far: FarTier) -> Iterator[tuple[int, int, Fault | None]]:
        sizes = [size or 0 for size in self.prompt.representation.layer_bytes]  # none varies where `taking` suits
        for layers, right in self.taking.take(self._begun(far), self.header, self.layout, self.span, self._asked()):
            fault = None
            worst = int(right.argmin())
            if right[worst] < self.pieces:
                fault = self.not_right(layers[worst], int(right[worst]))
            yield len(layers), self.pieces * sum(sizes[layers.start : layers.stop]), fault

    def _asked(self) -> Request:
        return Request(self.layers, self.start - self.span.start, self.pieces)

    def _tell(self, layers: int, nbytes: int, fault: Fault | None) -> None:
        """Tell the load of the next so many layers."""
        self.load.ended(self.layers[:layers], pieces=self.pieces, nbytes=nbytes, fault=fault)
        self.layers = self.layers[layers:]

    def _in_parts(self) -> None:
        """Read layer by layer, a layer piece by piece, so that what lies before the bad one is kept."""
        first = self.start - self.span.start
        if len(self.layers) > 1:
            parts = [Request(range(layer, layer + 1), first, self.pieces) for layer in self.layers]
        else:
            parts = [Request(self.layers, first + i, 1) for i in range(self.pieces)] if self.layers else []
        self.span.pool.submit([_RangeJob(self, self.header, self.layout, part, apart=True) for part in parts])


def _end(layout: ExtentLayout, request: Request, first: int) -> int:
    """Return where what is asked for of an extent, from its piece `first` on, ends in its image."""
    start, nbytes = layout.piece_range(request.layers[-1], first + request.first, request.count)
    return start + nbytes


def _place(layout: ExtentLayout, layer: int, first: int, count: int) -> tuple[int, Sequence[int]]:
    """Return where pieces of a layer begin in the extent's image, and their sizes."""
    size = layout.layer_bytes[layer]
    if size is not None:  # asked for with every layer of every extent
        return layout.layer_offsets[layer] + first * size, [size] * count
    return layout.piece_range(layer, first, count)[0], layout.piece_sizes(layer, first, count)
