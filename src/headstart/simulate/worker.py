"""An engine as a few numbers: prefill in chunks beside decoding, bounded memory, a prefix LRU in it, reads from a pool.

Nothing is done step by step. Between two events (a prompt is done, an answer ends, a read arrives, a request comes) every step
takes as long as the one before, so a worker's time is steps × seconds, and a day of a fleet is some events a request.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headstart.policy.routing.estimate import Speeds
from headstart.simulate.trace import Ask

NEVER = math.inf
_NOTHING = 1e-6  # of a step: what sums of seconds leave over


class KeptBlocks:
    """An LRU of keys; of one prompt the tail goes before the head."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def run(self, keys: Sequence[int]) -> int:
        """Return how many of a prompt's keys from the first on are here."""
        return next((n for n, key in enumerate(keys) if key not in self._held), len(keys))

    def keep(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return what is new here and what had to go for it."""
        new = [key for key in keys if key not in self._held]
        for key in reversed(keys):
            self._held[key] = None
            self._held.move_to_end(key)
        gone = []
        while len(self._held) > self._blocks:
            gone.append(self._held.popitem(last=False)[0])
        return new, gone


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: times in seconds since the trace began."""

    name: str
    ask: Ask
    keys: list[int]
    sent_s: float
    session: int = 0
    turn: int = 0
    ready_s: float = 0.0  # when what is read for it has arrived
    read: int = 0  # tokens of its beginning that are read from the pool
    reused: int = 0
    reused_memory: int = 0
    first_s: float = 0.0
    end_s: float = 0.0


@dataclass(slots=True)
class Told:
    """What happened: requests that have their first token, that have ended, and blocks that came and went."""

    first: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)


class Worker:
    """`kv_tokens`: what fits into its memory, running and kept together. `pool`: shared by all, or None."""

    def __init__(self, speeds: Speeds, *, kv_tokens: int, block_tokens: int, pool: KeptBlocks | None) -> None:
        self.speeds = speeds
        self.busy_s = 0.0
        self._kv_tokens = kv_tokens
        self._block_tokens = block_tokens
        self._pool = pool
        self._memory = KeptBlocks(kv_tokens // block_tokens)
        self._queue: deque[Job] = deque()
        self._head: Job | None = None
        self._head_steps = 0.0  # that are still to do
        self._chunk_s = 0.0
        self._steps = 0.0
        self._running: list[tuple[float, int, Job]] = []  # heap by the step with which each ends
        self._context = 0
        self._held = 0
        self._now_s = 0.0
        self._count = 0

    def take(self, job: Job, now_s: float) -> Told:
        """Queue a request; what is to be read for it is asked for at once."""
        told = self.advance(now_s)
        if self._pool is not None and self.speeds.pool is not None:
            there = self._memory.run(job.keys) * self._block_tokens
            end = min(self._pool.run(job.keys) * self._block_tokens, job.ask.tokens - 1)
            if end > there:
                read_s = self.speeds.pool.seconds(end - there, 1)
                if read_s < self.speeds.prefill_s(there, end):
                    job.read, job.ready_s = end, now_s + read_s
        self._queue.append(job)
        self._begin()
        return told

    def next_s(self) -> float:
        """Return when something happens here next, if nobody comes."""
        step_s = self._step_s()
        if self._head is not None:
            soonest = self._now_s + max(0.0, self._head_steps) * step_s
        else:
            soonest = min((job.ready_s for job in self._startable()), default=NEVER)
        if self._running:
            soonest = min(soonest, self._now_s + max(0.0, self._running[0][0] - self._steps) * step_s)
        return soonest

    def advance(self, now_s: float) -> Told:
        """Go on until then. Return what happened; called at `next_s` it is what happens then."""
        told = Told()
        while True:
            at_s = self.next_s()
            if at_s > now_s:
                break
            self._pass(at_s)
            self._happen(told)
        self._pass(now_s)
        return told

    def _pass(self, until_s: float) -> None:
        passed_s = until_s - self._now_s
        self._now_s = until_s
        if passed_s <= 0 or (self._head is None and not self._running):
            return
        steps = passed_s / self._step_s()
        self.busy_s += passed_s
        self._steps += steps
        if self._head is not None:
            self._head_steps -= steps

    def _happen(self, told: Told) -> None:
        """Do what is due now."""
        if self._head is not None and self._head_steps <= _NOTHING:
            job, self._head = self._head, None
            job.first_s = self._now_s
            new, gone = self._memory.keep(job.keys)
            told.stored += new
            told.removed += gone
            if self._pool is not None:
                self._pool.keep(job.keys)
            told.first.append(job)
            self._count += 1
            heapq.heappush(self._running, (self._steps + max(0, job.ask.answer - 1), self._count, job))
            self._context += job.ask.tokens
        while self._running and self._running[0][0] - self._steps <= _NOTHING:
            _, _, job = heapq.heappop(self._running)
            self._context -= job.ask.tokens
            self._held -= job.ask.tokens + job.ask.answer
            job.end_s = self._now_s
            told.ended.append(job)
        self._begin()

    def _begin(self) -> None:
        """Start the first prompt whose bytes are here and whose KV fits."""
        if self._head is not None:
            return
        job = next((one for one in self._startable() if one.ready_s <= self._now_s), None)
        if job is None:
            return
        self._queue.remove(job)
        self._head = job
        self._held += job.ask.tokens + job.ask.answer
        last = job.ask.tokens - 1
        job.reused_memory = min(self._memory.run(job.keys) * self._block_tokens, last)
        job.reused = max(job.reused_memory, min(job.read, last))
        alone_s = self.speeds.prefill_s(job.reused, job.ask.tokens)
        self._head_steps = float(math.ceil((job.ask.tokens - job.reused) / self.speeds.chunk_tokens))
        self._chunk_s = alone_s / self._head_steps

    def _startable(self) -> Iterator[Job]:
        """Requests whose KV fits; whoever comes later does not overtake one that waits for memory."""
        for job in self._queue:
            if self._held and self._held + job.ask.tokens + job.ask.answer > self._kv_tokens:
                return
            yield job

    def _step_s(self) -> float:
        decode_s = self.speeds.step.seconds(1, len(self._running), self._context) if self._running else 0.0
        return decode_s + (self._chunk_s if self._head is not None else 0.0)
