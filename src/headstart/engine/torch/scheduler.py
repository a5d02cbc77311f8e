"""Which tokens the next step computes. Pure.

Every decoding request advances by one token in every step, and beside them at most one chunk of one prompt, the oldest,
is computed, so that streams go on while a long prompt comes in. A prompt whose prefix is still being read joins only when
nothing else can run: then its layers wait for the reads, which delays nobody. Otherwise it joins when the reads are done; or,
where reading comes from the prefix's end and computing meets it, with what reading will not have brought sooner.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

from headstart.engine.torch.prefix_load import PrefixLoad
from headstart.engine.torch.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the next `count` tokens of `sequence`."""

    sequence: Sequence
    count: int


def plan_step(running: Several[Sequence], *, chunk_tokens: int) -> list[Work]:
    """Return the next step's work, empty when nothing can run now. `running` is in order of arrival."""
    rooms = {sequence: sequence.room for sequence in running}
    ready = [sequence for sequence in running if rooms[sequence]]
    work = [Work(sequence, 1) for sequence in ready if sequence.decoding]
    prompt = next((sequence for sequence in ready if not sequence.decoding), None)
    if prompt is None and not work:
        prompt = next((one for one in running if isinstance(one.load, PrefixLoad) and not one.load.failed), None)
    if prompt is not None:
        # Decoding requests wait for the whole step, so a chunk beside them is a short one.
        limit = max(1, chunk_tokens // 4) if work else chunk_tokens
        work.append(Work(prompt, min(rooms[prompt] or prompt.pending, limit)))
    return work
