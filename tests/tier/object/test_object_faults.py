"""A service that refuses, is silent, forgets or lies: a miss and a counter, and used again when it answers."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import obstore
import pool_kit
import pytest
from object_kit import FaultyBucket, Machine

from headstart.errors import ExtentCorrupt
from headstart.testing.fake_kv import TINY
from headstart.tier.base import ReadRange

Make = Callable[..., Machine]
BUSY = OSError(errno.EIO, "the service answers 503")


@pytest.fixture
def faulty(machine: Make, store: Any) -> Machine:
    return machine(bucket=FaultyBucket(store))


def faults(one: Machine) -> dict[str, OSError]:
    assert isinstance(one.bucket, FaultyBucket)
    return one.bucket.faults


def test_a_put_that_fails_stores_nothing_and_saving_goes_on_later(faulty: Machine, machine: Make) -> None:
    faults(faulty)["put"] = BUSY
    assert faulty.save(1) == "error"
    assert faulty.save(2) == "stopped"  # it is not asked again at once
    assert not faulty.reads(1)
    faults(faulty).clear()
    faulty.wait(60)
    assert faulty.save(1) == "written"
    other = machine()
    assert other.found([1, 2]) == {1}


@pytest.mark.parametrize("late", [False, True])
def test_an_append_in_doubt_is_never_written_over_and_never_lost(faulty: Machine, machine: Make, late: bool) -> None:
    """Whether the journal's object was put is not known: the writer goes on under another name, whichever it was."""
    other = machine()
    faulty.save(0)
    faults(faulty)["put journal"] = OSError(errno.ETIMEDOUT, "the service does not answer in time")
    assert isinstance(faulty.bucket, FaultyBucket)
    faulty.bucket.late = late
    assert faulty.save(1) == "error"
    faults(faulty).clear()
    faulty.wait(60)
    assert faulty.save(2) == "written"
    assert faulty.counter("registered_again") == 1
    for one in (faulty, other):
        one.wait(1)
        assert {0, 2} <= one.found([0, 1, 2])


def test_a_generation_in_doubt_is_never_followed_by_one_of_the_same_name(faulty: Machine, machine: Make) -> None:
    other = machine()
    faulty.save(1)
    faults(faulty)["put journal"] = OSError(errno.ETIMEDOUT, "the service does not answer in time")
    assert isinstance(faulty.bucket, FaultyBucket)
    faulty.bucket.late = True
    with faulty.tier._store.turn(), pytest.raises(OSError, match="in time"):
        faulty.tier._store.renew()
    faults(faulty).clear()
    assert faulty.save(2) == "written"
    assert faulty.counter("registered_again") == 1
    other.wait(1)
    assert other.found([1, 2]) == {1, 2}


def test_an_object_whose_put_was_in_doubt_goes_while_its_writer_lives(
    faulty: Machine, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.save(0)
    bucket, hangs = faulty.bucket, OSError(errno.ETIMEDOUT, "the service does not answer in time")
    assert isinstance(bucket, FaultyBucket)
    bucket.faults["put"], bucket.late = hangs, True

    def no_delete(keys: Any) -> None:
        raise hangs

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "delete", no_delete)
        assert faulty.save(1) == "error"
    bucket.faults.clear()
    assert len([one for page in obstore.list(store, "segments") for one in page]) == 2
    for _ in range(13):
        faulty.wait(50)
    assert len([one for page in obstore.list(store, "segments") for one in page]) == 1
    assert faulty.found([0]) == {0}


def test_a_journal_that_lost_its_beginning_is_removed_and_its_extents_are_not_lost(machine: Make, store: Any) -> None:
    """Whoever removed it died over it, or its writer added to it meanwhile. The writer itself is gone."""
    a = machine()
    a.save(1)
    a.tier._store.touch([a.extent(1)])
    a.tier._store.flush()
    obstore.delete(store, f"journals/{a.tier._store.journal.writer.hex()}-00000000.log/{0:016x}")
    assert [one for page in obstore.list(store, "journals") for one in page]
    a.tier._closed = True  # as if it had been killed
    b = machine(collects=True)
    for _ in range(8):
        b.wait(100)
    assert b.counter("journals_unreadable") == 0
    assert not [one for page in obstore.list(store, "journals/" + a.tier._store.journal.writer.hex()) for one in page]
    assert b.found([1]) == {1}


def test_a_service_that_passes_over_conditions_elects_nobody(machine: Make, store: Any) -> None:
    class Careless(FaultyBucket):
        def _put(self, key: str, data: Any, **how: Any) -> None:
            super()._put(key, data, **{name: value for name, value in how.items() if name != "mode"})

    crowd = [machine(bucket=Careless(store)) for _ in range(2)]
    for _ in range(3):
        for one in crowd:
            one.wait(100)
    assert [one.tier.collects for one in crowd] == [False, False]
    assert crowd[0].save(1) == "written"
    crowd[1].wait(1)
    assert crowd[1].found([1]) == {1}


def test_a_service_that_is_silent_costs_misses_and_is_used_again(faulty: Machine) -> None:
    faulty.save(1)
    assert faulty.reads(1)
    faults(faulty)["list"] = OSError(errno.ETIMEDOUT, "the service does not answer in time")
    for _ in range(4):
        faulty.wait(5)
    assert not faulty.reads(1)
    assert faulty.counter("look_failed") > 0
    assert faulty.counter("locate_refused_silent") > 0
    assert faulty.tier.statistics().paused == "the service does not answer"
    faults(faulty).clear()
    faulty.wait(1)
    assert faulty.found([1]) == {1}
    assert faulty.tier.statistics().paused == ""


def test_a_read_that_fails_is_the_callers_error_and_the_extent_stays(faulty: Machine) -> None:
    faulty.save(1)
    faults(faulty)["read"] = BUSY
    with pytest.raises(OSError, match="503"):
        faulty.reads(1)
    assert faulty.counter("read_failed_eio") > 0
    faults(faulty).clear()
    assert faulty.found([1]) == {1}


@pytest.mark.parametrize("what", ["flipped", "cut", "another"])
def test_bytes_that_are_not_what_was_written_are_quarantined_for_all(machine: Make, store: Any, what: str) -> None:
    a, b = machine(), machine()
    a.save(1)
    (key,) = [one["path"] for page in obstore.list(store, "segments") for one in page]
    good = bytes(obstore.get(store, key).bytes())
    if what == "another":
        a.save(2)
        (other,) = [one["path"] for page in obstore.list(store, "segments") for one in page if one["path"] != key]
        bad = bytes(obstore.get(store, other).bytes())
    else:
        bad = good[:-4096] if what == "cut" else good[:9000] + bytes([good[9000] ^ 1]) + good[9001:]
    obstore.put(store, key, bad)
    b.wait(1)
    extent = b.extent(1)
    b.tier.lease([extent])
    part = bytearray(8192)
    if what == "cut":
        for behind in (8192, 4096):  # a part of which some is there, and one of which nothing is
            with pytest.raises(ExtentCorrupt, match="cut"):
                b.tier.read([ReadRange(extent, pool_kit.image(1).nbytes - behind, [memoryview(part)[:behind]])])
    b.tier.release([extent])
    assert b.tier.delete([extent], reason="corrupt") == 1
    a.wait(1)
    assert a.extent(1) < 0
    assert a.save(1) == "written"


def test_what_came_right_after_all_is_found_again(machine: Make, store: Any) -> None:
    """A check refused bytes that were flipped on their way: read anew they are right, and nothing is said against them."""
    a, b = machine(), machine()
    a.save(1)
    b.wait(1)
    assert b.tier.delete([b.extent(1)], reason="corrupt") == 0
    assert b.counter("late_bytes") == 1
    assert b.found([1]) == {1}


def test_an_object_that_somebody_deleted_is_a_miss(machine: Make, store: Any) -> None:
    a, b = machine(collects=False), machine(collects=False)
    a.save(1)
    b.wait(1)
    obstore.delete(store, [one["path"] for page in obstore.list(store, "segments") for one in page])
    for one in (a, b):
        for _ in range(2):
            with pytest.raises(OSError, match="no such object"):
                one.reads(1)
            one.wait(3)
        assert one.counter("read_failed_enoent") > 0
        assert not one.reads(1)
        assert one.counter("segments_lost") == 1


def test_a_service_without_conditional_puts_is_used_without_a_collector(faulty: Machine) -> None:
    faults(faulty)["create"] = OSError(errno.ENOTSUP, "the service cannot do that")
    for _ in range(3):
        faulty.wait(5)
    assert faulty.save(1) == "written"
    assert faulty.found([1]) == {1}
    assert TINY.digest in faulty.tier.representations()


def test_credentials_that_may_only_read_make_a_reader(machine: Make, store: Any) -> None:
    a = machine()
    a.save(1)
    bucket = FaultyBucket(store)
    bucket.faults = dict.fromkeys(("put", "put journal", "create"), OSError(errno.EACCES, "the service refuses"))
    reader = machine(bucket=bucket)
    assert reader.found([1]) == {1}
    assert reader.save(2) == "stopped"
