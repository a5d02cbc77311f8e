"""Which worker got a request and why, for whoever asks later: the latest ones, bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart.policy.routing.estimate import Estimate
from headstart.policy.routing.router import Decision

MOST = 1000
_LATEST = 7  # attempts of a request that are kept, beside its first


@dataclass(slots=True)
class Attempt:
    """One worker that got the request. `left_out`: who could not have it, and why. `outcome`: what became of it there.
    `parted`: who computes its prompt, where that is another one, which is asked at `prefill_at`."""

    decision: Decision
    left_out: Mapping[str, str]
    outcome: str = "running"
    parted: Decision | None = None
    prefill_at: str = ""

    def told(self) -> dict[str, Any]:
        decision = self.decision
        others = [one for name, one in decision.estimates.items() if name != decision.worker]
        return {
            "worker": decision.worker,
            "prompt_computed_by": decision.worker if self.parted is None else self.parted.worker,
            "outcome": self.outcome,
            "reason": _reason(decision, others),
            "scores": [{"worker": name, **_score(one)} for name, one in decision.estimates.items()],
            "left_out": dict(self.left_out),
        }


@dataclass(slots=True)
class Asked:
    """A request. `request`: the id that its answer's header carries, `answer`: the one in the answer's body."""

    request: str
    tenant: str
    time: float  # seconds since 1970
    model: str
    tokens: int
    keys_by: str
    session: str = ""
    answer: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    tries: int = 0

    def tried(self, attempt: Attempt) -> None:
        """Note one more attempt."""
        self.tries += 1
        self.attempts.append(attempt)
        del self.attempts[1:-_LATEST]

    def told(self) -> dict[str, Any]:
        last = self.attempts[-1] if self.attempts else None
        return {
            "request": self.request,
            "answer": self.answer,
            "time": self.time,
            "model": self.model,
            "tenant": self.tenant,
            "session": self.session,
            "tokens": self.tokens,
            "tokens_by": self.keys_by,
            "worker": None if last is None else last.decision.worker,
            "tries": self.tries,
            "attempts": [attempt.told() for attempt in self.attempts],
        }


class Decisions:
    def __init__(self, *, most: int = MOST) -> None:
        self._most = most
        self._kept: OrderedDict[int, Asked] = OrderedDict()
        self._numbers: dict[str, int] = {}  # of ids, those of requests and those of answers
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, asked: Asked) -> None:
        """Keep a request from now on; what is decided of it later is seen, too."""
        self._kept[self._next] = asked
        self._numbers[asked.request] = self._next
        self._next += 1
        while len(self._kept) > self._most:
            number, gone = self._kept.popitem(last=False)
            for id in (gone.request, gone.answer):
                if self._numbers.get(id) == number:
                    del self._numbers[id]

    def answered(self, asked: Asked, id: str) -> None:
        """Let it be found by the id of its answer, too."""
        asked.answer = id
        number = self._numbers.get(asked.request)
        if id and number is not None and self._kept.get(number) is asked:
            self._numbers.setdefault(id, number)

    def find(self, id: str) -> Asked | None:
        number = self._numbers.get(id)
        return None if number is None else self._kept.get(number)

    def latest(self, limit: int) -> list[Asked]:
        """Return the latest ones, the last one first."""
        found = list(self._kept.values())
        return found[: -limit - 1 : -1]


def _score(one: Estimate) -> dict[str, float | int]:
    return {
        "first_token_s": round(one.first_token_s, 6),
        "wait_s": round(one.wait_s, 6),
        "read_s": round(one.read_s, 6),
        "compute_s": round(one.compute_s, 6),
        "work_s": round(one.work_s, 6),
        "cost": round(one.cost, 6),
        "reused_tokens": one.reused,
    }


def _reason(decision: Decision, others: list[Estimate]) -> str:
    """Return one sentence: what spoke for the worker."""
    own = decision.estimate
    held = f"{own.reused:,} tokens of it need not be computed there" if own.reused else "nothing of it is held there"
    said = f"first token in about {own.first_token_s:.3g} s, of which {own.wait_s:.3g} s waiting; {held}"
    if not others:
        return f"the only one that could take it; {said}"
    best = min(others, key=lambda one: one.cost)
    if best.cost < own.cost * 0.98:
        return f"spread: others had more than their share of this prefix, or as good as equal; {said}"
    if best.cost <= own.cost * 1.02:
        return f"as good as equal to others, drawn by lot; {said}"
    return f"cheapest of {len(others) + 1}: cost {own.cost:.3g} s against {best.cost:.3g} s; {said}"
