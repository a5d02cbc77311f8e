"""Which extents give way: numbers in, victims out."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from headstart.policy.eviction import CARRIED_SHARE, Files, Worth, choose_emptying, choose_victims, worth_of
from headstart.policy.retention import FOREVER_MS

NOW = 50
Row = tuple[int, int, bool, int]  # last used, promised until, held, parent
rows = st.tuples(
    st.integers(0, 20), st.sampled_from([0, NOW - 1, NOW + 10, NOW + 20, FOREVER_MS]), st.booleans(), st.integers(-1, 60)
)


@st.composite
def forests(draw: st.DrawFn) -> list[Row]:
    """Extents of which each may continue one that stands before it."""
    found = draw(st.lists(rows, max_size=40))
    return [(used, until, held, parent % n if n and parent >= 0 else -1) for n, (used, until, held, parent) in enumerate(found)]


def weigh(forest: list[Row]) -> Worth:
    used, until, held, parents = zip(*forest, strict=True) if forest else ((), (), (), ())
    return worth_of(
        last_used=np.array(used, np.int64),
        promised_ms=np.array(until, np.int64),
        held=np.array(held, np.bool_),
        parents=np.array(parents, np.int64),
        now_ms=NOW,
    )


def choose(forest: list[Row], needed_bytes: int, *, nbytes: int = 10, wanted_bytes: int = 0) -> list[int]:
    sizes = np.full(len(forest), nbytes, np.int64)
    worth = weigh(forest)
    return choose_victims(worth=worth, nbytes=sizes, needed_bytes=needed_bytes, wanted_bytes=wanted_bytes).tolist()


def descendants(forest: list[Row], of: int) -> set[int]:
    found = {of}
    for n, (_, _, _, parent) in enumerate(forest):  # parents stand before their children
        if parent in found:
            found.add(n)
    return found - {of}


def test_the_least_recently_used_gives_way_first() -> None:
    assert choose([(7, 0, False, -1), (3, 0, False, -1), (5, 0, False, -1)], 15) == [1, 2]


def test_nothing_gives_way_when_nothing_is_needed() -> None:
    assert choose([(7, 0, False, -1)], 0) == []
    assert choose([], 10) == []


def test_what_is_promised_goes_only_when_the_rest_is_not_enough() -> None:
    forest = [(1, NOW + 1, False, -1), (9, NOW, False, -1), (5, 0, False, -1)]
    assert choose(forest, 20) == [2, 1]
    assert choose(forest, 21) == [2, 1, 0]


def test_what_is_promised_for_ever_goes_after_all_that_is_promised_for_a_time() -> None:
    forest = [(1, FOREVER_MS, False, -1), (9, NOW + 1, False, -1), (5, FOREVER_MS, False, -1)]
    assert choose(forest, 30) == [1, 0, 2]


def test_more_than_is_needed_goes_only_as_far_as_nothing_is_promised() -> None:
    forest = [(1, NOW + 1, False, -1), (9, 0, False, -1), (5, 0, False, -1)]
    assert choose(forest, 5, wanted_bytes=15) == [2, 1]
    assert choose(forest, 5, wanted_bytes=100) == [2, 1]
    assert choose(forest[:1], 5, wanted_bytes=100) == [0]


def test_a_head_that_was_used_less_than_its_tail_outlives_it() -> None:
    assert choose([(1, 0, False, -1), (9, 0, False, 0), (5, 0, False, -1)], 30) == [2, 1, 0]


def test_a_promise_to_a_tail_is_one_to_its_head() -> None:
    assert weigh([(1, 0, False, -1), (2, 0, False, 0), (3, NOW + 10, False, 1)]).promised_ms.tolist() == [NOW + 10] * 3


def test_what_stands_before_something_held_goes_last() -> None:
    assert choose([(1, 0, False, -1), (2, 0, True, 0), (9, NOW + 10, False, -1)], 30) == [2, 0]


def test_parents_in_a_circle_end() -> None:
    assert sorted(choose([(1, 0, False, 1), (2, 0, False, 0), (3, 0, False, 2)], 30)) == [0, 1, 2]


def test_a_chain_of_a_thousand_goes_from_its_end() -> None:
    forest: list[Row] = [(1000 - n, 0, False, n - 1) for n in range(1000)]
    assert choose(forest, 10_000) == list(range(999, -1, -1))


@given(forests(), st.integers(0, 500))
def test_children_go_before_their_parents(forest: list[Row], needed_bytes: int) -> None:
    victims = choose(forest, needed_bytes)
    for place, victim in enumerate(victims):
        free = {n for n in descendants(forest, victim) if not forest[n][2]}
        assert free <= set(victims[:place])


@given(forests(), st.integers(0, 500), st.integers(0, 500))
def test_victims_are_free_ordered_and_no_more_than_needed(forest: list[Row], needed_bytes: int, wanted_bytes: int) -> None:
    victims = choose(forest, needed_bytes, wanted_bytes=wanted_bytes)
    worth = weigh(forest)
    assert len(set(victims)) == len(victims)
    assert not any(forest[v][2] for v in victims)
    order = [(worth.group[v], worth.last_used[v]) for v in victims]
    assert order == sorted(order)
    spared = [n for n, row in enumerate(forest) if n not in victims and not row[2]]
    if needed_bytes and 10 * len(victims) < needed_bytes:
        assert not spared
    if needed_bytes and 10 * (len(victims) - 1) >= needed_bytes:
        assert worth.group[victims[-1]] == 0, "a promise was broken for more than is needed"
        assert 10 * (len(victims) - 1) < max(wanted_bytes, needed_bytes)


@given(forests(), st.integers(1, 6))
def test_a_whole_is_worth_what_is_best_in_it(forest: list[Row], groups: int) -> None:
    member = np.arange(len(forest)) % groups
    worth, whole = weigh(forest), weigh(forest).of_groups(member, groups)
    for group in range(groups):
        mine = member == group
        assert whole.held[group] == worth.held[mine].any()
        assert whole.last_used[group] == max(worth.last_used[mine].tolist(), default=0)


@given(forests(), st.data())
def test_one_file_is_emptied_and_what_is_carried_out_of_it_fits(forest: list[Row], data: st.DataObject) -> None:
    files = data.draw(st.integers(1, 5))
    member = np.array(data.draw(st.lists(st.integers(0, files - 1), min_size=len(forest), max_size=len(forest))), np.int64)
    nbytes = np.array(data.draw(st.lists(st.integers(1, 20), min_size=len(forest), max_size=len(forest))), np.int64)
    dead = np.array(data.draw(st.lists(st.integers(1, 30), min_size=files, max_size=files)), np.int64)
    charged = dead + np.bincount(member, weights=nbytes, minlength=files).astype(np.int64)
    stays = np.array(data.draw(st.lists(st.booleans(), min_size=files, max_size=files)), np.bool_)
    needed, cold, room, budget = (data.draw(st.integers(0, 60)) for _ in range(4))
    worth = weigh(forest)
    chosen = choose_emptying(
        worth=worth,
        nbytes=nbytes,
        files=Files(member, charged, stays),
        needed_bytes=needed,
        cold_bytes=cold,
        room_bytes=room,
        budget_bytes=budget,
    )
    if chosen is None:
        assert all(stays[n] or (worth.held[member == n].any()) for n in range(files))
        return
    both = sorted([*chosen.gone.tolist(), *chosen.carried.tolist()])
    emptied = {*member[both].tolist()}
    assert len(emptied) <= 1  # one without anything in it may go as well
    if not emptied:
        return
    (file,) = emptied
    assert not stays[file]
    assert both == np.flatnonzero(member == file).tolist()
    assert not worth.held[chosen.gone].any()
    carried_bytes = int(nbytes[chosen.carried].sum())
    assert carried_bytes <= min(room, CARRIED_SHARE * charged[file])
    unpromised = nbytes[(worth.group == 0) & ~worth.held].sum()
    if carried_bytes > budget:
        assert all(worth.group[n] > 0 for n in chosen.carried)
        assert unpromised >= needed or worth.held[chosen.carried].any() or (worth.group[chosen.carried] > 1).any()


def test_what_is_promised_is_carried_although_more_was_copied_than_should_be() -> None:
    worth = weigh([(1, 0, False, -1), (2, NOW + 9, False, -1), (3, 0, False, -1), (4, 0, False, -1)])
    chosen = choose_emptying(
        worth=worth,
        nbytes=np.full(4, 10, np.int64),
        files=Files(np.array([0, 0, 1, 1]), np.array([20, 20]), np.zeros(2, np.bool_)),
        needed_bytes=15,
        cold_bytes=10,
        room_bytes=30,
        budget_bytes=0,
    )
    assert chosen is not None
    assert (chosen.gone.tolist(), chosen.carried.tolist()) == ([0], [1])
