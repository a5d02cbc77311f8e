"""Rules of tiers: how long a change takes to be in effect on a thousand extents, and what a look at many costs."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import benchmark_home, where_it_ran
from benchmarks.paper import CAPACITY_BYTES, build
from headstart.cache import PrefixCache
from headstart.policy.rule_text import parse_rules
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.tier.disk import DiskTier
from headstart.tier.pool import PoolTier
from headstart.tier.surveying import surveyed

BLOCKS = (1, 10)  # of an extent: 16 and 127 kB
RULE = 'when class = "default" and idle >= 0s then move to pool'


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return seconds until all is moved, and milliseconds of a look."""
    home = benchmark_home()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as folder:
        extents, rounds = (20, 1) if smoke else (1000, 5)
        return {
            "where": where_it_ran(Path(folder)),
            "extents": extents,
            "rounds": rounds,
            "moves": [_moves(Path(folder), extents, blocks, rounds) for blocks in BLOCKS],
            "look": _look(Path(folder), 20_000 if smoke else 1_000_000),
        }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = [f"| {result['extents']:,} extents from disk to pool | median | slowest | CPU time |", "|---|---|---|---|"]
    for one in result["moves"]:
        seconds = " | ".join(f"{one[name]:.2f} s" for name in ("median_s", "slowest_s", "cpu_s"))
        rows.append(f"| of {one['extent_bytes'] / 1000:,.0f} kB | {seconds} |")
    look = result["look"]
    rows += ["", f"A look at {look['extents']:,} extents ({look['blocks']:,} blocks), rule included: {look['ms']:.0f} ms."]
    return "\n".join(rows)


@contextmanager
def _cache(folder: Path) -> Iterator[tuple[PrefixCache, DiskTier, PoolTier]]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        (Path(place) / "pool").mkdir()
        disk = DiskTier.open(Path(place) / "disk", capacity_bytes=1 << 30)
        pool = PoolTier.open(Path(place) / "pool", capacity_bytes=1 << 30)
        with PrefixCache([disk, pool], identity=IDENTITY, representation=TINY) as cache:
            yield cache, disk, pool


def _moves(folder: Path, extents: int, blocks: int, rounds: int) -> dict[str, Any]:
    seconds, cpu, nbytes = [], [], 0
    for _ in range(rounds):
        with _cache(folder) as (cache, disk, pool):
            for seed in range(extents):
                tokens = (np.arange(64 * blocks, dtype=np.uint64) + seed * 100_003) % (1 << 31)
                image = FakeKV(TINY, tokens.tolist()).image(0, blocks)
                nbytes = image.nbytes
                disk.write(image, TINY)
            begun, cpu_begun = time.perf_counter(), time.process_time()
            cache.apply_rules(parse_rules([RULE]))
            while disk.statistics().extents:
                time.sleep(0.005)
            seconds.append(time.perf_counter() - begun)
            cpu.append(time.process_time() - cpu_begun)
            if pool.statistics().extents != extents:
                raise RuntimeError(f"{pool.statistics().extents} of {extents} extents are in the pool")
    return {
        "extent_bytes": nbytes,
        "median_s": statistics.median(seconds),
        "slowest_s": max(seconds),
        "cpu_s": statistics.median(cpu),
    }


def _look(folder: Path, blocks: int) -> dict[str, Any]:
    paper = build(folder / "look", blocks=blocks, extent_blocks=4, tokens=np.arange(64, dtype=np.uint32))
    paper.restore()
    policy = parse_rules(["when class = agent then keep in disk", "when idle > 6h then move to pool"])
    tier = DiskTier.open(paper.root, capacity_bytes=CAPACITY_BYTES)
    try:
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            for part in surveyed(tier, now_ms=0):
                policy.decide(part.facts, ("disk", "pool"))
            times.append((time.perf_counter() - begun) * 1e3)
        return {"extents": tier.statistics().extents, "blocks": blocks, "ms": statistics.median(times)}
    finally:
        tier.close()
