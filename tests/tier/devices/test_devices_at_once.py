"""Commands, and processes that start, at the same moment: of two changes to the list of devices none is lost."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from devices_kit import Set, device, on, whole, write

from headstart.errors import TierUnavailable
from headstart.policy.retention import Retention
from headstart.testing.fake_kv import TINY
from headstart.testing.tier_contract import located, prompt
from headstart.tier.base import ExtentId, Terms
from headstart.tier.devices import add_device, devices_of, drain_device
from headstart.tier.devices.listing import read_list
from headstart.tier.disk import DiskTier


def test_devices_that_are_added_at_once_are_all_added(tmp_path: Path) -> None:
    DiskTier.open(tmp_path / "a", capacity_bytes=1 << 20).close()
    names = [f"d{n}" for n in range(6)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: add_device(tmp_path / "a", tmp_path / name), names))
    assert sorted(entry.path.name for entry in devices_of(tmp_path / "a")) == ["a", *names]
    assert {one.set for name in ("a", *names) if (one := read_list(tmp_path / name))} == {read_list(tmp_path / "a").set}  # type: ignore[union-attr]


def test_processes_that_start_at_once_on_new_directories_agree_on_one_set(tmp_path: Path) -> None:
    sets = [Set(tmp_path, ["a", "b"]) for _ in range(4)]
    with ThreadPoolExecutor(len(sets)) as pool:
        tiers = list(pool.map(lambda one: one.open(), sets))
    assert [len(tier.devices) for tier in tiers] == [2] * 4
    assert [tier.warnings for tier in tiers] == [[]] * 4
    write(tiers[0], prompt(4), extents=2)
    for tier in tiers:
        tier.refresh()
        assert set(on(tier, prompt(4))) == {"a", "b"}
        tier.close()


def test_a_decision_made_while_a_device_was_drained_stays(tmp_path: Path) -> None:
    two = Set(tmp_path, ["a", "b"])
    tier = two.open()
    drain_device(tmp_path / "a", tmp_path / "b")
    two.later(tier)
    add_device(tmp_path / "a", tmp_path / "b")  # somebody has thought better of it
    assert not tier.tend()
    assert {entry.state for entry in devices_of(tmp_path / "a")} == {"active"}
    two.later(tier)
    assert device(tier, "b").takes_writes
    tier.close()


def test_a_pin_that_no_other_device_can_keep_keeps_its_extent_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Set(tmp_path, ["a", "b"])
    tier = two.open()
    kv = prompt(4)
    write(tier, kv, extents=2)
    [pinned] = {one for one, name in zip(located(tier, kv), on(tier, kv), strict=True) if name == "b"}
    assert tier.pin([ExtentId(pinned)], until_ms=None) == [True]
    drain_device(tmp_path / "a", tmp_path / "b")
    two.later(tier)
    monkeypatch.setattr(device(tier, "a").tier, "pin", lambda extents, until_ms: [False] * len(extents))
    for _ in range(20):
        tier.tend()
    info = tier.info(ExtentId(pinned))
    assert info is not None
    assert info.pinned_until_ms is not None
    assert whole(tier, kv)
    tier.close()


def test_two_processes_that_drain_one_device_leave_everything_readable(tmp_path: Path) -> None:
    two = Set(tmp_path, ["a", "b"])
    tier, other = two.open(), Set(tmp_path, ["a", "b"]).open()
    for seed in range(12):
        write(tier, prompt(4, seed=seed), extents=2)
    drain_device(tmp_path / "a", tmp_path / "b")
    for one in (tier, other):
        two.later(one)
    for _ in range(1000):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: one.tend(), (tier, other)))
        if {entry.path.name: entry.state for entry in devices_of(tmp_path / "a")}["b"] == "drained":
            break
    for one in (tier, other):
        one.look()
        one.refresh()
        assert all(whole(one, prompt(4, seed=seed)) for seed in range(12))
        assert {name for seed in range(12) for name in on(one, prompt(4, seed=seed))} == {"a"}
        assert one.check() == []
        one.close()


def test_a_quota_holds_over_all_devices_also_over_one_that_was_added(tmp_path: Path) -> None:
    alone = Set(tmp_path, ["a"])
    quota = 1 << 20
    tier = alone.open(retention=Retention.of("", f"acme={quota}"))
    add_device(tmp_path / "a", tmp_path / "b")
    alone.later(tier)
    assert len(tier.devices) == 2
    for seed in range(100):
        assert tier.write(prompt(4, seed=seed).image(), TINY, terms=Terms(tenant="acme")).stored
    held = tier.statistics().live_bytes_by_tenant["acme"]
    assert quota // 2 < held <= quota
    tier.close()


@pytest.mark.parametrize("name", ["new\nline", "esc\x1b[2J", os.fsdecode(b"\xff")])
def test_a_directory_whose_name_cannot_be_told_is_no_device(tmp_path: Path, name: str) -> None:
    DiskTier.open(tmp_path / "a", capacity_bytes=1 << 20).close()
    with pytest.raises(TierUnavailable, match="cannot be printed"):
        add_device(tmp_path / "a", tmp_path / name)
    assert not (tmp_path / name).exists()
    tier = Set(tmp_path, ["a", "b", name]).open()
    assert [one.path.name for one in tier.devices] == ["a", "b"]
    assert "cannot be printed" in tier.warnings[0]
    tier.close()
