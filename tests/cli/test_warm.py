"""`headstart warm`: prompts in files are computed and kept by a running server, and it is told of each what was new."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.serving import Running, running
from headstart.cli import run_cli
from headstart.cli.warm import _path
from headstart.testing.fake_engine import FakeEngine

TEXT = "What is the same in every request stands first. " * 4 + "x"


@pytest.fixture
def server() -> Iterator[Running]:
    with running(FakeEngine()) as server:
        yield server


def _warm(server: Running, capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code = run_cli(["warm", *map(str, arguments), "--url", server.url, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_bodies_lines_and_texts_are_computed_and_kept(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {"messages": [{"role": "user", "content": TEXT}], "stream": True, "max_tokens": 7, "n": 3}
    (tmp_path / "body.json").write_text(json.dumps(chat, indent=1))
    lines = [chat, {"custom_id": "1", "body": {"prompt": "of a batch"}}, {"prompt": TEXT}, chat["messages"]]
    (tmp_path / "many.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "text.md").write_text(f"# A handbook\n\n{TEXT}")
    files = [tmp_path / name for name in ("body.json", "many.jsonl", "text.md")]
    code, told = _warm(server, capsys, *files, "--ttl", "1h", "--retention", "agent")
    assert (code, told["failed"]) == (0, 0)
    names = [Path(one["name"]).name for one in told["prompts"]]
    assert names == ["body.json", "many.jsonl:1", "many.jsonl:3", "many.jsonl:5", "many.jsonl:7", "text.md"]
    assert [one["cached_tokens"] for one in told["prompts"]] == [0, 192, 0, 0, 192, 0]
    assert all(request.max_tokens == 0 and request.retention == "agent" for request in server.engine.submitted)
    assert len(server.engine.submitted) == 6
    again = _warm(server, capsys, files[0])[1]["prompts"][0]
    assert (again["prompt_tokens"], again["cached_tokens"]) == (199, 192)


def test_what_fails_is_told_and_the_others_go_on(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "many.jsonl").write_text('{"messages": []}\n{"prompt": "x"}\n')
    code, told = _warm(server, capsys, tmp_path / "many.jsonl")
    assert (code, told["failed"]) == (1, 1)
    assert told["prompts"][0]["error"].startswith("400: messages is empty")
    assert run_cli(["warm", str(tmp_path / "many.jsonl"), "--url", server.url]) == 1
    assert "1 tokens, 1 computed, 0 kept before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff\xfe", "is not UTF-8"),
        (b'{"prompt": "x"}\n{}\n', "line 2, is no request"),
    ],
)
def test_a_file_that_holds_no_prompt_is_refused_before_anything_is_sent(
    server: Running, tmp_path: Path, content: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(content)
    assert run_cli(["warm", str(tmp_path / "file"), "--url", server.url]) == 2
    assert says in capsys.readouterr().err
    assert server.engine.submitted == []
    assert run_cli(["warm", str(tmp_path / "missing"), "--url", server.url]) == 2


def test_without_a_server_it_says_how_to_start_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("x")
    assert run_cli(["warm", str(tmp_path / "text"), "--url", "http://127.0.0.1:9"]) == 4
    assert "headstart serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": []}, "/v1/chat/completions"),
        ({"messages": [], "system": "x"}, "/v1/messages"),
        ({"messages": [], "tools": [{"name": "f", "input_schema": {}}]}, "/v1/messages"),
        ({"messages": [], "tools": [{"type": "function", "function": {}}]}, "/v1/chat/completions"),
        ({"prompt": "x"}, "/v1/completions"),
        ({"input": "x"}, "/v1/responses"),
    ],
)
def test_a_body_goes_where_its_dialect_is_spoken(body: dict[str, Any], path: str) -> None:
    assert _path(body) == path
