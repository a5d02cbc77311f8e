"""What the demo compares with: plain transformers, cold and over its own cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from headstart.cli.demo import DemoResult, _table
from headstart.cli.demo_stock import StockRequest, answer


def test_every_question_is_asked_over_a_cache_of_just_its_beginning(
    tiny_model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []  # tokens before, and those computed
    real = transformers.LlamaForCausalLM.forward

    def forward(self: Any, ids: Any, *, cache: Any = None, **more: Any) -> Any:
        seen.append((0 if cache is None else cache.get_seq_length(), ids.shape[1]))
        return real(self, ids, cache=cache, **more)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    prompts = [[{"role": "user", "content": "The same beginning. " * 20 + question}] for question in ("Why?", "Which gate?")]
    found = answer(StockRequest(str(tiny_model_folder("llama")), prompts, [128, 64]))
    (_, (before, whole), *hits) = seen
    assert (before, whole > 128) == (0, True)
    assert [at for at, _ in hits] == [128] * 3 + [64] * 3
    assert [at + count for at, count in hits[:3]] == [whole] * 3
    assert found.cold_s > 0
    assert len(found.over_own_cache_s) == 2


def test_a_gguf_is_shown_without_stock() -> None:
    result = DemoResult(100, 64, 1000, 2.0, 0.1, 0.1, 0.1, 20.0, 1.0, True, 90, 1, 0, (0.1,), (0.1,), None, None, None, None)
    assert _table(result).row_count == 10
