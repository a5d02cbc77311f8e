"""States of recurrent layers as they were behind whole blocks of a request, on their way into the cache (`policy.boundaries`).

    prefill  … ├────────┤ a pass ends, the state is copied ├─────┤ copied ├─┤ first token: blocks and copies are saved together
    decode   … every 64th token: copied, in place of the last such copy; saved at the end of the answer

Copies are counted as KV memory. Where there is none for one, it is not kept: a prefix less that others could go on from.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Generic, Protocol

from headstart.block.keys import BLOCK_TOKENS
from headstart.engine.serving.parts import StateCopy
from headstart.engine.serving.scheduler import Work
from headstart.engine.serving.sequence import S, Sequence
from headstart.metrics import Counters
from headstart.policy.boundaries import next_boundary

_MOST = 8  # copies of a request that wait for being saved; of more, the oldest goes


class States(Protocol):
    """Recurrent states as an engine has them."""

    @property
    def kept(self) -> bool:
        """Whether this model has any."""
        ...

    def stands(self, sequence: Sequence) -> bool:
        """Return whether a request's state stands behind just what is computed."""
        ...

    def copy(self, sequence: Sequence) -> StateCopy | None:
        """Return a copy of that state; None where there is no memory for one."""
        ...


class Boundaries(Generic[S]):
    """For the engine's thread. `every`: tokens of a long prompt between two copies."""

    def __init__(self, states: States, counters: Counters, *, every: int) -> None:
        self._states = states
        self._counters = counters
        self._every = every

    def cut(self, work: Several[Work[S]]) -> list[Work[S]]:
        """Return `work` so that each request's part of it ends at its next boundary at the latest."""
        if not self._states.kept:
            return list(work)
        return [item if (end := self._next(item.sequence)) is None else _until(item, end) for item in work]

    def entered(self, sequence: S) -> None:
        """Copy the state that a load has brought, before a pass goes on from it: what was read from a slow tier is saved to the
        faster ones as well."""
        loaded = sequence.cached_tokens if sequence.load is None else sequence.computed
        if loaded and loaded == sequence.computed > sequence.saved and loaded not in sequence.boundaries:
            self._keep(sequence)

    def passed(self, sequence: S) -> None:
        """Copy the state behind a pass that ended at a boundary, or behind whole blocks of an answer."""
        at = sequence.computed
        if at == sequence.boundary or (at >= sequence.prompt_tokens and at % BLOCK_TOKENS == 0):
            self._keep(sequence)

    def _keep(self, sequence: S) -> None:
        at = sequence.computed
        if not self._states.kept or not sequence.use_cache or not self._states.stands(sequence):
            return
        copy = self._states.copy(sequence)
        if copy is None:
            self._counters.add("states_not_kept")
            return
        held = sequence.boundaries
        replaced = [
            one for one in held if one == at or (one >= sequence.prompt_tokens and at > one)
        ]  # one of an answer suffices
        for one in replaced or list(held)[: max(0, len(held) + 1 - _MOST)]:
            held.pop(one).release()
        held[at] = copy
        self._counters.add("states_kept")

    def _next(self, sequence: S) -> int | None:
        """Return where the request's next pass must end, and remember it."""
        sequence.boundary = None
        if sequence.use_cache and not sequence.decoding:
            sequence.boundary = next_boundary(
                sequence.computed,
                tokens=len(sequence.tokens),
                every=self._every,
                block_tokens=BLOCK_TOKENS,
                diverges=sequence.diverges,
                awaited=sequence.awaited,
            )
        return sequence.boundary


def _until(item: Work[S], end: int) -> Work[S]:
    return replace(item, count=min(item.count, end - item.sequence.computed))
