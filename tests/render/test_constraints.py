"""What an answer is held to, token by token: JSON of a schema, calls as a family writes them, and reasoning that is free."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.errors import RequestError
from headstart.render import Renderer
from headstart.render.answers import FAMILIES, PLAIN, AnswerReader, Call, Family
from headstart.render.constraints import SCHEMA_BYTES, Constraints, Held

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("weather", "tides")]


@pytest.fixture(scope="module")
def constraints(renderer: Renderer) -> Constraints:
    return Constraints(renderer)


def may_follow(held: Held, token: int) -> bool:
    allowed = held.allowed()
    return allowed is None or bool(allowed[token // 8] >> token % 8 & 1)


def taken(renderer: Renderer, held: Held, text: str) -> str:
    """Return how much of `text` may be written, a token at a time, and the mark $ where the answer may end behind it."""
    written: list[int] = []
    for token in renderer.tokenise(text, special_tokens=False).ids:
        if not may_follow(held, token):
            return renderer.decode(written)
        held.accept(token)
        written.append(token)
    return text + ("$" if any(may_follow(held, token) for token in renderer.stop_ids) else "")


def schema(constraints: Constraints, form: dict[str, Any] | None, *, strict: bool = True) -> Held:
    return constraints.constraint(constraints.json(form, strict=strict, param="p"), None, prompt_end="")


def test_json_of_a_schema_and_nothing_else_may_be_written(constraints: Constraints, renderer: Renderer) -> None:
    assert taken(renderer, schema(constraints, CITY), '{"city": "Köln", "days": 2}') == '{"city": "Köln", "days": 2}$'
    assert taken(renderer, schema(constraints, CITY), '{"city": "Köln"') == '{"city": "Köln"'
    assert "days" not in taken(renderer, schema(constraints, CITY), '{"city": "Köln", "hours": 2}')
    assert taken(renderer, schema(constraints, CITY), "Sure: {") == ""


def test_any_object_may_be_written_where_there_is_no_schema(constraints: Constraints, renderer: Renderer) -> None:
    text = '{"a": [1, {"b": null}], "ü": true}'
    assert taken(renderer, schema(constraints, None), text) == text + "$"
    assert taken(renderer, schema(constraints, None), "[1]") == ""


def test_a_schema_that_cannot_be_held_to_is_refused_unless_it_need_not_be(constraints: Constraints) -> None:
    unknown = CITY | {"not": {"required": ["x"]}}
    with pytest.raises(RequestError, match="cannot be held to") as caught:
        schema(constraints, unknown)
    assert caught.value.param == "p"
    schema(constraints, unknown, strict=False)
    with pytest.raises(RequestError, match="cannot be held to"):
        schema(constraints, CITY | {"properties": {"city": {"type": "string", "pattern": "("}}})
    with pytest.raises(RequestError, match="larger than"):
        schema(constraints, {"type": "object", "description": "x" * SCHEMA_BYTES})


def called(constraints: Constraints, family: Family, *, parallel: bool = True, prompt_end: str = "") -> Held:
    return constraints.constraint(constraints.calls(family, TOOLS, parallel=parallel), family, prompt_end=prompt_end)


FORCED = [family for family in (*FAMILIES.values(), PLAIN) if family.writing is not None]


@pytest.mark.parametrize("family", FORCED, ids=lambda family: family.name)
def test_calls_that_are_forced_are_written_and_read_as_the_family_does(
    constraints: Constraints, renderer: Renderer, family: Family
) -> None:
    writing = family.writing
    assert writing is not None
    arguments = ['{"city": "Köln", "days": 2}', '{"city": "Rom", "days": 3}']
    names = ["tides", "weather"]
    count = 1 if writing.between is None else 2
    calls = [writing.before.replace("NAME", names[i]) + arguments[i] + writing.after for i in range(count)]
    text = writing.begin + (writing.between or "").join(calls) + writing.end
    assert taken(renderer, called(constraints, family), text) == text + "$"
    reader = AnswerReader(family, tools=TOOLS)
    parts = [*reader.push(text), *reader.finish()]
    assert [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)] == [
        (names[i], json.loads(arguments[i])) for i in range(count)
    ]
    assert len(parts) == count
    assert not any(may_follow(called(constraints, family), token) for token in renderer.stop_ids)


def test_one_call_alone_where_calls_must_not_be_parallel(constraints: Constraints, renderer: Renderer) -> None:
    one = '<tool_call>\n{"name": "tides", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>'
    held = called(constraints, FAMILIES["hermes"], parallel=False)
    assert taken(renderer, held, one + "\n" + one) == one
    assert taken(renderer, called(constraints, FAMILIES["hermes"]), one + "\n" + one) == f"{one}\n{one}$"


def test_beside_tools_either_a_call_or_the_format_may_be_written(constraints: Constraints, renderer: Renderer) -> None:
    calls = constraints.calls(FAMILIES["hermes"], TOOLS, parallel=True)
    one = '<tool_call>\n{"name": "tides", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>'
    for text in ('{"city": "Rom", "days": 3}', one):
        grammar = constraints.json(CITY, strict=True, param="p", unless=calls)
        held = constraints.constraint(grammar, FAMILIES["hermes"], prompt_end="")
        assert taken(renderer, held, text) == text + "$"


def test_reasoning_that_the_prompt_opened_is_free(constraints: Constraints, renderer: Renderer) -> None:
    grammar = constraints.json(CITY, strict=True, param="p")
    held = constraints.constraint(grammar, FAMILIES["hermes"], prompt_end="<|im_start|>assistant\n<think>\n")
    text = 'I look </thin or [1] so.\n</think>\n\n{"city": "Rom", "days": 3}'
    assert taken(renderer, held, text) == text + "$"


def test_what_was_not_allowed_is_an_error_and_not_believed(constraints: Constraints, renderer: Renderer) -> None:
    held = schema(constraints, CITY)
    with pytest.raises(ValueError, match="does not go on"):
        held.accept(renderer.tokenise("x", special_tokens=False).ids[0])
