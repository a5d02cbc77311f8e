"""A scan of everything lets lookups in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_kit import CAPACITY, save

from headstart.tier.disk import DiskTier
from headstart.tier.disk import tier as tier_module


def test_a_scan_holds_the_books_for_a_part_at_a_time_and_tells_each_extent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_SCAN_ROWS", 2)
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY)
    for seed in range(7):
        assert save(tier, seed)
    at_once, infos = [], tier._store.books.infos
    monkeypatch.setattr(tier._store.books, "infos", lambda rows, **more: (at_once.append(len(rows)), infos(rows, **more))[1])
    assert len({info.id for info in tier.scan()}) == 7
    assert max(at_once) == 2
    tier.close()
