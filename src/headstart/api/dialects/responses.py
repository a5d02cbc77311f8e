"""OpenAI's Responses: items become the messages of an `Ask`, an answer becomes output items, whole or as events. Pure.

    response.created · in_progress · for each item: output_item.added · … delta · … done · output_item.done · completed

A conversation that goes on from `previous_response_id` is put together by the server, which keeps it; here is what is new.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headstart.api.ask import Ask
from headstart.api.dialects.base import KEEPALIVE, About, event
from headstart.api.dialects.chat import template_arguments
from headstart.api.dialects.chunks import token_object
from headstart.api.dialects.fields import Common, ask_of, decoded, wrong
from headstart.api.dialects.tools import choice_of, format_of, functions_of
from headstart.api.errors import error_object
from headstart.api.pieces import Piece, Told
from headstart.api.usage import Usage
from headstart.diagnose.why import Diagnosis
from headstart.engine.base import FinishReason
from headstart.errors import RequestError
from headstart.render.answers import Call, Part, Reasoning, Text

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "n": (1,),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
}
# What asks for nothing that an answer here would differ by, and is repeated or passed over without a word.
_QUIET = ("include", "truncation", "service_tier", "safety_identifier", "user", "max_tool_calls", "metadata")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Reasons(msgspec.Struct):
    effort: str | None = None


class Request(Common, kw_only=True):
    input: str | list[Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasons | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse(body: bytes, headers: Mapping[str, str]) -> Ask:
    """Return what a request to /v1/responses asks for. Raises RequestError naming the parameter."""
    request, ignored = decoded(body, Request, _NEUTRAL)
    messages = _messages(request.input)
    if not messages and request.previous_response_id is None:
        raise wrong("input", "is missing; send a text or a list of items")
    instructions = () if request.instructions is None else ({"role": "system", "content": request.instructions},)
    tools, others = functions_of(request.tools or ())
    text = request.text or {}
    return ask_of(
        request,
        headers,
        id_prefix="resp_",
        max_tokens=request.max_output_tokens,
        max_tokens_param="max_output_tokens",
        logprobs=request.top_logprobs or None,
        logprobs_param="top_logprobs",
        messages=(*instructions, *messages),
        instructions=len(instructions),
        previous=request.previous_response_id,
        keep=request.store is not False,
        tools=tools or None,
        tool_choice=choice_of(request.tool_choice),
        parallel_calls=request.parallel_tool_calls is not False,
        format=format_of(text.get("format"), param="text.format"),
        template=template_arguments(request.reasoning.effort if request.reasoning else None, request.chat_template_kwargs),
        ignored=(*(name for name in ignored if name not in _QUIET), *others),
        echo={
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
        },
    )


def _messages(items: str | list[Any] | None) -> list[dict[str, Any]]:
    """Return items as messages: what an assistant thought, said and called one behind the other is one of them."""
    if items is None:
        return []
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, Mapping):
            raise wrong(where, "must be an object")
        kind = item.get("type") or "message"
        if kind == "message":
            if item.get("role") == "assistant":
                _turn(messages)["content"] += _text(item.get("content"), f"{where}.content")
            else:
                messages.append({"role": item.get("role"), "content": _said(item.get("content"), f"{where}.content")})
        elif kind == "reasoning":
            said = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
            if said:
                turn = _turn(messages)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + said
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _said(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise wrong(f"{where}.type", f"is {str(kind)[:48]!r}; it must be message, reasoning, function_call or its output")
    return messages


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that goes on, a new one behind anybody else's."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: object, where: str) -> str:
    said = _said(content, where)
    return said if isinstance(said, str) else "".join(part["text"] for part in said)


def _said(content: object, where: str) -> Any:
    """Return a text as it is, a list as the parts of text that `render` takes."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "must be a text or a list of parts")
    parts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise wrong(
                f"{where}[{i}]", f"has type {str(kind)[:48]!r}; this server reads parts of text only, no images, audio or files"
            )
        marked = {key: part[key] for key in ("prompt_cache_breakpoint",) if key in part}
        parts.append({"type": "text", "text": text, **marked})
    return parts


def shape(ask: Ask, about: About) -> Shape:
    return Shape(about, ask.echo)


@dataclass(slots=True)
class Shape:
    """A response, or its events. Items are numbered in the order in which they begin; one is open at a time."""

    about: About
    echo: Mapping[str, Any]
    _output: list[dict[str, Any]] = field(default_factory=list)
    _open: type[Part] | None = None
    _call: str | None = None  # id of the latest
    _finish: FinishReason | None = None
    _number: int = 0

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        answer = answers[0]
        output = [_item(part, told=answer.told) for part in answer.parts]
        return self._ended(output, _status(answer.finish), usage)

    def open(self) -> Iterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response([], "in_progress", None))

    def begin(self, usage: Usage) -> Iterator[bytes]:
        return iter(())

    def piece(self, piece: Piece) -> Iterator[bytes]:
        told = piece.told
        for part in piece.parts:
            if isinstance(part, Call):
                yield from self._called(part)
            else:
                yield from self._said(part, told)
                told = None if told is None else ()
        if piece.finish is not None:
            self._finish = piece.finish
            yield from self._close()

    def end(self, usage: Usage) -> Iterator[bytes]:
        status = _status(self._finish)
        yield self._event(f"response.{status}", response=self._ended(self._output, status, usage))

    def failure(self, error: RequestError) -> Iterator[bytes]:
        told = error_object(error)["error"]
        response = self._response(self._output, "failed", None) | {"error": {"code": told["code"], "message": told["message"]}}
        yield self._event("response.failed", response=response)
        # Beside what the event says for itself, the form in which clients of every dialect look for errors in a stream.
        said = {"code": told["code"], "message": told["message"], "param": told["param"]}
        yield self._event("error", **said, error=told)

    def quiet(self) -> bytes:
        return KEEPALIVE

    def _said(self, part: Text | Reasoning, told: Sequence[Told] | None) -> Iterator[bytes]:
        if self._open is not type(part):
            yield from self._close()
            self._open = type(part)
            item = _item(type(part)(""), status="in_progress")
            self._output.append(item)
            yield self._event("response.output_item.added", output_index=self._at, item={**item, "content": []})
            yield self._event("response.content_part.added", **self._where, part=dict(item["content"][0]))
        content = self._output[self._at]["content"][0]
        content["text"] += part.text
        if isinstance(part, Reasoning):
            yield self._event("response.reasoning_text.delta", **self._where, delta=part.text)
            return
        logprobs = [_logprob(one) for one in told or ()]
        content["logprobs"] += logprobs
        yield self._event("response.output_text.delta", **self._where, delta=part.text, logprobs=logprobs)

    def _close(self) -> Iterator[bytes]:
        """End the item that is open, if one is."""
        if self._open is None:
            return
        item = self._output[self._at]
        if self._open is Call:
            yield from self._call_ends(item, whole=False)
            return
        content = item["content"][0]
        if self._open is Reasoning:
            yield self._event("response.reasoning_text.done", **self._where, text=content["text"])
        else:
            logprobs = content["logprobs"]
            yield self._event("response.output_text.done", **self._where, text=content["text"], logprobs=logprobs)
        yield self._event("response.content_part.done", **self._where, part=content)
        item["status"] = "incomplete" if self._finish == "length" else "completed"
        yield self._event("response.output_item.done", output_index=self._at, item=item)
        self._open = None

    def _called(self, call: Call) -> Iterator[bytes]:
        if self._open is not Call or call.id != self._call:
            yield from self._close()
            self._open, self._call = Call, call.id
            self._output.append(_item(replace(call, arguments="", done=True), status="in_progress"))
            yield self._event("response.output_item.added", output_index=self._at, item=dict(self._output[self._at]))
        item = self._output[self._at]
        item["arguments"] += call.arguments
        where = {"output_index": self._at, "item_id": item["id"]}
        yield self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
        if call.done:
            yield from self._call_ends(item, whole=True)

    def _call_ends(self, item: dict[str, Any], *, whole: bool) -> Iterator[bytes]:
        self._open = None
        item["status"] = "completed" if whole else "incomplete"
        where = {"output_index": self._at, "item_id": item["id"]}
        told = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("response.function_call_arguments.done", **where, **told)
        yield self._event("response.output_item.done", output_index=self._at, item=item)

    @property
    def _at(self) -> int:
        return len(self._output) - 1

    @property
    def _where(self) -> dict[str, Any]:
        return {"item_id": self._output[self._at]["id"], "output_index": self._at, "content_index": 0}

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **content}, kind)

    def _ended(self, output: Sequence[dict[str, Any]], status: str, usage: Usage) -> dict[str, Any]:
        response = self._response(output, status, usage)
        self.about.tell(response)
        return response

    def _response(self, output: Sequence[dict[str, Any]], status: str, usage: Usage | None) -> dict[str, Any]:
        return {
            "id": self.about.id,
            "object": "response",
            "created_at": self.about.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.about.model,
            "output": list(output),
            **self.echo,
            "usage": None if usage is None else usage_object(usage),
            "prompt_cache_diagnostics": None if usage is None else _diagnostics(self.about.diagnosis(usage)),
        }


def _diagnostics(found: Diagnosis | None) -> dict[str, Any] | None:
    if found is None:
        return None
    if not found.found:
        return {"type": "comparison_response_not_found"}
    if found.names is None:
        return {"type": "cache_hit"}
    if found.names.openai == "unavailable":
        return {"type": "unavailable"}
    tokens = {"cache_missed_tokens": found.missed_tokens, "comparison_reusable_tokens": found.reusable_tokens}
    return {"type": "cache_miss", "reason": found.names.openai, **tokens}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_memory_tokens": usage.cached_memory_tokens,
            "cached_disk_tokens": usage.cached_disk_tokens,
            "cache_write_tokens": usage.written_tokens,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, "kept_tokens": usage.kept_output_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _status(finish: FinishReason | None) -> str:
    return "incomplete" if finish == "length" else "completed"


def _item(part: Part, *, told: Sequence[Told] | None = None, status: str = "completed") -> dict[str, Any]:
    id = uuid.uuid4().hex
    if isinstance(part, Call):
        named = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
        return {"id": f"fc_{id}", "type": "function_call", "status": status if part.done else "incomplete", **named}
    if isinstance(part, Reasoning):
        content = [{"type": "reasoning_text", "text": part.text}]
        return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": content, "status": status}
    said = {"type": "output_text", "text": part.text, "annotations": [], "logprobs": [_logprob(one) for one in told or ()]}
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": status, "content": [said]}


def _logprob(one: Told) -> dict[str, Any]:
    return {**token_object(one.token, one.logprob), "top_logprobs": [token_object(*other) for other in one.top]}
