"""`python -m benchmarks [NAME …] [--smoke]`: run benchmarks, write results/*.json, and what docs and README show of them."""

from __future__ import annotations

import argparse
import json
import signal
import sys

from benchmarks import (
    attention,
    budget,
    devices,
    handoff,
    harness,
    hit,
    index,
    joining,
    latent,
    lengths,
    lint,
    llama,
    llama_hits,
    many,
    object_store,
    overhead,
    planning,
    reopen,
    router_overhead,
    routing,
    shared_mount,
    slow_disk,
    store,
    tiers,
    trace,
    turns,
    vllm,
    write,
)

BENCHMARKS = {
    "attention": attention,
    "budget": budget,
    "devices": devices,
    "handoff": handoff,
    "hit": hit,
    "index": index,
    "joining": joining,
    "latent": latent,
    "lengths": lengths,
    "lint": lint,
    "llama": llama,
    "llama_hits": llama_hits,
    "many": many,
    "object_store": object_store,
    "overhead": overhead,
    "planning": planning,
    "reopen": reopen,
    "router_overhead": router_overhead,
    "routing": routing,
    "shared_mount": shared_mount,
    "slow_disk": slow_disk,
    "trace": trace,
    "tiers": tiers,
    "turns": turns,
    "vllm": vllm,
    "store": store,
    "write": write,
}
ROOT = harness.RESULTS.parent.parent
PLOTS = {"lengths": lengths.plot}  # to docs/<name>.svg
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")


def main() -> None:
    """Run what was named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="which; all if none is named")
    parser.add_argument("--smoke", action="store_true", help="once and small: does it run at all? Writes nothing")
    parser.add_argument("--tables", action="store_true", help="run nothing; write the tables of the stored results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers that were started are ended
    names = options.names or list(BENCHMARKS)
    for name in () if options.tables else names:
        benchmark = BENCHMARKS[name]
        result = benchmark.run(smoke=options.smoke)
        print(benchmark.table(result))
        if not options.smoke and "skipped" not in result:
            harness.write_result(name, result)
    if not options.smoke:
        write_page()
        write_plots(names)


def write_page() -> None:
    """Put each stored result's table between its markers in docs/benchmarks.md and README.md."""
    for path in PAGES:
        page = path.read_text()
        for name, benchmark in BENCHMARKS.items():
            stored = harness.RESULTS / f"{name}.json"
            start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
            if not stored.exists() or start not in page:
                continue
            result = json.loads(stored.read_text())
            before, rest = page.split(start, 1)
            after = rest.split(end, 1)[1]
            ran = ", ".join(f"{key} {value}" for key, value in result["where"].items())
            page = f"{before}{start}{benchmark.table(result)}\n\nRun: {ran}.\n{end}{after}"
        path.write_text(page)


def write_plots(names: list[str]) -> None:
    """Draw the stored results of `names` that have a picture."""
    for name in PLOTS.keys() & set(names):
        stored = harness.RESULTS / f"{name}.json"
        if stored.exists():
            PLOTS[name](json.loads(stored.read_text()), ROOT / "docs" / f"{name}.svg")


if __name__ == "__main__":
    main()
