"""First token cold against first token from disk after SIGKILL and restart: `headstart demo`, measured over five restarts."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import benchmark_home, where_it_ran
from headstart.cli.demo import run_demo


def run(*, smoke: bool = False, rounds: int = 5) -> dict[str, Any]:
    """Return what the demo measured and where."""
    home = benchmark_home()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as folder:
        result = run_demo("smollm2-135m", rounds=1 if smoke else rounds, folder=Path(folder), say=print)
        return {"where": where_it_ran(Path(folder)), **asdict(result)}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = [
        f"A prompt of {result['prompt_tokens']:,} tokens, {result['cached_tokens']:,} of them from disk "
        f"({result['bytes_read'] / 1e6:,.0f} MB), median of {result['rounds']} restarts.",
        "",
        "| | first token |",
        "|---|---|",
        f"| cold, everything computed | {result['cold_ttft_s']:.2f} s |",
        f"| **from disk, after SIGKILL and restart, page cache emptied** | **{result['hit_ttft_s']:.2f} s** |",
        f"| the floor: the same suffix over KV already in memory | {result['floor_ttft_s']:.2f} s |",
        f"| the disk alone: the same bytes read, nothing computed | {result['disk_s']:.2f} s |",
        *_stock_rows(result),
        "",
        f"Speed-up {result['speedup']:.1f}; ratio to the limit (the larger of floor and disk) {result['ratio_to_limit']:.2f}; "
        f"the same tokens as with the cache off: {'yes' if result['same_tokens'] else 'no'}. "
        + (
            "The page cache was not checked on this system."
            if (cached := result["page_cache_bytes"]) is None
            else f"In the page cache before the hit: {cached / 1024:.0f} KiB, the headers read at opening."
        ),
    ]
    return "\n".join(rows)


def _stock_rows(result: dict[str, Any]) -> list[str]:
    if result.get("stock_cold_s") is None:  # a GGUF, or an earlier result
        return []
    return [
        f"| stock transformers, everything computed: {result['stock_speedup']:.1f} times from disk "
        f"| {result['stock_cold_s']:.2f} s |",
        f"| stock transformers over the same KV in its own cache; our floor is {result['floor_to_stock']:.2f} of it "
        f"| {result['stock_floor_s']:.2f} s |",
    ]
