"""What comes of an answer, piece by piece: the form between the engine's tokens and a dialect's JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.engine.base import FinishReason


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
    """What came of answer `index`. `told`: of the tokens whose text begins in it, None where nobody asked."""

    index: int
    text: str
    told: tuple[Told, ...] | None = None
    finish: FinishReason | None = None


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return one answer's pieces, at least one of them, as one."""
    told = [piece.told for piece in pieces if piece.told is not None]
    return Piece(
        pieces[-1].index,
        "".join(piece.text for piece in pieces),
        tuple(one for some in told for one in some) if told else None,
        pieces[-1].finish,
    )
