"""The longest prefix and what a save has to add, against the plainest possible oracle."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headstart.cache.lookup import Pieces, Run, absent_runs, last_boundary, longest_prefix, part_of, pieces_of
from headstart.tier.base import Placement


def placement(*places: tuple[int, int]) -> Placement:
    return Placement(np.array([e for e, _ in places], np.int64), np.array([p for _, p in places], np.int32))


def pieces(*places: tuple[int, int]) -> Pieces:
    return Pieces(np.array([e for e, _ in places], np.int64), np.array([f for _, f in places], np.int64))


def test_a_piece_lies_where_its_last_block_ends_one() -> None:
    """Its first block may be found elsewhere, in a prompt that parts from this one inside the piece."""
    found = pieces_of(
        placement((1, 0), (1, 1), (1, 2), (2, 3), (3, 1), (3, 2), (4, 3), (4, 2), (5, 6), (5, 7), (-1, 0), (-1, 0)),
        blocks_per_piece=2,
    )
    assert found.extents.tolist() == [1, 2, -1, -1, 5, -1]
    assert found.firsts[[0, 1, 4]].tolist() == [0, 1, 3]


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


def states(*extents: int) -> Pieces:
    return Pieces(np.zeros(len(extents), np.int64), np.zeros(len(extents), np.int64), np.array(extents, np.int64))


def test_the_latest_state_counts_and_of_two_the_fastest_tiers() -> None:
    tiers = [(0, pieces(*[(7, 0)] * 6)), (1, states(-1, 4, -1, 5, -1, -1)), (2, states(8, -1, 9))]  # asked from piece 3 on
    found = [last_boundary(tiers, within=n) for n in range(7)]
    assert [found and (found.tier, found.extent, found.pieces) for found in found] == [
        None,
        None,
        (1, 4, 2),
        (1, 4, 2),
        (1, 5, 4),
        (1, 5, 4),
        (2, 9, 6),
    ]
    assert last_boundary([], within=3) is None


def test_states_of_pieces_are_those_behind_their_last_blocks_less_what_is_avoided() -> None:
    found = pieces_of(
        Placement(np.zeros(6, np.int64), np.arange(6, dtype=np.int32), np.array([5, 6, 7, 8, -1, 9])),
        blocks_per_piece=2,
        excluded=[8],
    )
    assert [found.state_behind(pieces) for pieces in range(4)] == [None, 6, None, 9]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_a_part_of_runs_is_what_lies_in_it(lengths: list[int], data: st.DataObject) -> None:
    starts = np.cumsum([0, *lengths]).tolist()
    runs = [Run(n % 2, n, 10 * n, start, length) for n, (start, length) in enumerate(zip(starts, lengths, strict=False))]
    first = data.draw(st.integers(0, starts[-1]))
    count = data.draw(st.integers(0, starts[-1] - first))

    def each(runs: list[Run]) -> list[tuple[int, int, int, int]]:
        return [(r.start + i, r.tier, r.extent, r.first + i) for r in runs for i in range(r.pieces)]

    parts = part_of(runs, first, count)
    assert [(first + at, *rest) for at, *rest in each(parts)] == each(runs)[first : first + count]
    assert all(part.pieces for part in parts)


def test_runs_that_are_absent_end_at_cuts() -> None:
    present = [np.array([True, False, False, False, False]), np.array([True, True, True, False, False])]
    assert list(absent_runs(present, cuts=[2, 5])) == [(1, 1, [0]), (2, 1, [0]), (3, 2, [0, 1])]
    assert list(absent_runs(present, cuts=[])) == [(1, 2, [0]), (3, 2, [0, 1])]


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
