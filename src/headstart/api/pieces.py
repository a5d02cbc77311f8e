"""What comes of an answer, piece by piece: the form between the engine's tokens and a dialect's JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.engine.base import FinishReason, Progress
from headstart.render.answers import Call, Part, Reasoning, Text, merged


@dataclass(frozen=True, slots=True)
class Told:
    """One token of an answer with its log probability: its bytes, where its text begins in the answer's, in characters, and
    the likeliest tokens in its place, best first."""

    token: bytes
    offset: int
    logprob: float
    top: tuple[tuple[bytes, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of answer `index`. `told`: of the tokens whose text begins in it, None where nobody asked. `stop`: the stop
    text that ended the answer, where one did. `progress`: how far the prompt is, before anything else."""

    index: int
    parts: tuple[Part, ...] = ()
    told: tuple[Told, ...] | None = None
    finish: FinishReason | None = None
    stop: str | None = None
    progress: Progress | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(part for part in self.parts if isinstance(part, Call))


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return one answer's pieces, at least one of them, as one, whose parts are as long as can be."""
    told = [piece.told for piece in pieces if piece.told is not None]
    return Piece(
        pieces[-1].index,
        tuple(merged(part for piece in pieces for part in piece.parts)),
        tuple(one for some in told for one in some) if told else None,
        pieces[-1].finish,
        pieces[-1].stop,
    )
