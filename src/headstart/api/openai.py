"""The OpenAI dialect: a request's JSON becomes an `Ask`, an answer becomes the JSON that clients read. Pure; no engine here.

Unknown fields are ignored (the server logs them once): clients send many that other servers understand. Fields that are
known and wrong are refused with their name, and so are those that would change the answer and cannot be followed yet: an
answer that silently is not what was asked for is worse than none. What stands inside messages and tools is `render`'s to judge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from headstart import __version__
from headstart.engine.base import FinishReason, Receipt
from headstart.errors import RequestError

SALT_CHARACTERS = 1024
COMPLETION_TOKENS = 16  # what the completions endpoint generates when nothing is said; a chat may use the whole context

Kind = Literal["chat", "completion"]

# What would change an answer and is not followed: field, then the values (beside null) that ask for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "best_of": (1,),
}
_NEUTRAL_OF_KIND: dict[Kind, dict[str, tuple[object, ...]]] = {
    "chat": {
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
    },
    "completion": {"logprobs": (), "suffix": ("",)},  # here 0 asks for the log probability of each token
}


# Types as msgspec writes them, for people. That null is allowed too need not be said.
_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None


class ChatRequest(_Common, kw_only=True):
    messages: list[Any]
    tools: list[Any] | None = None
    max_completion_tokens: int | None = None


class CompletionRequest(_Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for. None: not said, so the model's own default holds."""

    kind: Kind
    messages: tuple[Any, ...]
    tools: tuple[Any, ...] | None
    prompt: str | tuple[int, ...]  # of a completion
    model: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: tuple[str, ...]
    salt: str | None
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


def parse_chat(body: bytes) -> Ask:
    """Return what a chat completion request asks for. Raises RequestError naming the parameter."""
    request, ignored = _decoded(body, ChatRequest, "chat")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    limit_param = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    tools = tuple(request.tools) if request.tools else None
    return _ask("chat", request, ignored, limit, limit_param, messages=tuple(request.messages), tools=tools)


def parse_completion(body: bytes) -> Ask:
    """Return what a text completion request asks for. Raises RequestError naming the parameter."""
    request, ignored = _decoded(body, CompletionRequest, "completion")
    if request.echo:
        raise _wrong("echo", "is not supported; leave it out and prepend the prompt yourself")
    prompt = _one_prompt(request.prompt)
    return _ask("completion", request, ignored, request.max_tokens, "max_tokens", prompt=prompt)


def _one_prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    """Return the one prompt out of what may be written "text", [ids], ["text"] or [[ids]]. Raises RequestError for more."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if any(not isinstance(token, int) for token in prompt):
        raise _wrong("prompt", f"holds {len(prompt)} prompts, but a request is answered one prompt at a time; send them singly")
    return tuple(prompt)


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

    def whole(self, text: str, finish: FinishReason, usage: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return self._envelope("chat.completion", [choice]) | {"usage": usage}

    def role(self) -> dict[str, Any] | None:
        """The first chunk of a chat; text completions have none."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}) if self.kind == "chat" else None

    def text(self, text: str) -> dict[str, Any]:
        return self._chunk({"delta": {"content": text}} if self.kind == "chat" else {"text": text})

    def finish(self, finish: FinishReason) -> dict[str, Any]:
        return self._chunk({"delta": {}} if self.kind == "chat" else {"text": ""}, finish)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", []) | {"usage": usage}

    def _chunk(self, content: dict[str, Any], finish: FinishReason | None = None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
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


RequestT = TypeVar("RequestT", bound=_Common)


def _decoded(body: bytes, form: type[RequestT], kind: Kind) -> tuple[RequestT, tuple[str, ...]]:
    """Return the request and the names of fields that are not understood."""
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object", code="invalid_json")
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    for name in ("max_tokens", "max_completion_tokens"):  # some clients write every number as 5.0
        if isinstance(value := content.get(name), float) and value.is_integer():
            content[name] = int(value)
    try:
        request = msgspec.convert(content, form)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    neutral = _NEUTRAL | _NEUTRAL_OF_KIND[kind]
    for name in neutral.keys() & content.keys():
        if content[name] is not None and content[name] not in neutral[name]:
            raise _wrong(name, "is not supported by this version; leave it out")
    known = neutral.keys() | set(form.__struct_fields__)
    return request, tuple(name for name in content if name not in known)


def _invalid(told: str) -> RequestError:
    """Turn "Expected `int`, got `str` - at `$.max_tokens`" into a sentence with the parameter's name."""
    what, _, path = told.replace("`", "").partition(" - at $")
    param = path.removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field (\w+)", what):
        param = f"{param}.{missing[1]}".removeprefix(".")
        return RequestError(f"{param} is missing", param=param)
    if expected := re.fullmatch(r"Expected ([^,]+), got \S+", what):
        kinds = [_IN_WORDS[kind] for kind in expected[1].split(" | ") if kind in _IN_WORDS]
        if kinds:
            return RequestError(f"{param or 'the body'} must be {' or '.join(kinds)}", param=param or None)
    return RequestError(f"{param} is wrong: {what[:1].lower()}{what[1:]}", param=param or None)


def _wrong(param: str, must: str) -> RequestError:
    return RequestError(f"{param} {must}", param=param)


def _ask(
    kind: Kind,
    request: _Common,
    ignored: tuple[str, ...],
    max_tokens: int | None,
    max_tokens_param: str,
    *,
    messages: tuple[Any, ...] = (),
    tools: tuple[Any, ...] | None = None,
    prompt: str | tuple[int, ...] = "",
) -> Ask:
    if max_tokens is None:
        max_tokens = None if kind == "chat" else COMPLETION_TOKENS
    elif max_tokens < 1:
        raise _wrong(max_tokens_param, f"must be at least 1, but is {max_tokens}")
    if request.n is not None and request.n != 1:
        raise _wrong(
            "n", f"must be 1, but is {request.n}; send the request {max(request.n, 2)} times, the prompt is computed once"
        )
    if request.temperature is not None and not 0 <= request.temperature <= 100:
        raise _wrong("temperature", f"must be between 0 and 100, but is {request.temperature}")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise _wrong("top_p", f"must be above 0 and at most 1, but is {request.top_p}")
    if request.top_k is not None and request.top_k < -1:
        raise _wrong("top_k", f"must be 0 (all tokens) or more, but is {request.top_k}")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= SALT_CHARACTERS:
        raise _wrong("cache_salt", f"must have 1 to {SALT_CHARACTERS} characters, but has {len(request.cache_salt)}")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return Ask(
        kind=kind,
        messages=messages,
        tools=tools,
        prompt=prompt,
        model=request.model,
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(request.top_k, 0),  # -1 means "all" to clients of other servers
        seed=request.seed,
        stop=tuple(text for text in stop if text),
        salt=request.cache_salt,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        ignored=ignored,
    )
