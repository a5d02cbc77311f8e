"""Memory is planned from what is free, told at start and adjustable; threads are the physical cores."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llama_kit import Made, config_of

from headstart.config import CacheConfig, Config, EngineConfig
from headstart.engine import container, host
from headstart.engine.llama import open_engine, opening
from headstart.engine.llama.opening import MemoryPlan, StateSizes, plan_memory
from headstart.errors import ModelError

MIB, GIB = 1 << 20, 1 << 30
SIZES = StateSizes(token_bytes=100_000, piece_bytes=6_400_000, state_bytes=0)
RECURRENT = StateSizes(token_bytes=20_000, piece_bytes=1_280_000, state_bytes=30 * MIB)


def plan(free: int, sizes: StateSizes = SIZES, *, memory: str = "4GiB", **engine: Any) -> MemoryPlan:
    weights: Any = SimpleNamespace(context_tokens=32768, recurrent=bool(sizes.state_bytes), file=Path("a.gguf"))
    config = Config(cache=CacheConfig(memory=memory), engine=EngineConfig(**{"max_running": 4, **engine}))
    return plan_memory(weights, sizes, config, free=free)


def taken(plan: MemoryPlan, sizes: StateSizes) -> int:
    kv = plan.cells * sizes.token_bytes + (plan.sequences + 1) * sizes.state_bytes
    return kv + plan.memory_tier_bytes + plan.passage_bytes


@pytest.mark.parametrize("sizes", [SIZES, RECURRENT])
@pytest.mark.parametrize("free", [3 * GIB, 8 * GIB, 24 * GIB, 500 * GIB])
def test_what_is_planned_fits_into_what_is_free(free: int, sizes: StateSizes) -> None:
    planned = plan(free, sizes)
    assert taken(planned, sizes) <= free - opening._COMPUTE_BYTES
    assert planned.memory_tier_bytes <= free // 4
    assert planned.context_tokens <= planned.cells <= 4 * planned.context_tokens + 256
    assert planned.passage_bytes >= 16 * sizes.piece_bytes


def test_the_context_is_cut_to_what_there_is_and_told_why(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(24 * GIB).context_tokens == 32768
    assert not caplog.records
    assert 128 <= plan(3 * GIB).context_tokens < 32768
    assert "of a.gguf: the context is cut from 32768 to that" in caplog.text
    with pytest.raises(ModelError, match=r"MiB of KV memory are too little for a\.gguf, of which a token takes 100,000 bytes"):
        plan(600 * MIB)


def test_each_setting_changes_its_part() -> None:
    assert plan(24 * GIB, context=4096).context_tokens == 4096
    assert plan(24 * GIB, context=4096, max_running=2).cells == 8192
    assert plan(24 * GIB, kv_memory="1GiB").context_tokens == GIB // 100_000 // 64 * 64
    assert plan(24 * GIB, memory="1GiB").memory_tier_bytes == GIB
    assert plan(24 * GIB, memory="0").memory_tier_bytes == 0


@pytest.mark.parametrize("cores", [1, 3])
def test_the_plan_is_told_at_start_and_threads_are_the_physical_cores(
    cores: int, gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[int] = []
    context = opening.Context

    def noted(*arguments: Any, threads: int, **more: Any) -> Any:
        given.append(threads)
        return context(*arguments, threads=threads, **more)

    monkeypatch.setattr(opening, "Context", noted)
    monkeypatch.setattr(opening, "physical_cores", lambda: cores)
    with caplog.at_level(logging.INFO), open_engine(gguf("llama"), config_of(tmp_path), on_progress=lambda *_: None):
        pass
    assert set(given) == {cores}
    (told,) = [one.message for one in caplog.records if one.message.startswith("memory plan: ")]
    assert told == (
        "memory plan: weights 1 MiB; KV 4 MiB (8,192 tokens in f16, up to 4 requests of 2,048); memory tier 64 MiB; "
        f"{cores} threads (change with --context, --max-running, --kv-memory, --kv-type, --cache-memory)"
    )


def test_siblings_on_one_core_are_one_thread_and_a_container_may_have_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(host, "_siblings", lambda cpu: f"{cpu % 4},{cpu % 4 + 4}")
    monkeypatch.setattr(container, "cpus", lambda: None)
    assert host.physical_cores() == 4
    monkeypatch.setattr(container, "cpus", lambda: 2.5)
    assert host.physical_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5}, raising=False)
    assert host.physical_cores() == 1
