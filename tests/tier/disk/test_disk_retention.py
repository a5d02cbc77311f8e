"""How long extents are kept: classes, ceilings, clocks that jump, pins, and who gives way first."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from disk_kit import CAPACITY, extent_of, image, located, prompt
from hypothesis import given, settings

from headstart.policy.retention import Retention
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.testing.tier_contract import put
from headstart.tier.base import DEFAULT_TERMS, ExtentId, ExtentInfo, Terms
from headstart.tier.disk import DiskTier
from headstart.tier.disk.books import Books
from headstart.tier.disk.door import Disk
from headstart.tier.disk.evicting import drop_files
from headstart.tier.disk.promises import BROKEN_INTERVAL_S
from headstart.tier.disk.records import (
    ClassRaised,
    ExtentAdded,
    ExtentName,
    Pin,
    Pinned,
    Raise,
    Record,
    SegmentName,
    SegmentOpened,
)

DAY_S = 86_400.0
DAY_MS = 86_400_000
NOW_S = 1_700_000_000.0
NOW_MS = int(NOW_S * 1000)
SMALL = 1 << 20
ROOT = Path("/disk/kv")
AGENT, CHAT = Terms("agent"), Terms("chat")


class Times:
    """A wall clock that can be set, and one that only goes forward."""

    def __init__(self) -> None:
        self.wall_s, self.ticks_s = NOW_S, 1000.0

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.ticks_s += seconds

    def set_forward(self, seconds: float) -> None:
        self.wall_s += seconds


def open_tier(disk: Disk, times: Times, *, capacity_bytes: int = CAPACITY, retention: Retention | None = None) -> DiskTier:
    return DiskTier.open(
        ROOT,
        capacity_bytes=capacity_bytes,
        disk=disk,
        clock=lambda: times.ticks_s,
        wall_clock=lambda: times.wall_s,
        retention=retention,
    )


def save(tier: DiskTier, seed: int, terms: Terms = DEFAULT_TERMS, *, times: Times | None = None, pieces: int = 4) -> ExtentId:
    """Write a prompt as the cache would: its image is made by the wall clock of the moment."""
    made = image(seed, pieces) if times is None else prompt(pieces, seed=seed).image(created_ms=int(times.wall_s * 1000))
    assert tier.write(made, TINY, terms=terms).stored
    return extent_of(tier, seed, pieces)


def there(tier: DiskTier, seeds: Iterable[int]) -> set[int]:
    return {seed for seed in seeds if -1 not in located(tier, seed)}


def info(tier: DiskTier, extent: ExtentId) -> ExtentInfo:
    found = tier.info(extent)
    assert found is not None
    return found


def tend(tier: DiskTier, times: Times) -> None:
    times.pass_s(60)
    while tier.tend():
        pass


# Classes.


def test_a_class_promises_its_time_from_the_save_on() -> None:
    times = Times()
    tier = open_tier(CrashDisk(), times)
    extent = save(tier, 1, AGENT, times=times)
    assert info(tier, extent).guaranteed_until_ms == NOW_MS + 3 * DAY_MS
    assert info(tier, extent).expires_ms == NOW_MS + 30 * DAY_MS
    plain = save(tier, 2, times=times)
    assert (info(tier, plain).guaranteed_until_ms, info(tier, plain).expires_ms) == (NOW_MS, None)
    tier.close()


def test_a_time_that_is_asked_for_is_promised_where_the_class_promises_less_and_survives() -> None:
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times)
    asked = save(tier, 1, Terms(keep_s=DAY_S), times=times)
    less_than_its_class = save(tier, 2, Terms("agent", keep_s=DAY_S), times=times)
    assert info(tier, asked).guaranteed_until_ms == NOW_MS + DAY_MS
    assert info(tier, less_than_its_class).guaranteed_until_ms == NOW_MS + 3 * DAY_MS
    tier.keep([asked], Terms(keep_s=60))  # never shortens
    assert info(tier, asked).guaranteed_until_ms == NOW_MS + DAY_MS
    tier.keep([asked], Terms(keep_s=2 * DAY_S))
    tier.close()
    tier = open_tier(disk, times)
    assert info(tier, extent_of(tier, 1)).guaranteed_until_ms == NOW_MS + 2 * DAY_MS
    tier.close()
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="keep_s"):
            Terms(keep_s=wrong)


@pytest.mark.parametrize("order", [(CHAT, AGENT), (AGENT, CHAT)], ids=["chat first", "agent first"])
@pytest.mark.parametrize("how", ["write", "keep"])
def test_of_two_classes_the_longer_one_holds_whichever_came_first(order: tuple[Terms, Terms], how: str) -> None:
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times)
    extent = save(tier, 1, order[0], times=times)
    times.pass_s(DAY_S)
    if how == "write":
        save(tier, 1, order[1], times=times)
    else:
        tier.keep([extent], order[1])
    until = NOW_MS + 7 * DAY_MS + (DAY_MS if order[1] is CHAT else 0)
    assert (info(tier, extent).retention, info(tier, extent).guaranteed_until_ms) == ("chat", until)
    tier.close()
    tier = open_tier(disk, times)
    has = info(tier, extent_of(tier, 1))
    assert (has.retention, has.guaranteed_until_ms) == ("chat", until)
    assert tier.statistics().live_bytes_by_class == {"chat": has.extent_bytes}
    tier.close()


def test_a_head_that_is_kept_with_its_tail_is_promised_as_much() -> None:
    times = Times()
    tier = open_tier(CrashDisk(), times)
    kv = prompt(6)
    head, tail = put(tier, kv, pieces=3), put(tier, kv, first=3, pieces=3)
    tier.keep([head], AGENT)
    times.pass_s(DAY_S)
    tier.keep([head, tail], CHAT)
    assert info(tier, head).guaranteed_until_ms == info(tier, tail).guaranteed_until_ms == NOW_MS + 8 * DAY_MS
    tier.close()


def test_a_use_promises_nothing() -> None:
    times = Times()
    tier = open_tier(CrashDisk(), times)
    extent = save(tier, 1, AGENT, times=times)
    before = info(tier, extent)
    for _ in range(1000):
        times.pass_s(60)
        tier.touch([extent])
    after = info(tier, extent)
    assert (after.guaranteed_until_ms, after.expires_ms) == (before.guaranteed_until_ms, before.expires_ms)
    tier.close()


def test_promises_survive_a_crash_once_they_are_journalled_and_a_renewed_journal() -> None:
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times)
    extent = save(tier, 1, times=times)
    tier.keep([extent], AGENT)
    tier.keep([extent], Terms("long"))
    times.pass_s(10)
    tier.touch([extent])
    disk.kill()
    tier = open_tier(disk, times)
    assert info(tier, extent_of(tier, 1)).guaranteed_until_ms == NOW_MS + 3 * DAY_MS
    assert tier._store.renew()
    disk.kill()
    tier = open_tier(disk, times)
    has = info(tier, extent_of(tier, 1))
    assert (has.retention, has.guaranteed_until_ms) == ("agent", NOW_MS + 3 * DAY_MS)
    tier.close()


def test_the_first_promise_survives_a_crash_right_after_the_write() -> None:
    times, disk = Times(), CrashDisk()
    save(open_tier(disk, times), 1, AGENT, times=times)
    disk.kill()
    tier = open_tier(disk, times)
    assert info(tier, extent_of(tier, 1)).guaranteed_until_ms == NOW_MS + 3 * DAY_MS
    tier.close()


def test_a_promise_to_anothers_extent_outlives_both_journals_renewed() -> None:
    times, disk = Times(), CrashDisk()
    one, other = open_tier(disk, times), open_tier(disk, times)
    save(one, 1, times=times)
    other.refresh()
    theirs = extent_of(other, 1)
    other.keep([theirs], CHAT)
    assert other.pin([theirs], until_ms=NOW_MS + 99) == [True]
    assert other._store.renew()
    one.refresh()
    for tier in (one, other):
        has = info(tier, extent_of(tier, 1))
        assert (has.retention, has.guaranteed_until_ms, has.pinned_until_ms) == ("chat", NOW_MS + 7 * DAY_MS, NOW_MS + 99)
    disk.kill()
    for _ in range(3):
        tier = open_tier(disk, times)
        has = info(tier, extent_of(tier, 1))
        assert (has.retention, has.guaranteed_until_ms, has.pinned_until_ms) == ("chat", NOW_MS + 7 * DAY_MS, NOW_MS + 99)
        assert tier._store.renew()
        tier.close()


def test_a_class_that_is_not_configured_keeps_its_name_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times)
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            save(tier, seed, Terms("batch"), times=times)
    assert len([r for r in caplog.records if "'batch'" in r.getMessage()]) == 1
    assert tier.statistics().counters["classes_unknown"] == 1
    has = info(tier, extent_of(tier, 1))
    assert (has.retention, has.guaranteed_until_ms, has.expires_ms) == ("batch", NOW_MS, None)
    tier.close()
    tier = open_tier(disk, times, retention=Retention.of("batch=1d..2d"))
    assert info(tier, extent_of(tier, 1)).guaranteed_until_ms == NOW_MS + DAY_MS
    tier.close()


SEGMENT = SegmentName(b"w" * 16, 0)
NAME = ExtentName(SEGMENT, 4096)
said = st.one_of(
    st.builds(
        Raise, st.just(NAME), st.integers(0, 50).map(lambda days: NOW_MS + days * DAY_MS), st.sampled_from(["agent", "old"])
    ),
    st.builds(Pin, st.just(NAME), st.sampled_from([0, NOW_MS + 5, NOW_MS + 9]), st.integers(1, 4)),
)


@given(st.lists(said, max_size=6).flatmap(lambda words: st.tuples(st.just(words), st.permutations(words))), st.integers(0, 6))
def test_what_is_said_of_an_extent_holds_in_whatever_order_journals_are_read(
    words: tuple[list[Raise | Pin], list[Raise | Pin]], late: int
) -> None:
    """Also before the journal that says that it was added."""
    outcomes = []
    for order, place in ((words[0], 0), (words[1], late)):
        books = Books(retention=Retention.of("old=1d..90d"))
        books.finish_loading()
        journals: list[Record] = [
            ClassRaised(NOW_MS, (word,)) if isinstance(word, Raise) else Pinned((word,)) for word in order
        ]
        added = ExtentAdded(NAME, 8192, 4096, NOW_MS, 1, "chat", bytes(16), b"k" * 16)
        before, after = journals[:place], journals[place:]
        for record in [*before, SegmentOpened(SEGMENT, 4096, 1 << 20, NOW_MS, bytes(32)), added, *after]:
            books.apply([record], own=False, now_ms=NOW_MS)
        outcomes.append(books.info(int(books.living()[0])))
    assert outcomes[0] == outcomes[1]
    raised = [word.until_ms for word in words[0] if isinstance(word, Raise)]
    assert outcomes[0].guaranteed_until_ms == min(max([NOW_MS + 7 * DAY_MS, *raised]), outcomes[0].expires_ms or 0)
    assert outcomes[0].retention == "chat"
    pins = [(word.counter, word.until_ms) for word in words[0] if isinstance(word, Pin)]
    assert (outcomes[0].pinned_until_ms or 0) == max(pins, default=(0, 0))[1]


# Ceilings.


def test_what_is_older_than_its_ceiling_goes_though_there_is_room() -> None:
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times)
    for seed in range(150):
        save(tier, seed, AGENT, times=times)
    kept, leased = save(tier, 200, times=times), save(tier, 201, AGENT, times=times)
    assert tier.lease([leased]) == [True]
    times.pass_s(30 * DAY_S - 120)
    tend(tier, times)
    assert tier.statistics().extents == 152
    tend(tier, times)
    assert {i.id for i in tier.scan()} == {kept, leased}
    assert tier.statistics().counters["evicted_expired"] == 150
    assert [removal.reason for removal in tier.removals()] == ["expired"] * 150
    tier.release([leased])
    tend(tier, times)
    assert {i.id for i in tier.scan()} == {kept}
    assert tier.check() == []
    tier.close()


@pytest.mark.parametrize(("classes", "blocks_left"), [(("short", "long"), 6), (("long", "short"), 4), (("short", "short"), 0)])
def test_a_head_grows_as_old_as_what_continues_it(classes: tuple[str, str], blocks_left: int) -> None:
    times = Times()
    tier = open_tier(CrashDisk(), times, retention=Retention.of("short=1d..3d, long=1d..7d"))
    kv = prompt(6, seed=1)

    def put_part(first: int, retention: str) -> None:
        part = kv.image(first, 2, created_ms=int(times.wall_s * 1000))
        assert tier.write(part, TINY, terms=Terms(retention)).stored

    def there_are() -> int:
        tend(tier, times)
        return int((tier.locate(TINY.digest, kv.keys).extents >= 0).sum())

    put_part(0, "short")
    times.pass_s(DAY_S)
    put_part(2, classes[0])
    put_part(4, classes[1])
    save(tier, 9, Terms("short"), times=times)
    times.pass_s(2 * DAY_S + 600)
    assert there_are() == 6, "nothing of it is left alone by its head"
    times.pass_s(DAY_S)
    assert there_are() == blocks_left
    assert there(tier, [9]) == set(), "what nothing continues goes at its own time"
    times.pass_s(4 * DAY_S)
    assert there_are() == 0
    assert tier.check() == []
    tier.close()


def test_the_longest_ceiling_of_its_classes_holds_across_restarts() -> None:
    retention = Retention.of("firm=3d..4d, old=1d..20d")
    for order in (("firm", "old"), ("old", "firm")):
        times, disk = Times(), CrashDisk()
        tier = open_tier(disk, times, retention=retention)
        extent = save(tier, 1, Terms(order[0]), times=times)
        tier.keep([extent], Terms(order[1]))
        for _ in range(3):
            has = info(tier, extent_of(tier, 1))
            assert (has.retention, has.expires_ms) == ("firm", NOW_MS + 20 * DAY_MS)
            assert tier._store.renew()
            tier.close()
            tier = open_tier(disk, times, retention=retention)
        tier.close()


# Clocks.


@pytest.mark.parametrize("jump_s", [600, -600, 30 * DAY_S, -30 * DAY_S])
def test_a_wall_clock_that_is_set_while_running_changes_no_promise(jump_s: float) -> None:
    times = Times()
    tier = open_tier(CrashDisk(), times)
    before = save(tier, 1, AGENT, times=times)
    times.set_forward(jump_s)
    after = save(tier, 2, AGENT, times=times)
    for extent in (before, after):
        assert info(tier, extent).guaranteed_until_ms == NOW_MS + 3 * DAY_MS
        assert info(tier, extent).expires_ms == NOW_MS + 30 * DAY_MS
    tend(tier, times)
    assert tier.statistics().extents == 2
    times.pass_s(30 * DAY_S)
    tend(tier, times)
    assert tier.statistics().extents == 0
    tier.close()


def test_what_a_clock_ahead_has_written_lives_at_most_its_time_from_now() -> None:
    for ahead_s in (600, 30 * DAY_S):
        times, disk = Times(), CrashDisk()
        times.set_forward(ahead_s)
        tier = open_tier(disk, times)
        save(tier, 1, AGENT, times=times)
        tier.keep([extent_of(tier, 1)], CHAT)
        tier.close()
        times.set_forward(-ahead_s)
        tier = open_tier(disk, times)
        has = info(tier, extent_of(tier, 1))
        assert has.guaranteed_until_ms == NOW_MS + 7 * DAY_MS
        assert has.expires_ms == NOW_MS + 30 * DAY_MS
        tier.close()


def test_a_clock_set_back_while_closed_ends_no_life_early() -> None:
    for back_s in (600, 30 * DAY_S):
        times, disk = Times(), CrashDisk()
        tier = open_tier(disk, times)
        save(tier, 1, AGENT, times=times)
        tier.close()
        times.set_forward(-back_s)
        tier = open_tier(disk, times)
        tend(tier, times)
        assert there(tier, [1]) == {1}
        tier.close()


def test_a_clock_ten_minutes_behind_costs_no_more_than_ten_minutes() -> None:
    times, disk = Times(), CrashDisk()
    times.set_forward(-600)
    tier = open_tier(disk, times)
    save(tier, 1, AGENT, times=times)
    tier.close()
    times.set_forward(600)
    tier = open_tier(disk, times)
    times.pass_s(30 * DAY_S - 900)
    tend(tier, times)
    assert there(tier, [1]) == {1}
    tier.close()


# Pins.


def press(tier: DiskTier, *, count: int = 60, terms: Terms = DEFAULT_TERMS) -> None:
    for seed in range(1000, 1000 + count):
        assert tier.write(image(seed), TINY, terms=terms).stored


def test_a_pinned_extent_survives_pressure_restarts_and_its_ceiling_until_its_deadline() -> None:
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times, capacity_bytes=SMALL)
    assert tier.pin([save(tier, 1, AGENT, times=times)], until_ms=NOW_MS + 40 * DAY_MS) == [True]
    for _ in range(3):
        press(tier)
        assert tier._store.renew()
        tier.close()
        tier = open_tier(disk, times, capacity_bytes=SMALL)
    times.pass_s(39 * DAY_S)
    tend(tier, times)
    assert info(tier, extent_of(tier, 1)).pinned_until_ms == NOW_MS + 40 * DAY_MS
    times.pass_s(DAY_S)
    assert info(tier, extent_of(tier, 1)).pinned_until_ms is None
    tend(tier, times)
    assert there(tier, [1]) == set()
    tier.close()


def test_the_user_deletes_a_pinned_extent_only_after_unpinning_it() -> None:
    times = Times()
    tier = open_tier(CrashDisk(), times)
    extent = save(tier, 1)
    assert tier.pin([extent], until_ms=None) == [True]
    assert tier.delete([extent], reason="user") == 0
    tier.unpin([extent])
    assert tier.delete([extent], reason="user") == 1
    again = save(tier, 1)
    assert tier.pin([again], until_ms=None) == [True]
    assert tier.delete([again], reason="corrupt") == 1
    tier.close()


def test_pins_take_at_most_half_of_the_capacity() -> None:
    times = Times()
    tier = open_tier(CrashDisk(), times, capacity_bytes=SMALL)
    extents = [save(tier, seed) for seed in range(12)]
    nbytes = info(tier, extents[0]).extent_bytes
    fit = SMALL // 2 // nbytes
    assert tier.pin(extents, until_ms=None) == [True] * fit + [False] * (12 - fit)
    assert tier.pin(extents[:fit], until_ms=NOW_MS + DAY_MS) == [True] * fit  # once more takes no more
    assert tier.pin([extents[0], ExtentId(1 << 40)], until_ms=None) == [True, False]
    tier.unpin(extents[:1])
    assert tier.pin(extents[fit : fit + 2], until_ms=None) == [True, False]
    press(tier)
    assert there(tier, range(12)) == set(range(1, fit + 1))
    tier.close()


def test_thousands_are_pinned_without_adding_up_the_pins_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    tier, sums = open_tier(CrashDisk(), Times()), 0
    extents = [save(tier, seed) for seed in range(24)]
    kept = tier._store.books._kept

    def pinned(now_ms: int) -> object:
        nonlocal sums
        sums += 1
        return type(kept).pinned(kept, now_ms)

    monkeypatch.setattr(kept, "pinned", pinned)
    assert all(tier.pin(extents * 2, until_ms=None))
    assert sums <= 2
    monkeypatch.undo()
    tier.close()


def test_where_the_journal_needs_a_whole_file_to_go_it_is_one_that_nobody_was_promised() -> None:
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times, capacity_bytes=SMALL)
    promised = [save(tier, seed, AGENT, times=times) for seed in range(12)]
    others = [save(tier, seed) for seed in range(100, 106)]
    tier.touch(others)  # the promised ones were used longest ago
    store = tier._store
    files = {info(tier, extent).where.split(",")[0] for extent in promised}
    alone = [extent for extent in others if info(tier, extent).where.split(",")[0] not in files]
    assert alone
    with store.turn(), store.charging():
        drop_files(store, 1)
        gone = {extent for extent in (*promised, *others) if tier.info(extent) is None}
        assert gone
        assert gone <= set(alone)
        assert "guarantee_broken_extents" not in tier.statistics().counters
        drop_files(store, SMALL)
    counters = tier.statistics().counters
    assert counters["guarantee_broken_extents"] >= len(promised)
    assert counters["evicted_capacity"] == len(promised) + len(others)
    assert tier.check() == []
    tier.close()


def test_pins_of_two_processes_take_no_more_than_half_together() -> None:
    times, disk = Times(), CrashDisk()
    one, other = (open_tier(disk, times, capacity_bytes=SMALL) for _ in range(2))
    for seed in range(12):
        save(one, seed)
    other.refresh()
    pinned = [tier.pin([extent_of(tier, seed)], until_ms=None) for seed, tier in enumerate((one, other) * 6)]
    nbytes = info(one, extent_of(one, 0)).extent_bytes
    assert sum(map(sum, pinned)) == SMALL // 2 // nbytes
    one.close()
    other.close()


def test_the_last_word_about_a_pin_counts_whichever_process_said_it() -> None:
    times, disk = Times(), CrashDisk()
    one, other = open_tier(disk, times), open_tier(disk, times)
    save(one, 1)
    other.refresh()
    for tier, until in ((one, NOW_MS + 5), (other, NOW_MS + 9), (one, 0), (other, NOW_MS + 7)):
        tier.pin([extent_of(tier, 1)], until_ms=until)
        for each in (one, other):
            each.refresh()
            assert info(each, extent_of(each, 1)).pinned_until_ms == (until or None)
    one.unpin([extent_of(one, 1)])
    one.close()
    other.close()
    tier = open_tier(disk, times)
    assert info(tier, extent_of(tier, 1)).pinned_until_ms is None
    tier.close()


def test_a_pin_that_cannot_be_written_down_is_none() -> None:
    times, disk = Times(), FaultyDisk(CrashDisk())
    tier = open_tier(disk, times)
    extent = save(tier, 1)
    disk.inject(DiskFault("write", "eio"))
    assert tier.pin([extent], until_ms=None) == [False]
    assert info(tier, extent).pinned_until_ms is None
    disk.heal()
    assert tier.pin([extent], until_ms=None) == [True]
    tier.close()


def test_pins_above_half_of_a_lowered_capacity_give_way_rather_than_the_bound() -> None:
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times, capacity_bytes=4 * SMALL)
    extents = [save(tier, seed) for seed in range(30)]
    assert all(tier.pin(extents, until_ms=None))
    tier.close()
    tier = open_tier(disk, times, capacity_bytes=SMALL)
    assert tier.statistics().allocated_bytes <= SMALL
    assert len(there(tier, range(30))) > 0
    tier.close()


def test_what_is_pinned_outlives_what_is_promised_where_a_lowered_capacity_holds_only_one_of_them() -> None:
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times, capacity_bytes=4 * SMALL)
    pinned = [save(tier, seed, times=times) for seed in range(12)]
    assert all(tier.pin(pinned, until_ms=None))
    for seed in range(12, 30):
        save(tier, seed, AGENT, times=times)
    tier.close()
    tier = open_tier(disk, times, capacity_bytes=SMALL)
    assert sum(has.pinned_until_ms is not None for has in tier.scan()) == 12
    tier.close()


# Who gives way.


def test_what_is_promised_stays_while_anything_else_may_go() -> None:
    times = Times()
    tier = open_tier(CrashDisk(), times, capacity_bytes=SMALL)
    for seed in range(5):
        save(tier, seed, AGENT, times=times)
    press(tier)
    assert there(tier, range(5)) == set(range(5))
    assert "guarantee_broken_extents" not in tier.statistics().counters
    times.pass_s(3 * DAY_S + 1)
    press(tier, count=61)
    assert there(tier, range(5)) == set()
    assert "guarantee_broken_extents" not in tier.statistics().counters
    tier.close()


def test_broken_promises_are_counted_and_said_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    times = Times()
    tier = open_tier(CrashDisk(), times, capacity_bytes=SMALL)
    with caplog.at_level(logging.WARNING):
        press(tier, terms=AGENT)
        said = [r for r in caplog.records if "guaranteed" in r.getMessage()]
        assert len(said) == 1
        times.pass_s(BROKEN_INTERVAL_S)
        press(tier, count=90, terms=AGENT)
    assert len([r for r in caplog.records if "guaranteed" in r.getMessage()]) == 2
    counters = tier.statistics().counters
    assert counters["guarantee_broken_extents"] == counters["evicted_capacity"] > 20
    assert counters["guarantee_broken_bytes"] == counters["guarantee_broken_extents"] * len(image(0))
    tier.close()


def test_without_holes_promised_segments_go_last() -> None:
    times, disk = Times(), FaultyDisk(CrashDisk())
    disk.inject(DiskFault("punch", "eio"))
    tier = open_tier(disk, times, capacity_bytes=4 * SMALL)
    for seed in range(4):
        save(tier, seed, AGENT, times=times)
    press(tier, count=200)
    assert there(tier, range(4)) == set(range(4))
    assert tier.statistics().allocated_bytes <= 4 * SMALL
    tier.close()


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), min_size=4, max_size=14),
    st.lists(st.integers(0, 13), max_size=8),
    st.booleans(),
)
def test_no_tail_outlives_its_head_whatever_was_used(runs: list[tuple[int, int]], touched: list[int], promised: bool) -> None:
    """Runs of prompts are written, single ones used so that the order of use is wrong, and then all is pressed out."""
    times = Times()
    tier = open_tier(CrashDisk(), times, capacity_bytes=SMALL)
    extents: list[ExtentId] = []
    written: dict[int, int] = {}
    for seed, _ in runs:
        if (first := written.get(seed, 0)) < 9:
            extents.append(put(tier, prompt(12, seed=seed), first=first, pieces=3))
            written[seed] = first + 3
    for number in touched:
        tier.touch([extents[number % len(extents)]])
    if promised:
        tier.keep([extents[-1]], AGENT)
    for seed in range(1000, 1030):
        assert tier.write(image(seed), TINY).stored
        for prompt_seed in written:
            there = [extent >= 0 for extent in located(tier, prompt_seed, 12)]
            assert there == sorted(there, reverse=True), "a tail outlived its head"
    tier.close()


def test_what_a_crash_amid_promises_leaves_is_read() -> None:
    """A journal cut at any byte of its promises and pins loses those at most."""
    times, disk = Times(), CrashDisk()
    tier = open_tier(disk, times)
    extent = save(tier, 1, times=times)
    before = max(len(data) for path, data in disk.files().items() if path.suffix == ".log")
    assert tier.pin([extent], until_ms=NOW_MS + DAY_MS) == [True]
    tier.keep([extent], AGENT)
    times.pass_s(10)
    tier.touch([extent])
    disk.kill()
    path, data = next((path, data) for path, data in disk.files().items() if path.suffix == ".log")
    end = len(data.rstrip(b"\0"))
    seen = set()
    for cut in range(end, before, -7):
        path = next(path for path in disk.files() if path.suffix == ".log")
        handle = disk.open(path, "write")
        disk.truncate(handle, 0)
        disk.write(handle, memoryview(data)[:cut], 0)
        disk.close(handle)
        tier = open_tier(disk, times)
        has = info(tier, extent_of(tier, 1))
        seen.add((has.retention, has.pinned_until_ms))
        assert tier.check() == []
        disk.kill()
    assert seen <= {("agent", NOW_MS + DAY_MS), ("default", NOW_MS + DAY_MS), ("default", None)}
    assert len(seen) > 1


def test_two_real_processes_keep_the_longer_promise(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from disk_kit import CAPACITY, extent_of, image
from headstart.testing.fake_kv import TINY
from headstart.tier.base import Terms
from headstart.tier.disk import DiskTier
tier = DiskTier.open(Path({str(tmp_path / "kv")!r}), capacity_bytes=CAPACITY)
assert tier.write(image(1), TINY, terms=Terms("chat")).stored
assert tier.pin([extent_of(tier, 1)], until_ms=2**50) == [True]
tier.close()
"""
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY)
    assert tier.write(image(1), TINY, terms=AGENT).stored
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    tier.refresh()
    has = info(tier, extent_of(tier, 1))
    assert (has.retention, has.pinned_until_ms) == ("chat", 2**50)
    assert has.guaranteed_until_ms > 6 * DAY_MS + has.created_ms
    tier.close()
