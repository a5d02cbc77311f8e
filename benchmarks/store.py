"""Reading 1 GiB of a stored prefix, every piece verified, against the best of several fixed settings of fio.

What is compared: `lease.load` until its last layer is verified, with the C reader and with the portable Python reader, and
fio's random reads of one layer of an extent, the request that a reader makes that goes layer by layer. Each round runs all of
them, in random order; a ratio is a round's own. The page cache is emptied and looked at before every load; beneath it a
virtual machine's host has its own, so that these are rates of the host's memory and of software: the hard case for ours.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import xxhash

from benchmarks import fio
from benchmarks.harness import Ratio, benchmark_home, paired_ratio, where_it_ran
from benchmarks.stored import IDENTITY, MLA, SMOLLM2, Destination, Prefix, touched
from headstart.cache.prefix_cache import PrefixCache
from headstart.tier import page_cache
from headstart.transfer import native

GIB = 1 << 30
ROUNDS = 10
MODELS = {"SmolLM2-135M, float32": SMOLLM2, "MLA, 70 KB a token": MLA}
BLOCKS = (1, 4, 16)
SETTINGS = (
    fio.Setting("io_uring", depth=8),
    fio.Setting("io_uring", depth=32),
    fio.Setting("io_uring", depth=64),
)  # not `psync` with 16 threads, which came to half of these wherever it was tried
LAYER0_TARGET = 1.3


@dataclass(frozen=True, slots=True)
class Read:
    """One load."""

    seconds: float
    layer0_s: float
    cpu_s: float
    page_cache_bytes: int | None  # before it began


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return rates, ratios to fio, layer 0 and CPU of each reader, by model and extent length."""
    version = fio.version()
    if version is None:
        return {"skipped": fio.MISSING}
    nbytes, rounds = (160 << 20, 2) if smoke else (GIB, ROUNDS)
    home = benchmark_home()
    rng = random.Random(3)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as name:
        folder = Path(name)
        file = folder / "fio"
        fio.prepare(file, nbytes)
        settings = fio.usable(file, SETTINGS)
        memory = touched(nbytes, "destination")
        cases = []
        for model, representation in MODELS.items():
            for blocks in BLOCKS[::2] if smoke else BLOCKS:
                prefix = Prefix.of(representation, blocks, nbytes)
                with tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as directory:
                    cases.append(_case(model, prefix, Path(directory), file, settings, memory, rng, rounds=rounds))
                print(_line(cases[-1]))
        return {"where": where_it_ran(folder) | {"fio": version}, "rounds": rounds, "gib": nbytes / GIB, "cases": cases}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    if "skipped" in result:
        return str(result["skipped"])
    held = [case["page_cache_bytes"] for case in result["cases"]]
    rows = [
        f"{result['gib']:g} GiB of a prefix, every piece verified, {result['rounds']} interleaved rounds: medians, and the "
        "median of the rounds' ratios to the best fixed fio setting with its 95 % interval. *Layer 0*: until it is verified "
        f"for the whole prefix, over its bytes at fio's rate; at most {LAYER0_TARGET} is wanted. *CPU*: of the reader, of fio, "
        "which looks at no byte, and of nothing but hashing the pieces once more, by one thread, from memory.",
        "",
        "| model, blocks an extent | one layer | fio, best setting | reader | rate | to fio [95 %] | layer 0 | "
        "CPU s/GiB: ours, fio, hash alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        for reader, found in case["readers"].items():
            ratio = Ratio(**found["ratio"])
            rows.append(
                f"| {case['model']}, {case['blocks']} | {case['request_bytes'] / 1000:,.0f} KB | "
                f"{case['fio_mb_s']:,.0f} MB/s, {case['fio_setting']} | {reader} | {found['mb_s']:,.0f} MB/s | {ratio} | "
                f"{found['layer0_ms']:.0f} ms, {found['layer0_ratio']:.2f} | {found['cpu_s_per_gib']:.2f}, "
                f"{_seconds(case, 'fio_cpu_s_per_gib')}, {_seconds(case, 'hash_cpu_s_per_gib')} |"
            )
    tried = {name: [case["fio"][name] for case in result["cases"]] for name in result["cases"][0]["fio"]}
    rows += [
        "",
        "fio's settings: "
        + "; ".join(f"{name} {min(rates):,.0f} to {max(rates):,.0f} MB/s" for name, rates in tried.items())
        + ".",
        "The page cache was not checked on this system."
        if None in held
        else f"In the page cache before a load: at most {max(held) / 1024:.0f} KiB.",
    ]
    return "\n".join(rows)


def _case(
    model: str,
    prefix: Prefix,
    directory: Path,
    file: Path,
    settings: list[fio.Setting],
    memory: memoryview,
    rng: random.Random,
    *,
    rounds: int,
) -> dict[str, Any]:
    readers = {"Python": True} if native.reader() is None else {"C": False, "Python": True}
    rates: dict[fio.Setting, list[float]] = {setting: [] for setting in settings}
    spent: dict[fio.Setting, list[float]] = {setting: [] for setting in settings}
    hashed: list[float] = []
    reads: dict[str, list[Read]] = {reader: [] for reader in readers}
    tier = prefix.write(directory)
    files = list(directory.rglob("*.seg"))
    with PrefixCache([tier], identity=IDENTITY, representation=prefix.representation, match_timeout_s=20.0) as cache:
        destination = Destination(prefix, memory)

        def by_fio(setting: fio.Setting) -> None:
            found = fio.read(file, setting, request_bytes=prefix.request_bytes, nbytes=prefix.nbytes)
            rates[setting].append(found.bytes_per_s)
            spent[setting].append(found.cpu_s)

        def by_us(reader: str) -> None:
            reads[reader].append(_read(cache, prefix, destination, files, portable=readers[reader]))

        for reader in readers:
            by_us(reader)  # once before anything counts: threads are started, their memory is touched
            reads[reader].clear()
        for _ in range(rounds):
            turns: list[Callable[[], None]] = [lambda s=setting: by_fio(s) for setting in settings]
            turns += [lambda r=reader: by_us(r) for reader in readers]
            rng.shuffle(turns)
            for turn in turns:
                turn()
            hashed.append(_hash(memory[: prefix.nbytes], prefix.representation.layer_bytes[0] or 0))
    best = max(settings, key=lambda setting: statistics.median(rates[setting]))
    fio_rate = statistics.median(rates[best])
    return {
        "model": model,
        "blocks": prefix.blocks,
        "extents": prefix.extents,
        "request_bytes": prefix.request_bytes,
        "bytes": prefix.nbytes,
        "fio": {str(setting): statistics.median(rates[setting]) / 1e6 for setting in settings},
        "fio_setting": str(best),
        "fio_mb_s": fio_rate / 1e6,
        "fio_cpu_s_per_gib": statistics.median(spent[best]) * GIB / prefix.nbytes,
        "hash_cpu_s_per_gib": statistics.median(hashed) * GIB / prefix.nbytes,
        "page_cache_bytes": _most([read.page_cache_bytes for found in reads.values() for read in found]),
        "readers": {reader: _summary(prefix, found, rates[best], fio_rate) for reader, found in reads.items()},
        "raw": {
            "fio_bytes_per_s": {str(setting): found for setting, found in rates.items()},
            "reads": {reader: [asdict(read) for read in found] for reader, found in reads.items()},
        },
    }


def _read(cache: PrefixCache, prefix: Prefix, destination: Destination, files: list[Path], *, portable: bool) -> Read:
    destination.poison()
    page_cache.drop(files)
    held = page_cache.resident_bytes(files)
    with patch.object(native, "reader", lambda: None) if portable else patch.object(native, "reader", native.reader):
        lease = cache.match(prefix.tokens)
        with lease:
            assert lease.tokens == prefix.tokens.size - 1, lease
            cpu, began = time.process_time(), time.perf_counter()
            load = lease.load(destination)
            load.wait(0, timeout_s=60.0)
            layer0_s = time.perf_counter() - began
            load.result(timeout_s=60.0)
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    assert load.usable_tokens == lease.tokens, load.faults[:1]
    return Read(seconds, layer0_s, cpu_s, held)


def _hash(memory: memoryview, piece_bytes: int) -> float:
    """Return the CPU seconds of hashing every piece, one after the other."""
    began = time.thread_time()
    for at in range(0, memory.nbytes, piece_bytes):
        xxhash.xxh3_128_digest(memory[at : at + piece_bytes])
    return time.thread_time() - began


def _summary(prefix: Prefix, reads: list[Read], fio_rates: list[float], fio_rate: float) -> dict[str, Any]:
    rates = [prefix.nbytes / read.seconds for read in reads]
    layer0_s = statistics.median(read.layer0_s for read in reads)
    return {
        "mb_s": statistics.median(rates) / 1e6,
        "ratio": asdict(paired_ratio(rates, fio_rates)),
        "layer0_ms": layer0_s * 1e3,
        "layer0_ratio": layer0_s / (prefix.layer_bytes / fio_rate),
        "cpu_s_per_gib": statistics.median(read.cpu_s for read in reads) * GIB / prefix.nbytes,
    }


def _most(found: list[int | None]) -> int | None:
    known = [nbytes for nbytes in found if nbytes is not None]
    return max(known) if len(known) == len(found) else None


def _seconds(case: dict[str, Any], name: str) -> str:
    """Return what was measured; results that are older lack it."""
    return f"{case[name]:.2f}" if name in case else "–"


def _line(case: dict[str, Any]) -> str:
    readers = ", ".join(f"{reader} {found['mb_s']:.0f}" for reader, found in case["readers"].items())
    return f"{case['model']}, {case['blocks']} blocks: fio {case['fio_mb_s']:.0f} MB/s ({case['fio_setting']}), {readers}"
