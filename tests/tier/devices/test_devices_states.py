"""Boundary states on several devices: found wherever they lie, written once, carried over with what they stand behind."""

from __future__ import annotations

from pathlib import Path

from devices_kit import Set, device

from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.fake_kv import IDENTITY, STATE_BYTES, STATEFUL, FakeKV
from headstart.testing.round_trip import load, save
from headstart.testing.tier_contract import prompt, read
from headstart.tier.base import ExtentId, Tier
from headstart.tier.devices import DeviceTier, drain_device


def states(tier: Tier, kv: FakeKV) -> dict[int, ExtentId]:
    """Return the extents with states by how many pieces they stand behind, each compared to the bit."""
    found = tier.locate(STATEFUL.digest, kv.keys).states
    there = {} if found is None else {n: ExtentId(one) for n, one in enumerate(found.tolist(), 1) if one >= 0}
    for behind, extent in there.items():
        info = tier.info(extent)
        assert info is not None
        image = kv.image(behind - info.blocks, info.blocks, state_bytes=STATE_BYTES)
        assert read(tier, extent, 0, len(image)) == bytes(image)
    return there


def filled(tier: DeviceTier) -> FakeKV:
    """A prompt in four extents, the last with a state, and two states by themselves."""
    kv = prompt(16, representation=STATEFUL)
    for first in range(0, 16, 4):
        assert tier.write(kv.image(first, 4, state_bytes=STATE_BYTES * (first == 12)), STATEFUL).stored
    for behind in (6, 9):
        for reason in ("written", "present"):
            assert tier.write(kv.image(behind - 1, 1, state_bytes=STATE_BYTES), STATEFUL).reason == reason
    return kv


def test_a_state_is_found_on_whichever_device_it_lies_and_is_written_once(tmp_path: Path) -> None:
    tier = Set(tmp_path, ["a", "b"]).open()
    kv = filled(tier)
    assert sorted(states(tier, kv)) == [6, 9, 16]
    assert len({tier.lane(info.id) for info in tier.scan()}) == 2
    assert tier.statistics().extents == 6
    assert tier.check() == []
    tier.close()


def test_a_device_that_is_drained_hands_its_states_over(tmp_path: Path) -> None:
    two = Set(tmp_path, ["a", "b"])
    tier = two.open()
    kv = filled(tier)
    drain_device(tmp_path / "a", tmp_path / "b")
    two.later(tier)
    for _ in range(30):
        tier.tend()
    two.later(tier)
    gone = device(tier, "b").serial
    assert sorted(states(tier, kv)) == [6, 9, 16]
    assert not any(tier.lane(extent) == gone for extent in states(tier, kv).values())
    assert (tier.locate(STATEFUL.digest, kv.keys).extents >= 0).all()
    tier.close()


def test_a_state_that_is_larger_than_an_extent_may_be_otherwise_is_taken(tmp_path: Path) -> None:
    tier = Set(tmp_path, ["a", "b"]).open(each=64 << 20)
    assert tier.max_extent_bytes(STATEFUL) < (4 << 20)
    with PrefixCache([tier], identity=IDENTITY, representation=STATEFUL, match_timeout_s=20.0) as cache:
        kv = FakeKV(STATEFUL, list(range(10 * 64 + 1)))
        assert save(cache, kv, states=kv.states(4, 10, nbytes=4 << 20)).stored_tokens == 640
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (640, [])
