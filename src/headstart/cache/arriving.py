"""Blocks of a prompt that another process computes and sends: put in place as they come, found by `match` once they are whole.

    arrival = cache.expect(tokens)                   # what is stored already is held, like by a lease
    place = arrival.place(layer, first, count)       # where these pieces' bytes go
    arrival.landed(layer, first, count)              # they are there, and were checked
    arrival.release()                                # what was held may be evicted again, what is not whole is forgotten

Pieces come in runs, each run layer by layer. A run is an extent in the making, in the memory tier's own room, which nobody
finds before its last layer has landed; from then on it is held. For one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headstart.block.extent import seal
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.layout import ExtentLayout, layout_of
from headstart.cache.lease import Lease
from headstart.tier.arena import Region
from headstart.tier.base import ExtentId, Terms
from headstart.tier.memory import MemoryTier
from headstart.transfer.plan import Prompt


@dataclass(slots=True)
class _Run:
    """Pieces `first` … `first+count-1` on their way. `region`: None where there is no room, or they are there already."""

    first: int
    count: int
    layout: ExtentLayout | None = None
    region: Region | None = None
    landed: set[int] = field(default_factory=set)


class Arrival:
    """`stored_tokens`: of the prompt, what this cache had already; it is held, and `place` is for what comes behind.
    `arrived_tokens` and `arrived_bytes`: what has been put in, by now."""

    def __init__(
        self,
        lease: Lease,
        tier: MemoryTier,
        prompt: Prompt,
        *,
        root: bytes,
        extras: Callable[[int], bytes],
        terms: Terms,
    ) -> None:
        """`prompt`: all whole pieces that may be loaded. `extras` of a block by its number. Takes `lease` over."""
        self.stored_tokens = min(lease.tokens, len(prompt.keys) * BLOCK_TOKENS)
        self.stored_by_tier = lease.tokens_by_tier
        self.prompt = prompt
        self.arrived_tokens = 0
        self.arrived_bytes = 0
        self.dropped = 0  # runs for which there was no room
        self._lease = lease
        self._tier = tier
        self._root = root
        self._extras = extras
        self._terms = terms
        self._held: list[ExtentId] = []
        self._runs: dict[int, _Run] = {}  # by first piece
        self._per_piece = prompt.representation.blocks_per_piece

    @property
    def pieces(self) -> int:
        """How many pieces of the prompt can be stored at all."""
        return len(self.prompt.keys) // self._per_piece

    def key_of(self, piece: int) -> bytes:
        """Return the key that a piece is known by: its last block's."""
        return bytes(self.prompt.keys[(piece + 1) * self._per_piece - 1])

    def nbytes(self, layer: int, count: int) -> int:
        """Return the bytes of so many pieces of a layer."""
        piece_bytes = self.prompt.representation.layer_bytes[layer]
        assert piece_bytes is not None
        return count * piece_bytes

    def place(self, layer: int, first: int, count: int) -> memoryview | None:
        """Return where these pieces' bytes go; None where they are not wanted. A run that was cut in another way before begins
        anew. Raises ValueError for pieces that the prompt does not have, or that need not come."""
        stored = self.stored_tokens // self.prompt.representation.piece_tokens
        if not (0 <= layer < self.prompt.representation.layers and stored <= first < first + count <= self.pieces):
            raise ValueError(
                f"{count} pieces from {first} of layer {layer} were not asked for: {self.pieces} pieces of "
                f"{self.prompt.representation.layers} layers were, from {stored} on"
            )
        run = self._runs.get(first)
        if run is None or run.count != count:
            for other in [one for one in self._runs.values() if one.first < first + count and first < one.first + one.count]:
                self._forget(other)
            run = self._runs[first] = self._begin(first, count)
        if run.region is None or run.layout is None:
            return None
        offset, nbytes = run.layout.piece_range(layer, 0, count)
        return run.region.view[offset : offset + nbytes]

    def landed(self, layer: int, first: int) -> None:
        """Note that the bytes of this layer of the run that begins with `first` are in place and right."""
        run = self._runs[first]
        run.landed.add(layer)
        if run.region is None or len(run.landed) < self.prompt.representation.layers:
            return
        representation, blocks = self.prompt.representation, self._blocks(run)
        region, run.region = run.region, None
        seal(
            region.view,
            representation,
            parent=self._root if not blocks.start else self.prompt.keys[blocks.start - 1],
            keys=self.prompt.keys[blocks.start : blocks.stop],
            tokens=self.prompt.tokens[blocks.start * BLOCK_TOKENS : blocks.stop * BLOCK_TOKENS],
            extras=tuple(map(self._extras, blocks)),
            created_ms=int(time.time() * 1000),
            retention=self._terms.retention,
        )
        nbytes = region.nbytes
        extent = self._tier.adopt(region, representation, terms=self._terms)
        if extent is not None:
            self._held.append(extent)
            self.arrived_tokens += run.count * representation.piece_tokens
            self.arrived_bytes += nbytes

    def release(self) -> None:
        """Let go of all that is held, and of what is not whole. Twice is fine."""
        for run in list(self._runs.values()):
            self._forget(run)
        held, self._held = self._held, []
        self._tier.release(held)
        self._lease.release()

    def _begin(self, first: int, count: int) -> _Run:
        run = _Run(first, count)
        blocks = self._blocks(run)
        layout = layout_of(
            self.prompt.representation,
            len(blocks),
            extras_bytes=sum(len(self._extras(block)) for block in blocks),
            retention=self._terms.retention,
        )
        run.region = self._tier.reserve(layout.extent_bytes)
        run.layout = layout
        if run.region is None:
            self.dropped += 1
        return run

    def _forget(self, run: _Run) -> None:
        del self._runs[run.first]
        region, run.region = run.region, None
        if region is not None:
            self._tier.let_go(region)

    def _blocks(self, run: _Run) -> range:
        return range(run.first * self._per_piece, (run.first + run.count) * self._per_piece)
