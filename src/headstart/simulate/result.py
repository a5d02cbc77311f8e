"""What a simulation shows: first token, time per token, hits by tier, utilisation, evenness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headstart.simulate.fleet import Run


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds, and shares of 1. `largest_share`: requests of the worker with the most of them, over the mean. Token-weighted:
    `hit_memory`, `hit_pool`. `span_s`: from the first request to the last answer."""

    rule: str
    requests: int
    first_token_p50_s: float
    first_token_p90_s: float
    first_token_p99_s: float
    token_p50_s: float
    token_p90_s: float
    hit_memory: float
    hit_pool: float
    utilisation: float
    largest_share: float
    span_s: float


def result_of(rule: str, run: Run, *, seconds: float | None = None) -> Result:
    """Return the numbers of a run. `seconds`: of all workers together, where they were not there all along. Raises
    ValueError for a run without requests."""
    jobs = run.jobs
    if not jobs:
        raise ValueError("a simulation of no requests shows nothing")
    first = np.array([job.first_s - job.sent_s for job in jobs])
    steps = np.array([(job.end_s - job.first_s) / max(1, job.ask.answer - 1) for job in jobs])
    tokens = sum(job.ask.tokens for job in jobs)
    span_s = max(job.end_s for job in jobs) - min(job.sent_s for job in jobs)
    return Result(
        rule=rule,
        requests=len(jobs),
        first_token_p50_s=float(np.percentile(first, 50)),
        first_token_p90_s=float(np.percentile(first, 90)),
        first_token_p99_s=float(np.percentile(first, 99)),
        token_p50_s=float(np.percentile(steps, 50)),
        token_p90_s=float(np.percentile(steps, 90)),
        hit_memory=sum(job.reused_memory for job in jobs) / tokens,
        hit_pool=sum(job.reused - job.reused_memory for job in jobs) / tokens,
        utilisation=sum(run.busy_s) / (seconds or len(run.busy_s) * span_s) if span_s else 0.0,
        largest_share=max(run.requests) / len(jobs) * len(run.requests),
        span_s=span_s,
    )


def lines_of(results: Sequence[Result]) -> list[str]:
    """Return a table for a terminal."""
    heads = {"first token p50": 16, "p90": 10, "p99": 10, "a token": 10, "memory": 9, "pool": 8, "busy": 7, "largest": 9}
    lines = ["rule".ljust(14) + "".join(name.rjust(width) for name, width in heads.items())]
    for one in results:
        lines.append(
            f"{one.rule:<14}{_s(one.first_token_p50_s):>16}{_s(one.first_token_p90_s):>10}{_s(one.first_token_p99_s):>10}"
            f"{one.token_p50_s * 1e3:>7.1f} ms{one.hit_memory:>9.1%}{one.hit_pool:>8.1%}{one.utilisation:>7.0%}"
            f"{one.largest_share:>8.2f}x"
        )
    return lines


def json_of(result: Result) -> dict[str, Any]:
    return asdict(result)


def _s(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
