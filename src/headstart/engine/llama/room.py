"""Room for a request's KV: cells for what is known of it and some more at first, and more whenever those are full.

Cells need not lie side by side, so nothing is ever moved. What a save still reads comes free when it has ended.
"""

from __future__ import annotations

import time

from headstart.engine.llama.cells import Cells, SequenceKV
from headstart.engine.llama.sequence import LlamaSequence
from headstart.engine.serving.parts import Leaving
from headstart.engine.serving.sharing import Offer
from headstart.metrics import Counters

_SHARE = 4  # room is at least one in so many of the tokens known


class Rooms:
    """For the engine's thread. `least_tokens`: the least room beside what is known; `patience_s`: how long a save is expected
    to give back what it holds."""

    def __init__(self, cells: Cells, counters: Counters, *, least_tokens: int, patience_s: float) -> None:
        self._cells = cells
        self._counters = counters
        self._least_tokens = least_tokens
        self._patience_s = patience_s
        self._leaving: list[tuple[float, Leaving]] = []

    def first(self, sequence: LlamaSequence, offer: Offer[LlamaSequence] | None) -> SequenceKV | None:
        """See `serving.parts.Rooms`, as of the others."""
        wanted = self._wanted(sequence)
        if offer is None:
            return self._cells.allocate(wanted)
        assert offer.giver.kv is not None
        return self._cells.share(offer.giver.kv, offer.tokens, wanted)

    def spare(self, sequence: LlamaSequence) -> None:
        """There is no KV memory beside libllama's."""

    def grow(self, sequence: LlamaSequence) -> bool:
        assert sequence.kv is not None
        kv, known = sequence.kv, len(sequence.tokens)
        if not self._cells.grow(kv, self._wanted(sequence)) and not self._cells.grow(kv, known):
            return False
        self._counters.add("kv_grown")
        return True

    def give_back(self, sequence: LlamaSequence) -> None:
        if sequence.saving is not None and not sequence.saving.done:
            self._leaving.append((time.monotonic(), sequence.saving))
        sequence.release_kv()
        sequence.release_states()

    def coming_free(self) -> bool:
        since_s = time.monotonic() - self._patience_s
        self._leaving = [(begun_s, what) for begun_s, what in self._leaving if not what.done]
        return any(begun_s > since_s for begun_s, _ in self._leaving)

    def _wanted(self, sequence: LlamaSequence) -> int:
        """Return for how many tokens it gets room now. Who gave way before gets more: it would have to again."""
        known = len(sequence.tokens)
        room = max(self._least_tokens, known // _SHARE) << min(sequence.preemptions, 10)
        return sequence.kv_tokens if sequence.whole else min(sequence.kv_tokens, known + room)
