"""Chat messages as clients send them, brought to the one form that templates understand. Pure.

Clients write the same message in several ways: content as a string or as a list of parts, arguments of a tool call as a JSON
string or as an object. A template renders these differently, or not at all, so equal conversations would have unequal
prompts; here they become equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from headstart.errors import RequestError

MESSAGES = 100_000  # in one request; a template takes a second for as many
ROLES = ("system", "developer", "user", "assistant", "tool")
_NORMAL_ROLES = ("user", "assistant", "tool", "system")


def normal_messages(messages: object, *, join_parts: bool = True) -> list[dict[str, Any]]:
    """Return `messages` in normal form, those that have it already as they are: for reading. Raises RequestError whose `param`
    names the place, as in "messages[2].content". Without `join_parts` templates see a list of text parts where a client wrote
    one."""
    if not _is_list(messages):
        raise _wrong("messages", "must be a list of messages")
    if len(messages) > MESSAGES:
        raise _wrong("messages", f"has {len(messages)} messages; at most {MESSAGES} are taken")
    if not messages:
        raise _wrong("messages", "is empty; send at least one message")
    return [
        message if _is_normal(message) else _message(message, f"messages[{i}]", join_parts)
        for i, message in enumerate(messages)
    ]


def normal_tools(tools: object) -> list[dict[str, Any]] | None:
    """Return the tools' descriptions in the order given, None for no tools. Raises RequestError naming the place."""
    if tools is None:
        return None
    if not _is_list(tools):
        raise _wrong("tools", "must be a list")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _wrong(f"tools[{i}]", 'must be {"type": "function", "function": {"name": …}}')
    return [dict(tool) for tool in tools] or None


def _is_normal(message: object) -> TypeGuard[dict[str, Any]]:
    """Whether that is plain to see, as it is of nearly all messages."""
    return (
        type(message) is dict
        and type(message.get("content")) is str
        and message.get("role") in _NORMAL_ROLES
        and "tool_calls" not in message
    )


def _message(message: object, where: str, join_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(where, "must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"is {role!r}; it must be one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if calls is not None and role != "assistant":
        raise _wrong(f"{where}.tool_calls", "belongs to an assistant's message only")
    normal = {
        **message,
        "role": "system" if role == "developer" else role,  # templates know the older word
        # An assistant's turn may be without text: beside calls, or where a client keeps a turn that said nothing.
        "content": _content(message.get("content"), f"{where}.content", optional=role == "assistant", join=join_parts),
    }
    normal.pop("tool_calls", None)
    if calls:
        if not _is_list(calls):
            raise _wrong(f"{where}.tool_calls", "must be a list")
        normal["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return normal


def _content(content: object, where: str, *, optional: bool, join: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""  # templates add strings; None would fail there
    if not _is_list(content):
        raise _wrong(where, "must be a string or a list of text parts")
    texts = [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return "".join(texts) if join else [dict(part) for part in content]


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise _wrong(where, 'must be an object such as {"type": "text", "text": …}')
    if kind != "text":
        raise _wrong(where, f"has type {kind[:48]!r}; this server reads parts of text only, no images, audio or files")
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{where}.text", "must be a string")
    return text


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(where, 'must be {"id": …, "type": "function", "function": {"name": …, "arguments": …}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise _wrong(f"{where}.function.arguments", f"is not valid JSON ({error})") from error
    if not isinstance(arguments, Mapping):
        raise _wrong(f"{where}.function.arguments", "must be a JSON object")
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param} {what}", param=param)
