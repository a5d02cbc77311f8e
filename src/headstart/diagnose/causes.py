"""The causes that make prompts part: stable codes, what to do about each, and what other servers call them.

docs/causes.md has a heading for each.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """Stable codes."""

    BOS = "bos"
    SAME_TEXT = "same_text"
    TEMPLATE = "template_changed"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_RESERIALISED = "tools_reserialised"
    TOOLS_CHANGED = "tools_changed"
    TIME = "time"
    ID = "id_or_counter"
    HEADER = "request_header"
    WHITESPACE = "whitespace"
    UNICODE = "unicode_form"
    JSON = "json_rewritten"
    SHAPE = "content_shape"
    REASONING = "reasoning_dropped"
    EDITED = "history_edited"
    SUMMARISED = "history_summarised"
    TRUNCATED = "history_truncated"
    SYSTEM = "system_changed"
    IMAGE = "image_changed"
    MODEL = "model_changed"
    ADAPTER = "adapter_changed"
    SALT = "salt_changed"
    SHORT = "short_prefix"
    OTHER = "other_text"
    # Only at providers: the prompt begins like an earlier one, and is computed all the same.
    BELOW_MINIMUM = "below_minimum"
    NO_BREAKPOINT = "breakpoint_missing"
    FAR_BREAKPOINT = "breakpoint_far"
    LAPSED = "ttl_lapsed"
    CONCURRENT = "concurrent"
    # Only a server can know: the prompt begins like an earlier one, and what was computed then was not used.
    EVICTED = "evicted"
    EXPIRED = "expired"
    DELETED = "deleted"
    CORRUPT = "corrupt"
    PENDING = "not_yet_written"
    REPRESENTATION = "other_representation"
    CHECK_KEY = "other_check_key"
    RECOMPUTED = "recompute_cheaper"
    FULL = "store_full"
    BUDGET = "write_budget"
    DROPPED = "write_dropped"
    LATE = "load_failed"
    OFF = "caching_off"
    UNKNOWN = "not_remembered"


PROVIDERS = (Cause.BELOW_MINIMUM, Cause.NO_BREAKPOINT, Cause.FAR_BREAKPOINT, Cause.LAPSED, Cause.CONCURRENT)
LOST = (
    Cause.EVICTED,
    Cause.EXPIRED,
    Cause.DELETED,
    Cause.CORRUPT,
    Cause.PENDING,
    Cause.REPRESENTATION,
    Cause.CHECK_KEY,
    Cause.RECOMPUTED,
    Cause.FULL,
    Cause.BUDGET,
    Cause.DROPPED,
    Cause.LATE,
    Cause.OFF,
    Cause.UNKNOWN,
)

FIXES = {
    Cause.BOS: "let either the template or the tokenizer write the beginning-of-text token, not both: set add_special_tokens "
    "to false for text that a template has rendered",
    Cause.SAME_TEXT: "send token ids back as they were generated, or have every turn tokenised by the same tokenizer and in "
    "the same pieces",
    Cause.TEMPLATE: "use one template with the same arguments for every turn; a template that writes history otherwise than it "
    "was generated needs mending",
    Cause.TOOLS_REORDERED: "sort the tools, by name for instance, before they are sent",
    Cause.TOOLS_RESERIALISED: "write each tool's schema once and send that same text every time",
    Cause.TOOLS_CHANGED: "keep one list of tools for the whole conversation; forbid the use of one with tool_choice instead",
    Cause.TIME: "move the time behind the part that stays the same, into the last message, or write only the date",
    Cause.ID: "leave the id or counter out of the prompt, or move it into the last message",
    Cause.HEADER: "remove the line from the prompt; with Claude Code set CLAUDE_CODE_ATTRIBUTION_HEADER=0",
    Cause.WHITESPACE: "send earlier text byte for byte as before: no trimming, no other line ends",
    Cause.UNICODE: "bring text into one form, NFC, once, where it enters, and remove invisible characters there",
    Cause.JSON: "keep the JSON text as it was received or generated; where it is written again, always by the same writer",
    Cause.SHAPE: "always send content in one shape, as a string or as a list of parts",
    Cause.REASONING: "keep reasoning in the history, or never let it in; a template that drops it has an option to keep it, "
    "such as preserve_thinking",
    Cause.EDITED: "append to the history and leave earlier messages as they were",
    Cause.SUMMARISED: "summarise rarely, and put the summary behind what stays the same",
    Cause.TRUNCATED: "cut the history seldom and by much, rather than a little at every turn",
    Cause.SYSTEM: "keep the system prompt the same; what changes belongs behind it, into a later message",
    Cause.IMAGE: "send the same bytes of an image in every turn: no new size, format or address",
    Cause.MODEL: "stay with one model for a conversation; what one has computed is of no use to another",
    Cause.ADAPTER: "stay with one adapter for a conversation",
    Cause.SALT: "use one salt, tenant or cache key for requests that may share",
    Cause.SHORT: "nothing: prompts this short are not worth keeping",
    Cause.OTHER: "nothing, if this is a new question; else put what stays the same before what changes",
    Cause.BELOW_MINIMUM: "nothing, if prompts are this short; else put more of what stays the same into the beginning",
    Cause.NO_BREAKPOINT: "set cache_control, at the top level of the request or on the last block that stays the same",
    Cause.FAR_BREAKPOINT: "set one more breakpoint in between: at most 20 blocks are looked back over from each",
    Cause.LAPSED: "ask for a longer life (ttl), or send the prefix again before it ends",
    Cause.CONCURRENT: "send one request first, and the others when its answer has begun",
    Cause.EVICTED: "give the cache more room (cache.capacity), or keep what must stay by a class of cache.retention or a pin",
    Cause.EXPIRED: "ask for a class of cache.retention that may grow older, or send the prefix again before it does",
    Cause.DELETED: "nothing: somebody removed it on purpose, with headstart cache rm for instance",
    Cause.CORRUPT: "check the disk; headstart cache verify reads the rest",
    Cause.PENDING: "send one request first, and the others when its answer has begun and a moment has passed",
    Cause.CHECK_KEY: "give all machines the same cache.check_key_file; while a key is exchanged, both keys, one a line",
    Cause.REPRESENTATION: "serve with the dtype, engine and shards that wrote it; only an equal representation is read",
    Cause.RECOMPUTED: "nothing: reading it would have taken longer; a faster disk, or more cache.memory, turns that round",
    Cause.FULL: "give the cache more room (cache.capacity, cache.quotas), or unpin something",
    Cause.BUDGET: "raise cache.write_budget, if the disk may wear faster",
    Cause.DROPPED: "use a disk that keeps up with what is computed; the log and /metrics say what failed",
    Cause.LATE: "look at the disk: a read failed or did not end in time; the log and /metrics say which",
    Cause.OFF: "leave out prompt_cache_options.mode, or set a breakpoint behind what is to be kept",
    Cause.UNKNOWN: "nothing that is remembered says why: the latest saves and removals are",
}

# What other servers call it: OpenAI's prompt_cache_diagnostics.reason, and Anthropic's cache_miss_reason where it does not
# follow from the place ("system_changed", "tools_changed", "messages_changed").
_BY_RULES = dict.fromkeys(PROVIDERS, "unavailable")
_OPENAI = {
    Cause.MODEL: "model_changed",
    Cause.ADAPTER: "model_changed",
    Cause.SALT: "prompt_cache_key_changed",
    Cause.TOOLS_REORDERED: "tools_changed",
    Cause.TOOLS_RESERIALISED: "tools_changed",
    Cause.TOOLS_CHANGED: "tools_changed",
    Cause.SUMMARISED: "context_compacted",
    Cause.TRUNCATED: "context_compacted",
    **_BY_RULES,
    **dict.fromkeys(LOST, "unavailable"),
}
_ANTHROPIC = {
    Cause.MODEL: "model_changed",
    Cause.ADAPTER: "model_changed",
    Cause.SALT: "unavailable",
    Cause.TEMPLATE: "unavailable",
    **_BY_RULES,
    **dict.fromkeys(LOST, "unavailable"),
}


class Verdict(NamedTuple):
    cause: Cause
    evidence: str


class Names(NamedTuple):
    openai: str
    anthropic: str


def names_of(cause: Cause, *, in_tools: bool, in_system: bool) -> Names:
    """Return what OpenAI and Anthropic call a miss with this cause at this place."""
    openai = _OPENAI.get(cause, "tools_changed" if in_tools else "input_changed")
    by_place = "tools_changed" if in_tools else "system_changed" if in_system else "messages_changed"
    return Names(openai, _ANTHROPIC.get(cause, by_place))


def told(value: object) -> str:
    """Return a value for a sentence: quoted, and not too long."""
    text = value if isinstance(value, str) else "not set" if value in (None, {}) else json.dumps(value, default=str)
    if not isinstance(value, str):
        return text
    return repr(text if len(text) <= 60 else f"{text[:40]}…{text[-15:]}")
