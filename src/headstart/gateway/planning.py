"""The planner at work: what the router tells goes to the policy, what that says is done by the launcher and the router.

    router: GET /router/workers ─▶ policy.planning ─▶ start ─▶ launcher, and once it listens ─▶ router: add
                                                  ├─▶ move  ─▶ router: role
                                                  └─▶ drain ─▶ router: drain ─▶ forgotten there ─▶ launcher: stop

A worker is only stopped when the router knows it no more: then its last answer has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.errors import HeadstartError
from headstart.gateway.launching import Launched, Launcher, Spec
from headstart.gateway.router_client import RouterClient
from headstart.policy.planning import Action, Need, Plan, Planner, Seen

log = logging.getLogger("headstart")


class Looking:
    """`launcher`: what starts and ends workers; None: nothing can, so starts are only said, and what is drained is whoever's
    started it. `spec_for`: what is started in a role. `dry_run`: everything is only said. `metrics`: a registry for them."""

    def __init__(
        self,
        router: RouterClient,
        planner: Planner,
        *,
        launcher: Launcher | None = None,
        spec_for: Callable[[str], Spec] | None = None,
        dry_run: bool = False,
        metrics: CollectorRegistry | None = None,
    ) -> None:
        self._router = router
        self._planner = planner
        self._launcher = launcher
        self._spec_for = spec_for
        self._dry_run = dry_run
        self._draining: set[str] = set()  # launched workers whose drain was asked for
        self._told: dict[tuple[str, str | None], str] = {}  # what is only said is said once
        self._latest = Plan((), ())
        registry = metrics or CollectorRegistry()
        self._decisions = Counter(
            "headstart_planner_decisions", "What the planner decided.", ("action", "role"), registry=registry
        )
        self._failures = Counter("headstart_planner_failures", "Looks and actions that failed.", registry=registry)
        registry.register(_Needs(lambda: self._latest.needs))

    def look(self, *, now_s: float, local: datetime) -> Plan:
        """Look once and do what is to be done. A router that does not answer, or an action that fails, is logged and counted;
        the next look says it again."""
        try:
            told = self._router.workers()
        except HeadstartError as error:
            self._failures.inc()
            log.warning("planner: %s", error.message)
            return Plan((), ())
        launched = {} if self._launcher is None else {one.name: one for one in self._launcher.workers()}
        self._stop_drained(told, launched)
        plan = self._latest = self._planner.plan(self._seen(told, launched), now_s=now_s, local=local)
        by_url = {one.url: name for name, one in launched.items() if one.url is not None}
        at = {by_url.get(one["url"], str(one["id"])): one for one in told}
        for action in plan.actions:
            self._act(action, at, launched)
        if not plan.actions:
            self._told.clear()
        return plan

    def _seen(self, told: Sequence[Mapping[str, Any]], launched: Mapping[str, Launched]) -> list[Seen]:
        """Return the workers that the router knows, and those that were launched and are not there yet."""
        by_url = {one.url: name for name, one in launched.items() if one.url is not None}
        seen = {}
        for one in told:
            name = by_url.get(one["url"], str(one["id"]))
            state = "draining" if name in self._draining else str(one["state"])
            seen[name] = seen_of(one, name=name, state=state)
        for name, worker in launched.items():
            if name not in seen:
                gone = worker.state == "stopping" or name in self._draining
                down = "down" if worker.state == "down" else "starting"
                seen[name] = Seen(name, worker.spec.role, state="draining" if gone else down)
        return list(seen.values())

    def _act(self, action: Action, at: Mapping[str, Mapping[str, Any]], launched: Mapping[str, Launched]) -> None:
        """Do one action, or say it; `at`: what the router tells of each worker, by our name for it."""
        only_said = self._dry_run or (action.verb == "start" and self._launcher is None)
        if only_said:
            key = (action.verb + action.role, action.worker)
            if key not in self._told:
                log.info("planner would %s", action)
                self._told[key] = action.reason
            return
        log.info("planner: %s", action)
        self._decisions.labels(action.verb, action.role).inc()
        try:
            if action.verb == "start":
                assert self._launcher is not None
                assert self._spec_for is not None
                self._launcher.start(self._spec_for(action.role))
            elif action.worker is not None and action.verb == "move":
                self._router.set_role(str(at[action.worker]["id"]), action.role)
            elif action.worker is not None:
                self._router.drain(str(at[action.worker]["id"]))
                if action.worker in launched:
                    self._draining.add(action.worker)
        except HeadstartError as error:
            self._failures.inc()
            log.warning("planner: %s failed: %s", action.verb, error.message)

    def _stop_drained(self, told: Sequence[Mapping[str, Any]], launched: Mapping[str, Launched]) -> None:
        """Stop the launched workers that were drained and that the router knows no more."""
        known = {one["url"] for one in told}
        for name in sorted(self._draining):
            if name not in launched:
                self._draining.discard(name)
            elif launched[name].url not in known and self._launcher is not None:
                self._launcher.stop(name)

    @property
    def draining(self) -> frozenset[str]:
        """The launched workers that are not to be given to the router again."""
        return frozenset(self._draining)


def seen_of(told: Mapping[str, Any], *, name: str, state: str) -> Seen:
    """Return a worker of the router's list as the policy takes it. What is missing is not known."""
    rate = told.get("prefill_tokens_per_s") or 0.0
    tokens = told.get("waiting_tokens") or 0
    return Seen(
        name,
        role=str(told.get("role", "both")),
        state=state,
        requests=int(told.get("requests") or 0),
        running=int(told.get("running") or 0),
        waiting=int(told.get("waiting") or 0),
        wait_s=tokens / rate if rate else 0.0,
        first_token_s=_p90(told.get("first_token_s")),
        token_s=_p90(told.get("token_s")),
        hit_tokens=sum(int(count) for count in (told.get("hit_tokens") or {}).values()),
    )


def _p90(told: Any) -> float | None:
    found = told.get("p90") if isinstance(told, dict) else None
    return float(found) if found is not None else None


class _Needs(Collector):
    """What each role has and needs, as of the latest look."""

    def __init__(self, needs: Callable[[], Sequence[Need]]) -> None:
        self._needs = needs

    def collect(self) -> Iterator[Metric]:
        measures: tuple[tuple[str, str, Callable[[Need], float]], ...] = (
            ("ready", "Workers that are ready.", lambda need: need.ready),
            ("coming", "Workers that start or are started again.", lambda need: need.coming),
            ("needed", "Workers that the targets need.", lambda need: need.needed),
            ("requests_per_second", "Requests a second of late.", lambda need: need.per_s),
            ("strain", "The latest requests' times over their targets, the worse of both.", lambda need: need.strain or 0.0),
        )
        for name, about, value in measures:
            family = GaugeMetricFamily(f"headstart_planner_{name}", about, labels=("role",))
            for need in self._needs():
                family.add_metric((need.role,), value(need))
            yield family
