"""Why a provider computed again what began like an earlier prompt: the causes that are rules of its own. Pure.

OpenAI and Anthropic cache nothing below a minimum, Anthropic only up to breakpoints that the request sets, both for a time that
ends and not before the first answer has begun. These are their published rules; a server of one's own has none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headstart.diagnose.causes import FIXES, Cause, Verdict
from headstart.diagnose.entries import Usage, begun_and_ended, usage_in
from headstart.diagnose.requests import is_anthropic
from headstart.diagnose.show import wrapped
from headstart.diagnose.sources import Source
from headstart.render.canonical import MARKS

MINIMUM_TOKENS = 1024  # of most models; some of Anthropic's want 512, others up to 4,096
LOOK_BACK = 20  # blocks
_TTL_S = {"5m": 300.0, "1h": 3600.0, "30m": 1800.0, "12h": 43200.0, "24h": 86400.0}


@dataclass(frozen=True, slots=True)
class Times:
    """When A was sent and had its answer, and when B was sent; None where the log does not tell."""

    a_begin: float | None
    a_end: float | None
    b_begin: float | None


def rules(b: object, *, tokens: int, times: Times, a: object = None, provider: str | None = None) -> Iterator[Verdict]:
    """Yield the rules by which a provider may have computed the body `b` of `tokens` tokens, which begins like `a`. `provider`:
    "openai" or "anthropic", None: whose dialect `b` is."""
    if not isinstance(b, Mapping):
        return
    anthropic = _is_anthropic(b) if provider is None else provider == "anthropic"
    if tokens < MINIMUM_TOKENS:
        yield Verdict(
            Cause.BELOW_MINIMUM, f"the prompt has {tokens:,} tokens, and most providers cache from {MINIMUM_TOKENS:,} on"
        )
    marks = _breakpoints(b)
    options = b.get("prompt_cache_options")
    explicit = isinstance(options, Mapping) and options.get("mode") == "explicit"
    if (anthropic or explicit) and not marks and b.get("anthropic_version") != "transcript":
        yield Verdict(Cause.NO_BREAKPOINT, "the request sets no breakpoint, so its provider keeps and looks up nothing")
    if anthropic and isinstance(a, Mapping) and marks and a.get("anthropic_version") != "transcript":
        before = _breakpoints(a)
        between = min((mark - kept for mark in marks for kept in before if mark >= kept), default=None)
        if not before:
            yield Verdict(Cause.NO_BREAKPOINT, "the request before sets no breakpoint, so nothing of it was kept")
        elif between is None:
            said = "its breakpoints stand before all of those of the request before, where nothing was kept"
            yield Verdict(Cause.NO_BREAKPOINT, said)
        elif between > LOOK_BACK:
            said = f"its breakpoint is {between} blocks behind the nearest one of the request before"
            yield Verdict(Cause.FAR_BREAKPOINT, said)
    if times.a_begin is not None and times.b_begin is not None:
        if times.a_end is not None and times.b_begin < times.a_end:
            yield Verdict(Cause.CONCURRENT, "it was sent before the answer to the request that it begins like had ended")
        gap, ttl = times.b_begin - (times.a_end or times.a_begin), _ttl_s(b, anthropic)
        if gap > ttl:
            yield Verdict(Cause.LAPSED, f"{gap:,.0f} s after the request before, and kept for {ttl:,.0f} s")


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    return "messages" in body and (is_anthropic(body) or bool(_breakpoints(body)) or "cache_control" in body)


def _breakpoints(body: Mapping[str, Any]) -> list[int]:
    """Return at which blocks, counted over tools, system and messages, breakpoints stand; a whole request's at the last."""
    blocks = list(_blocks(body))
    marked = [isinstance(block, Mapping) and any(block.get(mark) for mark in MARKS) for block in blocks]
    if blocks and body.get("cache_control"):
        marked[-1] = True
    return [at for at, is_marked in enumerate(marked) if is_marked]


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


@dataclass(frozen=True, slots=True)
class Judged:
    """What a provider's rules say of B, which was sent after A. `timed`: whether both have times; `usage`: what was counted."""

    provider: str
    verdicts: tuple[Verdict, ...]
    timed: bool
    usage: Usage

    def lines(self) -> Iterator[str]:
        """Yield it for people."""
        yield ""
        cached, prompt = self.usage.cached_tokens, self.usage.prompt_tokens
        counted = "" if cached is None else f", which had {cached:,}{'' if prompt is None else f' of {prompt:,}'} tokens cached"
        yield f"the rules of {self.provider}{counted}"
        for verdict in self.verdicts:
            yield from wrapped("  cause   ", f"{verdict.cause}: {verdict.evidence}")
            yield from wrapped("  fix     ", FIXES[verdict.cause])
        if not self.verdicts:
            yield "  none of them keeps B from finding what A had before the first difference"
        if not self.timed:
            yield from wrapped(
                "note      ", "A and B have no times, so nothing is known of a life that ended, or of requests at once"
            )

    def json(self) -> dict[str, Any]:
        """Return it for programs."""
        causes = [{"cause": str(one.cause), "evidence": one.evidence, "fix": FIXES[one.cause]} for one in self.verdicts]
        counted = {"prompt_tokens": self.usage.prompt_tokens, "cached_tokens": self.usage.cached_tokens}
        return {"name": self.provider, "causes": causes, "timed": self.timed, **counted}


def judged_by(provider: str, a: Source, b: Source, *, tokens: int) -> Judged:
    """Return what the rules of a provider say of `b` of `tokens` tokens, which was sent after `a`."""
    lines = [one.line if isinstance(one.line, Mapping) else {} for one in (a, b)]
    times = Times(*begun_and_ended(lines[0]), begun_and_ended(lines[1])[0])
    usage = usage_in(lines[1])
    tokens = tokens if usage.prompt_tokens is None else usage.prompt_tokens
    verdicts = tuple(rules(b.body, tokens=tokens, times=times, a=a.body, provider=provider))
    return Judged(provider, verdicts, None not in (times.a_begin, times.b_begin), usage)
