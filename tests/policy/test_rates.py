"""So much a minute, whatever the order and the times at which it is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.rates import MINUTE_S, Bucket


def test_a_minute_s_worth_is_there_at_once_and_comes_back_evenly() -> None:
    bucket = Bucket(60, now_s=100.0)
    for _ in range(60):
        assert bucket.wait_s(100.0) == 0
        bucket.take(1, 100.0)
    assert bucket.wait_s(100.0) == 1.0
    assert bucket.wait_s(100.5) == 0.5
    assert bucket.wait_s(101.0) == 0


def test_what_is_overdrawn_is_waited_for_and_what_is_more_than_ever_waits_for_a_full_bucket() -> None:
    bucket = Bucket(600, now_s=0.0)
    bucket.take(1200, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(60.1)
    assert bucket.wait_s(0.0, amount=10_000) == 120.0


def test_another_rate_holds_from_now_on_and_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Bucket(600, now_s=0.0)
    bucket.change(60, 0.0)
    assert bucket.level == 60
    bucket.take(60, 0.0)
    assert bucket.wait_s(-50.0) == 1.0
    assert bucket.wait_s(1.0) == 0.0


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 50)), max_size=60),
)
def test_no_minute_gets_more_than_two_minutes_worth_and_one_request(per_minute: int, asked: list[tuple[float, float]]) -> None:
    bucket, now_s, taken = Bucket(per_minute, now_s=0.0), 0.0, []
    for pause_s, amount in asked:
        now_s += pause_s
        if bucket.wait_s(now_s) == 0:
            bucket.take(amount, now_s)
            taken.append((now_s, amount))
    for first_s, _ in taken:
        inside = [amount for at_s, amount in taken if first_s <= at_s < first_s + MINUTE_S]
        assert sum(inside[:-1]) <= 2 * per_minute + 1e-6
