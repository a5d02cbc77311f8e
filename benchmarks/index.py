"""What many blocks cost besides their bytes: memory for the index, matching a long prompt, and pauses; opening is `reopen`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import benchmark_home, where_it_ran
from benchmarks.paper import CAPACITY_BYTES, IDENTITY, SMALL, build
from headstart.cache import PrefixCache
from headstart.tier.disk import DiskTier
from headstart.tier.disk.books import Books
from headstart.tier.disk.bulk import decode_bulk
from headstart.tier.disk.records import (
    Decoded,
    ExtentAdded,
    ExtentName,
    Record,
    Removed,
    SegmentName,
    SegmentOpened,
    encode_record,
)

TOKENS = 131_072
MEMORY = ((16, 10_000_000), (4, 10_000_000), (1, 1_000_000))  # blocks an extent, blocks
_CHILD = "import sys; from benchmarks.{1} import {0}; {0}(*sys.argv[1:])"


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return bytes a block, and milliseconds to match and of pauses."""
    home = benchmark_home()
    blocks = 20_000 if smoke else 1_000_000
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as folder:
        return {
            "where": where_it_ran(Path(folder)),
            "memory": [
                child("measure_memory", str(100_000 if smoke else blocks), str(extent_blocks))
                for extent_blocks, blocks in MEMORY
            ],
            "pauses": child("measure_pauses", str(blocks)),
            "blocks": blocks,
            "match": _match(Path(folder), blocks, 20 if smoke else 200),
        }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = ["| blocks | blocks an extent | index and books, bytes a block | at most while packing |", "|---|---|---|---|"]
    for one in result["memory"]:
        rows.append(f"| {one['blocks']:,} | {one['extent_blocks']} | {one['bytes']:.1f} | {one['bytes_packing']:.1f} |")
    pauses = result["pauses"]
    rows += [
        "",
        "Bytes are those by which the process grew. Longest time under the books' lock for one extent, up to "
        f"{pauses['blocks']:,} blocks: {pauses['added_ms']:.1f} ms to add it, {pauses['removed_ms']:.1f} ms to remove it "
        "(CPU time of the thread).",
    ]
    rows += ["", f"| {TOKENS:,} tokens matched, hashing included | best | median |", "|---|---|---|"]
    for one in result["match"]:
        rows.append(f"| {one['what']} | {one['best_ms']:.2f} ms | {one['median_ms']:.2f} ms |")
    return "\n".join(rows)


def _match(folder: Path, blocks: int, rounds: int) -> Any:
    """Match a prompt whose 2,048 blocks lie in 128 extents of 16."""
    tokens = np.arange(TOKENS, dtype=np.uint32)
    paper = build(folder / "match", blocks=blocks, extent_blocks=16, tokens=tokens)
    paper.restore()
    results = []
    tier = DiskTier.open(paper.root, capacity_bytes=CAPACITY_BYTES)
    with PrefixCache([tier], identity=IDENTITY, representation=SMALL, match_timeout_s=20.0) as cache:
        for what, asked in (("from a u32 array", tokens), ("from a list", tokens.tolist())):
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                lease = cache.match(asked, leave=0)
                times.append(time.perf_counter() - start)
                if lease.tokens != TOKENS:
                    raise RuntimeError(f"{lease.tokens} of {TOKENS} tokens matched")
                lease.release()
            results.append({"what": what, "best_ms": min(times) * 1e3, "median_ms": statistics.median(times) * 1e3})
    return results


def child(verb: str, *arguments: str, of: str = "index") -> Any:
    """Return what a function of a benchmark prints in a process of its own."""
    command = [sys.executable, "-c", _CHILD.format(verb, of), *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800).stdout)


# What children do; each prints one JSON object.


def measure_memory(blocks: str, extent_blocks: str) -> None:
    total, each = int(blocks), int(extent_blocks)
    order = np.random.default_rng(2).permutation(total // each)
    before = _resident_bytes()
    books = _filled(total, each)
    bytes_a_block = (_resident_bytes() - before) / books.blocks
    # Remove until a pass has begun and is over: meanwhile some of the rows are dead.
    index = next(iter(books._indexes.values()))
    going, begun, worst = iter(order), False, 0.0
    while not begun or index._passing:
        _remove(books, [_name(int(next(going))) for _ in range(16)])
        begun = begun or index._passing
        worst = max(worst, (_resident_bytes() - before) / books.blocks)
    print(
        json.dumps(
            {"extent_blocks": each, "blocks": total, "bytes": bytes_a_block, "bytes_packing": worst, "index": index.nbytes}
        )
    )


def measure_pauses(blocks: str) -> None:
    """Twice as many extents come and a third of them goes again: the table grows, the rows are packed, several times."""
    books, rng = _filled(int(blocks) // 2, 16), np.random.default_rng(3)
    first = books.extents
    going = iter(rng.permutation(first).tolist())
    added, removed = [], []
    for at in range(first, 3 * first):
        if at % _EXTENTS_A_SEGMENT == 0:
            books.apply([_opened(at // _EXTENTS_A_SEGMENT)], own=True)
        record = _added(at, 16, rng.bytes(16 * 16))
        start = time.thread_time()
        books.apply([record], own=True)
        added.append(time.thread_time() - start)
        if at % 3 == 0:
            gone = _name(next(going))
            start = time.thread_time()
            _remove(books, [gone])
            removed.append(time.thread_time() - start)
    result = {"blocks": books.blocks, "added_ms": max(added) * 1e3, "removed_ms": max(removed) * 1e3}
    print(json.dumps(result | {"added_median_ms": statistics.median(added) * 1e3}))


_EXTENTS_A_SEGMENT = 256


def _filled(blocks: int, extent_blocks: int) -> Books:
    """Return books as opening fills them."""
    books, rng = Books(), np.random.default_rng(1)
    extents, at = blocks // extent_blocks, 0
    while at < extents:
        data = bytearray()
        for _ in range(min(extents - at, 4096)):
            records: list[Record] = [_added(at, extent_blocks, rng.bytes(16 * extent_blocks))]
            if at % _EXTENTS_A_SEGMENT == 0:
                records.insert(0, _opened(at // _EXTENTS_A_SEGMENT))
            for record in records:
                data += encode_record(record, writer=bytes(16), generation=0, offset=len(data))
            at += 1
        books.apply(decode_bulk(memoryview(data), writer=bytes(16), generation=0, offset=0, state=Decoded(0)), own=True)
    books.finish_loading()
    return books


def _opened(sequence: int) -> SegmentOpened:
    return SegmentOpened(SegmentName(bytes(16), sequence), 4096, 1 << 30, 0, bytes(32))


def _added(at: int, blocks: int, prefixes: bytes) -> ExtentAdded:
    return ExtentAdded(_name(at), 1_048_576, 8192, 1, at + 1, "chat", prefixes[:16], prefixes, tenant="a")


def _name(at: int) -> ExtentName:
    return ExtentName(SegmentName(bytes(16), at // _EXTENTS_A_SEGMENT), 4096 + at % _EXTENTS_A_SEGMENT * 1_048_576)


def _remove(books: Books, names: list[ExtentName]) -> None:
    books.apply([Removed(0, "", tuple((name, b"") for name in names))], own=True)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
