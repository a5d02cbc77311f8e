"""What an engine's receipts and counters say of writing, and whose requests have KV in common: a real cache of two tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from held_cache import eventually
from reference import Answer, ask, engine_of, loaded, some_tokens

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import Receipt
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.model import TorchModel
from headstart.tier.memory import MemoryTier

PROMPT = some_tokens(200)


@pytest.fixture(scope="module")
def model(tiny_model_folder: Callable[..., Path]) -> TorchModel:
    return loaded(tiny_model_folder("llama"))


@pytest.fixture
def engine(model: TorchModel) -> Iterator[TorchEngine]:
    cache = PrefixCache(
        [MemoryTier(64 << 20)],
        identity=Identity(weights=b"w" * 32, architecture=b"{}"),
        representation=model.shape.representation(query_heads=model.heads),
    )
    memory = KVMemory(model.shape, 6 * model.shape.region_bytes(512), context_tokens=512)
    with engine_of(model, memory=memory, cache=cache, max_running=1) as engine:
        yield engine


def receipt_of(engine: TorchEngine, answer: Answer) -> Receipt:
    receipt = answer.result().receipt
    assert receipt is not None
    assert engine.cache is not None
    cache = engine.cache
    eventually(lambda: cache.statistics().counters.get("saves_done", 0) == cache.statistics().counters.get("save_calls", 0))
    return receipt


def test_a_receipt_tells_what_of_prompt_and_answer_was_accepted_for_writing(engine: TorchEngine) -> None:
    first = receipt_of(engine, ask(engine, PROMPT, 70))
    assert (first.cached_tokens, first.written_tokens, first.kept_output_tokens) == (0, 200, 56)  # 256 of 269, four blocks
    again = receipt_of(engine, ask(engine, PROMPT, 1))
    assert (again.cached_tokens, again.written_tokens, again.kept_output_tokens) == (192, 0, 0)
    longer = receipt_of(engine, ask(engine, [*PROMPT, *some_tokens(70, seed=2)], 1))
    assert (longer.cached_tokens, longer.written_tokens) == (192, 64)
    without = receipt_of(engine, ask(engine, some_tokens(130, seed=3), 1, use_cache=False))
    assert (without.cached_tokens, without.written_tokens) == (0, 0)
    counters = engine.load().counters
    assert counters["written_tokens"] == 264
    assert counters["kept_output_tokens"] == 56


def test_tenants_have_what_is_declared_shared_in_common_and_nothing_behind_it(engine: TorchEngine) -> None:
    def cached(salt: str, shared_tokens: int) -> int:
        return receipt_of(engine, ask(engine, PROMPT, 1, salt=salt, shared_tokens=shared_tokens)).cached_tokens

    assert [cached("a", 0), cached("b", 0), cached("a", 0), cached("b", 0)] == [0, 0, 192, 192]
    assert [cached("c", 130), cached("d", 130), cached("d", 130)] == [0, 128, 192]


def test_requests_that_run_together_share_kv_across_salts_only_where_it_is_declared(model: TorchModel) -> None:
    cache = PrefixCache(
        [MemoryTier(64 << 20)],
        identity=Identity(weights=b"w" * 32, architecture=b"{}"),
        representation=model.shape.representation(query_heads=model.heads),
    )
    memory = KVMemory(model.shape, 6 * model.shape.region_bytes(512), context_tokens=512)
    with engine_of(model, memory=memory, cache=cache, max_running=4) as engine:

        def both(**more: int) -> list[int]:
            answers = [ask(engine, PROMPT, 100, salt=f"{salt}{more}", **more) for salt in "xy"]
            return sorted(receipt.cached_tokens for one in answers if (receipt := one.result().receipt))

        assert both() == [0, 0]
        assert both(shared_tokens=128) == [0, 128]


def test_a_request_that_never_had_its_turn_is_told_apart(engine: TorchEngine) -> None:
    long = ask(engine, PROMPT, 300, id="long")
    waiting = ask(engine, PROMPT, 300, id="waiting")
    engine.abort("waiting")
    receipt = waiting.result().receipt
    assert receipt is not None
    assert not receipt.taken
    eventually(lambda: engine.load().counters.get("prompt_tokens", 0) > 0)
    assert engine.load().counters["prompt_tokens"] == len(PROMPT)
    engine.abort("long")
    assert receipt_of(engine, long).taken
