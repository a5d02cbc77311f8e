"""A disk whose lookups hang holds up nobody: neither streams that leave the cache alone, nor the request that asks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from held_cache import eventually
from reference import ask, engine_of, loaded, some_tokens

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.faults import Fault, FaultyTier
from headstart.tier.disk import DiskTier


@pytest.mark.parametrize("verb", ["locate", "lease", "read", "touch", "write"])
def test_streams_flow_on_while_a_verb_of_the_disk_hangs(
    tiny_model_folder: Callable[..., Path], tmp_path: Path, verb: str
) -> None:
    model = loaded(tiny_model_folder("llama"))
    tier = FaultyTier(DiskTier.open(tmp_path, capacity_bytes=64 << 20), stall_s=120.0)
    representation = model.shape.representation(query_heads=model.heads)
    cache = PrefixCache([tier], identity=Identity(weights=b"w" * 32, architecture=b"{}"), representation=representation)
    with engine_of(model, cache=cache, max_running=4) as engine:
        prompt = some_tokens(200)
        cold = ask(engine, prompt)
        cold.result()
        eventually(lambda: engine.load().kv_used_bytes == 0)

        tier.inject(Fault(verb, "stall"))  # type: ignore[arg-type]
        stream = ask(engine, some_tokens(10), 400, use_cache=False)
        assert stream.first_token.wait(30)
        asking = ask(engine, prompt if verb != "write" else some_tokens(300, seed=2))
        assert tier.stalled.wait(30)
        assert stream.result().finish == "length"
        others = [ask(engine, some_tokens(100, seed=seed), use_cache=seed % 2 == 0) for seed in range(4)]
        assert {other.result().finish for other in others} == {"length"}
        assert tier.stalled.is_set()  # all of that while it still hangs

        if verb != "read":  # which has a deadline of its own
            assert asking.result().finish == "length"
        tier.heal()
        assert asking.result().finish == "length"
        if verb != "write":
            assert asking.tokens == cold.tokens
        eventually(lambda: engine.load().kv_used_bytes == 0)
