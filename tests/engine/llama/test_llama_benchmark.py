"""The comparisons with llama-server run, and their tables say what they should."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks import llama, llama_hits

from headstart.engine.smollm2 import GGUF_ALIAS, fetch_smollm2_gguf

MODELS = Path(__file__).parents[3] / "models"


@pytest.mark.soak
@pytest.mark.real_model
@pytest.mark.parametrize("benchmark", [llama, llama_hits])
def test_both_servers_are_asked_in_every_way_and_give_the_same_tokens(benchmark: ModuleType) -> None:
    result = benchmark.run(smoke=True, file=fetch_smollm2_gguf(MODELS / GGUF_ALIAS, lambda *_: None))
    assert [len(result[side]) for side in ("headstart", "llama_server")] == [1, 1]
    table = benchmark.table(result)
    print(table)
    assert all(f"| {name} |" in table for name, *_ in benchmark._ROWS)
    assert re.search(r"from both in (\d) of \1 answers", table)
