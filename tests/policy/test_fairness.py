"""Turns: priorities first, tenants in equal shares of the work, a tenant's own in order, and nobody for ever last."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.fairness import FairShares, Turn

TENANTS = st.sampled_from("abc")
TURNS = st.lists(st.tuples(TENANTS, st.integers(0, 2), st.integers(1, 500)), max_size=20).map(
    lambda some: [Turn(number, tenant, priority, tokens) for number, (tenant, priority, tokens) in enumerate(some)]
)


def shares_of(*tenants: str, **charged: int) -> FairShares:
    shares = FairShares()
    for tenant in tenants:
        shares.enter(tenant)
    for tenant, tokens in charged.items():
        shares.charge(tenant, computed=tokens)
    return shares


def served(sizes: dict[str, int], *, turns: int, weight: dict[str, int] | None = None) -> Counter[str]:
    """Return the tokens that each tenant got, where each always has as many requests waiting as it likes."""
    shares = shares_of(*sizes)
    got: Counter[str] = Counter()
    number = 0
    waiting: list[Turn] = []
    for _ in range(turns):
        for tenant, size in sizes.items():
            while sum(turn.tenant == tenant for turn in waiting) < (weight or {}).get(tenant, 1):
                waiting.append(Turn(number, tenant, 0, size))
                number += 1
        turn = shares.queue(waiting)[0]
        waiting.remove(turn)
        shares.charge(turn.tenant, computed=turn.tokens)
        got[turn.tenant] += turn.tokens
    return got


@given(TURNS, st.dictionaries(TENANTS, st.integers(0, 1000)))
def test_every_order_is_of_all_by_priority_and_keeps_a_tenants_own_order(turns: list[Turn], charged: dict[str, int]) -> None:
    shares = shares_of(*"abc", **charged)
    order = shares.queue(turns)
    assert sorted(order, key=lambda turn: turn.number) == turns
    assert [turn.priority for turn in order] == sorted((turn.priority for turn in turns), reverse=True)
    for tenant in "abc":
        for priority in range(3):
            own = [turn.number for turn in order if (turn.tenant, turn.priority) == (tenant, priority)]
            assert own == sorted(own)


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 20))
def test_tenants_get_equal_shares_whatever_they_send(small: int, large: int, crowd: int) -> None:
    got = served({"a": small, "b": large}, turns=300, weight={"a": crowd})
    assert abs(got["a"] - got["b"]) <= 2 * max(small, large)


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_who_comes_back_neither_saved_up_turns_nor_pays_for_having_been_alone(before: int, alone: int) -> None:
    shares = shares_of("a", "b", a=before, b=before)
    shares.leave("b")
    shares.charge("a", computed=alone)
    shares.enter("b")
    turns = [Turn(number, "ab"[number % 2], 0, 10) for number in range(8)]
    first, second = (turn.tenant for turn in shares.queue(turns)[:2])
    assert {first, second} == {"a", "b"}


def test_a_tenant_that_leaves_and_returns_keeps_what_it_had_more_than_others() -> None:
    shares = shares_of("a", "b", a=1000)
    shares.leave("a")
    shares.enter("a")
    assert [turn.tenant for turn in shares.queue([Turn(0, "a", 0, 10), Turn(1, "b", 0, 10)])] == ["b", "a"]


def test_tenants_that_are_gone_are_forgotten() -> None:
    shares = FairShares()
    for number in range(1000):
        shares.enter(f"t{number}")
        shares.charge(f"t{number}", computed=number, generated=3)
        shares.leave(f"t{number}")
    assert len(shares._times) <= 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_in_every_priority_everybody_is_served_after_as_many_turns_as_are_before_it(others: list[int]) -> None:
    """Though others send one more whenever one was served."""
    shares = shares_of("a", "b")
    waiting = [Turn(0, "a", 0, 10), *(Turn(number, "b", 0, size) for number, size in enumerate(others, 1))]
    number = 100
    for _ in range(2 * sum(others)):
        turn = shares.queue(waiting)[0]
        if turn.tenant == "a":
            return
        waiting.remove(turn)
        waiting.append(Turn(number, "b", 0, 1))
        number += 1
        shares.charge("b", computed=turn.tokens)
    raise AssertionError("a waits for ever")


def test_what_is_pledged_counts_so_one_tenant_does_not_take_all_places_at_once() -> None:
    shares = shares_of("a", "b")
    waiting = [Turn(number, "a", 0, 100) for number in range(4)] + [Turn(9, "b", 0, 100)]
    assert shares.queue(waiting)[1].tenant == "b"
    assert shares.queue(waiting, pledged={"a": 1})[0].tenant == "b"


def test_a_short_prompt_is_computed_before_a_long_one_which_gets_every_other_turn() -> None:
    shares = shares_of("a")
    left = {0: 30_000, **dict.fromkeys(range(1, 20), 64)}
    passed_over: Counter[int] = Counter()
    firsts = []
    for _ in range(20):
        turns = [Turn(number, "a", 0, tokens, passed_over[number]) for number, tokens in left.items()]
        first = shares.prefills(turns)[0].number
        firsts.append(first)
        for number in left:
            passed_over[number] = 0 if number == first else passed_over[number] + 1
        left[first] -= 64
        left = {number: tokens for number, tokens in left.items() if tokens > 0}
    assert firsts == [step // 2 + 1 if step % 2 == 0 else 0 for step in range(20)]


def test_prompts_of_two_tenants_take_turns_by_the_work_done_for_each() -> None:
    shares = shares_of("a", "b")
    firsts = []
    for _ in range(10):
        tenant = shares.prefills([Turn(0, "a", 0, 30_000), Turn(1, "b", 0, 29_000)])[0].tenant
        firsts.append(tenant)
        shares.charge(tenant, computed=64)
    assert Counter(firsts) == {"a": 5, "b": 5}
