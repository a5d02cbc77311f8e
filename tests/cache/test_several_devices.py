"""The prefix cache over several directories: prompts are spread and come back whole; a bad device costs what lies on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_kit import prompt

from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.cache.source import Source
from headstart.config import CacheConfig
from headstart.metrics import Counters
from headstart.testing.fake_kv import IDENTITY, STATE_BYTES, STATEFUL, TINY, FakeDestination, FakeKV
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.testing.round_trip import hit_tokens, load, save
from headstart.tier.base import ExtentId
from headstart.tier.devices import DeviceTier
from headstart.tier.disk import DiskTier, RealDisk
from headstart.tier.lookup_thread import Patience
from headstart.tier.memory import MemoryTier

PIECE = TINY.piece_tokens


class Disks:
    """Two directories as one tier, and the disk of each."""

    def __init__(self, root: Path) -> None:
        self.disks: dict[str, FaultyDisk] = {}
        self.tier = DeviceTier.open(
            [root / "a", root / "b"], open_directory=self._open, capacities=lambda used: [16 << 20] * len(used), look_s=3600.0
        )

    def where(self, kv: FakeKV) -> list[str]:
        """Return the directory in which each block lies."""
        names = {device.serial: device.path.name for device in self.tier.devices}
        extents = self.tier.locate(TINY.digest, kv.keys).extents.tolist()
        return [names.get(self.tier.lane(extent), "") for extent in extents]

    def _open(self, path: Path, capacity_bytes: int) -> DiskTier:
        disk = self.disks[path.name] = FaultyDisk(RealDisk())
        return DiskTier.open(path, capacity_bytes=capacity_bytes, disk=disk)


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


@pytest.fixture
def cache(disks: Disks) -> Iterator[PrefixCache]:
    with PrefixCache([disks.tier], identity=IDENTITY, representation=TINY) as cache:
        yield cache
        for disk in disks.disks.values():
            disk.heal()
        assert cache.check() == []


def converse(cache: PrefixCache, turns: int, *, seed: int = 0) -> FakeKV:
    """Save a prompt that grows turn by turn, an extent each; return its last form."""
    for turn in range(1, turns + 1):
        kv = prompt(2 * turn * PIECE + 1, seed=seed)
        assert save(cache, kv).reason is None
    return kv


def test_a_conversation_is_spread_and_comes_back_whole_after_a_restart(tmp_path: Path) -> None:
    config = CacheConfig(directory=(tmp_path / "a", tmp_path / "b"), capacity="64MiB", memory="0")
    with open_cache(config, identity=IDENTITY, representation=TINY) as cache:
        kv = converse(cache, 6)
        assert cache.warnings == ()
        each = cache.statistics().tiers[0].devices
        assert [one.extents for one in each] == [3, 3]
        assert sum(one.capacity_bytes for one in each) == 64 << 20
    with open_cache(config, identity=IDENTITY, representation=TINY) as cache:
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (12 * PIECE, [])
        assert cache.check() == []


def test_a_long_prompt_is_cut_so_that_every_device_has_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.tier.devices.tier.LAYER_BYTES", 4 * TINY.bytes_per_token * PIECE // TINY.layers)
    config = CacheConfig(directory=(tmp_path / "a", tmp_path / "b"), capacity="64MiB", memory="0")
    with open_cache(config, identity=IDENTITY, representation=TINY) as cache:
        kv = prompt(24 * PIECE + 1)
        assert save(cache, kv).stored_tokens == 24 * PIECE
        assert min(one.extents for one in cache.statistics().tiers[0].devices) >= 3
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (24 * PIECE, [])


def test_reads_that_hang_on_one_device_leave_the_threads_of_the_others_alone(disks: Disks, cache: PrefixCache) -> None:
    conversations = [converse(cache, 1, seed=seed) for seed in range(4)]
    stuck = next(kv for kv in conversations if set(disks.where(kv)) == {"a"})
    fine = next(kv for kv in conversations if set(disks.where(kv)) == {"b"})
    disks.disks["a"].inject(DiskFault("read", "stall"))
    leases = [cache.match(stuck.tokens.tolist()) for _ in range(20)]
    loads = [lease.load(into=FakeDestination(TINY, 2)) for lease in leases]  # more than there are threads
    assert disks.disks["a"].stalled.wait(10)
    loaded = load(cache, fine)
    assert (loaded.usable_tokens, loaded.wrong) == (2 * PIECE, [])
    assert not any(one.done for one in loads)
    disks.disks["a"].heal()
    assert {one.result() for one in loads} == {2 * PIECE}
    for lease in leases:
        lease.release()


def test_what_lies_before_a_device_that_fails_is_kept_and_the_rest_is_saved_elsewhere(disks: Disks, cache: PrefixCache) -> None:
    kv = converse(cache, 4)
    names = disks.where(kv)
    bad = names[2]  # of the second turn
    disks.disks[bad].inject(DiskFault("read", "eio"), DiskFault("probe", "eio"), DiskFault("write", "eio"))
    loaded = load(cache, kv)
    assert (loaded.usable_tokens, loaded.wrong) == (names.index(bad) * PIECE, [])
    for seed in range(1, 9):  # until it is clear that it is the device
        load(cache, converse(cache, 2, seed=seed))
    other = prompt(8 * PIECE + 1, seed=77)
    assert save(cache, other).stored_tokens == 8 * PIECE
    assert bad not in disks.where(other)
    loaded = load(cache, other)
    assert (loaded.usable_tokens, loaded.wrong) == (8 * PIECE, [])


def test_a_tier_whose_devices_are_all_gone_does_not_keep_memory_from_taking_a_prompt(disks: Disks) -> None:
    with PrefixCache([MemoryTier(8 << 20), disks.tier], identity=IDENTITY, representation=TINY, match_timeout_s=20.0) as cache:
        for device in disks.tier.devices:
            device.gone = True
        assert save(cache, prompt(8 * PIECE + 1)).reason == "error"
        assert hit_tokens(cache, prompt(8 * PIECE + 1)) == 8 * PIECE
        counters = cache.statistics().counters
        assert counters["tier_failed_write"] > 0
        assert "save_errors" not in counters


def test_a_state_on_a_device_whose_reads_hang_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Laned(MemoryTier):
        trusted = False
        in_memory = False
        lanes = 2

        def lane(self, extent: ExtentId) -> int:
            return extent

    tier, kv = Laned(1 << 20), prompt(2 * PIECE, representation=STATEFUL)
    for first in (0, 1):
        assert tier.write(kv.image(first, 1, state_bytes=STATE_BYTES), STATEFUL).stored
    source = Source(tier, counters=Counters(), patience_s=20.0)
    hung = source.locate(STATEFUL.digest, kv.keys, Patience(20.0))
    assert hung is not None
    monkeypatch.setattr(source.pool_of(ExtentId(int(hung.extents[1]))), "stalled_s", lambda: 100.0)
    found = source.locate(STATEFUL.digest, kv.keys, Patience(20.0), longest_read_s=50.0)
    assert found is not None
    assert found.states is not None
    assert found.extents.tolist() == found.states.tolist() == [hung.extents[0], -1]
    source.close(time.monotonic() + 20, tier_too=True)
