"""What an answer says of itself as it passes: its id, its first token, usage, how it ended. Nothing is changed.

A stream is looked at event by event. Until the first token each is read; behind it only those that can say more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from headstart.errors import HeadstartError
from headstart.ledger.entry import Finish

EVENT_BYTES = 16 << 20  # of one event of a stream


class Mark(Enum):
    """What an event is to the router."""

    QUIET = auto()  # says nothing: a comment, a ping
    OPENING = auto()  # before the first token, and to be said again by another worker
    TOKEN = auto()
    USAGE = auto()  # a chunk of usage alone
    FAILURE = auto()
    LAST = auto()  # and the stream has ended as it should


class Garbled(HeadstartError):
    """A worker's answer is none."""


@dataclass(slots=True)
class Seen:
    """What is known of an answer so far. `error`: of a failure that it tells, as the dialect writes it."""

    path: str
    id: str = ""
    model: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    finish: Finish = "stop"
    begun: bool = False
    ended: bool = False
    error: Mapping[str, Any] | None = None
    answers: int = 1
    tokens: int = 0  # about: events that said something

    def event(self, event: bytes) -> Mark:
        """Return what an event is, its blank line left out. Raises Garbled."""
        try:
            return self._event(event)
        except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
            raise Garbled(f"an event cannot be read: {type(error).__name__}: {str(error)[:128]}") from error

    def _event(self, event: bytes) -> Mark:
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if not data:
            return Mark.QUIET
        if data == b"[DONE]":
            self.ended = True
            return Mark.LAST
        if self.begun and not _tells(data):
            self.tokens += b"delta" in data or b'"text"' in data
            return Mark.TOKEN
        content = msgspec.json.decode(data)
        if not isinstance(content, dict):
            raise Garbled("an event is no JSON object")
        kind = content.get("type")
        if isinstance(kind, str) and ("response" in kind or self.path.endswith("/messages") or kind in ("error", "ping")):
            return self._typed(kind, content)
        return self._chunk(content)

    def whole(self, content: object) -> None:
        """Take an answer that came in one piece. Raises Garbled."""
        if not isinstance(content, dict):
            raise Garbled("the answer is no JSON object")
        self._named(content)
        choices = content.get("choices")
        if isinstance(choices, list):
            self.answers = max(1, len(choices))
            reasons = [one.get("finish_reason") for one in choices if isinstance(one, dict)]
            self._finished(next((reason for reason in reasons if reason != "stop"), "stop"))
        self._finished(content.get("stop_reason") or content.get("status"))
        self.begun = self.ended = True

    def _chunk(self, content: dict[str, Any]) -> Mark:
        if isinstance(error := content.get("error"), dict):
            self.error, self.finish = error, "error"
            return Mark.FAILURE
        self._named(content)
        choices = content.get("choices")
        if not isinstance(choices, list):
            raise Garbled("a chunk has no choices")
        if not choices:
            return Mark.USAGE if content.get("usage") else Mark.QUIET if self.begun else Mark.OPENING
        said = ends = False
        for choice in choices:
            if not isinstance(choice, dict):
                raise Garbled("a choice is no JSON object")
            delta = choice.get("delta")
            self.answers = max(self.answers, int(choice.get("index") or 0) + 1)
            self._finished(choice.get("finish_reason"))
            parts = {**(delta if isinstance(delta, dict) else {}), "text": choice.get("text")}
            said = said or any(parts.get(name) for name in _SAID)
            ends = ends or bool(choice.get("finish_reason"))
        self.tokens += said
        self.begun = self.begun or said or ends or "prompt_progress" in content  # none of which can be said twice
        return Mark.TOKEN if self.begun else Mark.OPENING

    def _typed(self, kind: str, content: dict[str, Any]) -> Mark:
        if kind == "ping":
            return Mark.QUIET
        if kind in ("error", "response.failed"):
            response = content.get("response")
            told = content.get("error") or (response.get("error") if isinstance(response, dict) else None) or content
            self.error, self.finish = told if isinstance(told, dict) else {}, "error"
            return Mark.FAILURE
        for name in ("message", "response"):
            if isinstance(inner := content.get(name), dict):
                self._named(inner)
        if kind == "message_delta":
            self._named(content)
            delta = content.get("delta")
            self._finished(delta.get("stop_reason") if isinstance(delta, dict) else None)
        if kind in ("message_stop", "response.completed", "response.incomplete"):
            self._finished("length" if kind == "response.incomplete" else None)
            self.begun = self.ended = True
            return Mark.LAST
        self.tokens += kind.endswith("delta") and kind != "message_delta"
        self.begun = self.begun or kind not in _OPENINGS
        return Mark.TOKEN if self.begun else Mark.OPENING

    def _named(self, content: Mapping[str, Any]) -> None:
        self.id = self.id or str(content.get("id") or "")
        self.model = self.model or str(content.get("model") or "")
        if isinstance(usage := content.get("usage"), dict):
            self.usage |= {name: value for name, value in usage.items() if value is not None}

    def _finished(self, reason: object) -> None:
        if isinstance(reason, str) and reason in _FINISHES:
            self.finish = _FINISHES[reason]

    def used(self) -> dict[str, int]:
        """Return what was used, by the names of the usage log: cut to what can be where it does not add up."""
        usage = self.usage
        details = _dict(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
        told = _dict(usage.get("completion_tokens_details") or usage.get("output_tokens_details"))
        if self.path.endswith("/messages"):  # where what was cached is no part of the input
            cached = _count(usage.get("cache_read_input_tokens"))
            written = _count(usage.get("cache_creation_input_tokens"))
            prompt = _count(usage.get("input_tokens")) + cached + written
            memory, disk, kept = (usage.get(name) for name in ("cached_memory_tokens", "cached_disk_tokens", "kept_tokens"))
        else:
            prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
            cached, written = _count(details.get("cached_tokens")), _count(details.get("cache_write_tokens"))
            memory, disk, kept = details.get("cached_memory_tokens"), details.get("cached_disk_tokens"), told.get("kept_tokens")
        cached = min(cached, prompt)
        from_disk = min(_count(disk), cached)
        return {
            "prompt": prompt,
            "cached_memory": cached - from_disk if memory is None else min(_count(memory), cached - from_disk),
            "cached_disk": from_disk,
            "written": min(written, prompt - cached),
            "output": _count(usage.get("completion_tokens", usage.get("output_tokens"))),
            "kept_output": _count(kept),
        }


async def events_of(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the events of a stream, each with the blank line behind it. Raises Garbled for one that has no end."""
    rest = b""
    async for part in parts:
        rest += part
        if b"\r" in rest:  # some servers end lines so
            if rest.endswith(b"\r") and len(rest) <= EVENT_BYTES:
                continue
            rest = rest.replace(b"\r\n", b"\n")
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            yield event + b"\n\n"
        if len(rest) > EVENT_BYTES:
            raise Garbled(f"an event has more than {EVENT_BYTES >> 20} MiB")
    if rest.strip():
        raise Garbled("the stream ended amid an event")


_SAID = ("content", "text", "tool_calls", "reasoning_content", "reasoning", "refusal", "function_call")
_OPENINGS = ("message_start", "response.created", "response.in_progress", "response.queued")
_FINISHES: dict[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "abort": "abort",
    "error": "error",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "completed": "stop",
    "incomplete": "length",
    "failed": "error",
}
_TELLING: tuple[bytes, ...] = (
    b'"usage"',
    b'"error"',
    b'"finish_reason"',
    b'"stop_reason"',
    b"message_stop",
    b"response.completed",
)
_TELLING += (b"response.incomplete", b"response.failed")
_NOTHING = (b'"usage":null', b'"finish_reason":null', b'"usage": null', b'"finish_reason": null')


def _tells(data: bytes) -> bool:
    """Whether an event behind the first token may say more than a token."""
    for nothing in _NOTHING:
        if nothing in data:
            data = data.replace(nothing, b"")
    return any(name in data for name in _TELLING)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int:
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else 0
