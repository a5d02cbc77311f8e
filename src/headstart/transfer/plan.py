"""What to read of an extent, and in which requests: pure decisions. `span.py` carries them out, or `batch.py`.

A short extent has small layers, and small requests cost a disk and a processor by their number (under some 400 KB a quarter of
the rate, at 1 MB half the processor's time of 400 KB): there one request takes several layers, 1, 2, 2-3, 4-7 …, so that the
early ones, which the engine waits for, still come alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from headstart.block.extent import ExtentHeader, ExtentLayout, layout_of
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.tier.base import ExtentId, FarTier, Tier
from headstart.transfer.io_pool import REQUEST_BYTES, IOPool, Job
from headstart.transfer.load import Fault


@dataclass(frozen=True, slots=True)
class Prompt:
    """What was asked for: the keys and token ids (u32) of the blocks that are loaded."""

    representation: Representation
    digest: bytes
    keys: Sequence[bytes]
    tokens: npt.NDArray[np.uint32]

    def part(self, first: int, pieces: int) -> Prompt:
        """Return what was asked for of `pieces` pieces from `first` on."""
        start, end = (piece * self.representation.blocks_per_piece for piece in (first, first + pieces))
        return replace(self, keys=self.keys[start:end], tokens=self.tokens[start * BLOCK_TOKENS : end * BLOCK_TOKENS])


class Span(NamedTuple):
    """Of what is loaded, `pieces` pieces from `start` on lie in `extent`, from its piece `first` on. Leased by the caller."""

    tier: Tier
    pool: IOPool
    extent: ExtentId
    first: int
    pieces: int
    start: int

    @property
    def far(self) -> FarTier | None:
        """The tier, where every request to it takes long. By type: one that only passes on what it does not know may break
        bytes on their way, and must be asked for them."""
        return cast(FarTier, self.tier) if hasattr(type(self.tier), "stream") else None


@dataclass(frozen=True, slots=True)
class Request:
    """Pieces `first` … `first+count-1` of a span, in each of `layers`: they lie side by side, but for padding."""

    layers: range
    first: int
    count: int


class Head(Job, Protocol):
    """The job that reads a span's header through the tier, and queues the rest of it."""

    @property
    def span(self) -> Span: ...

    def mismatch(self, header: ExtentHeader) -> Fault | None:
        """Return what is wrong where an extent is not the one that was asked for."""
        ...

    def job(self, header: ExtentHeader, layout: ExtentLayout, request: Request) -> Job:
        """Return the job that reads a request through the tier."""
        ...


class Heads(Protocol):
    """The head jobs of spans that one pool reads, each made when it is asked for: with the C reader most never are."""

    @property
    def spans(self) -> Sequence[Span]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Head: ...

    def __iter__(self) -> Iterator[Head]: ...


def read_with_head(representation: Representation, *, first: int, wanted: int, most_bytes: int = REQUEST_BYTES) -> int:
    """Return how many pieces of layer 0 are read in one request with the header: of those that lie right behind it as many as
    in a request of any layer, which brings at most `most_bytes`."""
    size = representation.layer_bytes[0]
    if size is None or first:
        return 0
    requests = -(-wanted // max(1, most_bytes // size))
    return -(-wanted // requests)


@lru_cache(maxsize=256)
def expected_layout(representation: Representation, blocks: int, header_bytes: int) -> ExtentLayout:
    """Return where things lie in an extent whose header has a length that is known, if all is well. No piece may vary."""
    layout = layout_of(representation, blocks)
    shift = header_bytes - layout.header_bytes
    return replace(
        layout,
        header_bytes=header_bytes,
        layer_offsets=tuple(offset + shift for offset in layout.layer_offsets),
        state_offset=layout.state_offset + shift,
        extent_bytes=layout.extent_bytes + shift,
    )


def requests(
    layout: ExtentLayout, *, first: int, pieces: int, done: int, most_bytes: int = REQUEST_BYTES
) -> tuple[Request, ...]:
    """Return how `pieces` pieces of an extent from its piece `first` on are read. The first `done` pieces of layer 0 are there
    already.

    Runs above `most_bytes` are cut evenly at piece edges. Layers that lie side by side, as they do where all of an extent is
    wanted, go together up to as much, and at most as many as are there before them."""
    if layout.piece_ends is None:
        return _planned(layout, first, pieces, done, most_bytes)
    return _plan(layout, first, pieces, done, most_bytes)


def _plan(layout: ExtentLayout, first: int, pieces: int, done: int, most_bytes: int) -> tuple[Request, ...]:
    found = []
    layers = len(layout.layer_offsets)
    layer = 0
    while layer < layers:
        skip = done if layer == 0 else 0
        end = layer + 1
        if layer and pieces == layout.pieces:
            start = layout.layer_offsets[layer]
            while end < min(2 * layer, layers) and layout.region_end(end) - start <= most_bytes:
                end += 1
        if end > layer + 1:
            found.append(Request(range(layer, end), 0, pieces))
        else:
            sizes = layout.piece_sizes(layer, first + skip, pieces - skip)
            found += [Request(range(layer, end), skip + at, count) for at, count in _runs(sizes, most_bytes)]
        layer = end
    return tuple(found)


_planned = lru_cache(maxsize=256)(_plan)  # most extents of a prompt are of a few lengths


def far_requests(layout: ExtentLayout, *, first: int, pieces: int, most_bytes: int, gap_bytes: int) -> tuple[Request, ...]:
    """Return how the same is read where every request takes long: as few as there can be, each of up to `most_bytes`. The first
    one begins with the header, whether or not any layers go with it.

    Early layers are not asked for alone: they come first in what is read as it comes. Up to `gap_bytes` that nobody wants, as
    between the layers of a part of an extent, are brought along, since that takes no longer than another request."""
    if layout.piece_ends is None:
        return _far_planned(layout, first, pieces, most_bytes, gap_bytes)
    return _far_plan(layout, first, pieces, most_bytes, gap_bytes)


def _far_plan(layout: ExtentLayout, first: int, pieces: int, most_bytes: int, gap_bytes: int) -> tuple[Request, ...]:
    found = [Request(range(0), 0, 0)]
    begin, end = 0, layout.header_bytes  # of the newest
    for layer in range(len(layout.layer_offsets)):
        for at, count in _runs(layout.piece_sizes(layer, first, pieces), most_bytes):
            start, nbytes = layout.piece_range(layer, first + at, count)
            newest = found[-1]
            fits = start - end <= gap_bytes and start + nbytes - begin <= most_bytes
            if fits and not newest.layers:
                found[-1] = Request(range(layer, layer + 1), at, count)
            elif fits and count == newest.count == pieces:
                found[-1] = replace(newest, layers=range(newest.layers.start, layer + 1))
            else:
                found.append(Request(range(layer, layer + 1), at, count))
                begin = start
            end = start + nbytes
    return tuple(found)


_far_planned = lru_cache(maxsize=256)(_far_plan)


def _runs(sizes: Sequence[int], most_bytes: int) -> list[tuple[int, int]]:
    """Return (first, count) of consecutive runs of at most `most_bytes` each, evenly long where all pieces are; a piece above
    that is a run of its own."""
    runs = []
    first = nbytes = 0
    for i, size in enumerate(sizes):
        if i > first and nbytes + size > most_bytes:
            runs.append((first, i - first))
            first, nbytes = i, 0
        nbytes += size
    if first < len(sizes):
        runs.append((first, len(sizes) - first))
    if len(runs) > 1 and min(sizes) == max(sizes):
        count = -(-len(sizes) // len(runs))
        return [(at, min(count, len(sizes) - at)) for at in range(0, len(sizes), count)]
    return runs
