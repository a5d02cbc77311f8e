"""Reading a stored prefix from a pool on a real shared file system, every piece verified, against fio on the same mount.

What is compared: `lease.load` from the lookup until its last layer is verified in the engine's memory, and fio over a file of
its own on that mount, with the best of some fixed settings. Both bypass the kernel's page cache. Each round runs all of them,
in random order; a ratio is a round's own. Then four processes load at the same time. A MooseFS of three chunk servers, in
memory, shares the machine and its cores; there is no network beside the kernel's own.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import fio, moosefs
from benchmarks.fio import Setting
from benchmarks.harness import Ratio, paired_ratio, where_it_ran
from benchmarks.readers import Read, Reader, together
from benchmarks.stored import SMOLLM2, Prefix
from headstart.tier import page_cache

ROUNDS = 10
BLOCKS = (1, 4, 16)
SETTINGS = [(Setting("psync", threads=threads), size << 20) for threads, size in ((1, 4), (4, 1), (4, 4))]
TARGET = 0.9


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return rates and ratios to fio by extent length, and the rate of four readers together."""
    version = fio.version()
    if version is None:
        return {"skipped": fio.MISSING}
    nbytes, rounds = (48 << 20, 2) if smoke else (192 << 20, ROUNDS)
    memory = Path("/dev/shm")
    try:
        with moosefs.cluster(parent=memory if memory.is_dir() else None) as cluster:
            mount = cluster.mount().path
            file = mount / "fio"
            fio.prepare(file, nbytes)
            cases = [_case(mount, file, blocks, nbytes, rounds=rounds) for blocks in (BLOCKS[::2] if smoke else BLOCKS)]
            where = where_it_ran(mount)
    except moosefs.Forbidden as why:
        return {"skipped": str(why)}
    said = subprocess.run(["mfsmount", "-V"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout
    moose = said.split()[2:3]
    where |= {"server": f"MooseFS {' '.join(moose)}", "fio": version, "load": f"{os.getloadavg()[0]:.1f}"}
    return {"where": where, "rounds": rounds, "bytes": nbytes, "cases": cases}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    if "skipped" in result:
        return str(result["skipped"])
    rows = [
        f"{result['bytes'] >> 20} MiB of a prefix from a MooseFS on the same machine, every piece verified, {result['rounds']} "
        "interleaved rounds: medians, and the median of the rounds' ratios to the best fixed fio setting with its 95 % "
        f"interval; at least {TARGET} is wanted. *Layer 0*: until it is verified for the whole prefix, and its part of the "
        "whole time. Of four readers together, beside their rate, its ratio to fio's best.",
        "",
        "| blocks an extent | fio, best setting | ours | to fio [95 %] | layer 0 | CPU s/GiB | four readers |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        rows.append(
            f"| {case['blocks']} | {case['fio_mb_s']:,.0f} MB/s, {case['fio_setting']} | {case['ours_mb_s']:,.0f} MB/s | "
            f"{Ratio(**case['ratio'])} | {case['layer0_ms']:.0f} ms, {case['layer0_share']:.0%} | "
            f"{case['cpu_s_per_gib']:.2f} | {case['together_mb_s']:,.0f} MB/s, {case['together_mb_s'] / case['fio_mb_s']:.2f} |"
        )
    tried = {name: [case["fio"][name] for case in result["cases"]] for name in result["cases"][0]["fio"]}
    settings = (f"{name} {min(rates):,.0f} to {max(rates):,.0f} MB/s" for name, rates in tried.items())
    return "\n".join([*rows, "", f"fio's settings: {'; '.join(settings)}."])


def _case(mount: Path, file: Path, blocks: int, nbytes: int, *, rounds: int) -> dict[str, Any]:
    prefix, rng, root = Prefix.of(SMOLLM2, blocks, nbytes), random.Random(3), mount / f"pool-{blocks}"
    root.mkdir()
    reader = Reader(str(root), prefix)
    prefix.fill(reader.tier)
    files = [file, *root.rglob("*.seg")]
    rates: dict[str, list[float]] = {f"{setting} of {size >> 20} MiB": [] for setting, size in SETTINGS}
    ours: list[Read] = []
    reader.read()  # once before anything counts
    for _ in range(rounds):
        turns = [None, *zip(rates, SETTINGS, strict=True)]
        for turn in rng.sample(turns, len(turns)):
            page_cache.drop(files)
            if turn is None:
                ours.append(reader.read())
            else:
                name, (setting, size) = turn
                rates[name].append(fio.read(file, setting, request_bytes=size, nbytes=nbytes).bytes_per_s)
    reader.close()
    best = max(rates, key=lambda name: statistics.median(rates[name]))
    case = {
        "blocks": blocks,
        "fio": {name: statistics.median(found) / 1e6 for name, found in rates.items()},
        "fio_setting": best,
        "fio_mb_s": statistics.median(rates[best]) / 1e6,
        "ours_mb_s": statistics.median(one.bytes_per_s for one in ours) / 1e6,
        "ratio": asdict(paired_ratio([one.bytes_per_s for one in ours], rates[best])),
        "layer0_ms": statistics.median(one.layer0_s for one in ours) * 1e3,
        "layer0_share": statistics.median(one.layer0_s / one.seconds for one in ours),
        "cpu_s_per_gib": statistics.median(one.cpu_s for one in ours) * (1 << 30) / prefix.nbytes,
        "together_mb_s": together(str(root), blocks, nbytes) / 1e6,
    }
    print(f"{blocks} blocks: fio {case['fio_mb_s']:.0f} MB/s ({best}), ours {case['ours_mb_s']:.0f} MB/s")
    return case
