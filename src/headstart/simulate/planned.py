"""A fleet whose workers come and go as the planner says, on the virtual clock: the planner's own code, the router's own code.

A started worker is ready after a while, with nothing in its memory; one that drains gets nothing new and goes when its last
answer has ended. What is paid for is the time from the start to the end of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import numpy as np

from headstart.policy.planning import Action, Delays, Limits, Planner, Seen, Targets
from headstart.simulate.fleet import OURS, Fleet, Run, Simulation
from headstart.simulate.trace import Trace
from headstart.simulate.worker import Job, Told

_LATEST = 64  # requests of a worker of which its p90 is taken
_LATE_S = 300.0  # and no older than so
_NOBODY = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Planned:
    """`actions`: (when, what); `worker_s`: seconds of workers from start to end, those that start and drain included; `most`:
    workers that were there at once."""

    run: Run
    actions: Sequence[tuple[float, Action]]
    worker_s: float
    most: int


@dataclass(slots=True)
class _Life:
    started_s: float
    state: str = "starting"
    ended_s: float | None = None


def simulate_planned(
    trace: Trace,
    fleet: Fleet,
    *,
    targets: Targets,
    limits: Limits,
    delays: Delays,
    begins: datetime = datetime(2026, 1, 5),
    look_s: float = 15.0,
    seed: int = 0,
    on_request: Callable[[int], None] = lambda _: None,
) -> Planned:
    """Return what a fleet of `fleet.workers` at first becomes under the planner. The trace begins at `begins`, local time."""
    return _Planned(trace, fleet, Planner(targets, limits, delays), limits, delays, begins, look_s, seed, on_request).planned()


class _Planned(Simulation):
    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        planner: Planner,
        limits: Limits,
        delays: Delays,
        begins: datetime,
        look_s: float,
        seed: int,
        on_request: Callable[[int], None],
    ) -> None:
        most = max(limits.maximum, fleet.workers, *(window.maximum for window in limits.windows))
        super().__init__(trace, fleet, OURS, seed, on_request, most=2 * most)  # those that drain are there a while longer
        self._planner = planner
        self._delays = delays
        self._begins = begins
        self._look_s = look_s
        self._lives = {name: _Life(0.0, "ready") for name in self._workers}
        self._latest: dict[str, deque[tuple[float, float, float | None]]] = {
            name: deque(maxlen=_LATEST) for name in self._workers
        }
        self._hits = dict.fromkeys(self._workers, 0)
        self._actions: list[tuple[float, Action]] = []
        self._most = fleet.workers
        self._left = sum(len(session) for session in trace.sessions)

    def planned(self) -> Planned:
        self._at(self._look, 0.0)
        run = self.run()
        end_s = max((job.end_s for job in run.jobs), default=0.0)
        lives = [
            (life.ended_s if life.ended_s is not None else max(end_s, life.started_s)) - life.started_s
            for life in self._lives.values()
        ]
        return Planned(run, self._actions, sum(lives), self._most)

    def _among(self) -> Collection[str]:
        return [name for name, life in self._lives.items() if life.state == "ready"]

    def _tell(self, worker: str, told: Told, now_s: float) -> None:
        super()._tell(worker, told, now_s)
        for job in told.first:
            self._hits[worker] += job.reused
        for job in told.ended:
            self._latest[worker].append((now_s, job.first_s - job.sent_s, _step_s(job)))
            self._left -= 1
        if told.ended and self._lives[worker].state == "draining" and not self._busy(worker):
            self._end(worker, now_s)

    def _look(self, now_s: float) -> None:
        local = self._begins + timedelta(seconds=now_s)
        for action in self._planner.plan(self._seen(now_s), now_s=now_s, local=local).actions:
            self._actions.append((now_s, action))
            if action.verb == "start":
                name = f"w{len(self._lives):03}"
                self._lives[name] = _Life(now_s)
                self._at(partial(self._ready, name), now_s + self._delays.start_s)
            elif action.verb == "drain" and action.worker is not None:
                self._lives[action.worker].state = "draining"
                if not self._busy(action.worker):
                    self._end(action.worker, now_s)
        self._most = max(self._most, sum(1 for life in self._lives.values() if life.ended_s is None))
        if self._left:
            self._at(self._look, now_s + self._look_s)

    def _seen(self, now_s: float) -> list[Seen]:
        views, _ = self._routing.views(_NOBODY, now_s=now_s)
        seen = []
        for name, life in self._lives.items():
            if life.ended_s is not None:
                continue
            if life.state == "starting":
                seen.append(Seen(name, state="starting"))
                continue
            view, late = views[name], [one for one in self._latest[name] if one[0] >= now_s - _LATE_S]
            steps = [step_s for _, _, step_s in late if step_s is not None]
            seen.append(
                Seen(
                    name,
                    state=life.state,
                    requests=self._requests[name],
                    running=view.running,
                    waiting=view.waiting,
                    wait_s=view.queued_s,
                    first_token_s=_p90([first_s for _, first_s, _ in late]),
                    token_s=_p90(steps),
                    hit_tokens=self._hits[name],
                )
            )
        return seen

    def _ready(self, name: str, now_s: float) -> None:
        self._lives[name].state = "ready"
        self._latest[name] = deque(maxlen=_LATEST)
        self._hits[name] = 0
        self._join(name, now_s)

    def _busy(self, name: str) -> bool:
        return self._workers[name].next_s() != float("inf")

    def _end(self, name: str, now_s: float) -> None:
        self._lives[name].state = "gone"
        self._lives[name].ended_s = now_s
        self._routing.down(name)


def _step_s(job: Job) -> float | None:
    return (job.end_s - job.first_s) / (job.ask.answer - 1) if job.ask.answer > 1 else None


def _p90(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 90)) if values else None
