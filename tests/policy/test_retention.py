"""Classes, quotas and the clock of promises: numbers in, numbers out."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headstart.config import load_config
from headstart.errors import ConfigError
from headstart.policy.clock import SteadyClock
from headstart.policy.retention import Retention, Span

HOUR_MS, DAY_MS = 3_600_000, 86_400_000


def test_the_built_in_classes_are_there_whatever_else_is_named() -> None:
    assert Retention().classes == Retention.of("").classes
    retention = Retention.of("batch=1h..2w, agent=5d..")
    assert retention.span("agent") == Span(5 * DAY_MS, None)
    assert retention.span("batch") == Span(HOUR_MS, 14 * DAY_MS)
    assert retention.span("chat") == Span(7 * DAY_MS, 30 * DAY_MS)
    assert retention.span("default") == Span(0, None)
    assert retention.span("unheard of") == Span(0, None)


def test_default_stands_for_every_class_that_is_not_named() -> None:
    assert Retention.of("default=1d..2d").span("unheard of") == Span(DAY_MS, 2 * DAY_MS)


names = st.sampled_from(["agent", "chat", "default", "old", "other", "another"])


@given(names, names, names)
def test_which_class_wins_does_not_depend_on_the_order(one: str, two: str, three: str) -> None:
    retention = Retention.of("old=0s..40d")
    for wins in (retention.firmer, retention.older):
        assert wins(one, two) == wins(two, one)
        assert wins(wins(one, two), three) == wins(one, wins(two, three))
    firmest = retention.firmer(one, two)
    assert retention.span(firmest).guaranteed_ms == max(retention.span(n).guaranteed_ms for n in (one, two))


def test_a_quota_is_a_size_or_a_share_and_nobody_without_a_name_has_one() -> None:
    retention = Retention.of("", "acme=2KiB, beta=30%, *=50%")
    quotas = {tenant: retention.quota_bytes(tenant, capacity_bytes=10_000) for tenant in ("acme", "beta", "gamma", "")}
    assert quotas == {"acme": 2048, "beta": 3000, "gamma": 5000, "": None}
    quarter = {tenant: retention.quota_bytes(tenant, capacity_bytes=2500, whole_bytes=10_000) for tenant in ("acme", "beta")}
    assert quarter == {"acme": 512, "beta": 750}
    assert Retention.of("", "acme=2KiB").quota_bytes("beta", capacity_bytes=10_000) is None


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("retention", "agent=3x..", "3x"),
        ("retention", "agent=3d", "7d..30d"),
        ("retention", "agent", "agent"),
        ("retention", "agent=3d..1d", "ceiling is below"),
        ("retention", "agent=0s..0s", "ceiling is below"),
        ("retention", "a b=1d..", "a b"),
        ("retention", "agent=1d.., agent=2d..", "named twice"),
        ("retention", f"{'a' * 65}=1d..", "64 letters"),
        ("quotas", "acme=20Gi", "20Gi"),
        ("quotas", "acme=110%", "110%"),
        ("quotas", "=1GiB", "=1GiB"),
        ("quotas", "acme=1GiB, acme=2GiB", "named twice"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(key: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={f"cache.{key}": text})
    assert said in str(caught.value)
    assert f"cache.{key}" in str(caught.value)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e9, 1e9)), max_size=20))
def test_the_clock_of_promises_moves_by_what_has_passed_however_the_wall_clock_is_set(steps: list[tuple[float, float]]) -> None:
    ticks_s, wall_s = 5.0, 1e9
    clock = SteadyClock(lambda: ticks_s, lambda: wall_s)
    for passed_s, set_s in steps:
        ticks_s, wall_s = ticks_s + passed_s, wall_s + passed_s + set_s
        assert clock.now_s() == pytest.approx(1e9 + ticks_s - 5.0)
        assert clock.steady_s(wall_s - 60) == pytest.approx(clock.now_s() - 60)
        assert clock.steady_s(wall_s + 60) == clock.now_s()
