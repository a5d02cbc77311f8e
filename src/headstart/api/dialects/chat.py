"""OpenAI's chat completions: a body becomes an `Ask`, an answer a completion or its chunks. Pure; no engine here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart import __version__
from headstart.api.ask import Ask
from headstart.api.caching import controls_in
from headstart.api.dialects.base import DONE, KEEPALIVE, About, event
from headstart.api.dialects.fields import Common, ask_of, decoded, wrong
from headstart.api.dialects.tools import choice_of, format_of
from headstart.api.errors import error_object
from headstart.api.pieces import Piece, Told
from headstart.api.usage import Usage
from headstart.engine.base import FinishReason, Progress
from headstart.errors import RequestError
from headstart.render.answers import Call, Part, Text

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}
_LEAST_LOG = -9999.0  # stands for what JSON cannot say: a probability of 0


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
class Shape:
    """A completion, or its chunks: for each answer the role, its text, the finish reason; then usage where it was asked for."""

    about: About
    include_usage: bool = False
    _begun: set[int] = field(default_factory=set)
    _calls: dict[int, int] = field(default_factory=dict)  # so far, by answer

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

    def open(self) -> Iterator[bytes]:
        return iter(())

    def begin(self, usage: Usage) -> Iterator[bytes]:
        return iter(())

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if piece.progress is not None:
            yield self._chunk(piece.index, {}, progress=piece.progress)
            return
        # The role goes out with the first text, not before: clients take the first chunk for the first token.
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            yield self._chunk(piece.index, {"role": "assistant", "content": ""})
        told = _logprobs(piece.told)
        for part in piece.parts or ((Text(""),) if piece.told else ()):
            yield self._chunk(piece.index, self._delta(piece.index, part), logprobs=told)
            told = None
        if piece.finish is not None:
            reason = finish_reason(piece.finish, called=self._calls.get(piece.index, 0) > 0)
            yield self._chunk(piece.index, {}, finish=reason)

    def end(self, usage: Usage) -> Iterator[bytes]:
        if self.include_usage:
            yield event(envelope(self.about, "chat.completion.chunk", []) | {"usage": usage_object(usage)})
        yield DONE

    def failure(self, error: RequestError) -> Iterator[bytes]:
        yield event(error_object(error))

    def quiet(self) -> bytes:
        return KEEPALIVE

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        if isinstance(part, Call):
            number = self._calls.get(index, 0)
            self._calls[index] = number + 1
            return {"tool_calls": [{"index": number, **_call(part)}]}
        return {"content": part.text} if isinstance(part, Text) else {"reasoning_content": part.text}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        progress: Progress | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = envelope(self.about, "chat.completion.chunk", [choice])
        if progress is not None:
            chunk["prompt_progress"] = progress_object(progress)
        return event(chunk | {"usage": None} if self.include_usage else chunk)


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


def envelope(about: About, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": about.id,
        "object": kind,
        "created": about.created,
        "model": about.model,
        "system_fingerprint": f"headstart-{__version__}",
        "choices": choices,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's and DeepSeek's fields: the same whether streamed or not, every number present also when it is 0.

    Both count cached tokens as part of the prompt; hit and miss always add up to it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_memory_tokens": usage.cached_memory_tokens,
            "cached_disk_tokens": usage.cached_disk_tokens,
            "cache_write_tokens": usage.written_tokens,  # clients add it up, so never absent
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, "kept_tokens": usage.kept_output_tokens},
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens - usage.cached_tokens,
    }


def progress_object(progress: Progress) -> dict[str, int]:
    """Return how far a prompt is as llama.cpp says it: `processed` counts cached tokens, too."""
    return {
        "total": progress.total_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.processed_tokens,
        "time_ms": round(progress.seconds * 1000),
    }


def token_text(token: bytes) -> str:
    """Return the token's text; bytes that are no character stand as OpenAI writes them, \\xe2."""
    return token.decode("utf-8", "backslashreplace")


def log_or_least(logprob: float) -> float:
    return max(logprob, _LEAST_LOG)


def _logprobs(told: Sequence[Told] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    content = [
        {**token_object(one.token, one.logprob), "top_logprobs": [token_object(*other) for other in one.top]} for one in told
    ]
    return {"content": content, "refusal": None}


def token_object(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": log_or_least(logprob), "bytes": list(token)}
