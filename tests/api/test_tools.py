"""Tools, formats and reasoning with the `openai` library as it is: a real server, and answers that are told word for word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from api.serving import Running, running
from headstart.testing.fake_engine import FakeEngine

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "tides", "parameters": CITY, "strict": True}},
]
ASKED: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Rom?"}], "max_tokens": 400, "temperature": 0}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Röm"}}\n</tool_call>'
BOTH = "<think>\nHm.\n</think>\n\nI look.\n" + CALL + "\n" + CALL.replace("weather", "tides")


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
    def says(text: str) -> openai.OpenAI:
        server.engine.answer = text.encode()
        return client

    yield says
    server.engine.answer = None


def test_an_answer_has_its_reasoning_its_text_and_its_calls(says: Any) -> None:
    answer = says(BOTH).chat.completions.create(**ASKED, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("I look.", "Hm.")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls] == [
        ("weather", {"city": "Röm"}),
        ("tides", {"city": "Röm"}),
    ]
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


def test_a_stream_has_the_same_in_the_order_in_which_it_was_written(says: Any) -> None:
    kinds, calls, reasons = [], [], []
    pieces: dict[int, list[str]] = {}
    for chunk in says(BOTH).chat.completions.create(**ASKED, tools=TOOLS, stream=True):
        choice = chunk.choices[0]
        delta = choice.delta
        kind = "reasoning" if getattr(delta, "reasoning_content", None) else "text" if delta.content else "call"
        for call in delta.tool_calls or ():
            if call.id is not None:
                calls.append((call.index, call.id, call.type, call.function.name))
            pieces.setdefault(call.index, []).append(call.function.arguments)
        if (delta.tool_calls or delta.content or kind == "reasoning") and (not kinds or kinds[-1] != kind):
            kinds.append(kind)
        reasons.append(choice.finish_reason)
    assert kinds == ["reasoning", "text", "call"]
    assert [(index, kind, name) for index, _, kind, name in calls] == [(0, "function", "weather"), (1, "function", "tides")]
    assert [json.loads("".join(pieces[index])) for index in (0, 1)] == [{"city": "Röm"}] * 2
    assert all(len(some) > 5 for some in pieces.values()), "arguments come while they are written"
    assert len({id for _, id, _, _ in calls}) == 2
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_tools_that_must_not_be_called_stay_text(says: Any) -> None:
    choice = says(CALL).chat.completions.create(**ASKED, tools=TOOLS, tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "tides"}),
        ({"type": "function", "function": {"name": "tides"}}, {"tides"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "tides"}}]},
            },
            {"tides"},
        ),
    ],
)
def test_a_call_that_must_be_is_made_whatever_the_model_would_say(says: Any, choice: Any, names: set[str]) -> None:
    message = says("No, I will not call.").chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice).choices[0].message
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.function.name in names
        assert set(json.loads(call.function.arguments)) == {"city"}


def test_of_several_calls_one_alone_is_made_where_only_one_may_be(says: Any, server: Running) -> None:
    for options in ({}, {"tool_choice": "required"}):
        answer = says(BOTH[BOTH.index(CALL) :]).chat.completions.create(
            **ASKED, tools=TOOLS, parallel_tool_calls=False, **options
        )
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather"]
        assert answer.choices[0].finish_reason == "tool_calls"
    assert server.engine.load().running == 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "nothing"}}, "sometimes", 7])
def test_a_choice_that_cannot_be_is_refused_by_name(says: Any, choice: Any) -> None:
    tools = [] if choice == "required" else TOOLS
    with pytest.raises(openai.BadRequestError) as caught:
        says("").chat.completions.create(**ASKED, tools=tools, tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_strict_tools_hold_also_where_a_call_need_not_be(says: Any) -> None:
    """Of `tides`, which is strict, other arguments than its schema's cannot come, whatever the model would write."""
    wrong = 'Let me see.\n<tool_call>\n{"name": "tides", "arguments": {"place": 5}}\n</tool_call>'
    message = says(wrong).chat.completions.create(**ASKED, tools=TOOLS).choices[0].message
    assert message.content == "Let me see."
    assert message.tool_calls
    assert set(json.loads(message.tool_calls[0].function.arguments)) == {"city"}
    assert says("No call at all.").chat.completions.create(**ASKED, tools=TOOLS).choices[0].message.content == "No call at all."
    loose = [{"type": "function", "function": {"name": "tides", "parameters": CITY}}]
    message = says(wrong).chat.completions.create(**ASKED, tools=loose).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"place": 5}


def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(says: Any) -> None:
    asked = ASKED | {"max_tokens": len(CALL.encode()) - 20, "tools": TOOLS[:1]}
    for stream in (False, True):
        answer = says(CALL).chat.completions.create(**asked, stream=stream)
        if stream:
            deltas = [chunk.choices[0] for chunk in answer]
            arguments = "".join(
                call.function.arguments for choice in deltas for call in choice.delta.tool_calls or () if call.function
            )
            finish = deltas[-1].finish_reason
        else:
            arguments = answer.choices[0].message.tool_calls[0].function.arguments
            finish = answer.choices[0].finish_reason
        assert (arguments, finish) == ('{"city": "', "length")


class Place(BaseModel):
    city: str
    days: int


def test_json_of_a_schema_comes_whatever_the_model_would_say(says: Any) -> None:
    client = says('Sure! {"city": "Rom", "days": 12}')
    place = client.chat.completions.parse(**ASKED, response_format=Place).choices[0].message.parsed
    assert isinstance(place, Place)
    whole = client.chat.completions.create(**ASKED, response_format={"type": "json_object"}, stream=True)
    assert isinstance(json.loads("".join(chunk.choices[0].delta.content or "" for chunk in whole)), dict)


def test_beside_tools_a_format_leaves_the_choice(says: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    called = says(CALL).chat.completions.create(**ASKED, tools=TOOLS, response_format=form).choices[0].message
    assert called.tool_calls[0].function.name == "weather"
    text = says('{"city": "Rom"}').chat.completions.create(**ASKED, tools=TOOLS, response_format=form).choices[0].message
    assert (json.loads(text.content), text.tool_calls) == ({"city": "Rom"}, None)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"not": {}}}},
            "response_format.json_schema.schema",
        ),
        ({"type": "xml"}, "response_format.type"),
        ("json", "response_format"),
    ],
)
def test_a_format_that_cannot_be_held_to_is_refused_by_name(says: Any, form: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        says("").chat.completions.create(**ASKED, response_format=form)
    assert caught.value.param == param


def test_what_was_called_goes_back_with_its_result(says: Any, server: Running) -> None:
    client = says(CALL)
    message = client.chat.completions.create(**ASKED, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "mild"}
    says("Mild.")
    told = client.chat.completions.create(**ASKED | {"messages": [*ASKED["messages"], message, result]}, tools=TOOLS)
    assert told.choices[0].message.content == "Mild."
    assert b"<tool>mild" in bytes(server.engine.submitted[-1].prompt)


def test_parallel_calls_go_back_with_a_result_each(says: Any, server: Running) -> None:
    message = says(BOTH).chat.completions.create(**ASKED, tools=TOOLS).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": said}
        for call, said in zip(message.tool_calls, ("mild", "low"), strict=True)
    ]
    says("So.").chat.completions.create(**ASKED | {"messages": [*ASKED["messages"], message, *results]}, tools=TOOLS)
    assert bytes(server.engine.submitted[-1].prompt).endswith(b"<assistant>I look.<tool>mild<tool>low")


def test_a_call_that_takes_long_to_write_leaves_no_stream_silent() -> None:
    engine = FakeEngine(answer=CALL.encode())
    with running(engine, family="hermes", keepalive_s=0.05) as server:
        engine.gate.clear()
        with (
            server.client() as client,
            client.chat.completions.with_streaming_response.create(**ASKED, tools=TOOLS, stream=True) as response,
        ):
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            engine.gate.set()
            assert "data: [DONE]" in list(lines)
