"""Opening a directory of a million blocks again: after a clean close, after a crash, without its journals.

The directories are made on paper (`paper.py`): journals and headers are real, the bodies of extents are holes, so that what is
measured is the books and not the disk. Each opening is a process of its own.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import benchmark_home, where_it_ran
from benchmarks.index import TOKENS, child
from benchmarks.paper import CAPACITY_BYTES, SMALL, Paper, build
from headstart.tier.disk import DiskTier


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return seconds to open, by what happened before."""
    blocks, rounds = (20_000, 1) if smoke else (1_000_000, 5)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=benchmark_home()) as folder:
        where = where_it_ran(Path(folder))
        return {"where": where, "blocks": blocks, "openings": [*_openings(Path(folder), blocks, rounds)]}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = [
        f"| {result['blocks']:,} blocks opened | page cache | median | slowest |",
        "|---|---|---|---|",
    ]
    for one in result["openings"]:
        rows.append(f"| {one['what']} | {one['page_cache']} | {one['median_s']:.2f} s | {one['slowest_s']:.2f} s |")
    return "\n".join(rows)


def _openings(folder: Path, blocks: int, rounds: int) -> Any:
    tokens = np.arange(TOKENS, dtype=np.uint32)
    for extent_blocks in (16, 4):
        for crash in (False, True):
            what = "after a crash, four dead writers, journals half dead" if crash else "after a clean close"
            paper = build(
                folder / f"{extent_blocks}-{crash}",
                blocks=blocks,
                extent_blocks=extent_blocks,
                tokens=tokens,
                writers=4 if crash else 1,
                crash=crash,
            )
            for page_cache in ("emptied", "warm"):
                yield _opening(paper, f"{what}, extents of {extent_blocks}", page_cache, rounds)
    paper = build(folder / "scan", blocks=blocks, extent_blocks=16, tokens=tokens, headers=True)
    yield _opening(paper, "after all journals were lost, extents of 16", "emptied", 1)


def _opening(paper: Paper, what: str, page_cache: str, rounds: int) -> dict[str, Any]:
    seconds = []
    for _ in range(rounds):
        paper.restore()
        if page_cache == "warm":
            for path in [*paper.journals, *paper.root.glob("segments/*/*.seg")]:
                with path.open("rb") as file:
                    file.read(1 << 30 if path.suffix == ".log" else 4096)
        found = child("measure_opening", str(paper.root), paper.keys[0].hex(), paper.keys[-1].hex(), of="reopen")
        if (found["blocks"], found["located"]) != (paper.blocks, 2):
            raise RuntimeError(f"{what}: {found} of {paper.blocks} blocks are there")
        seconds.append(found["seconds"])
    return {"what": what, "page_cache": page_cache, "median_s": statistics.median(seconds), "slowest_s": max(seconds)}


# What a child does; it prints one JSON object.


def measure_opening(root: str, *keys: str) -> None:
    start = time.perf_counter()
    tier = DiskTier.open(Path(root), capacity_bytes=CAPACITY_BYTES)
    seconds = time.perf_counter() - start
    located = int((tier.locate(SMALL.digest, list(map(bytes.fromhex, keys))).extents >= 0).sum())
    blocks = tier.statistics().blocks
    tier.close()
    print(json.dumps({"seconds": seconds, "blocks": blocks, "located": located}))
