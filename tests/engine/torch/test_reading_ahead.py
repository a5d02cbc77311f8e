"""Stored prefixes of requests that wait are read while others are computed, and give way to these at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from held_cache import HeldCache, eventually
from reference import Answer, ask, engine_of, finish, loaded, some_tokens, stepped

from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.model import TorchModel
from headstart.testing.fake_kv import IDENTITY
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier
from headstart.tier.pool import PoolTier, Timing

PROMPT = some_tokens(200)
LAYERS = range(3)
Start = Callable[..., tuple[TorchEngine, list[int]]]


@pytest.fixture(scope="module")
def model(tiny_model_folder: Callable[..., Path]) -> TorchModel:
    return loaded(tiny_model_folder("llama"))


@pytest.fixture
def cache(model: TorchModel) -> HeldCache:
    return HeldCache(model.shape.representation(query_heads=model.heads))


@pytest.fixture
def start(model: TorchModel, cache: HeldCache) -> Iterator[Start]:
    """Start an engine that runs one request at a time and has answered PROMPT."""
    engines = []

    def started(**settings: Any) -> tuple[TorchEngine, list[int]]:
        engine = engine_of(model, cache=cache, max_running=1, **settings)  # type: ignore[arg-type]
        engines.append(engine)
        answer = ask(engine, PROMPT, 5)
        answer.result()
        eventually(lambda: engine.load().kv_used_bytes == 0)
        return engine, answer.tokens

    yield started
    for engine in engines:
        for load in cache.loads:
            load.end(load.usable_tokens)
        eventually(lambda engine=engine: engine.load().kv_used_bytes == 0)  # type: ignore[misc]
        assert all(lease.releases for lease in cache.leases)
        assert not {name for name in engine.load().counters if name.endswith("_faults")}
        engine.close()


def test_what_waits_is_read_while_another_is_computed(start: Start, cache: HeldCache) -> None:
    engine, cold = start()
    busy = ask(engine, some_tokens(20, seed=3), 450, id="busy", use_cache=False)
    assert busy.first_token.wait(30)
    answer = ask(engine, PROMPT, 5)
    load = cache.next_load()
    assert busy.last is None
    load.bring(*LAYERS)
    load.end()
    engine.abort("busy")
    receipt = answer.result().receipt
    assert answer.tokens == cold
    assert receipt is not None
    assert receipt.cached_tokens == 192
    assert len(cache.loads) == 1


def test_no_more_than_two_are_read_ahead(start: Start, cache: HeldCache) -> None:
    engine, cold = start(full_contexts=8)
    busy = ask(engine, some_tokens(20, seed=3), 450, id="busy", use_cache=False)
    assert busy.first_token.wait(30)
    answers = [ask(engine, PROMPT, 5) for _ in range(4)]
    cache.next_load(1)
    busy.result()
    number = 0
    while any(answer.last is None for answer in answers):
        if len(cache.loads) > number:
            cache.loads[number].bring(*LAYERS)
            cache.loads[number].end()
            number += 1
    assert all(answer.tokens == cold for answer in answers)


def test_memory_that_a_running_request_needs_is_taken_back(start: Start, cache: HeldCache) -> None:
    engine, cold = start(full_contexts=2.2, room_tokens=64)
    busy = ask(engine, some_tokens(20, seed=3), 490, id="busy", use_cache=False)
    assert busy.first_token.wait(30)
    answer = ask(engine, PROMPT, 5)
    load = cache.next_load()
    eventually(lambda: load.cancelled or busy.last is not None)
    assert load.cancelled
    load.overwrite(0xAA)
    load.end(0)
    assert busy.result().finish == "length"
    again = cache.next_load(1)
    again.bring(*LAYERS)
    again.end()
    answer.result()
    assert answer.tokens == cold
    assert engine.load().counters["read_ahead_in_vain"] == 1
    assert engine.load().counters.get("preempted_memory", 0) == 0


def test_aborting_who_waits_frees_what_was_read_for_it(start: Start, cache: HeldCache) -> None:
    engine, _ = start()
    busy = ask(engine, some_tokens(20, seed=3), 450, id="busy", use_cache=False)
    assert busy.first_token.wait(30)
    answer = ask(engine, PROMPT, 5, id="x")
    load = cache.next_load()
    engine.abort("x")
    assert answer.result().finish == "abort"
    assert load.cancelled
    load.end(0)
    engine.abort("busy")
    busy.result()


def test_without_memory_for_it_what_waits_is_brought_to_the_memory_tier(start: Start, cache: HeldCache) -> None:
    engine, cold = start(full_contexts=1)
    busy = ask(engine, some_tokens(300, seed=3), 200, id="busy", use_cache=False)
    assert busy.first_token.wait(30)
    answer = ask(engine, PROMPT, 5)
    eventually(lambda: cache.promoted != [] or busy.last is not None)
    assert cache.promoted == [tuple(PROMPT)]
    load = cache.next_load()
    load.bring(*LAYERS)
    load.end()
    answer.result()
    assert answer.tokens == cold


def test_what_was_read_ahead_and_taken_back_is_counted_once_and_only_if_it_was_used(
    model: TorchModel, cache: HeldCache
) -> None:
    with stepped(model, cache=cache, max_running=1, full_contexts=1.5) as engine:
        finish(engine, ask(engine, PROMPT, 5))
        before = engine.load().counters
        busy = ask(engine, some_tokens(20, seed=3), 440, id="busy", use_cache=False)
        engine._round()
        answer = ask(engine, PROMPT, 5)
        engine._round()
        (load,) = cache.loads
        load.bring(*LAYERS)
        load.end(192)
        engine._round()
        (waiting,) = engine._roster.waiting
        assert waiting.computed == 192
        assert engine.load().counters.get("cached_disk_tokens", 0) == 0  # it is no hit yet
        assert engine._preemption.take_back()
        cache.stored.clear()
        engine.abort("busy")
        finish(engine, busy, answer)
        receipt = answer.result().receipt
        assert receipt is not None
        assert receipt.cached_tokens == 0
        assert engine.load().counters["prompt_tokens"] - before["prompt_tokens"] == 20 + len(PROMPT)
        assert engine.load().counters.get("cached_disk_tokens", 0) == 0


def test_what_was_read_ahead_is_a_hit_once_its_request_runs(model: TorchModel, cache: HeldCache) -> None:
    with stepped(model, cache=cache, max_running=1) as engine:
        finish(engine, ask(engine, PROMPT, 5))
        ask(engine, some_tokens(20, seed=3), 440, id="busy", use_cache=False)
        engine._round()
        answer = ask(engine, PROMPT, 5)
        engine._round()
        cache.loads[0].bring(*LAYERS)
        cache.loads[0].end(192)
        engine._round()
        engine.abort("busy")
        finish(engine, answer)
        assert answer.result().receipt.cached_disk_tokens == 192  # type: ignore[union-attr]
        assert engine.load().counters["cached_disk_tokens"] == 192


def bring_what_comes(cache: HeldCache, first: int, answer: Answer) -> None:
    """Bring every load from number `first` on, until the answer has ended."""
    while answer.last is None:
        for load in cache.loads[first:]:
            first += 1
            load.bring(*LAYERS)
            load.end(192)
        time.sleep(0.001)


@pytest.mark.parametrize("taken_back", [False, True])
def test_who_gave_way_keeps_its_hit_whatever_is_read_ahead_for_it(
    model: TorchModel, cache: HeldCache, taken_back: bool
) -> None:
    with stepped(model, cache=cache, max_running=1) as engine:
        finish(engine, ask(engine, PROMPT, 5))
        answer = ask(engine, PROMPT, 150)
        engine._take_mail()
        engine._admission.admit()
        for load in cache.loads:
            load.bring(*LAYERS)
            load.end(192)
        engine._round()
        busy = ask(engine, some_tokens(20, seed=3), 300, id="busy", use_cache=False, priority=1)
        for _ in range(2):
            engine._round()
        assert len(cache.loads) == 2  # of what it had; read ahead
        cache.loads[-1].bring(*LAYERS)
        cache.loads[-1].end(192)
        engine._round()
        if taken_back:
            assert engine._preemption.take_back()
        bringing = Thread(target=bring_what_comes, args=(cache, 2, answer))
        bringing.start()  # a pass waits for what is read anew
        engine.abort("busy")
        engine._round()
        finish(engine, busy, answer)
        bringing.join()
        assert answer.result().receipt.cached_disk_tokens == 192  # type: ignore[union-attr]
        assert engine.load().counters["cached_disk_tokens"] == 192


def test_an_idle_engine_brings_a_conversation_that_is_due_from_disk_to_memory(
    model: TorchModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End to end: the third turn finds in memory what had gone to the disk alone."""
    memory, disk = MemoryTier(16 * model.shape.region_bytes(64)), DiskTier.open(tmp_path, capacity_bytes=64 << 20)
    representation = model.shape.representation(query_heads=model.heads)
    cache = PrefixCache([memory, disk], identity=IDENTITY, representation=representation)
    with stepped(model, cache=cache) as engine:

        def turn(prompt: list[int], **more: str) -> Answer:
            answer = ask(engine, prompt, 3, **more)
            finish(engine, answer)
            eventually(lambda: engine.load().kv_used_bytes == 0)  # all of it is saved
            return answer

        def where() -> dict[str, int]:
            with cache.match(PROMPT) as lease:
                return lease.tokens_by_tier

        first, second = turn(PROMPT, session="s"), turn(PROMPT, session="s")
        for seed in (7, 8, 9):  # in memory there is no room for all
            turn(some_tokens(450, seed=seed))
        assert where() == {"disk": 192}
        assert engine._loads._conversations is not None
        (one,) = engine._loads._conversations._sessions.values()
        monkeypatch.setattr("headstart.engine.serving.loading.time", SimpleNamespace(monotonic=lambda: one.pace.due_s))
        engine._roster.wake.clear()
        engine._use_idle_moment()
        eventually(lambda: where() == {"memory": 192})
        third = turn(PROMPT, session="s")
        assert third.tokens == second.tokens == first.tokens
        receipt = third.result().receipt
        assert receipt is not None
        assert (receipt.cached_memory_tokens, receipt.cached_disk_tokens) == (192, 0)


@pytest.mark.parametrize("room", [True, False], ids=["into its own KV", "into the memory tier"])
def test_what_a_pool_has_of_one_that_waits_is_read_while_another_is_computed(
    model: TorchModel, tmp_path: Path, room: bool
) -> None:
    """End to end: another machine stored it, and who waits has it before its turn comes."""

    def cache_over(*tiers: Tier) -> PrefixCache:
        representation = model.shape.representation(query_heads=model.heads)
        pool = PoolTier.open(tmp_path, capacity_bytes=64 << 20, timing=Timing())
        return PrefixCache([*tiers, pool], identity=IDENTITY, representation=representation, match_timeout_s=20.0)

    with stepped(model, cache=cache_over()) as engine:
        cold = ask(engine, PROMPT, 5)
        finish(engine, cold)
        eventually(lambda: engine.load().kv_used_bytes == 0)
    cache = cache_over(MemoryTier(16 * model.shape.region_bytes(64)))
    with stepped(model, cache=cache, max_running=1, full_contexts=2.5 if room else 1) as engine:
        busy = ask(engine, some_tokens(300, seed=3), 200, id="busy", use_cache=False)
        engine._round()
        answer = ask(engine, PROMPT, 5)
        engine._round()
        eventually(lambda: cache.statistics().counters.get("loaded_tokens_pool", 0) == 192)
        if not room:
            eventually(lambda: not cache.promoting)
            with cache.match(PROMPT) as lease:
                assert lease.tokens_by_tier == {"memory": 192}
        assert busy.last is None
        engine.abort("busy")
        finish(engine, busy, answer)
        assert answer.tokens == cold.tokens
        receipt = answer.result().receipt
        assert receipt is not None
        assert (receipt.cached_tokens, receipt.cached_memory_tokens) == (192, 0 if room else 192)
