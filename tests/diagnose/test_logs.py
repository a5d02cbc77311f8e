"""Logs of every kind give the same requests, in order, however they are cut; what cannot be read is counted and told."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from diagnose.logs import Body, linted, turns, written
from headstart.diagnose import logs
from headstart.diagnose.entries import Entry, Usage, usage_of
from headstart.diagnose.logs import Log, Unread
from headstart.errors import NotThere, RequestError


def read(*names: Path | str, stdin: bytes = b"") -> list[Entry | Unread]:
    """All entries; each read once more is the same."""
    with Log([str(name) for name in names], read_stdin=lambda: io.BytesIO(stdin)) as log:
        found = list(log)
        for one in found:
            if isinstance(one.entry, Entry):
                assert log.read(one.locator) == one.entry
        return [one.entry for one in found]


def bodies(*names: Path | str, stdin: bytes = b"") -> list[Any]:
    return [entry.source.body for entry in read(*names, stdin=stdin) if isinstance(entry, Entry) and entry.source]


REQUESTS = turns(3)


def har(requests: list[Body]) -> dict[str, Any]:
    answer = 'event: message_start\ndata: {"message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 64}}}\n\n'
    page = {"startedDateTime": "2026-11-30T10:00:00Z", "time": 5, "request": {"method": "GET", "url": "https://x.test/"}}
    posts = [
        {
            "startedDateTime": f"2026-11-30T10:00:0{n}.5Z",
            "time": 1500,
            "request": {"method": "POST", "url": "https://x.test/v1", "postData": {"text": json.dumps(body)}},
            "response": {"content": {"text": answer}},
        }
        for n, body in enumerate(requests)
    ]
    return {"log": {"version": "1.2", "entries": [page, *posts]}}


FORMS: dict[str, Any] = {
    "bodies": lambda: "".join(json.dumps(one) + "\n" for one in REQUESTS),
    "under a name, with blank and Windows lines": lambda: "\r\n\r\n".join(json.dumps({"request": one}) for one in REQUESTS),
    "a batch": lambda: "".join(
        json.dumps({"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": one}) + "\n"
        for n, one in enumerate(REQUESTS)
    ),
    "a proxy's payload": lambda: "".join(
        json.dumps(
            {
                "id": f"x{n}",
                "startTime": 1790000000.5 + n,
                "messages": one["messages"],
                "model": one["model"],
                "model_parameters": {"tools": one["tools"]},
                "response": {"usage": {"prompt_tokens": 9}},
            }
        )
        + "\n"
        for n, one in enumerate(REQUESTS)
    ),
    "a proxy's copy of what came in": lambda: "".join(
        json.dumps({"messages": [], "proxy_server_request": {"url": "/v1", "body": one}}) + "\n" for one in REQUESTS
    ),
    "an array": lambda: json.dumps(REQUESTS),
    "an indented array": lambda: json.dumps(REQUESTS, indent=2),
    "HAR": lambda: json.dumps(har(REQUESTS)),
    "indented HAR": lambda: json.dumps(har(REQUESTS), indent=2),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["file", "gzip", "standard input", "small pieces"])
def test_every_form_gives_the_same_requests(tmp_path: Path, form: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = FORMS[form]().encode()
    file = tmp_path / "log.jsonl"
    file.write_bytes(gzip.compress(content) if way == "gzip" else content)
    if way == "small pieces" and "HAR" not in form:
        monkeypatch.setattr(logs, "_CHUNK", 700)  # what a HAR is must stand in the first one
    got = bodies("-", stdin=content) if way == "standard input" else bodies(file)
    assert [{key: one[key] for key in ("messages", "tools", "model")} for one in got] == REQUESTS


def test_one_indented_request_is_a_log_of_one(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(REQUESTS[2], indent=2))
    assert bodies(file) == [REQUESTS[2]]


def test_har_tells_times_and_usage_of_streams(tmp_path: Path) -> None:
    file = tmp_path / "a.har"
    file.write_text(json.dumps(har(REQUESTS)))
    page, entry, *_ = read(file)
    assert isinstance(page, Unread)
    assert isinstance(entry, Entry)
    assert entry.usage == Usage(69, 64)
    assert entry.at is not None
    assert entry.end is not None
    assert entry.end - entry.at == pytest.approx(1.5)


def test_sharegpt_gives_a_request_for_every_question(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1."}, {"from": "human", "value": "Two?"}]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"id": "a", "conversations": talk}, {"id": "b", "conversations": talk[:2]}]))
    got = [[message["content"] for message in one["messages"]] for one in bodies(file)]
    assert got == [["One?"], ["One?", "1.", "Two?"], ["One?"]]


def claude(type: str, id: str, parent: str | None, content: Any, **more: Any) -> dict[str, Any]:
    message = {"role": type, "content": content, **more.pop("message", {})}
    return {"type": type, "uuid": id, "parentUuid": parent, "sessionId": "s", "message": message, **more}


def test_a_claude_code_transcript_gives_a_request_for_every_answer_along_its_branch(tmp_path: Path) -> None:
    usage = {"input_tokens": 10, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 28}
    lines = [
        {"type": "summary", "summary": "x", "leafUuid": "4"},
        claude("user", "1", None, "Look.", timestamp="2026-11-30T10:00:00Z"),
        claude("assistant", "2", "1", [{"type": "thinking", "thinking": "Hm."}], message={"id": "m1", "usage": usage}),
        claude(
            "assistant",
            "3",
            "2",
            [{"type": "tool_use", "id": "t", "name": "ls", "input": {}}],
            message={"id": "m1", "usage": usage},
        ),
        claude("user", "4", "3", [{"type": "tool_result", "tool_use_id": "t", "content": "a b"}]),
        claude("assistant", "5", "4", [{"type": "text", "text": "Two."}], message={"id": "m2"}),
        claude("user", "6", "1", "Rather this.", isSidechain=True),
        claude("assistant", "7", "6", [{"type": "text", "text": "Yes."}], message={"id": "m3"}, isSidechain=True),
        claude("user", "8", "5", "Thanks."),
    ]
    file = written(tmp_path / "session.jsonl", lines)
    with file.open("a") as log:
        log.write('{"type": "assistant", "uuid": "9", "mess')  # it still runs
    first, second, third = read(file)
    assert isinstance(first, Entry)
    assert isinstance(second, Entry)
    assert isinstance(third, Entry)
    assert [len(one.source.body["messages"]) for one in (first, second, third) if one.source] == [1, 3, 1]
    assert (first.id, first.usage, first.session) == ("m1", Usage(128, 90), "s")
    assert (third.session, third.tags) == ("s:side", ("sub-agent",))
    lint = linted(file)
    assert lint.all.requests == 3
    assert lint.logged is not None
    assert lint.logged.requests == 1


def test_a_codex_rollout_gives_a_request_for_every_answer(tmp_path: Path) -> None:
    def item(**payload: Any) -> dict[str, Any]:
        return {"timestamp": "2026-11-30T10:00:00Z", "type": "response_item", "payload": payload}

    def said(role: str, text: str) -> dict[str, Any]:
        return item(type="message", role=role, content=[{"type": "input_text", "text": text}])

    def counted(cached: int) -> dict[str, Any]:
        usage = {"input_tokens": 100, "cached_input_tokens": cached, "output_tokens": 5}
        return {"type": "event_msg", "payload": {"type": "token_count", "info": {"last_token_usage": usage}}}

    lines = [
        {"type": "session_meta", "payload": {"id": "s", "base_instructions": {"text": "Be brief."}}},
        {"type": "turn_context", "payload": {"model": "m"}},
        said("user", "Look."),
        item(type="reasoning", summary=[{"type": "summary_text", "text": "Hm."}]),
        item(type="function_call", name="shell", arguments='{"cmd": "ls"}', call_id="c"),
        counted(0),
        item(type="function_call_output", call_id="c", output="a b"),
        said("assistant", "Two."),
        counted(64),
        {"type": "compacted", "payload": {"message": "Two files were found."}},
        said("user", "Thanks."),
        said("assistant", "Yes."),
    ]
    entries = [one for one in read(written(tmp_path / "rollout.jsonl", lines)) if isinstance(one, Entry)]
    assert [len(one.source.body["input"]) for one in entries if one.source] == [1, 4, 2]
    assert [one.usage.cached_tokens for one in entries] == [0, 64, None]
    assert {one.session for one in entries} == {"s"}
    assert all(one.source and one.source.body["instructions"] == "Be brief." for one in entries)


def test_several_logs_are_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    for name, times in (("a", (1, 4, 5)), ("b", (2, 3, 6))):
        written(tmp_path / f"{name}.jsonl", [{"ts": 1790000000 + at, "id": str(at), "body": REQUESTS[0]} for at in times])
    assert [entry.id for entry in read(tmp_path)] == ["1", "2", "3", "4", "5", "6"]


def test_what_is_no_request_is_counted_and_told(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    lines = [
        json.dumps(REQUESTS[0]),
        "{",
        json.dumps({"level": "info"}),
        json.dumps({"messages": 5}),
        "null",
        json.dumps(REQUESTS[0]),
    ]
    file.write_text("\n".join(lines))
    lint = linted(file)
    assert (lint.all.requests, lint.unread) == (2, 4)
    assert any("log.jsonl#2" in why for why in lint.unread_such_as)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.gz", gzip.compress(b'{"messages": []}' * 99, mtime=0)[:-20], "is no whole gzip file"),
        ("a.json", b'[{"messages": [', "within an object"),
    ],
)
def test_a_damaged_log_is_refused_with_a_sentence(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(RequestError, match=said):
        read(file)


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotThere, match="nowhere"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(NotThere, match="no log in"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("told", "want"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, None)),
        ({"prompt_tokens": 9, "prompt_cache_hit_tokens": 4, "prompt_cache_miss_tokens": 5}, Usage(9, 4)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
        ({"input_tokens": 9, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}, Usage(15, 4)),
        ({"completion_tokens": 9}, None),
        ("much", None),
    ],
)
def test_usage_of_every_dialect_is_of_the_whole_prompt(told: Any, want: Usage | None) -> None:
    assert usage_of(told) == want
