"""What a request asks for. Each dialect reads its own JSON into this; nothing behind it knows which dialect that was."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headstart.api.caching import Caching
from headstart.api.keyring import ANYBODY, Caller
from headstart.errors import RequestError

SESSION_CHARACTERS = 256
RETENTION_CHARACTERS = 64
ADDRESS_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Handling:
    """How a request is served, beside what it asks for; see `GenerationRequest`."""

    priority: int = 0
    session: str = ""
    retention: str = "default"
    deadline_s: float | None = None  # from the request's arrival
    prefill_at: str | None = None  # where a router says that the prompt is to be computed


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools may be called, or must be, and then which: of `names`, or any."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """JSON as the answer: any object, or what `schema` describes. Not `strict`: as far as it can be enforced."""

    schema: Mapping[str, Any] | None = None
    strict: bool = True
    param: str = "response_format"  # where the client wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Either `messages`, in the form of chat completions that `render` takes, or `prompt`, a text or token ids.

    None: not said, so the model's own default holds. `sampling`: fields of `Sampling` by name, those that were said.
    `previous`: the answer that the conversation goes on from; the first `instructions` messages stand before all of it and are
    not kept with it. `keep`: whether another request may go on from this answer. `tools` are in the form of chat completions;
    `parallel_calls`: whether one answer may have several. `template`: what the chat template is told beside messages. `echo`:
    what the dialect repeats in its answer. `logprobs` as in `GenerationRequest`. `ignored`: fields that nobody knows, for the
    log."""

    id_prefix: str  # of the answer's id, as the dialect's clients know it
    messages: tuple[Any, ...] | None = None
    instructions: int = 0
    previous: str | None = None
    keep: bool = False
    tools: tuple[Any, ...] | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    format: Format | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | tuple[int, ...] = ""
    model: str | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    salt: str | None = None
    stream: bool = False
    include_usage: bool = False  # in a stream, where the dialect leaves the choice
    has_stream_options: bool = True  # where that is said, if only as null
    ignored: tuple[str, ...] = ()
    echo: Mapping[str, Any] = field(default_factory=dict)
    handling: Handling = Handling()
    caching: Caching = field(default_factory=Caching)
    progress: bool = False  # whether it is told how far the prompt is
    caller: Caller = ANYBODY

    @property
    def prompt_param(self) -> str:
        """The name of what holds the prompt, for errors."""
        return "prompt" if self.messages is None else "messages"


def handling_of(headers: Mapping[str, str]) -> Handling:
    """Return what x-headstart-priority, -session, -retention, -deadline and -prefill-at say. Raises RequestError naming the
    header."""
    said = {name: headers.get(f"x-headstart-{name}", "").strip() for name in ("priority", "session", "retention")}
    if not re.fullmatch(r"[+-]?[0-9]{1,4}|", said["priority"]):
        raise _wrong("x-headstart-priority", f"must be a whole number between -9999 and 9999, but is {said['priority'][:64]!r}")
    for name, most in (("session", SESSION_CHARACTERS), ("retention", RETENTION_CHARACTERS)):
        if len(said[name]) > most or not said[name].isprintable():
            raise _wrong(f"x-headstart-{name}", f"must have at most {most} printable characters")
    deadline_s = _deadline(headers.get("x-headstart-deadline", "").strip())
    prefill_at = headers.get("x-headstart-prefill-at", "").strip()[:ADDRESS_CHARACTERS] or None
    return Handling(int(said["priority"] or 0), said["session"], said["retention"] or "default", deadline_s, prefill_at)


def _deadline(text: str) -> float | None:
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) or not float(text):
        raise _wrong("x-headstart-deadline", f"must be seconds above 0, such as 30 or 2.5, but is {text[:64]!r}")
    return float(text)


def _wrong(param: str, must: str) -> RequestError:
    return RequestError(f"{param} {must}", param=param)
