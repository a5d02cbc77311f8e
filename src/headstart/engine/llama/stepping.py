"""One step: a pass of libllama over all that the plan names, and a token to each whose prompt is through."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Several

from headstart.block.keys import BLOCK_TOKENS
from headstart.engine.llama.context import Context, Row
from headstart.engine.llama.loading import LlamaLoads
from headstart.engine.llama.sequence import LlamaSequence
from headstart.engine.serving.boundaries import Boundaries
from headstart.engine.serving.ending import Endings
from headstart.engine.serving.parts import Choice
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.scheduler import Work
from headstart.engine.serving.stepping import Steps
from headstart.metrics import Counters

_log = logging.getLogger(__name__)

_PASS_S = 2.0  # how long one pass over prompts may take: nobody is let in, aborted or answered meanwhile
_GRAIN_S = 6.0  # and one of `Context.grain_rows`, of which smaller ones waste up to a third


class Stepper(Steps[LlamaSequence]):
    """`waits`: whether a pass is over when libllama comes back from it, as it is on CPUs."""

    def __init__(
        self,
        context: Context,
        roster: Roster[LlamaSequence],
        loads: LlamaLoads,
        boundaries: Boundaries[LlamaSequence],
        endings: Endings[LlamaSequence],
        counters: Counters,
        *,
        chunk_tokens: int,
        waits: bool,
    ) -> None:
        super().__init__(roster, loads, boundaries, endings, counters)
        self._context = context
        self._most_tokens = chunk_tokens
        self._waits = waits

    @property
    def chunk_tokens(self) -> int:
        """By what they were measured to take, in whole grains where one may be waited for."""
        token_s, grain = self._pace.token_s, self._context.grain_rows
        if not token_s:
            return min(self._most_tokens, 4 * BLOCK_TOKENS)
        if grain * token_s > _GRAIN_S:
            grain = BLOCK_TOKENS
        return min(self._most_tokens, max(1, int(_PASS_S / token_s) // grain) * grain)

    def step(self, work: Several[Work[LlamaSequence]]) -> None:
        """Compute `work`. What fails ends the requests of this step, and nothing else."""
        rows = []
        for item in work:
            sequence, end = item.sequence, item.sequence.computed + item.count
            assert sequence.kv is not None
            if sequence.load is not None:
                sequence.load.claim(end)
            self._boundaries.entered(sequence)
            tokens = sequence.tokens[sequence.computed : end]
            rows.append(Row(sequence.kv.number, tokens, sequence.computed, wanted=item.count == sequence.pending))
        complete = [item.sequence for item, row in zip(work, rows, strict=True) if row.wanted]
        started = time.monotonic()
        try:
            outputs = self._context.compute(rows)
            chosen = [self._choose(one, output) for one, output in zip(complete, outputs, strict=True)]
        except Exception as error:  # noqa: BLE001 - a step's outer edge
            self._failed(work, error)
            return
        self._measure(work, time.monotonic() - started, settled=self._waits or bool(outputs))
        self._passed(work, complete, chosen)

    def _choose(self, sequence: LlamaSequence, output: int) -> Choice | str:
        try:
            return sequence.sampler.choose(self._context, output)
        except Exception as error:  # noqa: BLE001 - a request's outer edge; the engine counts it
            _log.exception("choosing a token failed; its request is ended")
            return f"choosing a token failed ({type(error).__name__}); the server's log has the details"
