"""What may be written to a tier today: the numbers that `policy.admission` decides by, for each tier that is not memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from headstart.block.keys import BlockKey
from headstart.cache.faults import counted
from headstart.cache.source import Source
from headstart.metrics import Counters
from headstart.policy.admission import Admission

_SAID_S = 3600.0  # how often it is said that it runs short
_NOT_OURS = {"pool", "object"}  # tiers whose devices are not this machine's to spare
_log = logging.getLogger(__name__)


class WriteBudget:
    """For one thread. `budget_bytes`: in 24 hours, for each tier; None for any amount."""

    def __init__(self, budget_bytes: int | None, *, counters: Counters) -> None:
        self._budget_bytes = budget_bytes
        self._counters = counters
        self._admissions: dict[Source, Admission] = {}
        self._say_due = time.monotonic()
        self._kept_nothing: dict[
            Source, int
        ] = {}  # whose last prompt that lacked something got none of it in; bytes of a piece

    def why_not(self, source: Source) -> str:
        """Return why a new prompt is not stored now, "" where one is. For any thread."""
        piece_bytes, admission = self._kept_nothing.get(source), self._admissions.get(source)
        if not piece_bytes or admission is None or admission.keeps_new(block_bytes=piece_bytes, now_s=time.monotonic()):
            return ""
        return used_up(self._budget_bytes or 0)

    def limit(
        self,
        source: Source,
        keys: Sequence[BlockKey],
        present: npt.NDArray[np.bool_],
        *,
        piece_bytes: int,
        session: str,
        own: int,
        ends: Collection[int] = (),
    ) -> int:
        """Return how many of a prompt's pieces, from the first on, are worth having in the tier today. `keys`: the last block's
        of each piece; `present`: which pieces are there; `own`: how many this very request asked for before. `ends`: fewer are
        of use only where they are so many; empty, any number is."""
        everything = len(present)
        if self._budget_bytes is None or source.tier.in_memory or source.tier.name in _NOT_OURS or present.all():
            return everything
        now_s = time.monotonic()
        with counted(self._counters, source.tier, "statistics"):
            spent_bytes = source.tier.statistics().written_day_bytes
            admission = self._admissions.get(source)
            if admission is None:
                admission = Admission(budget_bytes=self._budget_bytes, spent_bytes=spent_bytes, now_s=now_s)
                self._admissions[source] = admission
            admission.cap(spent_bytes)
            leading = int(np.argmin(present))
            limit = admission.admit(keys, present=leading, block_bytes=piece_bytes, session=session, now_s=now_s, own=own)
            admitted = limit - leading
            if ends and limit < everything:
                limit = max((pieces for pieces in ends if pieces <= limit), default=0)
            admission.refund((admitted - int(np.count_nonzero(~present[:limit]))) * piece_bytes)
            if limit > leading:
                self._kept_nothing.pop(source, None)
            else:
                self._kept_nothing[source] = piece_bytes
            if limit < everything:
                self._say_short(source, now_s)
            return limit
        return everything

    def _say_short(self, source: Source, now_s: float) -> None:
        """Tell the log why prompts do not hit: nothing else shows it to whoever looks at no metrics."""
        if now_s < self._say_due:
            return
        self._say_due = now_s + _SAID_S
        _log.warning(
            "tier %r: cache.write_budget (%d MiB a day, a fifth of it at once) runs short, so of new prompts only heads are "
            "kept, or nothing; raise it to keep more",
            source.tier.name,
            (self._budget_bytes or 0) >> 20,
        )


def used_up(budget_bytes: int) -> str:
    """Return what is said where nothing of a new prompt is worth what is left of the budget."""
    return (
        f"cache.write_budget ({budget_bytes >> 20} MiB a day, a fifth of it at once) is used up: new prompts are stored again "
        "as it accrues; raise it to store more"
    )
