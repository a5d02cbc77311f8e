"""Finding what is stored of a prompt, and protecting it: which tier has which piece, and leases on the extents that count.

Where the representation needs a boundary state, a prefix is worth something only up to one: the match ends there, and the
extent that carries it, which need not be the one with the blocks before it, is leased with the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headstart.block.keys import BlockKey
from headstart.block.representation import Representation
from headstart.cache.lookup import Boundary, Pieces, Run, last_boundary, longest_prefix, part_of, pieces_of
from headstart.cache.source import Source
from headstart.metrics import Counters
from headstart.tier.base import ExtentId
from headstart.tier.lookup_thread import Patience

_TRIES = 8  # to lease what ends with a state, while others remove it


@dataclass(frozen=True, slots=True)
class Found:
    """`held`: the extents that are leased, by source number; exactly those must be released. `boundary`: where the state
    behind the last run lies. `beyond`: pieces that are stored behind it, to no use without a state."""

    runs: Sequence[Run] = ()
    held: dict[int, list[ExtentId]] = field(default_factory=dict)
    boundary: Boundary | None = None
    beyond: int = 0


class Finder:
    """Safe from many threads."""

    def __init__(
        self, sources: Sequence[Source], representation: Representation, *, longest_read_s: float, counters: Counters
    ) -> None:
        """`longest_read_s`: a source with a read under way for longer is not asked."""
        self._sources = sources
        self._representation = representation
        self._digest = representation.digest
        self._with_state = representation.state == "required"
        self._longest_read_s = longest_read_s
        self._counters = counters

    def find(self, keys: Sequence[BlockKey], patience: Patience) -> Found:
        """Return the longest prefix of whole pieces that can be had, leased. `patience` is for all answers together."""
        if not keys:
            return Found()
        located = self._locate(keys, patience)
        return self._to_a_state(located, patience) if self._with_state else self._protect(longest_prefix(located), patience)

    def _locate(self, keys: Sequence[BlockKey], patience: Patience) -> list[tuple[int, Pieces]]:
        """Ask the tiers where the pieces lie, each only from the first piece on that no faster one has; where states count, all
        of it, since a slower one may have a state where a faster one has but the blocks."""
        per_piece = self._representation.blocks_per_piece
        found: list[tuple[int, Pieces]] = []
        covered = np.zeros(len(keys) // per_piece, np.bool_)
        for number, source in enumerate(self._sources):
            if source.hangs(self._longest_read_s):
                self._counters.add(f"match_skipped_{source.tier.name}")  # its answers come never, or too late
                continue
            if covered.all() and (not self._with_state or _reaches(found, len(covered))):
                break
            start = 0 if self._with_state else int(np.argmin(covered))
            placement = source.locate(self._digest, keys[start * per_piece :], patience, longest_read_s=self._longest_read_s)
            if placement is not None:
                pieces = pieces_of(placement, blocks_per_piece=per_piece, excluded=source.quarantine.avoided())
                found.append((number, pieces))
                covered[start:] |= pieces.extents >= 0
        return found

    def _protect(self, runs: Sequence[Run], patience: Patience) -> Found:
        """Lease every extent of `runs`; those that are gone by now shorten the match."""
        held, gone = self._lease(((run.tier, run.extent) for run in runs), patience)
        if not gone:
            return Found(list(runs), held)
        good = list(runs[: next(i for i, run in enumerate(runs) if (run.tier, run.extent) in gone)])
        needed = {(run.tier, run.extent) for run in good}
        for number, extents in held.items():
            self._sources[number].release([extent for extent in extents if (number, extent) not in needed])
            held[number] = [extent for extent in extents if (number, extent) in needed]
        return Found(good, held)

    def _to_a_state(self, located: list[tuple[int, Pieces]], patience: Patience) -> Found:
        """Lease what lies before the latest state that can be had, and the state; what is gone by now is done without."""
        for _ in range(_TRIES):
            runs = longest_prefix(located)
            there = sum(run.pieces for run in runs)
            boundary = last_boundary(located, within=there)
            if boundary is None:
                return Found(beyond=there)
            runs = part_of(runs, 0, boundary.pieces)
            held, gone = self._lease([*((run.tier, run.extent) for run in runs), (boundary.tier, boundary.extent)], patience)
            if not gone:
                return Found(runs, held, boundary, there - boundary.pieces)
            for number, extents in held.items():
                self._sources[number].release(extents)
            located = [(n, pieces.without([extent for tier, extent in gone if tier == n])) for n, pieces in located]
        return Found()

    def _lease(
        self, wanted: Iterable[tuple[int, ExtentId]], patience: Patience
    ) -> tuple[dict[int, list[ExtentId]], set[tuple[int, ExtentId]]]:
        """Lease extents, each once; return those that are held by source number, and those that are gone."""
        by_source: dict[int, dict[ExtentId, None]] = {}
        for number, extent in wanted:
            by_source.setdefault(number, {})[extent] = None
        held: dict[int, list[ExtentId]] = {}
        gone: set[tuple[int, ExtentId]] = set()
        for number, some in by_source.items():
            extents = list(some)
            kept = self._sources[number].lease(extents, patience)
            held[number] = [extent for extent, ok in zip(extents, kept, strict=True) if ok]
            gone |= {(number, extent) for extent, ok in zip(extents, kept, strict=True) if not ok}
        return held, gone


def _reaches(located: Sequence[tuple[int, Pieces]], pieces: int) -> bool:
    """Whether a state stands behind so many pieces."""
    boundary = last_boundary(located, within=pieces)
    return boundary is not None and boundary.pieces == pieces
