"""Conversations that come back at a pace are expected about then, and not for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.expecting import Pace, expected

times = st.floats(0, 1e6)


def test_who_never_came_back_is_not_expected() -> None:
    assert expected([Pace(100.0)], now_s=101.0) == []


def test_who_came_back_is_expected_about_as_long_after_and_then_given_up() -> None:
    pace = Pace(0.0).after(started_s=60.0, ended_s=70.0)
    assert pace.due_s == 130.0
    assert [expected([pace], now_s=now) for now in (71.0, 99.0, 100.0, 130.0, 190.0, 191.0)] == [[], [], [0], [0], [0], []]


def test_one_long_pause_does_not_change_the_usual_one() -> None:
    pace = Pace(0.0)
    for started in (10.0, 20.0, 1000.0, 1010.0):
        pace = pace.after(started_s=started, ended_s=started)
    assert pace.due_s == 1020.0


def test_only_the_latest_pauses_count() -> None:
    pace = Pace(0.0)
    for number in range(1, 20):
        pace = pace.after(started_s=number * 10.0, ended_s=number * 10.0)
    assert len(pace.pauses_s) == 4


@given(st.lists(st.tuples(times, st.lists(times, max_size=4)), max_size=8), times)
def test_those_who_are_expected_are_in_the_order_in_which_they_are_due(
    drawn: list[tuple[float, list[float]]], now: float
) -> None:
    paces = [Pace(ended, tuple(pauses)) for ended, pauses in drawn]
    found = expected(paces, now_s=now)
    due = [paces[i].due_s for i in found]
    assert due == sorted(due, key=lambda one: one or 0.0)
    assert all(paces[i].ended_s <= now for i in found)
