"""Which extents give way: numbers in, victims out."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from headstart.policy.eviction import choose_victims

extents = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 1000), st.booleans()), max_size=40)


def choose(candidates: list[tuple[int, int, bool]], needed_bytes: int) -> list[int]:
    used, nbytes, leased = (np.array(column) for column in zip(*candidates, strict=True)) if candidates else ([], [], [])
    return choose_victims(
        last_used=np.asarray(used, np.int64),
        nbytes=np.asarray(nbytes, np.int64),
        leased=np.asarray(leased, np.bool_),
        needed_bytes=needed_bytes,
    ).tolist()


def test_the_least_recently_used_gives_way_first() -> None:
    assert choose([(7, 10, False), (3, 10, False), (5, 10, False)], 15) == [1, 2]


def test_nothing_gives_way_when_nothing_is_needed() -> None:
    assert choose([(7, 10, False)], 0) == []
    assert choose([], 10) == []


@given(extents, st.integers(0, 5000))
def test_victims_are_unleased_oldest_first_and_no_more_than_needed(
    candidates: list[tuple[int, int, bool]], needed_bytes: int
) -> None:
    victims = choose(candidates, needed_bytes)
    assert len(set(victims)) == len(victims)
    assert not any(candidates[v][2] for v in victims)
    used = [candidates[v][0] for v in victims]
    assert used == sorted(used)
    spared = [used for n, (used, _, leased) in enumerate(candidates) if n not in victims and not leased]
    freed = sum(candidates[v][1] for v in victims)
    if freed < needed_bytes:
        assert not spared
    elif victims:
        assert freed - candidates[victims[-1]][1] < needed_bytes
        assert all(candidates[victims[-1]][0] <= u for u in spared)
