"""`estimate` for all workers at once: in C where that is there, else the same sums over columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from headstart.policy.routing.estimate import STEPS_LEFT, TIE, TIE_S, Estimate, Speeds
from headstart.policy.routing.native import native_choice

Column = npt.NDArray[np.float64]

COSTS = 10  # numbers that a worker's speeds come to
STATE = 6  # and what goes on there: seconds queued, those of the first, since when that is computed; running, context, room
_FOUND = 6  # columns of `Estimates`


def costs_of(speeds: Speeds) -> tuple[float, ...]:
    """Return a worker's speeds as a row; what it does not have is never worth it."""
    disk = speeds.disk.costs if speeds.disk is not None else (np.inf, np.inf)
    pool = speeds.pool.costs if speeds.pool is not None else (np.inf, np.inf)
    return (*speeds.prefill.costs, *speeds.step.costs, *disk, *pool, float(speeds.chunk_tokens))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Of each worker, as in `Estimate`, which `row` returns. `columns` [what, worker]: reused, read_s, wait_s, compute_s,
    work_s, cost."""

    workers: npt.NDArray[np.int64]
    columns: Column

    @property
    def cost(self) -> Column:
        cost: Column = self.columns[-1]
        return cost

    def row(self, at: int) -> Estimate:
        reused, *seconds = self.columns[:, at].tolist()
        return Estimate(int(self.workers[at]), int(reused), *seconds)

    def cheapest(self, allowed: Sequence[int], random: Random) -> int:
        """Return the place of the one that costs least among those at `allowed`; of those that cannot be told apart any."""
        cost = self.cost.tolist()
        best = min(allowed, key=cost.__getitem__)
        most = cost[best] + max(TIE_S, TIE * self.row(best).first_token_s)
        return random.choice([at for at in allowed if cost[at] <= most])


def estimates(
    workers: npt.NDArray[np.int64],
    costs: Column,
    states: Column,
    runs: npt.NDArray[np.int64],
    *,
    block_tokens: int,
    tokens: int,
    answer: int,
    rate: float,
    now_s: float,
) -> Estimates:
    """Return what a prompt of `tokens` with an answer of some `answer` tokens costs on each of `workers`.

    Of every worker there may be: `costs` [worker, COSTS]; `states` [worker, STATE], with infinite room where that is not known;
    `runs` [3, worker]: blocks in memory, there or on its disk, there or in the pool. `rate`: requests that come to each worker
    in a second, which wait for what is put on it now."""
    if (library := native_choice()) is not None:
        found = np.empty((_FOUND, len(workers)))
        library.headstart_estimates(
            workers.ctypes.data,
            len(workers),
            costs.ctypes.data,
            states.ctypes.data,
            runs.ctypes.data,
            runs.shape[1],
            block_tokens,
            tokens,
            answer,
            rate,
            now_s,
            found.ctypes.data,
        )
        return Estimates(workers, found)
    held = (runs[:, workers] * block_tokens).astype(np.float64)
    return _in_columns(workers, costs[workers], states[workers], held, tokens=tokens, answer=answer, rate=rate, now_s=now_s)


def _in_columns(
    workers: npt.NDArray[np.int64],
    costs: Column,
    states: Column,
    held: Column,
    *,
    tokens: int,
    answer: int,
    rate: float,
    now_s: float,
) -> Estimates:
    row_s, key_s, pass_s, sequence_s, attend_s, disk_s, disk_start_s, pool_s, pool_start_s, chunk = costs.T
    waiting_s, first_s, since_s, running, context, room = states.T
    queued_s = waiting_s - np.minimum(first_s, np.maximum(0.0, now_s - since_s))
    most = float(tokens - 1)
    squared = float(tokens) * tokens

    def prefill_s(start: Column) -> Column:
        seconds: Column = row_s * (tokens - start) + key_s * ((squared - start * start) / 2)
        return seconds

    busy = running > 0
    step_s = np.where(busy, pass_s + sequence_s * running + attend_s * context, 0.0)
    answer_s = answer * (sequence_s + attend_s * tokens)
    missing = tokens + answer - room
    full = busy & (missing > 0)
    wait_s = queued_s
    if full.any():
        own = np.maximum(1.0, context / np.maximum(running, 1.0))
        share = np.minimum(1.0, np.where(full, missing, 0.0) / own / np.maximum(running, 1.0))
        wait_s = queued_s + np.where(full, step_s * STEPS_LEFT * share, 0.0)
    pressure = rate * (queued_s + prefill_s(np.minimum(held[2], tokens)))

    ends = [np.minimum(column, most) for column in held]
    reused = [ends[0]]
    read = [np.zeros_like(queued_s)]
    with np.errstate(invalid="ignore"):  # infinite × 0: there is nothing that could be read, which is not looked at
        for end, cost_s, start_s in ((ends[1], disk_s, disk_start_s), (ends[2], pool_s, pool_start_s)):
            more = (end > reused[-1]) & np.isfinite(start_s)
            read.append(np.where(more, read[-1] + cost_s * (end - reused[-1]) + start_s, read[-1]))
            reused.append(np.where(more, end, reused[-1]))
    took = np.stack(reused)
    read_s = np.stack(read)
    alone = prefill_s(took)
    compute = alone + step_s * np.ceil((tokens - took) / chunk)
    work = alone + answer_s
    cost = np.maximum(wait_s, read_s) + compute + pressure * work
    best = np.argmin(cost, axis=0), np.arange(len(workers))
    return Estimates(workers, np.stack([took[best], read_s[best], wait_s, compute[best], work[best], cost[best]]))
