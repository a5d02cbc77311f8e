"""Messages with the `anthropic` library as it is: blocks, events, ping, tools, thinking, counting, usage, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from api.serving import Running, running
from headstart.testing.fake_engine import FakeEngine

TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "cache_control": {"type": "ephemeral"},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Röm"}}\n</tool_call>'
SAID = "<think>\nHm.\n</think>\n\nI look.\n" + CALL
ASKED: dict[str, Any] = {"model": "any", "max_tokens": 400, "messages": [{"role": "user", "content": "Rom?"}]}


def client_of(server: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(), family="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


@pytest.fixture
def says(server: Running, client: anthropic.Anthropic) -> Iterator[Any]:
    def says(text: str | None) -> anthropic.Anthropic:
        server.engine.answer = None if text is None else text.encode()
        return client

    yield says
    server.engine.answer = None
    server.engine.fail_after = None


def prompt_of(server: Running) -> str:
    return bytes(server.engine.submitted[-1].prompt).decode()


def test_an_answer_is_thinking_text_and_tool_use_as_blocks(says: Any, server: Running) -> None:
    answer = says(SAID).messages.create(**ASKED, tools=TOOLS, system="Be short.")
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    thinking, text, use = answer.content
    assert (thinking.thinking, text.text, use.name, use.input) == ("Hm.", "I look.", "weather", {"city": "Röm"})
    assert (answer.stop_reason, answer.role, answer.type) == ("tool_use", "assistant", "message")
    assert prompt_of(server) == "<system>Be short.<user>Rom?"


def test_events_build_the_same_answer(says: Any) -> None:
    with says(SAID).messages.stream(**ASKED, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert (final.content[1].text, final.content[2].input, final.stop_reason) == ("I look.", {"city": "Röm"}, "tool_use")
    assert final.usage.output_tokens == len(SAID.encode())
    with says(SAID).messages.stream(**ASKED, tools=TOOLS) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
    assert len(parts) > 5
    assert json.loads("".join(parts)) == {"city": "Röm"}


def test_a_tool_use_that_is_cut_off_has_what_was_whole(says: Any) -> None:
    long = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": [1, 2'
    asked = ASKED | {"max_tokens": len(long), "tools": TOOLS}
    answer = says(long + ", 3]}}\n</tool_call>").messages.create(**asked)
    assert (answer.content[0].input, answer.stop_reason) == ({"city": "Rom"}, "max_tokens")
    with says(long + ", 3]}}\n</tool_call>").messages.stream(**asked) as stream:
        assert stream.get_final_message().content[0].input["city"] == "Rom"


def test_what_was_called_and_thought_goes_back_with_its_result(says: Any, server: Running) -> None:
    answer = says(SAID).messages.create(**ASKED, tools=TOOLS)
    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": [{"type": "text", "text": "mild"}]}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]},
    ]
    told = says("Mild.").messages.create(**ASKED | {"messages": history}, tools=TOOLS)
    assert told.content[0].text == "Mild."
    assert prompt_of(server) == "<user>Rom?<assistant>I look.<tool>mild<user>So?"


def test_parallel_tool_uses_go_back_with_a_result_each(says: Any, server: Running) -> None:
    answer = says(SAID + "\n" + CALL).messages.create(**ASKED, tools=TOOLS)
    uses = [block for block in answer.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": use.id, "content": said} for use, said in zip(uses, ("mild", "low"), strict=True)
    ]
    said = [block.to_dict() for block in answer.content]
    history = [*ASKED["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    says("So.").messages.create(**ASKED | {"messages": history}, tools=TOOLS)
    assert prompt_of(server) == "<user>Rom?<assistant>I look.<tool>mild<tool>low"


def test_where_cache_control_stands_does_not_change_the_prompt(says: Any, server: Running) -> None:
    marked = [{"type": "text", "text": "Rom?", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    says("x").messages.create(**ASKED | {"messages": [{"role": "user", "content": marked}]})
    assert prompt_of(server) == "<user>Rom?"
    says("x").messages.create(**ASKED, cache_control={"type": "ephemeral"})
    assert prompt_of(server) == "<user>Rom?"


def test_usage_counts_apart_what_was_cached_and_is_told_from_the_start(says: Any) -> None:
    asked = ASKED | {"messages": [{"role": "user", "content": "Which city is it that we mean? " * 10}], "max_tokens": 8}
    first = says(None).messages.create(**asked)
    whole = first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.cache_creation_input_tokens
    assert first.usage.cache_read_input_tokens == 0
    assert whole == says(None).messages.count_tokens(model="any", messages=asked["messages"]).input_tokens
    with says(None).messages.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_message()
    start = next(event.message.usage for event in events if event.type == "message_start")
    assert start.cache_read_input_tokens == final.usage.cache_read_input_tokens > 0
    usage = final.usage
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == whole


@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [({"type": "any"}, "No.", 1), ({"type": "tool", "name": "weather"}, "No.", 1), ({"type": "none"}, CALL, 0)],
)
def test_tool_choice_holds(says: Any, choice: Any, text: str, calls: int) -> None:
    answer = says(text).messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
    assert sum(block.type == "tool_use" for block in answer.content) >= calls
    assert (answer.stop_reason == "tool_use") == bool(calls)


def test_one_tool_use_alone_where_parallel_ones_are_disabled(says: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = says(CALL + "\n" + CALL).messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]


def test_json_of_a_schema(says: Any) -> None:
    form = {"format": {"type": "json_schema", "schema": TOOLS[0]["input_schema"]}}
    answer = says("Sure!").messages.create(**ASKED, output_config=form)
    assert "city" in json.loads(answer.content[0].text)


@pytest.mark.parametrize(
    ("change", "reason", "stop"),
    [({}, "end_turn", None), ({"max_tokens": 3}, "max_tokens", None), ({"stop_sequences": ["me"]}, "stop_sequence", "me")],
)
def test_why_an_answer_ended(says: Any, change: dict[str, Any], reason: str, stop: str | None) -> None:
    answer = says("Rome.").messages.create(**ASKED | change)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stop)
    with says("Rome.").messages.stream(**ASKED | change) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == (reason, stop)


def test_a_long_prefill_pings() -> None:
    engine = FakeEngine(answer=b"Rome.")
    with running(engine, keepalive_s=0.05) as server:
        engine.gate.clear()
        with httpx.stream("POST", f"{server.url}/v1/messages", json=ASKED | {"stream": True}, timeout=20) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: ping"
            assert json.loads(next(lines).removeprefix("data: ")) == {"type": "ping"}
            engine.gate.set()
            assert 'data: {"type":"message_stop"}' in list(lines)


def test_a_failure_in_a_stream_is_raised_by_the_client(says: Any, server: Running) -> None:
    server.engine.fail_after = 3
    with pytest.raises(anthropic.APIError, match="told to fail"), says("Rome.").messages.stream(**ASKED) as stream:
        stream.until_done()
    answer = httpx.post(f"{server.url}/v1/messages", json=ASKED | {"stream": True}, timeout=20)
    last = json.loads([line for line in answer.text.splitlines() if line.startswith("data: ")][-1].removeprefix("data: "))
    assert last["request_id"] == answer.headers["request-id"]


def test_errors_have_the_shape_that_the_client_reads(says: Any, server: Running) -> None:
    client = says("x")
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**ASKED | {"messages": []})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is missing"):
        client.post("/v1/messages", body={"messages": ASKED["messages"]}, cast_to=object)
    image = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(anthropic.BadRequestError, match="has type 'image'"):
        client.messages.create(**ASKED | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.NotFoundError):
        client.get("/v1/messages/batches", cast_to=object)


def test_a_model_that_loads_is_overloaded_to_these_clients() -> None:
    with running(FakeEngine(), ready=False) as server:
        with client_of(server) as client, pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**ASKED)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"]
        assert caught.value.body["error"]["type"] == "overloaded_error"


def test_leaving_a_stream_ends_its_request(says: Any, server: Running) -> None:
    server.engine.gate.clear()
    try:
        with says("Rome.").messages.create(**ASKED, stream=True):
            pass
        with httpx.Client() as client:
            client.get(server.url + "/health")
    finally:
        server.engine.gate.set()
