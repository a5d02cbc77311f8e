"""How many rows are computed at once: as libllama's attention deals them to its threads, and as long as one may wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headstart.engine.llama.stepping import Stepper
from headstart.engine.llama.tiles import Tiles
from headstart.policy.pacing import Pace


def dealt(rows: int, heads: int, threads: int) -> int:
    """Deal rows of all heads to threads, one tile after the other, as ggml's flash attention does."""
    whole, parts = rows * heads, threads
    if threads > 1:
        size = -(-whole // (4 * threads))
        parts = max(threads, -(-whole // size))
    size, tiles = -(-whole // parts), 0
    for first in range(0, whole, size):
        at, end = first, min(first + size, whole)
        while at < end:
            at += min(64, end - at, rows - at % rows)
            tiles += 1
    return tiles


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("heads", [1, 9, 14, 32])
def test_tiles_are_counted_as_they_are_dealt(heads: int, threads: int) -> None:
    tiles = Tiles(heads, threads, row_work=1, key_work=1)
    assert all(tiles.count(rows) == dealt(rows, heads, threads) for rows in range(64, 600, 17))


def test_a_pass_is_filled_up_where_a_tile_is_sooner_and_never_for_answers() -> None:
    small = Tiles(9, 1, row_work=134_515_008, key_work=2 * 30 * 576)  # SmolLM2
    assert [small.missing([(rows, 7552)]) for rows in (1, 16, 24, 32, 63, 64, 91)] == [0, 0, 0, 32, 1, 0, 0]
    assert [small.missing([(rows, 512)]) for rows in (32, 47, 60)] == [0, 0, 4]
    assert small.missing([(1, 8000)] * 40) == 0
    fragments = Tiles(9, 2, row_work=134_515_008, key_work=2 * 30 * 576)
    assert [fragments.missing([(rows, 7552)]) for rows in (32, 48)] == [0, 16]


def test_prompts_are_computed_in_grains_where_one_may_be_waited_for() -> None:
    def chunk(token_s: float | None, grain: int) -> int:
        stepper = SimpleNamespace(_pace=Pace(token_s=token_s), _context=SimpleNamespace(grain_rows=grain), _most_tokens=1024)
        return Stepper.chunk_tokens.fget(stepper)  # type: ignore[attr-defined, no-any-return]

    assert [chunk(token_s, 512) for token_s in (None, 0.001, 0.0035, 0.01, 0.02)] == [256, 1024, 512, 512, 64]
    assert [chunk(token_s, 64) for token_s in (0.0035, 0.01, 0.02, 0.2)] == [512, 192, 64, 64]
