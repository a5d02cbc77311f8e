"""A real conversation trace through the real disk tier, against a plain LRU of prefixes that holds the same bytes.

12,031 requests in 3,537 s, served in their order: match, load what matched, save the rest. The tier holds 5.1 million tokens,
two retention classes, three tenants with quotas. The clock is the trace's own. Between requests the tier does its upkeep.
`hits`: blocks found over blocks asked for; `amplification`: bytes written over bytes that saves gave.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import benchmark_home, where_it_ran
from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import Handle, RealDisk

TRACE = Path(__file__).parent / "traces" / "conversation.jsonl.gz"
TOKENS = 512  # of one block of the trace; one piece here
PIECE_BYTES = 256 << 10  # so that headers weigh as little as beside a real model's KV
CAPACITY_TOKENS = 5_100_000


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    blocks: tuple[int, ...]


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return hits, amplification and bytes written a hit token, with holes and without."""
    requests = read_trace()[: 300 if smoke else None]
    capacity_bytes = (CAPACITY_TOKENS if not smoke else 400_000) // TOKENS * PIECE_BYTES
    plain = prefix_lru(requests, blocks=capacity_bytes // PIECE_BYTES)
    home = benchmark_home()
    rows = {}
    for name, options in {
        "holes": {},
        "no holes": {"holes": False},
    }.items():
        with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as folder:
            rows[name] = _replay(requests, Path(folder), capacity_bytes=capacity_bytes, plain=plain, **options)
            where = where_it_ran(Path(folder))
    return {
        "where": where,
        "requests": len(requests),
        "capacity_bytes": capacity_bytes,
        "plain": {"hits": plain.hits / plain.asked, "written_blocks": plain.written},
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        f"{result['requests']:,} requests, a tier of {result['capacity_bytes'] / 2**30:.2f} GiB; a plain prefix LRU of as many "
        f"bytes hits {result['plain']['hits']:.1%} of the blocks.",
        "",
        "| | blocks hit | of the plain LRU's | write amplification | written, of its bytes | bytes written a hit token |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        lines.append(
            f"| {name} | {row['hits']:.1%} | {row['of_plain']:.3f} | {row['amplification']:.3f} | {row['written_share']:.2f} "
            f"| {row['bytes_a_hit_token']:,.0f} |"
        )
    return "\n".join(lines)


def read_trace() -> list[Request]:
    """Return all requests in the order of their arrival."""
    with gzip.open(TRACE, "rt") as stream:
        found = [json.loads(line) for line in stream]
    return [Request(line["timestamp"] / 1000, tuple(line["hash_ids"][: line["input_length"] // TOKENS])) for line in found]


@dataclass(frozen=True, slots=True)
class Plain:
    hits: int
    asked: int
    written: int


def prefix_lru(requests: Sequence[Request], *, blocks: int) -> Plain:
    """Return what a plain LRU of so many blocks gives, heads of a prompt being used after its tail."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = asked = written = 0
    for request in requests:
        asked += len(request.blocks)
        hits += next((n for n, block in enumerate(request.blocks) if block not in held), len(request.blocks))
        written += sum(block not in held for block in request.blocks)
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > blocks:
            held.popitem(last=False)
    return Plain(hits, asked, written)


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class _NoHoles(RealDisk):
    """A file system that cannot give back a part of a file."""

    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        return False


class _Constant:
    """KV of which only the size matters here: each piece's bytes begin with its block's number."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._blocks = blocks
        self._piece = np.zeros(PIECE_BYTES, np.uint8)

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        parts: list[memoryview] = []
        for piece in range(first, first + len(sizes)):
            parts += [np.array([self._blocks[piece]], np.uint64).view(np.uint8).data, self._piece[8:].data]
        return parts


class _Destination:
    """Memory that is read into and compared, reused from load to load."""

    def __init__(self, pieces: int) -> None:
        self.memory = np.zeros((pieces, PIECE_BYTES), np.uint8)

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self.memory[first : first + len(sizes)]


def _replay(
    requests: Sequence[Request],
    folder: Path,
    *,
    capacity_bytes: int,
    plain: Plain,
    holes: bool = True,
) -> dict[str, Any]:
    from headstart.policy.retention import Retention

    representation = Representation(
        kind="opaque", layout="trace/1", dtype="u8", layer_bytes=(PIECE_BYTES,), piece_tokens=TOKENS
    )
    clock = _Clock()
    tier = DiskTier.open(
        folder,
        capacity_bytes=capacity_bytes,
        disk=RealDisk() if holes else _NoHoles(),
        clock=clock,
        wall_clock=clock,
        retention=Retention.of("agent=3d..30d, chat=7d..30d", "acme=50%, beta=50%, gamma=50%"),
    )
    cache = PrefixCache(
        [tier],
        identity=Identity(weights=b"trace", architecture=b"{}"),
        representation=representation,
        match_timeout_s=30.0,
    )
    most = max(len(request.blocks) for request in requests)
    destination = _Destination(most)
    hits = given = wrong = 0
    began = time.monotonic()
    with cache:
        for number, request in enumerate(requests):
            clock.now = max(clock.now, request.at_s)
            tokens = (
                np.repeat(np.array(request.blocks, np.uint32) * TOKENS, TOKENS).reshape(-1, TOKENS) + np.arange(TOKENS)
            ).ravel()
            whose = request.blocks[1] if len(request.blocks) > 1 else 0  # the first block is nearly always the same
            with cache.match(tokens, leave=0) as lease:
                load = lease.load(into=destination)
                usable = load.result(60.0) // TOKENS
                hits += usable
                heads = destination.memory[:usable, :8].copy().view(np.uint64).ravel()
                wrong += int((heads != np.array(request.blocks[:usable], np.uint64)).sum())
            saved = cache.save(
                tokens,
                _Constant(request.blocks),
                retention=("agent", "chat")[whose % 2],
                tenant=("acme", "beta", "gamma")[whose % 3],
                session=str(whose),
            ).wait(60.0)
            given += saved.written_bytes
            if number % 4 == 0:
                tier.tend()
        counters = tier.statistics().counters
        charged = tier.statistics().allocated_bytes
    assert not wrong, f"{wrong} pieces were not what was saved"
    assert charged <= capacity_bytes
    return {
        "hits": hits / plain.asked,
        "of_plain": hits / plain.hits,
        "amplification": counters["bytes_written"] / given,
        "written_share": counters["bytes_written"] / (plain.written * PIECE_BYTES),
        "bytes_a_hit_token": counters["bytes_written"] / (hits * TOKENS),
        "joined_bytes": counters.get("joined_bytes", 0),
        "moved_bytes": counters.get("moved_bytes", 0),
        "seconds": time.monotonic() - began,
    }
