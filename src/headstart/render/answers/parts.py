"""What an answer is made of, in the order in which it was written. Pure."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, whole. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


Part = Text | Reasoning | Call


def call_id(*, short: bool = False) -> str:
    """Return a new id. `short`: nine letters and digits, which some templates insist on."""
    return secrets.token_hex(5)[:9] if short else f"call_{secrets.token_hex(12)}"
