"""S8 Failure is a miss: no fault of a tier reaches the engine; each is counted."""

from __future__ import annotations

import shutil
import threading

import pytest

from headstart.testing.fake_kv import TINY, FakeDestination
from headstart.testing.faults import Fault
from headstart.testing.faulty_disk import DiskFault
from headstart.testing.round_trip import finish, hit_tokens, load, match, save
from headstart.testing.tier_contract import prompt, together


def counted(cache) -> int:
    """The sum of all counters, the cache's and its tiers', that speak of something that went wrong."""
    statistics = cache.statistics()
    every = [statistics.counters, *(tier.counters for tier in statistics.tiers)]
    words = ("fail", "error", "corrupt", "quarantined", "wrong", "timeout", "dropped")
    return sum(n for counters in every for name, n in counters.items() if any(word in name for word in words))


@pytest.mark.parametrize("kind", ["eio", "enospc", "corrupt"])
@pytest.mark.parametrize("verb", ["locate", "lease", "touch", "read", "write", "delete"])
def test_no_verb_that_fails_reaches_the_engine(shelf, verb: str, kind: str) -> None:
    cache = shelf.open("both", faulty=True)
    save(cache, prompt(4))
    shelf.tiers[0].delete([info.id for info in shelf.tiers[0].scan()], reason="user")
    before = counted(cache)
    shelf.faulty.inject(Fault(verb, kind))
    for seed in range(2):
        found = load(cache, prompt(4, seed=seed))
        assert found.wrong == []
        save(cache, prompt(4, seed=seed))
    if shelf.faulty.injected:
        assert counted(cache) > before
    shelf.faulty.heal()
    save(cache, prompt(4, seed=9))
    assert load(cache, prompt(4, seed=9)).usable_tokens == 256
    cache.check()


def test_a_store_that_failed_is_not_visible(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    shelf.faulty.inject(Fault("write", "eio", every=7))
    kvs = [prompt(2, seed=s) for s in range(30)]
    results = [save(cache, kv) for kv in kvs]
    failed = [r for r in results if r.reason is not None]
    assert len(failed) == shelf.faulty.injected["write", "eio"] > 0
    assert {r.reason for r in failed} == {"error"}
    for kv, result in zip(kvs, results, strict=True):
        found = load(cache, kv)
        assert (found.usable_tokens, found.wrong) == (result.stored_tokens, [])


def test_a_tier_whose_every_read_fails_serves_nothing_and_says_so(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    save(cache, prompt(4))
    shelf.faulty.inject(Fault("read", "eio"))
    with match(cache, prompt(4)) as lease:
        found = finish(lease, prompt(4))
    assert found.usable_tokens == 0
    assert sum(found.load.tokens_by_tier.values()) == 0
    assert counted(cache) > 0


def test_a_broken_disk_below_leaves_what_memory_holds(shelf) -> None:
    cache = shelf.open("both", faulty=True)
    save(cache, prompt(4))
    shelf.faulty.inject(Fault("read", "eio"), Fault("write", "eio"), Fault("locate", "eio"))
    assert load(cache, prompt(4)).usable_tokens == 256


@pytest.mark.parametrize("kind", ["eio", "enospc", "emfile", "erofs", "vanished", "late", "short"])
@pytest.mark.parametrize("call", ["any", "open", "read", "write", "reserve", "sync", "rename", "entries", "truncate", "facts"])
def test_no_call_to_the_disk_that_fails_reaches_the_engine(shelf, call: str, kind: str) -> None:
    cache = shelf.open_small("disk", crashable=True)
    kvs = [prompt(24, seed=s) for s in range(9)]
    for kv in kvs[:2]:
        save(cache, kv)
    for every in (1, 3):
        shelf.faulty_disk.inject(DiskFault(call, kind, every=every))
        for kv in kvs:
            assert load(cache, kv).wrong == []
            save(cache, kv)
        shelf.faulty_disk.heal()
        assert load(cache, kvs[0]).wrong == []
    shelf.crash()
    cache = shelf.open_small("disk", crashable=True)
    assert cache.check() == []
    for kv in kvs:
        assert load(cache, kv).wrong == []
    save(cache, kvs[0])
    assert load(cache, kvs[0]).usable_tokens == 24 * 64


def test_a_full_disk_stops_storing_serves_hits_and_resumes_by_itself(shelf) -> None:
    cache = shelf.open("disk", crashable=True, disk_bytes=32 << 20)
    save(cache, prompt(6))
    shelf.faulty_disk.inject(*(DiskFault(call, "enospc") for call in ("write", "reserve")))
    reasons: list[str | None] = []

    def serve(thread: int) -> None:
        for number in range(4):
            reasons.append(save(cache, prompt(6, seed=1 + thread * 10 + number)).reason)
            assert load(cache, prompt(6)).wrong == []

    together(serve, count=8)
    assert None not in reasons
    assert load(cache, prompt(6)).usable_tokens == 384
    shelf.faulty_disk.heal()
    shelf.skip(3600)
    assert save(cache, prompt(6, seed=500)).reason is None
    assert load(cache, prompt(6, seed=500)).usable_tokens == 384


def test_files_that_vanish_between_match_and_load_are_a_miss(shelf) -> None:
    cache = shelf.open("disk")
    kv = prompt(6)
    save(cache, kv)
    cache = shelf.reopen("disk")
    with match(cache, kv) as lease:
        assert lease.tokens == 384
        for path in [p for p in shelf.directory.rglob("*") if p.is_file()]:
            path.unlink()
        assert finish(lease, kv).wrong == []
    save(cache, kv)
    assert load(cache, kv).wrong == []
    shelf.expect_problems()


def test_a_directory_removed_while_serving_stops_nothing(shelf) -> None:
    cache = shelf.open_small("disk")
    save(cache, prompt(6))
    shutil.rmtree(shelf.directory)
    for seed in range(20):
        assert load(cache, prompt(6, seed=seed)).wrong == []
        save(cache, prompt(6, seed=seed))
    shelf.expect_problems()
    shelf.close()
    cache = shelf.open_small("disk")
    save(cache, prompt(6))
    assert load(cache, prompt(6)).usable_tokens == 384


def test_a_bad_block_is_tried_once_then_forgotten_until_it_is_saved_again(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    kv = prompt(8)
    save(cache, kv)
    shelf.faulty.inject(Fault("read", "flip", times=1))
    first = load(cache, kv)
    assert first.usable_tokens < 512
    second = load(cache, kv)
    assert second.wrong == []
    assert second.usable_tokens == second.matched_tokens
    save(cache, kv)
    found = load(cache, kv)
    assert (found.usable_tokens, found.wrong) == (512, [])


def test_a_read_that_hangs_ends_at_the_deadline(shelf) -> None:
    cache = shelf.open("disk", faulty=True, load_timeout_s=0.2)
    kv = prompt(6)
    save(cache, kv)
    shelf.faulty.inject(Fault("read", "stall"))
    with match(cache, kv) as lease:
        destination = FakeDestination(TINY, 6)
        running = lease.load(into=destination)
        for wait in (lambda: running.wait(0), lambda: running.result(), lambda: running.wait(2, 0.05)):
            with pytest.raises(Exception, match=r".+") as raised:
                wait()
            assert raised.value.timed_out
        ended = threading.Event()
        running.add_done_callback(lambda load: ended.set())
        assert not ended.is_set()
        shelf.faulty.heal()
        assert ended.wait(10)
    assert load(cache, kv).wrong == []


def test_a_writer_that_hangs_delays_no_match_and_no_load(shelf) -> None:
    cache = shelf.open("disk", faulty=True)
    save(cache, prompt(4))
    shelf.faulty.inject(Fault("write", "stall", times=1))
    ticket = cache.save(prompt(4, seed=1).tokens.tolist(), prompt(4, seed=1))
    assert shelf.faulty.stalled.wait(10)
    assert not ticket.done
    assert load(cache, prompt(4)).usable_tokens == 256
    assert hit_tokens(cache, prompt(4, seed=2)) == 0
    shelf.faulty.heal()
    assert ticket.wait(10).stored_tokens == 256


def test_a_disk_without_direct_reads_and_without_holes_serves_all_the_same(shelf) -> None:
    shelf.new_disk(direct=False, holes=False)
    cache = shelf.open_small("disk", crashable=True)
    for seed in range(40):
        assert save(cache, prompt(6, seed=seed)).reason is None
        found = load(cache, prompt(6, seed=seed))
        assert (found.usable_tokens, found.wrong) == (384, [])
        assert shelf.disk.allocated_bytes() <= shelf.tiers[0].statistics().capacity_bytes
