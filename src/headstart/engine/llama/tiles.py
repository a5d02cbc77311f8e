"""What libllama's fused attention makes of a pass's rows on CPUs, and how many are therefore best computed at once. Pure.

KV in f16 or f32 only. A pass of 64 rows or more is computed in tiles of up to 64 rows of one head; a pass of fewer has its rows
computed one by one, at several times the cost. Rows of all heads, one head behind the other, are dealt to the threads in four
parts for each, and a tile ends where a part or a head does: with some numbers of heads most tiles are fragments.

    9 heads of 64 rows, 2 threads, parts of 72 rows: 64 8|56 16|48 24|40 32|32 40|24 48|16 56|8 64: 16 tiles where 9 would do

Measured with SmolLM2 (9 heads) in Q4_1 behind 7,552 tokens in f16, in CPU seconds: 64 rows 1.4 on one thread and 2.7 on two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

TILE_ROWS = 64
_PARTS = 4  # for each thread
_ONE_BY_ONE, _TOGETHER = 4.3, 1.3  # what a multiplication of attention costs, of one with the weights: measured as above


@dataclass(frozen=True, slots=True)
class Tiles:
    """`row_work`: multiplications with the weights for each row; `key_work`: of attention for each row and token before it."""

    heads: int
    threads: int
    row_work: int
    key_work: int

    def count(self, rows: int) -> int:
        """Return how many tiles a pass of so many rows has.

        >>> [Tiles(9, threads, 0, 0).count(64) for threads in (1, 2)], Tiles(32, 2, 0, 0).count(64)
        ([9, 16], 32)
        """
        whole = rows * self.heads
        parts = 1 if self.threads == 1 else max(self.threads, min(whole, _PARTS * self.threads))
        size = -(-whole // parts)
        ends = {*range(0, whole, size), *range(0, whole, rows), whole}
        return sum(-(-(end - first) // TILE_ROWS) for first, end in pairwise(sorted(ends)))

    def grain(self, most: int) -> int:
        """Return the fewest rows, of whole tiles, that waste none; at most `most`, else a tile.

        >>> [Tiles(heads, 2, 0, 0).grain(512) for heads in (9, 14, 32)]
        [512, 256, 64]
        """
        whole = range(TILE_ROWS, most + 1, TILE_ROWS)
        return next((rows for rows in whole if self.count(rows) * TILE_ROWS == rows * self.heads), TILE_ROWS)

    def missing(self, rows: Sequence[tuple[int, int]]) -> int:
        """Return how many rows of nothing, added to a pass of `rows` (how many, behind how many tokens), have it over sooner:
        what is left to compute behind a long prefix is often somewhat less than a tile."""
        count = sum(many for many, _ in rows)
        if count >= TILE_ROWS:
            return 0
        one_by_one = _ONE_BY_ONE * sum(many * keys for many, keys in rows)
        together = _TOGETHER * TILE_ROWS * self.count(TILE_ROWS) / self.heads * sum(keys for _, keys in rows)
        won = self.key_work * (one_by_one - together) - (TILE_ROWS - count) * self.row_work
        return TILE_ROWS - count if won > 0 else 0
