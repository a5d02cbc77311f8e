"""/metrics of the router: what it does itself. What workers do is in theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from headstart.gateway.fleet import Fleet
from headstart.gateway.worker import STATES

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)


class Metrics:
    """One registry a router."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Scrape(fleet))
        self._requests = Counter(
            "headstart_router_requests", "Requests by how they ended.", ("finish",), registry=self._registry
        )
        self._retries = Counter(
            "headstart_router_retries", "Times that a request was sent to another worker.", registry=self._registry
        )
        self._tokenise = Histogram(
            "headstart_router_tokenise_seconds",
            "Rendering and tokenising a prompt.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first = Histogram(
            "headstart_router_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def prepared(self, seconds: float) -> None:
        """Count the time that a prompt took to become tokens."""
        self._tokenise.observe(seconds)

    def ended(self, finish: str, *, first_token_s: float | None, retries: int) -> None:
        """Count a request that has ended."""
        self._requests.labels(finish).inc()
        if retries:
            self._retries.inc(retries)
        if first_token_s is not None:
            self._first.observe(first_token_s)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _Scrape(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        now_s = fleet.clock()
        workers = list(fleet.workers.values())
        by_state = GaugeMetricFamily("headstart_router_workers", "Workers by state.", labels=("state",))
        states = [worker.state(now_s) for worker in workers]
        for state in STATES:
            by_state.add_metric((state,), states.count(state))
        yield by_state
        flights = GaugeMetricFamily("headstart_router_in_flight", "Requests at a worker.", labels=("worker",))
        failures = GaugeMetricFamily(
            "headstart_router_failures", "Failures of a worker since it was added.", labels=("worker",)
        )
        for worker in workers:
            flights.add_metric((worker.id,), len(worker.flights))
            failures.add_metric((worker.id,), worker.failures)
        yield flights
        yield failures
        yield GaugeMetricFamily(
            "headstart_router_blocks", "Blocks of which it is known who has them.", value=len(fleet.routing.holders)
        )
        gaps = 0 if fleet.follower is None else fleet.follower.gaps
        yield GaugeMetricFamily(
            "headstart_router_event_gaps", "Times that KV events were missed and asked for again.", value=gaps
        )
