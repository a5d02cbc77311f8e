"""Which tokens the next step computes. Pure.

Every decoding request advances by one token in every step, and beside them chunks of prompts are computed, as many tokens as
do not hold up the answers (`policy.pacing`). Prompts take turns (`policy.fairness`): a short one does not wait behind a long
one, and what is left of a step's tokens goes to the next in turn. A prompt whose prefix is still being read joins only when
nothing else can run: then its layers wait for the reads, which delays nobody. Otherwise it joins when the reads are done; or,
where reading comes from the prefix's end and computing meets it, with what reading will not have brought sooner.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Generic

from headstart.engine.serving.sequence import S
from headstart.policy.fairness import FairShares


@dataclass(frozen=True, slots=True)
class Work(Generic[S]):
    """Compute the next `count` tokens of `sequence`."""

    sequence: S
    count: int


def plan_step(running: Several[S], *, shares: FairShares, chunk_tokens: int, beside_tokens: int) -> list[Work[S]]:
    """Return the next step's work, empty when nothing can run now. At most `chunk_tokens` of prompts; beside answers, and
    behind a prompt that is then through and waits for its first token, at most `beside_tokens`."""
    rooms = {one: one.room for one in running if not one.stalled}
    ready = [one for one, room in rooms.items() if room]
    work = [Work(one, 1) for one in ready if one.decoding]
    prompts = {one.number: one for one in ready if not one.decoding}
    if not prompts and not work:
        loading = next((one for one in rooms if one.joins_load), None)
        return [] if loading is None else [Work(loading, min(loading.pending, chunk_tokens))]
    left = min(beside_tokens, chunk_tokens) if work else chunk_tokens
    for turn in shares.prefills([one.turn for one in prompts.values()]):
        prompt = prompts[turn.number]
        count = min(turn.tokens, left)
        if count:
            work.append(Work(prompt, count))
        left -= count
        if count == prompt.pending:
            left = min(left, beside_tokens)
    return work


def note_turns(running: Several[S], work: Several[Work[S]]) -> None:
    """Count, for each prompt, the turns that others of its tenant had instead."""
    had = {item.sequence.request.tenant for item in work if not item.sequence.decoding}
    computed = {item.sequence.number for item in work}
    for one in running:
        if one.number in computed:
            one.passed_over = 0
        elif one.request.tenant in had:
            one.passed_over += 1
