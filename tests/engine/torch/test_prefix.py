"""The engine's part in loading and saving: layer by layer, and nothing freed too early, too late or twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from held_cache import HeldCache, HeldLoad, eventually
from reference import Answer, ask, engine_of, loaded, some_tokens

from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.model import TorchModel

Folders = Callable[..., Path]
PROMPT = some_tokens(200)  # three full blocks, and eight tokens
LAYERS = range(3)


@pytest.fixture(scope="module")
def model(tiny_model_folder: Folders) -> TorchModel:
    return loaded(tiny_model_folder("llama"))


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, model: TorchModel) -> KVMemory:
    """KV in host memory; and the path of GPUs with the CPU as the device."""
    capacity = 3 * model.shape.region_bytes(512)
    return KVMemory(model.shape, capacity, context_tokens=512, device=None if request.param == "host" else torch.device("cpu"))


@pytest.fixture
def cache(model: TorchModel) -> HeldCache:
    return HeldCache(model.shape.representation(query_heads=model.heads))


@pytest.fixture
def engine(model: TorchModel, memory: KVMemory, cache: HeldCache) -> Iterator[TorchEngine]:
    with engine_of(model, memory=memory, cache=cache, load_timeout_s=30.0) as engine:  # type: ignore[arg-type]
        yield engine
        eventually(lambda: memory.used_bytes == 0)
        assert all(lease.releases for lease in cache.leases)
        assert engine.load().counters.get("engine_faults", 0) == 0
    assert cache.closed == 1


@pytest.fixture
def cold(engine: TorchEngine) -> list[int]:
    """The answer to PROMPT without the cache, whose three blocks are then in it."""
    answer = ask(engine, PROMPT, 5)
    answer.result()
    eventually(lambda: engine.load().kv_used_bytes == 0)
    return answer.tokens


def _cached(answer: Answer) -> int:
    receipt = answer.result().receipt
    assert receipt is not None
    return receipt.cached_tokens


def test_prompt_and_answer_are_saved_less_the_last_token(engine: TorchEngine, cache: HeldCache, cold: list[int]) -> None:
    assert cache.saves == [tuple(PROMPT)]  # the answer filled no further block
    answer = ask(engine, PROMPT[:60], 69)
    answer.result()
    assert cache.saves[1:] == [(*PROMPT[:60], *answer.tokens[:68])]  # 128 tokens: the prompt alone filled no block


def test_a_prompt_that_is_only_to_be_kept_is_there_for_the_next_request(engine: TorchEngine, cache: HeldCache) -> None:
    ask(engine, PROMPT, 0, keep_s=60.0).result()
    assert cache.saves == [tuple(PROMPT)]
    assert cache.terms[0]["keep_s"] == 60.0
    answer = ask(engine, PROMPT, 5)
    load = cache.next_load()
    load.bring(*LAYERS)
    load.end()
    assert _cached(answer) == 192


def test_no_more_is_kept_than_whoever_asks_lets_be_kept(engine: TorchEngine, cache: HeldCache) -> None:
    ask(engine, PROMPT, 60, keep_tokens=130).result()
    ask(engine, some_tokens(200, seed=5), 60, keep_tokens=63).result()
    ask(engine, some_tokens(200, seed=6), 60, use_cache=False).result()
    assert cache.saves == [tuple(PROMPT[:130])]


def test_each_layer_is_attended_as_soon_as_it_is_there(engine: TorchEngine, cache: HeldCache, cold: list[int]) -> None:
    answer = ask(engine, PROMPT, 5)
    load = cache.next_load()
    for layer in LAYERS:
        assert answer.last is None
        load.bring(layer)
    assert answer.first_token.wait(30)  # before the load says that it is done
    answer.result()
    assert not load.done
    assert engine.load().kv_used_bytes > 0  # reads may still touch it
    load.end()
    assert answer.tokens == cold
    assert _cached(answer) == 192
    assert answer.result().receipt.bytes_read == load.bytes_read > 0  # type: ignore[union-attr]


def test_a_load_that_is_done_before_its_step_is_used_as_well(engine: TorchEngine, cache: HeldCache, cold: list[int]) -> None:
    busy = ask(engine, some_tokens(20), 200, id="busy")
    assert busy.first_token.wait(30)
    answer = ask(engine, PROMPT, 5)
    load = cache.next_load()
    load.bring(*LAYERS)
    load.end()
    assert _cached(answer) == 192
    assert answer.tokens == cold
    engine.abort("busy")
    busy.result()


def test_a_slow_load_does_not_hold_up_other_requests(engine: TorchEngine, cache: HeldCache, cold: list[int]) -> None:
    slow = ask(engine, PROMPT, 5)
    load = cache.next_load()
    load.bring(0)  # its step has begun and waits for layer 1
    other = ask(engine, some_tokens(30), 10)
    assert other.result().finish == "length"
    assert slow.last is None
    load.bring(1, 2)
    load.end()
    assert slow.result().finish == "length"
    assert slow.tokens == cold
    assert _cached(slow) == 192


@pytest.mark.parametrize("usable", [0, 64, 128])
@pytest.mark.parametrize("brought", [0, 1, 2])
def test_a_load_that_fails_keeps_the_good_part_and_computes_the_rest(
    engine: TorchEngine, cache: HeldCache, cold: list[int], usable: int, brought: int
) -> None:
    answer = ask(engine, PROMPT, 5)
    load = cache.next_load()
    load.bring(*range(brought))
    load.fail()
    if usable:
        load.bring(*LAYERS)
    load.end(usable)
    assert answer.result().finish == "length"
    assert answer.tokens == cold
    assert _cached(answer) == usable
    assert answer.result().receipt.notes  # type: ignore[union-attr]
    assert engine.load().counters["loads_cut_short"] == 1


def test_a_load_past_its_deadline_is_computed_in_fresh_memory(
    model: TorchModel, memory: KVMemory, cache: HeldCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(model, memory=memory, cache=cache, load_timeout_s=0.05) as engine:  # type: ignore[arg-type]
        first = ask(engine, PROMPT, 5)
        first.result()
        answer = ask(engine, PROMPT, 5)
        load = cache.next_load()
        load.bring(0)
        assert answer.first_token.wait(30)
        load.overwrite(0xAA)  # late bytes land where nobody looks
        assert answer.result().finish == "length"
        assert answer.tokens == first.tokens
        assert _cached(answer) == 0
        assert load.cancelled
        assert engine.load().kv_used_bytes > 0
        load.end(0)
        eventually(lambda: memory.used_bytes == 0)
        assert engine.load().counters["loads_timed_out"] == 1


@pytest.mark.parametrize("stuck", ["load", "save"])
def test_reads_and_writes_that_never_end_hold_no_queue(model: TorchModel, cache: HeldCache, stuck: str) -> None:
    """The KV memory holds one context only, and all of it is held."""
    settings = {"full_contexts": 1, "load_timeout_s": 0.05, "room_tokens": 512}
    with engine_of(model, cache=cache, **settings) as engine:  # type: ignore[arg-type]
        cache.hold_saves = stuck == "save"
        first = ask(engine, PROMPT, 300)
        first.result()
        answers = [ask(engine, PROMPT, 300) for _ in range(3)]
        for answer in answers:
            assert answer.result().finish == "length"
            assert answer.tokens == first.tokens
            assert _cached(answer) == 0
        assert "without the cache" in answers[-1].result().receipt.notes[-1]  # type: ignore[union-attr]
        load = engine.load()
        assert load.counters["spare_memory_used"] == 3
        assert 0 < load.kv_used_bytes <= load.kv_capacity_bytes  # of the spare nothing is held any more
        for held in cache.loads:
            held.end(0)
        for ticket in cache.tickets:
            ticket.end()
        cache.hold_saves = False
        eventually(lambda: engine.load().kv_used_bytes == 0)
        assert ask(engine, some_tokens(200, seed=2), 300).result().finish == "length"
        assert engine.load().counters["spare_memory_used"] == 3


def test_a_request_for_which_there_is_no_memory_at_all_ends_with_a_sentence(
    model: TorchModel, memory: KVMemory, cache: HeldCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(model, memory=memory, cache=cache, load_timeout_s=0.05) as engine:  # type: ignore[arg-type]
        with monkeypatch.context() as patched:
            patched.setattr(memory, "allocate", lambda tokens: None)
            patched.setattr(memory, "allocate_spare", lambda tokens: None)
            for answer in [ask(engine, PROMPT) for _ in range(2)]:
                assert answer.result().finish == "error"
                assert "no memory" in str(answer.result().error)
        assert ask(engine, PROMPT).result().finish == "length"


def test_aborting_during_a_load_frees_the_memory_with_the_last_read(
    engine: TorchEngine, memory: KVMemory, cache: HeldCache, cold: list[int]
) -> None:
    saves = len(cache.saves)
    answer = ask(engine, PROMPT, 5, id="x")
    load = cache.next_load()
    load.bring(0)
    engine.abort("x")
    assert answer.result().finish == "abort"
    assert load.cancelled
    assert memory.used_bytes > 0
    assert len(cache.saves) == saves  # nothing of it is known to be good
    load.end(0)
    eventually(lambda: memory.used_bytes == 0)


def test_closing_during_a_load_does_not_wait_for_it(model: TorchModel, memory: KVMemory, cache: HeldCache) -> None:
    engine = engine_of(model, memory=memory, cache=cache)  # type: ignore[arg-type]
    ask(engine, PROMPT, 5).result()
    answer = ask(engine, PROMPT, 5)
    load = cache.next_load()
    engine.close()
    assert answer.result().finish == "abort"
    load.end(0)
    assert memory.used_bytes == 0


def test_kv_is_kept_until_it_is_saved(engine: TorchEngine, memory: KVMemory, cache: HeldCache) -> None:
    cache.hold_saves = True
    ask(engine, PROMPT, 5).result()
    assert memory.used_bytes > 0
    for ticket in cache.tickets:
        ticket.end()
    eventually(lambda: memory.used_bytes == 0)


def test_what_was_computed_is_saved_when_a_request_is_aborted(engine: TorchEngine, cache: HeldCache) -> None:
    answer = ask(engine, PROMPT, 300, id="x")
    eventually(lambda: len(answer.tokens) > 70)
    engine.abort("x")
    answer.result()
    saved = cache.saves[-1]
    assert saved[:200] == tuple(PROMPT)
    assert saved == (*PROMPT, *answer.tokens)[: len(saved)]
    assert len(saved) >= 200 + 70


def test_a_request_may_leave_the_cache_alone(engine: TorchEngine, cache: HeldCache, cold: list[int]) -> None:
    matches, saves = len(cache.leases), len(cache.saves)
    answer = ask(engine, PROMPT, 100, use_cache=False)
    answer.result()
    assert answer.tokens[:5] == cold
    assert (len(cache.leases), len(cache.saves)) == (matches, saves)


def test_a_cache_that_breaks_its_promise_costs_no_answer(
    engine: TorchEngine, cache: HeldCache, cold: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> HeldLoad:
        raise ValueError("a bug")

    monkeypatch.setattr(cache, "match", broken)
    monkeypatch.setattr(cache, "save", broken)
    answer = ask(engine, PROMPT, 5)
    assert answer.result().finish == "length"
    assert answer.tokens == cold
    assert "a bug" in caplog.text
