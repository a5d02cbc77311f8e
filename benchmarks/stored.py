"""What the store's benchmarks read and write: two models' representations, and 1 GiB of prefix in extents of one length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headstart.block.extent import layout_of, seal
from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS, BlockKey, chain_keys
from headstart.block.representation import Representation
from headstart.tier.arena import HUGE_PAGE, Arena
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier

IDENTITY = Identity(weights=b"\x22" * 32, architecture=b'{"model_type":"benchmark"}')
SMOLLM2 = Representation(kind="gqa", layout="benchmark/1", dtype="float32", layer_bytes=(98_304,) * 30)
MLA = Representation(kind="mla", layout="benchmark/1", dtype="bfloat16", layer_bytes=(73_728,) * 61)


class QuietTier(DiskTier):
    """A disk tier that leaves extents as they are: what is measured has the lengths that it says."""

    def tend(self) -> bool:
        return False


def touched(nbytes: int, name: str) -> memoryview:
    """Return memory in huge pages that has been written to."""
    arena = Arena(nbytes, name=name)
    arena.touch(nbytes)
    region = arena.allocate(nbytes)
    assert region is not None
    memory = np.frombuffer(region.view, np.uint8)
    memory[:: HUGE_PAGE // 512] = 1  # also where the kernel could not touch it at once
    return region.view


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt of about `nbytes` of KV, in extents of `blocks` blocks."""

    representation: Representation
    blocks: int
    tokens: npt.NDArray[np.uint32]
    keys: list[BlockKey]

    @classmethod
    def of(cls, representation: Representation, blocks: int, nbytes: int) -> Prefix:
        block_bytes = sum(size or 0 for size in representation.layer_bytes)
        count = max(1, nbytes // block_bytes // blocks) * blocks
        tokens = np.arange(count * BLOCK_TOKENS + 1, dtype=np.uint32)
        return cls(representation, blocks, tokens, chain_keys(tokens[:-1], root=IDENTITY.root()))

    @property
    def request_bytes(self) -> int:
        """One layer of an extent."""
        return self.blocks * (self.representation.layer_bytes[0] or 0)

    @property
    def layer_bytes(self) -> int:
        return len(self.keys) * (self.representation.layer_bytes[0] or 0)

    @property
    def nbytes(self) -> int:
        return self.layer_bytes * self.representation.layers

    @property
    def extents(self) -> int:
        return len(self.keys) // self.blocks

    def image(self, memory: memoryview, number: int, *, retention: str = "default") -> memoryview:
        """Return extent `number`, sealed, in the front of `memory`, whose contents it is made of."""
        first = number * self.blocks
        layout = layout_of(self.representation, self.blocks, retention=retention)
        image = memory[: layout.extent_bytes]
        np.frombuffer(image, np.uint64)[layout.header_bytes // 8 :: 64] += np.uint64(number + 1)  # no two pieces alike
        seal(
            image,
            self.representation,
            parent=self.keys[first - 1] if first else IDENTITY.root(),
            keys=self.keys[first : first + self.blocks],
            tokens=self.tokens[first * BLOCK_TOKENS : (first + self.blocks) * BLOCK_TOKENS],
            retention=retention,
        )
        return image

    def extent_bytes(self) -> int:
        return layout_of(self.representation, self.blocks).extent_bytes

    def write(self, directory: Path) -> QuietTier:
        """Return a tier that holds it."""
        tier = QuietTier.open(directory, capacity_bytes=4 * self.nbytes + (256 << 20))
        self.fill(tier)
        return tier

    def fill(self, tier: Tier) -> None:
        """Write it to a tier."""
        memory = touched(self.extent_bytes(), "extent")
        np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, np.uint8)
        for number in range(self.extents):
            outcome = tier.write(self.image(memory, number), self.representation)
            assert outcome.stored, outcome


class Destination:
    """KV memory for the whole prefix, layer after layer; a `KVView`."""

    def __init__(self, prefix: Prefix, memory: memoryview) -> None:
        self._prefix = prefix
        self._memory = memory[: prefix.nbytes]

    def buffers(self, layer: int, first: int, sizes: list[int]) -> list[memoryview]:
        start = layer * self._prefix.layer_bytes + first * sizes[0]
        return [self._memory[start : start + sum(sizes)]]

    def poison(self) -> None:
        """Make every piece wrong, so that nothing of an earlier load can pass for this one's."""
        np.frombuffer(self._memory, np.uint8)[:: self._prefix.representation.layer_bytes[0]] ^= 0xFF
