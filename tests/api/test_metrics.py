"""/metrics: a closed set of names, whatever went wrong; what went wrong is a label."""

from __future__ import annotations

from dataclasses import replace

from headstart.api.life import paused_tiers
from headstart.api.metrics import _cache_metrics
from headstart.cache.prefix_cache import CacheStatistics
from headstart.tier.base import TierStatistics


def tier(name: str, **counters: int) -> TierStatistics:
    return TierStatistics(
        name=name,
        capacity_bytes=10,
        allocated_bytes=9,
        live_bytes=8,
        extents=2,
        blocks=4,
        counters={key.replace("__", "-"): value for key, value in counters.items()},
    )


def test_reasons_are_labels_of_one_series() -> None:
    statistics = CacheStatistics(
        tiers=(tier("memory", evicted_capacity=3), tier("disk", evicted_capacity=5, read_failed_short__read=1, bytes_read=7)),
        counters={"save_calls": 5, "saves_done": 3, "matched_tokens_disk": 128, "match_missed_salt": 1, "tier_failed_read": 2},
    )
    found = {
        sample.name: sample
        for family in _cache_metrics(statistics, ("m", "0"))
        for sample in family.samples
        if sample.labels.get("tier") in (None, "disk")
    }

    def labels(name: str) -> tuple[float, dict[str, str]]:
        sample = found[name]
        return sample.value, {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}

    assert labels("headstart_saves_pending") == (2, {})
    assert labels("headstart_cache_matched_tokens_total") == (128, {"tier": "disk"})
    assert labels("headstart_cache_match_missed_total") == (1, {"reason": "salt"})
    assert labels("headstart_cache_tier_failed_total") == (2, {"call": "read"})
    assert labels("headstart_tier_evicted_total") == (5, {"tier": "disk", "reason": "capacity"})
    assert labels("headstart_tier_read_failed_total") == (1, {"tier": "disk", "reason": "short-read"})
    assert labels("headstart_tier_bytes_read_total") == (7, {"tier": "disk"})


def test_a_tier_that_stores_nothing_now_is_a_gauge_and_a_sentence() -> None:
    paused = replace(tier("disk"), paused="No space left on device")
    statistics = CacheStatistics(tiers=(tier("memory"), paused), counters={})
    found = {
        sample.labels["tier"]: sample.value
        for family in _cache_metrics(statistics, ("m", "0"))
        for sample in family.samples
        if sample.name == "headstart_tier_paused"
    }
    assert found == {"memory": 0, "disk": 1}
    (sentence,) = paused_tiers(statistics)
    assert "disk" in sentence
    assert "No space left on device" in sentence


def samples(statistics: CacheStatistics, name: str) -> dict[str, float]:
    """Return a metric's values by device, or by tier where it has none."""
    found = [one for family in _cache_metrics(statistics, ("m", "0")) for one in family.samples if one.name == name]
    return {one.labels.get("device", one.labels["tier"]): one.value for one in found}


def test_bytes_written_are_told_for_each_token_that_hit() -> None:
    name = "headstart_tier_bytes_written_per_hit_token"
    tiers = (tier("memory"), tier("disk", bytes_written=6400))
    assert samples(CacheStatistics(tiers=tiers, counters={"loaded_tokens_disk": 128}), name) == {"disk": 50}
    assert samples(CacheStatistics(tiers=tiers, counters={}), name) == {}  # nothing hit yet


def test_live_bytes_are_told_by_class_and_by_the_largest_tenants() -> None:
    tenants = {f"tenant {n:03}": 1000 - n for n in range(150)}
    statistics = CacheStatistics(
        tiers=(replace(tier("disk"), live_bytes_by_class={"agent": 5, "chat": 3}, live_bytes_by_tenant=tenants),), counters={}
    )
    found = [sample for family in _cache_metrics(statistics, ("m", "0")) for sample in family.samples]
    classes = {s.labels["class"]: s.value for s in found if s.name == "headstart_tier_live_bytes_by_class"}
    told = {s.labels["tenant"]: s.value for s in found if s.name == "headstart_tier_live_bytes_by_tenant"}
    assert classes == {"agent": 5, "chat": 3}
    assert len(told) == 101
    assert (told["tenant 000"], told["tenant 099"]) == (1000, 901)
    assert sum(told.values()) == sum(tenants.values())


def test_devices_of_a_tier_are_told_apart_in_metrics_and_in_health() -> None:
    devices = (replace(tier("0a", bytes_read=7), paused=""), replace(tier("1b"), paused="its reads fail"))
    statistics = CacheStatistics(tiers=(replace(tier("disk"), devices=devices),), counters={})
    assert samples(statistics, "headstart_device_paused") == {"0a": 0, "1b": 1}
    assert samples(statistics, "headstart_device_live_bytes") == {"0a": 8, "1b": 8}
    assert samples(statistics, "headstart_device_bytes_read_total") == {"0a": 7, "1b": 0}
    assert paused_tiers(statistics) == ["device 1b of the tier 'disk' takes nothing for now: its reads fail"]
