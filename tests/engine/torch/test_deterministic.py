"""Deterministic mode: logits are compared to the bit, cold, hit, restarted, in company and after other turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from held_cache import eventually
from hypothesis import given
from hypothesis import strategies as st
from reference import Answer, ask, engine_of, loaded, some_tokens

from headstart.cache.open import open_cache
from headstart.config import CacheConfig
from headstart.engine.base import GenerationRequest, Receipt, Sampling, TokenEvent
from headstart.engine.checkpoint import identity_of
from headstart.engine.torch import deterministic, stepping
from headstart.engine.torch.deterministic import CHUNK_TOKENS, make_deterministic, next_count, reached
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.model import TorchModel
from headstart.engine.torch.recurrent import StateShape
from headstart.engine.torch.sampler import Sampler, choose
from headstart.errors import ConfigError

PROMPT = some_tokens(750, seed=3)  # two chunks, and most of the third
ANSWER = 24  # fills it, and goes on behind it


@dataclass(slots=True)
class Logits:
    """Of each request, by its prompt: what every token was chosen from."""

    by_prompt: dict[tuple[int, ...], list[torch.Tensor]]

    def of(self, prompt: Sequence[int]) -> torch.Tensor:
        return torch.stack(self.by_prompt.pop(tuple(prompt)))


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    seen = Logits({})

    def noted(rows: torch.Tensor, samplers: list[Sampler]) -> Any:
        for row, sampler in zip(rows, samplers, strict=True):
            seen.by_prompt.setdefault(tuple(sampler._prompt), []).append(row.clone())
        return choose(rows, samplers)

    monkeypatch.setattr(stepping, "choose", noted)
    return seen


@dataclass(frozen=True, slots=True)
class Bench:
    """One model and one cache directory, opened as often as one likes."""

    folder: Path
    model: TorchModel
    directory: Path

    @contextmanager
    def engine(self, *, cached: bool = True, memory: str = "64MiB", **settings: Any) -> Iterator[TorchEngine]:
        cache = None
        if cached:
            cache = open_cache(
                CacheConfig(directory=self.directory, capacity="512MiB", memory=memory),
                identity=identity_of(self.folder),
                representation=self.model.shape.representation(query_heads=self.model.heads),
            )
        more = {"context": 2048, "full_contexts": 10, "hedge_after_s": 30.0, "deterministic": True, **settings}
        with engine_of(self.model, cache=cache, **more) as engine:
            yield engine
            eventually(lambda: engine.load().kv_used_bytes == 0)


def answered(engine: TorchEngine, prompt: Sequence[int], count: int = ANSWER, **more: Any) -> tuple[list[int], Receipt]:
    answer = ask(engine, prompt, count, **more)
    last = answer.result()
    assert last.error is None
    assert last.receipt is not None
    eventually(lambda: engine.load().kv_used_bytes == 0)  # what was saved can be hit
    return answer.tokens, last.receipt


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma2, capped scores, windows": ("gemma2", {"sliding_window": 300, "attn_logit_softcapping": 5.0}),
    "mixtral, experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tiny_model_folder: Callable[..., Path], tmp_path: Path) -> Bench:
    kind, config = KINDS[request.param]
    folder = tiny_model_folder(kind, **config)
    model = loaded(folder)
    make_deterministic(model)
    return Bench(folder, model, tmp_path / "kv")


@pytest.fixture
def gemma2(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> Bench:
    """Of the tiny models the one whose bits do change with the shapes of passes."""
    kind, config = KINDS["gemma2, capped scores, windows"]
    folder = tiny_model_folder(kind, **config)
    model = loaded(folder)
    make_deterministic(model)
    return Bench(folder, model, tmp_path / "kv")


@pytest.fixture
def llama(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> Bench:
    folder = tiny_model_folder("llama")
    model = loaded(folder)
    make_deterministic(model)
    return Bench(folder, model, tmp_path / "kv")


def test_cold_hit_restarted_and_in_company_give_the_same_bits(bench: Bench, logits: Logits) -> None:
    with bench.engine(cached=False) as engine:
        tokens, _ = answered(engine, PROMPT)
        want = logits.of(PROMPT)
    assert want.shape[0] == ANSWER == len(tokens)
    with bench.engine() as engine:
        _, cold = answered(engine, PROMPT)
        assert cold.cached_tokens == 0
        assert torch.equal(logits.of(PROMPT), want)
        _, hit = answered(engine, PROMPT)
        assert (hit.cached_memory_tokens, hit.cached_disk_tokens) == (2 * CHUNK_TOKENS, 0)
        assert torch.equal(logits.of(PROMPT), want)
    with bench.engine(memory="0") as engine:
        _, hit = answered(engine, PROMPT)
        assert (hit.cached_memory_tokens, hit.cached_disk_tokens) == (0, 2 * CHUNK_TOKENS)
        assert torch.equal(logits.of(PROMPT), want)
        others = [ask(engine, PROMPT[: 70 * n] + some_tokens(90 * n, seed=n), 9, salt="others") for n in range(1, 8)]
        mine = ask(engine, PROMPT, ANSWER)
        assert mine.result().error is None
        assert [other.result().error for other in others] == [None] * 7
        assert torch.equal(logits.of(PROMPT), want)


def test_an_answer_s_tokens_are_the_next_turn_s_prefix_to_the_bit(gemma2: Bench, logits: Logits) -> None:
    with gemma2.engine() as engine:
        first = PROMPT[:450]
        answer, _ = answered(engine, first, 70)
        turn = [*first, *answer, *some_tokens(50, seed=9)]
        logits.by_prompt.clear()
        _, hit = answered(engine, turn, 20)
        assert hit.cached_tokens == 2 * CHUNK_TOKENS  # of which 62 tokens were an answer
        after_turns = logits.of(turn)
    with gemma2.engine(cached=False) as engine:
        answered(engine, turn, 20)
        assert torch.equal(after_turns, logits.of(turn))


def test_what_was_stored_by_shorter_prompts_is_the_same_bits(gemma2: Bench, logits: Logits) -> None:
    with gemma2.engine(cached=False) as engine:
        answered(engine, PROMPT, 5)
        want = logits.of(PROMPT)
    with gemma2.engine() as engine:
        for length in (257, 400, 511, 513):
            answered(engine, PROMPT[:length], 3)
        _, hit = answered(engine, PROMPT, 5)
        assert hit.cached_tokens == 2 * CHUNK_TOKENS
        assert torch.equal(logits.of(PROMPT), want)


def test_a_seed_draws_the_same_answer_hit_or_cold(llama: Bench) -> None:
    sampling = Sampling(temperature=1.5, seed=7)
    with llama.engine() as engine:
        cold, _ = answered(engine, PROMPT, 12, sampling=sampling)
        hit, receipt = answered(engine, PROMPT, 12, sampling=sampling)
    assert receipt.cached_tokens
    assert hit == cold


def test_requests_that_begin_alike_hold_no_kv_together(llama: Bench) -> None:
    with llama.engine() as engine:
        answers: list[Answer] = [ask(engine, PROMPT, 5) for _ in range(4)]
        assert len({tuple(answer.tokens) for answer in answers if answer.result().error is None}) == 1
        assert engine.load().counters.get("prefixes_shared", 0) == 0


@pytest.mark.parametrize("cached", [True, False])
def test_a_request_that_gave_its_place_to_another_goes_on_with_the_same_bits(
    llama: Bench, logits: Logits, cached: bool
) -> None:
    prompt = PROMPT[:450]
    with llama.engine(cached=False) as engine:
        answered(engine, prompt, 120)
        want = logits.of(prompt)
    with llama.engine(cached=cached, context=704, full_contexts=1) as engine:
        high: list[Answer] = []

        class Overtaken(Answer):
            def __call__(self, event: TokenEvent) -> None:
                if not high:
                    high.append(ask(engine, some_tokens(500, seed=21), 5, priority=1))
                super().__call__(event)

        low = Overtaken()
        engine.submit(GenerationRequest("low", tuple(prompt), 120), low)
        last = low.result()
        assert high[0].result().error is None
        assert last.receipt is not None
        assert last.receipt.preemptions == 1
    assert torch.equal(logits.of(prompt), want)


def test_kv_that_was_computed_otherwise_is_never_hit(llama: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Bench(llama.folder, loaded(llama.folder), llama.directory)
    with plain.engine(deterministic=False) as engine:
        answered(engine, PROMPT, 5)
        assert answered(engine, PROMPT, 5)[1].cached_tokens == 704
    with llama.engine() as engine:
        assert answered(engine, PROMPT, 5)[1].cached_tokens == 0
        assert answered(engine, PROMPT, 5)[1].cached_tokens == 512
    monkeypatch.setattr(deterministic, "_processor", lambda: "another")
    elsewhere = replace(llama, model=loaded(llama.folder))
    make_deterministic(elsewhere.model)
    with elsewhere.engine() as engine:
        assert answered(engine, PROMPT, 5)[1].cached_tokens == 0


def test_a_model_on_a_device_is_refused(llama: Bench) -> None:
    model = loaded(llama.folder)
    model.device = torch.device("cuda")
    with pytest.raises(ConfigError, match="CPUs only"):
        make_deterministic(model)


def test_a_model_with_recurrent_layers_is_refused(llama: Bench) -> None:
    model = loaded(llama.folder)
    model.shape = replace(model.shape, state=StateShape((), 3))
    with pytest.raises(ConfigError, match="recurrent layers"):
        make_deterministic(model)


@pytest.mark.real_model
def test_the_real_model_gives_the_same_bits_on_several_threads(smollm2_folder: Path, tmp_path: Path, logits: Logits) -> None:
    torch.set_num_threads(2)
    model = loaded(smollm2_folder)
    make_deterministic(model)
    bench = Bench(smollm2_folder, model, tmp_path / "kv")
    prompt = some_tokens(270, seed=5, vocabulary=40_000)
    with bench.engine(context=512, full_contexts=3) as engine:
        answered(engine, prompt, 4)
        cold = logits.of(prompt)
        others = [ask(engine, some_tokens(20, seed=n), 4) for n in range(2)]
        _, hit = answered(engine, prompt, 4)
        assert hit.cached_tokens == CHUNK_TOKENS
        assert [other.result().error for other in others] == [None, None]
    assert torch.equal(logits.of(prompt), cold)


# The rule by itself: how each token came about is a function of its place and of where the prompt ends.


def passes(*, prompt: int, total: int, start: int, whole_from: int | None = None) -> tuple[dict[int, Any], list[Any]]:
    """Compute from `start` until `total` tokens were known; return, for each place from which a token was chosen, the pass and
    how all that it saw came about, and how what is stored came about. `whole_from`: it was interrupted once so many tokens were
    known, and begins again with what is stored."""
    made: list[Any] = [(at // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS) for at in range(start)]  # as (first, count) of a pass
    known, computed, chosen = prompt, start, {}
    while True:
        count = next_count(computed=computed, prompt_tokens=prompt, known_tokens=known)
        assert count >= 1
        assert computed + count <= known
        made[computed:] = [*made[computed:computed], *[(computed, count)] * count]
        end = computed + count
        computed = reached(computed=computed, count=count)
        if end == known:
            if end not in chosen:
                chosen[end] = (count, tuple(made[:end]))
            if known == total:
                return chosen, made[: computed // CHUNK_TOKENS * CHUNK_TOKENS]
            known += 1
        if known == whole_from:
            whole_from = None
            computed = computed // CHUNK_TOKENS * CHUNK_TOKENS
            del made[computed:]


@given(st.data())
def test_how_a_token_came_about_depends_on_no_history(data: st.DataObject) -> None:
    prompt = data.draw(st.integers(1, 600))
    total = data.draw(st.integers(prompt, 900))
    start = data.draw(st.integers(0, (prompt - 1) // CHUNK_TOKENS)) * CHUNK_TOKENS
    interrupted = data.draw(st.none() | st.integers(prompt, total))
    cold, stored = passes(prompt=prompt, total=total, start=0)
    hit, stored_too = passes(prompt=prompt, total=total, start=start, whole_from=interrupted)
    assert all(cold[place] == made for place, made in hit.items())
    for made in (stored, stored_too):
        assert made == [(at // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS) for at in range(len(made))]
