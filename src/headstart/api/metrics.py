"""/metrics. Series that dashboards for vLLM know are named as there; the rest begins with headstart_.

Counters are read from the engine and the cache at the moment of the scrape; only the histograms are kept here. Token
counters, not rates: a rate over any window is the scraper's division. "External" is the disk, as for a KV connector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from headstart.cache.prefix_cache import CacheStatistics
from headstart.engine.base import EngineLoad, Receipt

if TYPE_CHECKING:
    from headstart.api.accounts import Accounts
    from headstart.api.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKENS = tuple(unit * 10**power for power in range(7) for unit in (1, 2, 5))
_LABELS = ("model_name", "engine")
_MOST_NAMES = 100  # of classes and of tenants: anybody may name one
# Counters named <kind>_<something>, and what the something is.
_KINDS = {
    **dict.fromkeys(("deleted", "evicted", "load_failed", "match_missed", "quarantined", "read_failed"), "reason"),
    **dict.fromkeys(("removed", "save_dropped", "write_failed"), "reason"),
    **dict.fromkeys(
        ("close_timed_out", "loaded_tokens", "match_skipped", "match_timed_out", "matched_tokens", "release_timed_out"), "tier"
    ),
    "device_failed": "call",
    "finished": "reason",
    "handoff_given_up": "reason",
    "handoff_lost": "reason",
    "handoff_refused": "reason",
    "join_failed": "reason",
    "preempted": "reason",
    "load_decisions": "choice",
    "object_requests": "call",
    "save_budget_dropped_tokens": "tier",
    "tier_failed": "call",
    "tiering_failed": "reason",
}


class Metrics:
    """One registry a server; nothing global, so that two servers in one process do not mix."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(_Scrape(service))

        def seconds(name: str, about: str) -> Histogram:
            return Histogram(f"vllm:{name}", about, _LABELS, buckets=_SECONDS, registry=self._registry)

        self._first_token = seconds("time_to_first_token_seconds", "From submitting a request to its first token.")
        self._whole = seconds("e2e_request_latency_seconds", "From submitting a request to its end.")
        self._queue = seconds("request_queue_time_seconds", "How long a request waited for the engine.")
        self._prefill = seconds("request_prefill_time_seconds", "From a request's turn to its first token.")
        self._decode = seconds("request_decode_time_seconds", "From the first token of a request to its last.")
        self._gap = seconds("inter_token_latency_seconds", "Between two tokens of a request, the mean of each.")
        self._per_token = seconds("request_time_per_output_token_seconds", "Decoding time by tokens, of each request.")

        def tokens(name: str, about: str, buckets: Sequence[float] = _TOKENS) -> Histogram:
            return Histogram(f"vllm:{name}", about, _LABELS, buckets=buckets, registry=self._registry)

        self._prompt = tokens("request_prompt_tokens", "Tokens of each prompt.")
        self._generation = tokens("request_generation_tokens", "Tokens of each answer.")
        self._most = tokens("request_params_max_tokens", "The most tokens that each request asked for.")
        self._answers = tokens("request_params_n", "How many answers each request asked for.", (1, 2, 5, 10, 20))
        self._load = Histogram(
            "headstart_load_seconds", "Reading a cached prefix, verified.", _LABELS, buckets=_SECONDS, registry=self._registry
        )
        self._success = Counter(
            "vllm:request_success", "Requests by how they ended.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self._bytes_read = Counter(
            "headstart_load_bytes_read", "Bytes of KV read for requests.", _LABELS, registry=self._registry
        )

    def observe(self, finish: str, receipt: Receipt) -> None:
        """Count a request that has ended."""
        labels = _labels(self._service)
        self._success.labels(*labels, finish).inc()
        self._whole.labels(*labels).observe(receipt.total_s)
        self._queue.labels(*labels).observe(receipt.queue_s)
        self._bytes_read.labels(*labels).inc(receipt.bytes_read)
        if receipt.first_token_s is not None:
            self._first_token.labels(*labels).observe(receipt.first_token_s)
        if receipt.cached_tokens:
            self._load.labels(*labels).observe(receipt.load_s)

        self._prompt.labels(*labels).observe(receipt.prompt_tokens)
        self._generation.labels(*labels).observe(receipt.completion_tokens)
        if receipt.first_token_s is not None:
            decode_s = max(0.0, receipt.total_s - receipt.first_token_s)
            self._prefill.labels(*labels).observe(max(0.0, receipt.first_token_s - receipt.queue_s))
            self._decode.labels(*labels).observe(decode_s)
            if receipt.completion_tokens > 1:
                self._gap.labels(*labels).observe(decode_s / (receipt.completion_tokens - 1))
                self._per_token.labels(*labels).observe(decode_s / (receipt.completion_tokens - 1))

    def asked(self, *, answers: int, max_tokens: int) -> None:
        """Count what a request that is given to the engine asks for."""
        labels = _labels(self._service)
        self._answers.labels(*labels).observe(answers)
        self._most.labels(*labels).observe(max_tokens)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _Scrape(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> Iterable[Metric]:
        return []  # the registry would otherwise collect once at registration, before there is anything to read

    def collect(self) -> Iterator[Metric]:
        served = self._service.served
        yield GaugeMetricFamily("headstart_ready", "1 once the model answers.", value=1 if served else 0)
        if served is None:
            return
        labels = _labels(self._service)
        yield from _account_metrics(self._service.accounts)
        statistics = None if served.cache is None else served.cache.statistics()
        yield from _engine_metrics(served.engine.load(), labels, cached=statistics is not None)
        if statistics is not None:
            yield from _cache_metrics(statistics, labels)


def _labels(service: Service) -> tuple[str, str]:
    return (service.served.name if service.served else "", "0")


def _account_metrics(accounts: Accounts) -> Iterator[Metric]:
    """Return what each tenant used; without keys all are nobody. How many are named is bounded, the others are "*"."""
    by_tenant = {name: dict(sums) for name, sums in accounts.by_tenant.copy().items()}
    for name, column, about in (
        ("headstart_tenant_requests", "requests", "Requests of a tenant, refused ones included."),
        ("headstart_tenant_prompt_tokens", "prompt", "Tokens of a tenant's prompts."),
        ("headstart_tenant_cached_memory_tokens", "cached_memory", "Tokens of a tenant's prompts that were found in memory."),
        ("headstart_tenant_cached_disk_tokens", "cached_disk", "Tokens of a tenant's prompts that were found on disk."),
        ("headstart_tenant_written_tokens", "written", "Tokens of a tenant's prompts that were accepted for writing."),
        ("headstart_tenant_output_tokens", "output", "Tokens that a tenant was answered."),
    ):
        family = CounterMetricFamily(name, about, labels=("tenant",))
        for tenant, sums in by_tenant.items():
            family.add_metric((tenant,), sums[column])
        yield family
    counters = accounts.counters.snapshot() | ({} if accounts.log is None else accounts.log.counters.snapshot())
    for name, counter, about in (
        ("headstart_account_faults", "account_faults", "Failures in keeping accounts; no request failed for them."),
        ("headstart_usage_clamped", "usage_clamped", "Requests whose numbers did not add up and were cut to what can be."),
        ("headstart_usage_lines_lost", "usage_lines_lost", "Lines that could not be written to the usage log."),
        ("headstart_usage_write_failed", "usage_write_failed", "Failures in writing the usage log, which is tried again."),
    ):
        yield CounterMetricFamily(name, about, value=counters.get(counter, 0))


def _engine_metrics(load: EngineLoad, labels: tuple[str, str], *, cached: bool) -> Iterator[Metric]:
    counters = dict(load.counters)
    prompt = counters.pop("prompt_tokens", 0)
    memory = counters.pop("cached_memory_tokens", 0)
    disk = counters.pop("cached_disk_tokens", 0)

    def gauge(name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, about, labels=_LABELS)
        family.add_metric(labels, value)
        return family

    def counter(name: str, about: str, value: float) -> Metric:
        family = CounterMetricFamily(name, about, labels=_LABELS)
        family.add_metric(labels, value)
        return family

    yield gauge("vllm:num_requests_running", "Requests being computed.", load.running)
    yield gauge("vllm:num_requests_waiting", "Requests waiting for the engine.", load.waiting)
    share = load.kv_used_bytes / load.kv_capacity_bytes if load.kv_capacity_bytes else 0.0
    yield gauge("vllm:kv_cache_usage_perc", "Share of the KV memory of running requests, 0 to 1.", share)
    yield gauge("headstart_kv_used_bytes", "KV memory of running requests in use.", load.kv_used_bytes)
    yield gauge("headstart_kv_capacity_bytes", "Bound on the KV memory of running requests.", load.kv_capacity_bytes)
    yield counter("vllm:prompt_tokens", "Tokens of prompts, cached or not.", prompt)
    yield counter("vllm:prompt_tokens_cached", "Tokens of prompts that were not computed again.", memory + disk)
    yield counter("vllm:generation_tokens", "Tokens generated.", counters.pop("generated_tokens", 0))
    preempted = sum(value for name, value in counters.items() if name.startswith("preempted_"))
    yield counter("vllm:num_preemptions", "Times that a request gave way to another and went on later.", preempted)
    if cached:
        yield counter("vllm:prefix_cache_queries", "Tokens looked up.", prompt)
        yield counter("vllm:prefix_cache_hits", "Tokens found in memory.", memory)
        yield counter(
            "vllm:external_prefix_cache_queries", "Tokens looked up on disk: those not found in memory.", prompt - memory
        )
        yield counter("vllm:external_prefix_cache_hits", "Tokens found on disk.", disk)
    by_source = CounterMetricFamily("vllm:prompt_tokens_by_source", "Tokens of prompts by source.", labels=(*_LABELS, "source"))
    for source, tokens in (
        ("local_compute", prompt - memory - disk),
        ("local_cache_hit", memory),
        ("external_kv_transfer", disk),
    ):
        by_source.add_metric((*labels, source), tokens)
    yield by_source
    yield from _counters("headstart_engine", "A counter of the engine.", _LABELS, [(labels, counters)])


def _cache_metrics(statistics: CacheStatistics, labels: tuple[str, str]) -> Iterator[Metric]:
    pending = GaugeMetricFamily("headstart_saves_pending", "Saves that are not written yet.", labels=_LABELS)
    pending.add_metric(labels, statistics.counters.get("save_calls", 0) - statistics.counters.get("saves_done", 0))
    yield pending
    yield from _counters("headstart_cache", "A counter of the prefix cache.", _LABELS, [(labels, statistics.counters)])
    with_tier = (*_LABELS, "tier")
    for measure, about in (
        ("capacity_bytes", "Most that the tier may hold."),
        ("allocated_bytes", "What the medium charges."),
        ("live_bytes", "Bytes that can be found."),
        ("extents", "Extents held."),
        ("blocks", "Blocks held."),
    ):
        gauge = GaugeMetricFamily(f"headstart_tier_{measure}", about, labels=with_tier)
        for tier in statistics.tiers:
            gauge.add_metric((*labels, tier.name), getattr(tier, measure))
        yield gauge
    classes = [((*labels, tier.name), tier.live_bytes_by_class) for tier in statistics.tiers]
    yield _live_bytes("headstart_tier_live_bytes_by_class", "class", classes)
    tenants = [((*labels, tier.name), tier.live_bytes_by_tenant) for tier in statistics.tiers]
    yield _live_bytes("headstart_tier_live_bytes_by_tenant", "tenant", tenants)
    paused = GaugeMetricFamily(
        "headstart_tier_paused", "1 while the tier stores nothing; the log and /health say why.", labels=with_tier
    )
    for tier in statistics.tiers:
        paused.add_metric((*labels, tier.name), bool(tier.paused))
    yield paused
    yield from _device_metrics(statistics, labels)
    ratio = GaugeMetricFamily(
        "headstart_tier_bytes_written_per_hit_token",
        "Bytes written since the start for each token that was read back; absent before the first.",
        labels=with_tier,
    )
    for tier in statistics.tiers:
        hit_tokens = statistics.counters.get(f"loaded_tokens_{tier.name}", 0)
        if hit_tokens and (written_bytes := tier.counters.get("bytes_written")) is not None:
            ratio.add_metric((*labels, tier.name), written_bytes / hit_tokens)
    yield ratio
    rows = [((*labels, tier.name), tier.counters) for tier in statistics.tiers]
    yield from _counters("headstart_tier", "A counter of the tier.", with_tier, rows)


def _live_bytes(metric: str, what: str, rows: Sequence[tuple[Sequence[str], Mapping[str, int]]]) -> Metric:
    """Return how many bytes are of each: the largest ones apart and the others as "*", so that the series are bounded."""
    about = f"Bytes that can be found, by {what}; '*' are all that are not among the {_MOST_NAMES} largest."
    family = GaugeMetricFamily(metric, about, labels=(*_LABELS, "tier", what))
    for labels, sums in rows:
        names = sorted(sums, key=lambda name: (-sums[name], name))
        for name in names[:_MOST_NAMES]:
            family.add_metric((*labels, name), sums[name])
        if others := sum(sums[name] for name in names[_MOST_NAMES:]):
            family.add_metric((*labels, "*"), others)
    return family


def _device_metrics(statistics: CacheStatistics, labels: tuple[str, str]) -> Iterator[Metric]:
    """Return what tells the devices of a tier apart; nothing where it lies on one."""
    with_device = (*_LABELS, "tier", "device")
    devices = [((*labels, tier.name, device.name), device) for tier in statistics.tiers for device in tier.devices]
    if not devices:
        return

    def family(
        name: str, about: str, values: Iterable[float], *, kind: type[GaugeMetricFamily | CounterMetricFamily]
    ) -> Metric:
        found = kind(name, about, labels=with_device)
        for (its, _), value in zip(devices, values, strict=True):
            found.add_metric(its, value)
        return found

    def gauge(name: str, about: str, values: Iterable[float]) -> Metric:
        return family(name, about, values, kind=GaugeMetricFamily)

    yield gauge("headstart_device_paused", "1 while it takes nothing; /health says why.", [bool(d.paused) for _, d in devices])
    yield gauge("headstart_device_capacity_bytes", "Most that it may hold.", [d.capacity_bytes for _, d in devices])
    yield gauge("headstart_device_allocated_bytes", "What its file system charges.", [d.allocated_bytes for _, d in devices])
    yield gauge("headstart_device_live_bytes", "Bytes on it that can be found.", [d.live_bytes for _, d in devices])
    for name, counter in (("headstart_device_bytes_read", "bytes_read"), ("headstart_device_bytes_written", "bytes_written")):
        values = [d.counters.get(counter, 0) for _, d in devices]
        yield family(name, "Of one device.", values, kind=CounterMetricFamily)


def _counters(
    prefix: str, about: str, names: Sequence[str], rows: Sequence[tuple[Sequence[str], Mapping[str, int]]]
) -> Iterable[Metric]:
    """Return one series a counter. What stands behind a name in _KINDS becomes a label, so that the set of names is closed."""
    families: dict[str, CounterMetricFamily] = {}
    for labels, counters in rows:
        for counter, value in sorted(counters.items()):
            name = next((kind for kind in _KINDS if counter.startswith(kind + "_")), counter)
            label = _KINDS.get(name)
            if name not in families:
                families[name] = CounterMetricFamily(f"{prefix}_{name}", about, labels=(*names, label) if label else names)
            families[name].add_metric((*labels, counter[len(name) + 1 :]) if label else labels, value)
    return families.values()
