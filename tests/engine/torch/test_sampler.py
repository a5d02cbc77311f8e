"""Tokens are drawn from what temperature, top-k and top-p leave, and equal seeds draw equally."""

from __future__ import annotations

import math

import pytest
import torch

from headstart.engine.base import Sampling
from headstart.engine.torch.exactness import same_tokens
from headstart.engine.torch.sampler import Sampler, choose

LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1]))


def _drawn(sampling: Sampling, count: int = 400) -> set[int]:
    sampler = Sampler(sampling)
    return {sampler.draw(LOGITS) for _ in range(count)}


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=1, seed=1), {0, 1, 2, 3, 4}),
        (Sampling(temperature=1, top_k=2, seed=1), {1, 2}),
        (Sampling(temperature=1, top_p=0.6, seed=1), {1, 2}),
        (Sampling(temperature=1, top_p=0.7, seed=1), {1, 2, 3}),
        (Sampling(temperature=1, top_p=0.01, seed=1), {1}),
        (Sampling(temperature=0.01, seed=1), {1}),
        (Sampling(temperature=1.1e-5, seed=1), {1}),
        (Sampling(temperature=1e300, top_k=2, seed=1), {1, 2}),
        (Sampling(temperature=1, top_p=1e-46, seed=1), {1}),
        (Sampling(temperature=1, top_p=5e-324, seed=1), {1}),
        (Sampling(temperature=1, top_k=3, top_p=0.5, seed=1), {1, 2}),
        (Sampling(temperature=1, top_k=99, seed=1), {0, 1, 2, 3, 4}),
    ],
)
def test_only_what_the_settings_leave_is_drawn(sampling: Sampling, allowed: set[int]) -> None:
    assert _drawn(sampling) == allowed


def test_equal_seeds_draw_equally_and_others_do_not() -> None:
    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1, seed=seed))
        return [sampler.draw(LOGITS) for _ in range(50)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert draws(-1) == draws(-1)
    assert draws(None) != draws(None)


def test_rows_that_are_not_finite_give_no_token_and_others_do() -> None:
    logits = torch.stack([LOGITS, LOGITS, LOGITS, LOGITS, LOGITS.flip(0)])
    logits[1, 2] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    chosen = choose(logits, [Sampler(Sampling())] * 5)
    assert (chosen[0], chosen[4]) == (1, 3)
    assert all("not finite" in str(chosen[row]) for row in (1, 2, 3))
    assert choose(logits[:0], []) == []


@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 1e-6, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e37])
def test_a_temperature_next_to_nothing_takes_the_best(temperature: float, scale: float) -> None:
    assert choose(scale * LOGITS[None], [Sampler(Sampling(temperature=temperature, seed=1))]) == [1]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e38])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e39, 1e308])
@pytest.mark.parametrize("top_p", [5e-324, 0.5, 1.0])
def test_every_setting_that_is_let_in_draws_a_token(scale: float, temperature: float, top_p: float) -> None:
    logits = scale * torch.tensor([[-1.0, 0.9, 0.8, -math.inf]])
    sampler = Sampler(Sampling(temperature=temperature, top_p=top_p, top_k=3, seed=1))
    assert choose(logits, [sampler])[0] in (0, 1, 2)


def test_a_row_that_cannot_be_drawn_costs_no_other_its_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(logits: torch.Tensor) -> int:
        raise RuntimeError("no such luck")

    bad = Sampler(Sampling(temperature=1))
    monkeypatch.setattr(bad, "draw", broken)
    first, second, third = choose(LOGITS.repeat(3, 1), [Sampler(Sampling()), bad, Sampler(Sampling())])
    assert (first, third) == (1, 1)
    assert "RuntimeError" in str(second)
    assert "no such luck" in caplog.text


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([1, 2, 3], [1, 2, 3], True),
        ([1, 2, 3], [1, 4, 0], True),  # 2 and 4 are near ties; what follows is not comparable
        ([1, 2, 3], [1, 0, 3], False),
        ([1, 3, 3], [1, 4, 3], False),
        ([1], [1, 2], True),
        ([], [1, 2], False),
    ],
)
def test_answers_may_part_only_where_the_reference_is_undecided(a: list[int], b: list[int], same: bool) -> None:
    def reference(tokens: object) -> torch.Tensor:
        if tokens == [7, 7, 1]:
            return torch.tensor([0.0, 0.0, 5.0, 1.0, 4.9999])
        assert tokens == [7, 7]
        return torch.tensor([0.0, 9.0, 5.0, 1.0, 0.0])

    assert same_tokens(reference, [7, 7], a, b, tolerance=1e-4) == same
