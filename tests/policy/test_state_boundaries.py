"""Where states of recurrent layers are kept: behind whole blocks, a token left over, every so often, where prompts parted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headstart.policy.boundaries import next_boundary


def all_boundaries(tokens: int, *, every: int, computed: int = 0, diverges: int | None = None) -> list[int]:
    found = []
    at: int | None = computed
    while (at := next_boundary(at, tokens=tokens, every=every, block_tokens=64, diverges=diverges)) is not None:
        found.append(at)
    return found


def test_a_short_prompt_has_one_before_its_end() -> None:
    assert all_boundaries(200, every=2048) == [192]
    assert all_boundaries(192, every=2048) == [128]  # a token at least is left to compute
    assert all_boundaries(64, every=2048) == []


def test_a_long_one_has_more_every_so_often() -> None:
    assert all_boundaries(5000, every=2048) == [2048, 4096, 4992]
    assert all_boundaries(5000, every=2048, computed=2100) == [4096, 4992]


def test_one_is_where_prompts_parted_before() -> None:
    assert all_boundaries(1000, every=2048, diverges=640) == [640, 960]
    assert all_boundaries(1000, every=2048, diverges=650) == [640, 960]
    assert all_boundaries(1000, every=2048, diverges=5000) == [960]


def test_blocks_are_never_cut_by_a_strange_distance() -> None:
    assert all_boundaries(300, every=1) == [64, 128, 192, 256]
    assert all_boundaries(300, every=130) == [128, 256]


@given(
    tokens=st.integers(1, 5000),
    every=st.integers(1, 5000),
    computed=st.integers(0, 5000),
    diverges=st.none() | st.integers(0, 6000),
)
def test_they_rise_in_whole_blocks_and_leave_a_token(tokens: int, every: int, computed: int, diverges: int | None) -> None:
    found = all_boundaries(tokens, every=every, computed=computed, diverges=diverges)
    assert found == sorted(set(found))
    assert all(computed < one < tokens and one % 64 == 0 for one in found)
    if computed < (tokens - 1) // 64 * 64:
        assert found[-1] == (tokens - 1) // 64 * 64
