"""Who gives way: the last in rank, never in circles."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.preemption import Standing, gives_memory, gives_place

RUNNING = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 100)), min_size=1, max_size=6).map(
    lambda some: [Standing(2 * number, priority, times, since) for number, (priority, times, since) in enumerate(some)]
)
WAITING = st.builds(
    Standing, st.integers(0, 6).map(lambda n: 2 * n + 1), st.integers(0, 2), st.integers(0, 2), st.floats(0, 100)
)


@given(RUNNING)
def test_memory_is_taken_from_the_last_in_rank_and_never_from_the_first(running: list[Standing]) -> None:
    victim = gives_memory(running)
    if len(running) == 1:
        assert victim is None
    else:
        assert victim is not None
        assert all(victim.rank >= one.rank for one in running)
        assert victim is not min(running, key=lambda one: one.rank)


@given(RUNNING, WAITING)
def test_a_place_is_given_to_a_higher_priority_at_once(running: list[Standing], waiting: Standing) -> None:
    victim = gives_place(running, to=waiting, now_s=0.0, patience_s=1000.0, last_s=-math.inf)
    lower = [one for one in running if one.priority < waiting.priority]
    assert victim == (max(lower, key=lambda one: one.rank) if lower else None)


@given(RUNNING, WAITING)
def test_equals_give_a_place_after_a_wait_and_to_a_younger_one_only_once(running: list[Standing], waiting: Standing) -> None:
    victim = gives_place(running, to=waiting, now_s=1000.0, patience_s=1.0, last_s=-math.inf)
    if victim is not None and victim.priority == waiting.priority:
        assert victim.preemptions == 0 or victim.number > waiting.number
        assert victim is not min(running, key=lambda one: one.rank)
    assert victim is None or victim.priority <= waiting.priority


def test_nobody_gives_a_place_before_the_wait_was_long_or_before_it_had_its_own() -> None:
    running = [Standing(0, 0, since_s=0.0), Standing(1, 0, since_s=5.0)]
    waiting = Standing(2, 0, since_s=6.0)
    assert gives_place(running, to=waiting, now_s=15.9, patience_s=10.0, last_s=-math.inf) is None
    assert gives_place(running, to=waiting, now_s=16.0, patience_s=10.0, last_s=-math.inf) is running[1]
    assert (
        gives_place([running[0], Standing(1, 0, since_s=7.0)], to=waiting, now_s=16.0, patience_s=10.0, last_s=-math.inf)
        is None
    )


def test_equals_change_places_one_after_the_other() -> None:
    running = [Standing(number, 0, since_s=0.0) for number in range(3)]
    waiting = Standing(5, 0, since_s=0.0)
    assert gives_place(running, to=waiting, now_s=100.0, patience_s=10.0, last_s=95.0) is None
    assert gives_place(running, to=waiting, now_s=105.0, patience_s=10.0, last_s=95.0) is running[2]
