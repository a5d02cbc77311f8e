"""Responses with the `openai` library as it is: items, events, calls, conversations that go on by id, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from api.serving import Running, running
from headstart.api.conversations import Conversations
from headstart.api.errors import NoSuchResponse
from headstart.testing.fake_engine import FakeEngine

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Röm"}}\n</tool_call>'
SAID = "<think>\nHm.\n</think>\n\nI look.\n" + CALL


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(), family="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def says(server: Running, client: openai.OpenAI) -> Iterator[Any]:
    def says(text: str | None) -> openai.OpenAI:
        server.engine.answer = None if text is None else text.encode()
        return client

    yield says
    server.engine.answer = None
    server.engine.fail_after = None


def prompt_of(server: Running, at: int = -1) -> str:
    return bytes(server.engine.submitted[at].prompt).decode()


def test_a_text_is_answered_and_its_usage_adds_up(says: Any, server: Running) -> None:
    answer = says("Rome.").responses.create(model="any", input="Which city? " * 20, instructions="Be short.")
    assert (answer.output_text, answer.status, answer.instructions) == ("Rome.", "completed", "Be short.")
    assert prompt_of(server).startswith("<system>Be short.<user>Which city?")
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (5, 0)
    assert usage.input_tokens_details.cache_write_tokens + usage.input_tokens_details.cached_tokens <= usage.input_tokens
    again = says("Rome.").responses.create(model="any", input="Which city? " * 20, instructions="Be short.")
    assert again.usage.input_tokens_details.cached_tokens > 0


def test_an_answer_is_reasoning_text_and_calls_as_items(says: Any) -> None:
    answer = says(SAID).responses.create(model="any", input="Rom?", tools=TOOLS)
    reasoning, message, call = answer.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
    assert message.content[0].text == "I look."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Röm"})
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_events_build_the_same_answer(says: Any) -> None:
    with says(SAID).responses.stream(model="any", input="Rom?", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I look."
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert json.loads(final.output[2].arguments) == {"city": "Röm"}
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 5
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert "".join(deltas) == done.arguments == final.output[2].arguments
    assert final.usage.output_tokens == len(SAID.encode())


def test_a_conversation_goes_on_from_an_answer(says: Any, client: openai.OpenAI, server: Running) -> None:
    first = says(SAID).responses.create(model="any", input="Rom?", tools=TOOLS, instructions="Once.")
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
    second = says("Mild.").responses.create(model="any", previous_response_id=first.id, input=[result], tools=TOOLS)
    assert (second.output_text, second.previous_response_id) == ("Mild.", first.id)
    assert prompt_of(server) == "<user>Rom?<assistant>I look.<tool>mild"  # instructions are not inherited
    with client.responses.stream(model="any", previous_response_id=second.id, input="And now?") as stream:
        last = stream.get_final_response()
    client.responses.create(model="any", previous_response_id=last.id, input="Then?")
    assert prompt_of(server).endswith("<tool>mild<assistant>Mild.<user>And now?<assistant>Mild.<user>Then?")


def test_items_of_a_client_that_keeps_its_own_history_are_one_turn(says: Any, server: Running) -> None:
    client = says(SAID)
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Rom?"}]}]
    first = client.responses.create(model="any", input=asked, tools=TOOLS, store=False)
    history = [*asked, *(item.to_dict() for item in first.output)]
    history.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "mild"})
    says("Mild.").responses.create(model="any", input=history, tools=TOOLS, store=False)
    assert prompt_of(server) == "<user>Rom?<assistant>I look.<tool>mild"


def test_parallel_calls_go_back_with_a_result_each(says: Any, server: Running) -> None:
    first = says(SAID + "\n" + CALL).responses.create(model="any", input="Rom?", tools=TOOLS)
    calls = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": said}
        for call, said in zip(calls, ("mild", "low"), strict=True)
    ]
    says("So.").responses.create(model="any", previous_response_id=first.id, input=results, tools=TOOLS)
    assert prompt_of(server) == "<user>Rom?<assistant>I look.<tool>mild<tool>low"


def test_what_was_not_kept_cannot_be_gone_on_from(says: Any) -> None:
    client = says("x")
    dropped = client.responses.create(model="any", input="Rom?", store=False)
    for id in (dropped.id, "resp_never"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="any", input="x", previous_response_id=id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_conversations_are_a_tenant_s_own_and_bounded() -> None:
    kept = Conversations(most=2, most_bytes=100)
    kept.keep("a", "one", [{"role": "user", "content": "x"}])
    with pytest.raises(NoSuchResponse):
        kept.find("a", "two")
    kept.keep("b", "one", [])
    assert kept.find("a", "one") == ({"role": "user", "content": "x"},)
    kept.keep("c", "one", [])  # b was used least lately
    with pytest.raises(NoSuchResponse):
        kept.find("b", "one")
    kept.keep("d", "one", ["x" * 200])
    for id in "acd":
        with pytest.raises(NoSuchResponse):
            kept.find(id, "one")


def test_a_response_can_be_had_again_and_deleted(says: Any, client: openai.OpenAI, server: Running) -> None:
    whole = says(SAID).responses.create(model="any", input="Rom?", tools=TOOLS)
    assert client.responses.retrieve(whole.id).to_dict() == whole.to_dict()
    with says(SAID).responses.stream(model="any", input="Rom?", tools=TOOLS) as stream:
        streamed = stream.get_final_response()
    again = client.responses.retrieve(streamed.id)
    assert (again.status, again.output_text, again.usage) == ("completed", "I look.", streamed.usage)
    client.responses.delete(whole.id)
    dropped = says("x").responses.create(model="any", input="Rom?", store=False)
    for id in (whole.id, dropped.id, "resp_never", "..%2f..%2fetc%2fpasswd"):
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="any", input="x", previous_response_id=whole.id)


def test_a_response_that_runs_is_cancelled_by_its_id(says: Any, client: openai.OpenAI, server: Running) -> None:
    says("Rome.")
    server.engine.gate.clear()
    try:
        stream = client.responses.create(model="any", input="Rom?", stream=True)
        id = next(iter(stream)).response.id
        assert client.responses.cancel(id).status == "cancelled"
        with pytest.raises(openai.APIError, match="was cancelled"):
            list(stream)
    finally:
        server.engine.gate.set()
    ended = client.responses.create(model="any", input="Rom?")
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(ended.id)


class Place(BaseModel):
    city: str


def test_json_of_a_schema_is_parsed_by_the_client(says: Any) -> None:
    answer = says("Sure!").responses.parse(model="any", input="Rom?", text_format=Place)
    assert isinstance(answer.output_parsed, Place)


def test_an_answer_that_is_cut_is_incomplete(says: Any) -> None:
    answer = says("Rome and more").responses.create(model="any", input="Rom?", max_output_tokens=4)
    assert (answer.status, answer.incomplete_details.reason, answer.output_text) == ("incomplete", "max_output_tokens", "Rome")
    with says("Rome and more").responses.stream(model="any", input="Rom?", max_output_tokens=4) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_failure_in_a_stream_is_told_as_an_event_and_raised_by_the_client(says: Any, server: Running) -> None:
    server.engine.fail_after = 3
    events = []
    with pytest.raises(openai.APIError, match="told to fail"):  # noqa: PT012 - the events before it are what is looked at
        for event in says("Rome.").responses.create(model="any", input="Rom?", stream=True):
            events.append(event)
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the fake engine was told to fail"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": ["x"]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(says: Any, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        says("x").responses.create(**{"model": "any", "input": "Rom?"} | change)
    assert caught.value.param == param
