"""Many machines on one pool, each with clocks of its own: what they see of each other, who collects, and what a lease is
worth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pool_kit import CAPACITY, TIMING, Machine, image, keys, taken_bytes

from headstart.errors import FormatMismatch, StoreError, TierUnavailable
from headstart.policy.retention import Retention
from headstart.testing.fake_kv import TINY
from headstart.tier.base import ReadRange, Terms
from headstart.tier.disk import DiskTier
from headstart.tier.disk.records import Record, SegmentName, SegmentOpened, SegmentSealed
from headstart.tier.pool import PoolTier, Timing

Make = Callable[..., Machine]
SMALL = 3 << 20


def test_what_one_machine_saved_is_found_by_the_others_at_their_next_look(machine: Make) -> None:
    a, b = machine(), machine(ahead_s=240)
    assert a.save(1) == "written"
    assert b.found([1]) == set()
    b.wait(0.2)
    assert b.found([1]) == {1}
    assert b.save(1) == "present"
    c = machine(ahead_s=-300)
    assert c.found([1]) == {1}


def test_two_machines_that_save_one_prompt_at_once_lose_only_space(machine: Make) -> None:
    a, b = machine(), machine()
    assert (a.save(1), b.save(1)) == ("written", "written")
    for one in (a, b):
        one.wait(0.2)
        assert one.found([1]) == {1}
        assert one.tier.statistics().extents == 2


def test_one_machine_collects_and_the_next_begins_when_it_closes(machine: Make) -> None:
    a, b = machine(), machine()
    assert (a.tier.collects, b.tier.collects) == (True, False)
    a.close()
    b.wait(2)
    assert b.tier.collects


def test_a_collector_that_says_nothing_is_replaced_and_steps_down_when_it_wakes(machine: Make) -> None:
    a, b = machine(), machine()
    b.wait(TIMING.term_s + 1)  # a stands still
    assert b.tier.collects
    assert a.tier.collects  # it does not know yet
    a.wait(2)
    assert not a.tier.collects
    b.wait(2)
    assert b.tier.collects


def test_a_collector_that_lives_is_not_replaced_however_the_clocks_differ(machine: Make) -> None:
    a, b = machine(ahead_s=600), machine(ahead_s=-600)
    for _ in range(12):
        a.wait(10)
        b.wait(10)
    assert (a.tier.collects, b.tier.collects) == (True, False)


def test_the_removed_stay_for_a_grace_by_the_collectors_clock_and_a_lease_ends_before(machine: Make, root: Path) -> None:
    a, b = machine(), machine()
    a.save(1)
    b.wait(0.2)
    extent = b.extent(1)
    assert b.tier.lease([extent]) == [True]
    assert a.tier.delete([a.extent(1)], reason="user") == 1
    a.wait(1)
    b.wait(1)
    assert b.extent(1) == -1
    got = bytearray(4096)
    assert b.tier.read([ReadRange(extent, 0, [memoryview(got)])]) == 4096  # it was removed, and the lease holds
    assert got == image(1)[:4096]
    assert b.tier.shape(extent) is not None
    a.wait(TIMING.grace_s - 2)
    assert taken_bytes(root) > 0
    b.clock.now += TIMING.lease_s
    with pytest.raises(StoreError) as refused:
        b.tier.read([ReadRange(extent, 0, [memoryview(got)])])
    assert refused.value.facts["reason"] == "lease"
    assert b.counter("lease_outlived") == 1
    b.tier.release([extent])
    a.wait(3)
    assert taken_bytes(root) == 0


def test_a_new_collector_counts_every_grace_anew(machine: Make, root: Path) -> None:
    a, b = machine(), machine()
    a.save(1)
    a.tier.delete([a.extent(1)], reason="user")
    a.wait(TIMING.grace_s - 1)
    b.wait(TIMING.grace_s)  # it has heard nothing of a until now
    b.wait(TIMING.term_s + 1)
    assert b.tier.collects
    b.wait(TIMING.grace_s - 5)
    assert taken_bytes(root) > 0
    b.wait(TIMING.dead_s)  # a's segment is sealed once a is taken for dead
    b.wait(TIMING.grace_s + 1)
    assert taken_bytes(root) == 0


def test_a_writer_that_was_taken_for_dead_goes_on_as_another_one(machine: Make, root: Path) -> None:
    a, b = machine(), machine()
    b.wait(1)
    b.save(1)
    a.wait(1)
    a.wait(TIMING.dead_s + 1)  # b stands still
    a.wait(40)
    assert a.counter("journals_taken_in") >= 1
    assert a.found([1]) == {1}
    b.clock.now += 3
    assert b.save(2) == "written"
    assert b.counter("registered_again") == 1
    a.wait(1)
    assert a.found([1, 2]) == {1, 2}
    b.wait(1)
    assert b.found([1, 2]) == {1, 2}
    c = machine()
    assert c.found([1, 2]) == {1, 2}


def test_journals_of_writers_that_left_are_taken_in_and_what_they_stored_stays(machine: Make, root: Path) -> None:
    a = machine()
    for seed in range(6):
        one = machine()
        one.save(seed)
        one.close()
    a.wait(1)
    assert len(list((root / "journals").iterdir())) == 7
    a.wait(TIMING.grace_s + 1)
    a.wait(40)
    assert len(list((root / "journals").iterdir())) == 1
    assert a.found(range(6)) == set(range(6))
    a.close()
    b = machine()
    assert b.found(range(6)) == set(range(6))


def test_all_writers_together_pass_the_capacity_by_at_most_a_segment_each(machine: Make, root: Path) -> None:
    machines = [machine(capacity_bytes=SMALL) for _ in range(4)]
    most = 0
    for seed in range(200):
        machines[seed % 4].save(seed)
        most = max(most, taken_bytes(root))
        if seed % 10 == 9:
            for one in machines:
                one.wait(TIMING.grace_s / 4)
    assert most <= SMALL + 4 * SMALL // 8
    assert most > SMALL // 2
    assert sum(one.counter("evicted_capacity") for one in machines) > 0
    for one in machines:
        one.wait(1)
        one.found(range(200))  # which compares every byte


def test_what_is_read_while_the_pool_is_full_is_right_or_missed(machine: Make) -> None:
    a, b = machine(capacity_bytes=SMALL), machine(capacity_bytes=SMALL, ahead_s=300)
    for seed in range(150):
        a.save(seed)
        if seed % 10 == 9:
            a.wait(TIMING.grace_s / 3)
            b.wait(TIMING.grace_s / 3)
            assert b.found(range(max(0, seed - 60), seed + 1))
    assert a.counter("segments_collected") > 0


def test_a_tenants_quota_holds_for_all_machines_together(machine: Make) -> None:
    retention = Retention.of("", "acme=1MiB")
    a, b = machine(retention=retention), machine(retention=retention)
    reasons = []
    for seed in range(40):
        one = (a, b)[seed % 2]
        reasons.append(one.tier.write(image(seed), TINY, terms=Terms(tenant="acme")).reason)
        a.wait(0.2)
        b.wait(0.2)
        assert b.tier.statistics().live_bytes_by_tenant.get("acme", 0) <= 1 << 20
    assert "quota" in reasons or b.tier.statistics().live_bytes_by_tenant["acme"] < 1 << 20
    a.wait(2)
    b.wait(2)
    assert a.counter("evicted_quota") > 0
    assert b.tier.write(image(99), TINY, terms=Terms(tenant="acme")).stored


def test_a_clock_that_is_ahead_ends_no_promise_early(machine: Make) -> None:
    retention = Retention.of("brief=60s..120s", "")
    collector, writer = machine(retention=retention, ahead_s=10 * 60), machine(retention=retention)
    assert writer.tier.write(image(1), TINY, terms=Terms("brief")).stored
    collector.wait(61)
    assert collector.found([1]) == {1}
    collector.wait(16 * 60)
    collector.wait(20)
    writer.wait(1)
    assert writer.found([1]) == set()


def test_a_machine_that_may_only_read_reads_and_writes_nothing(machine: Make, root: Path) -> None:
    a = machine()
    a.save(1)
    before = sorted(path.name for path in root.rglob("*"))
    reader = machine(read_only=True)
    assert reader.found([1]) == {1}
    assert reader.save(2) == "stopped"
    assert reader.tier.delete([reader.extent(1)], reason="user") == 0
    reader.wait(TIMING.term_s * 10)
    assert not reader.tier.collects
    assert sorted(path.name for path in root.rglob("*")) == before
    a.save(3)
    reader.wait(1)
    assert reader.found([1, 3]) == {1, 3}


def test_pins_and_classes_of_one_machine_hold_against_anothers_collecting(machine: Make) -> None:
    collector, a = machine(capacity_bytes=SMALL), machine(capacity_bytes=SMALL)
    a.save(1)
    a.save(2)
    assert a.tier.pin([a.extent(1)], until_ms=None) == [True]
    a.tier.keep([a.extent(2)], Terms("agent"))
    a.wait(6)
    for seed in range(100, 220):
        collector.save(seed)
        if seed % 10 == 9:
            collector.wait(TIMING.grace_s / 2)
            a.wait(TIMING.grace_s / 2)
    assert collector.counter("evicted_capacity") > 0
    assert a.found([1, 2]) == {1, 2}


def test_a_cache_directory_is_no_pool_and_a_pool_no_cache_directory(machine: Make, root: Path, tmp_path: Path) -> None:
    machine()
    with pytest.raises(FormatMismatch, match="give it as --pool"):
        DiskTier.open(root, capacity_bytes=CAPACITY)
    DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY).close()
    with pytest.raises(FormatMismatch, match="cannot become a pool"):
        PoolTier.open(tmp_path / "kv", capacity_bytes=CAPACITY)
    with pytest.raises(TierUnavailable, match="mount its file system"):
        PoolTier.open(tmp_path / "nowhere", capacity_bytes=CAPACITY)


def test_a_lease_that_could_outlive_the_grace_is_refused() -> None:
    with pytest.raises(ValueError, match="may outlive"):
        Timing(lease_s=60.0, grace_s=61.0)


def test_what_is_gone_is_told_from_what_was_never_there(machine: Make) -> None:
    a, b = machine(), machine()
    a.save(1)
    a.tier.delete([a.extent(1)], reason="user")
    b.wait(1)
    gone = b.tier.removed(TINY.digest, keys(1), before_ms=1 << 60)
    assert {one.reason for one in gone if one is not None} == {"user"}
    assert b.tier.removed(TINY.digest, keys(2), before_ms=1 << 60) == [None] * 4


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("nbytes", [CAPACITY + 4096, (1 << 62) - 4096])
def test_a_segment_that_is_said_to_be_huge_takes_the_room_of_one(machine: Make, sealed: bool, nbytes: int) -> None:
    a, b = machine(), machine()
    a.save(1)
    journal = a.tier._store.journal
    name = SegmentName(journal.writer, 1 << 20)
    lies: list[Record] = [SegmentOpened(name, 4096, 4096 if sealed else nbytes, 0, TINY.digest)]
    journal.append(lies + [SegmentSealed(name, nbytes)] * sealed, sync=True)
    b.wait(1)
    room = b.tier._store.room.reserved_bytes() - a.tier._store.room.reserved_bytes()
    assert 0 < room <= CAPACITY // 8 + 4096  # the lies themselves are in a journal
    assert b.save(2) == "written"
    assert b.found([1, 2]) == {1, 2}
