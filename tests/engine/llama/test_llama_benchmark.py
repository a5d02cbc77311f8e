"""The comparison with llama-server runs, and its table says what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import llama

from headstart.engine.smollm2 import GGUF_ALIAS, fetch_smollm2_gguf

MODELS = Path(__file__).parents[3] / "models"


@pytest.mark.soak
@pytest.mark.real_model
def test_both_servers_are_asked_in_every_way_and_give_the_same_tokens() -> None:
    result = llama.run(smoke=True, file=fetch_smollm2_gguf(MODELS / GGUF_ALIAS, lambda *_: None))
    assert [len(result[side]) for side in ("headstart", "llama_server")] == [1, 1]
    table = llama.table(result)
    print(table)
    assert all(f"| {name} |" in table for name, *_ in llama._ROWS)
    assert "from both in 3 of 3 answers" in table
