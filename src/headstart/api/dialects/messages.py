"""Anthropic's Messages: blocks become the messages of an `Ask`, an answer becomes blocks, whole or as events. Pure.

    message_start · for each block: content_block_start · … delta · content_block_stop · message_delta · message_stop

`ping` goes out while a long prompt is computed, also before the start, which says what was cached and so must wait for that.
Where `cache_control` stands does not count: prefixes are found by their tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headstart.api.ask import Ask
from headstart.api.caching import controls_in
from headstart.api.dialects.base import About, event
from headstart.api.dialects.fields import Common, ask_of, decoded, wrong
from headstart.api.dialects.tools import choice_of, format_of
from headstart.api.errors import messages_error
from headstart.api.pieces import Piece
from headstart.api.usage import Usage
from headstart.diagnose.why import Diagnosis
from headstart.errors import RequestError
from headstart.render.answers import Call, Part, Reasoning, Text, finished

_NEUTRAL: dict[str, tuple[object, ...]] = {"container": (), "mcp_servers": ([],), "n": (1,)}
_QUIET = ("metadata", "service_tier", "anthropic_version", "anthropic_beta", "betas", "context_management")
_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class Diagnostics(msgspec.Struct):
    previous_message_id: str | None = None


class Request(Common, kw_only=True):
    messages: list[Any]
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    diagnostics: Diagnostics | None = None


def parse(body: bytes, headers: Mapping[str, str]) -> Ask:
    """Return what a request to /v1/messages asks for. Raises RequestError naming the parameter."""
    ask = parse_to_count(body, headers)
    if ask.max_tokens is None:
        raise RequestError("max_tokens is missing", param="max_tokens")
    return ask


def parse_to_count(body: bytes, headers: Mapping[str, str]) -> Ask:
    """The same where nothing is to be generated, and so `max_tokens` need not be there."""
    request, ignored = decoded(body, Request, _NEUTRAL)
    tools, others = _tools(request.tools or ())
    choice = request.tool_choice or {}
    config = request.output_config or {}
    return ask_of(
        request,
        headers,
        id_prefix="msg_",
        max_tokens=request.max_tokens,
        logprobs=None,
        messages=tuple(_messages(request.system, request.messages)),
        tools=tools or None,
        tool_choice=choice_of({"any": "required", "tool": choice}.get(kind := choice.get("type", "auto"), kind)),
        parallel_calls=choice.get("disable_parallel_tool_use") is not True,
        format=format_of(config.get("format") or request.output_format, param="output_config.format"),
        template=_template(request, config),
        stop=request.stop_sequences or (),
        stop_param="stop_sequences",
        controls=controls_in([{"cache_control": request.cache_control}, *_holders(request)]),
        compare_with=None if request.diagnostics is None else request.diagnostics.previous_message_id,
        ignored=(*(name for name in ignored if name not in _QUIET), *others),
    )


def _holders(request: Request) -> list[Any]:
    """Return what can carry a `cache_control`."""
    system = request.system if isinstance(request.system, list) else []
    return [*(request.tools or ()), *system, *request.messages]


def _template(request: Request, config: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if (thinking := request.thinking) is not None:
        told["enable_thinking"] = thinking.get("type") != "disabled"
    if isinstance(effort := config.get("effort"), str):
        told["reasoning_effort"] = effort
    return told | (request.chat_template_kwargs or {})


def _tools(tools: Sequence[Any]) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Return what clients run, in the form of chat completions, and the kinds of what they would have the provider run."""
    functions, others = [], []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise wrong(f"tools[{i}]", "must be an object")
        if "input_schema" not in tool and tool.get("type", "custom") != "custom":
            others.append(f"tool of type {str(tool.get('type'))[:48]}")
            continue
        if not isinstance(tool.get("name"), str):
            raise wrong(f"tools[{i}].name", "must be a text")
        function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
        function |= {key: tool[key] for key in ("description", "strict") if key in tool}
        functions.append({"type": "function", "function": function})
    return tuple(functions), tuple(dict.fromkeys(others))


def _messages(system: str | list[Any] | None, messages: Sequence[Any]) -> Iterator[dict[str, Any]]:
    if system:
        yield {"role": "system", "content": _said(system, "system")}
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise wrong(where, "must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{where}.role", f"is {role!r}; it must be user or assistant")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif isinstance(content, list):
            yield from _blocks(role, content, f"{where}.content")
        else:
            raise wrong(f"{where}.content", "must be a text or a list of blocks")


def _blocks(role: str, blocks: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield one message of theirs as ours: each tool's result is one of its own, the rest, as far as it goes, is one."""
    turn: dict[str, Any] | None = None
    for j, block in enumerate(blocks):
        here = f"{where}[{j}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            if turn is not None:
                yield turn
                turn = None
            content = block.get("content")
            said = "" if content is None else _said(content, f"{here}.content")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said}
            continue
        turn = turn or {"role": role, "content": "" if role == "assistant" else []}
        if kind == "text":
            said = _said([block], where, at=j)
            turn["content"] += said[0]["text"] if role == "assistant" else said
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            turn.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + block["thinking"]
        elif kind != "redacted_thinking":  # nobody here can read that
            raise wrong(here, f"has type {str(kind)[:48]!r}; this server reads text only, no images or documents")
    if turn is not None:
        yield turn


def _said(content: object, where: str, *, at: int = 0) -> Any:
    """Return a text as it is, blocks of text as the parts that `render` takes."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "must be a text or a list of blocks")
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            raise wrong(
                f"{where}[{at + i}]", f"has type {str(kind)[:48]!r}; this server reads text only, no images or documents"
            )
    return [{key: block[key] for key in ("type", "text", "cache_control") if key in block} for block in content]


def shape(ask: Ask, about: About) -> Shape:
    return Shape(about)


@dataclass(slots=True)
class Shape:
    """A message, or its events. One block is open at a time."""

    about: About
    _blocks: int = 0
    _open: type[Part] | None = None
    _call: str | None = None  # id of the latest
    _finish: str | None = None
    _stop: str | None = field(default=None)

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        answer = answers[0]
        content = [_block(part) for part in answer.parts]
        reason = _reason(answer.finish, answer.stop, called=bool(answer.calls))
        return self._message(content, usage) | {"stop_reason": reason, "stop_sequence": answer.stop}

    def open(self) -> Iterator[bytes]:
        return iter(())

    def begin(self, usage: Usage) -> Iterator[bytes]:
        yield self._event("message_start", message=self._message([], usage))

    def piece(self, piece: Piece) -> Iterator[bytes]:
        for part in piece.parts:
            if self._open is not type(part) or (isinstance(part, Call) and part.id != self._call):
                yield from self._close()
                self._open = type(part)
                empty = Call(part.id, part.name, "{}") if isinstance(part, Call) else type(part)("")
                yield self._event("content_block_start", index=self._blocks, content_block=_block(empty))
                yield self._event("content_block_delta", index=self._blocks, delta=_delta(part, first=True))
            else:
                yield self._event("content_block_delta", index=self._blocks, delta=_delta(part))
            if isinstance(part, Call):
                self._call = part.id
                if part.done:
                    yield from self._close()
        if piece.finish is not None:
            yield from self._close()
            self._finish, self._stop = _reason(piece.finish, piece.stop, called=self._call is not None), piece.stop

    def end(self, usage: Usage) -> Iterator[bytes]:
        told = {"stop_reason": self._finish, "stop_sequence": self._stop}
        yield self._event("message_delta", delta=told, usage=usage_object(usage))
        yield self._event("message_stop")

    def failure(self, error: RequestError) -> Iterator[bytes]:
        yield event(messages_error(error, self.about.request_id), "error")

    def quiet(self) -> bytes:
        return self._event("ping")

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            if self._open is Reasoning:
                signed = {"type": "signature_delta", "signature": ""}
                yield self._event("content_block_delta", index=self._blocks, delta=signed)
            yield self._event("content_block_stop", index=self._blocks)
            self._blocks += 1
            self._open = None

    def _event(self, kind: str, **content: Any) -> bytes:
        return event({"type": kind, **content}, kind)

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.about.id,
            "type": "message",
            "role": "assistant",
            "model": self.about.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage),
            "diagnostics": _diagnostics(self.about.diagnosis(usage)),
        }


def _diagnostics(found: Diagnosis | None) -> dict[str, Any] | None:
    """Return Anthropic's form; None where nothing was asked, and where all that the earlier message had was found."""
    if found is None or (found.found and found.names is None):
        return None
    if found.names is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    kind = found.names.anthropic
    missed = {} if kind == "unavailable" else {"cache_missed_input_tokens": found.missed_tokens}
    return {"cache_miss_reason": {"type": kind, **missed}}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's fields, in which input tokens are those that were neither cached nor written."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.written_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.written_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": usage.written_tokens, "ephemeral_1h_input_tokens": 0},
        "output_tokens": usage.output_tokens,
        "cached_memory_tokens": usage.cached_memory_tokens,
        "cached_disk_tokens": usage.cached_disk_tokens,
        "kept_tokens": usage.kept_output_tokens,
    }


def _reason(finish: str | None, stop: str | None, *, called: bool) -> str | None:
    if finish == "stop":
        return "tool_use" if called else "stop_sequence" if stop is not None else "end_turn"
    return _REASONS.get(finish or "", finish)


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, Call):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.arguments)}
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "thinking", "thinking": part.text, "signature": ""}


def _input(arguments: str) -> dict[str, Any]:
    """Return arguments as the object that clients take them for; of a call that was cut off, what is whole."""
    value = json.loads(finished(arguments) if arguments.startswith("{") else arguments)
    return value if isinstance(value, dict) else {"value": value}


def _delta(part: Part, *, first: bool = False) -> dict[str, Any]:
    if isinstance(part, Call):
        is_object = not first or part.arguments.startswith("{")
        told = part.arguments if is_object else json.dumps(_input(part.arguments), ensure_ascii=False)
        return {"type": "input_json_delta", "partial_json": told}
    if isinstance(part, Text):
        return {"type": "text_delta", "text": part.text}
    return {"type": "thinking_delta", "thinking": part.text}
