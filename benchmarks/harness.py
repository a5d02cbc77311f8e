"""What every benchmark shares: where it ran, ratios of interleaved pairs with their interval, results as JSON."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of per-pair ratios and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f} … {self.high:.3f}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 1) -> Ratio:
    """Return the median of numerators[i] / denominators[i], which were measured side by side."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return Ratio(statistics.median(ratios), medians[100], medians[-101], len(ratios))


def benchmark_home() -> Path:
    """Return where benchmarks make their directories: on the disk that the cache is on by default."""
    home = Path("~/.cache/headstart").expanduser()
    home.mkdir(parents=True, exist_ok=True)
    return home


def where_it_ran(directory: Path) -> dict[str, Any]:
    """Return CPU, memory, disk, kernel, Python and commit of this run."""
    return {
        "date": date.today().isoformat(),
        "commit": _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]),
        "cpu": next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?"),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "file_system": _output(["stat", "-f", "-c", "%T", str(directory)]),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Write `results/<name>.json` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "?"
