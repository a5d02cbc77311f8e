"""How many workers a fleet needs, in which roles, and what to do about it now. Pure: the clock and the numbers are passed in.

    needed = requests a second expected when a worker started now would be ready
             ÷ requests a second that a worker was seen to do within the targets (`able`)

`able` is learned: it rises while the targets are met with room, falls where they are missed by workers that had no more than
their share, and stays where the fleet has more or fewer workers than it says, as nothing is learned from those. More is started
at once; less is drained only after it was enough for a while, one step at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import median_low

ROLES = ("both", "prefill", "decode")
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_AIM = 0.75  # of a target: what the fleet is sized for
_ENOUGH = 150  # requests that tell how many come in a second, unless that takes longer than
_RATE_S = (60.0, 600.0)  # seconds: fewest, most
_TREND_S = 2700.0  # over which their trend is
_SMOOTH_S = 300.0  # in which what was measured counts for two thirds: single long prompts are no strain
_STEEPEST = 1.5  # times what comes now: the most that a trend may promise
_UP, _DOWN = 0.03, 0.05  # a minute: by which `able` may rise and fall
_ROOM = 1.5  # most that a fleet far below its targets is thought able to do beyond what it was seen to do
_LEAST = 0.5  # of what a worker was given at first, however far over its targets: a queue says nothing of how much is too much
_FEW = 20  # requests, before anything is learned
_SHARE = 1.05  # of `able`: a worker that was given more than so much says nothing by missing its targets
_TESTED = 0.8  # of `able`: below so much a worker low strain says nothing
_IDLE = 0.7  # requests at a worker at once: with fewer it could do as many more as bring it to so many, in turn
_LEAST_INSIDE = 0.05
_SPARE = 0.9  # of `able`: what those that stay after a drain must be able to do it with
_COLD = 0.6  # of a warm worker: what a new one does, whose cache is empty
_BACK = 3.0  # times a start: after which one that is down is counted on no longer


@dataclass(frozen=True, slots=True)
class Targets:
    """What nine of ten requests should get: seconds to the first token, and for each token after it."""

    first_token_s: float = 2.0
    token_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Window:
    """Other bounds at some hours, in minutes of the local day, over midnight where it ends before it begins; `days` are those
    on which it begins (0 is Monday), empty: all.

    >>> night = Window(22 * 60, 6 * 60, minimum=1, maximum=2, days=frozenset({4}))
    >>> [night.holds(datetime(2026, 11, day, hour)) for day, hour in ((27, 23), (28, 5), (28, 23), (27, 12))]
    [True, True, False, False]
    """

    start: int
    end: int
    minimum: int
    maximum: int
    days: frozenset[int] = frozenset()

    def holds(self, local: datetime) -> bool:
        minute = local.hour * 60 + local.minute
        if self.start <= self.end:
            begun, inside = local, self.start <= minute < self.end
        else:
            begun = local if minute >= self.start else local - timedelta(days=1)
            inside = minute >= self.start or minute < self.end
        return inside and (not self.days or begun.weekday() in self.days)


@dataclass(frozen=True, slots=True)
class Limits:
    """Fewest and most workers, all roles together; the first window that holds says otherwise."""

    minimum: int = 1
    maximum: int = 8
    windows: tuple[Window, ...] = ()

    def at(self, local: datetime) -> tuple[int, int]:
        for window in self.windows:
            if window.holds(local):
                return window.minimum, window.maximum
        return self.minimum, self.maximum


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds: from starting a worker to its being ready, until its cache is warm, and for how long fewer workers must have
    been enough before one is drained."""

    start_s: float = 60.0
    warm_s: float = 300.0
    settle_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker now. `state`: starting, ready, draining or down; `requests` that it was sent so far; `wait_s`: how long until
    what waits there has been computed; `first_token_s`, `token_s`: of nine of ten of its latest requests, None where there are
    none; `hit_tokens`: that it found in any tier so far."""

    name: str
    role: str = "both"
    state: str = "ready"
    requests: int = 0
    running: int = 0
    waiting: int = 0
    wait_s: float = 0.0
    first_token_s: float | None = None
    token_s: float | None = None
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """`verb`: start (one of `role`), drain (`worker`) or move (`worker` to `role`)."""

    verb: str
    role: str
    worker: str | None
    reason: str

    def __str__(self) -> str:
        what = {"start": f"start a worker ({self.role})", "drain": f"drain {self.worker}"}
        return f"{what.get(self.verb, f'move {self.worker} to {self.role}')}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Need:
    """What a role needs and why. `needed`: now; `enough`: what would do if the fleet were to shrink; `per_s`, `expected_per_s`:
    requests; `strain`: what the latest took over the target, the worse of two; `able`: requests a second of one worker."""

    role: str
    ready: int
    coming: int
    needed: int
    enough: int
    per_s: float
    expected_per_s: float
    strain: float | None
    able: float | None
    wait_s: float

    def __str__(self) -> str:
        able = "unknown" if self.able is None else f"{self.able:.3g}/s"
        strain = "no requests" if self.strain is None else f"{self.strain:.0%} of the target"
        return (
            f"{self.role}: {self.ready} ready, {self.coming} coming, {self.needed} needed; {self.per_s:.3g} requests/s, "
            f"{self.expected_per_s:.3g}/s expected, {able} a worker, {strain}, {self.wait_s:.1f} s queued"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    actions: Sequence[Action]
    needs: Sequence[Need]


@dataclass(slots=True)
class _Role:
    counts: deque[tuple[float, float]] = field(default_factory=deque)  # (when, requests so far)
    able: float | None = None
    more_since_s: float | None = None  # since when there are more workers than would do
    enough: int = 0  # most that would have done since then
    strain: float | None = None  # of late
    inside: float | None = None  # requests that are at a worker at once, of late
    queued_s: float | None = None  # since when the queues alone are over the target


class Planner:
    """Says at each look what to start, drain or move. Look every few seconds; one of its actions that was not done is said
    again.

    >>> planner = Planner(Targets(first_token_s=1.0), Limits(minimum=1, maximum=4))
    >>> for action in planner.plan([Seen("a", wait_s=9.0, waiting=5)], now_s=0.0, local=datetime(2026, 1, 1)).actions:
    ...     print(action)
    >>> for action in planner.plan([Seen("a", wait_s=9.0, waiting=5)], now_s=40.0, local=datetime(2026, 1, 1)).actions:
    ...     print(action)
    start a worker (both): 9.0 s of prompts are queued at half of the workers, the target is 1 s
    """

    def __init__(self, targets: Targets, limits: Limits, delays: Delays = Delays()) -> None:
        self._targets = targets
        self._limits = limits
        self._delays = delays
        self._roles: dict[str, _Role] = {}
        self._requests: dict[str, int] = {}
        self._ready_s: dict[str, float] = {}  # since when; those of the first look count as warm
        self._down_s: dict[str, float] = {}  # since when
        self._looked_s: float | None = None

    def plan(self, workers: Sequence[Seen], *, now_s: float, local: datetime) -> Plan:
        """Return what to do. `now_s`: of any clock that only goes forward; `local`: the time of day, for the schedule."""
        sent = self._note(workers, now_s)
        least, most = self._limits.at(local)
        least = min(most, max(least, self._limits.at(local + timedelta(seconds=self._delays.start_s))[0]))
        roles = sorted({worker.role for worker in workers if worker.state != "draining"} or self._roles) or ["both"]
        needs, groups = [], {}
        for role in roles:
            group = [worker for worker in workers if worker.role == role]
            groups[role] = group
            # A request goes to who answers it, and its first token is told there: prefill workers are asked all of them.
            asked = workers if role == "prefill" else group
            needs.append(self._need(role, group, asked, sent, now_s))
        self._looked_s = now_s
        spare = most - sum(1 for worker in workers if worker.state != "draining")  # who is down for good keeps a place
        return Plan(self._decide(needs, groups, least=least, most=most, spare=spare, now_s=now_s), needs)

    # What is known

    def _note(self, workers: Sequence[Seen], now_s: float) -> Mapping[str, int]:
        """Return how many requests each worker was sent since the last look."""
        first = self._looked_s is None
        sent = {}
        for worker in workers:
            before = self._requests.get(worker.name, worker.requests if first else 0)
            sent[worker.name] = worker.requests - before if worker.requests >= before else worker.requests
            if worker.state == "ready":
                self._ready_s.setdefault(worker.name, -math.inf if first else now_s)
            if worker.state in ("starting", "down"):
                self._ready_s.pop(worker.name, None)  # its cache will be cold
            if worker.state == "down":
                self._down_s.setdefault(worker.name, now_s)
            elif worker.state == "ready":
                self._down_s.pop(worker.name, None)
        self._requests = {worker.name: worker.requests for worker in workers}
        for known in (self._ready_s, self._down_s):
            for name in known.keys() - self._requests.keys():
                del known[name]
        return sent

    def _need(self, role: str, group: Sequence[Seen], asked: Sequence[Seen], sent: Mapping[str, int], now_s: float) -> Need:
        """Return what a role needs whose workers are `group`; its requests and their times are told of `asked`."""
        state = self._roles.setdefault(role, _Role())
        ready = [worker for worker in group if worker.state == "ready"]
        coming = sum(1 for worker in group if self._is_coming(worker, now_s))
        total = (state.counts[-1][1] if state.counts else 0.0) + sum(sent[worker.name] for worker in asked)
        state.counts.append((now_s, total))
        while len(state.counts) > 2 and state.counts[0][0] < now_s - _TREND_S:
            state.counts.popleft()
        per_s, expected = _rates(state.counts, ahead_s=self._delays.start_s)
        strain = state.strain = self._smoothed(state, self._strain(role, asked, sent), now_s)
        share = self._share(ready, now_s)
        looked_s = state.counts[-2][0] if len(state.counts) > 1 else now_s
        if ready:
            fades = math.exp(-(now_s - looked_s) / _SMOOTH_S)
            inside = sum(worker.running + worker.waiting for worker in ready) / len(ready)
            state.inside = inside if state.inside is None else inside + fades * (state.inside - inside)
        known = per_s > 0 and now_s - state.counts[0][0] >= _RATE_S[0] and total - state.counts[0][1] >= _FEW
        if ready and known and strain is not None and state.inside is not None:
            warm = all(now_s - self._ready_s[worker.name] >= self._delays.warm_s for worker in ready)
            more = _IDLE / max(state.inside, _LEAST_INSIDE)
            state.able = _learned(state.able, per_s / share, max(strain, 1e-3), more=more, passed_s=now_s - looked_s, warm=warm)
        able = state.able
        have = len(ready) + coming
        if expected == 0 and not any(worker.running or worker.waiting for worker in ready):
            needed = enough = 0
        elif able is None:
            needed = enough = have
        else:
            needed = math.ceil(expected / able - 1e-9)
            enough = math.ceil(expected / (able * _SPARE) - 1e-9)
        wait_s = median_low([worker.wait_s for worker in ready]) if ready and role != "decode" else 0.0
        if wait_s <= self._targets.first_token_s:
            state.queued_s = None
        elif state.queued_s is None:
            state.queued_s = now_s
        if state.queued_s is not None and now_s - state.queued_s >= self._delays.start_s / 2 and not coming:
            needed = max(needed, have + max(1, len(ready) // 4))
            if state.able is not None and per_s > 0:
                state.able = able = min(state.able, per_s / share)  # what they were given was too much
                enough = max(enough, math.ceil(expected / (able * _SPARE) - 1e-9))
        enough = max(enough, needed, 1)
        self._settle(state, have if not coming else 0, enough, now_s)
        return Need(role, len(ready), coming, max(1, needed), enough, per_s, expected, strain, able, wait_s)

    def _smoothed(self, state: _Role, strain: float | None, now_s: float) -> float | None:
        """Return the strain with what it was before, which fades; None before anything was measured."""
        if strain is None or state.strain is None:
            return strain if state.strain is None else state.strain
        passed_s = now_s - state.counts[-2][0]
        return state.strain + (1 - math.exp(-passed_s / _SMOOTH_S)) * (strain - state.strain)

    def _settle(self, state: _Role, have: int, enough: int, now_s: float) -> None:
        """Note for how long fewer workers would have done, and the most that they would have had to be. While some are coming
        that is not said of any (`have` is 0): nothing is known yet of what the fleet does with them."""
        if enough >= have:
            state.more_since_s = None
        elif state.more_since_s is None:
            state.more_since_s, state.enough = now_s, enough
        else:
            state.enough = max(state.enough, enough)

    def _is_coming(self, worker: Seen, now_s: float) -> bool:
        """Say whether the worker will soon be there: it starts, however long that takes, or has been down for a moment."""
        if worker.state == "down":
            return now_s - self._down_s[worker.name] < _BACK * self._delays.start_s
        return worker.state == "starting"

    def _share(self, ready: Sequence[Seen], now_s: float) -> float:
        """Return for how many warm workers these count."""
        total = 0.0
        for worker in ready:
            age = (now_s - self._ready_s[worker.name]) / self._delays.warm_s if self._delays.warm_s else 1.0
            total += _COLD + (1 - _COLD) * min(1.0, age)
        return total

    def _strain(self, role: str, asked: Sequence[Seen], sent: Mapping[str, int]) -> float | None:
        """Return what was measured over the target, the worse of both; workers count by what they were sent since."""
        found = []
        for target_s, name in ((self._targets.first_token_s, "first_token_s"), (self._targets.token_s, "token_s")):
            if role == ("decode" if name == "first_token_s" else "prefill"):
                continue
            told = [(getattr(worker, name), sent[worker.name]) for worker in asked if worker.state == "ready"]
            told = [(seconds, weight) for seconds, weight in told if seconds is not None and weight]
            if told:
                found.append(sum(seconds * weight for seconds, weight in told) / sum(weight for _, weight in told) / target_s)
        return max(found, default=None)

    # What to do

    def _decide(
        self, needs: Sequence[Need], groups: Mapping[str, Sequence[Seen]], *, least: int, most: int, spare: int, now_s: float
    ) -> list[Action]:
        """Return what is to be done; no more than `spare` starts."""
        actions: list[Action] = []
        have = {need.role: need.ready + need.coming for need in needs}
        by_role = {need.role: need for need in needs}
        gone: set[str] = set()
        for need in sorted(needs, key=lambda need: have[need.role] - need.needed):
            while have[need.role] < need.needed:
                giver = self._giver(by_role, have, groups, gone, to=need.role, now_s=now_s)
                if giver is not None:
                    gone.add(giver.name)
                    have[giver.role] -= 1
                    why = f"{_why(need, self._targets)}; {giver.role} does with {have[giver.role]}"
                    actions.append(Action("move", need.role, giver.name, why))
                elif spare > 0:
                    spare -= 1
                    actions.append(Action("start", need.role, None, _why(need, self._targets)))
                else:
                    break
                have[need.role] += 1
        busiest = max(needs, key=lambda need: (need.strain or 0.0, need.role == "both"))
        while sum(have.values()) < least and spare > 0:
            spare -= 1
            have[busiest.role] += 1
            actions.append(Action("start", busiest.role, None, f"at least {least} are wanted at this hour"))
        if not any(action.verb == "start" for action in actions):
            actions += self._drained(by_role, have, groups, gone, least=least, most=most, now_s=now_s)
        return actions

    def _drained(
        self,
        needs: Mapping[str, Need],
        have: dict[str, int],
        groups: Mapping[str, Sequence[Seen]],
        gone: set[str],
        *,
        least: int,
        most: int,
        now_s: float,
    ) -> list[Action]:
        """Return the workers that may go: those above the most at once, those that were not needed for a while one by one."""
        actions = []
        while sum(have.values()) > most:
            role = max(have, key=lambda role: have[role] - needs[role].needed)
            worker = self._least_worth([one for one in groups[role] if one.name not in gone])
            if worker is None:
                break
            gone.add(worker.name)
            have[role] -= 1
            actions.append(Action("drain", role, worker.name, f"no more than {most} are wanted at this hour"))
        for role, need in needs.items():
            state = self._roles[role]
            if state.more_since_s is None or now_s - state.more_since_s < self._delays.settle_s:
                continue
            for _ in range(max(1, (have[role] - state.enough) // 2)):
                worker = self._least_worth([one for one in groups[role] if one.name not in gone])
                if worker is None or sum(have.values()) <= least or have[role] <= state.enough:
                    break
                gone.add(worker.name)
                have[role] -= 1
                why = f"{state.enough} would have done for {_span(now_s - state.more_since_s)}"
                actions.append(Action("drain", role, worker.name, f"{why}; {need.expected_per_s:.3g} requests/s are expected"))
            state.more_since_s = None
        return actions

    def _giver(
        self,
        needs: Mapping[str, Need],
        have: Mapping[str, int],
        groups: Mapping[str, Sequence[Seen]],
        gone: set[str],
        *,
        to: str,
        now_s: float,
    ) -> Seen | None:
        """Return a worker of another role that can do without it, and could for a fifth of the time after which one goes."""
        if to == "both":
            return None
        for role, need in needs.items():
            since_s = self._roles[role].more_since_s
            if role in (to, "both") or since_s is None or now_s - since_s < self._delays.settle_s / 5:
                continue
            if have[role] > max(need.enough, self._roles[role].enough):
                return self._least_worth([one for one in groups[role] if one.name not in gone])
        return None

    def _least_worth(self, group: Sequence[Seen]) -> Seen | None:
        """Return whose going costs least: the coldest cache, then who has least to do. None where only one is ready."""
        ready = [worker for worker in group if worker.state == "ready"]
        if len(ready) < 2:
            return None
        return min(ready, key=lambda one: (-self._ready_s[one.name], one.running + one.waiting, one.hit_tokens, one.name))


def _why(need: Need, targets: Targets) -> str:
    if need.wait_s > targets.first_token_s:
        return f"{need.wait_s:.1f} s of prompts are queued at half of the workers, the target is {targets.first_token_s:g} s"
    if need.able is None or need.ready + need.coming == 0:
        return "none is ready"
    return f"{need.expected_per_s:.3g} requests/s are expected, {need.able:.3g}/s is what a worker does within the targets"


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"


def _rates(counts: Sequence[tuple[float, float]], *, ahead_s: float) -> tuple[float, float]:
    """Return requests a second of late, and how many are to be expected: no fewer than now, more where they rise."""
    now_s, total = counts[-1]
    then_s, then = now_s, total
    for at_s, count in reversed(counts):
        if now_s - at_s > _RATE_S[1] or (total - then >= _ENOUGH and now_s - then_s >= _RATE_S[0]):
            break
        then_s, then = at_s, count
    if now_s <= then_s:
        return 0.0, 0.0
    per_s = (total - then) / (now_s - then_s)
    first_s, first = counts[0]
    if then_s - first_s < now_s - then_s:
        return per_s, per_s
    earlier = (then - first) / (then_s - first_s)
    slope = (per_s - earlier) / ((now_s - first_s) / 2)  # the middles of both spans are so far apart
    return per_s, min(max(per_s, per_s + slope * ahead_s), _STEEPEST * per_s)


def _learned(able: float | None, each: float, strain: float, *, more: float, passed_s: float, warm: bool) -> float:
    """Return how many requests a second a worker can do, after one did `each` at this strain for so long. `more`: times as
    much, by how seldom it had anything to do."""
    if able is None:
        return each * max(min(_AIM / strain, _ROOM), more if strain <= _AIM else _LEAST)
    minutes = passed_s / 60
    if strain > _AIM:
        falls = warm and each <= able * _SHARE
        return able * max(0.5, 1 - min(strain / _AIM - 1, 1.0) * _DOWN * minutes) if falls else able
    if each >= _TESTED * able:
        able *= 1 + min(_AIM / strain - 1, 1.0) * _UP * minutes
    seen = each * max(min(_AIM / strain, _ROOM), more)
    return able + (1 - math.exp(-passed_s / _SMOOTH_S)) * max(0.0, seen - able)
