"""A day with a fourfold peak: the planner's fleet against the smallest fixed one that meets the same targets. Simulated.

Virtual time, so the figures do not depend on the machine. The day is the conversation trace, some copies one behind the other,
each with keys of its own: at 16 o'clock four times as many requests come as at 4 (`simulate.trace.day`). The engines are a
sixth as fast as `simulate.fleet.LARGE_GPU`, a small GPU, so that a day of ten workers is 48,124 requests. A worker takes
two minutes to start and then has nothing in its memory. A fleet meets the targets if in every hour of the day nine of ten
requests do. The fixed fleet knows the day beforehand and is the smallest that does; the planner knows nothing of it, and
begins at midnight with half as many workers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.harness import benchmark_home, where_it_ran
from headstart.policy.planning import Delays, Limits, Targets
from headstart.policy.speed import Speed
from headstart.simulate.fleet import LARGE_GPU, OURS, Fleet, simulate
from headstart.simulate.planned import simulate_planned
from headstart.simulate.trace import Trace, day, read
from headstart.simulate.worker import Job

_TRACES = Path(__file__).parent / "traces"
_SLOWER = 6.0
_PEAK = 4.0
_COPIES = 4
_GUESS = 8  # workers, from which the smallest fixed fleet is looked for
_DELAYS = Delays(start_s=120.0, warm_s=600.0, settle_s=600.0)
TARGETS = Targets(first_token_s=20.0, token_s=0.25)
SPEEDS = replace(
    LARGE_GPU,
    prefill=Speed(tuple(_SLOWER * cost for cost in LARGE_GPU.prefill.costs)),
    step=Speed(tuple(_SLOWER * cost for cost in LARGE_GPU.step.costs)),
)


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return worker hours and what the hours of the day took, of the fixed fleets and of the planner's."""
    trace = the_day(smoke=smoke)
    rows = [fixed(trace, 2)] if smoke else _around(trace)
    most = int(rows[-1]["workers"])
    rows.append(planned(trace, first=most // 2, most=2 * most))
    print(_line(rows[-1]), flush=True)
    return {"where": where_it_ran(benchmark_home()), "targets": [TARGETS.first_token_s, TARGETS.token_s], "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    first_s, token_s = result["targets"]
    best = next((row for row in result["rows"] if row["fleet"] == "fixed" and row["met"] == row["hours"]), None)
    lines = [
        f"Targets for nine of ten requests: first token {first_s:g} s, a token {token_s * 1e3:g} ms.",
        "",
        "| fleet | workers | worker hours | first token p90: day, worst hour | a token p90: worst hour | hours that met both |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['fleet']} | {row['workers']} | {row['worker_hours']:.1f} | {row['first_token_p90_s']:.1f} s, "
            f"{row['worst_first_s']:.1f} s | {row['worst_token_s'] * 1e3:.0f} ms | {row['met']} of {row['hours']} |"
        )
    ours = result["rows"][-1]
    if best is not None:
        saved, beyond = (1 - ours["worker_hours"] / row["worker_hours"] for row in (best, result["rows"][0]))
        lines += [
            "",
            f"The planner's fleet: {saved:.0%} fewer worker hours than the smallest fixed fleet that meets the targets "
            f"({beyond:.0%} fewer than the one in the first row), with {ours['starts']} starts and {ours['drains']} drains.",
        ]
    return "\n".join(lines)


def the_day(*, smoke: bool = False) -> Trace:
    """Return the day; of a smoke run ten minutes."""
    trace = read(_TRACES / "conversation.jsonl.gz", limit=60 if smoke else None)
    return day(trace, copies=1 if smoke else _COPIES, peak=_PEAK, random=Random(1), span_s=600.0 if smoke else 86_400.0)


def fixed(trace: Trace, workers: int) -> dict[str, Any]:
    """Return what a fleet makes of the day that has so many workers from the first to the last minute."""
    run = simulate(trace, Fleet(workers, SPEEDS), OURS)
    span_s = max(job.end_s for job in run.jobs)
    row = {"fleet": "fixed", "workers": str(workers), "worker_hours": workers * span_s / 3600, **_hours(run.jobs)}
    print(_line(row), flush=True)
    return row


def planned(trace: Trace, *, first: int, most: int) -> dict[str, Any]:
    """Return what the planner makes of the day, beginning at midnight with `first` workers."""
    made = simulate_planned(
        trace,
        Fleet(first, SPEEDS),
        targets=TARGETS,
        limits=Limits(1, most),
        delays=_DELAYS,
        begins=datetime(2026, 1, 5),
    )
    verbs = [action.verb for _, action in made.actions]
    return {
        "fleet": "planner",
        "workers": f"up to {made.most}",
        "worker_hours": made.worker_s / 3600,
        "starts": verbs.count("start"),
        "drains": verbs.count("drain"),
        **_hours(made.run.jobs),
    }


def _around(trace: Trace) -> list[dict[str, Any]]:
    """Return the rows of the largest fixed fleet that does not meet the targets, and of the smallest that does."""
    rows = [fixed(trace, _GUESS)]
    while int(rows[0]["workers"]) > 1 and _meets(rows[0]):
        rows.insert(0, fixed(trace, int(rows[0]["workers"]) - 1))
    while not _meets(rows[-1]):
        rows.append(fixed(trace, int(rows[-1]["workers"]) + 1))
    first = next(n for n, row in enumerate(rows) if _meets(row))
    return rows[max(0, first - 1) : first + 1]


def _meets(row: dict[str, Any]) -> bool:
    return bool(row["met"] == row["hours"])


def _hours(jobs: Sequence[Job]) -> dict[str, Any]:
    sent = np.array([job.sent_s for job in jobs])
    first = np.array([job.first_s - job.sent_s for job in jobs])
    steps = np.array([(job.end_s - job.first_s) / max(1, job.ask.answer - 1) for job in jobs])
    firsts, tokens = [], []
    for hour in range(int(sent.max() // 3600) + 1):
        inside = (sent >= 3600 * hour) & (sent < 3600 * (hour + 1))
        if inside.any():
            firsts.append(float(np.percentile(first[inside], 90)))
            tokens.append(float(np.percentile(steps[inside], 90)))
    met = [a <= TARGETS.first_token_s and b <= TARGETS.token_s for a, b in zip(firsts, tokens, strict=True)]
    return {
        "first_token_p90_s": float(np.percentile(first, 90)),
        "worst_first_s": max(firsts),
        "worst_token_s": max(tokens),
        "met": sum(met),
        "hours": len(met),
        "by_hour_first_s": [round(one, 2) for one in firsts],
        "by_hour_token_s": [round(one, 3) for one in tokens],
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['fleet']:8} {row['workers']:>9} workers {row['worker_hours']:6.1f} h, first p90 {row['first_token_p90_s']:.1f}, "
        f"worst {row['worst_first_s']:5.1f} s  token {row['worst_token_s'] * 1e3:4.0f} ms  met {row['met']} of {row['hours']}"
    )


if __name__ == "__main__":
    print(json.dumps(run(smoke="--smoke" in sys.argv), indent=1))
