"""A device that dies costs only its own blocks, and one that hangs holds up nobody else."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Event

import pytest
from devices_kit import Set, device, on, whole, write

from headstart.errors import StoreError, TierUnavailable
from headstart.testing.fake_kv import STATE_BYTES, STATEFUL, TINY
from headstart.testing.faulty_disk import DiskFault
from headstart.testing.tier_contract import located, prompt
from headstart.tier.base import ExtentId, ReadRange
from headstart.tier.devices import device as device_module
from headstart.tier.lookup_thread import Patience

FAILS = [DiskFault("read", "eio"), DiskFault("write", "eio"), DiskFault("probe", "eio"), DiskFault("open", "eio")]


@pytest.fixture
def two(tmp_path: Path) -> Set:
    return Set(tmp_path, ["a", "b"])


def test_consecutive_extents_of_a_prompt_go_to_different_devices(two: Set) -> None:
    tier = two.open()
    kv = prompt(8)
    write(tier, kv, extents=4)
    assert sorted(on(tier, kv)) == ["a"] * 4 + ["b"] * 4
    assert whole(tier, kv)
    tier.close()


def test_a_device_that_dies_before_a_write_leaves_it_to_the_others(two: Set) -> None:
    tier = two.open()
    two.disks["a"].inject(*FAILS)
    for seed in range(4):
        write(tier, prompt(4, seed=seed))
    assert all(whole(tier, prompt(4, seed=seed)) for seed in range(4))
    assert {where for seed in range(4) for where in on(tier, prompt(4, seed=seed))} == {"b"}
    tier.close()


def test_a_device_whose_every_read_fails_is_taken_out_and_comes_back_by_itself(two: Set) -> None:
    tier = two.open()
    for seed in range(8):
        write(tier, prompt(4, seed=seed), extents=2)
    before = [on(tier, prompt(4, seed=seed)) for seed in range(8)]
    extents = [info.id for info in tier.scan() if tier.lane(info.id) == device(tier, "a").serial][:3]
    assert tier.lease(extents) == [True] * 3
    two.disks["a"].inject(DiskFault("read", "eio"), DiskFault("probe", "eio"))
    for extent in extents:
        with pytest.raises(OSError, match="injected"):
            tier.read([one_page(extent)])
    tier.release(extents)
    assert device(tier, "a").out
    for seed in range(8):  # its blocks are misses, the others' are what they were
        assert on(tier, prompt(4, seed=seed)) == ["b" if name == "b" else "" for name in before[seed]]
    two.later(tier)
    assert device(tier, "a").out  # it still fails
    two.disks["a"].heal()
    two.later(tier)
    assert [on(tier, prompt(4, seed=seed)) for seed in range(8)] == before
    assert all(whole(tier, prompt(4, seed=seed)) for seed in range(8))
    assert tier.statistics().counters["taken_out"] == 1
    tier.close()


def test_one_extent_that_cannot_be_read_does_not_cost_its_device(two: Set) -> None:
    tier = two.open()
    kv = prompt(4)
    write(tier, kv)
    extent = ExtentId(located(tier, kv)[0])
    name = on(tier, kv)[0]
    assert tier.lease([extent]) == [True]
    two.disks[name].inject(DiskFault("read", "eio"))
    for _ in range(5):
        with pytest.raises(OSError, match="injected"):
            tier.read([one_page(extent)])
    two.disks[name].heal()
    tier.release([extent])
    assert not device(tier, name).out
    assert whole(tier, kv)
    tier.close()


def test_failures_between_reads_that_go_well_do_not_cost_a_device(two: Set) -> None:
    tier = two.open()
    for seed in range(8):
        write(tier, prompt(4, seed=seed))
    extents = [info.id for info in tier.scan() if tier.lane(info.id) == device(tier, "a").serial][:4]
    assert tier.lease(extents) == [True] * 4
    for extent in extents[:3]:
        two.disks["a"].inject(DiskFault("read", "eio"))
        with pytest.raises(OSError, match="injected"):
            tier.read([one_page(extent)])
        two.disks["a"].heal()
        tier.read([one_page(extents[3])])
    assert not device(tier, "a").out
    tier.release(extents)
    tier.close()


def test_a_write_that_fails_midway_goes_to_another_device_and_is_read_whole(two: Set) -> None:
    tier = two.open()
    for name in ("a", "b"):
        two.disks[name].inject(DiskFault("write", "short", times=4))
        write(tier, prompt(4, seed=ord(name)), extents=2)
        two.disks[name].heal()
        two.now += 60
    assert whole(tier, prompt(4, seed=ord("a")))
    assert whole(tier, prompt(4, seed=ord("b")))
    tier.close()


def test_a_device_that_hangs_in_a_write_is_passed_over_until_it_answers(two: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.tier.devices.writing.CHANGE_PATIENCE_S", 0.2)
    tier = two.open()
    two.disks["a"].inject(DiskFault("write", "stall"))
    for seed in range(6):
        write(tier, prompt(4, seed=seed))
    assert two.disks["a"].stalled.is_set()
    assert {where for seed in range(6) for where in on(tier, prompt(4, seed=seed))} == {"b"}
    assert device(tier, "a").why_not() == "it does not answer"
    two.disks["a"].heal()
    device(tier, "a").changes.hand_over(lambda: None).result(20)
    two.now += 60
    for seed in range(10, 16):
        write(tier, prompt(4, seed=seed))
    assert {where for seed in range(10, 16) for where in on(tier, prompt(4, seed=seed))} == {"a", "b"}
    assert all(whole(tier, prompt(4, seed=seed)) for seed in (*range(6), *range(10, 16)))
    # What the hung write brought in the end was thrown away: its memory had been given to somebody else.
    assert tier.check() == []
    assert tier.statistics().extents == 12
    tier.close()


@pytest.mark.parametrize("state_bytes", [0, STATE_BYTES])
def test_of_what_a_hung_write_brought_only_that_is_thrown_away(
    two: Set, monkeypatch: pytest.MonkeyPatch, state_bytes: int
) -> None:
    monkeypatch.setattr("headstart.tier.devices.writing.CHANGE_PATIENCE_S", 0.2)
    tier = two.open()
    representation = STATEFUL if state_bytes else TINY
    kv = prompt(2, representation=representation)
    a = device(tier, "a")
    assert a.tier is not None
    assert a.tier.write(kv.image(1, 1), representation).stored  # the second block is there
    there = [info.id for info in a.tier.scan()]
    device(tier, "b").refuse()
    two.disks["a"].inject(DiskFault("write", "stall"))
    assert not tier.write(kv.image(0, 2, state_bytes=state_bytes), representation).stored
    two.disks["a"].heal()
    a.changes.hand_over(lambda: None).result(20)
    assert [info.id for info in a.tier.scan()] == there
    assert tier.check() == []
    tier.close()


def test_a_device_that_hangs_in_a_lookup_does_not_make_the_tier_look_hung(two: Set) -> None:
    tier = two.open()
    for seed in range(4):
        write(tier, prompt(4, seed=seed), extents=2)
    before = [on(tier, prompt(4, seed=seed)) for seed in range(4)]
    two.disks["a"].inject(DiskFault("entries", "stall"), DiskFault("facts", "stall"))
    two.now += 1  # a look at other processes' journals is due
    tier.locate(TINY.digest, prompt(1, seed=99).keys)
    assert two.disks["a"].stalled.is_set()
    for seed in range(4):
        assert on(tier, prompt(4, seed=seed)) == ["b" if name == "b" else "" for name in before[seed]]
    two.disks["a"].heal()
    device(tier, "a").lookups.hand_over(lambda: None).result(20)
    assert [on(tier, prompt(4, seed=seed)) for seed in range(4)] == before
    tier.close()


def test_a_lookup_that_is_late_stops_no_write_until_it_is_very_late(two: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = two.open()
    a, ends = device(tier, "a"), Event()
    monkeypatch.setattr(device_module, "SILENT_S", 600.0)
    late = a.look_up(lambda _: ends.wait(30))
    with pytest.raises(StoreError, match="does not answer"):
        a.answer_of(late, Patience(0.0))
    assert not a.answers
    device(tier, "b").refuse()
    write(tier, prompt(4))
    monkeypatch.setattr(device_module, "SILENT_S", 1e-9)
    assert tier.write(prompt(4, seed=1).image(), TINY).reason == "stopped"
    ends.set()
    a.lookups.hand_over(lambda: None).result(20)
    write(tier, prompt(4, seed=1))
    assert on(tier, prompt(4)) == on(tier, prompt(4, seed=1)) == ["a"] * 4
    tier.close()


def test_a_lease_that_comes_too_late_is_given_back(two: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = two.open()
    kv = prompt(4)
    write(tier, kv)
    extent, name = ExtentId(located(tier, kv)[0]), on(tier, kv)[0]
    two.disks[name].inject(DiskFault("lock_range", "stall"))
    assert tier.lease([extent]) == [False]
    two.disks[name].heal()
    device(tier, name).lookups.hand_over(lambda: None).result(20)
    assert tier.delete([extent], reason="user") == 1
    tier.close()


def test_opening_goes_on_without_a_directory_that_cannot_be_opened_and_takes_it_in_later(two: Set) -> None:
    tier = two.open()
    for seed in range(4):
        write(tier, prompt(4, seed=seed), extents=2)
    before = [on(tier, prompt(4, seed=seed)) for seed in range(4)]
    tier.close()
    two.refused.add("a")
    again = two.open()
    assert len(again.warnings) == 1
    assert "no such disk" in again.warnings[0]
    assert sorted(one.paused for one in again.statistics().devices) == ["", "not there"]
    for seed in range(4):
        assert on(again, prompt(4, seed=seed)) == ["b" if name == "b" else "" for name in before[seed]]
    write(again, prompt(4, seed=9))
    two.later(again)
    assert len(again.warnings) == 1  # said once
    two.refused.clear()
    two.later(again)
    assert [on(again, prompt(4, seed=seed)) for seed in range(4)] == before
    assert all(whole(again, prompt(4, seed=seed)) for seed in (0, 1, 2, 3, 9))
    again.close()


def test_nothing_is_begun_anew_where_a_device_is_not_mounted(two: Set, tmp_path: Path) -> None:
    tier = two.open()
    for seed in range(4):
        write(tier, prompt(4, seed=seed), extents=2)
    tier.close()
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    (tmp_path / "b").mkdir()  # an empty mount point
    again = two.open()
    assert "mount it" in again.warnings[0]
    write(again, prompt(4, seed=9))
    assert list((tmp_path / "b").iterdir()) == []
    (tmp_path / "b").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "b")
    two.later(again)
    assert all(whole(again, prompt(4, seed=seed)) for seed in (0, 1, 2, 3, 9))
    again.close()


def test_a_mount_that_vanishes_while_running_is_a_miss_and_nothing_is_written_below_it(
    two: Set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = two.open()
    for seed in range(4):
        write(tier, prompt(4, seed=seed), extents=2)
    before = [on(tier, prompt(4, seed=seed)) for seed in range(4)]
    real = device_module._file_system
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(device_module, "_file_system", lambda path: -1 if path.name == "b" else real(path))
    for seed in range(4):
        assert on(tier, prompt(4, seed=seed)) == ["a" if name == "a" else "" for name in before[seed]]
    write(tier, prompt(4, seed=9), extents=2)
    two.later(tier)
    assert [one.path.name for one in tier.devices] == ["a"]
    assert list((tmp_path / "b").iterdir()) == []
    (tmp_path / "b").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "b")
    monkeypatch.setattr(device_module, "_file_system", real)
    two.later(tier)
    assert [on(tier, prompt(4, seed=seed)) for seed in range(4)] == before
    assert all(whole(tier, prompt(4, seed=seed)) for seed in (0, 1, 2, 3, 9))
    assert tier.statistics().counters["devices_lost"] == 1
    tier.close()


def test_a_device_can_be_read_alone(two: Set, tmp_path: Path) -> None:
    tier = two.open()
    kv = prompt(4)
    write(tier, kv, extents=2)
    names = on(tier, kv)
    tier.close()
    shutil.rmtree(tmp_path / "b")
    alone = Set(tmp_path, ["a"])
    (tmp_path / "a" / "devices.json").unlink()
    tier = alone.open()
    assert on(tier, kv) == ["a" if name == "a" else "" for name in names]
    assert tier.check() == []
    tier.close()


def test_a_tier_of_which_no_directory_can_be_opened_says_why(two: Set) -> None:
    two.refused |= {"a", "b"}
    with pytest.raises(TierUnavailable, match="no such disk"):
        two.open()


def one_page(extent: ExtentId) -> ReadRange:
    return ReadRange(extent, 0, [memoryview(bytearray(4096))])
