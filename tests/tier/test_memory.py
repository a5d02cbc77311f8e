"""The memory tier keeps every promise of a tier, and its own: trusted, the least recently used first, leases survive close."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headstart.testing.fake_kv import STATE_BYTES, STATEFUL, TINY
from headstart.testing.tier_contract import TierContract, located, prompt, put, read
from headstart.tier import memory
from headstart.tier.arena import Arena
from headstart.tier.base import ReadRange, Tier
from headstart.tier.memory import MemoryTier


class TestMemoryTier(TierContract):
    @pytest.fixture
    def make_tier(self) -> Callable[[int], Tier]:
        return MemoryTier


def test_bytes_from_memory_are_trusted() -> None:
    assert MemoryTier(1 << 20).trusted


def test_memory_for_the_next_saves_is_made_ready_step_by_step_while_nothing_else_is_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touched: list[int] = []
    touch = Arena.touch

    def noted(self: Arena, nbytes: int) -> bool:
        touched.append(nbytes)
        return touch(self, nbytes)

    monkeypatch.setattr(Arena, "touch", noted)
    monkeypatch.setattr(memory, "_AHEAD_BYTES", 12 << 20)
    tier = MemoryTier(64 << 20)
    assert tier.tend()
    assert not tier.tend()
    assert not tier.tend()
    assert touched == [8 << 20, 4 << 20]
    put(tier, prompt(4))
    tier.tend()
    assert sum(touched) == (12 << 20) + tier.statistics().allocated_bytes
    tier.close()
    assert not tier.tend()


def test_an_extent_under_a_lease_stays_readable_after_close() -> None:
    tier = MemoryTier(1 << 20)
    kv = prompt(4)
    extent = put(tier, kv)
    put(tier, prompt(4, seed=1))
    assert tier.lease([extent]) == [True]
    tier.close()
    assert tier.statistics().extents == 1
    buffer = bytearray(4096)
    tier.read([ReadRange(extent, 0, [memoryview(buffer)])])
    assert buffer == bytes(kv.image()[:4096])
    assert tier.write(prompt(2, seed=2).image(), TINY).reason == "stopped"
    tier.release([extent])
    assert tier.statistics().extents == 0


def test_nothing_is_evicted_for_an_extent_that_leases_leave_no_room_for() -> None:
    image_bytes = prompt(4).image().nbytes
    tier = MemoryTier(3 * image_bytes)
    kept = [prompt(4, seed=seed) for seed in range(3)]
    extents = [put(tier, kv) for kv in kept]
    tier.lease(extents[:2])
    assert tier.write(prompt(8, seed=9).image(), TINY).reason == "full"
    assert located(tier, kept[2]) == [extents[2]] * 4
    tier.release(extents[:2])


def test_a_capacity_below_one_page_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        MemoryTier(4095)


def test_reading_does_not_need_alignment() -> None:
    tier = MemoryTier(1 << 20)
    kv = prompt(4)
    assert read(tier, put(tier, kv), 4097, 333) == bytes(kv.image()[4097 : 4097 + 333])


def test_a_corrupt_extent_goes_under_its_lease_and_is_written_anew() -> None:
    tier = MemoryTier(1 << 20)
    kv = prompt(4)
    extent = put(tier, kv)
    tier.lease([extent, extent])
    assert tier.delete([extent], reason="corrupt") == 1
    assert (located(tier, kv), tier.info(extent), tier.lease([extent])) == ([-1] * 4, None, [False])
    again = put(tier, kv)
    tier.release([extent, extent])
    assert tier.delete([extent], reason="corrupt") == 0
    assert located(tier, kv) == [again] * 4
    assert (tier.check(), tier.statistics().live_bytes) == ([], kv.image().nbytes)


def test_a_state_that_lies_in_two_extents_is_found_in_the_other_one_when_one_goes() -> None:
    tier = MemoryTier(1 << 20)
    kv = prompt(2, representation=STATEFUL)
    ids = []
    for first in (1, 0):
        assert tier.write(kv.image(first, 2 - first, state_bytes=STATE_BYTES), STATEFUL).reason == "written"
        ids.append(next(info.id for info in tier.scan() if info.id not in ids))
    for gone, left in ((ids[0], [-1, ids[1]]), (ids[1], None)):
        assert tier.delete([gone], reason="user") == 1
        states = tier.locate(STATEFUL.digest, kv.keys).states
        assert (None if states is None else states.tolist()) == left
        assert tier.check() == []
