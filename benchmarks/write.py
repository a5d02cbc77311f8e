"""Writing 1 GiB of sealed extents to a new cache directory and syncing it, against the best of several fixed settings of fio;
and what a save brings end to end, where one thread also copies the KV out of the engine's memory and computes its checks."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import fio
from benchmarks.harness import Ratio, benchmark_home, paired_ratio, where_it_ran
from benchmarks.stored import IDENTITY, SMOLLM2, Destination, Prefix, QuietTier, touched
from headstart.cache.prefix_cache import PrefixCache

GIB = 1 << 30
ROUNDS = 10
BLOCKS = 16  # 47 MB an extent
SETTINGS = (
    (fio.Setting("io_uring", depth=8), 4 << 20),
    (fio.Setting("io_uring", depth=32), 1 << 20),
    (fio.Setting("psync"), 32 << 20),
)


@dataclass(frozen=True, slots=True)
class Written:
    bytes_per_s: float
    cpu_s_per_gib: float


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return rates and ratios to fio of the tier's `write` and of `cache.save`."""
    version = fio.version()
    if version is None:
        return {"skipped": fio.MISSING}
    nbytes, rounds = (256 << 20, 2) if smoke else (GIB, ROUNDS)
    home = benchmark_home()
    rng = random.Random(4)
    prefix = Prefix.of(SMOLLM2, BLOCKS, nbytes)
    extent_bytes = prefix.extent_bytes()
    memory = touched(max(prefix.nbytes, prefix.extents * extent_bytes), "extents")
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, np.uint8)
    images = [prefix.image(memory[n * extent_bytes : (n + 1) * extent_bytes], n) for n in range(prefix.extents)]
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as name:
        folder = Path(name)
        usable = fio.usable(_prepared(folder / "fio"), [setting for setting, _ in SETTINGS])
        settings = [(setting, size) for setting, size in SETTINGS if setting in usable]
        rates: dict[tuple[fio.Setting, int], list[float]] = {setting: [] for setting in settings}
        writes: list[Written] = []
        saves: list[Written] = []

        def by_fio(setting: fio.Setting, size: int) -> None:
            rate = fio.write(folder / "fio", setting, request_bytes=size, nbytes=prefix.nbytes)
            rates[setting, size].append(rate.bytes_per_s)

        for _ in range(rounds):
            turns: list[Callable[[], None]] = [lambda s=setting: by_fio(*s) for setting in settings]
            turns.append(lambda: writes.append(_write(folder, prefix, images)))
            turns.append(lambda: saves.append(_save(folder, prefix, memory)))
            rng.shuffle(turns)
            for turn in turns:
                turn()
        best = max(settings, key=lambda setting: statistics.median(rates[setting]))
        where = where_it_ran(folder) | {"fio": version}
    return {
        "where": where,
        "rounds": rounds,
        "bytes": prefix.nbytes,
        "extents": prefix.extents,
        "fio": {_name(*setting): statistics.median(found) / 1e6 for setting, found in rates.items()},
        "fio_setting": _name(*best),
        "write": _summary(writes, rates[best]),
        "save": _summary(saves, rates[best]),
        "raw": {
            "fio_bytes_per_s": {_name(*setting): found for setting, found in rates.items()},
            "write": [asdict(w) for w in writes],
            "save": [asdict(w) for w in saves],
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    if "skipped" in result:
        return str(result["skipped"])
    tried = ", ".join(f"{name} {rate:,.0f} MB/s" for name, rate in result["fio"].items())
    rows = [
        f"{result['bytes'] / GIB:.2f} GiB in {result['extents']} extents into a new directory, synced at the end, "
        f"{result['rounds']} interleaved rounds; ratios to {result['fio_setting']}, the best of {tried}.",
        "",
        "| | rate | to fio [95 %] | CPU s/GiB |",
        "|---|---|---|---|",
    ]
    for name, found in (
        ("the tier's write, of sealed extents", result["write"]),
        ("a save: copy, checks, write", result["save"]),
    ):
        rows.append(f"| {name} | {found['mb_s']:,.0f} MB/s | {Ratio(**found['ratio'])} | {found['cpu_s_per_gib']:.2f} |")
    return "\n".join(rows)


def _write(folder: Path, prefix: Prefix, images: list[memoryview]) -> Written:
    with tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as directory:
        tier = QuietTier.open(Path(directory), capacity_bytes=4 * prefix.nbytes)
        cpu, began = time.process_time(), time.perf_counter()
        for image in images:
            assert tier.write(image, prefix.representation).stored
        _sync(Path(directory))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        tier.close()
    return Written(prefix.nbytes / seconds, cpu_s * GIB / prefix.nbytes)


def _save(folder: Path, prefix: Prefix, memory: memoryview) -> Written:
    with tempfile.TemporaryDirectory(prefix="cache-", dir=folder) as directory:
        tier = QuietTier.open(Path(directory), capacity_bytes=4 * prefix.nbytes)
        with PrefixCache([tier], identity=IDENTITY, representation=prefix.representation) as cache:
            cpu, began = time.process_time(), time.perf_counter()
            saved = cache.save(prefix.tokens, source=Destination(prefix, memory)).wait(60.0)
            _sync(Path(directory))
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
            assert saved.stored_tokens == prefix.tokens.size - 1, saved
    return Written(prefix.nbytes / seconds, cpu_s * GIB / prefix.nbytes)


def _sync(directory: Path) -> None:
    for path in directory.rglob("*.seg"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.close(descriptor)


def _prepared(path: Path) -> Path:
    fio.prepare(path, 64 << 20)
    return path


def _summary(found: list[Written], fio_rates: list[float]) -> dict[str, Any]:
    rates = [written.bytes_per_s for written in found]
    return {
        "mb_s": statistics.median(rates) / 1e6,
        "ratio": asdict(paired_ratio(rates, fio_rates)),
        "cpu_s_per_gib": statistics.median(written.cpu_s_per_gib for written in found),
    }


def _name(setting: fio.Setting, size: int) -> str:
    return f"fio {setting} of {size >> 20} MiB"
