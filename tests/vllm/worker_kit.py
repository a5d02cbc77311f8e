"""The connector's workers over KV memory of a test's own, laid down as vLLM lays it, without a model and without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from headstart.block.identity import Identity
from headstart.connect.vllm import worker as worker_room
from headstart.connect.vllm.messages import LoadOrder, Orders, Prompt, SaveOrder
from headstart.connect.vllm.settings import read_settings
from headstart.connect.vllm.worker import Worker

BLOCKS = 32
TOKEN_BYTES = 2 * 128 * 4  # of a layer of `gqa_spec`
IDENTITY = Identity(b"w" * 32, b"a")


def mla_spec(block: int = 64) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def gqa_spec(block: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=64, dtype=torch.float32)


def window_spec(block: int = 16, window: int = 64) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=window)


def state_spec(block: int = 16, *, mode: str = "align") -> MambaSpec:
    """A convolution's state and a recurrent one, in a page as large as that of `gqa_spec`."""
    return MambaSpec(
        block_size=block,
        shapes=((3, 40), (2, 16, 24)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=gqa_spec(block).page_size_bytes,
        mamba_cache_mode=mode,
    )


def hybrid() -> tuple[KVCacheConfig, list[str]]:
    """Return a model of one layer with KV and two groups of recurrent ones, and the names of the latter's layers."""
    names = ["model.layers.0.conv", "model.layers.1.conv", "model.layers.3.conv"]
    config = kv_config((gqa_spec(), ["model.layers.2.attn"]), (state_spec(), names[:2]), (state_spec(), names[2:]))
    page = gqa_spec().page_size_bytes
    for group in config.kv_cache_groups:  # all begin in the same memory, each layer behind the one before
        config.kv_cache_tensors.append(KVCacheTensor(2 * BLOCKS * page, group.layer_names, BLOCKS * page, page))
    return config, names


def allocated(config: KVCacheConfig, *, seed: int) -> dict[str, torch.Tensor]:
    """Return the memory as vLLM's own function lays it down, full of random bytes."""
    memory = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    whole = next(iter(memory.values())).untyped_storage()
    bits = torch.empty(0, dtype=torch.uint8).set_(whole)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return memory


def kv_config(*groups: tuple[Any, list[str]], replicas: int = 1) -> KVCacheConfig:
    found = [KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec) for spec, names in groups]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=found, kv_tp_replicas=replicas)


def vllm_config(*, ranks: int = 1) -> Any:
    heads = SimpleNamespace(get_num_attention_heads=lambda _: 4, get_num_kv_heads=lambda _: 2)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
        ),
        cache_config=SimpleNamespace(calculate_kv_scales=False, cache_dtype="auto"),
        model_config=SimpleNamespace(quantization=None, dtype="torch.float32", **vars(heads)),
        attention_config=SimpleNamespace(backend=None),
        speculative_config=None,
    )


def started(
    monkeypatch: Any,
    directory: Path,
    config: KVCacheConfig,
    memory: dict[str, torch.Tensor],
    *,
    rank: int = 0,
    ranks: int = 1,
    **extra: Any,
) -> Worker:
    """Return a worker that has registered `memory`."""
    monkeypatch.setattr(worker_room, "identity_for", lambda *_: IDENTITY)
    monkeypatch.setattr(worker_room, "_rank", lambda: (0, rank))
    settings = read_settings({"cache.directory": str(directory), "cache.capacity": "64MiB", "cache.min_free": "0", **extra})
    worker = Worker(settings, vllm_config(ranks=ranks), config)
    worker.register(memory)
    return worker


def filled(shape: Sequence[int], dtype: torch.dtype = torch.float32, *, seed: int) -> torch.Tensor:
    """Return memory of random bytes."""
    size = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return torch.from_numpy(data).view(dtype).view(*shape)


def prompt(tokens: int, *, seed: int = 5, **more: Any) -> Prompt:
    return Prompt(np.random.default_rng(seed).integers(0, 1000, tokens).astype("<u4").tobytes(), **more)


def save(worker: Worker, said: Prompt, *tables: Sequence[int], first: int = 0, states: tuple[int, ...] = ()) -> None:
    """Have a worker copy and store, and wait until it has."""
    before = worker._taking.counters.get("saves")  # what it has not told yet counts as well
    worker.save([SaveOrder("saved", said, tuple(map(tuple, tables)), first, states=states)])
    if worker._keeper is not None and worker._keeper._layout.writes:
        until(lambda: worker._taking.counters.get("saves") > before)


def load(
    worker: Worker,
    said: Prompt,
    *tables: Sequence[int],
    skip: int = 0,
    within_s: float | None = None,
    states: tuple[int, ...] = (),
) -> tuple[set[str], set[int]]:
    """Have a worker load, wait until it has; return requests that failed as a whole and blocks that lack something."""
    worker.obey(Orders([LoadOrder("loaded", said, tuple(map(tuple, tables)), skip, within_s, states)]))
    results: list[Any] = []

    def ended() -> bool:
        results.append(worker.finished(set()))
        return "loaded" in results[-1][1]

    until(ended)
    return results[-1][2], results[-1][3]


def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)
