"""All that a router knows, and its choice. Fed by what happens; time and randomness are passed in. Pure.

    choose ─▶ sent ─▶ first_token ─▶ finished         of a request
    up ─▶ stored, removed ─▶ down                     of a worker

Nothing here has to survive a restart: who holds what comes from KV events, or from what is sent after it; the queues fill anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt

from headstart.policy.routing.estimate import Estimate, Speeds, View, estimate
from headstart.policy.routing.holders import DISK, MEMORY, POOL, Holders, Keys
from headstart.policy.routing.many import COSTS, STATE, costs_of, estimates
from headstart.policy.routing.spread import Spread

_SHORT = 64  # requests whose arrivals tell how many come in a second
_USUAL_ANSWER = 0.05  # weight of one more answer in what is usual


@dataclass(slots=True)
class _Sent:
    worker: int
    tokens: int
    computed: int
    answered: bool = False


@dataclass(slots=True)
class _Worker:
    number: int
    speeds: Speeds
    kv_tokens: int | None
    events: bool
    waiting: dict[str, float] = field(default_factory=dict)  # request → seconds of computing
    waiting_tokens: int = 0  # to compute for them
    since_s: float = 0.0  # when the first of those began to be computed
    running: int = 0
    context: int = 0
    held: int = 0  # tokens of KV that its requests may come to
    others: int = 0  # requests there that came from elsewhere, as it says itself
    others_tokens: int = 0  # of their prompts, still to be computed
    others_held: int = 0  # tokens of KV that they have

    def queued_s(self, now_s: float) -> float:
        others_s = self.speeds.prefill_s(0, self.others_tokens) if self.others_tokens else 0.0
        if not self.waiting:
            return others_s
        first = next(iter(self.waiting.values()))
        return others_s + sum(self.waiting.values()) - min(first, max(0.0, now_s - self.since_s))

    @property
    def requests(self) -> int:
        return len(self.waiting) + self.running

    @property
    def room(self) -> int | None:
        return None if self.kv_tokens is None else self.kv_tokens - self.held - self.others_held

    def state(self) -> tuple[float, float, float, int, int, float]:
        """Return the row that `estimates` takes."""
        others_s = self.speeds.prefill_s(0, self.others_tokens) if self.others_tokens else 0.0
        first_s = next(iter(self.waiting.values()), 0.0)
        running = self.running + (0 if self.others_tokens else self.others)
        room = math.inf if self.kv_tokens is None else self.kv_tokens - self.held - self.others_held
        context = self.context + self.others_held
        return others_s + sum(self.waiting.values()), first_s, self.since_s, running, context, room


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why. `key`: where the part of the prompt ends that somebody has. `others`: makes `estimates`,
    which few ask for."""

    worker: str
    estimate: Estimate
    key: int | None
    others: Callable[[], Mapping[str, Estimate]]

    @property
    def estimates(self) -> Mapping[str, Estimate]:
        """Return those of all that it could have gone to, the chosen one's first, then by cost."""
        return self.others()


class Routing:
    """`workers`: how many at most, `blocks`: how many are remembered, `block_tokens`: of a key.

    >>> import numpy as np
    >>> from headstart.policy.speed import Speed
    >>> routing = Routing(block_tokens=64, random=Random(0))
    >>> speeds = Speeds(prefill=Speed((1e-3, 0.0)), step=Speed((1e-2, 1e-4, 0.0)))
    >>> routing.up("a", speeds, now_s=0.0), routing.up("b", speeds, now_s=0.0)
    (None, None)
    >>> prompt = np.arange(1, 11, dtype=np.uint64)
    >>> routing.stored("b", prompt)
    >>> routing.choose(prompt, tokens=650, now_s=1.0).worker
    'b'
    """

    def __init__(self, *, block_tokens: int, random: Random, workers: int = 64, blocks: int = 1 << 20) -> None:
        self.block_tokens = block_tokens
        self._random = random
        self.holders = Holders(workers=workers, blocks=blocks)
        self._spread = Spread()
        self._workers: dict[str, _Worker] = {}
        self._by_number: dict[int, _Worker] = {}
        self._free = list(reversed(range(workers)))
        self._costs = np.ones((workers, COSTS))
        self._states = np.zeros((workers, STATE))
        self._chosen_among: tuple[Collection[str] | None, list[str], npt.NDArray[np.int64]] | None = None
        self._sent: dict[str, _Sent] = {}
        self._arrivals: deque[float] = deque(maxlen=_SHORT)
        self._answer = 200.0  # tokens, usual; learned

    # Workers

    def up(self, name: str, speeds: Speeds, *, now_s: float, kv_tokens: int | None = None, events: bool = True) -> None:
        """A worker has come, or come again: what it held before is forgotten. `events`: it says what it stores; of one that
        does not, what is sent there is presumed to be stored. Raises ValueError beyond the number of workers."""
        if name in self._workers:
            self.down(name)
        if not self._free:
            raise ValueError(f"worker {name!r} is one too many: {len(self._workers)} are routed to already")
        worker = self._workers[name] = _Worker(self._free.pop(), speeds, kv_tokens, events)
        self._by_number[worker.number] = worker
        self._changed(worker)
        self._chosen_among = None

    def down(self, name: str) -> list[str]:
        """A worker is gone. Return its requests that had no token yet; they may be sent elsewhere."""
        worker = self._workers.pop(name, None)
        if worker is None:
            return []
        del self._by_number[worker.number]
        self._chosen_among = None
        self.holders.forget(worker.number)
        self._spread.forget(worker.number)
        self._free.append(worker.number)
        own = [request for request, sent in self._sent.items() if sent.worker == worker.number]
        lost = [request for request in own if not self._sent[request].answered]
        for request in own:
            del self._sent[request]
        return lost

    def measured(self, name: str, speeds: Speeds) -> None:
        """The worker's speeds are known better now."""
        if name in self._workers:
            worker = self._workers[name]
            if worker.speeds != speeds:
                worker.speeds = speeds
                self._changed(worker)

    def requests(self, name: str) -> int:
        """Return how many requests that were sent there have not ended."""
        return self._workers[name].requests if name in self._workers else 0

    def told(self, name: str, *, requests: int, waiting_tokens: int = 0, kv_used: int = 0, own: int = 0) -> None:
        """The worker says how many requests it has, and how many tokens of prompts it has to compute for them. What is more
        than was sent from here came from others, such as another router. `own`: how many were there from here when it was
        asked, if more than now."""
        worker = self._workers.get(name)
        if worker is None:
            return
        worker.others = max(0, requests - max(own, worker.requests))
        worker.others_tokens = max(0, waiting_tokens - worker.waiting_tokens) if worker.others else 0
        worker.others_held = max(0, kv_used - worker.held) if worker.others else 0
        self._note(worker)

    def stored(self, name: str | None, keys: Keys, plane: int = MEMORY) -> None:
        """The worker holds these blocks; None: the pool does."""
        if name is None:
            self.holders.add(0, keys, POOL)
        elif name in self._workers:
            self.holders.add(self._workers[name].number, keys, plane)

    def removed(self, name: str | None, keys: Keys, plane: int = MEMORY) -> None:
        """The worker, or the pool, no longer holds these."""
        if name is None:
            self.holders.remove(0, keys, POOL)
        elif name in self._workers:
            self.holders.remove(self._workers[name].number, keys, plane)

    def forget(self, name: str) -> None:
        """The worker holds nothing any more, and goes on."""
        if name in self._workers:
            self.holders.forget(self._workers[name].number)

    # Requests

    def choose(self, keys: Keys, *, tokens: int, now_s: float, among: Collection[str] | None = None) -> Decision | None:
        """Return where a prompt of `tokens` with the keys of its full blocks should go; None where no worker is there.

        Changes nothing but what is known of arrivals; `sent` says that it went there."""
        self._arrivals.append(now_s)
        names, numbers = self._numbered(among)
        if not names:
            return None
        runs = self.holders.runs(keys)
        found = estimates(
            numbers,
            self._costs,
            self._states,
            runs,
            block_tokens=self.block_tokens,
            tokens=tokens,
            answer=int(self._answer),
            rate=self._rate(now_s) / len(names),
            now_s=now_s,
        )
        key = _end_of_known(keys, runs[DISK].take(numbers))
        allowed: Sequence[int] = range(len(names))
        if self._spread.is_hot(key, workers=len(names)):
            able = [self._workers[name] for name in names]
            idle = [worker.number for worker in able if not worker.requests and not worker.others]
            may = self._spread.among(key, [worker.number for worker in able], idle=idle)
            allowed = [at for at, worker in enumerate(able) if worker.number in may]
        best = found.cheapest(allowed, self._random)

        def others() -> dict[str, Estimate]:
            order = np.argsort(found.cost, kind="stable").tolist()
            return {names[at]: found.row(at) for at in sorted(order, key=lambda at: at != best)}

        return Decision(names[best], found.row(best), key, others)

    def views(self, keys: Keys, *, now_s: float, among: Collection[str] | None = None) -> tuple[dict[str, View], int | None]:
        """Return each worker as a request with these keys finds it, and the key at which the part that somebody has ends."""
        able = self._able(among)
        if not able:
            return {}, None
        runs = self.holders.runs(keys)[:, [worker.number for worker in able.values()]]
        held = (runs.T * self.block_tokens).tolist()
        views = {name: self._view(worker, own, now_s) for (name, worker), own in zip(able.items(), held, strict=True)}
        return views, _end_of_known(keys, runs[DISK])

    def decided(self, worker: str, views: Mapping[str, View], key: int | None, *, tokens: int) -> Decision:
        """Return the decision of somebody else as one that `sent` takes."""
        chosen = estimate(views[worker], tokens=tokens, answer=int(self._answer), pressure=0.0)
        return Decision(worker, chosen, key, lambda: {worker: chosen})

    def sent(self, request: str, decision: Decision, *, tokens: int, now_s: float) -> None:
        """The request went where the decision says. Until it ends the worker counts as occupied with it."""
        worker = self._workers[decision.worker]
        if not worker.waiting:
            worker.since_s = now_s
        chosen = decision.estimate
        worker.waiting[request] = chosen.compute_s
        worker.held += tokens
        self._sent[request] = sent = _Sent(worker.number, tokens, tokens - chosen.reused)
        worker.waiting_tokens += sent.computed
        self._note(worker)
        self._spread.sent(decision.key, worker.number, of=len(self._workers))

    def presume(self, name: str, keys: Keys) -> None:
        """What was sent to a worker that does not say what it stores counts as stored; of others nothing does."""
        worker = self._workers.get(name)
        if worker is not None and not worker.events:
            self.holders.add(worker.number, keys)

    def first_token(self, request: str, *, now_s: float) -> None:
        """Its prompt has been computed."""
        sent, worker = self._of(request)
        if sent is None or worker is None or sent.answered:
            return
        sent.answered = True
        worker.waiting.pop(request, None)
        worker.waiting_tokens -= sent.computed
        worker.since_s = now_s
        worker.running += 1
        worker.context += sent.tokens
        self._note(worker)

    def finished(self, request: str, *, answer: int | None, now_s: float) -> None:
        """It has ended, well or not; `answer`: its tokens, None where it was cut off."""
        sent, worker = self._of(request)
        if sent is None:
            return
        del self._sent[request]
        if answer is not None:
            self._answer += _USUAL_ANSWER * (answer - self._answer)
        if worker is None:
            return
        worker.held -= sent.tokens
        if sent.answered:
            worker.running -= 1
            worker.context -= sent.tokens
        else:
            if next(iter(worker.waiting)) == request:
                worker.since_s = now_s
            del worker.waiting[request]
            worker.waiting_tokens -= sent.computed
        self._note(worker)

    def _changed(self, worker: _Worker) -> None:
        """Its speeds are others."""
        self._costs[worker.number] = costs_of(worker.speeds)
        self._note(worker)

    def _note(self, worker: _Worker) -> None:
        """What goes on there is something else."""
        self._states[worker.number] = worker.state()

    def _numbered(self, among: Collection[str] | None) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return those that may be chosen and their numbers. Nearly always they are those of the last time."""
        if (last := self._chosen_among) is None or last[0] != among:
            able = self._able(among)
            kept = None if among is None else frozenset(among)
            self._chosen_among = last = kept, list(able), np.array([worker.number for worker in able.values()], np.int64)
        return last[1], last[2]

    def _able(self, among: Collection[str] | None) -> dict[str, _Worker]:
        return self._workers if among is None else {name: self._workers[name] for name in self._workers if name in among}

    def _of(self, request: str) -> tuple[_Sent | None, _Worker | None]:
        sent = self._sent.get(request)
        if sent is None:
            return None, None
        return sent, self._by_number.get(sent.worker)

    def _view(self, worker: _Worker, held: tuple[int, int, int], now_s: float) -> View:
        memory, disk, pool = held
        return View(
            worker.number,
            worker.speeds,
            memory=memory,
            disk=disk,
            pool=pool,
            queued_s=worker.queued_s(now_s),
            waiting=len(worker.waiting) + (worker.others if worker.others_tokens else 0),
            waiting_tokens=worker.waiting_tokens + worker.others_tokens,
            running=worker.running + (0 if worker.others_tokens else worker.others),
            context=worker.context + worker.others_held,
            room=worker.room,
        )

    def _rate(self, now_s: float) -> float:
        """Return how many requests come in a second, of late."""
        passed_s = now_s - self._arrivals[0]
        return len(self._arrivals) / passed_s if passed_s > 0 else 0.0


def _end_of_known(keys: Keys, own: npt.NDArray[np.int64]) -> int | None:
    """Return the key at which the part ends that some worker has of its own."""
    most = int(own.max())
    return int(keys[most - 1]) if most else None
