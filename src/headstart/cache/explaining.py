"""Why blocks were not found at some time: what the saver, the tiers' journals and other representations say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headstart.block.keys import BlockKey
from headstart.cache.faults import counted
from headstart.cache.history import SaveFate, SaveHistory
from headstart.metrics import Counters
from headstart.tier.base import Gone, KeyedTier, Tier

Absence = Literal[
    "evicted",
    "expired",
    "corrupt",
    "deleted",
    "pending",
    "full",
    "budget",
    "dropped",
    "other-representation",
    "other-key",
    "late",
    "unknown",
]
_REFUSED: dict[str, Absence] = {"full": "full", "quota": "full", "too-large": "full", "budget": "budget", "pending": "pending"}
_GONE: dict[str, Absence] = {"expired": "expired", "corrupt": "corrupt"}
_EVICTED = ("capacity", "full", "min-free", "quota", "lost")


@dataclass(frozen=True, slots=True)
class Fate:
    """Why a block was absent. `by`: in the words of whoever did it, as "quota" or "queue-full"; `tier` and `time_s` (since
    1970): where and when, as far as it is known. "late": it was stored, and not found in time."""

    absence: Absence
    by: str = ""
    tier: str = ""
    time_s: float | None = None


def fates_of(
    keys: Sequence[BlockKey],
    *,
    at_s: float,
    representation: bytes,
    tiers: Sequence[Tier],
    history: SaveHistory,
    counters: Counters,
) -> list[Fate]:
    """Return for each key of a chain why nothing was found under it at `at_s`. Of several tiers the last one, which keeps for
    longest, has the last word. Takes milliseconds for long chains: nothing for a request's way."""
    saves = history.fates(keys, at_s=at_s)
    gone: list[tuple[Gone, Tier] | None] = [None] * len(keys)
    since: list[tuple[float, Tier] | None] = [None] * len(keys)
    elsewhere: list[Tier | None] = [None] * len(keys)
    hidden: list[Tier | None] = [None] * len(keys)
    for tier in tiers:
        with counted(counters, tier, "removed"):
            for place, one in enumerate(tier.removed(representation, keys, before_ms=round(at_s * 1000))):
                gone[place] = (one, tier) if one is not None else gone[place]
            there = tier.locate(representation, keys)
            for place, extent in enumerate(there.extents.tolist()):
                info = tier.info(extent) if extent >= 0 else None
                if info is not None:
                    since[place] = info.created_ms / 1000, tier
            if isinstance(tier, KeyedTier):
                for place, came_ms in enumerate(tier.hidden_since(representation, keys)):
                    hidden[place] = tier if came_ms is not None and came_ms / 1000 <= at_s else hidden[place]
            for other in tier.representations():
                if other != representation:
                    for place, extent in enumerate(tier.locate(other, keys).extents.tolist()):
                        info = tier.info(extent) if extent >= 0 else None
                        if info is not None and info.created_ms / 1000 <= at_s:
                            elsewhere[place] = tier
    return [_fate(*known, at_s=at_s) for known in zip(saves, gone, since, hidden, elsewhere, strict=True)]


def _fate(
    save: SaveFate | None,
    gone: tuple[Gone, Tier] | None,
    since: tuple[float, Tier] | None,
    hidden: Tier | None,
    elsewhere: Tier | None,
    *,
    at_s: float,
) -> Fate:
    """What was done last counts: a block that was written anew after it had been evicted is no longer evicted."""
    gone_s = None if gone is None else gone[0].time_ms / 1000
    if save is not None and save.reason is not None and (gone_s is None or save.time_s > gone_s):
        return Fate(_REFUSED.get(save.reason, "dropped"), save.reason, time_s=save.time_s)
    if gone is not None:
        reason = gone[0].reason
        absence: Absence = "evicted" if reason in _EVICTED else _GONE.get(reason, "deleted")
        return Fate(absence, reason, gone[1].name, gone_s)
    if since is not None and since[0] <= at_s:
        return Fate("late", tier=since[1].name)
    if hidden is not None:
        return Fate("other-key", tier=hidden.name)
    return Fate("unknown") if elsewhere is None else Fate("other-representation", tier=elsewhere.name)
