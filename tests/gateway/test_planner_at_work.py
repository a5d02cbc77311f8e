"""The planner at work: what it starts, drains and moves, in which order, and that a failing router costs nothing but a look."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headstart.errors import NoServer
from headstart.gateway.launching import Launched, Spec
from headstart.gateway.planning import Looking, seen_of
from headstart.gateway.router_client import RouterClient
from headstart.policy.planning import Action, Plan, Planner, Seen

NOON = datetime(2026, 11, 30, 12)


class Router(RouterClient):
    """A router in memory; `fails`: it does not answer."""

    def __init__(self) -> None:
        self.url = "http://router"
        self.told: list[dict[str, Any]] = []
        self.calls: list[tuple[str, ...]] = []
        self.fails = False

    def workers(self) -> list[dict[str, Any]]:
        if self.fails:
            raise NoServer("no router answers")
        return self.told

    def set_role(self, id: str, role: str) -> None:
        self.calls.append(("role", id, role))

    def drain(self, id: str) -> None:
        self.calls.append(("drain", id))


class Workers:
    """A launcher in memory."""

    def __init__(self, *names: str) -> None:
        self.there = {name: Launched(name, Spec("both", ("x",)), "up", f"http://{name}", 0, "") for name in names}
        self.stopped: list[str] = []

    def start(self, spec: Spec) -> str:
        name = f"{spec.role}-{len(self.there)}"
        self.there[name] = Launched(name, spec, "starting", None, 0, "")
        return name

    def stop(self, name: str) -> None:
        self.stopped.append(name)
        self.there[name] = replace(self.there[name], state="stopping")

    def workers(self) -> list[Launched]:
        return list(self.there.values())

    def tend(self) -> None: ...

    def close(self) -> None: ...


class Says(Planner):
    """A planner that says what it is told to say, and keeps what it saw."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.saw: dict[str, Seen] = {}

    def plan(self, workers: Any, *, now_s: float, local: datetime) -> Plan:
        self.saw = {worker.name: worker for worker in workers}
        return Plan(self.actions, ())


def told(name: str, state: str = "ready") -> dict[str, Any]:
    return {"id": f"id-{name}", "url": f"http://{name}", "role": "both", "state": state}


@pytest.fixture
def parts() -> tuple[Router, Workers, Says, CollectorRegistry]:
    router = Router()
    router.told = [told("a"), told("b")]
    return router, Workers("a", "b"), Says(), CollectorRegistry()


def look(looking: Looking) -> None:
    looking.look(now_s=0.0, local=NOON)


def test_a_drained_worker_is_stopped_only_when_the_router_knows_it_no_more(parts: Any) -> None:
    router, workers, says, metrics = parts
    looking = Looking(router, says, launcher=workers, spec_for=lambda role: Spec(role, ("x",)), metrics=metrics)
    says.actions = [Action("drain", "both", "b", "why")]
    look(looking)
    assert router.calls == [("drain", "id-b")]
    assert looking.draining == {"b"}
    says.actions = []
    router.told = [told("a"), told("b", "draining")]
    look(looking)
    assert workers.stopped == []
    assert says.saw["b"].state == "draining"
    router.told = [told("a")]
    look(looking)
    assert workers.stopped == ["b"]
    del workers.there["b"]
    look(looking)
    assert looking.draining == frozenset()
    assert metrics.get_sample_value("headstart_planner_decisions_total", {"action": "drain", "role": "both"}) == 1


def test_a_started_worker_counts_before_the_router_knows_it(parts: Any) -> None:
    router, workers, says, metrics = parts
    looking = Looking(router, says, launcher=workers, spec_for=lambda role: Spec(role, ("x",)), metrics=metrics)
    says.actions = [Action("start", "decode", None, "why")]
    look(looking)
    says.actions = []
    look(looking)
    assert says.saw["decode-2"] == Seen("decode-2", "decode", "starting")


def test_a_role_is_changed_at_the_router(parts: Any) -> None:
    router, workers, says, metrics = parts
    says.actions = [Action("move", "prefill", "a", "why")]
    look(Looking(router, says, launcher=workers, metrics=metrics))
    assert router.calls == [("role", "id-a", "prefill")]


def test_a_dry_run_says_everything_once_and_does_nothing(parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    router, workers, says, metrics = parts
    caplog.set_level(logging.INFO, "headstart")
    looking = Looking(router, says, launcher=workers, dry_run=True, metrics=metrics)
    says.actions = [Action("drain", "both", "b", "two would do"), Action("start", "both", None, "too few")]
    look(looking)
    look(looking)
    assert [record.getMessage() for record in caplog.records] == [
        "planner would drain b: two would do",
        "planner would start a worker (both): too few",
    ]
    assert router.calls == []
    assert len(workers.there) == 2


def test_without_a_launcher_starts_are_only_said(parts: Any, caplog: pytest.LogCaptureFixture) -> None:
    router, _, says, metrics = parts
    caplog.set_level(logging.INFO, "headstart")
    says.actions = [Action("start", "both", None, "too few"), Action("drain", "both", "id-a", "why")]
    look(Looking(router, says, metrics=metrics))
    assert "planner would start a worker (both): too few" in caplog.text
    assert router.calls == [("drain", "id-a")]


def test_a_router_that_does_not_answer_costs_a_look(parts: Any) -> None:
    router, workers, says, metrics = parts
    looking = Looking(router, says, launcher=workers, metrics=metrics)
    router.fails = True
    look(looking)
    assert metrics.get_sample_value("headstart_planner_failures_total") == 1
    assert says.saw == {}


def test_what_the_router_tells_is_read_and_what_it_leaves_out_is_not_known() -> None:
    whole = {
        "role": "prefill",
        "requests": 7,
        "running": 1,
        "waiting": 2,
        "waiting_tokens": 5000,
        "prefill_tokens_per_s": 1000.0,
        "first_token_s": {"p50": 1.0, "p90": 2.0},
        "token_s": {"p50": None, "p90": None},
        "hit_tokens": {"memory": 10, "disk": 5},
    }
    want = Seen(
        "a", "prefill", "ready", requests=7, running=1, waiting=2, wait_s=5.0, first_token_s=2.0, token_s=None, hit_tokens=15
    )
    assert seen_of(whole, name="a", state="ready") == want
    assert seen_of({}, name="a", state="down") == Seen("a", state="down")
