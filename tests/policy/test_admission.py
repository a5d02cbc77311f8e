"""A day's writes stay within the budget, and what goes without when it runs short is what is least likely to be used again."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.policy import admission as admission_module
from headstart.policy.admission import DAY_S, Admission

BLOCK_BYTES = 100


def keys(count: int, *, seed: int = 0) -> list[bytes]:
    return [sha256(b"%d %d" % (seed, n)).digest() for n in range(count)]


def admit(admission: Admission, prompt: list[bytes], *, present: int = 0, session: str = "", now_s: float = 0.0) -> int:
    return admission.admit(prompt, present=present, block_bytes=BLOCK_BYTES, session=session, now_s=now_s)


def short(budget_blocks: int = 1000, *, left_blocks: int = 64) -> Admission:
    """Return an admission whose budget has run short."""
    budget_bytes = budget_blocks * BLOCK_BYTES
    return Admission(budget_bytes=budget_bytes, spent_bytes=budget_bytes - left_blocks * BLOCK_BYTES, now_s=0.0)


def test_while_the_budget_lasts_everything_is_written() -> None:
    admission = Admission(budget_bytes=1_000_000, spent_bytes=0, now_s=0.0)
    assert admit(admission, keys(500)) == 500


def test_a_new_prompt_gets_its_head_when_the_budget_runs_short() -> None:
    assert admit(short(), keys(40)) == 1
    assert admit(short(left_blocks=99), keys(40)) == 1


def test_what_was_seen_before_is_written_whole_while_there_is_budget() -> None:
    admission = short()
    assert admit(admission, keys(40)) == 1
    assert admit(admission, keys(40), present=1) == 40


def test_a_prompt_that_was_seen_in_part_gets_that_part() -> None:
    admission = short()
    admit(admission, keys(16))
    assert admit(admission, keys(16) + keys(40, seed=1)) == 16  # and less than a block of the rest: a 64th of what is left


def test_a_session_that_came_back_gets_more_than_a_new_one() -> None:
    admission = short(left_blocks=64)
    admit(admission, keys(1, seed=7), session="s")
    assert admit(admission, keys(40), session="s") > 10
    assert admit(short(left_blocks=64), keys(40), session="s") == 1


def test_what_a_request_saved_itself_before_was_not_seen_before_for_that() -> None:
    """A long prompt is saved in several goes, and once more with its answer."""
    admission = short()
    assert admit(admission, keys(16), session="s") == 1
    again = admission.admit(keys(40), present=1, block_bytes=BLOCK_BYTES, session="s", now_s=0.0, own=16)
    assert again == 1
    assert admit(admission, keys(40), present=1, session="s") > 10  # another request: seen, and in a session that came back


def test_nothing_is_admitted_when_nothing_is_left_and_again_after_a_while() -> None:
    admission = short(left_blocks=0)
    assert admit(admission, keys(8)) == 0
    assert admit(admission, keys(8), now_s=DAY_S / 2) == 8


def test_what_is_there_already_costs_nothing() -> None:
    admission = short(left_blocks=0)
    assert admit(admission, keys(8), present=8) == 8
    assert admit(admission, keys(8), present=3) == 3


def test_what_was_not_written_after_all_is_given_back() -> None:
    admission = short()
    before = admission.level_bytes
    count = admit(admission, keys(40))
    admission.refund(count * BLOCK_BYTES)
    assert admission.level_bytes == before


def test_what_others_wrote_counts() -> None:
    admission = Admission(budget_bytes=1000 * BLOCK_BYTES, spent_bytes=0, now_s=0.0)
    admission.cap(1000 * BLOCK_BYTES)
    assert admit(admission, keys(8)) == 0


def test_a_clock_that_goes_back_adds_nothing() -> None:
    admission = short(left_blocks=0)
    admit(admission, keys(8), now_s=1000.0)
    level = admission.level_bytes
    admit(admission, [], now_s=0.0)
    assert admission.level_bytes == level


def test_a_budget_of_nothing_is_wrong_use() -> None:
    with pytest.raises(ValueError, match="admits nothing"):
        Admission(budget_bytes=0, spent_bytes=0, now_s=0.0)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "_REMEMBERED", 50)
    admission = short()
    for seed in range(500):
        admit(admission, keys(1, seed=seed))
    marks = admission._marks
    assert len(marks._young) + len(marks._old) <= 100
    assert keys(1, seed=499)[0][:8] in marks


@given(
    prompts=st.lists(
        st.tuples(
            st.integers(0, 5), st.integers(1, 400), st.integers(0, 400), st.floats(0, 4000), st.sampled_from(["", "a", "b"])
        ),
        max_size=120,
    ),
    budget_blocks=st.integers(1, 3000),
)
def test_no_day_gets_more_than_its_budget(prompts: list[tuple[int, int, int, float, str]], budget_blocks: int) -> None:
    admission = Admission(budget_bytes=budget_blocks * BLOCK_BYTES, spent_bytes=0, now_s=0.0)
    now_s, spent = 0.0, list[tuple[float, int]]()
    for seed, count, present, pause_s, session in prompts:
        now_s += pause_s
        present = min(present, count)
        admitted = admit(admission, keys(count, seed=seed), present=present, session=session, now_s=now_s)
        assert present <= admitted <= count
        spent.append((now_s, (admitted - present) * BLOCK_BYTES))
        day = sum(nbytes for at, nbytes in spent if at > now_s - DAY_S)
        assert day <= budget_blocks * BLOCK_BYTES
