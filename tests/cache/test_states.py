"""Boundary states: a match ends where one is stored, a load brings it verified or is worth nothing, a save puts it where it
belongs even if the blocks are there already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_kit import TIMEOUT_S, cache_of, disk, extents, leased_bytes, prompt, until

from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.errors import LoadFailed
from headstart.testing.fake_kv import STATEFUL, STATEFUL_OPAQUE, STATEFUL_PAGED, TINY, FakeDestination, FakeKV
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.round_trip import hit_tokens, load, match, save
from headstart.tier.base import ExtentId, Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier
from headstart.transfer.io_pool import IOPool, Job

REPRESENTATIONS = {"fixed": STATEFUL, "paged": STATEFUL_PAGED, "opaque": STATEFUL_OPAQUE}


def opened(*tiers: Tier, representation: Representation = STATEFUL, **options: Any) -> PrefixCache:
    return cache_of(*tiers, representation=representation, **options)


def asked(pieces: int, *, representation: Representation = STATEFUL, **options: Any) -> FakeKV:
    """A prompt of so many pieces and one token more."""
    return prompt(pieces * representation.piece_tokens + 1, representation=representation, **options)


def stored(cache: PrefixCache, pieces: int, *behind: int) -> FakeKV:
    kv = asked(pieces, representation=cache.representation)
    assert save(cache, kv, states=kv.states(*behind)).reason is None
    return kv


def state_extent(tier: Tier, kv: FakeKV, pieces: int) -> ExtentId:
    states = tier.locate(kv.representation.digest, kv.keys).states
    assert states is not None
    return ExtentId(int(states[pieces * kv.representation.blocks_per_piece - 1]))


def image_bytes(tier: Tier, extent: ExtentId) -> int:
    info = tier.info(extent)
    assert info is not None
    return info.extent_bytes


# A match ends at a state.


@pytest.mark.parametrize("representation", REPRESENTATIONS.values(), ids=REPRESENTATIONS)
@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_a_match_ends_at_the_latest_state_within_the_prompt(tiers: str, representation: Representation) -> None:
    stack: list[Tier] = [MemoryTier(8 << 20)] if tiers != "disk" else []
    stack += [disk()] if tiers != "memory" else []
    with opened(*stack, representation=representation) as cache:
        stored(cache, 10, 3, 7, 10)
        for pieces, want in ((2, 0), (3, 3), (6, 3), (7, 7), (9, 7), (10, 10), (12, 10)):
            loaded = load(cache, asked(pieces, representation=representation))
            assert (loaded.usable_tokens, loaded.wrong) == (want * representation.piece_tokens, [])


def test_a_prompt_that_parts_between_two_states_goes_on_from_the_earlier_one() -> None:
    with opened(disk()) as cache:
        kv = stored(cache, 12, 4, 8, 12)
        parting = FakeKV(STATEFUL, [*kv.tokens[: 10 * 64].tolist(), *[1] * 200])
        loaded = load(cache, parting)
        assert (loaded.usable_tokens, loaded.wrong) == (8 * 64, [])
        assert cache.statistics().counters["match_beyond_state_tokens"] == 2 * 64


def test_a_prompt_that_is_stored_to_its_last_token_leaves_one_to_compute() -> None:
    with opened(disk()) as cache:
        stored(cache, 8, 4, 8)
        whole = prompt(8 * 64, representation=STATEFUL)
        assert hit_tokens(cache, whole) == 4 * 64
        with cache.match(whole.tokens, leave=0) as lease:
            assert lease.tokens == 8 * 64
        with cache.match(whole.tokens, leave=4 * 64 + 1) as lease:
            assert lease.tokens == 0


def test_blocks_behind_the_last_state_are_told_of_as_no_hit() -> None:
    tier = disk()
    with opened(tier) as cache:
        kv = stored(cache, 10, 4, 10)
        assert tier.delete([state_extent(tier, kv, 10)], reason="user") == 1
        save(cache, kv, states=kv.states(4))
        assert tier.write(kv.image(4, 6), STATEFUL).reason == "written"  # as a writer leaves it that had to stop
        assert hit_tokens(cache, kv) == 4 * 64
        assert cache.statistics().counters["match_beyond_state_tokens"] == 6 * 64


def test_blocks_without_any_state_are_a_miss_of_their_own_kind() -> None:
    tier = disk()
    with opened(tier) as cache:
        kv = asked(5)
        assert tier.write(kv.image(), STATEFUL).reason == "written"
        assert hit_tokens(cache, kv) == 0
        assert cache.statistics().counters["match_missed_state"] == 1


def test_a_state_of_a_slower_tier_counts_where_a_faster_one_has_the_blocks() -> None:
    memory, slow = MemoryTier(8 << 20), disk()
    with opened(memory, slow) as cache:
        kv = stored(cache, 9, 5, 9)
        gone = {state_extent(memory, kv, 5), state_extent(memory, kv, 9)}
        assert memory.delete(list(gone), reason="user") == 2
        assert memory.write(kv.image(), STATEFUL).reason == "written"
        with match(cache, kv) as lease:
            assert lease.tokens_by_tier == {"memory": 9 * 64}
            assert 5000 <= lease.state_bytes < 5000 + 4096
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (9 * 64, [])
        assert hit_tokens(cache, asked(7)) == 5 * 64


def test_a_state_of_a_slower_tier_counts_where_a_faster_one_has_the_beginning() -> None:
    memory, slow = MemoryTier(8 << 20), disk()
    with opened(memory, slow) as cache:
        kv = stored(cache, 9, 5, 9)
        assert memory.delete([info.id for info in memory.scan()], reason="user") == 2
        assert memory.write(kv.image(0, 6), STATEFUL).reason == "written"
        loaded = load(cache, asked(7))
        assert (loaded.usable_tokens, loaded.wrong) == (5 * 64, [])


def test_what_is_leased_includes_the_state() -> None:
    tier = MemoryTier(8 << 20)
    with opened(tier) as cache:
        kv = stored(cache, 8, 8)
        save(cache, kv, states=kv.states(5))
        short = state_extent(tier, kv, 5)
        with match(cache, asked(6)) as lease:
            assert lease.tokens == 5 * 64
            assert tier.delete([short], reason="user") == 0
            running = lease.load(FakeDestination(STATEFUL, 5))
            assert running.state(TIMEOUT_S) == kv.state(5)
            assert running.result(TIMEOUT_S) == 5 * 64
        assert leased_bytes(tier) == 0


def test_a_state_that_is_gone_when_it_is_to_be_leased_gives_way_to_an_earlier_one() -> None:
    tier = Removing(MemoryTier(8 << 20))
    with opened(tier) as cache:
        kv = stored(cache, 9, 3, 6, 9)
        tier.going = [state_extent(tier, kv, 9), state_extent(tier, kv, 6)]
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (3 * 64, [])
        assert leased_bytes(tier) == 0


class Removing(FaultyTier):
    """Somebody removes an extent of `going` before each lease."""

    going: Sequence[ExtentId] = ()

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        if self.going:
            self.inner.delete([self.going[0]], reason="user")
            self.going = self.going[1:]
        return super().lease(extents)


# A load brings it, or nothing.


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, (3 << 20) + 17], ids=str)
def test_a_state_of_any_size_comes_back(tmp_path: Path, nbytes: int) -> None:
    with opened(DiskTier.open(tmp_path, capacity_bytes=64 << 20)) as cache:
        kv = asked(3)
        assert save(cache, kv, states=kv.states(3, nbytes=nbytes)).stored_tokens == 192
        with match(cache, kv) as lease:
            running = lease.load(FakeDestination(STATEFUL, 3))
            assert running.state(TIMEOUT_S) == kv.state(3, nbytes=nbytes)
            assert running.result(TIMEOUT_S) == 192


def test_states_of_two_sizes_lie_in_one_cache() -> None:
    with opened(disk()) as cache:
        one, other = asked(3), asked(4, seed=1)
        save(cache, one, states=one.states(nbytes=700))
        save(cache, other, states=other.states(nbytes=70_000))
        assert [len(load(cache, kv).load.state()) for kv in (one, other)] == [700, 70_000]
        assert [load(cache, kv).wrong for kv in (one, other)] == [[], []]


def test_a_state_comes_in_any_memory_that_holds_it() -> None:
    with opened(disk()) as cache:
        kv = asked(2)
        save(cache, kv, states={128: np.frombuffer(kv.state(2), np.uint16).reshape(50, 50)})
        assert load(cache, kv).wrong == []


@pytest.mark.parametrize("short", [False, True], ids=["with its blocks", "by itself"])
def test_a_state_that_is_not_what_was_written_costs_the_load_and_the_next_match_ends_before(short: bool) -> None:
    tier = disk()
    with opened(tier) as cache:
        kv = stored(cache, 9, 3, 9) if short else stored(cache, 9, 3, 6, 9)
        save(cache, kv, states=kv.states(6))
        tier.victim = state_extent(tier, kv, 6)
        tier.spots[image_bytes(tier, tier.victim) - 4096] = "flip"  # in the last OS page of the state
        with match(cache, asked(7)) as lease:
            assert lease.tokens == 6 * 64
            running = lease.load(FakeDestination(STATEFUL, 6))
            with pytest.raises(LoadFailed, match="boundary state"):
                running.state(TIMEOUT_S)
            with pytest.raises(LoadFailed):
                running.wait(2, TIMEOUT_S)
            assert running.result(TIMEOUT_S) == 0
        assert cache.statistics().counters["load_failed_corrupt"] == 1
        tier.spots.clear()
        assert hit_tokens(cache, asked(7)) == 3 * 64
        until(lambda: tier.info(tier.victim) is None)
        assert hit_tokens(cache, kv) == (9 * 64 if short else 3 * 64)
        assert save(cache, kv, states=kv.states(6, 9)).reason is None
        assert (hit_tokens(cache, asked(7)), load(cache, kv).wrong) == (6 * 64, [])


@pytest.mark.parametrize("kind", ["eio", "corrupt", "short"])
def test_a_state_that_cannot_be_read_costs_the_load(kind: Any) -> None:
    tier = FaultyTier(disk())
    with opened(tier) as cache:
        kv = stored(cache, 6, 6)
        tier.inject(Fault("read", kind))
        loaded = match(cache, kv)
        running = loaded.load(FakeDestination(STATEFUL, 6), 6 * 64)  # the state alone
        with pytest.raises(LoadFailed):
            running.state(TIMEOUT_S)
        assert running.result(TIMEOUT_S) == 0
        loaded.release()
        tier.heal()
        assert cache.statistics().counters[f"load_failed_{'corrupt' if kind == 'corrupt' else 'read'}"] == 1
        assert leased_bytes(tier) == 0


def test_a_piece_that_fails_costs_the_whole_load_since_no_state_stands_before_it() -> None:
    tier = disk()
    with opened(tier) as cache:
        kv = stored(cache, 8, 8)
        tier.spots[image_bytes(tier, state_extent(tier, kv, 8)) - 8192 - 4096] = "flip"  # the last layer's last piece
        loaded = match(cache, kv)
        running = loaded.load(FakeDestination(STATEFUL, 8))
        assert running.result(TIMEOUT_S) == 0
        with pytest.raises(LoadFailed, match="piece 7 of layer 2"):
            running.state(TIMEOUT_S)
        loaded.release()


@pytest.mark.parametrize("tier", [MemoryTier, lambda capacity: disk(capacity)], ids=["memory", "disk"])
def test_only_the_range_that_reaches_the_end_brings_the_state(tier: Any) -> None:
    with opened(tier(8 << 20)) as cache:
        kv = stored(cache, 8, 8)
        destination = FakeDestination(STATEFUL, 8)
        with match(cache, kv) as lease:
            ranges = [lease.load(destination, first, end) for first, end in ((0, 192), (192, 320), (320, 512), (512, 512))]
            assert [running.result(TIMEOUT_S) for running in ranges] == [192, 128, 192, 0]
            assert destination.wrong(kv, pieces=8) == []
            for running in ranges[:2]:
                with pytest.raises(ValueError, match="no boundary state"):
                    running.state()
            assert [running.state() for running in ranges[2:]] == [kv.state(8)] * 2
    assert cache.statistics().counters.get("load_failed_corrupt", 0) == 0


def test_a_state_that_nobody_waits_for_is_read_behind_what_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []

    def submit(pool: IOPool, jobs: Iterable[Job]) -> None:
        jobs = list(jobs)
        turns.extend(job.urgency[0] for job in jobs)
        really(pool, jobs)

    really = IOPool.submit
    monkeypatch.setattr(IOPool, "submit", submit)
    with opened(disk()) as cache:
        kv = stored(cache, 4)
        with match(cache, kv) as lease:
            load = lease.load(FakeDestination(STATEFUL, 4), behind=True)
            assert load.result(TIMEOUT_S) == 4 * 64
    assert set(turns) == {int(load.turn_s * 1e9)}


def test_representations_without_states_have_none() -> None:
    with cache_of(disk()) as cache:
        save(cache, prompt(300))
        with match(cache, prompt(300)) as lease:
            assert lease.state_bytes == 0
            with pytest.raises(ValueError, match="no boundary state"):
                lease.load(FakeDestination(TINY, 4)).state()


def test_a_load_that_is_cancelled_before_its_state_was_read_ends() -> None:
    tier = FaultyTier(disk())
    with opened(tier) as cache:
        kv = asked(3)
        save(cache, kv, states=kv.states(3, nbytes=40 << 20 >> 3))
        tier.inject(Fault("read", "stall", times=1))
        with match(cache, kv) as lease:
            running = lease.load(FakeDestination(STATEFUL, 3), 192)
            assert tier.stalled.wait(TIMEOUT_S)
            running.cancel()
            assert not running.done
            tier.heal()
            assert running.result(TIMEOUT_S) == 0
            with pytest.raises(LoadFailed, match="cancelled"):
                running.state(TIMEOUT_S)
        assert {fault.reason for fault in running.faults} == {"cancelled"}


def test_a_cache_that_is_closed_ends_a_load_of_a_state() -> None:
    tier = FaultyTier(disk())
    cache = opened(tier)
    kv = asked(3)
    save(cache, kv, states=kv.states(3, nbytes=40 << 20 >> 3))
    tier.inject(Fault("read", "stall", times=1))
    running = match(cache, kv).load(FakeDestination(STATEFUL, 3))
    assert tier.stalled.wait(TIMEOUT_S)
    cache.close(timeout_s=0.5)  # it does not wait for the read without end
    tier.heal()
    assert running.result(TIMEOUT_S) == 0
    assert {fault.reason for fault in running.faults} <= {"closed", "read"}


def test_waiting_for_a_state_has_a_deadline() -> None:
    tier = FaultyTier(disk())
    with opened(tier) as cache:
        kv = stored(cache, 3, 3)
        tier.inject(Fault("read", "stall", times=1))
        with match(cache, kv) as lease:
            running = lease.load(FakeDestination(STATEFUL, 3), 192)
            assert tier.stalled.wait(TIMEOUT_S)
            with pytest.raises(LoadFailed) as failed:
                running.state(0.0)
            assert failed.value.timed_out
            tier.heal()
            assert running.state(TIMEOUT_S) == kv.state(3)


@pytest.mark.parametrize("kind", ["key", "tokens"])
def test_a_state_of_another_prompt_is_not_handed_out(kind: str) -> None:
    """A collision of hashes: the tier finds an extent by its key that is another prompt's."""
    tier = disk()
    with opened(tier) as cache:
        kv, other = asked(4), asked(4, seed=1)
        if kind == "tokens":
            assert tier.write(other.image(keys=kv.keys, state_bytes=5000), STATEFUL).reason == "written"
        else:
            assert tier.write(other.image(keys=[*kv.keys[:3], other.keys[3]], state_bytes=5000), STATEFUL).stored
            assert tier.write(kv.image(), STATEFUL).stored
            places = tier.inner._places[STATEFUL.digest]  # type: ignore[attr-defined]
            places.states[kv.keys[3]] = list(places.states[other.keys[3]])
        lease = match(cache, kv)
        assert lease.tokens == 256
        running = lease.load(FakeDestination(STATEFUL, 4), 256)
        with pytest.raises(LoadFailed):
            running.state(TIMEOUT_S)
        assert [fault.reason for fault in running.faults] == ["collision" if kind == "tokens" else "stale"]
        lease.release()


def test_a_state_in_an_extent_of_another_size_than_its_tier_says_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk()
    with opened(tier) as cache:
        kv = stored(cache, 4)
        lease = match(cache, kv)
        found = tier.shape(state_extent(tier, kv, 4))
        monkeypatch.setattr(tier, "shape", lambda _: replace(found, extent_bytes=found.extent_bytes + 4096), raising=False)
        running = lease.load(FakeDestination(STATEFUL, 4), 256)
        with pytest.raises(LoadFailed, match="another size"):
            running.state(TIMEOUT_S)
        assert [fault.reason for fault in running.faults] == ["stale"]
        lease.release()


# A save puts it where it belongs.


def test_extents_end_where_states_stand() -> None:
    tier = disk()
    with opened(tier) as cache:
        stored(cache, 10, 4, 9)
        assert sorted((info.blocks, info.state) for info in tier.scan()) == [(4, True), (5, True)]


def test_what_lies_behind_the_last_state_is_not_kept() -> None:
    tier = disk()
    with opened(tier) as cache:
        kv = asked(10)
        assert save(cache, kv, states=kv.states(4)).stored_tokens == 256
        assert [info.blocks for info in tier.scan()] == [4]


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
def test_a_state_for_blocks_that_are_there_is_written_with_the_last_piece_alone(tiers: str) -> None:
    stack: list[Tier] = [MemoryTier(8 << 20)] if tiers != "disk" else []
    stack += [disk()] if tiers != "memory" else []
    with opened(*stack) as cache:
        kv = stored(cache, 10, 10)
        result = save(cache, kv, states=kv.states(6))
        assert (result.stored_tokens, result.reason) == (384, None)
        for tier in stack:
            assert sorted((info.blocks, info.state) for info in tier.scan()) == [(1, True), (10, True)]
            assert tier.check() == []
        again = save(cache, kv, states=kv.states(6, 10))
        assert (again.written_bytes, again.stored_tokens) == (0, 640)
        for pieces, want in ((6, 6), (9, 6), (10, 10)):
            loaded = load(cache, asked(pieces))
            assert (loaded.usable_tokens, loaded.wrong) == (want * 64, [])


def test_when_the_short_extent_goes_its_blocks_are_still_found_in_the_long_one_and_the_other_way_round() -> None:
    tier = MemoryTier(8 << 20)
    with opened(tier) as cache:
        kv = stored(cache, 10, 10)
        save(cache, kv, states=kv.states(6))
        long, short = state_extent(tier, kv, 10), state_extent(tier, kv, 6)
        assert tier.delete([short], reason="user") == 1
        assert load(cache, kv).usable_tokens == 640
        save(cache, kv, states=kv.states(6))
        assert tier.delete([long], reason="user") == 1
        assert tier.locate(STATEFUL.digest, kv.keys).extents.tolist().count(-1) == 9
        assert tier.check() == []
        save(cache, kv)
        assert load(cache, kv).wrong == []
        assert tier.check() == []


def test_a_growing_conversation_is_found_to_its_last_state_and_nothing_is_written_twice() -> None:
    tier = disk()
    with opened(tier) as cache:
        written = 0
        for pieces in (3, 5, 6, 11):
            loaded = load(cache, asked(pieces))
            assert loaded.wrong == []
            kv = asked(pieces)
            result = save(cache, kv)
            assert result.stored_tokens == pieces * 64
            written += result.written_bytes
        assert tier.statistics().blocks == 11
        assert written == tier.statistics().live_bytes


@pytest.mark.parametrize(
    ("states", "why"),
    [
        ({}, "of no use without"),
        ({63: 9}, "whole pieces of 64"),
        ({0: 9}, "whole pieces of 64"),
        ({320: 9}, "within the 256 tokens"),
        ({128: 0}, "at least a byte"),
    ],
    ids=str,
)
def test_states_that_cannot_be_kept_are_refused(states: dict[int, int], why: str) -> None:
    with opened(disk()) as cache, pytest.raises(ValueError, match=why):
        cache.save(asked(4).tokens, asked(4), states={tokens: bytes(nbytes) for tokens, nbytes in states.items()})
    with cache_of(disk()) as cache, pytest.raises(ValueError, match="of use by themselves"):
        cache.save(prompt(300).tokens, prompt(300), states={64: b"state"})


def test_a_prompt_shorter_than_a_piece_needs_no_state() -> None:
    with opened(disk()) as cache:
        assert cache.save(range(63), asked(1), states=None).wait(TIMEOUT_S).stored_tokens == 0


def test_a_state_too_large_for_a_tier_is_not_written_there(tmp_path: Path) -> None:
    slow = DiskTier.open(tmp_path, capacity_bytes=4 << 20)  # segments of 1 MiB
    with opened(MemoryTier(16 << 20), slow) as cache:
        kv = asked(4)
        assert save(cache, kv, states=kv.states(nbytes=2 << 20)).reason == "too-large"
        assert (extents(slow), load(cache, kv).usable_tokens) == (0, 256)


def test_a_long_prompt_and_a_large_state_are_cut_so_that_both_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk(32 << 20)
    monkeypatch.setattr(tier, "max_extent_bytes", lambda representation, **_: 400_000, raising=False)
    with opened(tier) as cache:
        kv = asked(60)
        assert save(cache, kv, states=kv.states(20, 60, nbytes=300_000)).stored_tokens == 60 * 64
        assert all(info.extent_bytes <= 400_000 for info in tier.scan())
        assert sorted(info.blocks for info in tier.scan() if info.state)[-1] > 1
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (60 * 64, [])


def test_what_a_write_budget_keeps_ends_at_a_state(tmp_path: Path) -> None:
    slow = DiskTier.open(tmp_path, capacity_bytes=64 << 20)
    with opened(slow, write_budget_bytes=8 << 20) as cache:
        kv = asked(150)
        result = save(cache, kv, states=kv.states(10, 20, 150))
        assert result.reason == "budget"
        assert result.stored_tokens in (0, 10 * 64, 20 * 64)
        assert sum(not info.state for info in slow.scan()) == 0
        assert load(cache, kv).wrong == []


def test_what_no_state_stands_behind_is_given_back_to_the_budget(tmp_path: Path) -> None:
    slow = DiskTier.open(tmp_path, capacity_bytes=64 << 20)
    with opened(slow, write_budget_bytes=8 << 20) as cache:
        for seed in range(1, 12):  # a part of each is worth a write, and of no use
            kv = asked(150, seed=seed)
            assert (save(cache, kv, states=kv.states(150)).reason, slow.statistics().extents) == ("budget", 0)
        kv = asked(10)
        assert save(cache, kv, states=kv.states(10)).stored_tokens == 10 * 64


def test_a_queue_counts_what_states_keep_alive() -> None:
    tier = FaultyTier(disk())
    tier.inject(Fault("write", "stall", times=1))
    with opened(tier, save_queue_bytes=1 << 20) as cache:
        first = cache.save(asked(1).tokens, asked(1), states=asked(1).states())
        assert tier.stalled.wait(TIMEOUT_S)
        kvs = [asked(1, seed=seed) for seed in (1, 2)]
        tickets = [cache.save(kv.tokens, kv, states=kv.states(nbytes=800_000)) for kv in kvs]
        assert tickets[1].done
        assert tickets[1].wait(0).reason == "queue-full"
        tier.heal()
        assert [ticket.wait(TIMEOUT_S).reason for ticket in (first, tickets[0])] == [None, None]
