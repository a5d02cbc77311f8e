"""The real model, killed and started again: what a hit gives and what computing gives are the same bits, or it is said why not.

Two things alone make libllama's own logits differ for one prompt: a pass of fewer than 64 rows has another kernel, and where
cells lie in another order sums are taken in it. Both are roundings of 16 bits, and of activations to 8, that thirty layers
enlarge: up to 3.5 % of the largest logit between two ways of computing 700 random tokens, with f16 and q8_0 alike. So where
a prompt is whole blocks and the engine has nothing else in its memory, hit and cold must agree to the bit, however either was
cut; elsewhere within that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from llama_kit import opened, receipt_of, saved, tell, told_by_one_that_is_killed

from asking import some_tokens
from headstart.engine.exactness import same_tokens
from headstart.engine.smollm2 import GGUF_ALIAS, fetch_smollm2_gguf

pytestmark = pytest.mark.real_model

MODELS = Path(__file__).parents[3] / "models"
WORDS = 49_000  # special tokens and all
_NOISE = 0.05  # of the largest logit


@pytest.fixture(scope="module")
def file() -> Path:
    return fetch_smollm2_gguf(MODELS / GGUF_ALIAS, lambda *_: None)


def test_a_hit_after_sigkill_is_what_computing_gives_to_the_bit(file: Path, tmp_path: Path) -> None:
    check(file, tmp_path, kv_type="f16", tokens=128, context=512, edges=(64,), ragged=False)


@pytest.mark.soak
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_hit_that_is_not_whole_blocks_is_near_to_what_computing_gives(kv_type: str, file: Path, tmp_path: Path) -> None:
    check(file, tmp_path, kv_type=kv_type, tokens=192, context=512, edges=(64, 128), ragged=True)


@pytest.mark.soak
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_long_hit_after_sigkill_is_what_computing_gives_to_the_bit(kv_type: str, file: Path, tmp_path: Path) -> None:
    check(file, tmp_path, kv_type=kv_type, tokens=7552, context=8192, edges=(64, 128, 4096, 7488), ragged=False)


def check(file: Path, directory: Path, *, kv_type: str, tokens: int, context: int, edges: Sequence[int], ragged: bool) -> None:
    """What a process computed cold, and saved, before it was killed, and what another finds: at each edge. `ragged`: with a
    prompt that is not whole blocks as well, which is only as near as roundings are."""
    settings = {"kv_type": kv_type, "context": context, "kv_memory": f"{context * 30_000}", "max_running": 1}
    prompt = some_tokens(tokens, 1, WORDS)
    parted = {edge: [*prompt[:edge], *some_tokens(64, edge, WORDS)] for edge in edges}
    cache = {"memory": "0", "capacity": "1GiB"}
    asked = [prompt] if ragged else []
    asked += [parted[edge] for edge in reversed(edges)]  # what the first one saves holds all other beginnings
    colds = told_by_one_that_is_killed(file, directory, asked, cache=cache, **settings)
    with opened(file, directory, cache=cache, **settings) as engine:
        for edge, cold in zip(edges, reversed(colds), strict=False):
            hit = tell(engine, parted[edge])
            assert receipt_of(hit).cached_disk_tokens == edge
            assert hit.tokens == cold.tokens
            assert hit.logprobs == cold.logprobs
            saved(engine)

        if ragged:
            other = [*prompt[: edges[-1]], *some_tokens(25, 7, WORDS)]
            cold, hit = tell(engine, other, use_cache=False), tell(engine, other)
            assert receipt_of(hit).cached_disk_tokens == edges[-1]
            scale = float(np.abs(engine.next_logits(other)).max())
            assert same_tokens(engine.next_logits, other, cold.tokens, hit.tokens, tolerance=_NOISE * scale)
        assert engine.cache is not None
        assert engine.cache.check() == []
