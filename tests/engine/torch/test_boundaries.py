"""States of recurrent layers in the cache: kept at block edges, restored with the blocks or not at all, never in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from held_cache import HeldCache, eventually
from reference import Answer, ask, engine_of, finish, loaded, some_tokens, stepped

from headstart.block.checks import PLAIN
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.exactness import same_tokens
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.model import TorchModel
from headstart.testing.fake_kv import IDENTITY
from headstart.tier.base import ReadRange
from headstart.tier.memory import MemoryTier
from odd_models import RECURRENT

Folders = Callable[..., Path]
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def model(tiny_model_folder: Folders) -> TorchModel:
    kind, config = RECURRENT["qwen3.5, gated delta nets"]
    return loaded(tiny_model_folder(kind, **config))


class RottenStates:
    """A tier that stands for a disk, on which every state that is `bad` reads as it should not."""

    trusted = False
    sealing = PLAIN
    in_memory = False
    name = "disk"

    def __init__(self, state_bytes: int) -> None:
        self.inner = MemoryTier(64 << 20)
        self.bad = False
        self._state_bytes = -(-state_bytes // 4096) * 4096

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.inner, verb)

    def read(self, reads: Sequence[ReadRange]) -> int:
        total = self.inner.read(reads)
        for read in reads:
            info = self.inner.info(read.extent)
            if self.bad and info is not None and read.offset >= info.extent_bytes - self._state_bytes:
                read.buffers[0][0] ^= 1
        return total


def cached(model: TorchModel, *tiers: Any, **settings: Any) -> TorchEngine:
    representation = model.shape.representation(query_heads=model.heads)
    cache = PrefixCache(tiers or [MemoryTier(64 << 20)], identity=IDENTITY, representation=representation)
    return engine_of(model, context=1024, chunk_tokens=256, cache=cache, **settings)


def settled(engine: TorchEngine) -> None:
    eventually(lambda: engine.load().kv_used_bytes == 0)


def asked(engine: TorchEngine, prompt: Sequence[int], count: int = 8) -> tuple[list[int], int]:
    """The answer, once all of it is saved, and how many tokens of the prompt came from the cache."""
    answer = ask(engine, prompt, count)
    last = answer.result()
    assert last.finish == "length", last
    assert last.receipt is not None
    settled(engine)
    return answer.tokens, last.receipt.cached_tokens


def assert_as_alone(engine: TorchEngine, prompt: Sequence[int], tokens: list[int]) -> None:
    alone = ask(engine, prompt, len(tokens), use_cache=False)
    alone.result()
    assert same_tokens(engine.next_logits, prompt, alone.tokens, tokens, tolerance=TOLERANCE)


def test_the_same_prompt_goes_on_from_the_last_block_before_its_end(model: TorchModel) -> None:
    with cached(model) as engine:
        prompt = some_tokens(320)
        first, none = asked(engine, prompt)
        again, hit = asked(engine, prompt)
        assert (none, hit) == (0, 256)
        assert_as_alone(engine, prompt, first)
        assert_as_alone(engine, prompt, again)


def test_a_prompt_that_begins_alike_goes_on_from_a_state_kept_on_the_way(model: TorchModel) -> None:
    with cached(model, save_every=128) as engine:
        beginning = some_tokens(300, seed=1)
        asked(engine, [*beginning, *some_tokens(200, seed=2)])
        prompt = [*beginning, *some_tokens(50, seed=3)]
        tokens, hit = asked(engine, prompt)
        assert hit == 256
        assert_as_alone(engine, prompt, tokens)


def test_where_prompts_were_seen_to_part_the_next_one_goes_on(model: TorchModel) -> None:
    with cached(model) as engine:
        beginning = some_tokens(270, seed=20)
        prompts = [[*beginning, *some_tokens(90, seed=seed)] for seed in (21, 22, 23)]
        answers = [asked(engine, prompt) for prompt in prompts]
        assert [hit for _, hit in answers] == [0, 0, 256]  # the second one sees where they part, and leaves a state there
        for prompt, (tokens, _) in zip(prompts, answers, strict=True):
            assert_as_alone(engine, prompt, tokens)


def test_a_request_that_gives_way_goes_on_from_its_state(model: TorchModel) -> None:
    with cached(model, full_contexts=1.6, patience_s=0.2, room_tokens=64) as engine:
        prompts = [some_tokens(300, seed=seed) for seed in (30, 31, 32)]
        answers = [ask(engine, prompt, 150) for prompt in prompts]
        for answer in answers:
            assert answer.result().finish == "length", answer.last
        settled(engine)
        assert engine.load().counters.get("preempted_memory", 0) + engine.load().counters.get("preempted_place", 0) > 0
        assert engine.load().counters["resumed_tokens"] > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_as_alone(engine, prompt, answer.tokens)


def test_a_conversation_goes_on_from_the_end_of_its_last_answer(model: TorchModel) -> None:
    with cached(model) as engine:
        prompt = some_tokens(150, seed=4)
        answer, _ = asked(engine, prompt, 120)
        longer = [*prompt, *answer, *some_tokens(30, seed=5)]
        tokens, hit = asked(engine, longer)
        assert hit == 256  # 150 + 119 computed tokens, in whole blocks
        assert_as_alone(engine, longer, tokens)


def test_the_floor_of_a_hit_begins_each_round_at_the_same_state(model: TorchModel) -> None:
    with cached(model) as engine:
        prompt = some_tokens(330, seed=24)
        asked(engine, prompt)
        assert len(engine.measure_floor(prompt, 320, rounds=3)) == 3
        assert len(engine.measure_floor(prompt, 100, rounds=2)) == 2, "where no state was kept"


def cached_of(answer: Answer) -> int:
    receipt = answer.result().receipt
    assert receipt is not None
    return receipt.cached_memory_tokens


def test_requests_that_begin_alike_at_once_compute_their_beginning_once(model: TorchModel) -> None:
    beginning = some_tokens(130, seed=6)
    prompts = [*([*beginning, *some_tokens(20, seed=seed)] for seed in (7, 8, 9)), some_tokens(130, seed=6)]
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    with stepped(model, cache=cache, max_running=4) as engine:
        answers = [ask(engine, prompt, 8) for prompt in prompts]
        finish(engine, *answers)
        assert [cached_of(answer) for answer in answers] == [0, 128, 128, 128]
        assert engine.load().counters["prefixes_shared"] == 3
    with cached(model) as engine:
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_as_alone(engine, prompt, answer.tokens)


def test_who_comes_when_the_state_has_gone_on_computes_for_itself(model: TorchModel) -> None:
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    prompt = some_tokens(150, seed=6)
    with stepped(model, cache=cache) as engine:
        first = ask(engine, prompt, 8)
        while not first.tokens:
            engine._round()
        cache.states.clear()  # as if its save were still under way
        second = ask(engine, prompt, 8)
        finish(engine, first, second)
        assert cached_of(second) == 0
        assert second.tokens == first.tokens


def test_who_waits_for_a_state_does_not_wait_for_a_request_that_is_gone(model: TorchModel) -> None:
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    prompt = some_tokens(300, seed=6)
    with stepped(model, cache=cache, chunk_tokens=64) as engine:
        first, second = ask(engine, prompt, 8, id="first"), ask(engine, prompt, 8)
        engine._round()
        engine.abort("first")
        finish(engine, first, second)
        assert second.result().finish == "length"
        assert cached_of(second) == 0


def test_what_an_aborted_prompt_has_reached_is_kept_up_to_its_last_state(model: TorchModel) -> None:
    with cached(model, save_every=128) as engine:
        prompt = some_tokens(900, seed=10)
        answer = ask(engine, prompt, 100, id="aborted")
        eventually(lambda: engine.load().counters.get("states_kept", 0) >= 2)
        engine.abort("aborted")
        assert answer.result().finish == "abort"
        settled(engine)
        tokens, hit = asked(engine, prompt)
        assert hit >= 256
        assert_as_alone(engine, prompt, tokens)


def test_a_state_that_rots_costs_the_hit_and_nothing_else(model: TorchModel) -> None:
    assert model.shape.state is not None
    tier = RottenStates(model.shape.state.nbytes)
    with cached(model, tier, save_every=128) as engine:
        prompt = some_tokens(330, seed=11)
        asked(engine, prompt)
        tier.bad = True
        tokens, hit = asked(engine, prompt)
        assert hit == 0
        assert_as_alone(engine, prompt, tokens)
        tier.bad = False
        tokens, hit = asked(engine, prompt)
        assert hit == 320, "it was saved anew"
        assert_as_alone(engine, prompt, tokens)


def test_without_memory_for_a_copy_nothing_is_kept_and_the_answer_is_the_same(
    model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVMemory, "copy_state", lambda *_: None)
    with cached(model) as engine:
        prompt = some_tokens(200, seed=12)
        tokens, _ = asked(engine, prompt)
        assert engine.load().counters["states_not_kept"] > 0
        assert asked(engine, prompt)[1] == 0
        assert_as_alone(engine, prompt, tokens)


class Held:
    """An engine over a cache whose loads the test moves on, with the KV and state of one prompt in it."""

    def __init__(self, model: TorchModel) -> None:
        self.cache = HeldCache(model.shape.representation(query_heads=model.heads))
        self.engine = engine_of(model, chunk_tokens=64, cache=self.cache)  # type: ignore[arg-type]
        self.prompt = some_tokens(200, seed=13)
        self.want, _ = asked(self.engine, self.prompt)

    def ask(self, **more: Any) -> Answer:
        return ask(self.engine, self.prompt, 8, **more)


@pytest.fixture
def held(model: TorchModel) -> Iterator[Held]:
    held = Held(model)
    with held.engine:
        yield held
        settled(held.engine)


def test_nothing_is_computed_before_the_state_is_there(held: Held) -> None:
    answer = held.ask()
    load = held.cache.next_load()
    steps = held.engine.load().counters["steps"]
    load.bring(*range(len(held.cache.representation.layer_bytes)))
    assert not answer.first_token.wait(0.2)
    assert held.engine.load().counters["steps"] == steps
    load.bring_state()
    load.end()
    assert answer.result().finish == "length"
    assert answer.tokens == held.want


def test_a_state_that_fails_has_all_of_the_prompt_computed(held: Held) -> None:
    answer = held.ask()
    load = held.cache.next_load()
    load.fail()
    load.end(usable_tokens=0)
    last = answer.result()
    assert answer.tokens == held.want
    assert last.receipt is not None
    assert last.receipt.cached_tokens == 0


def test_a_layer_that_fails_behind_the_state_has_all_of_the_prompt_computed(held: Held) -> None:
    answer = held.ask()
    load = held.cache.next_load()
    load.bring_state()
    eventually(lambda: load.waited)
    load.fail()
    load.end(usable_tokens=0)
    assert answer.result().finish == "length"
    assert answer.tokens == held.want


def test_nothing_is_saved_of_a_prompt_whose_load_failed_before_it_was_computed(held: Held) -> None:
    saves = len(held.cache.saves)
    held.ask(id="gone")
    load = held.cache.next_load()
    load.bring_state()
    eventually(lambda: load.waited)
    load.fail()
    held.engine.abort("gone")
    load.overwrite(7)
    load.end(usable_tokens=0)
    settled(held.engine)
    assert len(held.cache.saves) == saves


def test_a_step_given_up_for_new_mail_goes_on_from_the_loaded_state(held: Held) -> None:
    answer = held.ask()
    load = held.cache.next_load()
    load.bring_state()
    eventually(lambda: load.waited)
    other = ask(held.engine, some_tokens(30, seed=14), 4)
    assert other.result().finish == "length"
    load.bring(*range(len(held.cache.representation.layer_bytes)))
    load.end()
    assert answer.result().finish == "length"
    assert answer.tokens == held.want


def test_an_abort_while_the_state_is_read_frees_everything_with_the_last_read(held: Held) -> None:
    answer = held.ask(id="gone")
    load = held.cache.next_load()
    held.engine.abort("gone")
    assert answer.result().finish == "abort"
    assert held.engine.load().kv_used_bytes > 0
    load.end(usable_tokens=0)
    settled(held.engine)


def test_a_state_that_was_copied_is_still_saved_after_its_request_grew(model: TorchModel) -> None:
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    with stepped(model, cache=cache, room_tokens=64) as engine:
        answer = ask(engine, some_tokens(100, seed=40), 140)  # room for 192 tokens: it grows right behind a copy
        while not engine.load().counters.get("kv_grown", 0):
            engine._round()
        (sequence,) = engine._roster.running
        assert list(sequence.boundaries) == [192]
        engine.abort(sequence.request.id)
        finish(engine, answer)
    assert max(len(tokens) for tokens in cache.states) == 192
