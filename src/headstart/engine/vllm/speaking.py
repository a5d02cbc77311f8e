"""What vLLM is asked and what it answers, on `/v1/completions` with token ids: pure, no sockets here."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from headstart.engine.base import GenerationRequest, Logprobs

_TOKEN = "token_id:"
_SALT_CHARACTERS = 1024


class _Logs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Failure(msgspec.Struct):
    message: str = "no reason was given"


class Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Failure | None = None


def asked(request: GenerationRequest, *, model: str) -> dict[str, Any]:
    """Return the body for a request. Stop ids are all that end an answer early; what is saved keeps its class and session."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": request.adapter or model,
        "prompt": list(request.prompt),
        "max_tokens": max(1, request.max_tokens),  # it refuses 0; what is only to be kept is answered by nobody's token
        "min_tokens": min(request.min_tokens, request.max_tokens),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "stop_token_ids": sorted(request.stop_ids),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "priority": -request.priority,  # here higher goes first, there lower
        "kv_transfer_params": {
            "headstart": {
                "retention": request.retention,
                "tenant": request.tenant,
                "session": request.session,
                "keep": request.use_cache and not request.memory_only,
            }
        },
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if request.logprobs is not None:
        body["logprobs"] = request.logprobs
    if not request.use_cache:
        body["cache_salt"] = uuid.uuid4().hex  # nothing is found under a salt that nobody ever had
    elif request.salt:
        body["cache_salt"] = _text_of(request.salt)
    return body


def _text_of(salt: str | bytes) -> str:
    """Return a salt as vLLM takes it. Bytes, and what is too long, go by their digest."""
    if isinstance(salt, str) and len(salt) <= _SALT_CHARACTERS:
        return salt
    return sha256(salt if isinstance(salt, bytes) else salt.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(slots=True)
class Reading:
    """One answer, chunk by chunk. `cached_tokens` and `finish` are known at its end."""

    request: GenerationRequest
    cached_tokens: int = 0
    finish: str | None = None
    error: str | None = None
    _decoder: msgspec.json.Decoder[Chunk] = field(default_factory=lambda: msgspec.json.Decoder(Chunk))

    def take(self, line: str) -> Iterator[tuple[int, Logprobs | None]]:
        """Yield the tokens that a line of the stream brings, less one that ended the answer. Raises msgspec.DecodeError."""
        if not line.startswith("data:") or (data := line.removeprefix("data:").strip()) == "[DONE]":
            return
        chunk = self._decoder.decode(data)
        if chunk.error is not None:
            self.error = chunk.error.message
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
        for choice in chunk.choices[:1]:
            tokens = choice.token_ids or []
            self.finish = choice.finish_reason or self.finish
            if not self.request.max_tokens:
                tokens = []
            if choice.finish_reason == "stop" and tokens and tokens[-1] in self.request.stop_ids:
                tokens = tokens[:-1]
            for place, token in enumerate(tokens):
                yield token, self._told(choice.logprobs, place)

    def _told(self, logs: _Logs | None, place: int) -> Logprobs | None:
        if self.request.logprobs is None or logs is None or place >= len(logs.token_logprobs):
            return None
        own = logs.token_logprobs[place]
        top = (logs.top_logprobs[place] if place < len(logs.top_logprobs) else None) or {}
        best = sorted(((int(name.removeprefix(_TOKEN)), log) for name, log in top.items()), key=lambda one: -one[1])
        return Logprobs(-9999.0 if own is None else own, tuple(best[: self.request.logprobs]))
