"""How families of models write reasoning and tool calls: data for `transformers`' response templates, and for held calls.

A field is a region of an answer from `open` to `close`; its kind is how its name begins: reasoning, text, calls, or mark, which
says nothing. A field that never opens takes what no other has. A model that brings a response template of its own is read by
that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from headstart.errors import ConfigError
from headstart.render.answers.calls import Inline

Template = Mapping[str, Any]

_THINK = {"open": "<think>", "close": "</think>"}
_TEXT: dict[str, Any] = {}


def _mark(*texts: str) -> dict[str, Any]:
    """Return the field of marks that say nothing, such as the end of several calls."""
    return {"open": list(texts), "close_pattern": r"\s*"}


_NAME = r"(?P<name>[\w.:/-]+)"


@dataclass(frozen=True, slots=True)
class Writing:
    """How calls are written whose arguments are JSON: `begin`, then each call `before` (with NAME in it), its arguments and
    `after`, with `between` two, and `end` behind the last. `between` None: one call an answer.

    `trigger`: the text in `begin` and `before` with which a call begins that nobody forced, and nothing else does; None where
    there is no such text. `others`: what may stand for `before`, too."""

    before: str
    after: str = ""
    begin: str = ""
    between: str | None = None
    end: str = ""
    trigger: str | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """`fields`: a response template's, of which regions are taken. `form`: what stands in those of calls: JSON with names in
    it, arguments as JSON behind a mark that has the `name`, or arguments between marks; None: as the template says. `think`:
    the marks of reasoning, which a prompt may have opened already. `marks`: texts of a chat template that tell the family, all
    of them. `writing`: where arguments are JSON."""

    name: str
    fields: Template
    form: Literal["json", "named"] | Inline | None = None
    marks: tuple[str, ...] = ()
    writing: Writing | None = None
    short_ids: bool = False
    think: tuple[str, str] = ("<think>", "</think>")
    text_after: str | None = None  # the mark without which an answer has no text


def _calls(open: str, close: str | None = None) -> dict[str, Any]:
    """Return the field of calls between two patterns; without `close` up to the answer's end."""
    return {"open_pattern": open} | ({"close_pattern": close} if close else {})


_HARMONY = r"(?:<\|start\|>assistant)?"
_DSML = "｜DSML｜"
_HERMES = Writing('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n", trigger="<tool_call>")

# In the order in which a template is asked: the more particular ones first.
_FAMILIES = (
    Family(
        "harmony",  # gpt-oss
        {
            "text": _TEXT,
            "reasoning": {"open_pattern": _HARMONY + r"<\|channel\|>analysis<\|message\|>", "close": "<|end|>"},
            "text_final": {
                "open_pattern": _HARMONY + r"<\|channel\|>final(?:\s*<\|constrain\|>\w+)?\s*<\|message\|>",
                "close": ["<|return|>", "<|end|>"],
            },
            "text_before": {
                "open_pattern": _HARMONY + r"<\|channel\|>commentary\s*<\|message\|>",
                "close": ["<|return|>", "<|end|>"],
            },
            "calls": _calls(
                _HARMONY
                + r"<\|channel\|>(?:commentary|analysis) to=functions\."
                + _NAME
                + r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
                r"<\|call\|>|<\|end\|>",
            ),
            "calls_before": _calls(
                r"<\|start\|>assistant to=functions\."
                + _NAME
                + r"<\|channel\|>commentary\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
                r"<\|call\|>|<\|end\|>",
            ),
        },
        form="named",
        marks=("<|channel|>", "<|message|>"),
        writing=Writing("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"),
        think=("<|channel|>analysis<|message|>", "<|end|>"),
        text_after="<|channel|>final<|message|>",
    ),
    Family(
        "kimi",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _calls(
                r"(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?\s*"
                r"<\|tool_call_argument_begin\|>",
                r"<\|tool_call_end\|>",
            ),
            "mark": _mark("<|tool_calls_section_end|>"),
        },
        form="named",
        marks=("<|tool_calls_section_begin|>",),
        writing=Writing(
            "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
            trigger="<|tool_call_begin|>",
            others=tuple(f"<|tool_call_begin|>functions.NAME:{i}<|tool_call_argument_begin|>" for i in range(1, 10)),
        ),
    ),
    Family(
        "deepseek-v3.2",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _calls(
                rf"(?:<{_DSML}(?:function_calls|tool_calls)>)?\s*<{_DSML}invoke name=\"(?P<name>[^\"]+)\">",
                rf"</{_DSML}invoke>",
            ),
            "mark": _mark(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
        },
        form=Inline(
            rf"<{_DSML}parameter name=\"(?P<key>[^\"]+)\"(?:\s+string=\"(?:true|(?P<json>false))\")?[^>]*>",
            f"</{_DSML}parameter>",
        ),
        marks=(_DSML,),
    ),
    Family(
        "deepseek-v3",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _calls(
                r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
                r"\n?```<｜tool▁call▁end｜>",
            ),
            "mark": _mark("<｜tool▁calls▁end｜>"),
        },
        form="named",
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        writing=Writing(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            between="\n",
            end="<｜tool▁calls▁end｜>",
            trigger="<｜tool▁call▁begin｜>",
        ),
    ),
    Family(
        "deepseek-v3.1",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _calls(
                r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>",
                r"<｜tool▁call▁end｜>",
            ),
            "mark": _mark("<｜tool▁calls▁end｜>"),
        },
        form="named",
        marks=("<｜tool▁calls▁begin｜>",),
        writing=Writing(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            between="",
            end="<｜tool▁calls▁end｜>",
            trigger="<｜tool▁call▁begin｜>",
        ),
    ),
    Family(
        "minimax",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _calls(
                r"(?:<minimax:tool_call>)?\s*<invoke name=\"(?P<name>[^\"]+)\">",
                r"</invoke>",
            ),
            "mark": _mark("</minimax:tool_call>"),
        },
        form=Inline(r"<parameter name=\"(?P<key>[^\"]+)\">", "</parameter>"),
        marks=("<minimax:tool_call>",),
    ),
    Family(
        "qwen-xml",  # Qwen3-Coder, Qwen3.5, Nemotron 3
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _calls(
                r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                r"</function>",
            ),
            "mark": _mark("</tool_call>"),
        },
        form=Inline(r"<parameter=(?P<key>[^>\n]+)>", "</parameter>", line=True),
        marks=("<tool_call>", "<function="),
    ),
    Family(
        "glm",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _calls(
                r"<tool_call>\s*(?P<name>[^\s<]+)\s*(?=<)",
                r"</tool_call>",
            ),
        },
        form=Inline(r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>", "</arg_value>"),
        marks=("<arg_key>",),
    ),
    Family(
        "hermes",  # Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4
        {"text": _TEXT, "reasoning": _THINK, "calls": _calls("<tool_call>", "</tool_call>")},
        form="json",
        marks=("<tool_call>",),
        writing=_HERMES,
    ),
    Family(
        "mistral",  # Mistral Small 3.2 and later
        {
            "text": _TEXT,
            "reasoning": {"open": "[THINK]", "close": "[/THINK]"},
            "calls": _calls(
                r"\[TOOL_CALLS\]" + _NAME + r"(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|(?=\{))",
                r"(?=\[TOOL_CALLS\])",
            ),
        },
        form="named",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        writing=Writing("[TOOL_CALLS]NAME[ARGS]", between="", trigger="[TOOL_CALLS]"),
        short_ids=True,
        think=("[THINK]", "[/THINK]"),
    ),
    Family(
        "mistral-list",  # Mistral 7B v0.3 to Small 3.1, Nemo, Large
        {
            "text": _TEXT,
            "reasoning": {"open": "[THINK]", "close": "[/THINK]"},
            "calls": _calls(r"\[TOOL_CALLS\]"),
        },
        form="json",
        marks=("[TOOL_CALLS]",),
        writing=Writing(
            '{"name": "NAME", "arguments": ', "}", begin="[TOOL_CALLS] [", between=", ", end="]", trigger="[TOOL_CALLS]"
        ),
        short_ids=True,
        think=("[THINK]", "[/THINK]"),
    ),
    Family(
        "granite",  # Granite 3, Phi-4 mini
        {"text": _TEXT, "reasoning": _THINK, "calls": _calls(r"<\|tool_call\|>", r"<\|/tool_call\|>")},
        form="json",
        marks=("<|tool_call|>",),
        writing=Writing(
            '{"name": "NAME", "arguments": ', "}", begin="<|tool_call|>[", between=", ", end="]", trigger="<|tool_call|>"
        ),
    ),
    Family(
        "llama3",
        {
            "text": _TEXT,
            "calls": _calls(r"\A\s*(?=\{)|<\|python_tag\|>\s*(?=\{)", r"<\|eom_id\|>|<\|eot_id\|>"),
        },
        form="json",
        marks=("<|eot_id|>", '"parameters"'),
        writing=Writing('{"name": "NAME", "parameters": ', "}"),
    ),
    Family("think", {"text": _TEXT, "reasoning": _THINK}, marks=("</think>",)),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}

# What any model can be held to when it must call and has no writing of its own with JSON in it.
PLAIN = Family(
    "plain",
    {"text": _TEXT, "calls": _calls(r"\A\s*(?=\[)")},
    form="json",
    writing=Writing('{"name": "NAME", "arguments": ', "}", begin="[", between=", ", end="]"),
)


def family_of(template: str, *, own: Template | None = None) -> Family | None:
    """Return the family whose marks a chat template has; None for a model whose answers are text and nothing else.

    `own`: the response template that the model brings. How calls are forced is still the family's."""
    family = next((one for one in _FAMILIES if all(mark in template for mark in one.marks)), None)
    if own is None or not isinstance(own.get("fields"), Mapping):
        return family
    return replace(family or Family("own", {}), name="own", fields=own["fields"], form=None)


def family_named(name: str) -> Family | None:
    """Return the family of that name, None for "none". Raises ConfigError with the names that there are."""
    if name != "none" and name not in FAMILIES:
        close = get_close_matches(name, FAMILIES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; write auto, none, {', '.join(FAMILIES)}"
        raise ConfigError(f"server.answers = {name!r} is no family{hint}", key="server.answers")
    return FAMILIES.get(name)
