"""What a request would take on a worker and do to the others there. Pure.

    first token = max(what is queued before it, what is read meanwhile) + what is computed
    cost        = first token + seconds of work × how many others would wait for one

One who computes what lies elsewhere makes everybody wait who comes after; so work counts more, the more requests come. A hit on
a worker with a long queue is worth less than computing anew on an idle one, and the other way round: both follow from the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from headstart.policy.speed import Speed

TIE = 0.02  # of the first token's seconds: what no estimate can tell apart
TIE_S = 0.002


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast a worker is. `prefill`: seconds by (tokens, tokens × tokens before them); `step`: of one decoding step by
    (steps, sequences, tokens that they attend to); `disk` and `pool`: of reading KV by (tokens, starts), None where it has
    none; `chunk_tokens`: prefill that shares a step with decoding."""

    prefill: Speed
    step: Speed
    disk: Speed | None = None
    pool: Speed | None = None
    chunk_tokens: int = 2048

    def prefill_s(self, start: int, end: int) -> float:
        """Return the seconds to compute tokens [start, end)."""
        return self.prefill.seconds(end - start, (end * end - start * start) / 2) if end > start else 0.0

    def chunks(self, tokens: int) -> int:
        """Return with how many steps of decoding so many tokens of a prompt are computed."""
        return -(-tokens // self.chunk_tokens)


class View(NamedTuple):
    """A worker as the router sees it when a request comes.

    Of the request's tokens it has the first `memory` in fast memory, the first `disk` there or on its own disk, the first
    `pool` there or in the pool. `queued_s`: until what was sent there has been computed; `waiting` requests have no token yet,
    and of their prompts `waiting_tokens` are to be computed. `running` requests attend to `context` tokens. `room`: for so many
    tokens of KV, None where that is not known."""

    worker: int
    speeds: Speeds
    memory: int = 0
    disk: int = 0
    pool: int = 0
    queued_s: float = 0.0
    waiting: int = 0
    waiting_tokens: int = 0
    running: int = 0
    context: int = 0
    room: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """`reused`: tokens that are not computed; `read_s`, `wait_s`, `compute_s`: what the first token is made of; `work_s`:
    seconds of the worker that others cannot have; `cost`: what is compared, in seconds."""

    worker: int
    reused: int
    read_s: float
    wait_s: float
    compute_s: float
    work_s: float
    cost: float

    @property
    def first_token_s(self) -> float:
        return max(self.wait_s, self.read_s) + self.compute_s


def estimate(view: View, *, tokens: int, answer: int, pressure: float) -> Estimate:
    """Return what a prompt of `tokens` with an answer of some `answer` tokens costs there. `pressure`: requests that wait for a
    second of work more on this worker."""
    speeds = view.speeds
    step_s = speeds.step.seconds(1, view.running, view.context) if view.running else 0.0
    answer_s = answer * speeds.step.seconds(0, 1, tokens)
    wait_s = view.queued_s
    if view.room is not None and view.room < tokens + answer:
        wait_s += _until_room(view, tokens + answer - view.room, step_s)
    best: tuple[float, int, float, float, float] = (math.inf, 0, 0.0, 0.0, 0.0)
    for reused, read_s in _reusable(view, tokens - 1):
        alone_s = speeds.prefill_s(reused, tokens)
        compute_s = alone_s + step_s * speeds.chunks(tokens - reused)
        work_s = alone_s + answer_s
        cost = max(wait_s, read_s) + compute_s + pressure * work_s
        if cost < best[0]:
            best = (cost, reused, read_s, compute_s, work_s)
    cost, reused, read_s, compute_s, work_s = best
    return Estimate(view.worker, reused, read_s, wait_s, compute_s, work_s, cost)


def _reusable(view: View, most: int) -> list[tuple[int, float]]:
    """Return how much of the prompt it could take over, and how long reading that takes: the worker itself chooses, too."""
    memory = min(view.memory, most)
    found = [(memory, 0.0)]
    read_s = 0.0
    for end, speed in ((min(view.disk, most), view.speeds.disk), (min(view.pool, most), view.speeds.pool)):
        start = found[-1][0]
        if speed is not None and end > start:
            read_s += speed.seconds(end - start, 1)
            found.append((end, read_s))
    return found


def _until_room(view: View, missing: int, step_s: float) -> float:
    """Return when so many tokens of KV are likely given back: an even share of what runs in an even share of its time."""
    if not view.running:
        return 0.0
    own = max(1.0, view.context / view.running)
    return step_s * STEPS_LEFT * min(1.0, missing / own / view.running)


STEPS_LEFT = 200  # of an answer that is half done, where nothing more is known
