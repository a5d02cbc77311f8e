"""What every dialect has, and how server-sent events are written. Nothing here is asked of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headstart.api.ask import Ask
from headstart.api.pieces import Piece
from headstart.api.usage import Usage
from headstart.diagnose.why import Diagnosis
from headstart.errors import RequestError


@dataclass(frozen=True, slots=True)
class About:
    """What an answer's envelope says beside the answer. `diagnosis`: how the request compares with the one that its client
    named; None where it named none. `tell`: is told of an answer that may be asked for again, when it is whole."""

    id: str
    created: int  # seconds since 1970
    model: str
    request_id: str | None = None  # of the header, for errors amid a stream
    diagnosis: Callable[[Usage], Diagnosis | None] = lambda usage: None
    tell: Callable[[Mapping[str, Any]], None] = lambda answer: None


class Shape(Protocol):
    """How an answer is written. Of a stream: `open` at once, `begin` before the first of what comes, with the usage so far,
    `piece` for each, `quiet` when nothing does, then `end` or `failure`."""

    def whole(self, answers: Sequence[Piece], usage: Usage) -> dict[str, Any]: ...

    def open(self) -> Iterator[bytes]: ...

    def begin(self, usage: Usage) -> Iterator[bytes]: ...

    def piece(self, piece: Piece) -> Iterator[bytes]: ...

    def end(self, usage: Usage) -> Iterator[bytes]: ...

    def failure(self, error: RequestError) -> Iterator[bytes]: ...

    def quiet(self) -> bytes: ...


class Dialect(Protocol):
    """A module of this package."""

    def parse(self, body: bytes, headers: Mapping[str, str]) -> Ask: ...

    def shape(self, ask: Ask, about: About) -> Shape: ...


KEEPALIVE = b": keep-alive\n\n"  # a comment, which clients skip
DONE = b"data: [DONE]\n\n"


def event(content: Mapping[str, Any], name: str | None = None) -> bytes:
    line = b"" if name is None else b"event: " + name.encode() + b"\n"
    return line + b"data: " + msgspec.json.encode(content) + b"\n\n"
