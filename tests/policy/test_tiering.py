"""Rules of tiers: their text, what is wrong with it and where, and what follows from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.policy.rule_text import MOST_CHARACTERS, parse_condition, parse_rule, parse_rules
from headstart.policy.tiering import (
    COMPARE,
    NOT_TO_DROP,
    TIERS,
    Action,
    Compare,
    Condition,
    Every,
    Facts,
    Not,
    Policy,
    Route,
    Rule,
    Some,
    Target,
    Words,
    explained,
)

ALL = ("memory", "disk", "pool")
HOUR_MS = 3_600_000

NUMBERS = ["idle", "age", "size", "blocks"]
PARTS = ["when", "not", "(", ")", "idle", ">", "6h", "then", "move", "to", "pool", '"', ","]

words = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12)
comparisons = st.one_of(
    st.builds(Compare, st.sampled_from(["class", "tenant"]), st.sampled_from(["=", "!="]), words),
    st.builds(Compare, st.just("tier"), st.sampled_from(["=", "!="]), st.sampled_from(TIERS)),
    st.builds(
        Compare, st.sampled_from(["idle", "age", "size", "blocks"]), st.sampled_from(list(COMPARE)), st.integers(0, 10**12)
    ),
)
conditions: st.SearchStrategy[Condition] = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.builds(Every, st.lists(inner, min_size=2, max_size=3).map(tuple)),
        st.builds(Some, st.lists(inner, min_size=2, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)


def facts(tier: str = "disk", n: int = 4) -> Facts:
    """Extents of class agent, chat, agent, chat …, idle for 0, 5, 10 … hours, twice as old, of 1, 2, 3 … MB and blocks."""
    numbers = np.arange(n, dtype=np.int64)
    return Facts(
        tier,
        retention=Words(numbers % 2, ("agent", "chat")),
        tenant=Words.of(["acme", ""] * (n // 2)),
        idle_ms=numbers * 5 * HOUR_MS,
        age_ms=numbers * 10 * HOUR_MS,
        nbytes=(numbers + 1) * 1_000_000,
        blocks=numbers + 1,
    )


@given(conditions)
def test_what_a_condition_is_written_as_is_read_as_the_same(condition: Condition) -> None:
    read = parse_condition(str(condition))
    assert read(facts()).tolist() == condition(facts()).tolist()
    assert str(parse_condition(str(read))) == str(read)


@given(st.text(max_size=60) | st.lists(st.sampled_from(PARTS)).map(" ".join))
def test_any_text_is_a_rule_or_is_refused_at_a_place_inside_it(text: str) -> None:
    refused: ConfigError | None = None
    try:
        rule = parse_rule(text)
    except ConfigError as error:
        refused = error
    if refused is None:
        assert parse_rule(str(rule)) == rule
    else:
        assert 0 <= refused.at <= len(text)
        assert f"character {refused.at + 1}: " in refused.message


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ('when clas = "x" then move to pool', 5, "did you mean 'class'?"),
        ('when class = "x" then mov to pool', 22, "did you mean 'move'?"),
        ("when idle > 6h then move to pol", 28, "did you mean 'pool'?"),
        ("when idle > 6x then move to pool", 12, "not a time"),
        ("when size > 6h then move to pool", 12, "not a size"),
        ("when blocks > 6h then move to pool", 14, "a value such as 64"),
        ("when idle 6h then move to pool", 10, "one of = != < <= > >="),
        ('when class > "x" then move to pool', 11, "one of = !="),
        ("when (idle > 6h then move to pool", 16, "not closed"),
        ("when idle > 6h move to pool", 15, "one of then, and, or"),
        ("when idle > 6h then move to pool now", 33, "leave it out"),
        ("when idle > 6h then", 19, "not the end"),
        ('when class = "x then move to pool', 13, "quotation mark is not closed"),
        ("move to memory", 0, "by being used"),
        ("write to pool behind", 0, "not written behind"),
        ("write to disk, disk", 0, "named twice"),
        ("when idle > 6h then write to disk", 5, "asks for class and tenant"),
        ("when age > 6h then drop from disk", 5, "cache.retention"),
        ("when " + "(" * 40 + "idle > 6h", 37, "simpler"),
        ("x" * (MOST_CHARACTERS + 1), MOST_CHARACTERS, "at most"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_place_and_the_next_step(text: str, at: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rules(["move to pool", text])
    assert (caught.value.rule, caught.value.at) == (2, at)
    assert caught.value.message.startswith(f"rule 2, character {at + 1}: ")
    assert says in caught.value.message


def test_the_first_rule_that_applies_counts() -> None:
    policy = parse_rules(["when class = agent then keep in disk", "when idle > 6h then move to pool", "drop from disk"])
    assert policy.decide(facts(), ALL).rule.tolist() == [0, 2, 0, 1]
    assert policy.decide(facts("pool"), ALL).rule.tolist() == [-1, -1, -1, -1]
    assert policy.decide(facts("memory"), ALL).rule.tolist() == [-1, -1, 1, 1]


def test_what_is_moved_to_a_tier_that_is_not_there_stays() -> None:
    policy = parse_rules(["when idle > 6h then move to object", "drop from pool"])
    assert policy.decide(facts(), ALL).rule.tolist() == [-1] * 4
    assert policy.without_effect(ALL) == [(0, "there is no tier 'object'")]


def test_a_copy_lets_later_rules_have_their_say() -> None:
    decided = parse_rules(["when age > 9h then copy to pool", "when idle > 6h then move to pool"]).decide(facts(), ALL)
    assert decided.rule.tolist() == [-1, -1, 1, 1]
    assert [(copy.rule, copy.tier, copy.which.tolist()) for copy in decided.copies] == [(0, "pool", [False, True, True, True])]


def test_saves_go_where_the_first_rule_for_them_says_and_later_where_it_says_behind() -> None:
    policy = parse_rules(
        ["when class = agent then write to object", "when class = agent then write to disk, pool behind", "write to memory"]
    )

    def route(retention: str, tiers: tuple[str, ...] = ALL) -> Route:
        return policy.route(retention=retention, tenant="", tiers=tiers)

    assert route("agent") == Route(("disk",), ("pool",))
    assert route("chat") == Route(("memory",), ())
    assert route("chat", ("disk",)) == Route(("disk",), ())
    assert parse_rules([]).route(retention="agent", tenant="", tiers=ALL) == Route(ALL, ())
    [copy] = policy.decide(facts(), ALL).copies
    assert (copy.rule, copy.tier, copy.which.tolist()) == (1, "pool", [True, False, True, False])


def test_rules_that_can_never_do_anything_are_told() -> None:
    policy = parse_rules(["move to disk", "move to pool", "when idle > 1h then move to disk", "write to disk", "write to pool"])
    assert policy.without_effect(("disk", "pool")) == [
        (0, "no tier is faster than 'disk'"),
        (2, "no tier is faster than 'disk'"),
        (4, "rule 4 comes before it and always applies"),
    ]


def test_a_rule_made_in_python_may_ask_whatever_it_likes() -> None:
    def large_and_even(facts: Facts) -> np.ndarray:
        return (facts.nbytes > 1_500_000) & (facts.blocks % 2 == 0)

    rule = Rule(Action("move", (Target("pool"),)), large_and_even)
    assert Policy((rule,)).decide(facts(), ALL).rule.tolist() == [-1, 0, -1, 0]
    assert str(rule) == "when <large_and_even> then move to pool"
    assert [(one.text, one.holds) for one in explained(rule.when, facts(), 1)] == [("<large_and_even>", True)]


def test_every_comparison_is_explained_with_the_value_that_it_met() -> None:
    condition = parse_condition('class = "agent" and (idle > 6h or not size < 2MB) and tier = disk')
    assert [(one.text, one.value, one.holds) for one in explained(condition, facts(), 2)] == [
        ('class = "agent"', '"agent"', True),
        ("idle > 6h", "10h", True),
        ("size < 2MB", "2.86MiB", False),
        ('tier = "disk"', '"disk"', True),
    ]
    assert explained(None, facts(), 0) == []


def test_what_would_take_the_beginning_before_what_continues_it_is_no_rule() -> None:
    for field in NOT_TO_DROP:
        value = {"age": "1h", "size": "1MB", "blocks": "3"}[field]
        with pytest.raises(ConfigError, match="beginnings"):
            parse_rule(f"when not ({field} > {value}) then drop from disk")
        parse_rule(f"when {field} > {value} then move to pool")
