"""docs/vllm.md says what the connector counts."""

from __future__ import annotations

from pathlib import Path

from headstart.connect.vllm.statistics import COUNTERS

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()


def test_every_counter_is_told() -> None:
    rows = [f"| `headstart_{name}` | {about[0].lower()}{about[1:]} |" for name, about in COUNTERS.items()]
    table = PAGE.partition("<!-- counters -->\n")[2].partition("<!-- end of counters -->")[0]
    assert table.splitlines() == ["| counter | |", "|---|---|", *rows]
