"""What a request says about the cache: how long what is kept is promised, what is looked for and kept at all, who may read it.

OpenAI's, Anthropic's and DeepSeek's fields in one form; docs/caching.md says what each means here. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headstart.errors import RequestError

USER_ID = re.compile(r"[A-Za-z0-9_-]{1,512}")
KEY_CHARACTERS = 256  # of `prompt_cache_key`; what names a session
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_IN_MEMORY = ("in_memory", "in-memory")
_RETENTION_S = {**dict.fromkeys(_IN_MEMORY, 0.0), "24h": 86400.0}


class Options(msgspec.Struct):
    """`prompt_cache_options`."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class Control(msgspec.Struct):
    """Anthropic's `cache_control`."""

    type: str | None = None
    ttl: str | None = None


@dataclass(frozen=True, slots=True)
class Caching:
    """`explicit`: nothing is looked for and kept beyond the last breakpoint, nor at all where there is none. `keep_s`: for how
    long what is kept is promised at least. `memory_only`: nothing of the prompt and its answer goes to disk. `prewarm`: the
    prompt is computed and kept, and nothing is generated. `session`: the conversation that the request belongs to, by the name
    that the client gave. `compare_with`: the id of an earlier answer that the client would have this request compared with;
    None: none."""

    explicit: bool = False
    keep_s: float = 0.0
    memory_only: bool = False
    prewarm: bool = False
    session: str = ""
    compare_with: str | None = None


def caching_of(
    *,
    options: Options | None = None,
    key: str | None = None,
    retention: str | None = None,
    controls: Iterable[Any] = (),
    compare_with: str | None = None,
) -> Caching:
    """Return what the fields say. `retention`: the older form of `options.ttl`; `controls`: each `cache_control` of a request.
    Raises RequestError naming the field."""
    options = options or Options()
    if key is not None and len(key) > KEY_CHARACTERS:
        raise _wrong("prompt_cache_key", f"must have at most {KEY_CHARACTERS} characters, but has {len(key)}")
    keep_s = 0.0
    if retention is not None:
        if options.ttl is not None:
            raise _wrong("prompt_cache_retention", "says the same as prompt_cache_options.ttl; give one of them")
        if retention not in _RETENTION_S:
            raise _wrong("prompt_cache_retention", f'must be "in_memory" or "24h", but is {retention[:64]!r}')
        keep_s = _RETENTION_S[retention]
    if options.ttl is not None:
        keep_s = _seconds("prompt_cache_options.ttl", options.ttl)
    for control in controls:
        keep_s = max(keep_s, _of_control(control))
    return Caching(
        explicit=options.mode == "explicit",
        keep_s=keep_s,
        memory_only=retention in _IN_MEMORY,
        prewarm=bool(options.prewarm),
        session=key or "",
        compare_with=options.comparison_response_id or compare_with,
    )


def controls_in(value: Any) -> Iterable[Any]:
    """Yield each `cache_control` in a request's system prompt, tools or messages: of what carries one, and of its parts."""
    for holder in value if isinstance(value, list | tuple) else ():
        if isinstance(holder, Mapping):
            if holder.get("cache_control") is not None:
                yield holder["cache_control"]
            yield from controls_in(holder.get("content"))


def has_breakpoint(holder: Any) -> bool:
    return isinstance(holder, Mapping) and holder.get("prompt_cache_breakpoint") is not None


def salt_of(cache_salt: str | None, user_id: str | None) -> str | None:
    """Return the salt of what `cache_salt` and DeepSeek's `user_id` keep apart. Raises RequestError for a `user_id` that is
    none."""
    if user_id is None:
        return cache_salt
    if not USER_ID.fullmatch(user_id):
        raise _wrong("user_id", "must have 1 to 512 letters, digits, _ or -")
    return f"user_id={user_id}" if cache_salt is None else f"user_id={user_id}&cache_salt={cache_salt}"


def _of_control(control: Any) -> float:
    """A mark that is not understood promises nothing: clients put new kinds where old servers must not fail."""
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        return 0.0
    ttl = control.get("ttl")
    return _seconds("cache_control.ttl", ttl) if isinstance(ttl, str) else 300.0


def _seconds(param: str, ttl: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}[smhd]", ttl, re.ASCII):
        raise _wrong(param, f'must be a time such as "30m" or "12h", but is {ttl[:64]!r}')
    return float(int(ttl[:-1]) * _SECONDS[ttl[-1]])


def _wrong(param: str, must: str) -> RequestError:
    return RequestError(f"{param} {must}", param=param)
