"""Several machines on one bucket, with clocks of their own: what one saved the others find, one collects, what goes goes in two
steps, and what outlives its lease is a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import object_kit
import obstore
import pool_kit
import pytest
from object_kit import Machine

from headstart.block.checks import Sealing, keyed
from headstart.errors import FormatMismatch, StoreError
from headstart.metrics import Counters
from headstart.testing.fake_kv import TINY
from headstart.tier.base import ReadRange, Terms
from headstart.tier.disk.door import Entry
from headstart.tier.object import Bucket, ObjectTier
from headstart.tier.object.object_disk import ObjectDisk

Make = Callable[..., Machine]


def keys_of(store: Any, folder: str) -> list[str]:
    return [one["path"] for page in obstore.list(store, folder) for one in page]


def test_what_one_machine_saved_the_others_find_at_their_next_look(machine: Make) -> None:
    a, b = machine(), machine(ahead_s=-200)
    assert a.save(1) == "written"
    assert not b.reads(1)
    b.wait(1)
    assert b.found([1]) == {1}
    assert b.save(1) == "present"


def test_two_that_save_one_prefix_at_once_store_two_good_copies(machine: Make, store: Any) -> None:
    a, b = machine(), machine()
    assert (a.save(1), b.save(1)) == ("written", "written")
    for one in (a, b):
        one.wait(1)
        assert one.found([1]) == {1}
        assert one.save(1) == "present"
    assert len(keys_of(store, "segments")) == 2


def test_a_save_is_two_objects_and_a_look_whether_the_journal_is_there(machine: Make) -> None:
    a = machine()
    a.save(1)
    before = a.tier.statistics().counters
    a.save(2)
    after = a.tier.statistics().counters
    assert after["object_requests_put"] - before["object_requests_put"] == 2
    assert after["object_requests_head"] - before["object_requests_head"] == 2  # before and behind the extent
    assert after["object_requests_list"] == before["object_requests_list"]
    assert after["object_bytes_sent"] - before["object_bytes_sent"] > pool_kit.image(2).nbytes


def test_a_look_at_silent_writers_is_one_listing_however_many_they_are(machine: Make) -> None:
    crowd = [machine() for _ in range(4)]
    a = crowd[0]
    for one in crowd:
        one.save(crowd.index(one))
    a.tier._store.follow()
    before = a.tier.statistics().counters
    a.tier._store.follow()
    after = a.tier.statistics().counters
    assert {
        name: after[name] - before[name]
        for name in after
        if name.startswith("object_requests_") and after[name] != before[name]
    } == {"object_requests_list": 1}


def test_a_part_of_an_extent_comes_with_one_request_for_as_long_as_its_lease_holds(machine: Make) -> None:
    a, b = machine(), machine()
    a.save(1)
    b.wait(1)
    extent, whole = b.extent(1), pool_kit.image(1)
    with pytest.raises(StoreError, match="not leased"):
        list(b.tier.stream(extent, 0, 4096))
    assert b.tier.lease([extent]) == [True]
    before = b.tier.statistics().counters.get("object_requests_get", 0)
    assert b"".join(b.tier.stream(extent, 4096, whole.nbytes - 4096)) == whole[4096:]
    assert b.tier.statistics().counters["object_requests_get"] - before == 1
    with pytest.raises(StoreError, match="were asked for"):
        list(b.tier.stream(extent, 4096, whole.nbytes))
    late = b.tier.stream(extent, 0, whole.nbytes)
    b.clock.now += pool_kit.TIMING.lease_s + 1
    with pytest.raises(StoreError, match="outlived"):
        list(late)
    assert b.tier.statistics().counters["lease_outlived"] == 1
    b.tier.release([extent])


def test_a_journal_of_many_objects_begins_anew(machine: Make, store: Any) -> None:
    a, b = machine(), machine()
    for seed in range(70):
        a.save(seed, 1)
        a.tier._store.touch([a.extent(seed, 1)])
        a.tier._store.flush()
    a.wait(10)
    assert len(keys_of(store, "journals")) < 16
    b.wait(1)
    assert b.found(range(70), 1) == set(range(70))


def test_objects_go_a_grace_after_their_tombstones_and_names_never_come_back(machine: Make, store: Any) -> None:
    a, b = machine(), machine()
    a.save(1)
    (name,) = keys_of(store, "segments")
    b.wait(1)
    extent = b.extent(1)
    assert b.tier.lease([extent]) == [True]
    assert a.tier.delete([a.extent(1)], reason="user") == 1
    a.wait(30)
    b.wait(1)
    part = bytearray(4096)
    b.tier.read([ReadRange(extent, 0, [memoryview(part)])])  # removed, but within its grace
    assert not b.reads(1)
    b.clock.now += 60  # the lease is over; so is nearly the grace
    with pytest.raises(StoreError, match="lease"):
        b.tier.read([ReadRange(extent, 0, [memoryview(part)])])
    assert b.counter("lease_outlived") == 1
    b.tier.release([extent])
    a.wait(101)
    a.wait(1)
    assert keys_of(store, "segments") == []
    assert a.save(1) == "written"
    assert keys_of(store, "segments") != [name]


def test_one_of_several_collects_and_another_one_after_it_fell_silent(machine: Make) -> None:
    a, b = machine(), machine()
    for one in (a, b, a, b):
        one.wait(1)
    assert (a.tier.collects, b.tier.collects) == (True, False)
    for _ in range(12):
        b.wait(5)
    assert b.tier.collects
    a.wait(1)
    assert not a.tier.collects


def test_a_configured_collector_needs_no_election(machine: Make, store: Any) -> None:
    a, b = machine(collects=False), machine(collects=True)
    a.wait(1)
    b.wait(1)
    assert (a.tier.collects, b.tier.collects) == (False, True)
    assert keys_of(store, "terms") == []


def test_all_writers_together_keep_to_one_capacity_and_the_oldest_goes(machine: Make, store: Any) -> None:
    crowd = [machine(capacity_bytes=1 << 20) for _ in range(3)]
    written = []
    for seed in range(60):
        if crowd[seed % 3].save(seed) == "written":
            written.append(seed)
        for one in crowd:
            one.wait(25)
        taken = sum(one["size"] for page in obstore.list(store, "segments") for one in page)
        assert taken <= (1 << 20) + 3 * (pool_kit.image(0).nbytes + 4096)
    assert sum(one.counter("evicted_capacity") for one in crowd) > 0
    for one in crowd:
        one.wait(1)
        assert one.found(range(60)) == set(written[-len(one.found(range(60))) :])
        assert written[0] not in one.found(range(60))


def test_a_tenant_keeps_to_its_quota(machine: Make) -> None:
    from headstart.policy.retention import Retention

    a = machine(retention=Retention.of("default=0s..", "acme=256KiB"))
    written = [a.tier.write(pool_kit.image(seed), TINY, terms=Terms(tenant="acme")).reason for seed in range(8)]
    assert written.count("written") == 4
    assert set(written[4:]) == {"quota"}
    assert a.save(100) == "written"


def test_who_only_reads_finds_all_and_writes_nothing(machine: Make, store: Any) -> None:
    a = machine()
    a.save(1)
    before = keys_of(store, "")
    reader = machine(read_only=True)
    assert reader.found([1]) == {1}
    assert reader.save(2) == "stopped"
    reader.wait(60)
    assert keys_of(store, "") == before
    assert reader.tier.statistics().paused


def test_a_writer_whose_journal_was_taken_in_goes_on_as_another_one(machine: Make) -> None:
    a, b = machine(), machine()
    a.wait(1)
    b.save(1)
    a.wait(1)
    for _ in range(4):
        a.wait(101)
    assert a.counter("journals_taken_in") == 1
    assert a.found([1]) == {1}
    assert b.save(2) == "written"
    assert b.counter("registered_again") == 1
    a.wait(1)
    assert a.found([1, 2]) == {1, 2}


def test_runs_that_continue_each_other_become_one_object_before_they_go_there(machine: Make, store: Any) -> None:
    a, b = machine(), machine()
    long, other = pool_kit.prompt(6, seed=1), pool_kit.prompt(2, seed=2)
    tails = [long.image(first, 1) for first in (5, 2, 4, 3)]  # in any order
    images = [long.image(0, 2), other.image(), *tails]
    written = a.tier.write_all(images, TINY, terms=[Terms()] * len(images))
    assert [outcome.reason for outcome in written] == ["written"] * len(images)
    assert len(keys_of(store, "segments")) == 2
    assert a.counter("joined_extents") == 5
    b.wait(1)
    assert b.found([1], 6) == {1}
    assert b.found([2], 2) == {2}
    again = a.tier.write_all(images, TINY, terms=[Terms()] * len(images))
    assert {outcome.reason for outcome in again} == {"present"}


def test_of_runs_that_do_not_all_fit_those_before_the_first_refused_one_are_told(machine: Make) -> None:
    a = machine(capacity_bytes=1 << 20)
    prompts = [pool_kit.prompt(4, seed=seed) for seed in range(30)]
    images = [kv.image() for kv in prompts]
    told = a.tier.write_all(images, TINY, terms=[Terms()] * len(images))
    assert 0 < len(told) < len(images)
    assert [outcome.stored for outcome in told] == [True] * (len(told) - 1) + [False]


def test_a_refusal_is_told_whichever_run_it_met_first(machine: Make) -> None:
    """What is told of none is tried again and again."""
    a = machine(capacity_bytes=1 << 20)
    for seed in range(100, 140):
        a.save(seed)
    long, other = pool_kit.prompt(6, seed=1), pool_kit.prompt(4, seed=2)
    images = [long.image(3, 3), other.image(), long.image(0, 3)]  # as moving gives them: tails first
    told = a.tier.write_all(images, TINY, terms=[Terms()] * len(images))
    assert [outcome.reason for outcome in told] == ["full"]


def test_the_index_is_rebuilt_from_the_objects_where_journals_are_gone(machine: Make, store: Any) -> None:
    a = machine()
    for seed in range(3):
        a.save(seed)
    a.close()
    obstore.delete(store, keys_of(store, "journals"))
    obstore.put(store, f"segments/07/{'ab' * 16}-00000007.seg", b"somebody else's")
    b = machine()
    assert b.found(range(3)) == set()
    for _ in range(3):
        b.wait(200)
    assert b.found(range(3)) == {0, 1, 2}
    assert (b.counter("segments_adopted"), b.counter("adopt_failed"), b.counter("litter_removed")) == (3, 1, 1)
    assert machine().found(range(3)) == {0, 1, 2}


class Counting(Bucket):
    """Notes which segments are fetched whole."""

    fetched: list[str]

    def get(self, key: str) -> memoryview:
        if key.startswith("segments/"):
            self.fetched.append(key)
        return super().get(key)


def test_what_has_another_key_or_is_too_large_is_not_fetched_again_and_again(machine: Make, store: Any) -> None:
    pytest.importorskip("blake3")
    a = machine(sealing=Sealing((keyed(bytes(32)),)))
    for seed in range(3):
        a.save(seed)
    a.close()
    obstore.delete(store, keys_of(store, "journals"))
    there = keys_of(store, "segments")
    obstore.put(store, f"segments/07/{'ab' * 16}-00000007.seg", bytes(2 << 20))
    bucket = Counting(store, where="bucket/prefix", counters=Counters())
    bucket.fetched = []
    b = machine(bucket=bucket)
    for _ in range(5):
        b.wait(200)
    assert sorted(bucket.fetched) == sorted(there)
    assert keys_of(store, "segments") == there
    assert (b.counter("adopt_refused_key"), b.counter("adopt_failed"), b.counter("litter_removed")) == (3, 1, 1)


class Overtaken(Bucket):
    """A listing during which another one, begun later, is done."""

    meanwhile: Callable[[], object] | None = None

    def sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        found, (meanwhile, self.meanwhile) = [*super().sizes(folder)], (self.meanwhile, None)
        if meanwhile is not None:
            meanwhile()
        return iter(found)


def test_an_older_listing_of_journals_never_replaces_a_newer_one(store: Any) -> None:
    root = Path("bucket/prefix")
    bucket = Overtaken(store, where="bucket/prefix", counters=Counters())
    disk = ObjectDisk(bucket, root)
    name = f"{'ab' * 16}-00000000.log"

    def meanwhile() -> None:
        obstore.put(store, f"journals/{name}/{0:016x}", b"said")
        disk.entries(root / "journals")

    bucket.meanwhile = meanwhile
    assert disk.entries(root / "journals") == [Entry(name, False)]
    assert disk.facts(disk.open(root / "journals" / name, "read")).size == 4


def test_a_bucket_is_no_cache_directory(store: Any) -> None:
    obstore.put(store, "headstart.json", b'{"format": "headstart", "version": 1, "features": []}')
    with pytest.raises(FormatMismatch, match="cache directory of one machine"):
        ObjectTier.open_bucket(object_kit.bucket_over(store), capacity_bytes=8 << 20, background=False)
