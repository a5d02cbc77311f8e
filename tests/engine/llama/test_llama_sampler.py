"""Sampler chains choose as the request asks: against sums done by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gguf_fixtures import Kind
from headstart.engine.base import Sampling
from headstart.engine.llama.binding import Library
from headstart.engine.llama.context import Context, Row
from headstart.engine.llama.sampler import Sampler
from headstart.engine.llama.weights import Weights
from headstart.engine.serving.parts import Choice

Made = Callable[[Kind], Path]
PROMPT = [5, 6, 7]


@pytest.fixture
def context(library: Library, gguf: Made) -> Iterator[Context]:
    weights = Weights(library, gguf("llama"), gpu_layers=0)
    context = Context(weights, cells=256, sequences=2, kv_type="f16", batch=64, ubatch=64, threads=1, flash=True)
    context.compute([Row(1, PROMPT, 0, wanted=True)])
    yield context
    context.close()
    weights.close()


def _set(context: Context, values: dict[int, float]) -> np.ndarray:
    """Put logits where libllama has its own: all 0 but those named."""
    logits = context.logits(2)
    logits[:] = 0
    for token, value in values.items():
        logits[token] = value
    return logits


def _sampler(library: Library, context: Context, sampling: Sampling, **more: Any) -> Sampler:
    return Sampler(library, sampling, prompt=PROMPT, context_tokens=256, vocabulary=len(context.logits(2)), **more)


def _choice(sampler: Sampler, context: Context) -> Choice:
    choice = sampler.choose(context, 2)
    assert isinstance(choice, Choice), choice
    return choice


def test_the_best_is_taken_and_told_with_its_log_probability(library: Library, context: Context) -> None:
    logits = _set(context, {9: 4.0, 8: 3.0}).astype(float)
    sampler = _sampler(library, context, Sampling(), logprobs=2)
    choice = _choice(sampler, context)
    total = np.log(np.exp(logits).sum())
    assert choice.token == 9
    assert choice.logprobs is not None
    assert [token for token, _ in choice.logprobs.top] == [9, 8]
    assert choice.logprobs.token == pytest.approx(4.0 - total)
    assert choice.logprobs.top[1][1] == pytest.approx(3.0 - total)
    sampler.close()


def test_penalties_bias_and_ends_act_as_they_are_defined(library: Library, context: Context) -> None:
    def first(values: dict[int, float], sampling: Sampling, **more: Any) -> int:
        _set(context, values)
        sampler = _sampler(library, context, sampling, **more)
        token = _choice(sampler, context).token
        sampler.close()
        return token

    assert first({5: 4.0, 9: 3.0}, Sampling(repetition_penalty=2.0)) == 9  # the prompt's tokens count
    assert first({5: 4.0, 9: 3.0}, Sampling(presence_penalty=2.0)) == 5  # only the answer's do
    assert first({5: 4.0, 9: 3.0}, Sampling(logit_bias=((9, 2.0),))) == 9
    assert first({5: 4.0, 9: 3.0}, Sampling(), min_tokens=1, stop_ids={5}) == 9
    _set(context, {5: 4.0, 9: 3.5})
    sampler = _sampler(library, context, Sampling(frequency_penalty=0.3))
    assert [_choice(sampler, context).token for _ in range(4)] == [5, 5, 9, 5]  # 4.0, 3.7, then 3.4 and 3.2
    sampler.close()
    _set(context, {5: 4.0, 9: 3.0})
    sampler = _sampler(library, context, Sampling(), min_tokens=2, stop_ids={5})
    assert [_choice(sampler, context).token for _ in range(3)] == [9, 9, 5]
    sampler.close()


@pytest.mark.parametrize(
    ("sampling", "may"),
    [
        (Sampling(temperature=1.0, top_k=2), {1, 2}),
        (Sampling(temperature=1.0, min_p=0.3), {1, 2}),
        (Sampling(temperature=1.0, top_p=0.8), {1, 2}),
        (Sampling(temperature=0.01), {1}),
        (Sampling(temperature=1.0, top_p=0.01), {1}),
    ],
    ids=str,
)
def test_only_what_cuts_leave_is_drawn(sampling: Sampling, may: set[int], library: Library, context: Context) -> None:
    _set(context, dict.fromkeys(range(len(context.logits(2))), -30.0) | {1: 10.0, 2: 9.5, 3: 8.0, 4: 7.0})
    sampler = _sampler(library, context, sampling)
    drawn = Counter(_choice(sampler, context).token for _ in range(100))
    assert set(drawn) == may
    sampler.close()


def test_an_answer_is_held_to_what_is_allowed_and_may_then_end(library: Library, context: Context) -> None:
    class Held:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def allowed(self) -> bytes | None:
            return bytes([0b0000_1100]) if not self.seen else bytes([0b0010_0000])  # 2 or 3, then the end: 5

        def accept(self, token: int) -> None:
            self.seen.append(token)

    held = Held()
    sampler = _sampler(library, context, Sampling(), min_tokens=9, stop_ids={5}, constraint=held)
    chosen = []
    for _ in range(2):
        _set(context, {9: 5.0, 3: 1.0})
        chosen.append(_choice(sampler, context).token)
    assert chosen == held.seen == [3, 5]
    sampler.close()


def test_logits_that_are_not_finite_are_told(library: Library, context: Context) -> None:
    _set(context, {1: float("nan")})
    sampler = _sampler(library, context, Sampling())
    assert "not finite" in str(sampler.choose(context, 2))
    sampler.close()
