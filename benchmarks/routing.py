"""Which worker gets a request: our rule against others, simulated on a conversation trace, agent sessions and one hot prefix.

Virtual time, so the figures do not depend on the machine; the engines are a few numbers (`simulate.fleet.LARGE_GPU`), the
same for every rule, and what the rules know is the same. Loads: how much faster than recorded the requests come; the middle
one fills a fleet to some nine tenths, the high one is more than it can do at once. Sessions are the 40 agent sessions, each
twice with keys of its own, whose next turn waits for the answer before: the load brings them closer together, and they never
fill a fleet, since people think for longer than it computes.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from benchmarks.harness import benchmark_home, where_it_ran
from headstart.simulate.fleet import NAMES, OURS, Fleet, simulate
from headstart.simulate.result import json_of, result_of
from headstart.simulate.trace import Trace, hot_prefix, read, repeated

_TRACES = Path(__file__).parent / "traces"
_KV, _LONG_KV = 400_000, 2_000_000  # tokens in a worker's memory; agents' prompts are up to half a million long
LOADS = ("low", "middle", "high")
_CONVERSATION = {8: (0.4, 1.2, 1.8), 64: (3.2, 9.6, 14.4)}
_SESSIONS = {8: (0.5, 1.5, 2.5), 64: (0.5, 1.5, 2.5)}


def run(*, smoke: bool = False, sizes: tuple[int, ...] = (8, 64)) -> dict[str, Any]:
    """Return first tokens, hits and evenness of every rule, by workload, fleet and load."""
    rows = []
    for workers in (2,) if smoke else sizes:
        for workload, loads in _workloads(workers, smoke=smoke).items():
            for load, trace in loads.items():
                for rule in NAMES:
                    fleet = Fleet(workers, kv_tokens=_LONG_KV if workload == "agent sessions" else _KV)
                    result = result_of(rule, simulate(trace, fleet, rule))
                    rows.append({"workload": workload, "workers": workers, "load": load, **json_of(result)})
                    print(_line(rows[-1]), flush=True)
    return {"where": where_it_ran(benchmark_home()), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "First token in seconds, p50 / p90; the best of a row is bold. *Hits*: share of the prompts' tokens.",
        "",
        f"| workload, workers, load | {' | '.join(NAMES)} | hits: ours, best other | busy | ours to the best, p50 / p90 |",
        f"|---|{'---|' * len(NAMES)}---|---|---|",
    ]
    for one in _groups(result["rows"]):
        ours, others = one[OURS], [row for rule, row in one.items() if rule != OURS]
        best = {key: min(row[key] for row in one.values()) for key in ("first_token_p50_s", "first_token_p90_s")}
        cells = [" / ".join(_bold(row[key], best[key]) for key in best) for row in one.values()]
        ratios = [ours[key] / min(row[key] for row in others) for key in best]
        hits = f"{ours['hit_memory']:.1%}, {max(row['hit_memory'] for row in others):.1%}"
        lines.append(
            f"| {ours['workload']}, {ours['workers']}, {ours['load']} | {' | '.join(cells)} | {hits} "
            f"| {ours['utilisation']:.0%} "
            f"| {ratios[0]:.2f} / {ratios[1]:.2f} |"
        )
    hot = [row for row in result["rows"] if row["rule"] == OURS and row["workload"] == "one hot prefix"]
    lines += ["", f"One hot prefix: a worker's largest share is {max(row['largest_share'] for row in hot):.2f} times the mean."]
    return "\n".join(lines)


def _workloads(workers: int, *, smoke: bool) -> dict[str, dict[str, Trace]]:
    random = Random(1)
    conversation = read(_TRACES / "conversation.jsonl.gz", limit=60 if smoke else max(4000, 125 * workers))
    sessions = read(_TRACES / "agent_sessions", limit=2 if smoke else None)
    return {
        "conversation": {
            load: conversation.faster(factor) for load, factor in zip(LOADS, _CONVERSATION.get(workers, (1, 2, 3)), strict=True)
        },
        "agent sessions": {
            load: repeated(sessions, times=1 if smoke else 2, over_s=3600.0 / factor, random=random)
            for load, factor in zip(LOADS, _SESSIONS.get(workers, (1, 2, 3)), strict=True)
        },
        "one hot prefix": {
            load: hot_prefix(
                requests=80 if smoke else max(2400, 100 * workers),  # of fewer, nine tenths at the high load are chance
                per_s=per_s * workers,
                shared=8192,
                own=1024,
                answer=200,
                random=random,
            )
            for load, per_s in zip(LOADS, (0.5, 3.0, 6.0), strict=True)
        },
    }


def _groups(rows: list[dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["workers"], row["load"]), {})[row["rule"]] = row
    return list(groups.values())


def _bold(value: float, best: float) -> str:
    return f"**{value:.2f}**" if value <= best else f"{value:.2f}"


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['workload']:15} {row['workers']:3} {row['load']:7} {row['rule']:13} p50 {row['first_token_p50_s']:7.2f} "
        f"p90 {row['first_token_p90_s']:7.2f} token {row['token_p50_s'] * 1e3:5.1f} ms hit {row['hit_memory']:.3f} "
        f"busy {row['utilisation']:.2f} share {row['largest_share']:.2f}"
    )
