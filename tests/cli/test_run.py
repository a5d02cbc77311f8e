"""`headstart run` over a tiny model: the text on stdout, what it cost on stderr, and the second run reads from disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.cli import run_cli

PROMPT = "The same long question as before. " * 20


@pytest.fixture
def arguments(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> list[str]:
    cache = ["--cache-directory", str(tmp_path / "kv"), "--cache-capacity", "64MiB", "--cache-memory", "8MiB"]
    return [
        "run",
        PROMPT,
        "--model",
        str(tiny_model_folder("llama")),
        "--kv-memory",
        "64MiB",
        "--max-tokens",
        "5",
        *cache,
        "--models-directory",
        str(tmp_path),
    ]


def test_the_second_run_reads_its_prompt_from_disk(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for _ in range(2):
        assert run_cli([*arguments, "--json", "--temperature", "0"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    cold, warm = answers
    assert (cold["cached_disk_tokens"], warm["cached_memory_tokens"]) == (0, 0)
    assert warm["cached_disk_tokens"] == cold["prompt_tokens"] // 64 * 64
    assert (cold["text"], cold["completion_tokens"], cold["finish_reason"]) == (warm["text"], 5, "length")


def test_text_goes_to_stdout_and_figures_to_stderr(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([*arguments, "--system", "Be brief.", "--seed", "1", "--no-cache"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("\n")
    last = captured.err.splitlines()[-1]
    assert last.startswith("[prompt ")
    assert ": 0 from disk, " in last


def test_a_prompt_longer_than_the_context_is_a_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([*arguments, "--context", "128"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("headstart: the prompt has ")
    assert "128 tokens" in said
