"""How families of models write reasoning and tool calls: data for `transformers`' response templates, and for forced calls.

A field is a region of an answer from `open` to `close`; its kind is how its name begins: reasoning, text, calls, or mark, which
says nothing. A field that never opens takes what no other has. A model that brings a response template of its own is read by
that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from headstart.errors import ConfigError

Template = Mapping[str, Any]

_FUNCTION = {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_EACH = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
_THINK = {"open": "<think>", "close": "</think>"}
_TEXT: dict[str, Any] = {}


def _mark(*texts: str) -> dict[str, Any]:
    """Return the field of marks that say nothing, such as the end of several calls."""
    return {"open": list(texts), "close_pattern": r"\s*"}


_NAME = r"(?P<name>[\w.:/-]+)"


@dataclass(frozen=True, slots=True)
class Writing:
    """How calls are written whose arguments are JSON: `begin`, then each call `before` (with NAME in it), its arguments and
    `after`, with `between` two, and `end` behind the last. `between` None: one call an answer."""

    before: str
    after: str = ""
    begin: str = ""
    between: str | None = None
    end: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """`fields`: a response template's. `think`: the marks of reasoning, which a prompt may have opened already. `marks`:
    texts of a chat template that tell
    the family, all of them. `writing`: where arguments are JSON."""

    name: str
    fields: Template
    marks: tuple[str, ...] = ()
    writing: Writing | None = None
    short_ids: bool = False
    think: tuple[str, str] = ("<think>", "</think>")
    text_after: str | None = None  # the mark without which an answer has no text


def _json_calls(open: str, close: str | None = None, *, each: bool = False) -> dict[str, Any]:
    told = {"open": open, "content": "json", "repeats": True, "transform": _EACH if each else _FUNCTION}
    return told | ({"transform_each": True} if each else {}) | ({"close": close} if close else {})


def _named_calls(open: str, close: str | None = None, *, inline: str | None = None) -> dict[str, Any]:
    told: dict[str, Any] = {"open_pattern": open, "content": "json", "repeats": True, "transform": _NAMED}
    if close:
        told["close_pattern"] = close
    if inline:
        told |= {
            "content": "xml-inline",
            "content_args": {"tag_pattern": inline, "value_parser": {"name": "text", "args": {"strip": False}}},
        }
    return told


_HARMONY = r"(?:<\|start\|>assistant)?"
_DSML = "｜DSML｜"
_HERMES = Writing('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n")

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
            "calls": _named_calls(
                _HARMONY
                + r"<\|channel\|>(?:commentary|analysis) to=functions\."
                + _NAME
                + r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
                r"<\|call\|>|<\|end\|>",
            ),
            "calls_before": _named_calls(
                r"<\|start\|>assistant to=functions\."
                + _NAME
                + r"<\|channel\|>commentary\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
                r"<\|call\|>|<\|end\|>",
            ),
        },
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
            "calls": _named_calls(
                r"(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?\s*"
                r"<\|tool_call_argument_begin\|>",
                r"<\|tool_call_end\|>",
            ),
            "mark": _mark("<|tool_calls_section_end|>"),
        },
        marks=("<|tool_calls_section_begin|>",),
        writing=Writing(
            "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    Family(
        "deepseek-v3.2",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _named_calls(
                rf"(?:<{_DSML}(?:function_calls|tool_calls)>)?\s*<{_DSML}invoke name=\"(?P<name>[^\"]+)\">",
                rf"</{_DSML}invoke>",
                inline=rf"<{_DSML}parameter name=\"(?P<key>[^\"]+)\"[^>]*>(?P<value>.*?)</{_DSML}parameter>",
            ),
            "mark": _mark(f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"),
        },
        marks=(_DSML,),
    ),
    Family(
        "deepseek-v3",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _named_calls(
                r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n",
                r"\n?```<｜tool▁call▁end｜>",
            ),
            "mark": _mark("<｜tool▁calls▁end｜>"),
        },
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        writing=Writing(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            between="\n",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    Family(
        "deepseek-v3.1",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _named_calls(
                r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>",
                r"<｜tool▁call▁end｜>",
            ),
            "mark": _mark("<｜tool▁calls▁end｜>"),
        },
        marks=("<｜tool▁calls▁begin｜>",),
        writing=Writing(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            between="",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    Family(
        "minimax",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _named_calls(
                r"(?:<minimax:tool_call>)?\s*<invoke name=\"(?P<name>[^\"]+)\">",
                r"</invoke>",
                inline=r"<parameter name=\"(?P<key>[^\"]+)\">(?P<value>.*?)</parameter>",
            ),
            "mark": _mark("</minimax:tool_call>"),
        },
        marks=("<minimax:tool_call>",),
    ),
    Family(
        "qwen-xml",  # Qwen3-Coder, Qwen3.5, Nemotron 3
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _named_calls(
                r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                r"</function>",
                inline=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
            ),
            "mark": _mark("</tool_call>"),
        },
        marks=("<tool_call>", "<function="),
    ),
    Family(
        "glm",
        {
            "text": _TEXT,
            "reasoning": _THINK,
            "calls": _named_calls(
                r"<tool_call>\s*(?P<name>[^\s<]+)\s*(?=<)",
                r"</tool_call>",
                inline=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            ),
        },
        marks=("<arg_key>",),
    ),
    Family(
        "hermes",  # Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4
        {"text": _TEXT, "reasoning": _THINK, "calls": _json_calls("<tool_call>", "</tool_call>")},
        marks=("<tool_call>",),
        writing=_HERMES,
    ),
    Family(
        "mistral",  # Mistral Small 3.2 and later
        {
            "text": _TEXT,
            "reasoning": {"open": "[THINK]", "close": "[/THINK]"},
            "calls": _named_calls(
                r"\[TOOL_CALLS\]" + _NAME + r"(?:\[CALL_ID\]\w+)?\[ARGS\]",
                r"(?=\[TOOL_CALLS\])",
            ),
        },
        marks=("[TOOL_CALLS]", "[ARGS]"),
        writing=Writing("[TOOL_CALLS]NAME[ARGS]", between=""),
        short_ids=True,
        think=("[THINK]", "[/THINK]"),
    ),
    Family(
        "mistral-list",  # Mistral 7B v0.3 to Small 3.1, Nemo, Large
        {
            "text": _TEXT,
            "reasoning": {"open": "[THINK]", "close": "[/THINK]"},
            "calls": _json_calls("[TOOL_CALLS]", each=True),
        },
        marks=("[TOOL_CALLS]",),
        writing=Writing('{"name": "NAME", "arguments": ', "}", begin="[TOOL_CALLS] [", between=", ", end="]"),
        short_ids=True,
        think=("[THINK]", "[/THINK]"),
    ),
    Family(
        "granite",  # Granite 3, Phi-4 mini
        {"text": _TEXT, "reasoning": _THINK, "calls": _json_calls("<|tool_call|>", "<|/tool_call|>", each=True)},
        marks=("<|tool_call|>",),
        writing=Writing('{"name": "NAME", "arguments": ', "}", begin="<|tool_call|>[", between=", ", end="]"),
    ),
    Family(
        "llama3",
        {
            "text": _TEXT,
            "calls": _named_calls(
                r'(?:\A\s*|<\|python_tag\|>\s*|(?<=\});\s*)\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"]+)"'
                r'\s*,\s*"(?:parameters|arguments)"\s*:\s*',
                r"\}\s*(?=\Z|;\s*\{)|\}\s*(?:<\|eom_id\|>|<\|eot_id\|>)",
            ),
        },
        marks=("<|eot_id|>", '"parameters"'),
        writing=Writing('{"name": "NAME", "parameters": ', "}"),
    ),
    Family("think", {"text": _TEXT, "reasoning": _THINK}, marks=("</think>",)),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _FAMILIES}

# What any model can be held to when it must call and has no writing of its own with JSON in it.
PLAIN = Family(
    "plain",
    {"text": _TEXT, "calls": {"open_pattern": r"\A\s*(?=\[)", "content": "json", "transform": _EACH, "transform_each": True}},
    writing=Writing('{"name": "NAME", "arguments": ', "}", begin="[", between=", ", end="]"),
)


def family_of(template: str, *, own: Template | None = None) -> Family | None:
    """Return the family whose marks a chat template has; None for a model whose answers are text and nothing else.

    `own`: the response template that the model brings. How calls are forced is still the family's."""
    family = next((one for one in _FAMILIES if all(mark in template for mark in one.marks)), None)
    if own is None or not isinstance(own.get("fields"), Mapping):
        return family
    return replace(family or Family("own", {}), name="own", fields=own["fields"])


def family_named(name: str) -> Family | None:
    """Return the family of that name, None for "none". Raises ConfigError with the names that there are."""
    if name != "none" and name not in FAMILIES:
        close = get_close_matches(name, FAMILIES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; write auto, none, {', '.join(FAMILIES)}"
        raise ConfigError(f"server.answers = {name!r} is no family{hint}", key="server.answers")
    return FAMILIES.get(name)
