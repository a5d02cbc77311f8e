"""Why a provider computed again what began like an earlier prompt: the causes that are rules of its own. Pure.

OpenAI and Anthropic cache nothing below a minimum, Anthropic only up to breakpoints that the request sets, both for a time that
ends and not before the first answer has begun. These are their published rules; a server of one's own has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.diagnose.causes import Cause, Verdict
from headstart.diagnose.requests import is_anthropic

MINIMUM_TOKENS = 1024  # of most models; some of Anthropic's want 512, others up to 4,096
LOOK_BACK = 20  # blocks
_TTL_S = {"5m": 300.0, "1h": 3600.0, "30m": 1800.0, "12h": 43200.0, "24h": 86400.0}


@dataclass(frozen=True, slots=True)
class Times:
    """When A was sent and had its answer, and when B was sent; None where the log does not tell."""

    a_begin: float | None
    a_end: float | None
    b_begin: float | None


def rules(b: object, *, tokens: int, times: Times, a: object = None) -> Iterator[Verdict]:
    """Yield the rules by which a provider may have computed the body `b` of `tokens` tokens, which begins like `a`."""
    if not isinstance(b, Mapping):
        return
    anthropic = _is_anthropic(b)
    if tokens < MINIMUM_TOKENS:
        yield Verdict(
            Cause.BELOW_MINIMUM, f"the prompt has {tokens:,} tokens, and most providers cache from {MINIMUM_TOKENS:,} on"
        )
    marks = _breakpoints(b)
    options = b.get("prompt_cache_options")
    explicit = isinstance(options, Mapping) and options.get("mode") == "explicit"
    if (anthropic or explicit) and not marks and not b.get("cache_control") and b.get("anthropic_version") != "transcript":
        yield Verdict(Cause.NO_BREAKPOINT, "the request sets no breakpoint, so its provider keeps and looks up nothing")
    if anthropic and isinstance(a, Mapping) and marks and (before := _breakpoints(a)):
        between = marks[-1] - before[-1]
        if between > LOOK_BACK and not set(before) & set(marks):
            yield Verdict(Cause.FAR_BREAKPOINT, f"the last breakpoint is {between} blocks behind that of the request before")
    if times.a_begin is not None and times.b_begin is not None:
        if times.a_end is not None and times.b_begin < times.a_end:
            yield Verdict(Cause.CONCURRENT, "it was sent before the answer to the request that it begins like had ended")
        gap, ttl = times.b_begin - (times.a_end or times.a_begin), _ttl_s(b, anthropic)
        if gap > ttl:
            yield Verdict(Cause.LAPSED, f"{gap:,.0f} s after the request before, and kept for {ttl:,.0f} s")


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    return "messages" in body and (is_anthropic(body) or bool(_breakpoints(body)) or "cache_control" in body)


def _breakpoints(body: Mapping[str, Any]) -> list[int]:
    """Return at which blocks, counted over tools, system and messages, breakpoints stand."""
    return [
        at
        for at, block in enumerate(_blocks(body))
        if isinstance(block, Mapping) and (block.get("cache_control") or block.get("prompt_cache_breakpoint"))
    ]


def _blocks(body: Mapping[str, Any]) -> Iterator[object]:
    for name in ("tools", "system"):
        told = body.get(name)
        yield from told if isinstance(told, list) else [told] if told else []
    for message in body.get("messages") or body.get("input") or []:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from content if isinstance(content, list) else [content]


def _ttl_s(body: Mapping[str, Any], anthropic: bool) -> float:
    told = [block.get("cache_control") for block in _blocks(body) if isinstance(block, Mapping)]
    told += [body.get("cache_control"), body.get("prompt_cache_options")]
    asked = [one.get("ttl") for one in told if isinstance(one, Mapping)] + [body.get("prompt_cache_retention")]
    known = [_TTL_S[str(ttl)] for ttl in asked if str(ttl) in _TTL_S]
    return max(known, default=_TTL_S["5m" if anthropic else "30m"])
