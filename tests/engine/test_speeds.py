"""What is measured while serving: passes, and tiers by what came while anything was asked of them."""

from __future__ import annotations

import pytest

from headstart.engine.speeds import ReadAccount, Speeds
from headstart.metrics import Counters
from headstart.policy.loading import Stretch

MB = 1_000_000


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def speeds(clock: Clock) -> Speeds:
    return Speeds(Counters(), chunk_tokens=1024, clock=clock)


def read(speeds: Speeds, clock: Clock, nbytes: int, seconds: float) -> None:
    speeds.asked("disk", nbytes)
    clock.now += seconds
    speeds.came("disk", nbytes, asked_bytes=nbytes)


def test_nothing_is_known_before_a_pass(speeds: Speeds) -> None:
    assert speeds.computing is None
    assert speeds.reading() == {}


def test_passes_whose_end_was_not_seen_are_measured_with_the_next_that_was(speeds: Speeds) -> None:
    speeds.passed(1000, 500_000, 0.001, settled=False)
    assert speeds.computing is None
    speeds.passed(1000, 1_500_000, 3.999, settled=True)
    assert speeds.computing is not None
    assert speeds.computing.speed.seconds(2000, 2_000_000, 2) == pytest.approx(4.0)


def test_a_tier_is_known_after_three_reads_or_a_second(speeds: Speeds, clock: Clock) -> None:
    for count in range(3):
        assert count == 0 or speeds.reading() == {}
        read(speeds, clock, 10 * MB, 0.1)
    assert speeds.reading()["disk"].seconds(100 * MB) == pytest.approx(1.0, rel=0.01)
    long = Speeds(Counters(), chunk_tokens=1024, clock=clock)
    read(long, clock, 10 * MB, 2.0)
    assert long.reading()["disk"].seconds(10 * MB) == pytest.approx(2.0)


def test_loads_that_share_a_tier_do_not_make_it_look_slow(speeds: Speeds, clock: Clock) -> None:
    for _ in range(4):
        speeds.asked("disk", 50 * MB)
        speeds.asked("disk", 50 * MB)
        clock.now += 0.99
        speeds.came("disk", 50 * MB, asked_bytes=50 * MB)
        clock.now += 0.01
        speeds.came("disk", 50 * MB, asked_bytes=50 * MB)
    assert speeds.reading()["disk"].speed.seconds(100 * MB, 0) == pytest.approx(1.0, rel=0.15)


def test_what_others_wait_for_counts_as_asked_until_it_came(speeds: Speeds, clock: Clock) -> None:
    for _ in range(3):
        read(speeds, clock, 10 * MB, 0.1)
    speeds.asked("disk", 50 * MB)
    assert speeds.reading()["disk"].seconds(10 * MB) == pytest.approx(0.6, rel=0.01)
    speeds.came("disk", None, asked_bytes=50 * MB)  # given up
    assert speeds.reading()["disk"].seconds(10 * MB) == pytest.approx(0.1, rel=0.01)


def test_a_read_that_never_ends_makes_a_tier_slow_all_the_same(speeds: Speeds, clock: Clock) -> None:
    for _ in range(3):
        read(speeds, clock, 10 * MB, 0.1)
    for _ in range(40):
        speeds.asked("disk", 10 * MB)
        clock.now += 10.0
        speeds.waited("disk", 10 * MB)
        speeds.came("disk", None, asked_bytes=10 * MB)
    assert speeds.reading()["disk"].seconds(10 * MB) == pytest.approx(10.0, rel=0.1)


def test_waiting_for_less_than_was_expected_is_no_news(speeds: Speeds, clock: Clock) -> None:
    for _ in range(3):
        read(speeds, clock, 10 * MB, 0.1)
    speeds.asked("disk", 1000 * MB)
    clock.now += 0.01
    speeds.waited("disk", 1000 * MB)
    assert len(speeds._tiers["disk"].samples) == 3


def test_a_speed_is_stale_a_minute_after_it_was_measured(speeds: Speeds, clock: Clock) -> None:
    for _ in range(3):
        read(speeds, clock, 10 * MB, 0.1)
    clock.now += 59
    assert not speeds.reading()["disk"].stale
    clock.now += 2
    assert speeds.reading()["disk"].stale


def test_a_load_counts_for_the_disk_by_what_is_not_memorys(speeds: Speeds, clock: Clock) -> None:
    stretches = [Stretch("memory", 64, 30 * MB, always=True), Stretch("disk", 128, 60 * MB)]
    for _ in range(3):
        account = ReadAccount(speeds, stretches, 0, 192)
        assert speeds._tiers["disk"].asked_bytes == 60 * MB
        clock.now += 0.6
        account.ended(90 * MB)
    assert set(speeds.reading()) == {"disk"}
    assert speeds.reading()["disk"].seconds(60 * MB) == pytest.approx(0.6)
    part = ReadAccount(speeds, stretches, 128, 192)
    assert speeds._tiers["disk"].asked_bytes == 30 * MB
    part.ended(30 * MB)
    only = ReadAccount(speeds, stretches, 0, 64)
    only.ended(30 * MB)
    assert set(speeds._tiers) == {"disk", "memory"}


def test_how_far_estimates_were_off_is_counted() -> None:
    counters = Counters()
    speeds = Speeds(counters, chunk_tokens=1024)
    speeds.passed(100, 0.0, 1.0)
    assert counters.snapshot() == {}
    assert speeds.computing is not None
    speeds.passed(100, 0.0, 1.5)
    speeds.loaded(0.5, estimate_s=0.75)
    assert counters.snapshot() == {
        "compute_estimated_ms": 1000,
        "compute_estimate_off_ms": 500,
        "load_estimated_ms": 750,
        "load_estimate_off_ms": 250,
    }
