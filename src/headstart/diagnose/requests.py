"""Requests of four dialects as one conversation, in which every text knows where the client wrote it. Pure.

    OpenAI chat        messages, tools, content as string or parts          ┐
    OpenAI responses   instructions, input items, flat tools                ├─▶ Conversation: messages and tools as `render`
    Anthropic          system, blocks, tool_use, tool_result, input_schema  ┘   takes them, and pieces with their paths

A completion's prompt, a plain text and a list of token ids are a conversation without messages: they are what is computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headstart.diagnose.described import Described, Remembered
from headstart.errors import RequestError
from headstart.render.canonical import MARKS, header_characters

PieceKind = Literal["text", "image", "reasoning", "fixed"]
Where = tuple[str | int, ...]  # ("messages", 2, "content"), in the conversation

NAMESPACE = ("cache_salt", "extra_key", "user_id", "prompt_cache_key")
_ADAPTER = ("lora", "lora_name", "lora_path", "adapter", "adapter_name", "adapter_id")
_TEMPLATE = (
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "documents",
    "reasoning_effort",
    "enable_thinking",
)
# What a template tests rather than writes; a mark in these would change what it does.
_TESTED = {"role", "type"}
_TOOLS = Remembered()


@dataclass(frozen=True, slots=True)
class Piece:
    """One value of a request. `path` is where the client wrote it, `where` the string of the conversation that has it from
    character `begin` on. A "fixed" piece is one that templates test, or no text; it cannot be followed into a prompt. Of what
    the client wrote the first `skipped` characters are left out."""

    path: str
    where: Where
    text: str
    kind: PieceKind = "text"
    begin: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """`prompt` is set instead of messages where the request is one text or a list of token ids. `namespace`, `adapter` and
    `template` hold the fields of the request that keep caches apart or change how it is rendered; `shapes` says of a message
    whether its content was a "string" or "parts", where a server may render these differently; `acted` names the rules of
    canonical form that took something out."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    pieces: tuple[Piece, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    prompt_path: str = "prompt"
    model: str | None = None
    adapter: dict[str, Any] = field(default_factory=dict)
    namespace: dict[str, str] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    special_tokens: bool | None = None
    shapes: dict[int, str] = field(default_factory=dict)
    acted: frozenset[str] = frozenset()
    described: Described | None = field(default=None, compare=False)  # of `tools`, while these are as they were sent


def conversation_of(body: object, *, as_sent: bool = False, rules: Collection[str] = ()) -> Conversation:
    """Return what a request's JSON asks to be computed. Raises RequestError naming the place.

    `as_sent` leaves arguments of tool calls as they were written, for a server that nothing is known of. `rules` of canonical
    form are those of a server of ours; marks for caches and the shape of content change nothing here without them, too."""
    if isinstance(body, list):
        body = {"messages": body}
    if not isinstance(body, Mapping):
        raise _wrong("the request", "must be a JSON object")
    if "messages" in body:
        build = _Build(as_sent, rules)
        (_anthropic if is_anthropic(body) else _chat)(build, body)
    elif "input" in body or "instructions" in body:
        build = _Build(as_sent, rules)
        _responses(build, body)
    elif "prompt" in body:
        return Conversation(prompt=_one_prompt(body["prompt"]), **_common(body))
    else:
        raise _wrong("the request", "has no messages, input or prompt; give the body of a request")
    described = build.described()
    return Conversation(
        messages=build.messages,
        tools=described.tools or None,
        pieces=(*described.pieces, *build.pieces()),
        described=described,
        shapes=build.shapes,
        acted=frozenset(build.acted),
        **_common(body),
    )


def equal_form(value: object) -> str:
    """Return a text that is equal for values that mean the same in JSON: order of keys, spacing, 1 and 1.0 do not count."""
    return json.dumps(_numbers(value), sort_keys=True, ensure_ascii=False, default=str)


def _numbers(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        # A set in all but its type; what writes schemas writes it in any order.
        return {
            str(key): sorted(map(str, item)) if key == "required" and isinstance(item, list) else _numbers(item)
            for key, item in value.items()
        }
    return [_numbers(item) for item in value] if isinstance(value, list | tuple) else value


class _Build:
    """Messages and tools in the making. `origin` says for a place in the conversation which path the client knows it by."""

    def __init__(self, as_sent: bool, rules: Collection[str]) -> None:
        self.as_sent = as_sent
        self.acted: set[str] = set()
        self._rules = rules
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.shapes: dict[int, str] = {}
        self._origin: dict[Where, str] = {}
        self._parts: dict[Where, list[Piece]] = {}
        self._kind: dict[Where, PieceKind] = {}

    def message(self, role: str, path: str, **more: Any) -> int:
        at = len(self.messages)
        self.messages.append({"role": role, "content": "", **more})
        self._origin["messages", at] = path
        return at

    def say(self, at: int, text: str, path: str, kind: PieceKind = "text", *, key: str = "content") -> None:
        """Add text to a string of message `at`."""
        where: Where = ("messages", at, key)
        before = self.messages[at].get(key) or ""
        skipped = 0
        if where == ("messages", 0, "content") and where not in self._parts and "billing-header" in self._rules:
            skipped = header_characters(text) if self.messages[0]["role"] in ("system", "developer") else 0
        if skipped:
            self.acted.add("billing-header")
            text = text[skipped:]
        self.messages[at][key] = before + text
        self._parts.setdefault(where, []).append(Piece(path, where, text, kind, len(before), skipped))

    def call(self, at: int, path: str, name: object, arguments: object, arguments_path: str, **more: Any) -> None:
        calls = self.messages[at].setdefault("tool_calls", [])
        where: Where = ("messages", at, "tool_calls", len(calls))
        if isinstance(arguments, str) and not self.as_sent:
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as error:
                raise _wrong(arguments_path, f"is not valid JSON ({error})") from error
        calls.append({**more, "type": "function", "function": {"name": name, "arguments": arguments}})
        self._origin[where] = path
        self._origin[(*where, "function", "name")] = f"{path}.function.name" if "function" in arguments_path else f"{path}.name"
        self._origin[(*where, "function", "arguments")] = arguments_path

    def tool(
        self,
        path: str,
        function: Mapping[str, Any],
        function_path: str,
        *,
        given: Mapping[str, Any] | None = None,
        **names: str,
    ) -> None:
        """Describe a tool; `names` tell what the client calls the function's fields. `given`: what stands round it."""
        where: Where = ("tools", len(self.tools), "function")
        described = {key: one for key, one in function.items() if key not in MARKS}
        holder = {"type": "function", "function": function} if given is None else given
        kept = {key: one for key, one in holder.items() if key not in MARKS}
        self.tools.append({**kept, "function": described})
        self._origin[where[:2]] = path
        self._origin[where] = function_path
        for ours, theirs in names.items():
            self._origin[(*where, ours)] = f"{function_path}.{theirs}"

    def described(self) -> Described:
        """Return the tools, with a piece for every value in order."""
        paths = [path for where, path in self._origin.items() if where[0] == "tools"]
        return _TOOLS.get(self.tools, paths, lambda: tuple(self._walk(("tools",), self.tools, "tools")))

    def pieces(self) -> Iterator[Piece]:
        """Yield every value of the messages in order."""
        yield from self._walk(("messages",), self.messages, "messages")

    def _walk(self, where: Where, value: object, path: str) -> Iterator[Piece]:
        path = self._origin.get(where, path)
        if where in self._parts:
            yield from self._parts[where]
        elif isinstance(value, Mapping) and value:
            for key, item in value.items():
                yield from self._walk((*where, str(key)), item, f"{path}.{key}")
        elif isinstance(value, list) and value:
            for i, item in enumerate(value):
                yield from self._walk((*where, i), item, f"{path}[{i}]")
        elif isinstance(value, str):
            tested = where[-1] in _TESTED or not value.strip()
            reasoning = where[-1] in ("reasoning_content", "reasoning", "thinking")
            yield Piece(path, where, value, "fixed" if tested else "reasoning" if reasoning else "text")
        elif value is not None:
            yield Piece(path, where, json.dumps(value, default=str), "fixed")


def _chat(build: _Build, body: Mapping[str, Any]) -> None:
    for i, tool in enumerate(_list(body.get("tools"), "tools")):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping):
            build.tool(f"tools[{i}]", function, f"tools[{i}].function", given=tool)
        else:
            _flat_tool(build, tool, f"tools[{i}]")
    for i, message in enumerate(_list(body["messages"], "messages")):
        path = f"messages[{i}]"
        message = _object(message, path)
        kept = {
            key: value
            for key, value in message.items()
            if key not in ("role", "content", "tool_calls", *MARKS) and value is not None
        }
        at = build.message(str(message.get("role")), path, **kept)
        if isinstance(message.get("content"), list):
            build.shapes[at] = "parts"
        elif isinstance(message.get("content"), str):
            build.shapes[at] = "string"
        _content(build, at, message.get("content"), f"{path}.content")
        for j, call in enumerate(_list(message.get("tool_calls"), f"{path}.tool_calls")):
            here = f"{path}.tool_calls[{j}]"
            function = _object(_object(call, here).get("function"), f"{here}.function")
            more = {"id": call["id"]} if call.get("id") is not None else {}
            build.call(at, here, function.get("name"), function.get("arguments", {}), f"{here}.function.arguments", **more)


def _anthropic(build: _Build, body: Mapping[str, Any]) -> None:
    for i, tool in enumerate(_list(body.get("tools"), "tools")):
        path, tool = f"tools[{i}]", _object(tool, f"tools[{i}]")
        function = {
            "parameters" if key == "input_schema" else key: value
            for key, value in tool.items()
            if key not in ("cache_control", "type")
        }
        function.setdefault("name", str(tool.get("type", "")))
        build.tool(path, function, path, parameters="input_schema")
    if body.get("system"):
        at = build.message("system", "system")
        _content(build, at, body["system"], "system")
    for i, message in enumerate(_list(body["messages"], "messages")):
        path = f"messages[{i}]"
        message = _object(message, path)
        _anthropic_message(build, str(message.get("role")), message.get("content"), path)


def _anthropic_message(build: _Build, role: str, content: object, path: str) -> None:
    """One message of theirs may be several of ours: each tool's result is one of its own."""
    if not isinstance(content, list):
        _content(build, build.message(role, path), content, f"{path}.content")
        return
    at: int | None = None
    for j, block in enumerate(content):
        here = f"{path}.content[{j}]"
        block = _object(block, here)
        kind = block.get("type")
        if kind == "tool_result":
            more = {"tool_call_id": block["tool_use_id"]} if "tool_use_id" in block else {}
            _content(build, build.message("tool", here, **more), block.get("content"), f"{here}.content")
            at = None
            continue
        if at is None:
            at = build.message(role, path)
        if kind == "tool_use":
            more = {"id": block["id"]} if "id" in block else {}
            build.call(at, here, block.get("name"), block.get("input", {}), f"{here}.input", **more)
        elif kind in ("thinking", "redacted_thinking"):
            text = str(block.get("thinking") or block.get("data") or "")
            build.say(at, text, f"{here}.thinking", "reasoning", key="reasoning_content")
        else:
            _part(build, at, block, here)


def _responses(build: _Build, body: Mapping[str, Any]) -> None:
    for i, tool in enumerate(_list(body.get("tools"), "tools")):
        _flat_tool(build, tool, f"tools[{i}]")
    if isinstance(body.get("instructions"), str):
        _content(build, build.message("system", "instructions"), body["instructions"], "instructions")
    items = body.get("input")
    if isinstance(items, str):
        _content(build, build.message("user", "input"), items, "input")
        return
    turn: int | None = None  # the assistant's message that items still belong to
    for i, item in enumerate(_list(items, "input")):
        path = f"input[{i}]"
        item = _object(item, path)
        kind = item.get("type", "message")
        if kind == "function_call_output":
            at = build.message("tool", path, tool_call_id=str(item.get("call_id", "")))
            _content(build, at, item.get("output"), f"{path}.output")
            turn = None
        elif kind in ("function_call", "reasoning"):
            turn = build.message("assistant", path) if turn is None else turn
            if kind == "function_call":
                arguments = item.get("arguments", {})
                build.call(turn, path, item.get("name"), arguments, f"{path}.arguments", id=str(item.get("call_id", "")))
            else:
                for j, part in enumerate(_list(item.get("summary") or item.get("content"), f"{path}.summary")):
                    text = str(_object(part, path).get("text", ""))
                    build.say(turn, text, f"{path}.summary[{j}].text", "reasoning", key="reasoning_content")
        else:
            role = str(item.get("role", "user"))
            if role != "assistant" or turn is None:
                turn = build.message(role, path)
            _content(build, turn, item.get("content"), f"{path}.content")
            turn = turn if role == "assistant" else None


def _flat_tool(build: _Build, tool: object, path: str) -> None:
    tool = _object(tool, path)
    function = {key: value for key, value in tool.items() if key != "type"}
    function.setdefault("name", str(tool.get("type", "")))
    build.tool(path, function, path)


def _content(build: _Build, at: int, content: object, path: str) -> None:
    if isinstance(content, str):
        build.say(at, content, path)
    elif isinstance(content, list):
        for j, part in enumerate(content):
            _part(build, at, part, f"{path}[{j}]")
    elif content is not None:
        raise _wrong(path, "must be a string or a list of parts")


def _part(build: _Build, at: int, part: object, path: str) -> None:
    if isinstance(part, str):
        build.say(at, part, path)
        return
    part = _object(part, path)
    text = part.get("text", part.get("refusal"))
    if isinstance(text, str):
        build.say(at, text, f"{path}.text")
        return
    # What is no text has tokens of its own in every engine; here its content stands for it, by digest.
    told = {key: value for key, value in part.items() if key not in MARKS}
    digest = hashlib.sha256(equal_form(told).encode("utf-8", "surrogatepass")).hexdigest()
    build.say(at, f"[{part.get('type', 'part')} sha256:{digest[:32]}]", path, "image")


def is_anthropic(body: Mapping[str, Any]) -> bool:
    if "system" in body or "anthropic_version" in body:
        return True
    tools = body.get("tools")
    if isinstance(tools, list) and any(isinstance(tool, Mapping) and "input_schema" in tool for tool in tools):
        return True
    messages = body["messages"] if isinstance(body["messages"], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return any(isinstance(block, Mapping) and block.get("type") in ("tool_use", "tool_result", "thinking") for block in blocks)


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    model, special = body.get("model"), body.get("add_special_tokens")
    namespace = {name: str(body[name]) for name in NAMESPACE if body.get(name) is not None}
    return {
        "model": model if isinstance(model, str) else None,
        "adapter": {name: body[name] for name in _ADAPTER if body.get(name) is not None},
        "namespace": namespace,
        "template": {name: body[name] for name in _TEMPLATE if body.get(name) is not None},
        "special_tokens": special if isinstance(special, bool) else None,
    }


def _one_prompt(prompt: object) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return tuple(prompt)
    raise _wrong("prompt", "must be one text or one list of token ids")


def _list(value: object, path: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong(path, "must be a list")
    return value


def _object(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(path, "must be an object")
    return value


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param} {what}", param=param)
