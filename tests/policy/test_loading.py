"""Load or compute: never slower than the better of the two by its own estimates, and sane where little is known."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.loading import (
    UNFELT_S,
    Computing,
    Plan,
    Reading,
    Stretch,
    plan_load,
    plan_whole,
    range_tokens,
    stride,
    too_slow,
)
from headstart.policy.speed import Speed

PIECE = 64
TOKEN_BYTES = 46_080  # SmolLM2-135M
COMPUTING = Computing(Speed((0.0025, 5e-7, 0.02)), chunk_tokens=1024)  # 7,488 tokens in 33 s


def disk(bytes_per_s: float, *, first_byte_s: float = 0.001, **more: float) -> dict[str, Reading]:
    return {"disk": Reading(Speed((1.0 / bytes_per_s, first_byte_s), spread=more.pop("spread", 0.0)), **more)}  # type: ignore[arg-type]


def on_disk(tokens: int) -> Stretch:
    return Stretch("disk", tokens, tokens * TOKEN_BYTES)


def in_memory(tokens: int) -> Stretch:
    return Stretch("memory", tokens, tokens * TOKEN_BYTES, always=True)


def plan(*stretches: Stretch, reading: dict[str, Reading], suffix: int = 64, computing: Computing | None = COMPUTING) -> Plan:
    return plan_load(stretches, suffix_tokens=suffix, layers=30, piece_tokens=PIECE, computing=computing, reading=reading)


def test_a_fast_disk_is_loaded_a_middling_one_mixed_and_a_hopeless_one_left_alone() -> None:
    choices = [plan(on_disk(7488), reading=disk(rate)).choice for rate in (2e9, 2e8, 4e7, 8e6, 2e6, 2e5)]
    assert choices == ["load", "load", "mixed", "mixed", "mixed", "compute"]


def test_mixing_beats_both_where_they_are_close() -> None:
    mixed = plan(on_disk(7488), reading=disk(1.0e7))
    assert mixed.choice == "mixed"
    assert mixed.load_s is not None
    assert mixed.compute_s is not None
    assert mixed.chosen_s is not None
    assert 0.8 < mixed.load_s / mixed.compute_s < 1.25
    assert mixed.chosen_s < 0.6 * min(mixed.load_s, mixed.compute_s)


def test_before_a_speed_is_known_a_prefix_is_loaded() -> None:
    assert plan(on_disk(640), reading={}) == Plan("load", 640, None, COMPUTING.seconds(0, 640), COMPUTING.seconds(640, 704))
    unknown = plan(on_disk(640), reading=disk(1.0), computing=None)
    assert (unknown.choice, unknown.at_once_tokens, unknown.compute_s) == ("load", 640, None)


def test_memory_is_always_loaded() -> None:
    assert plan(in_memory(640), reading=disk(1.0)).choice == "load"
    led = plan(in_memory(640), on_disk(6400), reading=disk(1e4))
    assert (led.choice, led.at_once_tokens) == ("compute", 640)
    assert led.compute_s == COMPUTING.seconds(640, 7040)
    behind = plan(on_disk(640), in_memory(6400), reading=disk(1e3))
    assert (behind.choice, behind.at_once_tokens) == ("mixed", 0)  # the disk's part is computed, memory's is read


def test_what_is_of_use_only_as_a_whole_is_loaded_or_computed() -> None:
    def choice(rate: float) -> tuple[str, int]:
        one = plan_load(
            [in_memory(640), on_disk(6848)],
            suffix_tokens=64,
            layers=30,
            piece_tokens=PIECE,
            computing=COMPUTING,
            reading=disk(rate),
            in_parts=False,
        )
        return one.choice, one.at_once_tokens

    assert [choice(rate) for rate in (2e9, 2e7, 8e6, 2e6)] == [("load", 7488), ("load", 7488), ("compute", 0), ("compute", 0)]


def test_what_was_measured_long_ago_is_tried_again() -> None:
    assert plan(on_disk(7488), reading=disk(1e4)).choice == "compute"
    assert plan(on_disk(7488), reading=disk(1e4, stale=True)).choice == "mixed"


def test_what_others_wait_for_comes_first() -> None:
    assert plan(on_disk(1024), reading=disk(2e8)).choice == "load"
    assert plan(on_disk(1024), reading=disk(2e8, asked_bytes=40_000_000_000)).choice == "compute"


def test_computing_that_goes_before_makes_loading_worth_more() -> None:
    def choice(ahead_s: float) -> str:
        return plan_load(
            [on_disk(1024)],
            suffix_tokens=64,
            layers=30,
            piece_tokens=PIECE,
            computing=COMPUTING,
            reading=disk(1e7),
            ahead_s=ahead_s,
        ).choice

    assert choice(0.0) == "mixed"
    assert choice(30.0) == "load"  # read by then


rates = st.floats(1e3, 1e11)
sizes = st.integers(1, 400).map(lambda pieces: pieces * PIECE)


@st.composite
def situations(draw: st.DrawFn) -> dict[str, object]:
    kinds = draw(st.lists(st.tuples(st.booleans(), sizes), min_size=1, max_size=5))
    costs = (draw(st.floats(1e-6, 1e-1)), draw(st.floats(0, 1e-5)), draw(st.floats(0, 1.0)))
    return {
        "stretches": [in_memory(tokens) if memory else on_disk(tokens) for memory, tokens in kinds],
        "suffix_tokens": draw(st.integers(1, 4000)),
        "layers": draw(st.integers(1, 80)),
        "piece_tokens": PIECE,
        "computing": Computing(Speed(costs), draw(st.sampled_from([1, 64, 1024]))),
        "ahead_s": draw(st.floats(0, 100)),
    }


@given(situations(), rates, st.floats(0, 10), st.floats(0, 3))
def test_a_plan_is_never_slower_than_the_better_pure_choice(
    situation: dict[str, object], rate: float, first_byte_s: float, spread: float
) -> None:
    reading = disk(rate, first_byte_s=first_byte_s, spread=spread)
    chosen = plan_load(reading=reading, **situation)  # type: ignore[arg-type]
    if chosen.chosen_s is None:
        assert all(stretch.always for stretch in situation["stretches"])  # type: ignore[attr-defined]
        return
    assert chosen.load_s is not None
    assert chosen.compute_s is not None
    ahead: float = situation["ahead_s"]  # type: ignore[assignment]
    layers: int = situation["layers"]  # type: ignore[assignment]
    loaded = max(chosen.load_s + chosen.suffix_s / layers, max(chosen.load_s / layers, ahead) + chosen.suffix_s)
    computed = ahead + chosen.compute_s + chosen.suffix_s
    memory_behind = chosen.choice == "mixed" and any(
        stretch.always and i
        for i, stretch in enumerate(situation["stretches"])  # type: ignore[arg-type]
    )
    if not memory_behind:  # where memory is read at all events, which both then do
        assert chosen.chosen_s <= min(loaded, computed) + UNFELT_S + 1e-6 * computed
    matched = sum(stretch.tokens for stretch in situation["stretches"])  # type: ignore[attr-defined]
    assert 0 <= chosen.at_once_tokens <= matched
    assert (chosen.choice == "load") == (chosen.at_once_tokens == matched)


@given(sizes, st.lists(rates, min_size=2, max_size=8), st.integers(1, 2000))
def test_a_slower_disk_is_never_relied_on_more(tokens: int, drawn: list[float], suffix: int) -> None:
    order = ["load", "mixed", "compute"]
    plans = [plan(on_disk(tokens), reading=disk(rate), suffix=suffix) for rate in sorted(drawn, reverse=True)]
    choices = [order.index(one.choice) for one in plans]
    assert choices == sorted(choices)
    seconds = [one.chosen_s for one in plans if one.chosen_s is not None]
    slack = UNFELT_S + 0.031 * COMPUTING.seconds(0, tokens)
    assert all(later >= earlier - slack for earlier, later in pairwise(seconds))


@given(st.integers(0, 30), st.floats(0, 100), st.floats(0, 100), st.floats(0.01, 100), st.floats(0, 100))
def test_no_load_is_waited_for_longer_than_computing_takes(
    arrived: int, arrived_s: float, later_s: float, compute_s: float, load_s: float
) -> None:
    """Whatever has come so far: the next layer has as long as those before it took each, or as was expected, and a grace."""
    slow = too_slow(
        arrived_s + later_s,
        arrived=arrived,
        arrived_s=arrived_s if arrived else 0.0,
        layers=30,
        plan=Plan("load", 64, load_s, compute_s),
        least_s=0.25,
    )
    if arrived == 30:
        assert not slow
    elif later_s > max(arrived_s, load_s) + max(0.25, 0.03 * compute_s):
        assert slow


def test_a_load_of_unknown_speed_is_given_up_after_a_small_share_of_computing() -> None:
    unknown = Plan("load", 7488, None, 33.0)
    assert not too_slow(0.9, arrived=0, arrived_s=0.0, layers=30, plan=unknown, least_s=0.25)
    assert too_slow(1.1, arrived=0, arrived_s=0.0, layers=30, plan=unknown, least_s=0.25)


def test_a_load_whose_layers_come_slowly_is_given_up_for_mixing() -> None:
    unknown = Plan("load", 7488, None, 33.0)
    assert too_slow(0.96, arrived=1, arrived_s=0.95, layers=30, plan=unknown, least_s=0.25)  # 29 s to come; mixing takes 15
    assert not too_slow(0.96, arrived=10, arrived_s=0.95, layers=30, plan=unknown, least_s=0.25)
    assert not too_slow(9.0, arrived=29, arrived_s=9.0, layers=30, plan=unknown, least_s=0.25)  # one layer left


def test_a_load_is_not_given_up_where_nobody_knows_what_computing_takes() -> None:
    assert not too_slow(1e6, arrived=0, arrived_s=0.0, layers=30, plan=Plan("load", 64), least_s=0.25)


@given(st.integers(1, 8000), st.integers(0, 8000), st.none() | st.floats(0, 1e4))
def test_a_stride_stays_within_the_gap_and_waits_only_for_what_comes_sooner(
    gap: int, first: int, loading_s: float | None
) -> None:
    count = stride(gap, first=first, loading_s=loading_s, computing=COMPUTING, piece_tokens=PIECE)
    assert 0 <= count <= gap
    if count == 0:
        assert loading_s is not None
        assert loading_s <= COMPUTING.seconds(first, first + PIECE)
    else:
        assert count == gap or count % PIECE == 0


def test_strides_end_near_where_both_meet_and_compute_little_in_vain() -> None:
    tokens, rate = 7488, 8e6
    at, left, now = 0, tokens, 0.0
    while at < left:
        count = stride(left - at, first=at, loading_s=(left - at) * TOKEN_BYTES / rate, computing=COMPUTING, piece_tokens=PIECE)
        now += COMPUTING.seconds(at, at + count) or PIECE * TOKEN_BYTES / rate
        at += count
        left = tokens - int(now * rate / TOKEN_BYTES) // PIECE * PIECE
    assert at - left <= 2 * PIECE
    best = plan(on_disk(tokens), reading=disk(rate)).chosen_s
    assert now == pytest.approx(best, rel=0.05)


@given(sizes, st.integers(1, 1 << 20), st.none() | rates)
def test_ranges_are_whole_pieces_of_a_bounded_size(tokens: int, token_bytes: int, rate: float | None) -> None:
    reading = None if rate is None else disk(rate)["disk"]
    count = range_tokens(tokens, nbytes=tokens * token_bytes, reading=reading, piece_tokens=PIECE)
    assert count % PIECE == 0
    assert PIECE <= count <= max(PIECE, tokens)
    assert count == PIECE or count * token_bytes <= 64 << 20


def test_what_is_loaded_as_a_whole_is_loaded_only_where_that_is_no_slower() -> None:
    def whole(rate: float, *, first: int = 0, tokens: int = 1024, **more: float) -> Plan:
        return plan_whole([on_disk(tokens)], first=first, computing=COMPUTING, reading=disk(rate, **more))

    assert [whole(rate).choice for rate in (2e9, 2e8, 2e7, 1e7, 1e6)] == ["load", "load", "load", "compute", "compute"]
    assert whole(1.5e7).choice == "compute"
    assert whole(1.5e7, first=6144).choice == "load"  # behind much else computing is slower
    assert whole(1e6, stale=True).choice == "load"  # or its speed would never be known again
    assert plan_whole([on_disk(1024)], first=0, computing=None, reading=disk(1e6)).choice == "load"
    assert plan_whole([on_disk(1024)], first=0, computing=COMPUTING, reading={}).choice == "load"


@given(st.floats(1e5, 1e10), st.integers(0, 8192), st.integers(0, 128))
def test_a_whole_load_is_never_chosen_that_would_be_slower(rate: float, first: int, pieces: int) -> None:
    chosen = plan_whole([on_disk(PIECE * pieces)], first=first, computing=COMPUTING, reading=disk(rate))
    assert chosen.load_s is not None
    assert chosen.compute_s is not None
    assert chosen.chosen_s is not None
    assert chosen.chosen_s <= min(chosen.load_s, chosen.compute_s) + UNFELT_S
