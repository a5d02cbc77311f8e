"""A living writer's journal that rots: together all processes keep to the cap, and what can still be found is found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_kit import Clock, charged, found, image, journals, save, segments

from headstart.tier.disk import DiskTier
from headstart.tier.disk.records import HEADER_BYTES

CAPACITY = 4 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def damaged(root: Path, clock: Clock) -> Iterator[DiskTier]:
    """A tier whose journal says something that it did not write."""
    tier = open_tier(root, clock)
    assert save(tier, 0)
    yield tier
    tier.close()


def open_tier(root: Path, clock: Clock) -> DiskTier:
    return DiskTier.open(root, capacity_bytes=CAPACITY, clock=clock)


def journal_of(root: Path, tier: DiskTier) -> Path:
    return next(path for path in journals(root) if path.name.startswith(tier._store.writer.hex()))


def flip(path: Path, offset: int) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([data[offset] ^ 1]))


@pytest.mark.parametrize("where", ["header", "record", "unread record"])
def test_what_a_damaged_journal_hides_is_charged_all_the_same(root: Path, clock: Clock, damaged: DiskTier, where: str) -> None:
    if where == "unread record":
        other = open_tier(root, clock)
        path = journal_of(root, damaged)
        end = path.stat().st_size
        assert save(damaged, 1)
        flip(path, end + 20)
    else:
        path = journal_of(root, damaged)
        flip(path, 20 if where == "header" else HEADER_BYTES + 10)
        other = open_tier(root, clock)
    for seed in range(100, 400):
        save((damaged, other)[seed % 2], seed)
        clock.now += 0.02  # of ten seconds, after which a writer looks at its journal
        assert charged(root) <= CAPACITY
    assert {problem.where for problem in other.check()} <= {str(path) for path in segments(root)}
    assert [p for p in damaged.check() if "not what was written" in p.what]
    other.close()


def test_a_writer_renews_a_journal_that_does_not_read_back(root: Path, clock: Clock, damaged: DiskTier) -> None:
    path = journal_of(root, damaged)
    other = open_tier(root, clock)
    flip(path, HEADER_BYTES + 10)
    third = open_tier(root, clock)
    assert found(third, [0]) == set()
    clock.now += 11
    assert save(damaged, 1)
    assert not path.exists()
    assert damaged.statistics().counters["journal_damaged"] == 1
    for tier in (other, third):
        tier.refresh()
        assert found(tier, [0, 1]) == {0, 1}
        assert save(tier, 2)
        assert tier.check() == []
        tier.close()


@pytest.mark.parametrize("garbage", ["zeros", "noise", "lengths"])
def test_a_living_journal_that_was_extended_takes_no_hits_away(
    root: Path, clock: Clock, damaged: DiskTier, garbage: str
) -> None:
    path = journal_of(root, damaged)
    other = open_tier(root, clock)
    if garbage == "zeros":
        os.truncate(path, 500 << 20)  # sparse
    else:
        with path.open("ab") as file:
            file.write(b"\x00\x00\x0f\x00" * (300 << 10) if garbage == "lengths" else os.urandom(1 << 20))
    for seed in (1, 2):
        assert save(damaged, seed)
        other.refresh()
        assert found(other, range(seed + 1)) == set(range(seed + 1))
    clock.now += 11
    assert save(damaged, 3)
    assert journal_of(root, damaged).stat().st_size < 1 << 20
    other.refresh()
    assert found(other, range(4)) == {0, 1, 2, 3}
    assert other.check() == []
    other.close()


@pytest.mark.parametrize("dead", [1, 2])
def test_dead_journals_that_fill_the_cap_are_taken_in(root: Path, clock: Clock, dead: int) -> None:
    tiers = [open_tier(root, clock) for _ in range(dead)]
    for seed, tier in enumerate(tiers):
        assert save(tier, seed)
        assert save(tier, seed + 10)
        assert tier.delete([next(i.id for i in tier.scan())], reason="user") == 1
    for tier in tiers:
        tier.close()
    for path in journals(root):
        with path.open("ab") as file:
            file.write(os.urandom(CAPACITY // dead))
    tier = open_tier(root, clock)
    there = found(tier, range(20))
    assert len(there) == dead
    assert charged(root) < CAPACITY // 4
    assert save(tier, 5)
    assert tier.check() == []
    tier.close()
    tier = open_tier(root, clock)
    assert found(tier, range(20)) == there | {5}
    tier.close()


def test_a_sparse_segment_without_a_journal_is_read_no_further_than_it_may_be(root: Path, clock: Clock) -> None:
    tier = open_tier(root, clock)
    assert save(tier, 1)
    tier.close()
    journals(root)[0].unlink()
    os.truncate(segments(root)[0], 1 << 40)
    tier = open_tier(root, clock)
    assert found(tier, [1]) == {1}
    tier.close()


def test_opening_at_the_cap_keeps_to_it(root: Path, clock: Clock) -> None:
    tiers = [open_tier(root, clock)]
    for seed in range(120):
        assert save(tiers[0], seed)
    assert charged(root) > CAPACITY - 5 * len(image(0))
    for _ in range(8):
        tiers.append(open_tier(root, clock))
        assert charged(root) <= CAPACITY
    for seed in range(200, 220):
        save(tiers[seed % len(tiers)], seed)
        assert charged(root) <= CAPACITY
    for tier in tiers:
        assert tier.check() == []
        tier.close()


def test_a_journal_that_takes_long_to_read_back_is_read_back_seldom(
    damaged: DiskTier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def reads_back() -> bool:
        read.append(clock.now)
        clock.now += 5
        return True

    monkeypatch.setattr(damaged._store.upkeep, "reads_back", reads_back)
    for seed in range(100, 200):
        clock.now += 15
        assert save(damaged, seed)
    assert 2 <= len(read) <= 4, "a hundredth of the time"
