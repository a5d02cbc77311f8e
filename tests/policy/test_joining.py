"""What is joined, and which file is emptied: little is written anew, and what is gets long."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from headstart.policy.joining import KNEE_BYTES, LONG_PER_SHORT, Run, chains, choose_joins

KNEE, MOST = KNEE_BYTES, 40 * KNEE_BYTES
sizes = st.lists(st.integers(1, 3 * KNEE), max_size=30)


@given(sizes)
def test_what_is_joined_is_long_then_and_no_longer_than_it_may_be(nbytes: list[int]) -> None:
    groups = choose_joins(nbytes, layers=1, most_bytes=MOST)
    for group in groups:
        assert len(group) > 1
        assert KNEE <= sum(nbytes[group.start : group.stop]) <= MOST
    assert all(one.stop <= other.start for one, other in pairwise(groups))


@given(sizes)
def test_bytes_that_are_long_already_are_written_anew_only_beside_half_as_many_short_ones(nbytes: list[int]) -> None:
    for group in choose_joins(nbytes, layers=1, most_bytes=MOST):
        members = nbytes[group.start : group.stop]
        short = sum(size for size in members if size < KNEE)
        assert sum(members) - short <= LONG_PER_SHORT * short


@given(sizes)
def test_joining_again_and_again_writes_a_byte_anew_a_few_times_and_comes_to_an_end(nbytes: list[int]) -> None:
    runs, written = list(nbytes), 0
    for _ in range(len(nbytes) + 1):
        groups = choose_joins(runs, layers=1, most_bytes=MOST)
        if not groups:
            break
        for group in reversed(groups):
            joined = sum(runs[group.start : group.stop])
            runs[group.start : group.stop] = [joined]
            written += joined
    assert choose_joins(runs, layers=1, most_bytes=MOST) == []
    short = sum(size for size in nbytes if size < KNEE)
    assert written <= (1 + LONG_PER_SHORT) * short
    assert sum(runs) == sum(nbytes)


def test_two_short_runs_side_by_side_stay_when_they_would_be_short_still() -> None:
    assert choose_joins([KNEE // 4, KNEE // 4], layers=1, most_bytes=MOST) == []
    assert choose_joins([KNEE // 4, KNEE // 4, KNEE // 2], layers=1, most_bytes=MOST) == [range(3)]


def test_a_short_run_alone_joins_the_smaller_neighbour_unless_that_is_large() -> None:
    assert choose_joins([2 * KNEE, KNEE - 1, KNEE], layers=1, most_bytes=MOST) == [range(1, 3)]
    assert choose_joins([9 * KNEE, KNEE - 1, 9 * KNEE], layers=1, most_bytes=MOST) == []


def test_what_is_short_is_counted_by_layer() -> None:
    assert choose_joins([KNEE, KNEE], layers=2, most_bytes=MOST) == [range(2)]
    assert choose_joins([KNEE, KNEE], layers=1, most_bytes=MOST) == []


def test_where_runs_cannot_be_so_long_half_of_the_longest_is_long() -> None:
    assert choose_joins([100, 100, 100], layers=1, most_bytes=400) == [range(3)]
    assert choose_joins([200, 200], layers=1, most_bytes=400) == []


def run(name: str, parent: str, *, last: str = "", family: str = "", ends: bool = False) -> Run[str]:
    return Run(name, parent.encode(), (last or name).encode(), 1, family, ends)


def names(*runs: Run[str]) -> list[list[str]]:
    return sorted([run.name for run in chain] for chain in chains(runs))


def test_chains_are_found_in_any_order_of_their_runs() -> None:
    assert names(run("c", "b"), run("a", "root"), run("b", "a"), run("x", "elsewhere")) == [["a", "b", "c"], ["x"]]


def test_a_chain_ends_where_several_prompts_go_on() -> None:
    assert names(run("a", "root"), run("b", "a"), run("c", "a")) == [["a"], ["b"], ["c"]]


def test_a_chain_ends_at_a_boundary_state_and_where_the_family_is_another() -> None:
    assert names(run("a", "root", ends=True), run("b", "a"), run("c", "b", family="other")) == [["a"], ["b"], ["c"]]


def test_a_run_that_follows_two_alike_is_in_one_chain() -> None:
    found = names(run("a", "root"), run("a2", "root", last="a"), run("b", "a"))
    assert sorted(name for chain in found for name in chain) == ["a", "a2", "b"]
