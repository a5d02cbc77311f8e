"""Does a conversation stay a beginning of itself as it grows, with this model's chat template and tokenizer? Pure.

    turn 1 as it was computed   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│answer▓▓▓│
    turn 2 as it is written     ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│answer▓▓▓│next question▓▓
                                to the token the same? then all of turn 1 is found again

What a model answers is taken from the template itself: what it writes of the answer while that is the last message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from headstart.block.keys import BLOCK_TOKENS
from headstart.diagnose.causes import FIXES, Cause
from headstart.diagnose.compare import common
from headstart.diagnose.placing import side_of
from headstart.diagnose.report import report_of
from headstart.diagnose.requests import Conversation, conversation_of
from headstart.diagnose.show import visible
from headstart.diagnose.texts import masked
from headstart.errors import RequestError
from headstart.render import Renderer

Status = Literal["good", "note", "bad"]
Message = dict[str, Any]

_SYSTEM: Message = {"role": "system", "content": "You are the operator of a lock. Be brief, and be right. " * 12}
_FIRST: Message = {"role": "user", "content": "Which gate opens first, and why does it?"}
_ANSWER: Message = {"role": "assistant", "content": "The upper gate, because the chamber is full."}
_NEXT: Message = {"role": "user", "content": "And then?"}
_THOUGHT: Message = {**_ANSWER, "reasoning_content": "The chamber was filled last night, so the upper gate is free."}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "read_level", "arguments": {"gate": "upper", "unit": "cm"}},
        }
    ],
}
_RESULT: Message = {"role": "tool", "tool_call_id": "abcdef123", "name": "read_level", "content": '{"level": 412}'}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_level",
            "description": "Read the level of the water at a gate.",
            "parameters": {
                "type": "object",
                "properties": {"gate": {"type": "string"}, "unit": {"type": "string"}},
                "required": ["gate"],
            },
        },
    }
]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: how it is, and what to do where it is not well."""

    name: str
    status: Status
    said: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class _Step:
    """`before` and its `answer`, then `more`: what must begin what."""

    name: str
    before: tuple[Message, ...]
    answer: Message
    more: tuple[Message, ...]
    tools: bool = False


_STEPS = (
    _Step("a question and its answer", (_FIRST,), _ANSWER, (_NEXT,)),
    _Step("with a system prompt", (_SYSTEM, _FIRST), _ANSWER, (_NEXT,)),
    _Step("with a tool call and its result", (_SYSTEM, _FIRST), _CALL, (_RESULT,), tools=True),
    _Step("a new question after a tool call", (_SYSTEM, _FIRST, _CALL, _RESULT), _ANSWER, (_NEXT,), tools=True),
    _Step("with reasoning, at a new question", (_SYSTEM, _FIRST), _THOUGHT, (_NEXT,)),
    _Step(
        "with reasoning before a tool call",
        (_SYSTEM, _FIRST),
        {**_CALL, "reasoning_content": _THOUGHT["reasoning_content"]},
        (_RESULT,),
        tools=True,
    ),
)


def check_template(renderer: Renderer) -> list[Check]:
    """Return what was found of the template and the tokenizer of a model."""
    try:
        renderer.write([_FIRST])
    except RequestError as error:
        return [Check("chat template", "note", error.message, "use /v1/completions, or a model with a chat template")]
    opening = (_SYSTEM, _FIRST) if _takes([_SYSTEM, _FIRST], renderer) else (_FIRST,)
    shown = _takes(opening, renderer, tools=_TOOLS) and "read_level" in renderer.write(opening, tools=_TOOLS)
    checks = [_checked(step, renderer) for step in _STEPS[:2]]
    for step in _STEPS[2:]:
        if shown or not step.tools:
            checks.append(_checked(replace(step, before=(*opening, *step.before[2:])), renderer))
    if not shown:
        checks.append(Check("with tools", "note", "the template has no place for tools; they do not reach the model"))
    text = renderer.write(opening, tools=_TOOLS if shown else None)
    return [*checks, *_begins(text, renderer), *_dated(text)]


def _takes(messages: Sequence[Message], renderer: Renderer, *, tools: Any = None) -> bool:
    try:
        renderer.write(messages, tools=tools)
    except RequestError:
        return False
    return True


def _checked(step: _Step, renderer: Renderer) -> Check:
    tools = _TOOLS if step.tools else None
    try:
        asked = renderer.write([*step.before], tools=tools)
        answered = renderer.write([*step.before, step.answer], tools=tools, add_generation_prompt=False)
        grown = renderer.write([*step.before, step.answer, *step.more], tools=tools)
    except RequestError as error:
        return Check(step.name, "note", f"the template does not take it: {error.message}")
    thought = step.answer.get("reasoning_content")
    if thought and thought not in answered:
        said = "the template writes no reasoning into the history: what a model thinks is computed once and never found again"
        return Check(step.name, "note", said, FIXES[Cause.REASONING])
    if not answered.startswith(asked):
        return _parted(
            step, renderer, _conversation(step.before, tools), _conversation((*step.before, step.answer), tools, open=False)
        )
    before, made = (renderer.ids(text, special_tokens=False) for text in (asked, answered[len(asked) :]))
    turn, grown_ids = np.array([*before, *made], np.uint32), np.array(renderer.ids(grown, special_tokens=False), np.uint32)
    alike = common(turn, grown_ids)
    # Behind its end token a template may write what no model does, such as a line break.
    stripped = np.array([*before, *renderer.ids(answered[len(asked) :].rstrip(), special_tokens=False)], np.uint32)
    if alike >= len(stripped):
        return Check(step.name, "good", f"turn 1 with its answer, {len(stripped):,} tokens, begins turn 2 to the token")
    if grown.startswith(answered.rstrip()):
        at = visible(renderer.decode(turn[max(0, alike - 4) : alike + 4].tolist()))
        said = f"the text goes on, but from token {alike:,} on tokenised otherwise once it is one text, near {at!r}"
        return Check(step.name, "bad" if alike < len(before) else "note", said, FIXES[Cause.SAME_TEXT])
    ours = _conversation((*step.before, step.answer), tools, open=False)
    return _parted(step, renderer, ours, _conversation((*step.before, step.answer, *step.more), tools))


def _conversation(messages: tuple[Message, ...], tools: Any, *, open: bool = True) -> Conversation:
    """A conversation as a server would have it, with an answer opened behind it or not."""
    return conversation_of({"messages": [*messages], "tools": tools, "add_generation_prompt": open})


def _parted(step: _Step, renderer: Renderer, ours: Conversation, theirs: Conversation) -> Check:
    sides = [side_of(name, conversation, renderer) for name, conversation in (("A", ours), ("B", theirs))]
    report = report_of(*sides, begin_id=renderer.begin_id)
    if not report.findings:
        return Check(step.name, "good", "turn 1 begins turn 2 to the token")
    first = report.findings[0]
    texts = [visible(f"{one.before[-24:]}[{one.text[:40]}]") for one in (first.a, first.b)]
    lost = report.a_tokens - first.a.position
    blocks = report.a_tokens // BLOCK_TOKENS - report.kept_blocks
    said = (
        f"from token {first.a.position:,} of {report.a_tokens:,} on turn 2 is written otherwise: {texts[0]} was computed, "
        f"{texts[1]} comes; {lost:,} tokens and {blocks:,} whole blocks of turn 1 are lost"
    )
    cause = Cause.REASONING if step.answer.get("reasoning_content") and first.cause is Cause.TEMPLATE else first.cause
    return Check(step.name, "bad", said, FIXES[cause])


def _begins(text: str, renderer: Renderer) -> Iterator[Check]:
    begin = renderer.begin_id
    if begin is None:
        yield Check("beginning of text", "good", "the tokenizer names no token for it, so none can be doubled")
        return
    once, twice = (renderer.ids(text, special_tokens=special)[:2].count(begin) for special in (False, True))
    if twice > 1:
        said = "the template writes the beginning-of-text token, and the tokenizer would put another before it"
        fix = "send a rendered chat to /v1/completions as token ids; here /v1/chat/completions writes it once"
        yield Check("beginning of text", "note", said, fix)
    else:
        yield Check("beginning of text", "good", f"{once} token in a chat, {twice} where the tokenizer adds its own")


def _dated(text: str) -> Iterator[Check]:
    if masked(text, Cause.TIME) != text:
        yield Check(
            "dates", "note", "the template writes a date or a time by itself: each day begins with a miss", FIXES[Cause.TIME]
        )
    else:
        yield Check("dates", "good", "the template writes none")
