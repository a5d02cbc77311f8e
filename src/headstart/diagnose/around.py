"""One side of a difference, as it is shown. Imports nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Around:
    """A side of a difference: the token that differs (None behind the end, or where no tokenizer is known), how many tokens
    are before it, and the text before, of and behind what differs."""

    token: int | None
    position: int
    path: str
    offset: int | None
    before: str
    text: str
    after: str
