"""Answers as families of models write them are told apart into reasoning, text and calls, however they are cut on the way.

The formats are those of the models' own chat templates and of what vLLM's tests record of their outputs, each
with texts of our own: hermes (NousResearch/Hermes-2-Pro, Qwen/Qwen3, ibm-granite/granite-4), qwen-xml (Qwen/Qwen3-Coder),
llama3 (meta-llama/Llama-3.1), mistral-list (mistralai/Mistral-7B-v0.3), mistral (mistralai/Mistral-Small-3.2), deepseek-v3,
-v3.1 and -v3.2 (deepseek-ai), harmony (openai/gpt-oss), glm (zai-org/GLM-4.5), granite (ibm-granite/granite-3,
microsoft/Phi-4-mini), kimi (moonshotai/Kimi-K2), minimax (MiniMaxAI/MiniMax-M2)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import ConfigError
from headstart.render.answers import (
    FAMILIES,
    PLAIN,
    AnswerReader,
    Call,
    Family,
    Part,
    Reasoning,
    Text,
    family_named,
    family_of,
    finished,
    merged,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
KOELN = ("get_weather", {"city": "Köln", "days": 2})
ROM = ("get_weather", {"city": "Rom"})
LOOK, ONE = Reasoning("I look."), Text("One moment.")
Known = tuple[str, dict[str, Any]] | Part

# What the families write, after their chat templates: family, answer, what it says.
WRITTEN: list[tuple[str, str, list[Known]]] = [
    (
        "hermes",
        "<think>\nI look.\n</think>\n\nOne moment.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>',
        [LOOK, ONE, KOELN, ROM],
    ),
    (
        "qwen-xml",
        "One moment.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRom\n</parameter>\n"
        "</function>\n</tool_call>",
        [ONE, KOELN, ROM],
    ),
    (
        "llama3",
        '{"name": "get_weather", "parameters": {"city": "Köln", "days": "2"}}; '
        '{"name": "get_weather", "parameters": {"city": "Rom"}}',
        [KOELN, ROM],
    ),
    ("llama3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rom"}}', [ROM]),
    (
        "mistral-list",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}, '
        '{"name": "get_weather", "arguments": {"city": "Rom"}}]',
        [KOELN, ROM],
    ),
    (
        "mistral",
        '[THINK]I look.[/THINK]One moment.[TOOL_CALLS]get_weather[ARGS]{"city": "Köln", "days": 2}'
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rom"}',
        [LOOK, ONE, KOELN, ROM],
    ),
    (
        "deepseek-v3",
        "One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Köln", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n'
        '{"city": "Rom"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [ONE, KOELN, ROM],
    ),
    (
        "deepseek-v3.1",
        "<think>I look.</think>One moment.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Köln", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rom"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [LOOK, ONE, KOELN, ROM],
    ),
    (
        "deepseek-v3.2",
        'One moment.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rom</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        [ONE, KOELN, ROM],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rom"}<|call|>',
        [LOOK, ONE, ROM],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
        '<|constrain|>json<|message|>{"city": "Rom"}',
        [LOOK, ROM],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>One moment.<|return|>",
        [LOOK, ONE],
    ),
    (
        "glm",
        "<think>I look.</think>\nOne moment.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Rom</arg_value>\n</tool_call>",
        [LOOK, ONE, KOELN, ROM],
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}, '
        '{"name": "get_weather", "arguments": {"city": "Rom"}}]',
        [KOELN, ROM],
    ),
    (
        "kimi",
        "One moment.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>'
        '{"city": "Rom"}<|tool_call_end|><|tool_calls_section_end|>',
        [ONE, KOELN, ROM],
    ),
    (
        "minimax",
        '<think>I look.</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="get_weather">\n<parameter name="city">Rom</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        [LOOK, KOELN, ROM],
    ),
    ("think", "<think>\nI look.\n</think>\n\nOne moment.", [LOOK, ONE]),
    # What models do besides: no line behind a mark, no end, arguments within a text, before the name, or none at all.
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Rom"}}</tool_call>', [ROM]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}', [ROM]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}\n</tool_call>', [ROM]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Rom\\"}"}\n</tool_call>', [ROM]),
    ("hermes", '<tool_call>\n{"arguments": {"city": "Rom"}, "name": "get_weather"}\n</tool_call>', [ROM]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": "2"}}\n</tool_call>', [KOELN]),
    ("hermes", '<tool_call>\n{"name": "get_weather"}\n</tool_call>', [("get_weather", {})]),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": null}\n</tool_call>', [("get_weather", {})]),
    (
        "hermes",
        '<tool_call>\n[{"name": "get_weather", "arguments": {"city": "Rom"}}]\n</tool_call>\nDone.',
        [ROM, Text("Done.")],
    ),
    (
        "qwen-xml",
        '<function=get_weather>\n<parameter=city>\na\n\n<b> "c"\n</parameter>\n</function>\n</tool_call>',
        [("get_weather", {"city": 'a\n\n<b> "c"'})],
    ),
    ("qwen-xml", "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>", [("get_weather", {})]),
    (
        "llama3",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "{\\"}"}}\n'
        '{"name": "get_weather", "arguments": {}}',
        [("get_weather", {"city": '{"}'}), ("get_weather", {})],
    ),
    ("llama3", '{"city": "Rom"}', [Text('{"city": "Rom"}')]),
    (
        "mistral-list",
        'One moment.[TOOL_CALLS][{"arguments": {"name": "x"}, "name": "get_weather"}]\nMore.',
        [ONE, ("get_weather", {"name": "x"}), Text("More.")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]get_weather{"city": "Köln", "days": 2}[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Rom"}',
        [KOELN, ROM],
    ),
    ("glm", "<tool_call>get_weather\n</tool_call>", [("get_weather", {})]),
    (
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value> Rom</arg_value></tool_call>\nSo.\n<tool_call>get_weather\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        [("get_weather", {"city": " Rom"}), Text("So."), ("get_weather", {"days": 2})],
    ),
    (
        "kimi",
        '<|tool_calls_section_begin|><|tool_call_begin|>get_weather:0 <|tool_call_argument_begin|> {\n "city": "<Rom>"\n}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [("get_weather", {"city": "<Rom>"})],
    ),
    ("granite", '<|tool_call|>{"name": "get_weather", "arguments": {"city": "Rom"}}<|/tool_call|>', [ROM]),
    (
        "deepseek-v3.2",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="when" string="false">[1, null]'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        [("get_weather", {"when": [1, None]})],
    ),
]

# The telling lines of chat templates, and whose they are.
TEMPLATES = {
    "hermes": "For each function call, return a json object within <tool_call></tool_call> XML tags",
    "qwen-xml": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "llama3": '<|start_header_id|>{{ role }}<|eot_id|> {"name": "{{ name }}", "parameters": ',
    "mistral-list": "{{ '[TOOL_CALLS] [' }}",
    "mistral": "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n' + '```json'",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>'",
    "deepseek-v3.2": "<｜DSML｜function_calls>",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
    "glm": "<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>",
    "granite": "<|tool_call|>",
    "kimi": "<|tool_calls_section_begin|>",
    "minimax": "<minimax:tool_call>",
    "think": "{% set content = content.split('</think>')[-1] %}",
}


def told(family: Family, pieces: Iterable[str], *, tools: Any = TOOLS, prompt_end: str = "", cut: bool = False) -> list[Part]:
    reader = AnswerReader(family, prompt_end=prompt_end, tools=tools)
    return list(merged([*(part for piece in pieces for part in reader.push(piece)), *reader.finish(cut=cut)]))


def read(family: Family, pieces: Iterable[str], **more: Any) -> list[Known]:
    """Return what an answer says: calls as (name, arguments), neighbouring texts as one."""
    found: list[Known] = []
    for part in told(family, pieces, **more):
        if isinstance(part, Call):
            assert part.id
            assert part.done
            found.append((part.name, json.loads(part.arguments)))
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(("name", "answer", "says"), WRITTEN, ids=[f"{i}-{name}" for i, (name, _, _) in enumerate(WRITTEN)])
def test_what_a_family_writes_is_read_wherever_it_is_cut(name: str, answer: str, says: list[Known]) -> None:
    assert read(FAMILIES[name], [answer]) == says
    assert read(FAMILIES[name], answer) == says
    for at in range(1, len(answer)):
        assert read(FAMILIES[name], [answer[:at], answer[at:]]) == says


@pytest.mark.parametrize(("name", "answer"), [(name, answer) for name, answer, says in WRITTEN if KOELN in says])
def test_arguments_come_while_they_are_written_and_are_never_taken_back(name: str, answer: str) -> None:
    reader = AnswerReader(FAMILIES[name], tools=TOOLS)
    begun_at, pieces = 0, 0
    for at, character in enumerate(answer):
        for part in reader.push(character):
            if isinstance(part, Call):
                begun_at, pieces = begun_at or at, pieces + 1
    end = answer.index("Köln")
    assert 0 < begun_at <= end + len("Köln"), "the call is told of before its first argument ends"
    assert pieces > 8


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if family.form is not None))
def test_what_is_cut_off_keeps_what_was_told_and_is_not_done(name: str) -> None:
    answer = next(answer for known, answer, says in WRITTEN if known == name and (KOELN in says or ROM in says))
    place = answer.index("Köln" if "Köln" in answer else "Rom") + 2
    *_, call = told(FAMILIES[name], answer[:place], cut=True)
    assert isinstance(call, Call)
    assert (call.name, call.done) == ("get_weather", False)
    assert call.arguments.replace(" ", "") in ('{"city":"Kö', '{"city":"Ro')
    assert finished(call.arguments) == "{}"


@pytest.mark.parametrize(
    ("broken", "arguments", "rest"),
    [
        ('{"city": "Rom", oops}}\n</tool_call>', '{"city": "Rom", ', "oops}}\n</tool_call>"),
        ('{"city": NaN}}</tool_call>', '{"city": ', "NaN}}</tool_call>"),
        ('{"days": 01}}</tool_call>', '{"days": 0', "1}}</tool_call>"),
    ],
)
def test_arguments_that_go_wrong_end_there_and_the_rest_is_text(broken: str, arguments: str, rest: str) -> None:
    answer = '<tool_call>\n{"name": "get_weather", "arguments": ' + broken
    for pieces in ([answer], answer):
        call, text = told(FAMILIES["hermes"], pieces)
        assert isinstance(call, Call)
        assert (call.arguments, call.done, text) == (arguments, False, Text(rest))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_known_by_its_chat_template_and_by_its_name(name: str) -> None:
    found = family_of(TEMPLATES[name])
    assert found is not None
    assert found.name == name
    assert family_named(name) is found


def test_a_template_that_knows_neither_calls_nor_reasoning_has_no_family() -> None:
    assert family_of("{% for message in messages %}<|im_start|>{{ message.role }}{% endfor %}") is None
    assert family_named("none") is None


def test_a_family_that_there_is_none_of_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mistral'"):
        family_named("mistrall")


def test_a_model_that_says_how_it_is_read_is_read_so() -> None:
    own = {
        "start_anchor": "<assistant>",
        "fields": {
            "content": {},
            "tool_calls": {
                "open": "<<",
                "close": ">>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.with}"}},
            },
        },
    }
    family = family_of(TEMPLATES["hermes"], own=own)
    assert family is not None
    assert read(family, ['One moment.<<{"tool": "get_weather", "with": {"city": "Rom"}}>>']) == [ONE, ROM]
    assert family.writing == FAMILIES["hermes"].writing


def test_reasoning_that_the_prompt_has_opened_is_reasoning_from_the_first_token() -> None:
    family = FAMILIES["hermes"]
    assert read(family, ["I lo", "ok.\n</think>", "\n\nOne moment."], prompt_end="<|im_start|>assistant\n<think>\n") == [
        LOOK,
        ONE,
    ]
    assert read(family, ["One moment."], prompt_end="<|im_start|>assistant\n<think>\n\n</think>\n\n") == [ONE]
    assert AnswerReader(family, prompt_end="<think>\n").reasoning


@pytest.mark.parametrize(
    "answer",
    [
        "x <tool_call>\nnot json\n</tool_call> y",
        'x <tool_call>\n{"name": "get_wea',
        "<tool_call>\n[1, 2]\n</tool_call>",
        "<tool_call>",
        '<tool_call>\n{"title": "no call"}\n</tool_call>',
    ],
)
def test_what_cannot_be_read_as_a_call_stays_text(answer: str) -> None:
    for size in (1, 10_000):
        says = read(FAMILIES["hermes"], [answer[i : i + size] for i in range(0, len(answer), size)])
        assert all(isinstance(part, Text) for part in says)
        assert "".join(part.text for part in says if isinstance(part, Text)) == answer


def test_without_tools_nothing_is_a_call() -> None:
    answer = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    assert read(FAMILIES["hermes"], [answer], tools=None) == [Text(answer)]


def test_ids_have_nine_letters_where_templates_insist_on_it() -> None:
    for name, length in (("mistral", 9), ("kimi", 29)):
        answer = next(answer for known, answer, _ in WRITTEN if known == name)
        reader = AnswerReader(FAMILIES[name], tools=TOOLS)
        calls = [part for part in [*reader.push(answer), *reader.finish()] if isinstance(part, Call)]
        assert {len(call.id) for call in calls} == {length}
        assert len({call.id for call in calls}) == 2


def test_calls_that_a_model_without_a_family_was_held_to_are_read() -> None:
    assert read(PLAIN, ['[{"name": "get_weather", "argum', 'ents": {"city": "Rom"}}]']) == [ROM]


@given(st.text(), st.integers(1, 9), st.sampled_from(sorted(FAMILIES)))
def test_any_text_is_read_without_an_error_and_alike_in_any_pieces(text: str, size: int, name: str) -> None:
    family = FAMILIES[name]
    whole = read(family, [text])
    assert read(family, [text[i : i + size] for i in range(0, len(text), size)]) == whole
    if name not in ("harmony", "think") and not any(mark in text for mark in "<[{"):
        assert whole == ([Text(text)] if text else [])


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}', "\n", "x", "[", "<", "|>"])
    ),
    st.integers(1, 9),
)
def test_marks_in_any_order_are_read_alike_in_any_pieces(marks: list[str], size: int) -> None:
    text = "".join(marks)
    whole = read(FAMILIES["hermes"], [text])
    assert read(FAMILIES["hermes"], [text[i : i + size] for i in range(0, len(text), size)]) == whole
