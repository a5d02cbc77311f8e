"""Answers as clients of the OpenAI API read them: whole, or as chunks of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart import __version__
from headstart.api.openai import Kind
from headstart.engine.base import FinishReason, Receipt

_LEAST_LOG = -9999.0  # stands for what JSON cannot say: a probability of 0


@dataclass(frozen=True, slots=True)
class Told:
    """One token of an answer with its log probability: its bytes, where its text begins in the answer's, in characters, and
    the likeliest tokens in its place, best first."""

    token: bytes
    offset: int
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of answer `index`. `told`: of the tokens whose text begins in it, None where nobody asked."""

    index: int
    text: str
    told: tuple[Told, ...] | None = None
    finish: FinishReason | None = None


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return one answer's pieces, at least one of them, as one."""
    told = [piece.told for piece in pieces if piece.told is not None]
    return Piece(
        pieces[-1].index,
        "".join(piece.text for piece in pieces),
        tuple(one for some in told for one in some) if told else None,
        pieces[-1].finish,
    )


def usage_of(receipt: Receipt, *, completion_tokens: int) -> dict[str, Any]:
    """Return the usage object: the same whether streamed or not, every number present also when it is 0.

    Cached tokens are those that were verified and used; hit and miss always add up to the prompt."""
    prompt, cached = receipt.prompt_tokens, receipt.cached_tokens
    assert 0 <= cached <= prompt
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "cached_memory_tokens": receipt.cached_memory_tokens,
            "cached_disk_tokens": receipt.cached_disk_tokens,
            "cache_write_tokens": 0,  # those with a price of their own; ours are free. Clients add it up, so never absent
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """How one answer is written: whole, or as chunks of a stream (role first, text, finish reason, usage)."""

    kind: Kind
    id: str
    created: int  # seconds since 1970
    model: str
    include_usage: bool = False

    def whole(self, answers: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for one in answers:
            text: dict[str, Any] = {"text": one.text}
            if self.kind == "chat":
                text = {"message": {"role": "assistant", "content": one.text, "refusal": None}}
            logprobs = self._logprobs(one.told)
            choices.append({"index": one.index, **text, "logprobs": logprobs, "finish_reason": one.finish})
        return self._envelope("chat.completion", choices) | {"usage": usage}

    def role(self, index: int) -> dict[str, Any] | None:
        """The first chunk of an answer in a chat; text completions have none."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) if self.kind == "chat" else None

    def text(self, piece: Piece) -> dict[str, Any]:
        text = {"delta": {"content": piece.text}} if self.kind == "chat" else {"text": piece.text}
        return self._chunk(piece.index, text, logprobs=self._logprobs(piece.told))

    def finish(self, index: int, finish: FinishReason) -> dict[str, Any]:
        return self._chunk(index, {"delta": {}} if self.kind == "chat" else {"text": ""}, finish=finish)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", []) | {"usage": usage}

    def _logprobs(self, told: Sequence[Told] | None) -> dict[str, Any] | None:
        if told is None:
            return None
        if self.kind == "chat":
            content = [
                {**_chat_token(one.token, one.logprob), "top_logprobs": [_chat_token(*other) for other in one.top]}
                for one in told
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [_completion_token(one.token) for one in told],
            "token_logprobs": [max(one.logprob, _LEAST_LOG) for one in told],
            "top_logprobs": [
                {_completion_token(token): max(log, _LEAST_LOG) for token, log in (*one.top, (one.token, one.logprob))}
                for one in told
            ],
            "text_offset": [one.offset for one in told],
        }

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: FinishReason | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        chunk = self._envelope("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.include_usage else chunk

    def _envelope(self, chat_object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": chat_object if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"headstart-{__version__}",
            "choices": choices,
        }


def _chat_token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(token), "logprob": max(logprob, _LEAST_LOG), "bytes": list(token)}


def _completion_token(token: bytes) -> str:
    text = _text(token)
    return text if text.encode() == token else f"bytes:{text}"


def _text(token: bytes) -> str:
    """Return the token's text; bytes that are no character stand as OpenAI writes them, \\xe2."""
    return token.decode("utf-8", "backslashreplace")
