"""The longest prefix and what a save has to add, against the plainest possible oracle."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headstart.cache.lookup import Pieces, absent_runs, longest_prefix, pieces_of
from headstart.tier.base import Placement


def placement(*places: tuple[int, int]) -> Placement:
    return Placement(np.array([e for e, _ in places], np.int64), np.array([p for _, p in places], np.int32))


def pieces(*places: tuple[int, int]) -> Pieces:
    return Pieces(np.array([e for e, _ in places], np.int64), np.array([f for _, f in places], np.int64))


def test_a_piece_is_present_only_where_its_blocks_lie_together_and_in_step() -> None:
    found = pieces_of(
        placement((1, 0), (1, 1), (1, 2), (2, 3), (3, 1), (3, 2), (4, 3), (4, 2), (5, 6), (5, 7), (-1, 0), (-1, 0)),
        blocks_per_piece=2,
    )
    assert found.extents.tolist() == [1, -1, -1, -1, 5, -1]
    assert found.firsts[[0, 4]].tolist() == [0, 3]


def test_avoided_extents_count_as_absent() -> None:
    found = pieces_of(placement((1, 0), (2, 0), (1, 1)), blocks_per_piece=1, excluded=[2])
    assert found.extents.tolist() == [1, -1, 1]
    assert (found.leading(), found.extents_in_order()) == (1, [1])


def test_each_piece_comes_from_the_fastest_tier_and_runs_are_cut_where_a_read_would_be() -> None:
    memory = pieces((7, 0), (7, 1), (-1, 0), (-1, 0), (8, 0), (-1, 0))
    later = pieces((3, 2), (3, 3), (3, 4), (4, 9))  # asked from piece 2 on
    runs = longest_prefix([(0, memory), (1, later)])
    assert [(r.tier, r.extent, r.first, r.start, r.pieces) for r in runs] == [
        (0, 7, 0, 0, 2),
        (1, 3, 2, 2, 2),
        (0, 8, 0, 4, 1),
        (1, 4, 9, 5, 1),
    ]


def test_nothing_is_no_prefix() -> None:
    assert longest_prefix([]) == []
    assert longest_prefix([(0, pieces((-1, 0), (1, 0)))]) == []


PLACES = st.tuples(st.sampled_from([-1, 1, 1, 1, 2]), st.integers(0, 3))


@given(st.integers(1, 12).flatmap(lambda n: st.lists(st.lists(PLACES, min_size=n, max_size=n), min_size=1, max_size=3)))
def test_runs_tile_the_longest_prefix(tiers: list[list[tuple[int, int]]]) -> None:
    expected = []
    for places in zip(*tiers, strict=True):
        having = [(number, place) for number, place in enumerate(places) if place[0] != -1]
        if not having:
            break
        expected.append(having[0])
    runs = longest_prefix([(number, pieces(*places)) for number, places in enumerate(tiers)])
    assert [(r.tier, (r.extent, r.first + i)) for r in runs for i in range(r.pieces)] == expected
    assert [r.start for r in runs] == np.cumsum([0, *(r.pieces for r in runs)])[:-1].tolist()


@given(st.integers(1, 10).flatmap(lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=3)))
def test_absent_runs_name_every_absence_once(present: list[list[bool]]) -> None:
    named = [
        (tier, piece)
        for first, count, tiers in absent_runs([np.array(one) for one in present])
        for tier in tiers
        for piece in range(first, first + count)
    ]
    assert sorted(named) == [(t, p) for t, one in enumerate(present) for p, there in enumerate(one) if not there]
    firsts = [first for first, _, _ in absent_runs([np.array(one) for one in present])]
    assert firsts == sorted(firsts)
