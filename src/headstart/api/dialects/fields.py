"""Fields that OpenAI's dialects have in common, and how a body becomes them. Pure.

Unknown fields are ignored (the server logs them once): clients send many that other servers understand. Fields that are
known and wrong are refused with their name, and so are those that would change the answer and cannot be followed yet: an
answer that silently is not what was asked for is worse than none. What stands inside messages and tools is `render`'s to judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgspec

from headstart.api.ask import Ask, handling_of
from headstart.api.caching import Options, caching_of, salt_of
from headstart.engine.base import Sampling
from headstart.errors import RequestError
from headstart.render.messages import MESSAGES

SALT_CHARACTERS = 1024
ANSWERS = 16  # to one request
LOGPROBS = 20  # tokens told beside each
BIASES = 1024
STOPS = 64  # texts that end an answer; each is looked for at every token
STOP_CHARACTERS = 1024
STOP_IDS = 1024
KEPT_BYTES = 4 << 20  # of tools, and of what goes to a template besides; a request holds them until it ends

# What is left of an emoji or the like when a text is cut inside of it.
_HALF = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)

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


class Common(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    cache_salt: str | None = None
    user_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Options | None = None
    prompt_cache_retention: str | None = None
    return_progress: bool | None = None


AnyT = TypeVar("AnyT")
RequestT = TypeVar("RequestT", bound=Common)


def decoded(body: bytes, form: type[RequestT], neutral: Mapping[str, tuple[object, ...]]) -> tuple[RequestT, tuple[str, ...]]:
    """Return the request and the names of fields that are not understood. `neutral`: fields that would change an answer and are
    not followed, with the values (beside null) that ask for nothing."""
    content = _object(body)
    request = _converted(content, form)
    for name in neutral.keys() & content.keys():
        if content[name] is not None and content[name] not in neutral[name]:
            raise wrong(name, "is not supported by this version; leave it out")
    known = neutral.keys() | set(form.__struct_fields__)
    return request, tuple(name for name in content if name not in known)


def decoded_as(body: bytes, form: type[AnyT]) -> AnyT:
    """Return a body that has `form`. Raises RequestError naming the parameter."""
    return _converted(_object(body), form)


def _object(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object", code="invalid_json")
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        cut = re.search("surrogate|truncated", str(error)) and _HALF.search(body)
        why = f"{cut[0].decode()} is half of a character that is written as two; a text was cut there" if cut else error
        raise RequestError(f"the body is not valid JSON: {why}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):  # some clients write every number as 5.0
        if isinstance(value := content.get(name), float) and value.is_integer():
            content[name] = int(value)
    return content


def _converted(content: dict[str, Any], form: type[AnyT]) -> AnyT:
    try:
        return msgspec.convert(content, form)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from error


def invalid(told: str) -> RequestError:
    """Turn "Expected `int`, got `str` - at `$.max_tokens`" into a sentence with the parameter's name."""
    what, _, path = told.replace("`", "").partition(" - at $")
    param = path.removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field (\w+)", what):
        param = f"{param}.{missing[1]}".removeprefix(".")
        return RequestError(f"{param} is missing", param=param)
    if unknown := re.fullmatch(r"Object contains unknown field (.+)", what):
        param = f"{param}.{unknown[1]}".removeprefix(".")
        return RequestError(f"{param} is not known here", param=param)
    if expected := re.fullmatch(r"Expected ([^,]+), got \S+", what):
        kinds = [_IN_WORDS[kind] for kind in expected[1].split(" | ") if kind in _IN_WORDS]
        if kinds:
            return RequestError(f"{param or 'the body'} must be {' or '.join(kinds)}", param=param or None)
    return RequestError(f"{param} is wrong: {what[:1].lower()}{what[1:]}", param=param or None)


def wrong(param: str, must: str) -> RequestError:
    return RequestError(f"{param} {must}", param=param)


def ask_of(
    request: Common,
    headers: Mapping[str, str],
    *,
    max_tokens_param: str = "max_tokens",
    logprobs_param: str = "logprobs",
    max_tokens: int | None,
    logprobs: int | None,
    stop: Sequence[str] | None = None,
    stop_param: str = "stop",
    controls: Iterable[Any] = (),
    compare_with: str | None = None,
    **more: Any,
) -> Ask:
    """Return what the common fields say, and `more` of `Ask`; `controls`: each `cache_control` in it. Raises RequestError
    naming the parameter."""
    if max_tokens is not None and max_tokens < 1:
        raise wrong(max_tokens_param, f"must be at least 1, but is {max_tokens}")
    _refuse_outside(request, "n", 1, ANSWERS)
    _refuse_outside(request, "temperature", 0, 100)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise wrong("top_p", f"must be above 0 and at most 1, but is {request.top_p}")
    if request.top_k is not None and request.top_k < -1:
        raise wrong("top_k", f"must be 0 (all tokens) or more, but is {request.top_k}")
    _refuse_outside(request, "min_p", 0, 1)
    _refuse_outside(request, "presence_penalty", -2, 2)
    _refuse_outside(request, "frequency_penalty", -2, 2)
    _refuse_outside(request, "repetition_penalty", 0.01, 100)
    if logprobs is not None and not 0 <= logprobs <= LOGPROBS:
        raise wrong(logprobs_param, f"must be between 0 and {LOGPROBS}, but is {logprobs}")
    least = request.min_tokens or 0
    if least < 0 or (max_tokens is not None and least > max_tokens):
        raise wrong("min_tokens", f"must be between 0 and {max_tokens_param}, but is {least}")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= SALT_CHARACTERS:
        raise wrong("cache_salt", f"must have 1 to {SALT_CHARACTERS} characters, but has {len(request.cache_salt)}")
    if stop is None:
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > STOPS or any(len(text) > STOP_CHARACTERS for text in stop):
        raise wrong(stop_param, f"must have at most {STOPS} texts of {STOP_CHARACTERS} characters")
    ids = request.stop_token_ids or ()
    if len(ids) > STOP_IDS or any(token < 0 for token in ids):
        raise wrong("stop_token_ids", f"must be at most {STOP_IDS} token ids, which are 0 or more")
    if len(more.get("messages") or ()) > MESSAGES:  # before anything is made of them
        raise wrong("messages", f"must be at most {MESSAGES}, but are {len(more['messages'])}")
    for name, param in (("tools", "tools"), ("template", "chat_template_kwargs"), ("echo", "metadata")):
        if (held := more.get(name)) and len(msgspec.json.encode(held)) > KEPT_BYTES:
            beside = ", with instructions and tools," if name == "echo" else ""
            raise wrong(param, f"must have at most {KEPT_BYTES >> 20} MiB{beside} and has more")
    return Ask(
        model=request.model,
        max_tokens=max_tokens,
        sampling=_sampling(request),
        stop=tuple(text for text in stop if text),
        stop_ids=frozenset(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=least,
        n=1 if request.n is None else request.n,
        logprobs=logprobs,
        salt=salt_of(request.cache_salt, request.user_id),
        stream=bool(request.stream),
        include_usage=isinstance(request.stream_options, StreamOptions) and bool(request.stream_options.include_usage),
        has_stream_options=request.stream_options is not msgspec.UNSET,
        handling=handling_of(headers),
        caching=caching_of(
            options=request.prompt_cache_options,
            key=request.prompt_cache_key,
            retention=request.prompt_cache_retention,
            controls=controls,
            compare_with=compare_with,
        ),
        progress=bool(request.return_progress),
        **more,
    )


def _refuse_outside(request: Common, param: str, low: float, high: float) -> None:
    value = getattr(request, param)
    if value is not None and not low <= value <= high:
        raise wrong(param, f"must be between {low} and {high}, but is {value}")


def _sampling(request: Common) -> dict[str, Any]:
    """Return what is said of `Sampling`'s fields, which have the API's names."""
    said = {field.name: getattr(request, field.name) for field in fields(Sampling)}
    said["top_k"] = None if request.top_k is None else max(request.top_k, 0)  # -1 means "all" to clients of other servers
    said["logit_bias"] = None if request.logit_bias is None else tuple(_biases(request.logit_bias))
    return {name: value for name, value in said.items() if value is not None}


def _biases(biases: dict[str, float]) -> Iterator[tuple[int, float]]:
    if len(biases) > BIASES:
        raise wrong("logit_bias", f"must have at most {BIASES} tokens, but has {len(biases)}")
    for token, added in biases.items():
        if not re.fullmatch(r"[0-9]{1,10}", token, re.ASCII):
            raise wrong("logit_bias", f"must have token ids for names, but has {token[:64]!r}")
        if not -100 <= added <= 100:
            raise wrong("logit_bias", f"must have values between -100 and 100, but that of {token} is {added}")
        yield int(token), added
