"""Load or compute: what is done with a stored prefix, so that having one is never slower than having none. Pure.

    load      │◀──────────── read layer by layer, the suffix runs behind ────────────▶│ suffix
    compute   │ lead ▶ computed ────────────────────────────────────────────────────▶ │ suffix
    mixed     │ lead ▶ computed ──────────▶ meet ◀────────────────── read from the end │ suffix

Memory is always loaded; the `lead` is what of the prompt's beginning lies there. Estimates take a tier's reads to be as slow as
they are found to be at times (`Reading.seconds`). Before a tier's speed is known its prefixes are loaded, and given up soon if
they do not come (`too_slow`). In "mixed" no estimate has to be right: both sides go on until they meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headstart.policy.speed import Speed

UNFELT_S = 0.05  # differences below this are no reason to leave a stored prefix unread
_GAIN = 0.03  # that mixing must bring, or it is not worth reading for
_GRACE = 0.03  # of the time that computing takes: how long a load may be late
_WORTH = 1.25  # times slower than mixing a load must be to be given up for it: what it has read is lost
_RANGE_S = 0.5  # a range that is read from the end takes about so long
_RANGE_BYTES = (4 << 20, 64 << 20)
_RANGES = 8  # at least, of a prefix


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that follow each other in the prompt and lie in one tier. `always`: loaded in any case, as memory is."""

    tier: str
    tokens: int
    nbytes: int
    always: bool = False


@dataclass(frozen=True, slots=True)
class Computing:
    """How fast prompts are computed: `speed` over (rows, rows × keys before them, passes)."""

    speed: Speed
    chunk_tokens: int

    def seconds(self, first: int, end: int) -> float:
        """Return seconds for the tokens first … end-1 of a prompt."""
        if end <= first:
            return 0.0
        rows = end - first
        return self.speed.seconds(rows, (end * end - first * first) / 2, -(-rows // self.chunk_tokens))


@dataclass(frozen=True, slots=True)
class Reading:
    """How fast a tier is read: `speed` over (bytes, starts). `asked_bytes`: what others wait for there already. `stale`: it was
    last measured so long ago that it should be tried again."""

    speed: Speed
    asked_bytes: int = 0
    stale: bool = False

    def seconds(self, nbytes: int) -> float:
        """Return seconds after which `nbytes` more are there, on a bad day: half of the reads are off by `spread`."""
        if not nbytes:
            return 0.0
        return self.speed.seconds(nbytes + self.asked_bytes, 1) * (1.0 + min(self.speed.spread, 1.0))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, and in how many seconds the suffix could begin if all was loaded and if all was computed (None: not known).

    `at_once_tokens`: loaded as one from the start of the prompt, layer after layer: everything for "load", else the lead."""

    choice: Literal["load", "compute", "mixed"]
    at_once_tokens: int
    load_s: float | None = None
    compute_s: float | None = None
    suffix_s: float = 0.0
    chosen_s: float | None = None  # until the first token, by the way that was chosen


def plan_load(
    stretches: Sequence[Stretch],
    *,
    suffix_tokens: int,
    layers: int,
    piece_tokens: int,
    computing: Computing | None,
    reading: Mapping[str, Reading],
    ahead_s: float = 0.0,
    in_parts: bool = True,
) -> Plan:
    """Return how the matched `stretches` get into a request's KV. `ahead_s`: computing for others that goes before. `in_parts`:
    a part of what matched is of use without the rest.

    Where all speeds are known, the plan's own estimate is not above that of loading all or of computing all, but for UNFELT_S.
    """
    tokens = sum(stretch.tokens for stretch in stretches)
    lead = lead_tokens(stretches)
    asked = [stretch for stretch in stretches if not stretch.always]
    known = computing is not None and all(stretch.tier in reading for stretch in asked)
    compute_s = None if computing is None else computing.seconds(lead if in_parts else 0, tokens)
    if computing is None or compute_s is None or not known or not asked:
        load_s = _tail_s(stretches, 0, reading) if known else None
        suffix_s = 0.0 if computing is None else computing.seconds(tokens, tokens + suffix_tokens)
        return Plan("load", tokens, load_s, compute_s, suffix_s)
    load_s = _tail_s(stretches, 0, reading)
    suffix_s = computing.seconds(tokens, tokens + suffix_tokens)
    if_loaded = max(load_s + suffix_s / layers, max(load_s / layers, ahead_s) + suffix_s)
    if_computed = ahead_s + compute_s + suffix_s
    if_mixed = suffix_s + _meeting_s(
        stretches, lead, piece_tokens=piece_tokens, computing=computing, reading=reading, ahead_s=ahead_s
    )
    loads = if_loaded - UNFELT_S <= if_computed
    if not in_parts:
        chosen_s = if_loaded if loads else if_computed
        return Plan("load" if loads else "compute", tokens if loads else 0, load_s, compute_s, suffix_s, chosen_s)
    best = if_loaded if loads else if_computed
    # What lies in memory behind what is computed is loaded all the same, and a tier's speed is not forgotten for good.
    reads_anyway = any(stretch.always for stretch in stretches[_leading(stretches) :])
    stale = any(reading[stretch.tier].stale for stretch in asked)
    if if_mixed < best - max(UNFELT_S, _GAIN * compute_s) or (not loads and (reads_anyway or stale)):
        return Plan("mixed", lead, load_s, compute_s, suffix_s, if_mixed)
    if loads:
        return Plan("load", tokens, load_s, compute_s, suffix_s, if_loaded)
    return Plan("compute", lead, load_s, compute_s, suffix_s, if_computed)


def plan_whole(
    stretches: Sequence[Stretch], *, first: int, computing: Computing | None, reading: Mapping[str, Reading]
) -> Plan:
    """Return whether the `stretches` that lie behind the first `first` tokens of a prompt are loaded or computed, for an engine
    that begins with what comes behind when all of them are there, and computes others meanwhile: a load is never chosen that
    would be slower, but for UNFELT_S. What is not known is loaded, and so is what was last measured long ago."""
    tokens = sum(stretch.tokens for stretch in stretches)
    known = all(stretch.tier in reading for stretch in stretches)
    load_s = _tail_s(stretches, 0, reading) if known else None
    compute_s = None if computing is None else computing.seconds(first, first + tokens)
    if load_s is None or compute_s is None:
        return Plan("load", tokens, load_s, compute_s)
    stale = any(reading[stretch.tier].stale for stretch in stretches)
    if stale or load_s <= compute_s + UNFELT_S:
        return Plan("load", tokens, load_s, compute_s, chosen_s=load_s)
    return Plan("compute", 0, load_s, compute_s, chosen_s=compute_s)


def lead_tokens(stretches: Sequence[Stretch]) -> int:
    """Return how many tokens lie before the first that is not loaded in any case."""
    return sum(stretch.tokens for stretch in stretches[: _leading(stretches)])


def too_slow(
    now_s: float,
    *,
    arrived: int,
    arrived_s: float,
    layers: int,
    plan: Plan,
    least_s: float,
) -> bool:
    """Return whether a load of all of a prefix is to be given up, `now_s` after its start: its next layer is late, or at its
    rate computing and reading from the end would be through sooner. `arrived` layers were there after `arrived_s`.

    Lateness costs 3 % of the time that computing would take, or `least_s` where that is more."""
    if plan.compute_s is None or arrived >= layers:
        return False
    each_s = arrived_s / arrived if arrived else (plan.load_s or 0.0) / layers
    if now_s > arrived_s + each_s + max(least_s, _GRACE * plan.compute_s):
        return True
    if not arrived or now_s < least_s:
        return False
    left_s, whole_s = each_s * (layers - arrived), each_s * layers
    mixed_s = whole_s * plan.compute_s / (whole_s + plan.compute_s) if whole_s else 0.0
    return max(left_s, plan.suffix_s) > _WORTH * (mixed_s + plan.suffix_s) + least_s


def stride(gap_tokens: int, *, first: int, loading_s: float | None, computing: Computing | None, piece_tokens: int) -> int:
    """Return how many of the next `gap_tokens` tokens from `first` on are computed before one looks again how far reading has
    come; 0: wait, they are read sooner than a piece could be computed. `loading_s`: for all of them, None: not known.

    Half of what computing will have to do until both meet, so that little is computed in vain though rates change."""
    few = min(gap_tokens, 4 * piece_tokens)
    if loading_s is None or computing is None:
        return few
    if loading_s <= computing.seconds(first, first + min(piece_tokens, gap_tokens)):
        return 0
    all_s = computing.seconds(first, first + gap_tokens)
    to_meet = gap_tokens * loading_s / (loading_s + all_s)
    pieces = max(1, round(to_meet / 2 / piece_tokens), min(2, int(to_meet / piece_tokens)))
    return min(gap_tokens, pieces * piece_tokens)


def range_tokens(tokens: int, *, nbytes: int, reading: Reading | None, piece_tokens: int) -> int:
    """Return how long the ranges are in which `tokens` tokens of `nbytes` are read from the end: whole pieces, short enough
    that little is lost where computing arrives first, long enough for a device's rate."""
    least, most = _RANGE_BYTES
    worth = least
    if reading is not None and reading.speed.costs[0] > 0:
        worth = int(min(most, max(least, _RANGE_S / reading.speed.costs[0])))
    by_bytes = tokens * worth // max(1, nbytes)
    return max(1, min(by_bytes, tokens // _RANGES) // piece_tokens) * piece_tokens


def _leading(stretches: Sequence[Stretch]) -> int:
    return next((i for i, stretch in enumerate(stretches) if not stretch.always), len(stretches))


def _tail_s(stretches: Sequence[Stretch], first: int, reading: Mapping[str, Reading]) -> float:
    """Return seconds to read the tokens from `first` on. Tiers whose speed nobody knows, as memory's, count nothing."""
    nbytes: dict[str, float] = {}
    at = 0
    for stretch in stretches:
        share = min(1.0, max(0.0, (at + stretch.tokens - first) / stretch.tokens)) if stretch.tokens else 0.0
        nbytes[stretch.tier] = nbytes.get(stretch.tier, 0.0) + share * stretch.nbytes
        at += stretch.tokens
    return sum(reading[tier].seconds(int(count)) for tier, count in nbytes.items() if tier in reading)


def _meeting_s(
    stretches: Sequence[Stretch],
    lead: int,
    *,
    piece_tokens: int,
    computing: Computing,
    reading: Mapping[str, Reading],
    ahead_s: float,
) -> float:
    """Return seconds until computing from `lead` on and reading from the end have met, and one piece that was done twice."""
    tokens = sum(stretch.tokens for stretch in stretches)

    def met_s(pieces: int) -> tuple[float, float]:
        at = min(tokens, lead + pieces * piece_tokens)
        return ahead_s + computing.seconds(lead, at), _tail_s(stretches, at, reading)

    low, high = 0, -(-(tokens - lead) // piece_tokens)  # the fewest pieces after which computing is no sooner than reading
    while low < high:
        middle = (low + high) // 2
        computed_s, read_s = met_s(middle)
        low, high = (low, middle) if computed_s >= read_s else (middle + 1, high)
    best = min(max(met_s(pieces)) for pieces in {max(0, low - 1), low})
    return best + computing.seconds(tokens - piece_tokens, tokens)
