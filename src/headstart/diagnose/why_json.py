"""What `why` found, for programs. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from headstart.block.keys import BLOCK_TOKENS
from headstart.diagnose.causes import FIXES
from headstart.diagnose.why import Asked, Lost, Parted, Why


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
        "reused": {"memory": outcome.memory_tokens, "disk": outcome.disk_tokens}
        if outcome.tiers_told
        else {"untold": outcome.cached_tokens},
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
