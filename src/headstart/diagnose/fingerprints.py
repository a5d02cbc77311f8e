"""What a request consists of, as keyed digests: enough to tell which part changed, nothing to read it back from. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from headstart.diagnose.causes import Cause

_NAME_BYTES = 8
_SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """`messages`: role and digest of each. `apart`: what keeps requests from sharing anything, such as their salt."""

    apart: Mapping[str, bytes]
    tools: bytes
    template: bytes  # what the chat template is told beside messages
    effort: bytes
    messages: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """Which part of B is the first that is not A's. `openai`: what their diagnostics call it, where that does not follow from
    cause and place."""

    cause: Cause
    path: str
    evidence: str
    openai: str | None = None

    @property
    def in_system(self) -> bool:
        return self.cause is Cause.SYSTEM


def fingerprints(
    *,
    secret: bytes,
    apart: Mapping[str, object],
    tools: Sequence[Any] | None,
    template: Mapping[str, Any],
    messages: Sequence[Any] | None,
) -> Fingerprints:
    """Return those of a request. `secret`: without it nobody can try likely texts against them."""

    def name(value: object) -> bytes:
        text = json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))
        return blake2b(text.encode("utf-8", "surrogatepass"), key=secret, digest_size=_NAME_BYTES).digest()

    return Fingerprints(
        apart={what: name(value) for what, value in apart.items()},
        tools=name(tools or None),
        template=name(dict(template)),
        effort=name(template.get("reasoning_effort")),
        messages=tuple((str(one.get("role")) if isinstance(one, Mapping) else "", name(one)) for one in messages or ()),
    )


def kept_apart(a: Fingerprints, b: Fingerprints) -> Changed | None:
    """Return what keeps A and B from sharing anything; None where nothing does."""
    for what, cause in (("adapter", Cause.ADAPTER), ("salt", Cause.SALT)):
        if a.apart.get(what) != b.apart.get(what):
            return Changed(cause, what, f"the {what} is another one")
    return None


def changed(a: Fingerprints, b: Fingerprints) -> Changed | None:
    """Return what of B's text parts it from A; None where B goes on from A, or where that is not in its parts."""
    if a.tools != b.tools:
        return Changed(Cause.TOOLS_CHANGED, "tools", "the tools are not the same, or not in the same order and spelling")
    if a.template != b.template:
        effort = a.effort != b.effort
        what = "reasoning_effort" if effort else "an argument of the chat template"
        return Changed(Cause.TEMPLATE, "", f"{what} is another one", "reasoning_effort_changed" if effort else None)
    ours, theirs = a.messages, b.messages
    at = next((n for n, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))
    if at in (len(ours), len(theirs)):
        return None
    path = f"messages[{at}]"
    if theirs[at][0] in _SYSTEM and ours[at][0] in _SYSTEM:
        return Changed(Cause.SYSTEM, path, "the system prompt has another text")
    if theirs[at] in ours[at + 1 :]:
        dropped = ours.index(theirs[at], at + 1) - at
        return Changed(Cause.TRUNCATED, path, f"{dropped} earlier message{'s are' if dropped > 1 else ' is'} gone")
    if at + 1 < len(theirs) and theirs[at + 1] in ours[at + 2 :]:
        gone = ours.index(theirs[at + 1], at + 2) - at
        return Changed(Cause.SUMMARISED, path, f"{gone} earlier messages became one")
    if at == len(theirs) - 1:
        return Changed(Cause.OTHER, path, "the last message is another one")
    return Changed(Cause.EDITED, path, f"an earlier message of the {theirs[at][0] or 'user'} has another text")
