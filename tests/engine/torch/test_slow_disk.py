"""Real disks that are throttled or fail, under an engine: what was read, what was computed, and always the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from held_cache import eventually
from reference import Answer, ask, engine_of, loaded, some_tokens

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import Receipt
from headstart.engine.speeds import Speeds
from headstart.engine.torch.engine import TorchEngine
from headstart.metrics import Counters
from headstart.testing.faults import Fault, FaultyTier
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier

PROMPT = some_tokens(650)
MATCHED = 640
Serve = Callable[..., tuple[TorchEngine, FaultyTier, list[int]]]


class Paced(Speeds):
    """Computing a block takes `block_s`, whatever is measured; the clock can be put forward."""

    def __init__(self, block_s: float) -> None:
        self.ahead_s = 0.0
        super().__init__(Counters(), chunk_tokens=64, clock=lambda: time.monotonic() + self.ahead_s)
        super().passed(64, 0.0, block_s)

    def passed(self, *_: Any, **__: Any) -> None:
        return


@pytest.fixture
def serve(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> Iterator[Serve]:
    """Start an engine over a disk that has PROMPT stored: returns it, the disk, and the answer. `head_tokens`: as many are in a
    memory tier before it."""
    open_engines: list[tuple[TorchEngine, FaultyTier]] = []

    def started(speeds: Speeds, *, head_tokens: int = 0, **settings: Any) -> tuple[TorchEngine, FaultyTier, list[int]]:
        model = loaded(tiny_model_folder("llama"))
        tier = FaultyTier(DiskTier.open(tmp_path, capacity_bytes=64 << 20), stall_s=120.0)
        representation = model.shape.representation(query_heads=model.heads)
        tiers: list[Tier] = [tier]
        if head_tokens:
            tiers.insert(0, MemoryTier(head_tokens * model.shape.token_bytes + (64 << 10)))
        cache = PrefixCache(
            tiers,
            identity=Identity(weights=b"w" * 32, architecture=b"{}"),
            representation=representation,
            match_timeout_s=20.0,
        )
        engine = engine_of(model, context=1024, cache=cache, speeds=speeds, chunk_tokens=64, **settings)
        open_engines.append((engine, tier))
        if head_tokens:
            ask(engine, PROMPT[: head_tokens + 1], 1).result()
            eventually(lambda: _saved(cache))
        answer = ask(engine, PROMPT, 5)
        answer.result()
        eventually(lambda: engine.load().kv_used_bytes == 0 and _saved(cache))
        return engine, tier, answer.tokens

    yield started
    for engine, tier in open_engines:
        tier.heal()
        eventually(lambda engine=engine: engine.load().kv_used_bytes == 0)  # type: ignore[misc]
        assert engine.cache is not None
        assert engine.cache.check() == []
        assert not {name for name in engine.load().counters if name.endswith("_faults")}
        engine.close()


def _saved(cache: PrefixCache) -> bool:
    counters = cache.statistics().counters
    return counters.get("saves_done", 0) == counters.get("save_calls", 0)


def receipt_of(answer: Answer) -> Receipt:
    receipt = answer.result().receipt
    assert receipt is not None
    return receipt


def test_a_disk_that_is_slower_than_computing_is_left_alone_and_tried_again_after_a_minute(serve: Serve) -> None:
    speeds = Paced(block_s=0.001)
    engine, tier, cold = serve(speeds, hedge_after_s=0.02, full_contexts=12)
    tier.slow_down(100_000)  # of 490 KB
    choices = []
    while "compute" not in choices:
        answer = ask(engine, PROMPT, 5)
        choices.append(receipt_of(answer).decision.choice)
        assert answer.tokens == cold
        assert len(choices) <= 5, choices
    read = tier.bytes_read
    for _ in range(3):
        answer = ask(engine, PROMPT, 5)
        assert receipt_of(answer).decision.choice == "compute"
        assert answer.tokens == cold
    assert tier.bytes_read == read
    assert engine.load().counters["stored_tokens_computed"] >= 3 * MATCHED

    tier.heal()
    speeds.ahead_s = 61.0
    answer = ask(engine, PROMPT, 5)
    assert receipt_of(answer).decision.choice == "mixed"
    assert answer.tokens == cold
    assert tier.bytes_read > read


def teach(speeds: Paced) -> None:
    """Reading a block takes as long as computing one."""
    for _ in range(3):
        speeds.asked("disk", 49_152)
        speeds.ahead_s += 0.5
        speeds.came("disk", 49_152, asked_bytes=49_152)


def test_a_disk_about_as_fast_as_computing_is_met(serve: Serve) -> None:
    speeds = Paced(block_s=0.5)
    engine, _, cold = serve(speeds)
    teach(speeds)
    answer = ask(engine, PROMPT, 5)
    receipt = receipt_of(answer)
    assert answer.tokens == cold
    assert receipt.decision.choice == "mixed"
    assert receipt.cached_tokens + engine.load().counters["stored_tokens_computed"] == MATCHED


@pytest.mark.parametrize("kind", ["eio", "corrupt", "flip", "short"])
@pytest.mark.parametrize("start", [1, 3])
def test_a_disk_that_fails_while_it_is_met_costs_what_it_did_not_bring(serve: Serve, kind: Any, start: int) -> None:
    speeds = Paced(block_s=0.5)
    engine, tier, cold = serve(speeds)
    teach(speeds)
    calls = tier.calls["read"]
    tier.inject(Fault("read", kind, start=start))
    answer = ask(engine, PROMPT, 5)
    receipt = receipt_of(answer)
    assert answer.tokens == cold
    assert receipt.decision.choice == "mixed"
    assert receipt.cached_tokens < MATCHED
    assert tier.injected["read", kind] > 0 or start > tier.calls["read"] - calls  # met before that
    assert tier.injected["read", kind] > 0 or start > 1


def test_a_disk_that_hangs_while_it_is_met_holds_up_nobody(serve: Serve) -> None:
    speeds = Paced(block_s=0.5)
    engine, tier, cold = serve(speeds)
    teach(speeds)
    tier.inject(Fault("read", "stall"))
    answer = ask(engine, PROMPT, 5)
    assert receipt_of(answer).cached_tokens == 0
    assert answer.tokens == cold
    assert tier.stalled.is_set()  # still


def test_what_lies_in_memory_is_loaded_and_the_rest_met_behind_it(serve: Serve) -> None:
    speeds = Paced(block_s=0.5)
    engine, tier, cold = serve(speeds, head_tokens=192)
    with engine.cache.match(PROMPT) as lease:  # type: ignore[union-attr]
        stretches = [(one.tier, one.tokens) for one in lease.stretches]
    assert stretches == [("memory", 192), ("disk", 448)]
    teach(speeds)
    tier.inject(Fault("read", "stall"))
    answer = ask(engine, PROMPT, 5)
    receipt = receipt_of(answer)
    assert answer.tokens == cold
    assert receipt.decision.choice == "mixed"
    assert (receipt.cached_memory_tokens, receipt.cached_disk_tokens) == (192, 0)
