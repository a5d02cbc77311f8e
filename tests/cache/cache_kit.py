"""Prompts, and a tier that can be told which byte of an image goes bad."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headstart.block.checks import PLAIN
from headstart.block.extent import layout_of
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.tier.base import ExtentId, ReadRange, Tier
from headstart.tier.memory import MemoryTier

TIMEOUT_S = 20.0


class SpotTier:
    """A tier that stands for a disk: not trusted, and some bytes of every image read as they should not.

    `spots`: image offset → "flip" or "eio"; of every extent, or of `victim` alone.
    `reads` records (extent, offset, nbytes) of every range asked for."""

    trusted = False
    sealing = PLAIN
    in_memory = False

    def __init__(self, inner: Tier, *, name: str = "disk") -> None:
        self.inner = inner
        self.name = name
        self.spots: dict[int, str] = {}
        self.victim: ExtentId | None = None
        self.reads: list[tuple[ExtentId, int, int]] = []

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.inner, verb)

    def read(self, reads: Sequence[ReadRange]) -> int:
        for read in reads:
            nbytes = sum(buffer.nbytes for buffer in read.buffers)
            self.reads.append((read.extent, read.offset, nbytes))
            mine = self.victim is None or self.victim == read.extent
            hit = [spot for spot in self.spots if mine and read.offset <= spot < read.offset + nbytes]
            if any(self.spots[spot] == "eio" for spot in hit):
                raise OSError(5, "planted")
            assert self.inner.read([read]) == nbytes
            for spot in hit:
                at = spot - read.offset
                for buffer in read.buffers:
                    if at < buffer.nbytes:
                        buffer[at] ^= 1
                        break
                    at -= buffer.nbytes
        return sum(buffer.nbytes for read in reads for buffer in read.buffers)


def disk(capacity_bytes: int = 16 << 20) -> SpotTier:
    return SpotTier(MemoryTier(capacity_bytes))


def cache_of(*tiers: Tier, representation: Representation = TINY, **options: Any) -> PrefixCache:
    options = {"match_timeout_s": TIMEOUT_S} | options  # a busy machine must not turn a hit into a miss
    return PrefixCache(tiers, identity=IDENTITY, representation=representation, **options)


def prompt(tokens: int, *, seed: int = 0, representation: Representation = TINY, **options: Any) -> FakeKV:
    """The KV of a prompt of so many tokens; two seeds share no prefix."""
    ids = np.arange(tokens, dtype=np.uint64) * np.uint64(7) + np.uint64(seed * 1_000_003 % (1 << 31))
    return FakeKV(representation, ids.tolist(), **options)


def spot(representation: Representation, *, pieces: int, layer: int, piece: int) -> int:
    """Return the image offset of a byte in the middle of one piece of an extent of `pieces` pieces."""
    layout = layout_of(representation, pieces * representation.blocks_per_piece)
    offset, nbytes = layout.piece_range(layer, piece, 1)
    return offset + nbytes // 2


def extents(tier: Tier) -> int:
    return tier.statistics().extents


def until(condition: Callable[[], bool]) -> None:
    """Return once another thread has made `condition` true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def leased_bytes(tier: Tier) -> int:
    """Return how many bytes of a memory tier are under a lease, by what cannot be deleted."""
    for info in list(tier.scan()):
        tier.delete([info.id], reason="user")
    return tier.statistics().live_bytes
