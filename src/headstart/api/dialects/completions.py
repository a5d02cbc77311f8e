"""OpenAI's text completions: a body becomes an `Ask`, an answer a completion or its chunks. Pure; no engine here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headstart.api.ask import Ask
from headstart.api.dialects.base import About
from headstart.api.dialects.chunks import Chunks, envelope, log_or_least, token_text, usage_object
from headstart.api.dialects.fields import Common, ask_of, decoded, wrong
from headstart.api.pieces import Piece, Told
from headstart.api.usage import Usage
from headstart.engine.base import FinishReason

MAX_TOKENS = 16  # what is generated when nothing is said; a chat may use the whole context
_NEUTRAL: dict[str, tuple[object, ...]] = {"best_of": (1,), "suffix": ("",)}


class Request(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


def parse(body: bytes, headers: Mapping[str, str]) -> Ask:
    """Return what a text completion request asks for. Raises RequestError naming the parameter."""
    request, ignored = decoded(body, Request, _NEUTRAL)
    if request.echo:
        raise wrong("echo", "is not supported; leave it out and prepend the prompt yourself")
    return ask_of(
        request,
        headers,
        id_prefix="cmpl-",
        max_tokens=MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        prompt=_one_prompt(request.prompt),
        ignored=ignored,
    )


def shape(ask: Ask, about: About) -> Shape:
    return Shape(about, include_usage=ask.include_usage)


class Shape(Chunks):
    """A completion, or its chunks: for each answer its text, then the finish reason; then usage where it was asked for."""

    kind = "text_completion"

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = [_choice(one.index, one.text, one.told, one.finish) for one in answers]
        return envelope(self.about, self.kind, choices) | {"usage": usage_object(usage)}

    def piece(self, piece: Piece) -> Iterator[bytes]:
        if piece.progress is not None:
            yield self.progress(_choice(piece.index, "", None, None), piece.progress)
            return
        if piece.text or piece.told:
            yield self.chunk(_choice(piece.index, piece.text, piece.told, None))
        if piece.finish is not None:
            yield self.chunk(_choice(piece.index, "", None, piece.finish))


def _one_prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    """Return the one prompt out of what may be written "text", [ids], ["text"] or [[ids]]. Raises RequestError for more."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if any(not isinstance(token, int) for token in prompt):
        raise wrong("prompt", f"holds {len(prompt)} prompts, but a request is answered one prompt at a time; send them singly")
    return tuple(prompt)


def _choice(index: int, text: str, told: Sequence[Told] | None, finish: FinishReason | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": _logprobs(told), "finish_reason": finish}


def _logprobs(told: Sequence[Told] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    return {
        "tokens": [_token(one.token) for one in told],
        "token_logprobs": [log_or_least(one.logprob) for one in told],
        "top_logprobs": [
            {_token(token): log_or_least(log) for token, log in (*one.top, (one.token, one.logprob))} for one in told
        ],
        "text_offset": [one.offset for one in told],
    }


def _token(token: bytes) -> str:
    text = token_text(token)
    return text if text.encode() == token else f"bytes:{text}"
