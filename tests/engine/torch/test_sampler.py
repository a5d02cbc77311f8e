"""Tokens are drawn from what temperature, top-k and top-p leave, and equal seeds draw equally."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headstart.engine.base import EngineInfo, GenerationRequest, Sampling
from headstart.engine.exactness import same_tokens
from headstart.engine.serving.limits import refuse_impossible
from headstart.engine.torch.sampler import Choice, Sampler, choose
from headstart.errors import RequestError

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
    assert (chosen[0], chosen[4]) == (Choice(1), Choice(3))
    assert all("not finite" in str(chosen[row]) for row in (1, 2, 3))
    assert choose(logits[:0], []) == []


@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 1e-6, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e37])
def test_a_temperature_next_to_nothing_takes_the_best(temperature: float, scale: float) -> None:
    assert choose(scale * LOGITS[None], [Sampler(Sampling(temperature=temperature, seed=1))]) == [Choice(1)]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e38])
@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e39, 1e308])
@pytest.mark.parametrize("top_p", [5e-324, 0.5, 1.0])
def test_every_setting_that_is_let_in_draws_a_token(scale: float, temperature: float, top_p: float) -> None:
    logits = scale * torch.tensor([[-1.0, 0.9, 0.8, -math.inf]])
    sampler = Sampler(Sampling(temperature=temperature, top_p=top_p, top_k=3, seed=1))
    assert choose(logits, [sampler])[0] in (Choice(0), Choice(1), Choice(2))


def test_a_row_that_cannot_be_drawn_costs_no_other_its_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(logits: torch.Tensor) -> int:
        raise RuntimeError("no such luck")

    bad = Sampler(Sampling(temperature=1))
    monkeypatch.setattr(bad, "draw", broken)
    first, second, third = choose(LOGITS.repeat(3, 1), [Sampler(Sampling()), bad, Sampler(Sampling())])
    assert (first, third) == (Choice(1), Choice(1))
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


def test_min_p_leaves_what_has_that_share_of_the_best_at_the_temperature() -> None:
    assert _drawn(Sampling(temperature=1, min_p=0.45, seed=1)) == {1, 2, 3}  # of 0.4 that is 0.18
    assert _drawn(Sampling(temperature=0.5, min_p=0.45, seed=1)) == {1}  # shares go by their squares: 0.16, 0.0625
    assert _drawn(Sampling(temperature=1, min_p=1, seed=1)) == {1}
    assert _drawn(Sampling(temperature=1, min_p=0.45, top_k=2, seed=1)) == {1, 2}


def _answer(sampling: Sampling, count: int, **more: Any) -> list[int]:
    """Greedy tokens where every step has the same logits."""
    sampler = Sampler(sampling, **more)
    chosen = [choose(LOGITS[None], [sampler])[0] for _ in range(count)]
    return [one.token for one in chosen if isinstance(one, Choice)]


def test_presence_and_frequency_count_the_answer_alone() -> None:
    step = math.log(0.4 / 0.25)
    assert _answer(Sampling(presence_penalty=1.01 * step), 3, prompt=[1]) == [1, 2, 1]  # paid once, both pay alike
    assert _answer(Sampling(frequency_penalty=1.01 * step), 4, prompt=[2]) == [1, 2, 1, 3]  # paid each time
    assert _answer(Sampling(frequency_penalty=-1), 3) == [1, 1, 1]


def test_penalties_and_bias_are_what_transformers_computes() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(50, generator=torch.Generator().manual_seed(5))
    prompt = [3, 3, 17, 41]
    want = RepetitionPenaltyLogitsProcessor(penalty=1.7)(torch.tensor([prompt]), logits[None].clone())[0]
    sampler = Sampler(Sampling(repetition_penalty=1.7, logit_bias=((9, 1.5), (3, -2.0))), prompt=prompt)
    want[9] += 1.5
    want[3] -= 2.0
    before = logits.clone()
    assert torch.equal(sampler._adjusted(logits), want)
    assert torch.equal(logits, before)  # log probabilities are told of these


def test_a_bias_bans_a_token_or_makes_it_the_only_one() -> None:
    assert _answer(Sampling(logit_bias=((1, -100.0),)), 1) == [2]
    assert _answer(Sampling(logit_bias=((0, 100.0),)), 1) == [0]
    assert _drawn(Sampling(temperature=1, seed=1)) == {0, 1, 2, 3, 4}
    sampler = Sampler(Sampling(temperature=1, seed=1, logit_bias=((0, 100.0),)))
    assert {sampler.choose(LOGITS, 1) for _ in range(50)} == {0}


def test_no_answer_ends_before_its_least_number_of_tokens() -> None:
    assert _answer(Sampling(), 4, min_tokens=2, stop_ids={1, 999}) == [2, 2, 1, 1]
    assert _answer(Sampling(), 2, min_tokens=2) == [1, 1]


class OneAfterAnother:
    """May be these tokens, in this order."""

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)

    def allowed(self) -> bytes | None:
        return bytes([1 << self.left[0]]) if self.left else None

    def accept(self, token: int) -> None:
        if self.left and token != self.left.pop(0):
            raise ValueError(f"{token} was not allowed")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_what_it_is_held_to_and_free_behind_it(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=1, top_k=1, repetition_penalty=1.5, logit_bias=((0, -100.0),))
    assert _answer(sampling, 3, constraint=OneAfterAnother(0, 4, 3)) == [0, 4, 3]
    assert _answer(Sampling(), 3, constraint=OneAfterAnother(3)) == [3, 1, 1]


def test_what_may_only_end_ends_before_its_least_number_of_tokens() -> None:
    assert _answer(Sampling(), 2, min_tokens=9, stop_ids={4}, constraint=OneAfterAnother(0, 4)) == [0, 4]


def test_what_an_answer_is_held_to_may_know_fewer_tokens_than_the_model() -> None:
    logits = torch.zeros(5000)
    logits[4999] = 9
    sampler = Sampler(Sampling(), constraint=OneAfterAnother(2))
    assert sampler.choose(logits, 4999) == 2
    assert sampler.choose(logits, 4999) == 4999


def test_log_probabilities_are_the_model_s_own_whatever_acts_on_the_choice() -> None:
    plain, told = Sampler(Sampling()), Sampler(Sampling(logit_bias=((0, 100.0),), temperature=0.3, seed=1), logprobs=2)
    only = Sampler(Sampling(), logprobs=0)
    first, second, third = choose(LOGITS.repeat(3, 1), [plain, told, only])
    assert first == Choice(1)
    assert isinstance(second, Choice)
    assert isinstance(third, Choice)
    assert second.token == 0
    assert second.logprobs is not None
    assert second.logprobs.token == pytest.approx(math.log(0.05))
    assert [token for token, _ in second.logprobs.top] == [1, 2]
    assert [value for _, value in second.logprobs.top] == pytest.approx([math.log(0.4), math.log(0.25)])
    assert third.logprobs is not None
    assert (third.logprobs.token, third.logprobs.top) == (pytest.approx(math.log(0.4)), ())


def test_more_log_probabilities_than_there_are_tokens_are_all_of_them() -> None:
    (one,) = choose(LOGITS[None], [Sampler(Sampling(), logprobs=20)])
    assert isinstance(one, Choice)
    assert one.logprobs is not None
    assert [token for token, _ in one.logprobs.top] == [1, 2, 3, 4, 0]


def test_a_row_that_is_not_finite_tells_no_log_probabilities() -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0, 2] = math.nan
    first, second = choose(logits, [Sampler(Sampling(), logprobs=1), Sampler(Sampling(), logprobs=1)])
    assert isinstance(first, str)
    assert isinstance(second, Choice)
    assert second.logprobs is not None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"logit_bias": ((5, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ({"logit_bias": ((1, 1.0),) * 1025}, "logit_bias"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    info = EngineInfo("m", 10, 5, "cpu", "float32", 1, 1, "")
    with pytest.raises(RequestError) as caught:
        refuse_impossible(GenerationRequest("r", (1,), 1, Sampling(**change)), info)
    assert caught.value.param == param


@pytest.mark.parametrize("more", [{"logprobs": 21}, {"logprobs": -1}, {"min_tokens": -1}])
def test_a_request_that_asks_for_what_cannot_be_told_is_refused(more: dict[str, Any]) -> None:
    info = EngineInfo("m", 10, 5, "cpu", "float32", 1, 1, "")
    with pytest.raises(RequestError) as caught:
        refuse_impossible(GenerationRequest("r", (1,), 1, **more), info)
    assert caught.value.param == next(iter(more))
