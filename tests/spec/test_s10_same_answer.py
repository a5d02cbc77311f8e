"""S10: with the cache on, off, cold, warm, restarted or failing, a model gives the same tokens. What a sceptic asks for first.

"The same" is `engine.torch.exactness.same_tokens`: equal, save where the model itself is undecided within the tolerance.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from headstart.cache import PrefixCache
from headstart.config import CacheConfig, Config, EngineConfig
from headstart.engine.base import GenerationRequest, Receipt, TokenEvent
from headstart.engine.checkpoint import identity_of
from headstart.engine.exactness import same_tokens
from headstart.engine.torch import open_engine
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.testing.faults import Fault, FaultyTier
from headstart.tier.disk import DiskTier
from model_fixtures import LATENT_KINDS, smollm2_folder, tiny_model_folder  # noqa: F401
from odd_models import RECURRENT

Prompt = tuple[int, ...]
TOKENS = 32
CAPACITY = 2 << 30


class Answers:
    """Runs prompts, all of them at once, and keeps what came of each."""

    def __init__(self, engine: TorchEngine, prompts: Sequence[Prompt], count: int = TOKENS) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.receipts: list[Receipt | None] = [None] * len(prompts)
        self._left = len(prompts)
        self._ended = Event()
        for number, prompt in enumerate(prompts):
            engine.submit(GenerationRequest(str(number), prompt, count), lambda event, number=number: self._take(number, event))
        assert self._ended.wait(600)

    def _take(self, number: int, event: TokenEvent) -> None:
        if event.token is not None:
            self.tokens[number].append(event.token)
        if event.finish is not None:
            assert event.finish == "length", event.error
            self.receipts[number] = event.receipt
            self._left -= 1
            if not self._left:
                self._ended.set()

    def cached(self, tier: str) -> list[int]:
        return [getattr(receipt, f"cached_{tier}_tokens") for receipt in self.receipts]


class Runs:
    """One model and one cache directory, opened in every way."""

    def __init__(
        self,
        folder: Path,
        directory: Path,
        prompts: Sequence[Prompt],
        *,
        running: int,
        tolerance: float,
        count: int = TOKENS,
    ) -> None:
        self.folder = folder
        self.prompts = prompts
        self.count = count  # tokens of each answer
        self.whole = [(len(prompt) - 1) // 64 * 64 for prompt in prompts]  # what a perfect cache has of each
        self._tolerance = tolerance
        cache = CacheConfig(directory=directory / "kv", capacity=str(CAPACITY), memory="512MiB")
        engine = EngineConfig(device="cpu", max_running=running, prefill_chunk=256, context=2048, kv_memory="256MiB")
        self._config = Config(models_directory=directory / "models", cache=cache, engine=engine)

    @contextmanager
    def engine(self, **changes: object) -> Iterator[TorchEngine]:
        config = replace(self._config, cache=replace(self._config.cache, **changes))
        engine = open_engine(self.folder, config, on_progress=lambda stage, fraction: None)
        self._model, self._info = engine.model, engine.info
        try:
            yield engine
            settled(engine)
            assert engine.cache is None or engine.cache.check() == []
        finally:
            engine.close()

    @contextmanager
    def failing(self, *faults: Fault) -> Iterator[tuple[TorchEngine, FaultyTier]]:
        """The same directory without a memory tier before it, and a disk with faults, under the model opened last."""
        model, info = self._model, self._info
        tier = FaultyTier(DiskTier.open(self._config.cache.directory, capacity_bytes=CAPACITY), *faults)
        representation = model.shape.representation(query_heads=model.heads)
        cache = PrefixCache([tier], identity=identity_of(self.folder), representation=representation)
        with TorchEngine(model, KVMemory(model.shape, 256 << 20, context_tokens=2048), info=info, cache=cache) as engine:
            yield engine, tier
            settled(engine)

    def assert_same(self, engine: TorchEngine, got: Answers, want: Answers) -> None:
        for prompt, a, b in zip(self.prompts, want.tokens, got.tokens, strict=True):
            assert len(a) == len(b) == self.count
            assert same_tokens(engine.next_logits, prompt, a, b, tolerance=self._tolerance), len(prompt)


def settled(engine: TorchEngine) -> None:
    """Return once all saves are done: then no KV memory is held any more."""
    until = time.monotonic() + 60
    while engine.load().kv_used_bytes:
        assert time.monotonic() < until, "KV memory is still held"
        time.sleep(0.005)


def prompts_with_shared_prefixes(count: int, *, vocabulary: int, lengths: Sequence[int], longest: int) -> list[Prompt]:
    """`count` prompts over a few openings, with lengths around block edges among them; some are equal, some part midway."""
    draw = random.Random(10)
    openings = [[draw.randrange(3, vocabulary) for _ in range(longest)] for _ in range(max(2, count // 20))]
    prompts = []
    for number in range(count):
        opening = openings[draw.randrange(len(openings))]
        length = lengths[number % len(lengths)] if number % 2 else draw.randrange(1, longest)
        shared = draw.choice([length, length, length // 2, max(0, length - 1), length // 64 * 64])
        prompts.append((*opening[:shared], *(draw.randrange(3, vocabulary) for _ in range(length - shared))))
    return prompts


def check_all_ways(runs: Runs, *, lying: bool, every: int = 3, in_parts: bool = True) -> None:
    """`every`: which of the reads from disk fail, or lie; `in_parts`: whether what is before one of those is still of use."""
    with runs.engine(enabled=False) as engine:
        off = Answers(engine, runs.prompts, runs.count)
        assert sum(off.cached("memory")) == sum(off.cached("disk")) == 0
    with runs.engine() as engine:
        runs.assert_same(engine, Answers(engine, runs.prompts, runs.count), off)  # cold
        settled(engine)
        warm = Answers(engine, runs.prompts, runs.count)
        assert [a + b for a, b in zip(warm.cached("memory"), warm.cached("disk"), strict=True)] == runs.whole
        assert sum(warm.cached("memory")) > 0
        runs.assert_same(engine, warm, off)
    with runs.engine(memory="0") as engine:
        restarted = Answers(engine, runs.prompts, runs.count)
        # What requests that run together share is read from disk by one of them, and counts as memory for the others.
        both = zip(restarted.cached("memory"), restarted.cached("disk"), strict=True)
        assert [memory + disk for memory, disk in both] == runs.whole
        assert sum(restarted.cached("disk")) > 0
        runs.assert_same(engine, restarted, off)
    with runs.failing(Fault("read", "eio", every=every)) as (engine, tier):
        failing = Answers(engine, runs.prompts, runs.count)
        assert tier.injected["read", "eio"] == -(-tier.calls["read"] // every) > 0
        assert (0 if in_parts else -1) < sum(failing.cached("disk")) < sum(runs.whole)
        runs.assert_same(engine, failing, off)
    if lying:
        with runs.failing(Fault("read", "flip", every=every)) as (engine, tier):
            misled = Answers(engine, runs.prompts, runs.count)
            assert tier.injected["read", "flip"] == -(-tier.calls["read"] // every) > 0
            runs.assert_same(engine, misled, off)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_tiny_model_gives_the_same_tokens_in_every_way(
    tiny_model_folder: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    one_thread: None,
) -> None:
    prompts = prompts_with_shared_prefixes(
        200, vocabulary=500, longest=450, lengths=[1, 2, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 256, 257, 320, 321, 385]
    )
    check_all_ways(Runs(tiny_model_folder("llama"), tmp_path, prompts, running=16, tolerance=1e-4), lying=True)


@pytest.mark.parametrize(
    "kind", ["deepseek-v2, YaRN, experts behind a dense layer", "deepseek-v3, queries of low rank, YaRN, grouped experts"]
)
def test_latent_attention_gives_the_same_tokens_in_every_way(
    tiny_model_folder: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    kind: str,
    one_thread: None,
) -> None:
    prompts = prompts_with_shared_prefixes(16, vocabulary=500, longest=330, lengths=[63, 64, 65, 128, 129, 257, 320])
    name, changes = LATENT_KINDS[kind]
    folder = tiny_model_folder(name, **changes)
    check_all_ways(Runs(folder, tmp_path, prompts, running=8, tolerance=1e-4), lying=True, every=7)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3.5, gated delta nets",
        "lfm2, short convolutions",
        "mamba2, no attention at all",
        pytest.param("jamba, Mamba whose scan begins with nothing", marks=pytest.mark.soak),
        pytest.param("falcon-h1, both in each layer", marks=pytest.mark.soak),
    ],
)
def test_recurrent_layers_give_the_same_tokens_in_every_way(
    tiny_model_folder: Callable[..., Path],  # noqa: F811
    tmp_path: Path,
    name: str,
    one_thread: None,
) -> None:
    prompts = prompts_with_shared_prefixes(5, vocabulary=500, longest=210, lengths=[65, 129, 193, 200])
    kind, changes = RECURRENT[name]
    folder = tiny_model_folder(kind, **changes)
    check_all_ways(Runs(folder, tmp_path, prompts, running=5, tolerance=2e-3), lying=True, every=3, in_parts=False)


@pytest.mark.real_model
def test_the_real_model_gives_the_same_tokens_in_every_way(smollm2_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    prompts = prompts_with_shared_prefixes(5, vocabulary=49000, longest=200, lengths=[65, 129, 192])
    check_all_ways(Runs(smollm2_folder, tmp_path, prompts, running=5, tolerance=1e-3, count=12), lying=False, every=20)
