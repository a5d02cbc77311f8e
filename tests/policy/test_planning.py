"""What a planner decides: enough workers in time, none too many, no flapping, never the last one of a role, and why."""

from __future__ import annotations

from datetime import datetime, timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.planning import Action, Delays, Limits, Plan, Planner, Seen, Targets, Window

NOON = datetime(2026, 11, 30, 12)  # a Monday
TARGETS = Targets(first_token_s=1.0, token_s=0.1)
DELAYS = Delays(start_s=60.0, warm_s=120.0, settle_s=300.0)


class Fleet:
    """Workers of which each does `able` requests a second in half of the target and no more; time goes by looks. Where prefill
    and decode are apart, requests are counted at who answers, and what they wait for prefill is told there, too."""

    def __init__(self, planner: Planner, *roles: str, able: float = 1.0, start_s: float = 60.0) -> None:
        self.planner = planner
        self.able = able
        self.start_s = start_s
        self.now_s = 0.0
        self.role = {f"w{number}": role for number, role in enumerate(roles)}
        self.ready_s = dict.fromkeys(self.role, 0.0)
        self.requests = dict.fromkeys(self.role, 0.0)
        self.actions: list[tuple[float, Action]] = []
        self.count = len(roles)

    def ready(self, role: str = "both") -> list[str]:
        return [name for name, one in self.role.items() if one == role and self.ready_s[name] <= self.now_s]

    def go_on(self, seconds: float, per_s: dict[str, float] | float, *, begins: datetime = NOON) -> Plan:
        until_s = self.now_s + seconds
        rates = per_s if isinstance(per_s, dict) else {"both": per_s}
        plan = Plan((), ())
        while self.now_s < until_s:
            self.now_s += 10.0
            seen = []
            for name, role in self.role.items():
                if self.ready_s[name] > self.now_s:
                    seen.append(Seen(name, role, "starting"))
                    continue
                each = rates.get(role, 0.0) / max(1, len(self.ready(role)))
                took = 0.5 * max(1.0, (each / self.able) ** 3)
                first = took
                if role == "decode":
                    first = 0.5 * max(1.0, (rates["prefill"] / max(1, len(self.ready("prefill"))) / self.able) ** 3)
                if role != "prefill":
                    self.requests[name] += 10 * each
                seen.append(
                    Seen(
                        name,
                        role,
                        requests=int(self.requests[name]),
                        running=round(3 * each * took),
                        first_token_s=None if role == "prefill" else first,
                        token_s=None if role == "prefill" else 0.1 * took,
                        wait_s=took - 0.5,
                    )
                )
            plan = self.planner.plan(seen, now_s=self.now_s, local=begins + timedelta(seconds=self.now_s))
            for action in plan.actions:
                self.do(action)
        return plan

    def do(self, action: Action) -> None:
        self.actions.append((self.now_s, action))
        if action.verb == "start":
            name = f"w{self.count}"
            self.count += 1
            self.role[name], self.requests[name], self.ready_s[name] = action.role, 0.0, self.now_s + self.start_s
        elif action.verb == "move" and action.worker is not None:
            self.role[action.worker] = action.role
        elif action.worker is not None:
            for known in (self.role, self.requests, self.ready_s):
                del known[action.worker]


def test_a_steady_load_that_the_fleet_stands_changes_nothing() -> None:
    fleet = Fleet(Planner(TARGETS, Limits(1, 8), DELAYS), "both", "both")
    fleet.go_on(7200, 1.7)
    assert [str(action) for _, action in fleet.actions] == []


def test_more_requests_get_more_workers_and_fewer_get_fewer_without_flapping() -> None:
    fleet = Fleet(Planner(TARGETS, Limits(1, 12), DELAYS), "both")
    fleet.go_on(1800, 0.8)
    fleet.go_on(3600, 5.0)
    at_peak = len(fleet.ready())
    assert 4 <= at_peak <= 8
    starts = sum(action.verb == "start" for _, action in fleet.actions)
    fleet.go_on(7200, 0.8)
    assert len(fleet.ready()) <= 2
    assert starts <= 11
    late = [action for when, action in fleet.actions if when > 9000 + 3600]
    assert len(late) <= 2


def test_a_start_names_its_reason_and_what_is_coming_is_counted() -> None:
    fleet = Fleet(Planner(TARGETS, Limits(1, 12), DELAYS), "both", "both")
    fleet.go_on(1200, 1.6)
    fleet.go_on(600, 3.2)
    starts = [action for _, action in fleet.actions if action.verb == "start"]
    assert starts
    assert all("within the targets" in action.reason or "queued" in action.reason for action in starts)
    assert len(fleet.role) <= 6


def test_nothing_is_drained_before_it_was_superfluous_for_the_whole_time() -> None:
    fleet = Fleet(Planner(TARGETS, Limits(1, 8), DELAYS), *["both"] * 6)
    fleet.go_on(250, 5.8)
    begun = fleet.now_s
    fleet.go_on(3600, 0.5)
    drains = [when for when, action in fleet.actions if action.verb == "drain"]
    assert drains[0] >= DELAYS.settle_s
    assert drains[-1] - begun >= DELAYS.settle_s
    assert len(fleet.role) == 1


def test_the_most_and_the_fewest_hold() -> None:
    fleet = Fleet(Planner(TARGETS, Limits(2, 3), DELAYS), "both", "both")
    fleet.go_on(3600, 9.0)
    assert len(fleet.role) == 3
    fleet.go_on(7200, 0.01)
    assert len(fleet.role) == 2


def test_at_night_idle_workers_are_handed_back_and_are_there_again_when_it_ends() -> None:
    night = Window(22 * 60, 6 * 60, minimum=1, maximum=2)
    begins = datetime(2026, 11, 30, 21)
    fleet = Fleet(Planner(TARGETS, Limits(4, 8, (night,)), DELAYS), *["both"] * 4)
    fleet.go_on(3500, 0.1, begins=begins)
    assert len(fleet.role) == 4
    fleet.go_on(3600, 0.1, begins=begins)
    assert len(fleet.role) == 1
    fleet.go_on(7.2 * 3600, 0.1, begins=begins)
    first = next(when for when, action in fleet.actions if action.verb == "start")
    assert begins + timedelta(seconds=first) < datetime(2026, 12, 1, 6)  # ready when the day begins
    assert len(fleet.ready()) == 4


@pytest.mark.parametrize(
    ("window", "at", "holds"),
    [
        (Window(60, 120, 1, 1), NOON.replace(hour=1), True),
        (Window(60, 120, 1, 1), NOON.replace(hour=2), False),
        (Window(22 * 60, 6 * 60, 1, 1, frozenset({0})), NOON.replace(hour=23), True),
        (Window(22 * 60, 6 * 60, 1, 1, frozenset({0})), NOON.replace(hour=5), False),  # began on Sunday
        (Window(22 * 60, 6 * 60, 1, 1, frozenset({0})), NOON.replace(day=1, month=12, hour=5), True),
    ],
)
def test_a_window_holds_over_midnight_on_the_days_on_which_it_begins(window: Window, at: datetime, holds: bool) -> None:
    assert window.holds(at) is holds


def test_the_last_ready_worker_of_a_role_is_neither_drained_nor_moved() -> None:
    fleet = Fleet(Planner(TARGETS, Limits(1, 8), DELAYS), "prefill", "decode")
    fleet.go_on(7200, {"prefill": 0.01, "decode": 0.01})
    assert sorted(fleet.role.values()) == ["decode", "prefill"]


def test_a_worker_moves_to_the_role_that_lacks_one_rather_than_that_one_is_started() -> None:
    fleet = Fleet(Planner(TARGETS, Limits(1, 5), DELAYS), "prefill", *["decode"] * 4)
    fleet.go_on(250, {"prefill": 0.9, "decode": 2.7})
    assert not fleet.actions
    fleet.go_on(1800, {"prefill": 1.8, "decode": 2.7})  # the same requests, twice as much to compute for them
    assert fleet.actions[0][1].verb == "move"
    assert fleet.actions[0][1].role == "prefill"
    assert "does with" in fleet.actions[0][1].reason
    assert sorted(fleet.role.values()) == ["decode"] * 3 + ["prefill"] * 2
    assert [action.verb for _, action in fleet.actions] == ["move"]


def test_a_worker_that_is_down_for_a_moment_is_not_replaced() -> None:
    planner = Planner(TARGETS, Limits(2, 8), DELAYS)
    for now_s in range(0, 600, 10):
        state = "down" if 300 <= now_s < 330 else "ready"
        seen = [Seen("a", requests=now_s, first_token_s=0.5), Seen("b", state=state, requests=now_s, first_token_s=0.5)]
        assert planner.plan(seen, now_s=now_s, local=NOON).actions == []


def test_one_that_takes_long_to_start_is_waited_for() -> None:
    planner = Planner(TARGETS, Limits(1, 8), Delays(start_s=1.0))
    for now_s in range(0, 1200, 10):
        assert planner.plan([Seen("a", state="starting")], now_s=now_s, local=NOON).actions == []


def test_nothing_is_drained_while_others_start() -> None:
    planner = Planner(TARGETS, Limits(1, 8), DELAYS)
    for now_s in range(0, 1200, 10):
        seen = [Seen("a"), Seen("b"), Seen("c", state="starting")]
        assert planner.plan(seen, now_s=now_s, local=NOON).actions == []


def test_one_that_never_comes_back_is_replaced() -> None:
    planner = Planner(TARGETS, Limits(1, 8), DELAYS)
    actions: list[Action] = []
    for now_s in range(0, 1200, 10):
        seen = [Seen("a", state="ready" if now_s < 300 else "down", requests=min(now_s, 300), first_token_s=0.5)]
        actions += planner.plan(seen, now_s=now_s, local=NOON).actions
    assert actions[0].verb == "start"


def test_a_fleet_that_nobody_asks_anything_shrinks_to_the_fewest() -> None:
    fleet = Fleet(Planner(TARGETS, Limits(1, 8), DELAYS), *["both"] * 5)
    fleet.go_on(3600, 0.0)
    assert len(fleet.role) == 1


def test_a_role_that_nobody_has_any_more_is_not_started_again() -> None:
    planner = Planner(TARGETS, Limits(1, 8), DELAYS)
    for now_s in range(0, 600, 10):
        roles = ("prefill", "decode") if now_s < 300 else ("both", "both")
        seen = [Seen(name, role, requests=now_s, running=2) for name, role in zip("ab", roles, strict=True)]
        assert planner.plan(seen, now_s=now_s, local=NOON).actions == []


@given(st.integers(0, 2**32))
def test_whatever_is_seen_the_bounds_hold_and_a_role_keeps_one_that_is_ready(seed: int) -> None:
    random = Random(seed)
    least = random.randrange(1, 4)
    limits = Limits(least, least + random.randrange(0, 5), (Window(0, 720, 1, 1),) if random.random() < 0.3 else ())
    planner = Planner(TARGETS, limits, Delays(random.random() * 100, random.random() * 100, random.random() * 100))
    now_s = 0.0
    for _ in range(25):
        now_s += random.random() * 90
        states = ("ready", "ready", "ready", "starting", "down", "draining")
        roles = random.choice((("both",), ("prefill", "decode"), ("both", "prefill", "decode")))
        seen = [
            Seen(
                f"w{number}",
                random.choice(roles),
                random.choice(states),
                requests=random.randrange(10_000),
                wait_s=random.choice((0.0, 50.0)),
                first_token_s=random.choice((None, 0.0, 0.3, 9.0)),
                token_s=random.choice((None, 0.05, 0.5)),
            )
            for number in range(random.randrange(0, 8))
        ]
        local = NOON + timedelta(seconds=now_s)
        plan = planner.plan(seen, now_s=now_s, local=local)
        ready = {role: {one.name for one in seen if one.role == role and one.state == "ready"} for role in roles}
        taken = [action.worker for action in plan.actions if action.verb != "start"]
        assert len(taken) == len(set(taken))
        for role, names in ready.items():
            assert not names or names - set(taken), role
        there = sum(one.state in ("ready", "starting", "down") for one in seen)
        starts = sum(action.verb == "start" for action in plan.actions)
        drains = sum(action.verb == "drain" for action in plan.actions)
        assert starts == 0 or starts + sum(one.state == "ready" for one in seen) <= limits.at(local)[1]
        assert not (starts and drains)
        assert drains == 0 or there - drains >= 1
