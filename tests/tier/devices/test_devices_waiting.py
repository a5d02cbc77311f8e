"""No device is waited for without end, whatever it is asked: at opening, for its size, its list, in a drain, in upkeep."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
from devices_kit import EACH, Set, device, on, whole, write

from headstart.errors import TierUnavailable
from headstart.policy.placement import Room, split_total
from headstart.testing.faulty_disk import DiskFault
from headstart.testing.tier_contract import prompt
from headstart.tier.devices import DeviceTier, changing, drain, drain_device, members, remove_device
from headstart.tier.devices.rooms import room_of, rooms_of
from headstart.tier.disk import DiskTier


@pytest.fixture
def two(tmp_path: Path) -> Set:
    return Set(tmp_path, ["a", "b"])


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Event]:
    """Give a function after which whoever asks how large a directory's file system is waits until an event is set."""

    def hang(name: str) -> Event:
        answers = Event()

        def slow(path: Path) -> Room:
            if path.name == name:
                assert answers.wait(30)
            return room_of(path)

        monkeypatch.setattr(members, "room_of", slow)
        monkeypatch.setattr(members, "PATIENCE_S", 0.1)
        return answers

    return hang


def threads() -> int:
    return sum(thread.name.startswith("disk") for thread in threading.enumerate())


def test_a_directory_that_does_not_say_how_large_its_disk_is_does_not_hold_up_the_start(
    tmp_path: Path, hung: Callable[[str], Event]
) -> None:
    answers = hung("a")
    with pytest.raises(TierUnavailable, match="does not answer; check its disk or mount"):
        Set(tmp_path, ["a"]).open()
    answers.set()


def test_the_only_directory_is_not_waited_for_without_end_and_is_closed_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Set(tmp_path, ["a"])
    alone.holding.add("a")
    monkeypatch.setattr(members, "OPEN_ALONE_S", 0.1)
    closed = Event()
    close = DiskTier.close
    monkeypatch.setattr(DiskTier, "close", lambda self: (close(self), closed.set())[0])
    with pytest.raises(TierUnavailable, match="does not answer"):
        alone.open()
    alone.held.set()
    assert closed.wait(20)


def test_a_device_that_does_not_say_how_large_it_is_joins_when_it_does(two: Set, hung: Callable[[str], Event]) -> None:
    answers = hung("b")
    tier = two.open()
    assert [one.path.name for one in tier.devices] == ["a"]
    assert "b does not answer yet" in tier.warnings[0]
    [late] = [late for late, _ in tier._members._late.values()]
    answers.set()
    late.changes.hand_over(lambda: None).result(20)
    two.later(tier)
    assert [one.path.name for one in tier.devices] == ["a", "b"]
    tier.close()


def test_a_device_that_takes_long_to_open_joins_when_it_is_open(two: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "OPEN_S", 0.1)
    two.holding.add("b")
    tier = two.open()
    assert [one.path.name for one in tier.devices] == ["a"]
    [late] = [late for late, _ in tier._members._late.values()]
    two.held.set()
    late.changes.hand_over(lambda: None).result(20)
    two.later(tier)
    assert [one.path.name for one in tier.devices] == ["a", "b"]
    tier.close()


def test_a_device_that_stays_away_takes_no_names_and_no_threads(two: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    two.open().close()
    monkeypatch.setattr(members, "_MAX_SERIAL", 3)
    two.refused.add("b")
    tier = two.open()
    before = threads()
    for _ in range(10):
        two.later(tier)
    assert threads() == before
    two.refused.clear()
    two.later(tier)
    assert [one.path.name for one in tier.devices] == ["a", "b"]
    tier.close()


def test_a_device_that_fails_late_leaves_no_threads(two: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    two.open().close()
    monkeypatch.setattr(members, "OPEN_S", 0.05)
    tier = two.open(names=["a"])
    monkeypatch.setattr(members, "room_of", lambda path: two.held.wait(30) and 1 / 0)
    monkeypatch.setattr(members, "PATIENCE_S", 0.05)
    [b] = [one for one in tier.devices if one.path.name == "b"]
    b.gone = True
    before = threads()
    two.later(tier)
    [late] = [late for late, _ in tier._members._late.values()]
    two.held.set()
    late.changes.close(20)
    monkeypatch.undo()
    two.later(tier)
    assert [one.path.name for one in tier.devices] == ["a", "b"]
    assert threads() == before
    tier.close()


def test_what_was_meant_for_a_device_that_is_away_is_not_given_to_the_others(two: Set) -> None:
    def opened() -> DeviceTier:
        return DeviceTier.open(
            two.paths,
            open_directory=lambda path, nbytes: two_open(path, nbytes),
            capacities=lambda rooms: split_total([Room(n, room.total_bytes) for n, room in enumerate(rooms)], 2 * EACH),
            clock=lambda: two.now,
            look_s=3600.0,
        )

    def two_open(path: Path, nbytes: int) -> DiskTier:
        if path.name in two.refused:
            raise OSError(5, "no such disk", str(path))
        return DiskTier.open(path, capacity_bytes=nbytes)

    opened().close()
    two.refused.add("b")
    tier = opened()
    assert [(one.path.name, one.capacity_bytes) for one in tier.devices] == [("a", EACH)]
    tier.close()


def test_a_look_at_the_list_does_not_make_a_busy_device_refuse_writes(two: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_READ_LIST_S", 0.1)
    tier = two.open()
    written = Event()
    device(tier, "a").changes.hand_over(lambda: written.wait(30))  # a long write
    tier.look()
    assert device(tier, "a").takes_writes
    written.set()
    tier.close()


def test_a_drained_device_that_hangs_does_not_hold_up_upkeep(two: Set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_READ_S", 0.2)
    tier = two.open()
    kv = prompt(4)
    write(tier, kv, extents=2)
    before = on(tier, kv)
    drain_device(tmp_path / "a", tmp_path / "b")
    two.later(tier)
    two.disks["b"].inject(DiskFault("read", "stall"))
    while not two.disks["b"].stalled.is_set():
        tier.tend()
    two.disks["b"].heal()
    device(tier, "b").changes.hand_over(lambda: None).result(20)
    assert on(tier, kv) == before
    for _ in range(20):
        tier.tend()
    assert set(on(tier, kv)) == {"a"}
    assert whole(tier, kv)
    tier.close()


def test_upkeep_goes_on_to_the_next_device_where_one_has_nothing_to_do(two: Set, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = two.open()
    asked = []
    monkeypatch.setattr(device(tier, "a").tier, "tend", lambda: asked.append("a"))
    monkeypatch.setattr(DiskTier, "tend", lambda self: self.tend() if "tend" in vars(self) else asked.append("b") or True)
    assert all(tier.tend() for _ in range(4))
    assert asked.count("b") == 4
    tier.close()


def test_a_dead_device_is_removed_though_it_does_not_answer(two: Set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two.open().close()
    monkeypatch.setattr(changing, "ASK_S", 0.2)
    dead, read_list = Event(), changing.read_list
    monkeypatch.setattr(changing, "read_list", lambda path: dead.wait(30) if path.name == "b" else read_list(path))
    entry = remove_device(tmp_path / "a", tmp_path / "b", even_if_not_drained=True)
    assert entry.state == "removed"
    dead.set()


def test_a_file_system_that_does_not_answer_has_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Event()
    monkeypatch.setattr("headstart.tier.devices.rooms.room_of", lambda path: answers.wait(30) and room_of(path))
    assert rooms_of([tmp_path], patience_s=0.1) == [None]
    answers.set()
