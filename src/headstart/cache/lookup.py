"""What lies where, decided from placements alone: the longest prefix in whole pieces, and what a save has to add. Pure.

A piece counts as present in a tier only where all its blocks lie side by side in one extent, in whole pieces from its start,
because only then can it be read and verified as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headstart.tier.base import ExtentId, Placement


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where each piece lies in one tier: `extents[i]` is an ExtentId or -1, `firsts[i]` the piece's place in it; `states[i]` is
    an extent that ends with the piece and carries a boundary state, or -1 (None: there is none anywhere)."""

    extents: npt.NDArray[np.int64]
    firsts: npt.NDArray[np.int64]
    states: npt.NDArray[np.int64] | None = None

    def leading(self) -> int:
        """Return how many pieces from the first on are present."""
        return first_true(self.extents < 0)

    def extents_in_order(self) -> list[ExtentId]:
        """Return every extent that holds a piece, once, in the order of the prompt."""
        return [ExtentId(extent) for extent in dict.fromkeys(self.extents.tolist()) if extent >= 0]

    def state_behind(self, pieces: int) -> ExtentId | None:
        """Return the extent that carries the state behind so many pieces."""
        found = -1 if self.states is None or not pieces else int(self.states[pieces - 1])
        return None if found < 0 else ExtentId(found)

    def without(self, excluded: Sequence[int]) -> Pieces:
        """Return the same with what lies in `excluded` extents absent."""
        if not len(excluded):
            return self
        extents, states = (
            None if column is None else np.where(np.isin(column, np.asarray(excluded, np.int64)), -1, column)
            for column in (self.extents, self.states)
        )
        assert extents is not None
        return Pieces(extents, self.firsts, states)


@dataclass(frozen=True, slots=True)
class Run:
    """`pieces` pieces of the prompt from `start` on, lying side by side in `extent` of tier number `tier` from `first` on."""

    tier: int
    extent: ExtentId
    first: int
    start: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """A state behind the first `pieces` pieces of a prompt: `extent` of tier number `tier` carries it at its end."""

    tier: int
    extent: ExtentId
    pieces: int


def pieces_of(placement: Placement, *, blocks_per_piece: int, excluded: Sequence[int] = ()) -> Pieces:
    """Return where whole pieces lie, given where their blocks do; those in `excluded` extents count as absent."""
    # A key names all blocks before it, too: where a piece's last block lies, the others lie before it. Its first one may be
    # found in another extent, whose prompt parts from this one inside the piece.
    extents = placement.extents[blocks_per_piece - 1 :: blocks_per_piece].astype(np.int64)
    last = placement.positions[blocks_per_piece - 1 :: blocks_per_piece].astype(np.int64)
    firsts = last // blocks_per_piece
    extents = np.where(last % blocks_per_piece == blocks_per_piece - 1, extents, -1)
    states = None if placement.states is None else placement.states[blocks_per_piece - 1 :: blocks_per_piece]
    return Pieces(extents, firsts, states).without(excluded)


def longest_prefix(tiers: Sequence[tuple[int, Pieces]]) -> list[Run]:
    """Return the runs that make up the longest prefix, each piece from the first of `tiers` that has it.

    `tiers`: (number, pieces), fastest first; pieces may be those from a later piece on: they are aligned at their ends."""
    if not tiers:
        return []
    count = max(len(pieces.extents) for _, pieces in tiers)
    tier_of = np.full(count, -1, np.int64)
    extent_of = np.full(count, -1, np.int64)
    first_of = np.full(count, -1, np.int64)
    for number, pieces in tiers:
        start = count - len(pieces.extents)
        take = np.flatnonzero((pieces.extents >= 0) & (tier_of[start:] < 0))
        tier_of[start + take] = number
        extent_of[start + take] = pieces.extents[take]
        first_of[start + take] = pieces.firsts[take]
    hit = first_true(tier_of < 0)
    tier_of, extent_of, first_of = tier_of[:hit], extent_of[:hit], first_of[:hit]
    edge = np.ones(hit, np.bool_)
    edge[1:] = (tier_of[1:] != tier_of[:-1]) | (extent_of[1:] != extent_of[:-1]) | (first_of[1:] != first_of[:-1] + 1)
    starts = np.flatnonzero(edge)
    lengths = np.diff(np.append(starts, hit))
    columns = [column.tolist() for column in (tier_of[starts], extent_of[starts], first_of[starts], starts, lengths)]
    return [
        Run(tier, ExtentId(extent), first, start, pieces) for tier, extent, first, start, pieces in zip(*columns, strict=True)
    ]


def last_boundary(tiers: Sequence[tuple[int, Pieces]], *, within: int) -> Boundary | None:
    """Return the latest state that stands behind at most `within` pieces of a prompt, from the first of `tiers` that has it."""
    count = max((len(pieces.extents) for _, pieces in tiers), default=0)
    best: Boundary | None = None
    for number, pieces in tiers:
        if pieces.states is None:
            continue
        start = count - len(pieces.states)
        some = np.flatnonzero(pieces.states[: max(0, within - start)] >= 0)
        if len(some) and (best is None or start + int(some[-1]) + 1 > best.pieces):
            best = Boundary(number, ExtentId(int(pieces.states[some[-1]])), start + int(some[-1]) + 1)
    return best


def part_of(runs: Sequence[Run], first: int, pieces: int) -> list[Run]:
    """Return what of `runs` lies in the `pieces` pieces from `first` on, with starts that count from there."""
    if not first and runs and runs[-1].start + runs[-1].pieces <= pieces:
        return list(runs)  # all of it, as most often: a long prompt may lie in a thousand of them
    parts = []
    for run in runs:
        start, end = max(run.start, first), min(run.start + run.pieces, first + pieces)
        if start < end:
            parts.append(Run(run.tier, run.extent, run.first + start - run.start, start - first, end - start))
    return parts


def absent_runs(present: Sequence[npt.NDArray[np.bool_]], *, cuts: Sequence[int] = ()) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (first, pieces, tiers) for consecutive pieces that the same tiers lack, in the order of the prompt.

    `present[t][i]`: piece i is in tier number t. `cuts`: behind so many pieces a run ends in any case."""
    lacks = ~np.stack(present)  # [tiers, pieces]
    edges = np.flatnonzero((lacks[:, 1:] != lacks[:, :-1]).any(axis=0)) + 1
    bounds = sorted({0, *edges.tolist(), *cuts, lacks.shape[1]})
    for first, end in pairwise(bounds):
        tiers = np.flatnonzero(lacks[:, first]).tolist() if end > first else []
        if tiers:
            yield first, end - first, tiers


def first_true(flags: npt.NDArray[np.bool_]) -> int:
    """Return the index of the first True, or the length where there is none."""
    return int(np.argmax(flags)) if flags.any() else len(flags)
