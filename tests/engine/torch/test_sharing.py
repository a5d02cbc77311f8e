"""A beginning that running requests have in common is in KV memory once, whoever ends first, and the answers stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from held_cache import HeldCache, eventually
from reference import Answer, ask, engine_of, loaded, some_tokens, stock, stock_greedy

from headstart.engine.torch.attention import Prefix
from headstart.engine.torch.branches import BranchKV
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.model import TorchModel

Folders = Callable[..., Path]
BEGINNING = some_tokens(192)


@pytest.fixture(scope="module")
def model(tiny_model_folder: Folders) -> TorchModel:
    return loaded(tiny_model_folder("mistral", sliding_window=100))


@pytest.fixture
def memory(model: TorchModel) -> KVMemory:
    return KVMemory(model.shape, 4 * model.shape.region_bytes(512), context_tokens=512)


@pytest.fixture
def cache(model: TorchModel) -> HeldCache:
    return HeldCache(model.shape.representation(query_heads=model.heads))


@pytest.fixture
def engine(model: TorchModel, memory: KVMemory, cache: HeldCache) -> Iterator[TorchEngine]:
    with engine_of(model, memory=memory, cache=cache) as engine:  # type: ignore[arg-type]
        yield engine
        eventually(lambda: memory.used_bytes == 0)
        assert engine.load().counters.get("engine_faults", 0) == 0


def _prompt(seed: int, more: int = 20) -> list[int]:
    return [*BEGINNING, *some_tokens(more, seed=seed)]


def _shared(engine: TorchEngine) -> int:
    return engine.load().counters.get("prefixes_shared", 0)


def _answers_equal_stock(folder: Path, answers: dict[int, Answer]) -> None:
    module = stock(folder)
    for seed, answer in answers.items():
        assert answer.result().finish == "length"
        assert answer.tokens == stock_greedy(module, _prompt(seed), len(answer.tokens))


def test_requests_that_arrive_together_compute_their_beginning_once(
    engine: TorchEngine, cache: HeldCache, tiny_model_folder: Folders
) -> None:
    answers = {seed: ask(engine, _prompt(seed), 20 - seed) for seed in range(4)}
    _answers_equal_stock(tiny_model_folder("mistral", sliding_window=100), answers)
    assert _shared(engine) == 3
    receipts = [answer.result().receipt for answer in answers.values()]
    assert sorted(receipt.cached_memory_tokens for receipt in receipts if receipt) == [0, 192, 192, 192]
    assert {tuple(_prompt(seed)) for seed in range(4)} <= {tokens[:212] for tokens in cache.saves}


def test_a_beginning_that_is_stored_is_loaded_once_for_all(
    engine: TorchEngine, cache: HeldCache, memory: KVMemory, tiny_model_folder: Folders
) -> None:
    ask(engine, _prompt(9), 2).result()
    eventually(lambda: memory.used_bytes == 0)
    answers = {0: ask(engine, _prompt(0), 30)}
    load = cache.next_load()
    answers |= {seed: ask(engine, _prompt(seed), 10) for seed in (1, 2)}
    other = ask(engine, some_tokens(30), 5)  # waits for none of them
    assert other.result().finish == "length"
    load.bring(0, 1, 2)
    load.end()
    _answers_equal_stock(tiny_model_folder("mistral", sliding_window=100), answers)
    assert _shared(engine) == 2
    assert len(cache.loads) == 1


def test_what_is_shared_stays_until_its_last_reader_has_ended(
    engine: TorchEngine, memory: KVMemory, tiny_model_folder: Folders
) -> None:
    first = ask(engine, _prompt(0), 300, id="first")
    assert first.first_token.wait(30)
    later = {1: ask(engine, _prompt(1), 120), 2: ask(engine, _prompt(2), 60)}
    eventually(lambda: _shared(engine) == 2)
    whole, branch = memory.shape.region_bytes(212 + 300), memory.shape.region_bytes(20 + 120)
    assert memory.used_bytes <= whole + 2 * branch  # not three times the beginning
    engine.abort("first")
    assert first.result().finish == "abort"
    _answers_equal_stock(tiny_model_folder("mistral", sliding_window=100), later)


def test_a_giver_that_is_aborted_while_others_wait_for_it_leaves_them_to_compute(
    engine: TorchEngine, cache: HeldCache, memory: KVMemory, tiny_model_folder: Folders
) -> None:
    ask(engine, _prompt(9), 2).result()
    eventually(lambda: memory.used_bytes == 0)
    ask(engine, _prompt(0), 30, id="first")
    stuck = cache.next_load()
    later = {1: ask(engine, _prompt(1), 5)}
    engine.abort("first")
    load = cache.next_load(1)  # its own now
    load.bring(0, 1, 2)
    load.end()
    _answers_equal_stock(tiny_model_folder("mistral", sliding_window=100), later)
    stuck.end(0)


@pytest.mark.parametrize("more", [{"salt": "another tenant's"}, {"use_cache": False}])
def test_tenants_and_requests_past_the_cache_share_nothing(engine: TorchEngine, cache: HeldCache, more: dict[str, Any]) -> None:
    first = ask(engine, _prompt(0), 200, id="first")
    eventually(lambda: tuple(BEGINNING) in cache.stored)
    cache.stored.clear()  # it knows no salts
    assert ask(engine, _prompt(1), 3, **more).result().finish == "length"
    assert _shared(engine) == 0
    engine.abort("first")
    first.result()


def test_pieces_of_a_branch_are_those_of_the_trunk_and_its_own(model: TorchModel, memory: KVMemory) -> None:
    trunk, own = memory.allocate_host(300), memory.allocate_host(130)
    assert trunk is not None
    assert own is not None
    for layer in model.shape.numbers:
        for kv in (trunk, own):
            kv.keys(layer).normal_()
            kv.values(layer).normal_()
    branch = BranchKV(trunk, Prefix(trunk, 128), own)
    (size, *_) = [nbytes for nbytes in model.shape.representation(query_heads=4).layer_bytes if nbytes]
    want = [bytes(part) for kv, first in ((trunk, 0), (trunk, 1), (own, 0), (own, 1)) for part in kv.buffers(1, first, [size])]
    for first in range(4):
        for end in range(first + 1, 5):
            assert [bytes(part) for part in branch.buffers(1, first, [size] * (end - first))] == want[first:end]
    trunk.release()
    branch.retain()
    branch.release()
    assert memory.used_bytes == memory.shape.region_bytes(300) + memory.shape.region_bytes(130)
    branch.release()
    assert memory.used_bytes == 0
