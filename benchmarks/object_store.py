"""Reading a stored prefix from a real S3 server, every piece verified, against the library's own plain ranged reads.

What is compared: `lease.load` until its last layer is verified, and obstore's `get_range` over the same objects, in ranges as
large as a load's requests, sixteen at once, whose bytes nobody looks at. Each round runs both, in random order; a ratio is a
round's own. Then four processes load at the same time. Server and clients share the machine and its cores; there is no network.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import obstore.store

from benchmarks import s3_server
from benchmarks.harness import Ratio, paired_ratio, where_it_ran
from benchmarks.stored import IDENTITY, SMOLLM2, Destination, Prefix, touched
from headstart.cache.prefix_cache import PrefixCache
from headstart.tier.object import ObjectTier

ROUNDS = 10
BLOCKS = (1, 4, 16)
READERS = 4
AT_ONCE = 16  # as many as read for a tier
TARGET = 0.9


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return rates and ratios to plain reads by extent length, requests and bytes, and the rate of four readers together."""
    nbytes, rounds = (48 << 20, 2) if smoke else (384 << 20, ROUNDS)
    memory = touched(nbytes, "destination")
    try:
        with s3_server.server() as server:
            os.environ.update(server.environment)
            cases = [_case(server, blocks, nbytes, memory, rounds=rounds) for blocks in (BLOCKS[::2] if smoke else BLOCKS)]
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
        f"reads with its 95 % interval; at least {TARGET} is wanted.",
        "",
        "| blocks an extent | object | plain | ours | to plain [95 %] | requests, plain and ours | CPU s/GiB | four readers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        rows.append(
            f"| {case['blocks']} | {case['object_bytes'] / 1e6:.1f} MB | {case['plain_mb_s']:,.0f} MB/s | "
            f"{case['ours_mb_s']:,.0f} MB/s | {Ratio(**case['ratio'])} | {case['plain_requests']} and {case['requests']} | "
            f"{case['cpu_s_per_gib']:.2f} | {case['together_mb_s']:,.0f} MB/s |"
        )
    return "\n".join(rows)


def _case(server: s3_server.S3Server, blocks: int, nbytes: int, memory: memoryview, *, rounds: int) -> dict[str, Any]:
    prefix, url, rng = Prefix.of(SMOLLM2, blocks, nbytes), f"s3://first/{blocks}", random.Random(3)
    tier = ObjectTier.open_bucket(url, capacity_bytes=4 * nbytes + (1 << 30))
    _write(prefix, tier)
    store = obstore.store.from_url(url, config=s3_server.config_of(server), client_options={"allow_http": True})
    objects = [(one["path"], one["size"]) for page in obstore.list(store, "segments") for one in page]
    step = ObjectTier.request_bytes
    reads = [(key, at, min(at + step, size)) for at in range(0, objects[0][1], step) for key, size in objects]
    plain: list[float] = []
    ours: list[float] = []
    cpu: list[float] = []
    with (
        PrefixCache([tier], identity=IDENTITY, representation=prefix.representation, match_timeout_s=20.0) as cache,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        destination = Destination(prefix, memory)
        requests = _requests(tier)
        load(cache, prefix, destination)  # once before anything counts
        requests = _requests(tier) - requests
        for _ in range(rounds):
            for mine in rng.sample([False, True], 2):
                began, busy = time.perf_counter(), time.process_time()
                if mine:
                    load(cache, prefix, destination)
                    ours.append(prefix.nbytes / (time.perf_counter() - began))
                    cpu.append((time.process_time() - busy) * (1 << 30) / prefix.nbytes)
                else:
                    got = _plainly(store, reads, threads)
                    plain.append(got / (time.perf_counter() - began))
        together = _together(url, blocks, nbytes)
    case = {
        "blocks": blocks,
        "object_bytes": prefix.extent_bytes(),
        "plain_mb_s": statistics.median(plain) / 1e6,
        "ours_mb_s": statistics.median(ours) / 1e6,
        "ratio": asdict(paired_ratio(ours, plain)),
        "plain_requests": len(reads),
        "requests": requests,
        "cpu_s_per_gib": statistics.median(cpu),
        "together_mb_s": together / 1e6,
    }
    print(f"{blocks} blocks: plain {case['plain_mb_s']:.0f} MB/s, ours {case['ours_mb_s']:.0f} MB/s")
    return case


def _write(prefix: Prefix, tier: ObjectTier) -> None:
    memory = touched(prefix.extent_bytes(), "extent")
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, np.uint8)
    for number in range(prefix.extents):
        outcome = tier.write(prefix.image(memory, number), prefix.representation)
        assert outcome.stored, outcome


def load(cache: PrefixCache, prefix: Prefix, destination: Destination) -> None:
    """Load the whole prefix, and make sure that all of it came."""
    destination.poison()
    with cache.match(prefix.tokens) as lease:
        assert lease.tokens == prefix.tokens.size - 1, lease
        loading = lease.load(destination)
        loading.result(timeout_s=120.0)
        assert loading.usable_tokens == lease.tokens, loading.faults[:1]


def _plainly(store: Any, reads: list[tuple[str, int, int]], threads: ThreadPoolExecutor) -> int:
    """Read ranges; return the bytes."""
    return sum(threads.map(lambda read: len(obstore.get_range(store, read[0], start=read[1], end=read[2])), reads))


def _together(url: str, blocks: int, nbytes: int) -> float:
    """Return the rate of several processes that load at once, in bytes a second."""
    command = [sys.executable, "-m", "benchmarks.object_store", url, str(blocks), str(nbytes)]
    readers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(READERS)]
    try:
        for one in readers:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        began = time.perf_counter()
        got = [json.loads(one.communicate("go\n", timeout=300)[0]) for one in readers]
        return sum(got) / (time.perf_counter() - began)
    finally:
        for one in readers:
            one.kill()
            one.wait()


def _reader(url: str, blocks: int, nbytes: int) -> None:
    prefix = Prefix.of(SMOLLM2, blocks, nbytes)
    tier = ObjectTier.open_bucket(url, capacity_bytes=4 * nbytes + (1 << 30), read_only=True)
    with PrefixCache([tier], identity=IDENTITY, representation=prefix.representation, match_timeout_s=20.0) as cache:
        destination = Destination(prefix, touched(nbytes, "destination"))
        print("ready", flush=True)
        sys.stdin.readline()
        load(cache, prefix, destination)
    print(json.dumps(prefix.nbytes))


def _requests(tier: ObjectTier) -> int:
    return tier.statistics().counters.get("object_requests_get", 0)


if __name__ == "__main__":
    _reader(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
