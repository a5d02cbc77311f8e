"""OpenAI's chat completions: a body becomes an `Ask`, an answer a completion or its chunks. Pure; no engine here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.api.ask import Ask
from headstart.api.caching import controls_in
from headstart.api.dialects.base import About
from headstart.api.dialects.chunks import Chunks, envelope, token_object, usage_object
from headstart.api.dialects.fields import Common, ask_of, decoded, wrong
from headstart.api.dialects.tools import choice_of, format_of
from headstart.api.pieces import Piece, Told
from headstart.api.usage import Usage
from headstart.engine.base import FinishReason
from headstart.render.answers import Call, Part, Text

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}


class Request(Common, kw_only=True):
    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    cache_control: Any = None


def parse(body: bytes, headers: Mapping[str, str]) -> Ask:
    """Return what a chat completion request asks for. Raises RequestError naming the parameter."""
    request, ignored = decoded(body, Request, _NEUTRAL)
    if request.top_logprobs and not request.logprobs:
        raise wrong("top_logprobs", "goes with logprobs: true; add it")
    named = request.max_completion_tokens is not None
    return ask_of(
        request,
        headers,
        id_prefix="chatcmpl-",
        max_tokens=request.max_completion_tokens if named else request.max_tokens,
        max_tokens_param="max_completion_tokens" if named else "max_tokens",
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        logprobs_param="top_logprobs",
        messages=tuple(request.messages),
        tools=tuple(request.tools) if request.tools else None,
        tool_choice=choice_of(request.tool_choice),
        parallel_calls=request.parallel_tool_calls is not False,
        format=format_of(request.response_format, param="response_format"),
        template=template_arguments(request.reasoning_effort, request.chat_template_kwargs),
        ignored=ignored,
        controls=[*controls_in(request.messages), *controls_in(request.tools), request.cache_control],
    )


def shape(ask: Ask, about: About) -> Shape:
    return Shape(about, include_usage=ask.include_usage)


@dataclass(slots=True)
class Shape(Chunks):
    """A completion, or its chunks: for each answer the role, its text, the finish reason; then usage where it was asked for."""

    kind = "chat.completion.chunk"
    _begun: set[int] = field(default_factory=set)
    _calls: dict[int, list[str]] = field(default_factory=dict)  # ids so far, by answer

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": one.index,
                "message": _message(one),
                "logprobs": _logprobs(one.told),
                "finish_reason": finish_reason(one.finish, called=bool(one.calls)),
            }
            for one in answers
        ]
        return envelope(self.about, "chat.completion", choices) | {"usage": usage_object(usage)}

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if piece.progress is not None:
            yield self.progress(self._choice(piece.index, {}), piece.progress)
            return
        # The role goes out with the first text, not before: clients take the first chunk for the first token.
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            yield self.chunk(self._choice(piece.index, {"role": "assistant", "content": ""}))
        told = _logprobs(piece.told)
        for part in piece.parts or ((Text(""),) if piece.told else ()):
            yield self.chunk(self._choice(piece.index, self._delta(piece.index, part), logprobs=told))
            told = None
        if piece.finish is not None:
            reason = finish_reason(piece.finish, called=bool(self._calls.get(piece.index)))
            yield self.chunk(self._choice(piece.index, {}, finish=reason))

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if isinstance(part, Call):
            calls = self._calls.setdefault(index, [])
            if part.id in calls:
                return {"tool_calls": [{"index": calls.index(part.id), "function": {"arguments": part.arguments}}]}
            calls.append(part.id)
            return {"tool_calls": [{"index": len(calls) - 1, **_call(part)}]}
        return {"content": part.text} if isinstance(part, Text) else {"reasoning_content": part.text}

    def _choice(
        self, index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def template_arguments(effort: str | None, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the chat template is told of how much to reason, as templates know it, and whatever else was said."""
    told: dict[str, Any] = {}
    if effort is not None:
        told = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return told | dict(more or {})


def finish_reason(finish: FinishReason | None, *, called: bool) -> str | None:
    return "tool_calls" if called and finish == "stop" else finish


def _message(answer: Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else ""), "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return message


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(told: Sequence[Told] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    content = [
        {**token_object(one.token, one.logprob), "top_logprobs": [token_object(*other) for other in one.top]} for one in told
    ]
    return {"content": content, "refusal": None}
