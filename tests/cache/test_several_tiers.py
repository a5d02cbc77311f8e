"""One prefix out of memory, disk and pool: read from all of them at once, and brought nearer from any of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
from cache_kit import TIMEOUT_S, cache_of, prompt, until

from headstart.testing.fake_kv import TINY, FakeKV
from headstart.testing.round_trip import load
from headstart.tier.base import ReadRange, Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier
from headstart.tier.pool import PoolTier, Timing

PIECES = 30


class Meeting:
    """A real tier whose first read begins when those of all others of a barrier have come, too; `met` tells whether it did."""

    def __init__(self, inner: Tier, barrier: Barrier) -> None:
        self.inner = inner
        self.met = False
        self._barrier = barrier
        self._came = False

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.inner, verb)

    def read(self, reads: Sequence[ReadRange]) -> int:
        if not self._came:
            self._came = True
            with suppress(BrokenBarrierError):
                self._barrier.wait(TIMEOUT_S)
                self.met = True
        return self.inner.read(reads)


@pytest.fixture
def kv() -> FakeKV:
    return prompt(PIECES * 64 + 1)


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    (tmp_path / "pool").mkdir()
    return [
        MemoryTier(8 << 20),
        DiskTier.open(tmp_path / "kv", capacity_bytes=16 << 20),
        PoolTier.open(tmp_path / "pool", capacity_bytes=64 << 20, timing=Timing()),
    ]


def test_a_prefix_that_lies_in_three_tiers_is_read_from_all_of_them_at_once(tiers: list[Tier], kv: FakeKV) -> None:
    barrier = Barrier(3)
    for number, tier in enumerate(tiers):
        assert tier.write(kv.image(number * 10, 10), TINY).reason == "written"
    meeting = [Meeting(tier, barrier) for tier in tiers]
    with cache_of(*meeting) as cache:
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (PIECES * 64, [])
        assert loaded.load.tokens_by_tier == {"memory": 640, "disk": 640, "pool": 640}
        assert [one.met for one in meeting] == [True, True, True]
        assert cache.check() == []


@pytest.mark.parametrize("where", ["disk", "pool"])
def test_a_prefix_is_promoted_from_whichever_tier_it_lies_in(tiers: list[Tier], kv: FakeKV, where: str) -> None:
    (tier,) = [tier for tier in tiers if tier.name == where]
    assert tier.write(kv.image(0, PIECES), TINY).reason == "written"
    with cache_of(*tiers) as cache:

        def lies() -> dict[str, int]:
            with cache.match(kv.tokens) as lease:
                return lease.tokens_by_tier

        assert lies() == {where: PIECES * 64}
        assert cache.promote(kv.tokens, most_bytes=1 << 30)
        until(lambda: not cache.promoting)
        assert lies() == {"memory": PIECES * 64}
        assert load(cache, kv).wrong == []
