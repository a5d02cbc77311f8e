"""A stored prefix whose reading is slow, late or broken: what was computed and what was read, and always the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from held_cache import HeldCache, HeldLease, HeldLoad, eventually
from reference import Answer, ask, engine_of, finish, loaded, some_tokens, stepped

from headstart.cache.lease import Stretch
from headstart.engine.base import Receipt
from headstart.engine.speeds import Speeds
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.model import TorchModel
from headstart.metrics import Counters

CONTEXT = 1024
PROMPT = some_tokens(650)  # ten full blocks, and ten tokens
BLOCKS = 10
LAYERS = range(3)


class Taught(Speeds):
    """Computing a block takes a second; reading one from the disk takes `block_s`. Nothing that is measured changes that."""

    def __init__(self, block_s: float | None, block_bytes: int) -> None:
        self._now = 0.0
        super().__init__(Counters(), chunk_tokens=64, clock=lambda: self._now)
        super().passed(64, 0.0, 1.0)
        for _ in range(3 if block_s is not None else 0):
            self.asked("disk", block_bytes)
            self._now += block_s or 0.0
            self.came("disk", block_bytes, asked_bytes=block_bytes)

    def passed(self, *_: Any, **__: Any) -> None:
        return


@pytest.fixture(scope="module")
def model(tiny_model_folder: Callable[..., Path]) -> TorchModel:
    return loaded(tiny_model_folder("llama"))


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, model: TorchModel) -> KVMemory:
    device = None if request.param == "host" else torch.device("cpu")
    return KVMemory(model.shape, 3 * model.shape.region_bytes(CONTEXT), context_tokens=CONTEXT, device=device)


@pytest.fixture
def cache(model: TorchModel) -> HeldCache:
    return HeldCache(model.shape.representation(query_heads=model.heads))


@pytest.fixture
def start(model: TorchModel, memory: KVMemory, cache: HeldCache) -> Iterator[Callable[..., tuple[TorchEngine, list[int]]]]:
    """Start an engine that has answered PROMPT once: returns it, and the answer."""
    engines = []

    def started(block_s: float | None, **settings: Any) -> tuple[TorchEngine, list[int]]:
        block_bytes = sum(size or 0 for size in cache.representation.layer_bytes)
        speeds = Taught(block_s, block_bytes)
        engine = engine_of(model, context=CONTEXT, memory=memory, cache=cache, speeds=speeds, **settings)  # type: ignore[arg-type]
        engines.append(engine)
        answer = ask(engine, PROMPT, 5)
        answer.result()
        eventually(lambda: memory.used_bytes == 0)
        return engine, answer.tokens

    yield started
    for engine in engines:
        for load in cache.loads:
            load.end(load.usable_tokens)
        eventually(lambda: memory.used_bytes == 0)
        assert all(lease.releases for lease in cache.leases)
        counters = engine.load().counters
        assert not {name for name in counters if name.endswith("_faults")}
        engine.close()


def receipt_of(answer: Answer) -> Receipt:
    receipt = answer.result().receipt
    assert receipt is not None
    return receipt


def bring(load: HeldLoad) -> None:
    load.bring(*LAYERS)
    load.end()


def test_reading_comes_from_the_end_while_computing_comes_from_the_start(start: Any, cache: HeldCache) -> None:
    engine, cold = start(block_s=1.0)
    steps = engine.load().counters["steps"]
    answer = ask(engine, PROMPT, 5)
    number = 0
    while answer.last is None:
        if len(cache.loads) > number:
            bring(cache.loads[number])
            number += 1
    receipt = receipt_of(answer)
    assert answer.tokens == cold
    assert receipt.decision.choice == "mixed"
    assert receipt.decision.matched_tokens == 640
    assert receipt.decision.load_s == pytest.approx(10.0)
    assert receipt.decision.compute_s == pytest.approx(10.0)
    assert [load.end_tokens for load in cache.loads] == [640 - 64 * i for i in range(len(cache.loads))]
    computed = engine.load().counters["stored_tokens_computed"]
    assert 0 < computed < 640
    assert receipt.cached_disk_tokens == 640 - computed
    assert engine.load().counters["steps"] > steps + 5
    assert any("were computed while" in note for note in receipt.notes)
    assert engine.load().counters["load_decisions_mixed"] == 1


def test_ranges_that_never_come_are_computed(start: Any, cache: HeldCache, memory: KVMemory) -> None:
    engine, cold = start(block_s=1.0)
    answer = ask(engine, PROMPT, 5)
    receipt = receipt_of(answer)
    assert answer.tokens == cold
    assert receipt.cached_tokens == 0
    assert len(cache.loads) == 2  # a bounded number under way
    assert all(load.cancelled for load in cache.loads)
    assert memory.used_bytes > 0  # of their own
    for load in cache.loads:
        load.overwrite(0xAA)
    again = ask(engine, PROMPT, 5)
    again.result()
    assert again.tokens == cold


def test_late_bytes_of_a_range_never_reach_what_was_computed(start: Any, cache: HeldCache) -> None:
    engine, cold = start(block_s=1.0)
    answer = ask(engine, PROMPT, 200)
    assert answer.first_token.wait(60)
    for load in cache.loads:
        load.bring(*LAYERS)
        load.overwrite(0xAA)
        load.end()
    answer.result()
    assert answer.tokens[:5] == cold
    assert receipt_of(answer).cached_tokens == 0


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_range_that_fails_costs_itself_and_what_lies_before_it(start: Any, cache: HeldCache, broken: int) -> None:
    engine, cold = start(block_s=0.9)
    answer = ask(engine, PROMPT, 5)
    for number in range(broken):
        bring(cache.next_load(number))
    load = cache.next_load(broken)
    load.fail()
    load.end(0)
    receipt = receipt_of(answer)
    assert answer.tokens == cold
    assert receipt.cached_disk_tokens in (broken * 64, 0 if not broken else broken * 64)
    assert len(cache.loads) <= broken + 2
    assert engine.load().counters["stored_tokens_computed"] == 640 - receipt.cached_disk_tokens


def test_a_hopeless_disk_is_not_read_at_all(start: Any, cache: HeldCache) -> None:
    engine, cold = start(block_s=500.0)
    answer = ask(engine, PROMPT, 5)
    receipt = receipt_of(answer)
    assert answer.tokens == cold
    assert cache.loads == []
    assert receipt.decision.choice == "compute"
    assert receipt.cached_tokens == receipt.bytes_read == 0
    assert receipt.notes == ("640 stored tokens were computed, in an estimated 10 s: reading takes 5e+03 s",)
    assert engine.load().counters["stored_tokens_computed"] == 640
    assert engine.load().counters["load_decisions_compute"] == 1


def test_a_fast_disk_is_loaded_layer_after_layer(start: Any, cache: HeldCache) -> None:
    engine, cold = start(block_s=0.001)
    answer = ask(engine, PROMPT, 5)
    bring(cache.next_load())
    assert receipt_of(answer).decision.choice == "load"
    assert receipt_of(answer).cached_tokens == 640
    assert answer.tokens == cold
    assert [(load.first_tokens, load.end_tokens) for load in cache.loads] == [(0, 640)]


@pytest.mark.parametrize("brought", [0, 1, 2])
@pytest.mark.parametrize("block_s", [None, 0.001], ids=["of unknown speed", "that was fast before"])
def test_a_load_that_does_not_come_is_overtaken(
    start: Any, cache: HeldCache, memory: KVMemory, block_s: float | None, brought: int
) -> None:
    engine, cold = start(block_s=block_s, hedge_after_s=0.0)
    answer = ask(engine, PROMPT, 5)
    load = cache.next_load()
    load.bring(*range(brought))
    ranges = [cache.next_load(1), cache.next_load(2)]
    assert load.cancelled
    load.overwrite(0xAA)  # lands where nobody looks
    receipt = receipt_of(answer)
    assert answer.tokens == cold
    assert receipt.cached_tokens == 0
    assert [one.end_tokens for one in ranges] == [640, 576]
    assert receipt.decision.choice == "mixed"
    assert "it is computed from the start meanwhile" in receipt.notes[0]
    assert engine.load().counters["load_waits_cut_short"] == 1


def test_a_load_is_overtaken_beside_memory_where_it_holds_all_there_is(model: TorchModel, cache: HeldCache) -> None:
    block_bytes = sum(size or 0 for size in cache.representation.layer_bytes)
    speeds = Taught(None, block_bytes)
    with engine_of(
        model,
        context=CONTEXT,
        full_contexts=1,
        room_tokens=CONTEXT,
        cache=cache,
        speeds=speeds,
        hedge_after_s=0.0,  # type: ignore[arg-type]
    ) as engine:
        first = ask(engine, PROMPT, 300)
        first.result()
        eventually(lambda: engine.load().kv_used_bytes == 0)
        answer = ask(engine, PROMPT, 300)
        load = cache.next_load()
        assert receipt_of(answer).cached_tokens == 0
        assert answer.tokens == first.tokens
        assert engine.load().counters["spare_memory_used"] == 1
        load.end(0)


def test_aborting_in_the_middle_frees_what_is_held_with_the_last_read(start: Any, cache: HeldCache, memory: KVMemory) -> None:
    engine, _ = start(block_s=1.0)
    busy = ask(engine, some_tokens(20, seed=3), 900, id="busy", use_cache=False)
    assert busy.first_token.wait(60)
    answer = ask(engine, PROMPT, 5, id="x")
    loads = [cache.next_load(0), cache.next_load(1)]
    engine.abort("x")
    assert answer.result().finish in ("abort", "length")
    engine.abort("busy")
    busy.result()
    eventually(lambda: all(load.cancelled for load in loads))
    assert memory.used_bytes > 0
    for load in loads:
        load.overwrite(0xAA)
        load.end(0)
    eventually(lambda: memory.used_bytes == 0)


def test_streams_go_on_beside_a_prompt_that_meets_its_prefix(start: Any, cache: HeldCache) -> None:
    engine, cold = start(block_s=1.0)
    stream = ask(engine, some_tokens(20, seed=3), 300, id="stream", use_cache=False)
    assert stream.first_token.wait(60)
    answer = ask(engine, PROMPT, 5)
    bring(cache.next_load(0))
    answer.result()
    assert answer.tokens == cold
    assert receipt_of(answer).cached_tokens >= 64
    stream.result()


def test_what_is_slow_in_memory_is_tried_twice_and_then_computed(
    model: TorchModel, cache: HeldCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is on a disk, so there is nothing to meet: it would be loaded the same way for ever."""
    monkeypatch.setattr(HeldLease, "stretches", property(lambda lease: [Stretch("memory", lease.tokens, 1 << 20, 1)]))
    speeds = Taught(None, 1 << 20)
    with stepped(model, context=CONTEXT, cache=cache, speeds=speeds, hedge_after_s=0.0) as engine:
        cold = ask(engine, PROMPT, 5)
        finish(engine, cold)
        answer = ask(engine, PROMPT, 5)
        finish(engine, answer, rounds=200)
        assert len(cache.loads) == 2
        assert answer.tokens == cold.tokens
        assert receipt_of(answer).cached_tokens == 0
        for load in cache.loads:
            load.end(0)
