"""Every state of a request with every other: loads, meetings, reading ahead, adapters, recurrent states, growth, preemption,
sharing, aborts and deadlines, over a disk that is slow, hangs and lies; at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reference import KINDS as SERVED
from reference import Answer, ask, finish, loaded, some_tokens, stepped
from test_lora import make_adapter

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.speeds import Speeds
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.lora import Adapters, read_adapter
from headstart.engine.torch.model import TorchModel
from headstart.metrics import Counters
from headstart.policy.loading import Computing, Reading
from headstart.policy.speed import Speed
from headstart.testing.faults import Fault, FaultyTier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier
from model_fixtures import LATENT_KINDS
from odd_models import RECURRENT

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", SMALL),
    "recurrent": RECURRENT["qwen3.5, gated delta nets"],
    "latent": LATENT_KINDS["deepseek-v2, queries of low rank, biases"],
    "chunks": SERVED["llama4, attention in chunks, queries scaled by position"],
    "shared KV": SERVED["gemma3n, layers that attend the KV of another"],
}
CONTEXT, LONGEST = 448, 80
TOKEN_S = 1e-3  # that computing one is said to take
LIES = [[Fault("read", kind, every=3)] for kind in ("stall", "eio", "flip", "short")]
# What must have come to pass, of models without recurrent layers and of those with them.
_ALWAYS = ("preempted_memory", "preempted_place", "kv_grown", "resumed_tokens", "load_decisions_load", "cached_disk_tokens")
SEEN = (
    (*_ALWAYS, "load_decisions_mixed", "load_waits_cut_short", "stored_tokens_computed", "prefixes_shared"),
    ("preempted_place", "resumed_tokens", "load_decisions_load", "states_kept"),
)


class Moody(Speeds):
    """Says at random whether a disk is fast, slow or about as fast as computing, so that every plan is made."""

    def __init__(self, draw: random.Random, *, token_bytes: int) -> None:
        super().__init__(Counters(), chunk_tokens=48)
        self._draw = draw
        self._token_bytes = token_bytes

    @property
    def computing(self) -> Computing:
        return Computing(Speed((TOKEN_S, 0.0, 0.0)), 48)

    def reading(self) -> dict[str, Reading]:
        token_s = TOKEN_S * self._draw.choice([0.01, 1.0, 1.0, 1.0, 1.0, 100.0])
        return {"disk": Reading(Speed((token_s / self._token_bytes, 0.0)))}


def adapted(model: TorchModel, place: Path) -> list[str | None]:
    """Put two adapters beside the model; return what a request may ask for."""
    layers = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    folders = {name: make_adapter(place / name, model.module, seed=seed, layers=layers) for seed, name in enumerate("xy")}
    model.adapters = Adapters(model.module, {name: read_adapter(folder) for name, folder in folders.items()})
    return [None, *folders]


@pytest.mark.parametrize(
    ("kind", "acts"),
    [
        ("plain", 100),
        ("recurrent", 25),
        pytest.param("plain", 10_000, marks=pytest.mark.soak),
        pytest.param("recurrent", 3_000, marks=pytest.mark.soak),
        *(pytest.param(kind, 3_000, marks=pytest.mark.soak) for kind in ("latent", "chunks", "shared KV")),
    ],
)
def test_whatever_comes_together_leaves_every_answer_what_it_is_alone(
    tiny_model_folder: Callable[..., Path], tmp_path: Path, kind: str, acts: int
) -> None:
    draw = random.Random(4)
    architecture, config = KINDS[kind]
    model = loaded(tiny_model_folder(architecture, **config))
    adapters = adapted(model, tmp_path) if kind == "plain" else [None]
    beginnings = [some_tokens(320, seed=seed, vocabulary=128) for seed in range(2)]
    prompts = [
        [*draw.choice(beginnings)[: draw.choice([0, 64, 192, 320, 320])], *some_tokens(draw.randrange(1, 40), seed, 128)]
        for seed in range(8)
    ]
    contexts = 1.5 if kind != "recurrent" else 3  # a state is as large as many tokens
    memory = KVMemory(model.shape, int(contexts * model.shape.region_bytes(CONTEXT)), context_tokens=CONTEXT)
    disk = FaultyTier(DiskTier.open(tmp_path / "kv", capacity_bytes=64 << 20), stall_s=60.0)
    cache = PrefixCache(
        [MemoryTier(3 * model.shape.region_bytes(64)), disk],
        identity=Identity(weights=b"w" * 32, architecture=b"c"),
        representation=model.shape.representation(query_heads=model.heads),
        match_timeout_s=5.0,
    )
    settings = {
        "context": CONTEXT,
        "room_tokens": 8,
        "max_running": 4,
        "chunk_tokens": 48,
        "save_every": 64,
        "patience_s": 0.05,
        "load_timeout_s": 0.15,
        "hedge_after_s": 0.01,
        "speeds": Moody(random.Random(5), token_bytes=model.shape.token_bytes),
    }
    with stepped(model, memory=memory, cache=cache, **settings) as engine:
        engine.info = replace(engine.info, adapters=tuple(name for name in adapters if name))
        each = [(which, adapter) for which in range(len(prompts)) for adapter in adapters]
        first = [ask(engine, prompts[which], LONGEST, adapter=adapter, use_cache=False) for which, adapter in each]
        finish(engine, *first)
        alone = {which: answer.tokens for which, answer in zip(each, first, strict=True)}
        open_: dict[str, tuple[tuple[int, str | None], Answer]] = {}
        ended: list[tuple[tuple[int, str | None], Answer]] = []
        counters = engine.load().counters
        number, seen = 0, SEEN[kind == "recurrent"]
        while number < acts or (number < 300 * acts and any(not counters.get(name) for name in seen)):
            number += 1
            act = draw.random()
            if act < 0.12 and len(open_) < 10:
                which = draw.randrange(len(prompts)), draw.choice(adapters)
                open_[f"r{number}"] = (
                    which,
                    ask(
                        engine,
                        prompts[which[0]],
                        draw.choice([1, 7, 30, LONGEST]),
                        id=f"r{number}",
                        adapter=which[1],
                        priority=draw.choice([0, 0, 0, 1]),
                        tenant=draw.choice("ab"),
                        salt=draw.choice([None, None, None, "s"]),
                        deadline_s=draw.choice([None] * 9 + [0.02]),
                        use_cache=draw.random() < 0.95,
                    ),
                )
            elif act < 0.13 and open_:
                engine.abort(draw.choice(list(open_)))
            elif act < 0.15 and engine._roster.running:
                engine._preemption._give_way(draw.choice(engine._roster.running), "place")
            elif act < 0.17:
                disk.heal()
                disk.inject(*draw.choice([[], [], *LIES]))
                if draw.random() < 0.3:
                    disk.slow_down(draw.choice([5e5, 5e6]))
            else:
                engine._round()
            for name in [name for name, (_, answer) in open_.items() if answer.last is not None]:
                ended.append(open_.pop(name))
            before, counters = counters, engine.load().counters
            assert all(counters[name] >= count for name, count in before.items())
        disk.heal()
        finish(engine, *(answer for _, answer in open_.values()), rounds=20_000)
        ended += open_.values()
        counters = engine.load().counters
        assert not {name for name in counters if name.endswith("_faults")}
        _settled(engine, memory)
        assert cache.check() == []
    assert len(ended) > acts // 20
    for which, answer in ended:
        last = answer.result()
        assert last.finish in ("length", "abort"), last.error
        assert answer.tokens == alone[which][: len(answer.tokens)]
        assert last.receipt is not None
        assert last.receipt.completion_tokens == len(answer.tokens)
        assert 0 <= last.receipt.cached_tokens < last.receipt.prompt_tokens
    assert counters["cached_memory_tokens"] + counters["cached_disk_tokens"] < counters["prompt_tokens"]
    assert not [name for name in seen if not counters.get(name)], counters


def _settled(engine: TorchEngine, memory: KVMemory) -> None:
    """Saves and reads have ended, and hold nothing any more."""
    for _ in range(2000):
        if not memory.used_bytes:
            return
        engine._roster.wake.wait(0.01)
        engine._roster.wake.clear()
    raise AssertionError(f"{memory.used_bytes} bytes of KV are still held")
