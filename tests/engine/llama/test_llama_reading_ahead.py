"""What a pool has of a request that waits for libllama is read while another one is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_kit import WORDS, Made, opened, receipt_of, saved

from asking import ask, eventually, some_tokens
from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig
from headstart.engine.llama import opening
from headstart.tier.memory import MemoryTier
from headstart.tier.pool import PoolTier, Timing

PROMPT, MATCHED = some_tokens(650, 1, WORDS), 640


def test_what_a_pool_has_of_one_that_waits_is_read_before_its_turn(
    gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pool").mkdir()

    def open_told(_: CacheConfig, *, identity: Identity, representation: Representation) -> tuple[PrefixCache, str]:
        pool = PoolTier.open(tmp_path / "pool", capacity_bytes=64 << 20, timing=Timing())
        tiers = [MemoryTier(32 << 20), pool]
        return PrefixCache(tiers, identity=identity, representation=representation, match_timeout_s=20.0), "a pool"

    monkeypatch.setattr(opening, "open_told", open_told)
    with opened(gguf("llama"), tmp_path, kv_type="f32", kv_memory="8MiB") as engine:
        cold = ask(engine, PROMPT)
        receipt_of(cold)
        saved(engine)
    with opened(gguf("llama"), tmp_path, kv_type="f32", kv_memory="8MiB", max_running=1) as engine:
        cache = engine.cache
        assert cache is not None
        busy = [ask(engine, some_tokens(20, seed, WORDS), 900, id=f"busy {seed}", use_cache=False) for seed in (3, 4)]
        assert busy[0].first_token.wait(30)
        answer = ask(engine, PROMPT)
        eventually(lambda: cache.statistics().counters.get("loaded_tokens_pool", 0) >= MATCHED or busy[1].last is not None)
        assert busy[1].last is None
        for one in (3, 4):
            engine.abort(f"busy {one}")
        assert receipt_of(answer).cached_tokens == MATCHED
        assert answer.tokens == cold.tokens
