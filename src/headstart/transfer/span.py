"""Reading one run of pieces out of one extent: the header and the first of layer 0 in one read, then layer after layer.

    head job ──▶ header decoded, its keys and tokens compared with the prompt's ──▶ one job a layer and 2 MiB
                 └ first pieces of layer 0 verified                                 └ read, verify, (copy), tell the load

Pieces are read straight into the destination where direct I/O can go there, else through the thread's staging buffer, and
counted as good only once verified. Bytes from a trusted tier are this process's own and are not verified again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headstart.block.extent import ExtentHeader, ExtentLayout, decode_header, piece_check
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.arena import ALIGNMENT
from headstart.tier.base import ExtentId, ReadRange, Tier
from headstart.transfer.buffers import Bytes, Staging, flat, is_aligned, scatter, split, total_bytes
from headstart.transfer.io_pool import REQUEST_BYTES, IOPool
from headstart.transfer.load import Fault, KVView, Load


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was asked for: the keys and token ids (u32) of the blocks that matched."""

    representation: Representation
    digest: bytes
    keys: Sequence[bytes]
    tokens: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Span:
    """`pieces` pieces of the prompt from piece `start` on lie in `extent`, from its piece `first` on. Leased by the caller."""

    tier: Tier
    pool: IOPool
    extent: ExtentId
    first: int
    pieces: int
    start: int


def start_reading(load: Load, spans: Sequence[Span], prompt: Prompt, into: KVView) -> None:
    """Queue the head job of every span; each queues the rest of its extent once the header is known to be the right one."""
    for source, span in enumerate(spans):
        span.pool.submit([_HeadJob(load, source, span, prompt, into)])


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
        self.start = span.start  # in the prompt
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

    def abandon(self, error: Exception) -> None:
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

    def destination(self, sizes: Sequence[int]) -> Bytes:
        buffers: Bytes = flat(self.into.buffers(self.layer, self.start, sizes)) if sizes else []
        if total_bytes(buffers) != sum(sizes):
            raise ValueError(
                f"the destination gave {total_bytes(buffers)} bytes for {len(sizes)} pieces from {self.start} on of layer "
                f"{self.layer}, which have {sum(sizes)}"
            )
        return buffers

    def read(self, staging: Staging, offset: int, buffers: Bytes, *, head_bytes: int = 0) -> _Arrival:
        """Read `head_bytes` from `offset` on, and what follows into `buffers` or into staging if they are not aligned."""
        nbytes = total_bytes(buffers)
        # A trusted tier copies from memory, which needs no alignment.
        at_once = self.span.tier.trusted or ((offset + head_bytes) % ALIGNMENT == 0 and is_aligned(buffers))
        if at_once and not isinstance(buffers, np.ndarray):
            head = staging.take(head_bytes)
            self._fill(offset, [head, *buffers] if head_bytes else buffers, head_bytes + nbytes)
            return _Arrival(head, buffers, staged=None)
        at = offset % ALIGNMENT
        end = at + head_bytes + nbytes
        bounce = staging.take(end + -end % ALIGNMENT)
        self._fill(offset - at, [bounce], bounce.nbytes)
        payload = bounce[at + head_bytes : end]
        return _Arrival(bounce[at : at + head_bytes], [payload], staged=payload)

    def keep(self, arrival: _Arrival, header: ExtentHeader, buffers: Bytes, sizes: Sequence[int]) -> Fault | None:
        """Verify pieces that have arrived, copy the good ones out of staging; return the fault of the first bad one."""
        good = len(sizes)
        if not self.span.tier.trusted:
            good = self._verified(arrival.payload, header, sizes)
        if arrival.staged is not None:
            nbytes = sum(sizes[:good])
            kept = buffers[:good] if isinstance(buffers, np.ndarray) else split(buffers, [nbytes])[0]
            scatter(arrival.staged[:nbytes], kept)
        if good == len(sizes):
            return None
        message = f"piece {self._in_extent(good)} of layer {self.layer} in extent {self.span.extent} is not what was written"
        return self.fault("corrupt", message, piece=self.start + good)

    def _verified(self, payload: Sequence[memoryview], header: ExtentHeader, sizes: Sequence[int]) -> int:
        for i, buffers in enumerate(split(payload, sizes)):
            piece = self._in_extent(i)
            check = piece_check(
                algorithm=header.algorithm,
                representation=self.prompt.digest,
                key=header.keys[(piece + 1) * self.prompt.representation.blocks_per_piece - 1],
                layer=self.layer,
                buffers=buffers,
            )
            if check != header.checks[self.layer, piece].tobytes():
                return i
        return len(sizes)

    def _in_extent(self, i: int) -> int:
        return self.span.first + (self.start - self.span.start) + i

    def _fill(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> None:
        got = self.span.tier.read([ReadRange(self.span.extent, offset, buffers)])
        if got != nbytes:
            raise StoreError(f"a read of {nbytes} bytes at {offset} of extent {self.span.extent} gave {got}")


@dataclass(frozen=True, slots=True)
class _Arrival:
    head: memoryview
    payload: Sequence[memoryview]
    staged: memoryview | None  # the payload where it has to be copied to its destination


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
        size = representation.layer_bytes[0]
        together = 0
        if size is not None and span.first == 0 and not self.alone:
            together = min(wanted, max(1, (REQUEST_BYTES - info.header_bytes) // size))
        sizes = [size or 0] * together
        buffers = self.destination(sizes)
        try:
            arrival = self.read(staging, 0, buffers, head_bytes=info.header_bytes)
        except (StoreError, OSError):
            if not together:
                raise
            span.pool.submit([_HeadJob(self.load, self.source, span, self.prompt, self.into, alone=True)])
            return
        # A copy: the header outlives the staging buffer that it lies in.
        header = decode_header(bytes(arrival.head), representation)
        layout = header.layout(representation)
        fault = self._mismatch(header)
        if fault is None and (layout.header_bytes, layout.extent_bytes) != (info.header_bytes, info.extent_bytes):
            fault = self.fault("stale", f"extent {span.extent} has another size than the tier says")
        if fault is not None:
            self.end(fault)
            return
        fault = self.keep(arrival, header, buffers, sizes)
        rest = self._rest(header, layout, together)
        nbytes = info.header_bytes + sum(sizes)
        self.load.ended([0], pieces=together, nbytes=nbytes, fault=fault)
        span.pool.submit(rest)

    def end(self, fault: Fault | None) -> None:
        self.load.ended(range(self.prompt.representation.layers), pieces=self.pieces, fault=fault)

    def _mismatch(self, header: ExtentHeader) -> Fault | None:
        """Compare what the extent says it is with what was asked for: a collision of hashes is a miss."""
        blocks = self.prompt.representation.blocks_per_piece
        count = self.span.pieces * blocks
        there, here = self.span.first * blocks, self.span.start * blocks
        if header.keys[there : there + count] != tuple(self.prompt.keys[here : here + count]):
            return self.fault("stale", f"extent {self.span.extent} holds other blocks than the tier says")
        theirs = header.tokens[there * BLOCK_TOKENS : (there + count) * BLOCK_TOKENS]
        if not np.array_equal(theirs, self.prompt.tokens[here * BLOCK_TOKENS : (here + count) * BLOCK_TOKENS]):
            return self.fault("collision", f"extent {self.span.extent} has the keys but not the tokens of the prompt")
        return None

    def _rest(self, header: ExtentHeader, layout: ExtentLayout, together: int) -> list[_RangeJob]:
        jobs = []
        for layer in range(self.prompt.representation.layers):
            skip = together if layer == 0 else 0
            sizes = _piece_sizes(header, layout, layer)[self.span.first + skip : self.span.first + self.span.pieces]
            for first, count in _requests(sizes):
                jobs.append(_RangeJob(self, header, layout, layer, first=skip + first, sizes=sizes[first : first + count]))
        return jobs


class _RangeJob(_Job):
    """Reads some pieces of one layer that lie side by side."""

    def __init__(
        self, head: _Job, header: ExtentHeader, layout: ExtentLayout, layer: int, *, first: int, sizes: Sequence[int]
    ) -> None:
        super().__init__(head.load, head.source, head.span, head.prompt, head.into)
        self.header = header
        self.layout = layout
        self.layer = layer
        self.start = head.span.start + first
        self.sizes = sizes
        self.pieces = len(sizes)

    def attempt(self, staging: Staging, wanted: int) -> None:
        sizes = self.sizes[:wanted]
        buffers = self.destination(sizes)
        offset, nbytes = self.layout.piece_range(self.layer, self._in_extent(0), wanted)
        try:
            arrival = self.read(staging, offset, buffers)
        except (StoreError, OSError):
            if self.pieces == 1:
                raise
            # Piece by piece, so that the pieces before the bad one are kept.
            self.span.pool.submit([self._piece(i) for i in range(self.pieces)])
            return
        fault = self.keep(arrival, self.header, buffers, sizes)
        self.load.ended([self.layer], pieces=self.pieces, nbytes=nbytes, fault=fault)

    def end(self, fault: Fault | None) -> None:
        self.load.ended([self.layer], pieces=self.pieces, fault=fault)

    def _piece(self, i: int) -> _RangeJob:
        first = self.start - self.span.start + i
        return _RangeJob(self, self.header, self.layout, self.layer, first=first, sizes=self.sizes[i : i + 1])


def _piece_sizes(header: ExtentHeader, layout: ExtentLayout, layer: int) -> list[int]:
    fixed = layout.layer_bytes[layer]
    if fixed is not None:
        return [fixed] * layout.pieces
    assert header.piece_bytes is not None
    return [int(nbytes) for nbytes in header.piece_bytes[layer]]


def _requests(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, count) of consecutive runs of at most REQUEST_BYTES each; a piece above that is a run of its own."""
    runs = []
    first = nbytes = 0
    for i, size in enumerate(sizes):
        if i > first and nbytes + size > REQUEST_BYTES:
            runs.append((first, i - first))
            first, nbytes = i, 0
        nbytes += size
    if first < len(sizes):
        runs.append((first, len(sizes) - first))
    return runs
