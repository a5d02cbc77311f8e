"""The same conversation written in two ways is one prompt; a wrong one is refused with its place named."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.errors import RequestError
from headstart.render.messages import normal_messages, normal_tools

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    "parts", [[text("hi")], [text("h"), text("i")], [text("hi"), text("")], ({"text": "hi", "type": "text"},)]
)
def test_text_parts_equal_their_joined_string(parts: Any) -> None:
    assert normal_messages([{"role": "user", "content": parts}]) == normal_messages([USER])


def test_a_developer_s_message_is_a_system_message() -> None:
    assert normal_messages([{"role": "developer", "content": "x"}]) == [{"role": "system", "content": "x"}]


def test_arguments_of_a_tool_call_become_an_object() -> None:
    as_object = {**CALL, "function": {"name": "look", "arguments": {"at": 1}}}
    for call in (CALL, as_object):
        (message,) = normal_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert message == {"role": "assistant", "content": "", "tool_calls": [as_object]}


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_an_assistant_s_turn_without_text_is_empty(message: dict[str, Any]) -> None:
    assert normal_messages([USER, message])[1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_empty_arguments_are_an_empty_object(arguments: str) -> None:
    call = {"function": {"name": "look", "arguments": arguments}}
    (message,) = normal_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_what_the_client_sent_is_left_unchanged() -> None:
    message = {"role": "assistant", "content": [text("a")], "tool_calls": [CALL], "reasoning_content": "r"}
    before = repr(message)
    assert normal_messages([message])[0]["reasoning_content"] == "r"
    assert repr(message) == before


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([USER, {"content": "x"}], "messages[1].role"),
        ([USER, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([USER, {"role": ["user"], "content": "x"}], "messages[1].role"),
        ([USER, USER, {"role": "user"}], "messages[2].content"),
        ([USER, USER, {"role": "tool", "content": None}], "messages[2].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": [text("a"), "b"]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "x", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normal_messages(messages)
    assert caught.value.param == param
    assert caught.value.message.startswith(param + " ")


def test_tools_keep_their_order_and_none_are_no_tools() -> None:
    other = {"type": "function", "function": {"name": "act"}}
    assert normal_tools([TOOL, other]) == [TOOL, other]
    assert normal_tools(None) is None
    assert normal_tools([]) is None


@pytest.mark.parametrize(
    ("tools", "param"), [("look", "tools"), ([TOOL, "look"], "tools[1]"), ([{"type": "function"}], "tools[0]")]
)
def test_a_wrong_tool_is_refused_with_its_place(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normal_tools(tools)
    assert caught.value.param == param
