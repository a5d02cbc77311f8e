"""Reading a stored prefix from a real S3 server, every piece verified, against the library's own plain ranged reads.

What is compared: `lease.load` from the lookup until its last layer is verified in the engine's memory, and obstore's
`get_range` over the same objects, sixteen at once as with us, in the request size that is the best for it, whose bytes nobody
looks at or keeps. Each round runs both, in random order; a ratio is a round's own. Then four processes load at the same time.
Server and clients share the machine and its cores; there is no network.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import obstore
import obstore.store

from benchmarks import s3_server
from benchmarks.harness import Ratio, paired_ratio, where_it_ran
from benchmarks.readers import Read, Reader, together
from benchmarks.stored import SMOLLM2, Prefix

ROUNDS = 10
BLOCKS = (1, 4, 16)
AT_ONCE = 16  # as many as read for a tier
REQUEST_BYTES = (4 << 20, 8 << 20)  # of plain reads: the best counts
TARGET = 0.9


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return rates and ratios to plain reads by extent length, requests and bytes, and the rate of four readers together."""
    nbytes, rounds = (48 << 20, 2) if smoke else (384 << 20, ROUNDS)
    try:
        with s3_server.server() as server:
            os.environ.update(server.environment)
            cases = [_case(server, blocks, nbytes, rounds=rounds) for blocks in (BLOCKS[::2] if smoke else BLOCKS)]
    except s3_server.Forbidden as why:
        return {"skipped": str(why)}
    where = where_it_ran(Path(tempfile.gettempdir()))
    where |= {"server": f"SeaweedFS {s3_server.VERSION}", "load": f"{os.getloadavg()[0]:.1f}"}
    return {"where": where, "rounds": rounds, "bytes": nbytes, "cases": cases}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    if "skipped" in result:
        return str(result["skipped"])
    rows = [
        f"{result['bytes'] >> 20} MiB of a prefix from an S3 server on the same machine, every piece verified, "
        f"{result['rounds']} interleaved rounds: medians, and the median of the rounds' ratios to the library's plain ranged "
        f"reads, of the best of {' and '.join(str(size >> 20) for size in REQUEST_BYTES)} MiB, with its 95 % interval; at "
        f"least {TARGET} is wanted. *Layer 0*: until it is verified for the whole prefix, and its part of the whole time.",
        "",
        "| blocks an extent | object | plain, requests | ours | to plain [95 %] | layer 0 | CPU s/GiB: ours, plain | "
        "four readers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        rows.append(
            f"| {case['blocks']} | {case['object_bytes'] / 1e6:.1f} MB | {case['plain_mb_s']:,.0f} MB/s, "
            f"{case['plain_requests']} of {case['plain_request_bytes'] / 1e6:.1f} MB | "
            f"{case['ours_mb_s']:,.0f} MB/s, {case['requests']} | {Ratio(**case['ratio'])} | "
            f"{case['layer0_ms']:.0f} ms, {case['layer0_share']:.0%} | {case['cpu_s_per_gib']:.2f}, "
            f"{case.get('plain_cpu_s_per_gib', float('nan')):.2f} | {case['together_mb_s']:,.0f} MB/s |"
        )
    return "\n".join(rows)


def _case(server: s3_server.S3Server, blocks: int, nbytes: int, *, rounds: int) -> dict[str, Any]:
    prefix, url, rng = Prefix.of(SMOLLM2, blocks, nbytes), f"s3://first/{blocks}", random.Random(3)
    reader = Reader(url, prefix)
    prefix.fill(reader.tier)
    store = obstore.store.from_url(url, config=s3_server.config_of(server), client_options={"allow_http": True})
    objects = [(one["path"], one["size"]) for page in obstore.list(store, "segments") for one in page]
    steps = list(dict.fromkeys(min(step, objects[0][1]) for step in REQUEST_BYTES))
    plain: dict[int, list[float]] = {step: [] for step in steps}
    spent: dict[int, list[float]] = {step: [] for step in steps}
    ours: list[Read] = []
    with ThreadPoolExecutor(AT_ONCE) as threads:
        reader.read()  # once before anything counts
        requests = _requests(reader)
        reader.read()
        requests = _requests(reader) - requests
        for _ in range(rounds):
            for step in rng.sample([0, *steps], 1 + len(steps)):
                if step:
                    cpu = time.process_time()
                    plain[step].append(_plainly(store, objects, step, threads))
                    spent[step].append(time.process_time() - cpu)
                else:
                    ours.append(reader.read())
    reader.close()
    best = max(steps, key=lambda step: statistics.median(plain[step]))
    case = {
        "blocks": blocks,
        "object_bytes": objects[0][1],
        "plain_mb_s": statistics.median(plain[best]) / 1e6,
        "plain_cpu_s_per_gib": statistics.median(spent[best]) * (1 << 30) / prefix.nbytes,
        "plain_request_bytes": best,
        "plain_requests": len(objects) * -(-objects[0][1] // best),
        "plain_mb_s_by_request_bytes": {step: statistics.median(rates) / 1e6 for step, rates in plain.items()},
        "ours_mb_s": statistics.median(one.bytes_per_s for one in ours) / 1e6,
        "ratio": asdict(paired_ratio([one.bytes_per_s for one in ours], plain[best])),
        "requests": requests,
        "layer0_ms": statistics.median(one.layer0_s for one in ours) * 1e3,
        "layer0_share": statistics.median(one.layer0_s / one.seconds for one in ours),
        "cpu_s_per_gib": statistics.median(one.cpu_s for one in ours) * (1 << 30) / prefix.nbytes,
        "together_mb_s": together(url, blocks, nbytes) / 1e6,
    }
    print(f"{blocks} blocks: plain {case['plain_mb_s']:.0f} MB/s, ours {case['ours_mb_s']:.0f} MB/s")
    return case


def _plainly(store: Any, objects: list[tuple[str, int]], step: int, threads: ThreadPoolExecutor) -> float:
    """Read objects in ranges, the first of each before the second of any; return the rate."""
    ranges = [(key, at, min(at + step, size)) for at in range(0, objects[0][1], step) for key, size in objects]
    began = time.perf_counter()
    got = sum(threads.map(lambda one: len(obstore.get_range(store, one[0], start=one[1], end=one[2])), ranges))
    return got / (time.perf_counter() - began)


def _requests(reader: Reader) -> int:
    return reader.tier.statistics().counters.get("object_requests_get", 0)
