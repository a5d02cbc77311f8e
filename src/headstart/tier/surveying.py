"""Many extents as rules look at them: columns, not an object each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from headstart.block.representation import Representation
from headstart.policy.tiering import Facts, Words
from headstart.tier.base import ExtentInfo, Tier

ROWS = 16_384  # of a part: a lookup waits for one of them, about a millisecond


@dataclass(frozen=True, slots=True)
class Survey:
    """Some extents of a tier: ids, what rules may ask of them, the use counter's values, and which are pinned or read here and
    so stay where they are."""

    ids: npt.NDArray[np.int64]
    facts: Facts
    last_used: npt.NDArray[np.int64]
    stays: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.ids)


@runtime_checkable
class SurveyedTier(Tier, Protocol):
    """A tier that has its extents in columns."""

    def survey(self) -> Iterator[Survey]:
        """Yield all living extents, part by part; no lock is held between two of them."""
        ...


@runtime_checkable
class CollectedTier(Tier, Protocol):
    """A tier of many machines, of which one looks after what lies in it."""

    @property
    def collects(self) -> bool:
        """Whether that is this process."""
        ...


@runtime_checkable
class DescribingTier(Tier, Protocol):
    """A tier that remembers how what it holds is laid down."""

    def representation(self, digest: bytes) -> Representation | None: ...


def survey_of(infos: Sequence[ExtentInfo], tier: str, *, now_ms: int) -> Survey:
    """Return a survey of extents that are known one by one. Where their last use is not known, it counts as now: nothing is
    called idle that may not be."""

    def column(values: list[int]) -> npt.NDArray[np.int64]:
        return np.array(values, np.int64)

    used_ms = column([now_ms if info.used_ms is None else info.used_ms for info in infos])
    facts = Facts(
        tier,
        retention=Words.of([info.retention for info in infos]),
        tenant=Words.of([info.tenant for info in infos]),
        idle_ms=np.maximum(now_ms - used_ms, 0),
        age_ms=np.maximum(now_ms - column([info.created_ms for info in infos]), 0),
        nbytes=column([info.extent_bytes for info in infos]),
        blocks=column([info.blocks for info in infos]),
    )
    stays = np.array([info.pinned_until_ms is not None or info.leased for info in infos], np.bool_)
    return Survey(column([info.id for info in infos]), facts, column([info.last_used for info in infos]), stays)


def surveyed(tier: Tier, *, now_ms: int) -> Iterator[Survey]:
    """Yield what is in a tier, part by part. Raises StoreError, OSError."""
    if isinstance(tier, SurveyedTier):
        yield from tier.survey()
        return
    infos = list(tier.scan())
    for first in range(0, len(infos), ROWS):
        yield survey_of(infos[first : first + ROWS], tier.name, now_ms=now_ms)
