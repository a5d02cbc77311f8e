"""Requests that begin alike hold that beginning once: those that come later read it in the KV of the one that came first.

A beginning that the first one still loads or computes is waited for: loading or computing it twice would end no sooner.

Who shares with a request that has a recurrent state takes a copy of its KV and of its state, and can so only at the very place
where the state stands. That place is told the first one beforehand (`Sequence.awaited`), and a pass of it ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic

from headstart.block.keys import BLOCK_TOKENS
from headstart.engine.serving.sequence import S, Sequence


@dataclass(frozen=True, slots=True)
class Offer(Generic[S]):
    """The first `tokens` of a request are, or (not `ready`) will be, in the KV of `giver`."""

    giver: S
    tokens: int
    ready: bool


def best_offer(sequence: S, running: Iterable[S], *, gives: Callable[[S], int]) -> Offer[S] | None:
    """Return the longest beginning, in whole blocks and leaving a token to compute, that a running request has as well, or
    will have. `gives`: how many tokens of a request's beginning others may read at most."""
    best: Offer[S] | None = None
    running = list(running) if sequence.use_cache else []
    sequence.alike = {one.number: sequence.alike[one.number] for one in running if one.number in sequence.alike}
    for one in running:
        if not one.use_cache or one.request.adapter != sequence.request.adapter or not (most := gives(one)):
            continue
        tokens = min(_common(sequence, one), _allowed(sequence, one), most)
        if one.recurrent and (tokens < one.computed or (tokens == one.computed and one.load is not None)):
            continue  # its state has gone on, or will with the pass that waits for its load; what it was there may be stored
        if tokens > (0 if best is None else best.tokens):
            best = Offer(one, tokens, ready=one.load is None and one.computed >= tokens)
    return best


def _allowed(sequence: Sequence, other: Sequence) -> int:
    """Return how many tokens, in whole blocks, the salts of both let them have in common."""
    if sequence.request.salt == other.request.salt:
        return len(other.tokens)
    return min(sequence.request.shared_tokens, other.request.shared_tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def _common(sequence: Sequence, other: Sequence) -> int:
    """Return the tokens of the whole blocks with which both begin, less than all of the first. Asked at every step while one
    waits, so what was compared is remembered; both only grow."""
    at, differs = sequence.alike.get(other.number, (0, False))
    end = min(len(sequence.tokens) - 1, len(other.tokens)) // BLOCK_TOKENS * BLOCK_TOKENS
    while not differs and at < end:
        differs = sequence.tokens[at : at + BLOCK_TOKENS] != other.tokens[at : at + BLOCK_TOKENS]
        at += 0 if differs else BLOCK_TOKENS
    sequence.alike[other.number] = (at, differs)
    return at
