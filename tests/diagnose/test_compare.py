"""Two sequences: where they part, meet again, and part again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headstart.diagnose.compare import common, hunks

short = st.lists(st.integers(0, 3), max_size=60)


def units(values: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(values, np.uint32)


@given(short, short, st.integers(1, 8))
def test_hunks_and_what_is_between_them_are_both_sequences(a: list[int], b: list[int], run: int) -> None:
    x, y = units(a), units(b)
    i = j = 0
    for n, hunk in enumerate(hunks(x, y, run=run)):
        assert a[i : hunk.a] == b[j : hunk.b]
        assert n == 0 or hunk.a - i >= min(run, len(a) - i)  # a run of the same, before they part again
        assert hunk.a < len(a)
        assert a[hunk.a : hunk.a + 1] != b[hunk.b : hunk.b + 1]
        assert hunk.a_end > hunk.a or hunk.b_end > hunk.b
        i, j = hunk.a_end, hunk.b_end
    rest_a, rest_b = a[i:], b[j:]
    n = min(len(rest_a), len(rest_b))
    assert rest_a[:n] == rest_b[:n]


@given(short, short)
def test_the_first_hunk_begins_where_they_part(a: list[int], b: list[int]) -> None:
    n = common(units(a), units(b))
    assert a[:n] == b[:n]
    assert a[n : n + 1] != b[n : n + 1] or n == len(a) == len(b)
    found = next(hunks(units(a), units(b)), None)
    assert (found is None) == (n == min(len(a), len(b)))
    assert found is None or (found.a, found.b) == (n, n)


def test_a_long_insertion_is_one_hunk() -> None:
    a = list(range(20_000))
    b = [*a[:5_000], *range(50_000, 59_000), *a[5_000:]]
    (hunk,) = hunks(units(a), units(b))
    assert (hunk.a, hunk.a_end, hunk.b, hunk.b_end) == (5_000, 5_000, 5_000, 14_000)


def test_two_changes_are_two_hunks_with_what_lies_between_untouched() -> None:
    a = list(range(10_000))
    b = list(a)
    b[100:103] = [77_777]
    b[9_120] = 88_888
    first, second = hunks(units(a), units(b))
    assert (first.a, first.a_end, first.b, first.b_end) == (100, 103, 100, 101)
    assert (second.a, second.a_end, second.b) == (9_122, 9_123, 9_120)
