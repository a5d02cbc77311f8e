"""A lease is loaded by ranges, and says beforehand what lies where."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event

import pytest
from cache_kit import TIMEOUT_S, cache_of, disk, leased_bytes, prompt

from headstart.cache.lease import Stretch
from headstart.cache.source import Source
from headstart.testing.fake_kv import OPAQUE, PAGED, TINY, FakeDestination
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.round_trip import match, save
from headstart.tier.memory import MemoryTier

PIECE_BYTES = sum(size or 0 for size in TINY.layer_bytes)


@pytest.mark.parametrize(
    ("first", "end"), [(64, None), (0, 64), (0, 1), (128, 0), (-128, 128), (0, 1408), (1408, None)], ids=str
)
def test_a_range_that_cuts_a_piece_or_leaves_the_match_is_refused(first: int, end: int | None) -> None:
    with cache_of(disk(), representation=PAGED) as cache:
        kv = prompt(10 * 128 + 1, representation=PAGED)
        save(cache, kv)
        with match(cache, kv) as lease, pytest.raises(ValueError, match="whole pieces of 128 within the 1280 that matched"):
            lease.load(into=FakeDestination(PAGED, 11), first_tokens=first, end_tokens=end)


@pytest.mark.parametrize(("first", "end"), [(0, 192), (128, 320), (192, 256), (0, None)], ids=str)
def test_a_range_that_overlaps_with_one_before_is_refused(first: int, end: int | None) -> None:
    with cache_of(disk()) as cache:
        save(cache, prompt(640))
        with match(cache, prompt(641)) as lease:
            lease.load(into=FakeDestination(TINY, 10), first_tokens=128, end_tokens=256).result(TIMEOUT_S)
            with pytest.raises(ValueError, match="tokens 128 to 256 of this lease were loaded already"):
                lease.load(into=FakeDestination(TINY, 10), first_tokens=first, end_tokens=end)
            for beside in ((0, 128), (256, 256), (256, 256), (256, 640)):
                assert lease.load(FakeDestination(TINY, 10), *beside).result(TIMEOUT_S) == beside[1] - beside[0]


def test_extents_are_kept_until_the_last_of_several_loads_has_ended() -> None:
    inner = MemoryTier(4 << 20)
    tier = FaultyTier(inner)
    kv = prompt(10 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        extent = next(iter(inner.scan())).id
        lease, destination, ended = match(cache, kv), FakeDestination(TINY, 10), Event()
        assert lease.load(destination, 0, 128).result(TIMEOUT_S) == 128
        tier.inject(Fault("read", "stall", times=1))
        running = lease.load(destination, 128)
        running.add_done_callback(lambda _: ended.set())
        assert tier.stalled.wait(TIMEOUT_S)
        lease.release()
        with pytest.raises(ValueError, match="released"):
            lease.load(destination, 0, 0)
        assert inner.delete([extent], reason="user") == 0
        tier.heal()
        assert ended.wait(TIMEOUT_S)
        assert destination.wrong(kv, pieces=10) == []
        assert leased_bytes(inner) == 0


def test_a_load_that_could_not_be_started_keeps_nothing_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    inner = MemoryTier(4 << 20)
    with cache_of(FaultyTier(inner)) as cache:
        save(cache, prompt(641))
        lease = match(cache, prompt(641))
        monkeypatch.setattr(Source, "pool_of", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            lease.load(FakeDestination(TINY, 10))
        monkeypatch.undo()
        assert lease.load(FakeDestination(TINY, 10)).result(TIMEOUT_S) == 640
        lease.release()
        assert leased_bytes(inner) == 0


class Waiting(FakeDestination):
    """Its memory is there once somebody says so."""

    go = Event()

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        assert self.go.wait(TIMEOUT_S)
        return super().buffers(layer, first, sizes)


def test_the_end_of_one_load_after_the_release_lets_nothing_go_that_another_one_reads() -> None:
    inner = MemoryTier(4 << 20)
    tier = FaultyTier(inner)
    kv = prompt(10 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        extent = next(iter(inner.scan())).id
        tier.inject(Fault("read", "stall", times=1))
        lease, destination, waiting = match(cache, kv), FakeDestination(TINY, 10), Waiting(TINY, 10)
        stalled = lease.load(destination, 0, 128)
        assert tier.stalled.wait(TIMEOUT_S)
        soon = lease.load(waiting, 128)
        lease.release()
        waiting.go.set()
        assert soon.result(TIMEOUT_S) == 512
        assert inner.delete([extent], reason="user") == 0
        tier.heal()
        assert stalled.result(TIMEOUT_S) == 128
        assert destination.wrong(kv, pieces=2) == waiting.wrong(kv, first=2, pieces=8) == []
        assert inner.delete([extent], reason="user") == 1


def test_a_range_that_is_cancelled_leaves_the_others_alone() -> None:
    tier = FaultyTier(disk())
    kv = prompt(10 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        with match(cache, kv) as lease:
            destination = FakeDestination(TINY, 10)
            tier.inject(Fault("read", "stall", times=1))
            stalled = lease.load(destination, 512)
            assert tier.stalled.wait(TIMEOUT_S)
            stalled.cancel()
            assert lease.load(destination, 0, 512).result(TIMEOUT_S) == 512
            assert not stalled.done
            tier.heal()
            usable = stalled.result(TIMEOUT_S)
            assert {fault.reason for fault in stalled.faults} <= {"cancelled"}
            assert destination.wrong(kv, first=8, pieces=usable // 64) == []
            assert destination.wrong(kv, pieces=8) == []


def test_what_lies_where_is_told_before_anything_is_read() -> None:
    memory, slow = MemoryTier(16 << 20), disk()
    kv = prompt(10 * 64 + 1)
    with cache_of(memory, slow) as cache:
        for pieces in (3, 8, 10):
            save(cache, prompt(pieces * 64))
        middle = [info.id for info in memory.scan() if info.blocks == 5]
        assert memory.delete(middle, reason="user") == 1
        with match(cache, kv) as lease:
            assert lease.stretches == (
                Stretch("memory", 192, 3 * PIECE_BYTES, 1),
                Stretch("disk", 320, 5 * PIECE_BYTES, 1),
                Stretch("memory", 128, 2 * PIECE_BYTES, 1),
            )
            assert lease.tokens_by_tier == {"memory": 320, "disk": 320}
            assert lease.tier_bytes == {"memory": 5 * PIECE_BYTES, "disk": 5 * PIECE_BYTES}
        assert slow.reads == []


def test_of_pieces_that_vary_in_size_about_what_is_read_is_told() -> None:
    with cache_of(disk(), representation=OPAQUE) as cache:
        kv = prompt(6 * 128 + 1, representation=OPAQUE)
        save(cache, kv)
        with match(cache, kv) as lease:
            (stretch,) = lease.stretches
            read = lease.load(FakeDestination(OPAQUE, 6))
            read.result(TIMEOUT_S)
            assert 0 <= stretch.nbytes - sum(kv.piece_bytes(0, piece) for piece in range(6)) < 4096
