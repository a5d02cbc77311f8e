"""What an answer is made of, in the order in which it was written. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, or a piece of one: pieces of one id follow each other and are one call, the last of them `done`. Their
    `arguments` joined are the text of a JSON object; of a call that was cut off, its beginning, and none is `done`."""

    id: str
    name: str
    arguments: str
    done: bool = True


Part = Text | Reasoning | Call


def call_id(*, short: bool = False) -> str:
    """Return a new id. `short`: nine letters and digits, which some templates insist on."""
    return secrets.token_hex(5)[:9] if short else f"call_{secrets.token_hex(12)}"


def merged(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield parts as long as can be: what follows each other and belongs together, as one."""
    last: Part | None = None
    for part in parts:
        if isinstance(last, Call) and isinstance(part, Call) and last.id == part.id:
            last = replace(part, arguments=last.arguments + part.arguments)
        elif last is not None and type(last) is type(part) and not isinstance(last, Call) and not isinstance(part, Call):
            last = type(last)(last.text + part.text)
        else:
            if last is not None:
                yield last
            last = part
    if last is not None:
        yield last
