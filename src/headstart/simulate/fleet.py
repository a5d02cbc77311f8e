"""Workers, a pool and a rule, event by event on a virtual clock. The rule `headstart` is the router's own code."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from headstart.errors import RequestError
from headstart.policy.routing.baselines import RULES, rule
from headstart.policy.routing.estimate import Speeds
from headstart.policy.routing.router import Routing
from headstart.policy.speed import Speed
from headstart.simulate.trace import Trace
from headstart.simulate.worker import Job, KeptBlocks, Told, Worker

OURS = "headstart"
NAMES = (OURS, *RULES)

# A model of 8 billion parameters on one large GPU, in round numbers: 25,000 tokens of prompt a second at first, steps of
# 8 ms, 128 KiB of KV a token, 5 GB/s from a pool.
LARGE_GPU = Speeds(prefill=Speed((4e-5, 1.3e-9)), step=Speed((8e-3, 5e-5, 4e-8)), pool=Speed((2.6e-5, 5e-3)), chunk_tokens=2048)


def read_speeds(path: Path | None) -> Speeds:
    """Return the speeds that a JSON file gives: {"prefill": [s a token, s a token and token before it], "step": [s a step, s a
    sequence, s a token attended to], "pool": [s a token, s a start], "chunk_tokens": n}; what it leaves out is `LARGE_GPU`'s.

    Raises RequestError for a file that says something else."""
    if path is None:
        return LARGE_GPU
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not an object")
        known = {name: found.pop(name) for name in ("prefill", "step", "pool", "chunk_tokens") if name in found}
        if found:
            raise ValueError(f"unknown: {', '.join(map(str, found))}")
        for name, count in (("prefill", 2), ("step", 3), ("pool", 2)):
            if name in known:
                costs = tuple(float(one) for one in known[name])
                if len(costs) != count or not all(0 <= one < math.inf for one in costs) or not any(costs):
                    raise ValueError(f"{name} wants {count} numbers of seconds, not all of them 0")
                known[name] = Speed(costs)
        if int(known.setdefault("chunk_tokens", LARGE_GPU.chunk_tokens)) < 1:
            raise ValueError("chunk_tokens must be 1 or more")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} is no file of speeds (prefill, step, pool, chunk_tokens): {error}") from error
    return replace(LARGE_GPU, **known)


@dataclass(frozen=True, slots=True)
class Fleet:
    """`kv_tokens`: memory of a worker; `pool_tokens`: of the pool, None without one."""

    workers: int
    speeds: Speeds = LARGE_GPU
    kv_tokens: int = 400_000
    pool_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """All requests with their times; of each worker how many it had and how long it was busy."""

    jobs: Sequence[Job]
    requests: Sequence[int]
    busy_s: Sequence[float]


def simulate(
    trace: Trace, fleet: Fleet, name: str, *, seed: int = 0, on_request: Callable[[int], None] = lambda _: None
) -> Run:
    """Return what the rule `name`, one of `NAMES`, makes of the trace. `on_request` is told how many were sent so far.

    Raises ValueError for an unknown rule."""
    return Simulation(trace, fleet, name, seed, on_request).run()


class Simulation:
    """Requests, workers and a rule. `most`: workers that there may be at once, None: those of the fleet."""

    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        name: str,
        seed: int,
        on_request: Callable[[int], None],
        *,
        most: int | None = None,
    ) -> None:
        self._trace = trace
        self._fleet = fleet
        self._on_request = on_request
        random = Random(seed)
        tokens = trace.block_tokens
        pool = None if fleet.pool_tokens is None else KeptBlocks(fleet.pool_tokens // tokens)
        self._pool = pool
        self._rule = None if name == OURS else rule(name, random)
        self._routing = Routing(block_tokens=tokens, random=random, workers=most or fleet.workers)
        self._workers: dict[str, Worker] = {}
        self._jobs: list[Job] = []
        self._requests: dict[str, int] = {}
        self._due: list[tuple[float, int, Callable[[float], None]]] = []  # (when, order, what is called then)
        self._count = 0
        self._versions: dict[str, int] = {}
        for number in range(fleet.workers):
            self._join(f"w{number:03}", 0.0)

    def run(self) -> Run:
        for number, session in enumerate(self._trace.sessions):
            self._at(partial(self._send, number, 0), session[0].wait_s)
        while self._due:
            now_s, _, call = heapq.heappop(self._due)
            call(now_s)
        return Run(self._jobs, list(self._requests.values()), [worker.busy_s for worker in self._workers.values()])

    def _join(self, name: str, now_s: float) -> None:
        """A worker with nothing in its memory is there from now on."""
        fleet, tokens = self._fleet, self._trace.block_tokens
        self._workers[name] = Worker(fleet.speeds, kv_tokens=fleet.kv_tokens, block_tokens=tokens, pool=self._pool)
        self._routing.up(name, fleet.speeds, now_s=now_s, kv_tokens=fleet.kv_tokens)
        self._requests[name] = self._versions[name] = 0

    def _among(self) -> Collection[str] | None:
        """Return who may be given requests; None: all."""
        return None

    def _send(self, number: int, turn: int, now_s: float) -> None:
        ask = self._trace.sessions[number][turn]
        job = Job(f"{number}.{turn}", ask, ask.keys.tolist(), now_s, number, turn)
        if self._rule is None:
            decision = self._routing.choose(ask.keys, tokens=ask.tokens, now_s=now_s, among=self._among())
            assert decision is not None
        else:
            views, key = self._routing.views(ask.keys, now_s=now_s)
            name = self._rule(views, ask.tokens, self._trace.block_tokens)
            decision = self._routing.decided(name, views, key, tokens=ask.tokens)
        self._routing.sent(job.name, decision, tokens=ask.tokens, now_s=now_s)
        self._jobs.append(job)
        self._requests[decision.worker] += 1
        self._tell(decision.worker, self._workers[decision.worker].take(job, now_s), now_s)
        self._watch(decision.worker)
        self._on_request(len(self._jobs))

    def _tell(self, worker: str, told: Told, now_s: float) -> None:
        """Pass on what happened, as events and answers would."""
        if told.stored:
            self._routing.stored(worker, np.array(told.stored, np.uint64))
        if told.removed:
            self._routing.removed(worker, np.array(told.removed, np.uint64))
        for job in told.first:
            self._routing.first_token(job.name, now_s=now_s)
            if self._pool is not None:
                self._routing.stored(None, job.ask.keys)
        for job in told.ended:
            self._routing.finished(job.name, answer=job.ask.answer, now_s=now_s)
            session = self._trace.sessions[job.session]
            if job.turn + 1 < len(session):
                self._at(partial(self._send, job.session, job.turn + 1), job.end_s + session[job.turn + 1].wait_s)

    def _watch(self, worker: str) -> None:
        self._versions[worker] += 1
        at_s = self._workers[worker].next_s()
        if at_s != float("inf"):
            self._at(partial(self._go_on, worker, self._versions[worker]), at_s)

    def _go_on(self, worker: str, version: int, now_s: float) -> None:
        if version == self._versions[worker]:
            self._tell(worker, self._workers[worker].advance(now_s), now_s)
            self._watch(worker)

    def _at(self, call: Callable[[float], None], at_s: float) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_s, self._count, call))
