"""Devices are added, drained and removed while the tier is in use; the list that says so is strictly read."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Event

import pytest
from devices_kit import Set, device, on, whole, write

from headstart.errors import StoreError, TierUnavailable
from headstart.testing.fake_kv import TINY, FakeKV
from headstart.testing.tier_contract import located, prompt
from headstart.tier.base import ExtentId, ReadRange
from headstart.tier.devices import DeviceTier, add_device, devices_of, drain_device, remove_device
from headstart.tier.devices.listing import decode_list, read_list
from headstart.tier.disk.directory import DEVICES


@pytest.fixture
def two(tmp_path: Path) -> Set:
    return Set(tmp_path, ["a", "b"])


def drained(tier: DeviceTier) -> None:
    for _ in range(1000):
        if not tier.tend():
            return
    raise AssertionError("there was always more to do")


def test_one_directory_alone_has_no_list(tmp_path: Path) -> None:
    tier = Set(tmp_path, ["a"]).open()
    write(tier, prompt(4))
    tier.close()
    assert not (tmp_path / "a" / DEVICES).exists()
    assert [entry.path for entry in devices_of(tmp_path / "a")] == [tmp_path / "a"]


def test_every_directory_says_which_devices_there_are(two: Set, tmp_path: Path) -> None:
    two.open().close()
    a, b = read_list(tmp_path / "a"), read_list(tmp_path / "b")
    assert a is not None
    assert b is not None
    assert (a.set, a.revision, a.devices) == (b.set, b.revision, b.devices)
    assert a.this != b.this
    assert [entry.path for entry in devices_of(tmp_path / "b")] == [tmp_path / "a", tmp_path / "b"]


def test_a_device_is_added_to_one_that_ran_alone(tmp_path: Path) -> None:
    alone = Set(tmp_path, ["a"])
    tier = alone.open()
    write(tier, prompt(4))
    held = ExtentId(located(tier, prompt(4))[0])
    assert tier.lease([held]) == [True]
    add_device(tmp_path / "a", tmp_path / "b")
    alone.later(tier)
    assert [one.path.name for one in tier.devices] == ["a", "b"]
    assert located(tier, prompt(4)) == [held] * 4  # names stay what they were
    tier.release([held])
    write(tier, prompt(8, seed=1), extents=4)
    assert set(on(tier, prompt(8, seed=1))) == {"a", "b"}
    assert whole(tier, prompt(4))
    assert whole(tier, prompt(8, seed=1))
    assert tier.check() == []
    tier.close()
    again = alone.open()  # configured is still one
    assert whole(again, prompt(8, seed=1))
    again.close()


def test_what_a_drained_device_had_is_read_from_the_others(two: Set, tmp_path: Path) -> None:
    tier = two.open()
    for seed in range(6):
        write(tier, prompt(4, seed=seed), extents=2)
    tier.pin([ExtentId(located(tier, prompt(4, seed=0))[0])], until_ms=None)
    with pytest.raises(TierUnavailable, match="has not been drained"):
        remove_device(tmp_path / "a", tmp_path / "b")
    drain_device(tmp_path / "a", tmp_path / "b")
    two.later(tier)
    write(tier, prompt(4, seed=9), extents=2)
    assert set(on(tier, prompt(4, seed=9))) == {"a"}  # nothing new goes there
    drained(tier)
    assert [entry.state for entry in devices_of(tmp_path / "a")] == ["active", "drained"]
    for seed in (*range(6), 9):
        assert set(on(tier, prompt(4, seed=seed))) == {"a"}
        assert whole(tier, prompt(4, seed=seed))
    assert device(tier, "b").tier.statistics().extents == 0  # type: ignore[union-attr]
    remove_device(tmp_path / "a", tmp_path / "b")
    two.later(tier)
    assert [one.path.name for one in tier.devices] == ["a"]
    assert whole(tier, prompt(4, seed=3))
    assert tier.check() == []
    tier.close()
    assert not (tmp_path / "b" / DEVICES).exists()  # it is a cache directory of its own again
    again = two.open()  # configuration still names it
    assert "was removed by command" in again.warnings[0]
    assert [one.path.name for one in again.devices] == ["a"]
    again.close()


def test_draining_keeps_what_was_used_last_where_not_all_has_room(two: Set, tmp_path: Path) -> None:
    tier = two.open(each=4 << 20)
    for seed in range(200):
        write(tier, prompt(4, seed=seed), extents=2)
    there = [seed for seed in range(200) if whole(tier, prompt(4, seed=seed))]
    drain_device(tmp_path / "a", tmp_path / "b")
    two.later(tier)
    drained(tier)
    kept = [seed for seed in there if whole(tier, prompt(4, seed=seed))]
    assert kept
    assert kept == there[-len(kept) :]
    assert tier.statistics().devices[0].allocated_bytes <= 4 << 20
    tier.close()


def test_what_is_not_what_was_written_is_not_carried_over(two: Set, tmp_path: Path) -> None:
    tier = two.open()
    kv = prompt(4)
    write(tier, kv, extents=2)
    names = on(tier, kv)
    tier.close()
    [segment] = (tmp_path / "b").glob("segments/*/*.seg")
    data = bytearray(segment.read_bytes())
    data[-5000] ^= 1
    segment.write_bytes(data)
    tier = two.open()
    drain_device(tmp_path / "a", tmp_path / "b")
    two.later(tier)
    drained(tier)
    assert on(tier, kv) == ["a" if name == "a" else "" for name in names]
    tier.close()


def test_devices_come_and_go_while_threads_read_and_write(two: Set, tmp_path: Path) -> None:
    tier = two.open()
    stop = Event()

    def work(thread: int) -> int:
        steps = 0
        while not stop.is_set():
            kv = prompt(4, seed=thread * 1000 + steps % 12)
            try:
                if not whole_or_gone(tier, kv):
                    tier.write(kv.image(0, 2), TINY)
                    tier.write(kv.image(2, 2), TINY)
            except StoreError as error:
                if error.facts.get("reason") != "gone":  # the extent or its device left meanwhile: a miss
                    raise
            steps += 1
        return steps

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work, thread) for thread in range(4)]
        try:
            add_device(tmp_path / "a", tmp_path / "c")
            two.later(tier)
            drain_device(tmp_path / "a", tmp_path / "b")
            two.later(tier)
            drained(tier)
            remove_device(tmp_path / "c", tmp_path / "b", even_if_not_drained=True)
            two.later(tier)
        finally:
            stop.set()
        assert min(future.result(60) for future in futures) > 0
    assert sorted(one.path.name for one in tier.devices) == ["a", "c"]
    assert tier.check() == []
    assert tier.statistics().extents == len(list(tier.scan()))
    tier.close()


def whole_or_gone(tier: DeviceTier, kv: FakeKV) -> bool:
    """Read all that is there of a prompt and compare it; what is removed meanwhile is a miss."""
    places = located(tier, kv)
    there = sorted({one for one in places if one >= 0}, key=places.index)
    for extent, ok in zip(there, tier.lease([ExtentId(one) for one in there]), strict=True):
        if not ok:
            return False
        try:
            first, count = places.index(extent), places.count(extent)
            image = bytes(kv.image(first, count))
            got = bytearray(len(image))
            tier.read([ReadRange(ExtentId(extent), 0, [memoryview(got)])])
            assert got == image
        finally:
            tier.release([ExtentId(extent)])
    return -1 not in places


def test_a_device_that_comes_back_learns_what_was_decided_without_it(two: Set, tmp_path: Path) -> None:
    two.open().close()
    (tmp_path / "b").rename(tmp_path / "away")
    add_device(tmp_path / "a", tmp_path / "c")
    (tmp_path / "away").rename(tmp_path / "b")
    tier = Set(tmp_path, ["b"]).open()  # only it is configured, and its list is the older one
    assert sorted(one.path.name for one in tier.devices) == ["a", "b", "c"]
    tier.close()
    assert len(devices_of(tmp_path / "b")) == 3


def test_a_device_is_known_where_it_is_mounted_now(two: Set, tmp_path: Path) -> None:
    tier = two.open()
    write(tier, prompt(4), extents=2)
    tier.close()
    (tmp_path / "b").rename(tmp_path / "moved")
    again = two.open(names=["a", "moved"])
    assert again.warnings == []
    assert whole(again, prompt(4))
    again.close()
    assert [entry.path.name for entry in devices_of(tmp_path / "a")] == ["a", "moved"]


def test_a_directory_that_only_a_list_names_must_say_that_it_is_that_device(two: Set, tmp_path: Path) -> None:
    two.open().close()
    stranger = Set(tmp_path, ["s"]).open()
    stranger.close()
    listed = json.loads((tmp_path / "a" / DEVICES).read_text())
    listed["devices"].append({"id": "f" * 32, "path": str(tmp_path / "s"), "state": "active"})
    listed["revision"] += 1
    (tmp_path / "a" / DEVICES).write_text(json.dumps(listed))
    tier = two.open()
    assert [one.path.name for one in tier.devices] == ["a", "b"]
    assert "does not say of itself" in tier.warnings[0]
    assert not (tmp_path / "s" / DEVICES).exists()
    tier.close()


def test_the_last_device_stays(tmp_path: Path) -> None:
    Set(tmp_path, ["a", "b"]).open().close()
    drain_device(tmp_path / "a", tmp_path / "b")
    with pytest.raises(TierUnavailable, match="last device"):
        drain_device(tmp_path / "a", tmp_path / "a")
    with pytest.raises(TierUnavailable, match="is no device of"):
        drain_device(tmp_path / "a", tmp_path / "x")


def good() -> dict[str, object]:
    one = {"id": "1" * 32, "path": "/mnt/a", "state": "active"}
    return {
        "format": "headstart devices",
        "version": 1,
        "set": "0" * 32,
        "revision": 3,
        "this": "1" * 32,
        "devices": [one, one | {"id": "2" * 32, "path": "/mnt/b"}],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"format": "headstart"},
        {"revision": 0},
        {"revision": "3"},
        {"this": "3" * 32},
        {"set": "x"},
        {"more": 1},
        {"devices": []},
        {"devices": [{"id": "1" * 32, "path": "/mnt/a", "state": "active"}] * 2},
        {"devices": [{"id": "1" * 32, "path": "mnt/a", "state": "active"}]},
        {"devices": [{"id": "1" * 32, "path": "/mnt/../etc", "state": "active"}]},
        {"devices": [{"id": "1" * 32, "path": "/mnt/\n", "state": "active"}]},
        {"devices": [{"id": "1" * 32, "path": "/mnt/\ud800", "state": "active"}]},
        {"devices": [{"id": "1" * 32, "path": "/mnt/a", "state": "gone"}]},
        {"devices": [{"id": "1" * 32, "path": "/mnt/a", "state": "active", "more": 1}]},
    ],
)
def test_a_list_that_is_not_understood_is_refused(change: dict[str, object]) -> None:
    encoded = json.dumps(good()).encode()
    assert decode_list(decode_list(encoded).encode()) == decode_list(encoded)
    with pytest.raises(ValueError, match=r".+"):
        decode_list(json.dumps(good() | change).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"{" * 100_000, b"\xff", b'{"format": NaN}'])
def test_a_list_that_is_no_list_costs_a_warning_and_not_the_directory(two: Set, tmp_path: Path, content: bytes) -> None:
    tier = two.open()
    write(tier, prompt(4), extents=2)
    tier.close()
    (tmp_path / "b" / DEVICES).write_bytes(content)
    again = two.open()
    assert "no list of devices" in again.warnings[0]
    assert whole(again, prompt(4))
    again.close()
    assert read_list(tmp_path / "b") is not None  # written anew from the others


def test_what_was_counted_does_not_fall_when_a_device_goes_and_comes_back(two: Set, tmp_path: Path) -> None:
    tier = two.open()
    for seed in range(6):
        write(tier, prompt(4, seed=seed))
    counted = [tier.statistics().counters]
    assert all(one.counters["bytes_written"] > 0 for one in tier.statistics().devices)
    remove_device(tmp_path / "a", tmp_path / "b", even_if_not_drained=True)
    two.later(tier)
    counted.append(tier.statistics().counters)
    assert len(tier.devices) == 1
    add_device(tmp_path / "a", tmp_path / "b")
    two.later(tier)
    assert len(tier.devices) == 2
    write(tier, prompt(4, seed=9), extents=4)
    counted.append(tier.statistics().counters)
    for before, after in pairwise(counted):
        assert {name: (before[name], after.get(name, 0)) for name in before if after.get(name, 0) < before[name]} == {}
    assert counted[2]["bytes_written"] > counted[0]["bytes_written"]
    tier.close()
