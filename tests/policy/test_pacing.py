"""How much of prompts is computed beside answers: what a few decoding steps last, by measurement."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.pacing import Pace

SECONDS = st.floats(1e-4, 10)


def measured(decode_s: float, token_s: float) -> Pace:
    pace = Pace()
    for _ in range(5):
        pace = pace.after(seconds=decode_s, decoding=True, prompt_tokens=0)
        pace = pace.after(seconds=decode_s + 64 * token_s, decoding=True, prompt_tokens=64)
    return pace


@given(SECONDS, st.floats(1e-5, 1e-1))
def test_a_step_beside_answers_lasts_at_most_four_decoding_steps(decode_s: float, token_s: float) -> None:
    tokens = measured(decode_s, token_s).beside_tokens(least=1, most=1 << 20)
    assert tokens == 1 or decode_s + tokens * token_s <= 4.01 * decode_s
    assert tokens == 1 << 20 or decode_s + (tokens + 2) * token_s >= 3.99 * decode_s


@given(st.lists(st.tuples(SECONDS, st.booleans(), st.integers(0, 2048)), max_size=30))
def test_whatever_was_measured_it_stays_between_its_bounds(steps: list[tuple[float, bool, int]]) -> None:
    pace = Pace()
    for seconds, decoding, tokens in steps:
        pace = pace.after(seconds=seconds, decoding=decoding, prompt_tokens=tokens)
        assert 32 <= pace.beside_tokens(least=32, most=1024) <= 1024


def test_before_anything_was_measured_a_quarter_is_computed() -> None:
    assert Pace().beside_tokens(least=32, most=1024) == 256
    assert Pace().beside_tokens(least=32, most=64) == 32


def test_one_step_that_hung_changes_little() -> None:
    pace = measured(0.02, 0.002)
    before = pace.beside_tokens(least=1, most=1024)
    after = pace.after(seconds=60.0, decoding=True, prompt_tokens=64).beside_tokens(least=1, most=1024)
    assert before / 1.5 <= after <= before
    assert before <= pace.after(seconds=60.0, decoding=True, prompt_tokens=0).beside_tokens(least=1, most=1024) <= 1.5 * before
