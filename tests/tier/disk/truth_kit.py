"""What the proofs of truth share: caches over a directory, prompts that share nothing, and where in a file what lies."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import second_reader

from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.tier.disk import DiskTier

TIMEOUT_S = 20.0
CONVERSATION_PIECES = 40  # some runs of it are long enough to be joined


@dataclass(frozen=True)
class Part:
    """A range of bytes of one file. `kind` says what lies there, and so what a change of it must do."""

    path: Path
    start: int
    end: int
    kind: str
    extent: second_reader.Extent | None = None
    piece: int = 0  # of "piece": all before it must still be served


HARMLESS = {
    "segment padding": "a reader ignores what stands behind a segment's header",
    "layer padding": "a reader ignores what stands between layers",
    "removed": "what was removed means nothing any more",
}


def prompt(seed: int, pieces: int, representation: Representation, **options: Any) -> FakeKV:
    """Two seeds share no block."""
    tokens = np.arange(pieces * representation.piece_tokens + 1, dtype=np.uint64) * 5 + seed * 1_000_003 % (1 << 31)
    return FakeKV(representation, tokens.tolist(), **options)


def open_cache(
    root: Path, representation: Representation, *, capacity_bytes: int, **options: Any
) -> tuple[PrefixCache, DiskTier]:
    tier = DiskTier.open(root, capacity_bytes=capacity_bytes, **options)
    return cache_over(tier, representation), tier


def cache_over(tier: DiskTier, representation: Representation) -> PrefixCache:
    return PrefixCache([tier], identity=IDENTITY, representation=representation, match_timeout_s=TIMEOUT_S)


def parts(root: Path) -> Iterator[Part]:
    """Yield what lies where in the segments and journals of a directory at rest, by the second reader's account."""
    alive: dict[tuple[bytes, int], list[second_reader.Extent]] = {}
    for extent in second_reader.read_directory(root).extents:
        alive.setdefault(extent.segment, []).append(extent)
    for path in sorted(root.glob("segments/*/*.seg")):
        data = path.read_bytes()
        header_bytes, used = struct.unpack_from("<I", data, 12)[0], 112 + struct.unpack_from("<I", data, 88)[0]
        yield Part(path, 0, used, "segment header")
        yield Part(path, used, header_bytes, "segment padding")
        at = header_bytes
        for extent in sorted(alive.get(second_reader.segment_name(path), []), key=lambda e: e.offset):
            if extent.offset > at:
                yield Part(path, at, extent.offset, "removed")
            yield from _parts_of_extent(path, extent, struct.unpack_from("<I", data, extent.offset + 12)[0])
            at = extent.offset + extent.nbytes
    for path in sorted((root / "journals").glob("*.log")):
        yield Part(path, 0, 80, "journal header")
        yield Part(path, 80, path.stat().st_size, "journal records")


def _parts_of_extent(path: Path, extent: second_reader.Extent, header_bytes: int) -> Iterator[Part]:
    start, blocks = extent.offset, len(extent.keys)
    keys = start + 176 + second_reader.up(len(extent.retention), 8) + 8 * len(extent.pieces)
    tokens = keys + 32 * blocks
    behind = tokens + 256 * blocks
    yield Part(path, start, keys, "fields", extent)
    yield Part(path, keys, tokens, "keys", extent)
    yield Part(path, tokens, behind, "token ids", extent)
    pieces = len(extent.pieces) * len(extent.pieces[0])
    sizes, checks = 4 * pieces * (0 in extent.representation.layer_bytes), 16 * pieces
    if sizes:
        yield Part(path, behind, behind + sizes, "piece sizes", extent)
    behind += sizes
    yield Part(path, behind, behind + checks, "checks", extent)
    yield Part(path, behind + checks, start + header_bytes, "header padding", extent)
    at = start + header_bytes
    for row in extent.pieces:
        for number, content in enumerate(row):
            yield Part(path, at, at + len(content), "piece", extent, number)
            at += len(content)
        padded = start + second_reader.up(at - start)
        if padded > at:
            yield Part(path, at, padded, "layer padding", extent)
        at = padded
    if extent.state:
        end = at + len(extent.state)
        yield Part(path, at, end, "state", extent)
        yield Part(path, end, start + extent.nbytes, "layer padding", extent)


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def until(condition: Callable[[], bool]) -> None:
    """Return once another thread has made `condition` true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.0005)


def conversation(number: int, pieces: int) -> FakeKV:
    """The first pieces of a conversation; all have a block in common, so that writers meet."""
    tokens = np.arange(pieces * 64 + 1, dtype=np.uint64) * 3
    tokens[64:] += 1_000_000 + number * 7919 % (1 << 31)
    return FakeKV(TINY, tokens.tolist())
