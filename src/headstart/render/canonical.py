"""Differences between requests that mean nothing and cost every hit behind them, taken out before a prompt is rendered. Pure.

Each rule has a name, does one thing and tells when it acted. None reorders or rewrites what a model or a user wrote.

    billing-header     the header line that a coding agent puts at the top of its system prompt, new each time, is dropped
    cache-control      marks for caches (`cache_control`, `prompt_cache_breakpoint`) are taken out of messages and tools
    text-parts         content that is a list of text parts is the string that they make together
    reasoning          reasoning that this server generated and that the client left out is put back, for the template to render
                       or to leave out
    tool-arguments     a call that this server generated keeps its tokens where the JSON of its arguments is equal
    generated-tokens   a text that this server generated keeps its tokens where it would be tokenised in another way

The last three need what was generated: `generated`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.config import CANONICAL_RULES

RULES = CANONICAL_RULES
_REASONING = frozenset(("reasoning_content", "reasoning", "thinking"))  # what templates read, and clients write
MARKS = ("cache_control", "prompt_cache_breakpoint")
_MARKS = frozenset(MARKS)
_UNTOUCHED = frozenset(("role", "content", "name", "tool_call_id"))  # no rule is about these, where the content is a string

# Pairs up to their last semicolon, as what follows may stand on the same line; else the line.
_BILLING = re.compile(r"\s*x-anthropic-billing-header:(?:(?:[ \t]*[\w.-]+=[^;\n]*;)+|[^\n]*)[ \t]*\n?")


@dataclass(frozen=True, slots=True)
class Canonical:
    """Messages and tools as they are rendered. `acted`: the names of rules that changed something."""

    messages: list[Any]
    tools: list[Any] | None
    acted: frozenset[str]

    def with_reasoning(self, known: Mapping[int, str]) -> Canonical:
        """Return this with reasoning put back, by the numbers of messages."""
        if not known:
            return self
        messages = list(self.messages)
        for at, reasoning in known.items():
            messages[at] = {**messages[at], "reasoning_content": reasoning}
        return Canonical(messages, self.tools, self.acted | {"reasoning"})


def canonical(messages: Sequence[Any], tools: Sequence[Any] | None, rules: Collection[str]) -> Canonical:
    """Return what `rules` make of a request's messages and tools, as far as that needs nothing that was generated. They are
    left as they are and may be anything: what is no message is for whoever renders it to refuse."""
    acted: set[str] = set()
    said: list[Any] = []
    for at, message in enumerate(messages):
        if (at and _is_untouched(message)) or not isinstance(message, Mapping):
            said.append(message)
            continue
        one = _unmarked(message, acted) if "cache-control" in rules else dict(message)
        if "billing-header" in rules and at == 0 and one.get("role") in ("system", "developer"):
            one = _without_header(one, acted)
        if "text-parts" in rules and isinstance(text := _joined(one.get("content")), str):
            one["content"] = text
            acted.add("text-parts")
        said.append(one)
    described: list[Any] | None = None if tools is None else list(tools)
    if described is not None and "cache-control" in rules:
        described = [_unmarked(tool, acted) if isinstance(tool, Mapping) else tool for tool in described]
    return Canonical(said, described, frozenset(acted))


def _is_untouched(message: object) -> bool:
    """Whether that is plain to see, as it is of nearly all messages: a conversation may have thousands."""
    return type(message) is dict and type(message.get("content")) is str and _UNTOUCHED.issuperset(message)


def lacks_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether this is an assistant's message without what it had thought."""
    return message.get("role") == "assistant" and (
        _REASONING.isdisjoint(message) or all(message.get(name) is None for name in _REASONING)
    )


def _unmarked(holder: Mapping[str, Any], acted: set[str]) -> dict[str, Any]:
    """Take marks out of a message or tool, and of what lies directly in it: never out of a schema or of arguments."""
    kept = {key: value for key, value in holder.items() if key not in MARKS} if _marked(holder) else holder
    inner = {}
    for key in ("content", "tool_calls"):
        if isinstance(parts := kept.get(key), list) and any(_marked(part) for part in parts):
            inner[key] = [_plain(part) for part in parts]
    if "function" in kept and _marked(function := kept["function"]):
        inner["function"] = _plain(function)
    if not inner and kept is holder:
        return dict(holder)
    acted.add("cache-control")
    return {**kept, **inner}


def _marked(part: Any) -> bool:
    return isinstance(part, Mapping) and not _MARKS.isdisjoint(part)


def _plain(part: Any) -> Any:
    return {key: value for key, value in part.items() if key not in MARKS} if isinstance(part, Mapping) else part


def header_characters(text: str) -> int:
    """Return how long the header is with which `text` begins, for "billing-header"; 0 where there is none."""
    found = _BILLING.match(text)
    return 0 if found is None else found.end()


def _without_header(message: dict[str, Any], acted: set[str]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        left: Any = content[header_characters(content) :]
    elif isinstance(content, list) and content and isinstance(first := content[0], Mapping):
        text = first.get("text")
        if not isinstance(text, str) or not (length := header_characters(text)):
            return message
        rest = text[length:]
        left = [{**first, "text": rest}, *content[1:]] if rest else content[1:]
    else:
        return message
    if left != content:
        acted.add("billing-header")
    return {**message, "content": left}


def _joined(content: Any) -> str | None:
    """Return the string that a list of text parts makes, None for anything else."""
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return None
    return "".join(part["text"] for part in content)
