"""A log with its faults mended: each request as it would be sent with a fix applied, and what an ideal cache finds then.

The gain of a change is not guessed: the log is read again, the change is made to every request, and hits are counted anew.
Mended is what a program can mend without knowing the application: a time or an id where it was found is taken out (as if it
had been moved behind), tools are sorted, schemas and JSON written in one way, white space and Unicode brought into one form.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headstart.diagnose.causes import FIXES, Cause
from headstart.diagnose.comparing import place_class, role_at
from headstart.diagnose.judging import without_thought
from headstart.diagnose.known import Known
from headstart.diagnose.logs import Found, Log, Unread
from headstart.diagnose.prints import BLOCK_BYTES, data_of, named_chain, with_answer
from headstart.diagnose.reading import Reading
from headstart.diagnose.requests import Conversation, Piece, Where, conversation_of, equal_form
from headstart.diagnose.tallies import Lint
from headstart.diagnose.texts import masked, plain
from headstart.errors import RequestError

_IN_TEXT = (Cause.TIME, Cause.ID, Cause.HEADER, Cause.WHITESPACE, Cause.UNICODE, Cause.JSON)
_MENDED = (*_IN_TEXT, Cause.TOOLS_REORDERED, Cause.TOOLS_RESERIALISED, Cause.SHAPE, Cause.REASONING)
_WORTH = 0.01
_NEVER = (Cause.OTHER, Cause.SHORT)


@dataclass(frozen=True, slots=True)
class Change:
    """One fix at all places where its cause was found. `estimated_tokens` more would be found again by what was compared; with
    this change and those before it `replayed_tokens` of the log were, None where only its author can make it."""

    cause: Cause
    places: tuple[str, ...]
    estimated_tokens: int
    replayed_tokens: int | None = None

    @property
    def fix(self) -> str:
        return FIXES[self.cause]


def best_changes(lint: Lint, most: int) -> list[Change]:
    """Return the changes that would gain most, at most `most`; none that gains less than a hundredth of all tokens."""
    by: dict[Cause, list[tuple[str, int]]] = {}
    for finding in lint.findings:
        if finding.cause not in _NEVER:
            by.setdefault(finding.cause, []).append((finding.place, finding.tokens))
    changes = [Change(cause, tuple(place for place, _ in found), sum(n for _, n in found)) for cause, found in by.items()]
    worth = [change for change in changes if change.estimated_tokens >= lint.all.tokens * _WORTH]
    return sorted(worth, key=lambda change: (-change.estimated_tokens, change.cause))[:most]


def replayed(
    changes: Sequence[Change], log: Log, reading: Reading, *, on_request: Callable[[int, Found], None]
) -> list[Change]:
    """Return the changes with what the log gives once they are made, one after another. `on_request` is told the number of the
    change and the request that is counted."""
    done: list[Change] = []
    for n, change in enumerate(changes):
        if change.cause in _MENDED:
            made = [*(one for one in done if one.replayed_tokens is not None), change]
            change = replace(change, replayed_tokens=_count(made, log, reading, partial(on_request, n)))
        done.append(change)
    return done


def _count(changes: Sequence[Change], log: Log, reading: Reading, on_request: Callable[[Found], None]) -> int | None:
    """Return how many tokens an ideal cache finds again; None for a log without texts."""
    blocks, kept = Known(), 0
    for number, found in enumerate(log):
        on_request(found)
        entry = found.entry
        if isinstance(entry, Unread):
            continue
        if entry.source is None:
            return None
        try:
            conversation = mended(reading.conversation(entry), changes)
            data = data_of(conversation, reading.renderer)
        except RequestError:
            continue
        chain = named_chain(conversation, data)
        if data.tokens:
            usable = (data.tokens - 1) // (BLOCK_BYTES // 4)
            kept += min(blocks.longest(chain), usable) * (BLOCK_BYTES // 4)
        blocks.put(chain, number)
        longer = with_answer(entry.answer, data.content, reading.renderer, cut=entry.cut) if entry.answer else None
        if longer is not None:
            blocks.put(named_chain(conversation, replace(data, content=longer)), number)
    return kept


def mended(conversation: Conversation, changes: Collection[Change]) -> Conversation:
    """Return a conversation as it would be with the changes made."""
    for change in changes:
        if change.cause in (Cause.TOOLS_REORDERED, Cause.TOOLS_RESERIALISED):
            conversation = _with_tools(conversation, change.cause)
        elif change.cause is Cause.SHAPE:
            conversation = replace(conversation, shapes={})
        elif change.cause is Cause.REASONING:
            conversation = _without_reasoning(conversation)
        else:
            conversation = _with_texts(conversation, change)
    return conversation


def _with_tools(conversation: Conversation, cause: Cause) -> Conversation:
    tools = conversation.tools
    if not tools:
        return conversation
    if cause is Cause.TOOLS_REORDERED:
        tools = sorted(tools, key=lambda tool: (str(tool.get("function", {}).get("name")), equal_form(tool)))
    else:
        tools = [json.loads(equal_form(tool)) for tool in tools]
    asked = conversation_of({"messages": [{"role": "user", "content": "."}], "tools": tools})
    pieces = [piece for piece in asked.pieces if piece.where[0] == "tools"]
    return replace(
        conversation, tools=tools, pieces=(*pieces, *(piece for piece in conversation.pieces if piece.where[0] != "tools"))
    )


def _without_reasoning(conversation: Conversation) -> Conversation:
    messages = [without_thought(message) if message["role"] == "assistant" else message for message in conversation.messages]
    pieces = []
    for piece in conversation.pieces:
        where = piece.where
        if piece.kind == "reasoning":
            continue
        if (
            where[0] == "messages"
            and where[2:] == ("content",)
            and messages[int(where[1])] is not conversation.messages[int(where[1])]
        ):
            if piece.begin:
                continue  # a text of several parts is one now
            piece = replace(piece, text=str(messages[int(where[1])].get("content") or ""))
        pieces.append(piece)
    return replace(conversation, messages=messages, pieces=tuple(pieces))


def _with_texts(conversation: Conversation, change: Change) -> Conversation:
    if isinstance(conversation.prompt, str):
        return replace(conversation, prompt=_text(conversation.prompt, change.cause))
    new: list[Piece] = []
    strings: dict[Where, str] = {}
    for piece in conversation.pieces:
        if piece.kind in ("text", "reasoning") and place_class(piece.path, role_at(conversation, piece)) in change.places:
            before = strings.get(piece.where)
            text = _text(piece.text, change.cause)
            piece = replace(piece, text=text, begin=piece.begin if before is None else len(before))
        elif piece.where in strings:
            piece = replace(piece, begin=len(strings[piece.where]))
        if piece.kind != "fixed":
            strings[piece.where] = strings.get(piece.where, "") + piece.text
        new.append(piece)
    document: dict[str, Any] = {"messages": conversation.messages, "tools": conversation.tools}
    copies: dict[Where, Any] = {(): document}
    for where, text in strings.items():
        for n in range(1, len(where)):
            if where[:n] not in copies:
                holder = copies[where[: n - 1]]
                holder[where[n - 1]] = copies[where[:n]] = copy.copy(holder[where[n - 1]])
        copies[where[:-1]][where[-1]] = text
    return replace(conversation, messages=document["messages"], tools=document["tools"], pieces=tuple(new))


def _text(text: str, cause: Cause) -> str:
    if cause is Cause.JSON:
        try:
            value = json.loads(text) if text[:1] in "{[" else None
        except (ValueError, RecursionError):
            return text
        return equal_form(value) if isinstance(value, dict | list) else text
    return masked(text, cause) if cause in (Cause.TIME, Cause.ID) else plain(text, cause)
