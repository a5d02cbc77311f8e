"""The comparison with llama-server runs, and its table says what it should."""

from __future__ import annotations

import pytest
from benchmarks import llama
from llama_kit import Made


@pytest.mark.soak
def test_both_servers_are_asked_in_every_way_and_give_the_same_tokens(gguf: Made) -> None:
    result = llama.run(smoke=True, file=gguf("llama"))
    assert [len(result[side]) for side in ("headstart", "llama_server")] == [1, 1]
    table = llama.table(result)
    assert all(f"| {name} |" in table for name, *_ in llama._ROWS)
    assert "from both in 3 of 3 answers" in table
