"""Ten thousand random acts with little memory: nothing is lost, freed twice, emitted twice or answered otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from reference import Answer, ask, loaded, some_tokens, stepped, stock, stock_greedy

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier
from odd_models import RECURRENT

LONGEST = 60  # tokens of an answer
CONTEXT = 320
GAVE_WAY = ("preempted_memory", "preempted_place")


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}
KINDS = {"plain": ("llama", SMALL), "recurrent": RECURRENT["qwen3.5, gated delta nets"]}


@pytest.mark.parametrize(
    ("acts", "kind", "with_cache"),
    [
        (800, "plain", True),
        (300, "plain", False),
        pytest.param(10_000, "plain", True, marks=pytest.mark.soak),
        pytest.param(10_000, "plain", False, marks=pytest.mark.soak),
        pytest.param(3_000, "recurrent", True, marks=pytest.mark.soak),
    ],
)
def test_thousands_of_random_acts_leave_every_answer_what_it_is_alone_and_all_memory_free(
    tiny_model_folder: Callable[..., Path], tmp_path: Path, acts: int, kind: str, with_cache: bool
) -> None:
    """Submit, abort, let a deadline pass, take a place away in any state, run a step: at random, with many requests alike."""
    draw = random.Random(20)
    architecture, config = KINDS[kind]
    folder = tiny_model_folder(architecture, **config)
    model, reference = loaded(folder), stock(folder)
    beginnings = [some_tokens(128, seed=seed, vocabulary=128) for seed in range(3)]
    prompts = [
        [*draw.choice(beginnings)[: draw.choice([0, 0, 64, 128])], *some_tokens(draw.randrange(1, 50), seed, 128)]
        for seed in range(12)
    ]
    greedy = [stock_greedy(reference, prompt, LONGEST) for prompt in prompts]
    contexts = 1 if kind == "plain" else 3  # a state is as large as many tokens
    memory = KVMemory(model.shape, contexts * model.shape.region_bytes(CONTEXT), context_tokens=CONTEXT)
    representation = model.shape.representation(query_heads=model.heads)
    cache = None
    if with_cache:
        tiers: list[Tier] = [MemoryTier(24 * model.shape.region_bytes(64))]
        if acts >= 10_000:
            tiers.append(DiskTier.open(tmp_path / "kv", capacity_bytes=64 << 20))
        identity = Identity(weights=b"w" * 32, architecture=b"c")
        cache = PrefixCache(tiers, identity=identity, representation=representation)
    gave_way = 0
    open_: dict[str, tuple[int, Answer]] = {}
    ended: list[tuple[int, Answer]] = []
    settings = {
        "context": CONTEXT,
        "room_tokens": 8,
        "max_running": 5,
        "chunk_tokens": 48,
        "save_every": 64,
        "patience_s": 0.05,
    }
    with stepped(model, memory=memory, cache=cache, **settings) as engine:
        for number in range(acts):
            act = draw.random()
            if act < 0.12 and len(open_) < 12:
                which = draw.randrange(len(prompts))
                name = f"r{number}"
                answer = ask(
                    engine,
                    prompts[which],
                    draw.choice([1, 7, LONGEST, LONGEST]),
                    id=name,
                    priority=draw.choice([0, 0, 0, 1]),
                    tenant=draw.choice("ab"),
                    deadline_s=draw.choice([None] * 9 + [0.001, 0.02]),
                    use_cache=draw.random() < 0.9,
                )
                open_[name] = (which, answer)
            elif act < 0.13 and open_:
                engine.abort(draw.choice(list(open_)))
            elif act < 0.15 and engine._roster.running:
                engine._preemption._give_way(draw.choice(engine._roster.running), "place")
            else:
                engine._round()
            if cache is not None and sum(map(engine.load().counters.get, GAVE_WAY, (0, 0))) > gave_way:
                gave_way = sum(map(engine.load().counters.get, GAVE_WAY, (0, 0)))
                _until_saved(engine, cache)
            for name in [name for name, (_, answer) in open_.items() if answer.last is not None]:
                ended.append(open_.pop(name))
        _until_ended(engine, open_)
        ended += open_.values()
        counters = engine.load().counters
        assert counters.get("engine_faults", 0) == counters.get("step_faults", 0) == counters.get("save_faults", 0) == 0
        assert (engine.load().running, engine.load().waiting, engine._roster.shares._requests) == (0, 0, {})
        if cache is not None:
            _until_saved(engine, cache)
            assert cache.check() == []
    assert memory.used_bytes == 0  # a region that is released once too often raises
    assert len(ended) > acts // 15
    for which, answer in ended:
        last = answer.result()
        assert last.finish in ("length", "abort"), last.error
        assert answer.tokens == greedy[which][: len(answer.tokens)]
        assert last.receipt is not None
        assert last.receipt.completion_tokens == len(answer.tokens)
        assert 0 <= last.receipt.cached_tokens < last.receipt.prompt_tokens
    for name in ("preempted_memory", "preempted_place", "kv_grown", "deadlines_passed", "recomputed_tokens"):
        assert counters.get(name, 0) > 0, name
    if with_cache:  # what was saved when a request gave way is there when it goes on
        assert counters["resumed_tokens"] > 0  # how much depends on when saves end, which give way to computing
        assert kind == "recurrent" or counters["prefixes_shared"] > 0


def _until_saved(engine: TorchEngine, cache: PrefixCache) -> None:
    while (saves := cache.statistics().counters).get("saves_done", 0) < saves.get("save_calls", 0):
        engine._roster.wake.wait(0.01)


def _until_ended(engine: TorchEngine, left: dict[str, tuple[int, Answer]]) -> None:
    for _ in range(20_000):
        if all(answer.last is not None for _, answer in left.values()):
            return
        if not engine._round():
            engine._roster.wake.wait(0.005)
            engine._roster.wake.clear()
    raise AssertionError(f"{[name for name, (_, answer) in left.items() if answer.last is None]} did not end")
