"""Speeds from samples: true costs are found, outliers and shared steps do not mislead."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.speed import Sample, Speed, fitted

TRUE = Speed((0.003, 1e-6, 0.05))


def step(rows: int, before: int, *, noise: float = 1.0, decoding: int = 0) -> Sample:
    """A pass over a chunk behind `before` tokens, with some decoding requests of 1,000 tokens beside it."""
    quantities = (rows + decoding, rows * (before + rows / 2) + decoding * 1000, 1)
    return Sample(quantities, TRUE.seconds(*quantities) * noise)


def test_without_samples_nothing_is_known() -> None:
    assert fitted([]) is None


def test_the_costs_behind_exact_samples_are_found() -> None:
    speed = fitted([step(rows, before) for rows in (64, 300, 1024) for before in (0, 1024, 4096)])
    assert speed is not None
    assert speed.costs == pytest.approx(TRUE.costs, rel=1e-3)
    assert speed.spread < 1e-6


def test_steps_shared_with_decoding_tell_the_same() -> None:
    speed = fitted([step(rows, before, decoding=5) for rows in (64, 256) for before in (0, 2048, 4096)])
    assert speed is not None
    assert speed.costs == pytest.approx(TRUE.costs, rel=1e-2)


def test_one_sample_in_five_that_took_ten_times_as_long_does_not_mislead() -> None:
    draw = random.Random(3)
    samples = [
        step(draw.choice((64, 256, 1024)), draw.choice((0, 1024, 4096)), noise=10 if i % 5 == 0 else draw.uniform(0.95, 1.05))
        for i in range(40)
    ]
    speed = fitted(samples)
    assert speed is not None
    rows, before = 1024, 6000
    asked = (rows, rows * (before + rows / 2), 1)
    assert speed.seconds(*asked) == pytest.approx(TRUE.seconds(*asked), rel=0.1)


def test_a_machine_that_became_slower_is_believed_after_some_steps() -> None:
    speed = fitted([step(256, 0)] * 30 + [step(256, 0, noise=3)] * 20)
    assert speed is not None
    assert speed.seconds(256, 256 * 128, 1) == pytest.approx(3 * TRUE.seconds(256, 256 * 128, 1), rel=0.1)


def test_what_never_varied_is_put_down_to_the_first_quantity() -> None:
    speed = fitted([Sample((100.0, 1.0), 2.0)] * 5)
    assert speed is not None
    assert speed.costs == pytest.approx((0.02, 0.0))


amounts = st.just(0.0) | st.floats(1e-3, 1e12)


@given(st.lists(st.tuples(amounts, amounts, st.floats(1e-6, 1e4)), min_size=1, max_size=40))
def test_costs_are_never_negative_nor_anything_but_numbers(drawn: list[tuple[float, float, float]]) -> None:
    speed = fitted([Sample((nbytes, starts), seconds) for nbytes, starts, seconds in drawn])
    assert speed is not None
    assert all(0.0 <= cost < float("inf") for cost in speed.costs)
    assert 0.0 <= speed.spread < float("inf")
