"""A directory in use for years: what a process remembers of it does not grow with what ever was there."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_kit import CAPACITY, Clock, extent_of, found, save, segments

from headstart.tier.disk import DiskTier, books


def test_segments_that_are_long_gone_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "GONE_KEPT", 10)
    tiers = [DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY, clock=Clock()) for _ in range(2)]
    known = []
    for turn in range(0, 120, 2):
        for seed, tier in enumerate(tiers, start=turn):
            assert save(tier, seed)
            tier._store.seal(list(tier._store.appending.values()))
            if turn > 4:
                assert tier.delete([extent_of(tier, seed - 4)], reason="user") == 1
        known.append(max(len(tier._store.books.segments) for tier in tiers))
    assert max(known[30:]) <= len(segments(tmp_path / "kv")) + 3 * 10
    for tier in tiers:
        tier._store.renew()  # says of what is removed that it is so: names that the other one has forgotten
        tier.refresh()
    assert save(tiers[0], 200)
    tiers[1].refresh()
    there = [found(tier, range(201)) for tier in tiers]
    assert there[0] == there[1] >= {119, 200}
    for tier in tiers:
        assert tier.check() == []
        tier.close()
