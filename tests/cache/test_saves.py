"""Saving never blocks, stores each block once, keeps heads before tails, and lets go of its source when it says so."""

from __future__ import annotations

import logging
import os
import sys
import time
from asyncio import CancelledError
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Barrier, Event, current_thread, get_native_id
from typing import Any

import numpy as np
import pytest
from cache_kit import TIMEOUT_S, cache_of, disk, extents, leased_bytes, prompt, until

from headstart.block.extent import layout_of
from headstart.block.representation import Representation
from headstart.cache import extents as extents_module
from headstart.cache import saver as saver_module
from headstart.cache.prefix_cache import PrefixCache, SaveResult
from headstart.testing.fake_kv import OPAQUE, TINY, FakeKV
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.round_trip import hit_tokens, load, match, save
from headstart.tier.base import WriteOutcome
from headstart.tier.memory import MemoryTier


class WatchedKV:
    """A source that notes when it is read and can be told to fail."""

    def __init__(
        self, kv: FakeKV, *, fail_at: int | None = None, spoil: int = 0, kind: type[BaseException] = RuntimeError
    ) -> None:
        self.kv = kv
        self.fail_at = fail_at
        self.kind = kind
        self.spoil = spoil
        self.reads = 0

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        self.reads += 1
        if self.fail_at == self.reads:
            raise self.kind("planted")
        buffers = self.kv.buffers(layer, first, sizes)
        return buffers[self.spoil :]


def test_two_threads_that_save_one_prompt_store_it_once() -> None:
    tiers = MemoryTier(8 << 20), disk()
    kv = prompt(40 * 64)
    with cache_of(*tiers) as cache:
        barrier = Barrier(4)

        def work(_: int) -> SaveResult:
            barrier.wait(TIMEOUT_S)
            return save(cache, kv)

        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(work, range(4)))
        assert [result.stored_tokens for result in results] == [40 * 64] * 4
        assert sum(result.written_bytes for result in results) == 2 * kv.image().nbytes
        assert [extents(tier) for tier in tiers] == [1, 1]
        assert all(leased_bytes(tier) == 0 for tier in tiers)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own elsewhere")
def test_saving_leaves_the_cores_to_who_computes(monkeypatch: pytest.MonkeyPatch, niceness_of_saves: int) -> None:
    monkeypatch.setattr(saver_module, "_NICENESS", niceness_of_saves)
    found = []

    class AskingKV(WatchedKV):
        def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
            found.append(os.getpriority(os.PRIO_PROCESS, get_native_id()))
            return super().buffers(layer, first, sizes)

    with cache_of(MemoryTier(8 << 20)) as cache:
        assert cache.save(prompt(128).tokens, AskingKV(prompt(128))).wait(TIMEOUT_S).stored_tokens == 128
    assert set(found) == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)}


def test_a_full_queue_drops_the_save_and_says_so_at_once() -> None:
    tier = FaultyTier(MemoryTier(8 << 20), Fault("write", "stall", times=1))
    token_bytes = TINY.bytes_per_token
    with cache_of(tier, save_queue_bytes=token_bytes * 1000) as cache:
        first = cache.save(prompt(640).tokens, prompt(640))
        assert tier.stalled.wait(TIMEOUT_S)
        second = cache.save(prompt(320, seed=1).tokens, prompt(320, seed=1))
        refused, called = cache.save(prompt(128, seed=2).tokens, prompt(128, seed=2)), Event()
        refused.add_done_callback(lambda ticket: called.set())
        assert refused.done
        assert called.is_set()
        assert refused.wait(0.0) == SaveResult(0, 0, "queue-full")
        assert not first.done
        assert first.wait(0.0).reason == "timeout"
        tier.heal()
        assert [ticket.wait(TIMEOUT_S).reason for ticket in (first, second)] == [None, None]
        assert cache.statistics().counters["save_dropped_queue-full"] == 1
        assert save(cache, prompt(128, seed=2)).stored_tokens == 128  # room again


def test_whoever_saves_into_a_full_queue_waits_for_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    hashing: list[str] = []
    real = saver_module.chain_keys
    monkeypatch.setattr(
        saver_module, "chain_keys", lambda *args, **kwargs: (hashing.append(current_thread().name), real(*args, **kwargs))[1]
    )
    tier = FaultyTier(MemoryTier(8 << 20), Fault("write", "stall", times=1))
    with cache_of(tier, save_queue_bytes=1) as cache:
        tickets = [cache.save(prompt(640).tokens, prompt(640))]
        assert tier.stalled.wait(TIMEOUT_S)  # under way, so that the next one waits and the others find the queue full
        tickets.append(cache.save(prompt(640, seed=1).tokens, prompt(640, seed=1)))
        refused = [cache.save(prompt(640, seed=seed).tokens, prompt(640, seed=seed)) for seed in range(2, 80)]
        assert {ticket.wait(0.0).reason for ticket in refused} == {"queue-full"}
        assert set(hashing) == {"save"}
        tier.heal()
        assert [ticket.wait(TIMEOUT_S).reason for ticket in tickets] == [None, None]
        fates = cache.fates(prompt(640, seed=79).keys, at_s=time.time())  # the latest ones are remembered
        assert [fate.by for fate in fates] == ["queue-full"] * 10


@pytest.mark.parametrize("representation", [TINY, OPAQUE], ids=["tiny", "opaque"])
def test_one_save_may_wait_however_large_the_one_under_way_is(representation: Representation) -> None:
    tier = FaultyTier(MemoryTier(8 << 20))
    with cache_of(tier, representation=representation, save_queue_bytes=1) as cache:
        kvs = [prompt(640, seed=seed, representation=representation) for seed in range(4)]
        assert save(cache, kvs[3]).stored_tokens == 640  # the size of a piece is known from here on
        tier.inject(Fault("write", "stall", times=1))
        running = cache.save(kvs[0].tokens, kvs[0])
        assert tier.stalled.wait(TIMEOUT_S)
        waiting, refused = [cache.save(kv.tokens, kv) for kv in kvs[1:3]]
        assert refused.wait(0.0).reason == "queue-full"
        tier.heal()
        assert [ticket.wait(TIMEOUT_S).stored_tokens for ticket in (running, waiting)] == [640, 640]


def test_sizes_that_nobody_has_seen_yet_drop_no_save() -> None:
    tier = FaultyTier(MemoryTier(64 << 20), Fault("write", "stall", times=1))
    kvs = [prompt(1280, seed=seed, representation=OPAQUE) for seed in range(8)]
    with cache_of(tier, representation=OPAQUE, save_queue_bytes=1 << 30) as cache:
        tickets = [cache.save(kv.tokens, kv) for kv in kvs]
        assert tier.stalled.wait(TIMEOUT_S)
        tier.heal()
        assert [ticket.wait(TIMEOUT_S).stored_tokens for ticket in tickets] == [1280] * 8


def test_as_many_saves_may_wait_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "_MAX_WAITING", 3)
    tier = FaultyTier(MemoryTier(8 << 20), Fault("write", "stall", times=1))
    with cache_of(tier) as cache:
        first = cache.save(prompt(64).tokens, prompt(64))
        assert tier.stalled.wait(TIMEOUT_S)
        later = [cache.save(prompt(64, seed=seed).tokens, prompt(64, seed=seed)) for seed in range(1, 5)]
        assert later[3].wait(0.0).reason == "queue-full"
        tier.heal()
        assert [ticket.wait(TIMEOUT_S).reason for ticket in (first, *later[:3])] == [None] * 4


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit, CancelledError])
@pytest.mark.parametrize(("fail_at", "spoil"), [(1, 0), (2, 0), (None, 1)])
def test_a_source_that_fails_loses_its_save_and_no_other(
    fail_at: int | None, spoil: int, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk()
    kv = prompt(640)
    with cache_of(tier) as cache, caplog.at_level(logging.CRITICAL):
        ticket = cache.save(kv.tokens, WatchedKV(kv, fail_at=fail_at, spoil=spoil, kind=kind))
        assert ticket.wait(TIMEOUT_S) == SaveResult(0, 0, "error")
        assert (cache.statistics().counters["save_errors"], extents(tier)) == (1, 0)
        assert save(cache, kv).stored_tokens == 640
        assert leased_bytes(tier) == 0


def test_nothing_is_read_from_a_source_once_its_ticket_is_done() -> None:
    with cache_of(MemoryTier(1 << 20), disk()) as cache:
        for seed in range(20):
            kv = prompt(640, seed=seed)
            source, at_done = WatchedKV(kv), SimpleQueue[int]()
            ticket = cache.save(kv.tokens, source)
            ticket.add_done_callback(lambda _, source=source, at_done=at_done: at_done.put(source.reads))
            ticket.wait(TIMEOUT_S)
            assert at_done.get(timeout=TIMEOUT_S) == source.reads


def test_what_is_stored_already_is_not_read_from_the_source() -> None:
    kv = prompt(640)
    with cache_of(MemoryTier(1 << 20), disk()) as cache:
        save(cache, kv)
        source = WatchedKV(kv)
        assert cache.save(kv.tokens, source).wait(TIMEOUT_S) == SaveResult(640, 0, None)
        assert source.reads == 0


def test_tokens_that_change_after_the_call_do_not_matter() -> None:
    kv = prompt(640)
    tier = FaultyTier(MemoryTier(8 << 20), Fault("locate", "stall", times=1))
    with cache_of(tier) as cache:
        tokens = kv.tokens.copy()
        ticket = cache.save(tokens, kv)
        assert tier.stalled.wait(TIMEOUT_S)
        tokens[:] = 0
        tier.heal()
        ticket.wait(TIMEOUT_S)
        assert load(cache, prompt(641)).usable_tokens == 640


def test_a_prompt_larger_than_memory_keeps_its_head_there_and_all_of_it_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "_MAX_BLOCKS", 4)
    memory, slow = MemoryTier(300 << 10), disk()
    kv = prompt(100 * 64 + 1)
    with cache_of(memory, slow) as cache:
        save(cache, prompt(12 * 64, seed=1))
        result = save(cache, kv)
        assert (result.stored_tokens, result.reason) == (6400, "full")
        in_memory = (memory.locate(TINY.digest, kv.keys).extents >= 0).tolist()
        assert in_memory == sorted(in_memory, reverse=True)
        assert 12 <= sum(in_memory) < 24
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (6400, [])
        assert leased_bytes(memory) == 0


def test_heads_are_the_most_recently_used_after_a_save_and_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "_MAX_BLOCKS", 4)
    tier = disk()
    with cache_of(tier) as cache:
        save(cache, prompt(16 * 64))
        save(cache, prompt(16 * 64, seed=1))

        def uses(kv: FakeKV) -> list[int]:
            order = dict.fromkeys(tier.locate(TINY.digest, kv.keys).extents.tolist())
            return [tier.info(extent).last_used for extent in order]

        old, new = uses(prompt(16 * 64)), uses(prompt(16 * 64, seed=1))
        assert [old, new] == [sorted(old, reverse=True), sorted(new, reverse=True)]
        assert max(old) < min(new)
        with match(cache, prompt(16 * 64 + 1)):
            assert uses(prompt(16 * 64)) == old  # a match extends no life
        load(cache, prompt(16 * 64 + 1))
        save(cache, prompt(64, seed=2))  # uses are noted by the thread that saves, before what it saves next
        again = uses(prompt(16 * 64))
        assert again == sorted(again, reverse=True)
        assert min(again) > max(new)


def test_long_runs_are_cut_evenly_and_below_what_every_tier_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = layout_of(TINY, 10).extent_bytes
    tier = disk()
    monkeypatch.setattr(tier, "max_extent_bytes", lambda representation, **_: limit, raising=False)
    with cache_of(tier) as cache:
        save(cache, prompt(21 * 64))
        assert sorted(info.blocks for info in tier.scan()) == [7, 7, 7]
        save(cache, prompt(10 * 64, seed=1))
        assert sorted(info.blocks for info in tier.scan()) == [7, 7, 7, 10]
        assert load(cache, prompt(21 * 64 + 1)).wrong == []


def test_runs_of_varying_pieces_are_cut_by_their_real_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 48 << 10
    tier = disk()
    monkeypatch.setattr(tier, "max_extent_bytes", lambda representation, **_: limit, raising=False)
    kv = prompt(40 * 128 + 1, representation=OPAQUE)
    with cache_of(tier, representation=OPAQUE) as cache:
        assert save(cache, kv).stored_tokens == 40 * 128
        assert all(info.extent_bytes <= limit for info in tier.scan())
        assert extents(tier) < 15
        assert load(cache, kv).wrong == []


def test_a_tier_too_small_for_one_piece_takes_nothing_and_hinders_nobody() -> None:
    wide = Representation(kind="mha", layout="fake/9", dtype="float32", layer_bytes=(65536, 65536))
    memory, slow = MemoryTier(64 << 10), disk()
    with cache_of(memory, slow, representation=wide) as cache:
        result = save(cache, prompt(640, representation=wide))
        assert (result.stored_tokens, result.reason) == (640, "too-large")
        assert (extents(memory), extents(slow)) == (0, 1)


def test_a_tier_that_fails_to_write_is_left_out_of_the_rest_of_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "_MAX_BLOCKS", 2)
    memory = MemoryTier(8 << 20)
    slow = FaultyTier(MemoryTier(8 << 20), Fault("write", "eio", start=3, times=1))
    kv = prompt(10 * 64)
    with cache_of(memory, slow) as cache:
        assert save(cache, kv) == SaveResult(640, 14 * 12288 + 7 * 4096, "error")
        assert (slow.inner.locate(TINY.digest, kv.keys).extents >= 0).tolist() == [True] * 4 + [False] * 6
        assert save(cache, kv).stored_tokens == 640
        assert (slow.inner.locate(TINY.digest, kv.keys).extents >= 0).all()


class Gated(MemoryTier):
    """A tier whose every write but the last begins only once the source has been read for the next extent; it notes whether
    an image changed meanwhile."""

    def __init__(self, writes: int) -> None:
        super().__init__(8 << 20)
        self.gates = [Event() for _ in range(writes)]
        self.written = 0
        self.spoilt = 0

    def write(self, image: memoryview, *args: Any, **options: Any) -> WriteOutcome:
        before = bytes(image)
        if self.written + 1 < len(self.gates):
            assert self.gates[self.written + 1].wait(TIMEOUT_S)
        self.written += 1
        self.spoilt += image != before
        return super().write(image, *args, **options)


def test_the_next_extent_is_copied_while_one_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "_MAX_BLOCKS", 2)
    tier, kv = Gated(5), prompt(10 * 64)

    class Source:
        def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
            if layer == TINY.layers - 1:
                tier.gates[first // 2].set()
            return kv.buffers(layer, first, sizes)

    with cache_of(tier) as cache:
        assert cache.save(kv.tokens, Source()).wait(TIMEOUT_S).stored_tokens == 640
        assert (tier.written, tier.spoilt, load(cache, prompt(641)).wrong) == (5, 0, [])


def test_a_source_that_fails_leaves_the_extent_that_is_being_written_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(extents_module, "_MAX_BLOCKS", 2)
    tier, kv, other = Gated(2), prompt(4 * 64), prompt(4 * 64, seed=1)

    class Failing:
        def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
            if first:
                raise RuntimeError("planted")
            return kv.buffers(layer, first, sizes)

    with cache_of(tier) as cache, caplog.at_level(logging.CRITICAL):
        failed = cache.save(kv.tokens, Failing())
        after = cache.save(other.tokens, other)  # it would be built where the first extent of the other one lies
        tier.gates[1].wait(0.2)
        tier.gates[1].set()
        assert failed.wait(TIMEOUT_S) == SaveResult(0, 0, "error")
        assert after.wait(TIMEOUT_S).stored_tokens == 4 * 64
        assert (tier.spoilt, load(cache, prompt(2 * 64 + 1)).usable_tokens, load(cache, prompt(2 * 64 + 1)).wrong) == (
            0,
            128,
            [],
        )


def test_a_tail_that_is_evicted_is_written_again_and_its_head_is_not() -> None:
    tier = disk()
    with cache_of(tier) as cache:
        save(cache, prompt(4 * 64))
        save(cache, prompt(9 * 64))
        tail = int(tier.locate(TINY.digest, prompt(9 * 64).keys).extents[-1])
        tier.delete([tail], reason="user")
        assert hit_tokens(cache, prompt(9 * 64 + 1)) == 4 * 64
        assert save(cache, prompt(9 * 64)).written_bytes == prompt(9 * 64).image(4, 5).nbytes


def test_a_prompt_without_a_full_piece_has_nothing_to_save() -> None:
    with cache_of(disk()) as cache:
        assert cache.save([1] * 63, WatchedKV(prompt(64), fail_at=1)).wait() == SaveResult(0, 0, None)


def test_without_a_tier_a_save_says_why_nothing_is_kept() -> None:
    with cache_of() as cache:
        assert save(cache, prompt(640)).reason == "no-tier"
        assert hit_tokens(cache, prompt(640)) == 0


def test_retention_and_salt_travel_with_the_extent() -> None:
    tier = disk()
    kv = prompt(640, salt="tenant")
    with cache_of(tier) as cache:
        save(cache, kv, retention="agent")
        assert [info.retention for info in tier.scan()] == ["agent"]
        assert load(cache, prompt(641, salt="tenant")).usable_tokens == 640


@pytest.mark.parametrize(
    "wrong",
    [
        {"retention": ""},
        {"retention": "x" * 65},
        {"retention": "a\nb"},
        {"shared_tokens": -1},
        {"salt": 0},
        {"salt": ["a"]},
        {"tenant": 7},
        {"tenant": "x" * 256},
        {"tenant": "\udc80"},
        {"session": b"a"},
    ],
    ids=str,
)
def test_what_can_never_be_saved_is_refused_at_the_door(wrong: dict[str, Any]) -> None:
    with cache_of(disk()) as cache:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            cache.save(prompt(64).tokens, prompt(64), **wrong)
        assert "save_calls" not in cache.statistics().counters


@pytest.mark.parametrize("salt", [0, 7, False, ["a"]])
def test_a_salt_that_is_none_is_no_miss_and_no_shared_prefix_but_refused(salt: Any) -> None:
    with cache_of(MemoryTier(1 << 20), disk()) as cache:
        save(cache, prompt(640))
        with pytest.raises(ValueError, match="salt is given as"):
            cache.match(prompt(640).tokens, salt=salt)
        with pytest.raises(ValueError, match="salt is given as"):
            cache.promote(prompt(640).tokens, salt=salt, most_bytes=1 << 20)


def test_a_session_may_have_any_name() -> None:
    with cache_of(disk(), write_budget_bytes=1 << 30) as cache:
        kv = prompt(640)
        assert cache.save(kv.tokens, kv, session="\ud800" + "x" * 1000).wait(TIMEOUT_S).stored_tokens == 640


def test_a_tier_that_breaks_while_it_is_told_of_uses_does_not_end_all_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    tier = disk()
    with cache_of(tier) as cache:
        save(cache, prompt(640))
        monkeypatch.setattr(tier, "touch", broken, raising=False)
        assert load(cache, prompt(641)).usable_tokens == 640
        until(lambda: cache.statistics().counters.get("note_errors", 0) > 0)
        monkeypatch.undo()
        assert save(cache, prompt(640, seed=1)).stored_tokens == 640


def test_a_ticket_reads_well_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with cache_of(disk()) as cache, caplog.at_level(logging.CRITICAL):
        ticket = cache.save(prompt(64).tokens, prompt(64))

        def fail(_: object) -> None:
            raise RuntimeError("planted")

        ticket.add_done_callback(fail)
        ticket.wait(TIMEOUT_S)
        assert repr(ticket) == "<Ticket SaveResult(stored_tokens=64, written_bytes=16384, reason=None)>"


def test_padding_of_a_reused_staging_buffer_holds_nothing_of_an_earlier_prompt() -> None:
    uneven = Representation(kind="gqa", layout="fake/1", dtype="float16", layer_bytes=(1536, 520))
    tier = MemoryTier(4 << 20)
    with PrefixCache([tier], identity=prompt(64).identity, representation=uneven) as cache:
        save(cache, prompt(30 * 64, representation=uneven))
        save(cache, prompt(64, seed=1, representation=uneven))
        newest = list(tier._extents.values())[-1]
        image = np.frombuffer(newest.region.view, np.uint8)
        assert not image[newest.header_bytes + 1536 : newest.header_bytes + 4096].any()
        assert not image[newest.header_bytes + 4096 + 520 :].any()
