"""What a bucket is asked for when there is much in it: requests and bytes are paid for, and whoever follows waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import obstore
import pool_kit
import pytest
from object_kit import Machine

from headstart.metrics import Counters
from headstart.testing.fake_kv import TINY
from headstart.tier.base import Terms
from headstart.tier.object import Bucket

Make = Callable[..., Machine]


def requests(one: Machine, kind: str) -> int:
    return one.counter(f"object_requests_{kind}")


def test_a_journal_is_fetched_once_however_long_it_is(machine: Make, store: Any) -> None:
    """It is read in steps of 64 KiB, of objects that are much longer."""
    a, b = machine(capacity_bytes=64 << 20), machine(capacity_bytes=64 << 20)
    for seed in range(300):
        assert a.tier.write(pool_kit.image(seed, 1), TINY, terms=Terms(tenant="t" * 250)).reason == "written"
    a.tier._store.renew()
    sizes = [one["size"] for page in obstore.list(store, "journals") for one in page]
    assert max(sizes) > 2 << 16
    for one, act in ((a, a.tier._store.journal.reads_back), (b, b.tier._store.follow)):
        gets, nbytes = requests(one, "get"), one.counter("object_bytes_received")
        assert act()
        assert requests(one, "get") - gets <= len(sizes)
        assert one.counter("object_bytes_received") - nbytes <= sum(sizes)
    assert b.found(range(300), 1) == set(range(300))


def test_a_long_journal_begins_anew_less_often(machine: Make, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a = machine()
    a.save(0)
    monkeypatch.setattr("headstart.tier.object.store._SNAPSHOT_BYTES", 1)  # as if it were very long
    for _ in range(140):
        a.tier._store.touch([a.extent(0)])
        a.tier._store.flush()
    a.wait(1)
    assert sum(1 for page in obstore.list(store, "journals") for _ in page) > 140


def test_many_objects_go_with_one_request(machine: Make, store: Any) -> None:
    a = machine(collects=True)
    for seed in range(50):
        a.save(seed, 1)
    assert a.tier.delete([a.extent(seed, 1) for seed in range(50)], reason="user") == 50
    a.wait(1)
    before = requests(a, "delete")
    a.wait(101)
    assert a.counter("segments_collected") == 50
    assert requests(a, "delete") - before == 1
    assert list(obstore.list(store, "segments")) == []


def test_a_write_to_a_full_bucket_asks_for_nothing_that_is_within_its_grace(machine: Make) -> None:
    """Nobody says which objects are gone, so they are asked for, but only those that may be."""
    a, b = machine(capacity_bytes=1 << 20, collects=True), machine(capacity_bytes=1 << 20, collects=False)
    seed = 0
    while b.save(seed, 1) == "written":
        b.clock.now += 3  # a share of the room for each such window
        seed += 1
    a.wait(1)
    a.tier.delete([a.extent(one, 1) for one in range(seed)], reason="user")
    a.wait(1)
    b.wait(1)
    before = requests(b, "head")
    assert b.save(1000, 1) == "full"
    assert requests(b, "head") - before <= 2
    a.wait(101)
    b.wait(101)
    assert b.save(1000, 1) == "written"


def test_what_left_its_journal_is_known_from_one_listing(machine: Make) -> None:
    a, b = machine(collects=True), machine(collects=False)
    for seed in range(40):
        a.save(seed, 1)
    a.tier.delete([a.extent(seed, 1) for seed in range(40)], reason="user")
    a.wait(1)
    a.wait(101)
    b.wait(1)
    assert a.counter("segments_collected") == 40
    before = requests(b, "head")
    b.tier._store.forget_missing(b.tier._store.look_around())
    assert b.counter("segments_lost") == 40
    assert requests(b, "head") - before == 1  # whether the bucket is there


def test_where_an_extent_begins_bytes_come_in_steps_and_behind_that_at_once(store: Any) -> None:
    data = bytes(range(256)) * (6 << 12)
    bucket = Bucket(store, where="bucket", counters=Counters())
    bucket.put("one", [data])
    for at_once in (False, True):
        asked, *chunks = bucket.stream("one", 100, len(data) - 100, at_once=at_once)
        assert asked == b""
        assert b"".join(chunks) == data[100:]
        assert not at_once or len(chunks) == 1


def test_of_an_extent_only_the_beginning_is_taken_as_it_comes(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = machine()
    one.save(1)
    extent, whole = one.extent(1), pool_kit.image(1)
    stream, seen = Bucket.stream, []

    def watched(self: Bucket, key: str, offset: int, nbytes: int, *, at_once: bool) -> Any:
        seen.append(at_once)
        return stream(self, key, offset, nbytes, at_once=at_once)

    monkeypatch.setattr(Bucket, "stream", watched)
    assert one.tier.lease([extent]) == [True]
    for offset in (0, 4096):
        assert b"".join(one.tier.stream(extent, offset, whole.nbytes - offset)) == whole[offset:]
    one.tier.release([extent])
    assert seen == [False, True]
