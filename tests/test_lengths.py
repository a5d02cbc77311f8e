"""The benchmark over lengths, small: what it compares is the same work, and what it shows is what it measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks import lengths

SMALL = {"lengths": (128, 256), "rounds": 2, "slow_rounds": 1, "session_tokens": 1500, "session_rounds": 1}


@pytest.fixture
def tiny(tiny_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOME", str(tmp_path))  # where benchmarks make their directories
    return str(tiny_model_folder("llama"))


def test_every_way_of_every_length_gives_the_first_token_of_stock_transformers(tiny: str) -> None:
    result = lengths.run(model=tiny, **SMALL)
    assert result["same_tokens"]
    assert result["session"]["same_tokens"]
    assert result["session"]["prompt_tokens"] == 1484
    assert [one["tokens"] for one in result["lengths"]] == [128, 256]
    assert all(one[way] > 0 for one in result["lengths"] for way in (*lengths.WAYS, "floor"))
    assert [one["hits"] for one in result["lengths"]] == [4, 4]  # from disk and from memory, two rounds


def test_another_first_token_is_told(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def wrong(folder: Path) -> Iterator[Callable[[Sequence[int]], tuple[float, int]]]:
        yield lambda prompt: (1.0, 511)

    monkeypatch.setattr(lengths, "_stock", wrong)
    result = lengths.run(model=tiny, smoke=True, lengths=(128,))
    assert not result["same_tokens"]
    assert "The same first token everywhere: no." in lengths.table(result)


def made_up() -> dict[str, Any]:
    several = [
        {"tokens": tokens, "stock": 4.0 * n, "cold": 3.0 * n, "disk": 0.5 * n, "memory": 0.4 * n, "floor": 0.25 * n}
        for n, tokens in ((1, 512), (8, 4096))
    ]
    session = {"tokens": 32_000, "turns": 64, "prompt_tokens": 31_984, "cached_tokens": 31_488, "rounds": 3}
    return {
        "question_tokens": 64,
        "rounds": 5,
        "slow_rounds": 2,
        "lengths": [{**one, "hits": 10, "whole_hits": 9} for one in several],
        "same_tokens": True,
        "page_cache_bytes": 4096,
        "session": {**session, "cold": 6.0, "disk": 0.5, "same_tokens": True},
    }


def test_the_table_gives_times_and_ratios_of_each_length() -> None:
    said = lengths.table(made_up())
    assert "| 512 | 4.00 s | 3.00 s | **0.500 s** | 0.400 s | 0.250 s | **8.0** | 6.0 | 2.00 |" in said
    assert "| 4,096 | 32.00 s | 24.00 s | **4.00 s** | 3.20 s | 2.00 s | **8.0** | 6.0 | 2.00 |" in said
    assert "18 of 20" in said
    assert "at most 4 KiB" in said
    assert "| first token of the last turn | 6.00 s | **0.500 s** | **12.0** |" in said


def test_equal_results_give_equal_pictures_with_names_and_units(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        lengths.plot(made_up(), tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    for text in ("time to first token (s)", "prefix (tokens)", "4,096", *(name for name, _ in lengths.WAYS.values())):
        assert text in drawn
