"""Requests of four dialects: the same conversation, and every text under the path that its client knows."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headstart.diagnose.causes import Cause
from headstart.diagnose.placing import place_of, side_of
from headstart.diagnose.report import report_of
from headstart.diagnose.requests import conversation_of
from headstart.errors import RequestError
from headstart.render import Renderer

SCHEMA = {"type": "object", "properties": {"tag": {"type": "string", "description": "Full tag of the sensor."}}}

OPENAI: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief, and be right."},
        {"role": "user", "content": [{"type": "text", "text": "Too warm? "}, {"type": "text", "text": "Look at it."}]},
        {
            "role": "assistant",
            "reasoning_content": "I should read it.",
            "content": "I look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"tag": "TB1-GBX"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "It has 71 degrees."},
        {"role": "assistant", "content": "It is fine."},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "description": "Reads a sensor.", "parameters": SCHEMA}}],
}
ANTHROPIC: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief, and be right.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Too warm? "}, {"type": "text", "text": "Look at it."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should read it.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"tag": "TB1-GBX"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "It has 71 degrees."}]},
        {"role": "assistant", "content": "It is fine."},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"name": "look", "description": "Reads a sensor.", "input_schema": SCHEMA}],
}
RESPONSES: dict[str, Any] = {
    "instructions": "Be brief, and be right.",
    "input": [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Too warm? "}, {"type": "input_text", "text": "Look at it."}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I should read it."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"tag": "TB1-GBX"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "It has 71 degrees."},
        {"role": "assistant", "content": "It is fine."},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", "name": "look", "description": "Reads a sensor.", "parameters": SCHEMA}],
}

# A text, and what each dialect calls the place it stands in.
PLACES = [
    ("be right", "messages[0].content", "system[0].text", "instructions"),
    ("warm?", "messages[1].content[0].text", "messages[0].content[0].text", "input[0].content[0].text"),
    ("Look at", "messages[1].content[1].text", "messages[0].content[1].text", "input[0].content[1].text"),
    ("should read", "messages[2].reasoning_content", "messages[1].content[0].thinking", "input[1].summary[0].text"),
    ("I look", "messages[2].content", "messages[1].content[1].text", "input[2].content[0].text"),
    ("GBX", "messages[2].tool_calls[0].function.arguments.tag", "messages[1].content[2].input.tag", "input[3].arguments.tag"),
    ("71 degrees", "messages[3].content", "messages[2].content[0].content", "input[4].output"),
    ("now?", "messages[5].content", "messages[4].content", "input[6].content"),
    ("Reads a", "tools[0].function.description", "tools[0].description", "tools[0].description"),
    (
        "Full tag",
        "tools[0].function.parameters.properties.tag.description",
        "tools[0].input_schema.properties.tag.description",
        "tools[0].parameters.properties.tag.description",
    ),
]


def test_every_dialect_is_the_same_conversation(renderers: dict[str, Renderer]) -> None:
    for renderer in renderers.values():
        ours = [side_of("", conversation_of(body), renderer).units.tolist() for body in (OPENAI, ANTHROPIC, RESPONSES)]
        assert ours[0] == ours[1] == ours[2] == renderer.chat(OPENAI["messages"], tools=OPENAI["tools"])


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "unigram", "as sent"])
def test_a_text_is_found_under_the_path_that_its_client_knows(name: str, renderers: dict[str, Renderer]) -> None:
    renderer = renderers.get(name)
    for dialect, body in enumerate((OPENAI, ANTHROPIC, RESPONSES)):
        side = side_of("", conversation_of(body, as_sent=renderer is None), renderer)
        assert side.text is not None
        found = 0
        for text, *paths in PLACES:
            char = side.text.find(text)
            if char < 0:
                assert text == "should read"  # not every template shows reasoning
                continue
            if renderer is None and text == "GBX" and paths[dialect].endswith("arguments.tag"):
                paths[dialect] = paths[dialect].removesuffix(".tag")  # as one text, as it was sent
            place = place_of(side, char)
            assert place.path == paths[dialect], text
            assert place.piece is not None
            assert place.piece.text[place.offset :].startswith(text)
            found += 1
        assert found >= len(PLACES) - 1


def test_a_text_that_a_template_cuts_is_followed_into_what_is_left(renderers: dict[str, Renderer]) -> None:
    body = copy.deepcopy(OPENAI)
    body["messages"][4]["content"] = "<think>\nHm.\n</think>\nIt is fine."
    side = side_of("", conversation_of(body), renderers["unigram"])
    assert side.text is not None
    assert "Hm." not in side.text
    place = place_of(side, side.text.find("is fine"))
    assert (place.path, place.offset) == ("messages[4].content", body["messages"][4]["content"].find("is fine"))


def test_a_request_that_holds_the_marks_of_ours_is_still_placed(renderers: dict[str, Renderer]) -> None:
    body = copy.deepcopy(OPENAI)
    body["messages"][0]["content"] = "\U000f0000\U000f0001 be right"
    side = side_of("", conversation_of(body), renderers["byte-level"])
    assert side.text is not None
    assert place_of(side, side.text.find("be right")).path == "messages[0].content"
    assert place_of(side, side.text.find("now?")).path == "messages[5].content"


def test_an_anthropic_request_parts_at_a_path_of_its_own(renderers: dict[str, Renderer]) -> None:
    other = copy.deepcopy(ANTHROPIC)
    other["messages"][2]["content"][0]["content"] = "It has 71 degrees and more."
    sides = [side_of(name, conversation_of(body), renderers["byte-level"]) for name, body in (("A", ANTHROPIC), ("B", other))]
    (finding,) = report_of(*sides).findings
    assert (finding.cause, finding.path, finding.offset) == (Cause.EDITED, "messages[2].content[0].content", 17)
    assert finding.anthropic == "messages_changed"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "the request has no messages, input or prompt"),
        (7, "the request must be a JSON object"),
        ({"messages": 7}, "messages must be a list"),
        ({"messages": ["x"]}, "messages[0] must be an object"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content must be a string or a list of parts"),
        ({"messages": [], "tools": {}}, "tools must be a list"),
        ({"prompt": ["a", "b"]}, "prompt must be one text or one list of token ids"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments is not valid JSON",
        ),
    ],
)
def test_what_is_no_request_is_a_sentence_with_its_place(body: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        conversation_of(body)
    assert said in caught.value.message
