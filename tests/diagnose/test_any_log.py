"""Whatever stands in a log, it is read: what is no request is counted and named, and nothing ends in a traceback."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from diagnose.logs import turns
from diagnose.test_logs import har
from headstart.cli import run_cli
from headstart.diagnose.lint import Linter
from headstart.diagnose.logs import Log
from headstart.diagnose.mending import best_changes, replayed
from headstart.diagnose.reading import Reading
from headstart.errors import RequestError

NASTY = (
    None,
    True,
    0,
    -1,
    1 << 80,
    1e308,
    "",
    "\x00",
    "\ud800",
    "x" * 300,
    [],
    {},
    [[]],
    [None],
    {"type": 5},
    {"": ""},
    [{}],
    "[{",
    "NaN",
)


def seeds() -> list[Any]:
    """Entries of every form that is read."""
    body = turns(2)[1]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    body["messages"][2]["tool_calls"] = [call]
    blocks = [
        {"type": "text", "text": "Too warm? " * 30, "cache_control": {"type": "ephemeral"}},
        {"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "It is. " * 30}]},
        {"type": "thinking", "thinking": "Hm. " * 30},
        {"type": "image", "source": {"data": "aaaa"}},
    ]
    tools = [{"name": "look", "input_schema": {"type": "object", "required": ["a"]}}]
    claude = {"system": blocks[:1], "messages": [{"role": "user", "content": blocks}], "tools": tools}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look. " * 40}]},
        {"type": "reasoning", "summary": [{"text": "Hm. " * 30}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "It is. " * 30},
    ]
    codex = {
        "instructions": "Be brief. " * 30,
        "input": items,
        "tools": [{"type": "function", "name": "look", "parameters": {}}],
    }
    usage = {"prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": 0}}
    answer = {"choices": [{"message": {"content": "Yes."}, "finish_reason": "length"}], "usage": usage}
    named = {"timestamp": "2026-11-30T10:00:00Z", "session_id": "s", "tenant": "t", "tags": ["x"], "metadata": {"user_id": "u"}}
    return [
        {**named, "body": body, "response": answer},
        {**named, "request": claude, "usage": {"input_tokens": 9, "cache_read_input_tokens": 0}},
        {**named, "body": codex, "response": {"output": [{"content": [{"type": "output_text", "text": "Yes."}]}]}},
        {"id": "p", "messages": body["messages"], "model_parameters": {"tools": body["tools"]}, "startTime": 5.0},
        {"conversations": [{"from": "human", "value": "One? " * 60}, {"from": "gpt", "value": "1."}]},
        har([body])["log"]["entries"][1],
        {"prompt": "The same. " * 60, "prompt_token_ids": list(range(200))},
    ]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a value that something else can be put into, as a holder and a key."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [*((value, key) for key, _ in items), *(place for _, inner in items for place in places(inner))]


def test_what_is_put_anywhere_into_an_entry_ends_in_no_traceback(tmp_path: Path) -> None:
    r, lines = random.Random(7), []
    for seed in seeds():
        for _ in range(12):
            entry = copy.deepcopy(seed)
            for holder, key in r.sample(found := places(entry), min(r.choice((1, 1, 2)), len(found))):
                holder[key] = r.choice(NASTY)
            lines += [entry, copy.deepcopy(seed)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reading = Reading(rules=frozenset({"billing-header"}), tenants_apart=True)
    with Log([str(path)], read_stdin=lambda: open(path, "rb")) as log:
        linter = Linter(log, reading, capacity_tokens=10_000)
        for found_entry in log:
            linter.add(found_entry)
        lint = linter.result()
        replayed(best_changes(lint, 3), log, reading, on_request=lambda n, one: None)
    assert lint.all.requests + lint.unread >= len(lines)
    assert lint.all.requests > len(lines) / 2


def test_a_transcript_s_lines_may_hold_anything(tmp_path: Path) -> None:
    r = random.Random(8)
    said = []
    for n, kind in enumerate(("user", "assistant") * 4):
        content = [{"type": "text", "text": f"Gate {n}. " * 40}]
        message = {"id": f"m{n}", "role": kind, "content": content, "usage": {"input_tokens": 5}}
        line = {"type": kind, "uuid": f"u{n}", "parentUuid": f"u{n - 1}", "sessionId": "s", "timestamp": "2026-11-30T10:00:00Z"}
        said.append({**line, "message": message})
    usage = {"last_token_usage": {"input_tokens": 5, "cached_input_tokens": 1}}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look. " * 50}]}
    answered = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]}
    call = {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}
    result = {"type": "function_call_output", "call_id": "c", "output": {"content": "a"}}
    rollout: list[Any] = [
        {"type": "session_meta", "payload": {"id": "s", "base_instructions": {"text": "Be brief. " * 30}}},
        {"type": "turn_context", "payload": {"model": "m"}},
        *({"type": "response_item", "payload": item} for item in (asked, call, result, answered)),
        {"type": "event_msg", "payload": {"type": "token_count", "info": usage}},
        {"type": "compacted", "payload": {"message": "A summary.", "replacement_history": []}},
    ]
    for n in range(40):
        lines = copy.deepcopy(said if n % 2 else rollout)
        holder, key = r.choice(places(lines[1:]))
        holder[key] = r.choice(NASTY)
        path = tmp_path / "session.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with Log([str(path)], read_stdin=lambda path=path: open(path, "rb")) as log:
            linter = Linter(log, Reading())
            try:
                for found in log:
                    linter.add(found)
            except RequestError:
                continue
            linter.result()


HOSTILE = {
    "empty": b"",
    "blank": b"\n \n\r\n",
    "NUL": b"\x00" * 5000,
    "binary": bytes(random.Random(1).randrange(256) for _ in range(5000)),
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep object": b'{"messages":' * 50_000 + b"1" + b"}" * 50_000,
    "half a line": b'{"messages": [{"role": "user", "content": "Wh',
    "a number": b"5\n",
    "large number": b'{"timestamp": ' + b"9" * 4000 + b"}\n",
    "gzip cut off": b"\x1f\x8b\x08\x00",
    "UTF-16": '{"messages": []}\n'.encode("utf-16"),
    "one long line": b'{"messages": [{"role": "user", "content": "' + b"x" * 3_000_000,
    "an array without end": b'[{"messages": []},' + b" " * 2_000_000,
    "HAR without entries": b'{"log": {"version": "1.2"}}',
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", ["lint", "diff"])
def test_what_is_no_log_is_refused_in_one_sentence(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(HOSTILE[name])
    code = run_cli([command, *[str(file)] * (2 if command == "diff" else 1)])
    said = capsys.readouterr()
    assert code == 2, said
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line != "reading"]
    assert len(lines) == 1
    assert lines[0].startswith("headstart: ")
    assert len(lines[0]) < 600
