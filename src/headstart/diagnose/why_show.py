"""What `why` found, for programs and for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from headstart.block.keys import BLOCK_TOKENS
from headstart.diagnose.causes import FIXES
from headstart.diagnose.report import Around
from headstart.diagnose.show import marked, wrapped
from headstart.diagnose.why import Asked, Lost, Parted, Why, when


def why_json(why: Why) -> dict[str, Any]:
    """Return it for programs."""
    outcome = why.asked.outcome
    assert outcome is not None
    return {
        "id": why.asked.id,
        "object": "headstart.why",
        "asked": why.asked.asked_s,
        "session": why.asked.session,
        "block_tokens": BLOCK_TOKENS,
        "exact": why.exact,
        "prompt_tokens": why.asked.prompt_tokens,
        "reused": {"memory": outcome.memory_tokens, "disk": outcome.disk_tokens},
        "compared_with": None if why.before is None else _before(why.before),
        "common_tokens": why.common_tokens,
        "lost": [_lost(one) for one in why.lost],
        "parted": None if why.parted is None else _parted(why.parted),
        "new_tokens": why.new_tokens,
        "notes": list(why.notes),
    }


def _before(asked: Asked) -> dict[str, Any]:
    return {"id": asked.id, "asked": asked.asked_s, "session": asked.session, "prompt_tokens": asked.prompt_tokens}


def _lost(lost: Lost) -> dict[str, Any]:
    return {
        "cause": str(lost.cause),
        "tokens": lost.tokens,
        "first_token": lost.first,
        "evidence": lost.evidence,
        "fix": lost.fix,
        "time": lost.time_s,
    }


def _parted(parted: Parted) -> dict[str, Any]:
    return {
        "cause": str(parted.cause),
        "token": parted.token,
        "path": parted.path,
        "evidence": parted.evidence,
        "fix": FIXES[parted.cause],
        "openai_reason": parted.names.openai,
        "anthropic_reason": parted.names.anthropic,
        "alike_tokens": parted.alike_tokens,
        "a": None if parted.a is None else asdict(parted.a),
        "b": None if parted.b is None else asdict(parted.b),
    }


def why_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `why_json` gave, for people. Lines are those of a server, which may be of another version."""
    about = "" if told["exact"] else "about "
    reused = told["reused"]
    yield f"{told['id']}: {told['prompt_tokens']:,} tokens"
    if (before := told["compared_with"]) is None:
        yield "compared with no earlier prompt"
    else:
        yield f"compared with {before['id']} of {when(before['asked'])}: {about}{told['common_tokens']:,} tokens in common"
    yield ""
    yield f"reused    {reused['memory']:,} tokens from memory, {reused['disk']:,} from disk"
    for lost in told["lost"]:
        first = "" if lost["first_token"] is None else f" from token {lost['first_token']:,} on"
        yield f"lost      {lost['tokens']:,} tokens{first}"
        yield from wrapped("  cause   ", f"{lost['cause']}: {lost['evidence']}")
        yield from wrapped("  fix     ", lost["fix"])
    if (parted := told["parted"]) is not None:
        where = parted["path"] or "between messages, in the template's own text"
        behind = "" if parted["alike_tokens"] is None else f"; {parted['alike_tokens']:,} tokens behind it are the same"
        yield f"parted    at token {about}{parted['token']:,}: {where}{behind}"
        for side in ("a", "b"):
            if parted[side] is not None:
                yield f"  {side.upper()}  {marked(Around(**parted[side]))}"
        yield from wrapped("  cause   ", f"{parted['cause']}: {parted['evidence']}")
        yield from wrapped("  fix     ", parted["fix"])
    yield f"new       {told['new_tokens']:,} tokens that no earlier prompt had, or that had to be computed with them"
    for note in told["notes"]:
        yield from wrapped("note      ", note)
