"""Every promise of `tier.base.Tier` as a test. Subclass, say how to make a tier, and the promises are run against it:

    class TestMemoryTier(TierContract):
        @pytest.fixture
        def make_tier(self):
            return lambda capacity_bytes: MemoryTier(capacity_bytes)

A tier that outlives its process also sets `persistent` (and `promises = False` where it promises nothing) and makes the same
medium again when asked a second time. Every test ends with `check()` finding nothing and with a close, done twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headstart.block.extent import layout_of
from headstart.block.representation import Representation
from headstart.errors import StoreError
from headstart.testing.fake_kv import OPAQUE, STATEFUL, TINY, UNEVEN, FakeKV
from headstart.tier.base import ExtentId, ReadRange, Shape, Terms, Tier
from headstart.tier.surveying import surveyed

GONE = ExtentId(1 << 40)  # an id that no tier has given out


class TierContract:
    """`capacity_bytes`: how much the tier under test holds; at least 16 extents of four blocks of TINY (832 KiB)."""

    persistent = False
    promises = True  # whether one that is persistent keeps what it is told to keep and pins
    capacity_bytes = 1 << 20

    @pytest.fixture
    def make_tier(self) -> Callable[[int], Tier]:
        raise NotImplementedError("a subclass says how its tier is made: make_tier(capacity_bytes) -> Tier")

    @pytest.fixture
    def tier(self, make_tier: Callable[[int], Tier]) -> Iterator[Tier]:
        tier = make_tier(self.capacity_bytes)
        yield tier
        assert tier.check() == []
        tier.close()
        tier.close()

    # What is written is found and read back.

    def test_a_new_tier_is_empty(self, tier: Tier) -> None:
        statistics = tier.statistics()
        assert (statistics.extents, statistics.blocks, statistics.live_bytes) == (0, 0, 0)
        assert list(tier.scan()) == []

    def test_written_blocks_are_located_in_their_order(self, tier: Tier) -> None:
        kv = prompt(6)
        extent = put(tier, kv, first=2, pieces=4)
        placement = tier.locate(TINY.digest, kv.keys)
        assert placement.extents.tolist() == [-1, -1, extent, extent, extent, extent]
        assert placement.positions[2:].tolist() == [0, 1, 2, 3]

    def test_keys_are_asked_for_in_any_order_and_more_than_once(self, tier: Tier) -> None:
        kv = prompt(3)
        extent = put(tier, kv)
        keys = kv.keys
        absent = prompt(1, seed=99).keys
        placement = tier.locate(TINY.digest, [keys[2], *absent, keys[0], keys[2]])
        assert placement.extents.tolist() == [extent, -1, extent, extent]
        assert np.delete(placement.positions, 1).tolist() == [2, 0, 2]

    def test_no_keys_give_an_empty_placement(self, tier: Tier) -> None:
        assert len(tier.locate(TINY.digest, []).extents) == 0

    def test_another_representation_finds_nothing(self, tier: Tier) -> None:
        kv = prompt(3)
        put(tier, kv)
        assert tier.locate(UNEVEN.digest, kv.keys).extents.tolist() == [-1, -1, -1]

    @pytest.mark.parametrize("representation", [TINY, UNEVEN, OPAQUE], ids=["tiny", "uneven", "opaque"])
    def test_the_whole_image_comes_back(self, tier: Tier, representation: Representation) -> None:
        kv = prompt(8, representation=representation)
        extent = put(tier, kv)
        image = kv.image()
        assert read(tier, extent, 0, len(image)) == bytes(image)

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (4095, 2), (4096, 4096), (5000, 9000), (8192, 0)])
    def test_any_range_comes_back(self, tier: Tier, offset: int, nbytes: int) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        assert read(tier, extent, offset, nbytes) == bytes(kv.image()[offset : offset + nbytes])

    def test_a_range_is_scattered_over_its_buffers_in_order(self, tier: Tier) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        parts = [bytearray(n) for n in (100, 4096, 0, 4000, 4092)]
        assert tier.lease([extent]) == [True]
        done = tier.read([ReadRange(extent, 4096, [memoryview(p) for p in parts])])
        tier.release([extent])
        assert done == sum(map(len, parts))
        assert b"".join(parts) == bytes(kv.image()[4096 : 4096 + done])

    def test_one_call_reads_many_ranges_of_many_extents(self, tier: Tier) -> None:
        kvs = [prompt(4, seed=s) for s in range(5)]
        extents = [put(tier, kv) for kv in kvs]
        buffers = [bytearray(8192) for _ in range(10)]
        reads = [ReadRange(extents[i % 5], 4096 * (i // 5), [memoryview(b)]) for i, b in enumerate(buffers)]
        assert tier.lease(extents) == [True] * 5
        assert tier.read(reads) == 10 * 8192
        tier.release(extents)
        for i, buffer in enumerate(buffers):
            assert buffer == bytes(kvs[i % 5].image()[4096 * (i // 5) : 4096 * (i // 5) + 8192])

    def test_info_and_scan_tell_the_same_of_a_living_extent(self, tier: Tier) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        info = tier.info(extent)
        assert info is not None
        assert [i.id for i in tier.scan()] == [extent]
        assert (info.id, info.representation, info.blocks) == (extent, TINY.digest, 4)
        assert (info.header_bytes, info.extent_bytes) == header_and_extent_bytes(TINY, 4)
        assert tier.shape(extent) == Shape(info.blocks, info.header_bytes, info.extent_bytes)
        assert [key[:16] for key in info.keys] == [key[:16] for key in kv.keys]

    def test_a_survey_says_in_columns_what_a_scan_says_one_by_one(self, tier: Tier) -> None:
        extents = [put(tier, prompt(2, seed=seed)) for seed in range(3)]
        tier.lease(extents[:1])
        now_ms = time.time_ns() // 1_000_000
        infos = {info.id: info for info in tier.scan()}
        found = [(survey, i) for survey in surveyed(tier, now_ms=now_ms) for i in range(len(survey))]
        assert sorted(int(survey.ids[i]) for survey, i in found) == sorted(infos)
        for survey, i in found:
            info, facts = infos[ExtentId(int(survey.ids[i]))], survey.facts
            assert facts.tier == tier.name
            assert (facts.retention[i], facts.tenant[i]) == (info.retention, info.tenant)
            assert (facts.nbytes[i], facts.blocks[i]) == (info.extent_bytes, info.blocks)
            assert survey.last_used[i] == info.last_used
            assert 0 <= facts.idle_ms[i] <= max(facts.age_ms[i], 60_000)
            assert survey.stays[i] == (info.id == extents[0])
        tier.release(extents[:1])

    def test_nothing_is_known_of_an_extent_that_is_not_there(self, tier: Tier) -> None:
        assert tier.info(GONE) is None
        assert tier.shape(GONE) is None
        assert tier.lease([GONE]) == [False]
        assert tier.delete([GONE], reason="user") == 0
        tier.touch([GONE])

    def test_the_retention_class_is_kept(self, tier: Tier) -> None:
        outcome = tier.write(prompt(2).image(retention="agent"), TINY, terms=Terms("agent"))
        assert outcome.stored
        assert [info.retention for info in tier.scan()] == ["agent"]

    # A write is put-if-absent.

    def test_the_same_image_is_stored_once(self, tier: Tier) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        before = tier.statistics()
        outcome = tier.write(kv.image(), TINY)
        assert (outcome.stored, outcome.reason) == (True, "present")
        assert located(tier, kv) == [extent] * 4
        after = tier.statistics()
        assert (after.extents, after.allocated_bytes) == (before.extents, before.allocated_bytes)

    def test_an_image_with_one_new_block_is_stored(self, tier: Tier) -> None:
        kv = prompt(4)
        put(tier, kv, pieces=3)
        assert tier.write(kv.image(), TINY).reason == "written"
        assert -1 not in located(tier, kv)

    def test_threads_that_write_one_image_store_it_once(self, tier: Tier) -> None:
        kv = prompt(4)
        images = [kv.image() for _ in range(8)]
        reasons: list[str] = []
        together(lambda i: reasons.append(tier.write(images[i], TINY).reason), count=8)
        assert sorted(reasons) == ["present"] * 7 + ["written"]
        assert tier.statistics().extents == 1

    def test_the_largest_extent_is_taken_and_a_larger_one_refused_without_evicting(self, tier: Tier) -> None:
        kept = prompt(2)
        put(tier, kept)
        pieces = 1
        while header_and_extent_bytes(TINY, pieces + 1)[1] <= tier.max_extent_bytes(TINY):
            pieces += 1
        outcome = tier.write(prompt(pieces + 1, seed=1).image(), TINY)
        assert (outcome.stored, outcome.reason) == (False, "too-large")
        assert -1 not in located(tier, kept)
        assert tier.write(prompt(pieces, seed=1).image(), TINY).reason == "written"

    # Boundary states.

    def test_a_state_is_found_behind_the_block_that_it_follows(self, tier: Tier) -> None:
        kv = prompt(6, representation=STATEFUL)
        assert tier.locate(STATEFUL.digest, kv.keys).states is None
        put(tier, kv, pieces=2)
        extent = put(tier, kv, first=2, pieces=3, state_bytes=5000)
        placement = tier.locate(STATEFUL.digest, kv.keys)
        assert placement.states is not None
        assert placement.states.tolist() == [-1, -1, -1, -1, extent, -1]
        assert (placement.holds(state=False), tier.locate(STATEFUL.digest, kv.keys[:5]).holds(state=True)) == (False, True)
        assert [(info.blocks, info.state) for info in tier.scan()] == [(2, False), (3, True)]
        image = kv.image(2, 3, state_bytes=5000)
        assert read(tier, extent, 0, len(image)) == bytes(image)

    def test_blocks_that_are_there_are_written_again_with_a_state_and_a_state_once(self, tier: Tier) -> None:
        kv = prompt(5, representation=STATEFUL)
        long = put(tier, kv)
        assert tier.write(kv.image(2, 1, state_bytes=5000), STATEFUL).reason == "written"
        assert tier.write(kv.image(2, 1, state_bytes=5000), STATEFUL).reason == "present"
        assert tier.write(kv.image(1, 2, state_bytes=5000), STATEFUL).reason == "present"
        assert tier.write(kv.image(2, 1), STATEFUL).reason == "present"
        placement = tier.locate(STATEFUL.digest, kv.keys)
        assert placement.states is not None
        assert (placement.states >= 0).tolist() == [False, False, True, False, False]
        short = ExtentId(int(placement.states[2]))
        assert short != long
        assert tier.statistics().extents == 2

    def test_a_block_that_two_extents_hold_is_found_as_long_as_one_is_there(self, tier: Tier) -> None:
        kv = prompt(4, representation=STATEFUL)
        for first in (0, 1):  # which of the two goes
            extents = [put(tier, kv)]
            assert tier.write(kv.image(1, 1, state_bytes=5000), STATEFUL).reason == "written"
            states = tier.locate(STATEFUL.digest, kv.keys).states
            assert states is not None
            extents.append(ExtentId(int(states[1])))
            assert tier.delete([extents[first]], reason="user") == 1
            placement = tier.locate(STATEFUL.digest, kv.keys)
            assert (placement.extents >= 0).tolist() == ([False, True, False, False] if first == 0 else [True] * 4)
            assert (placement.states is not None) == (first == 0)
            assert tier.check() == []
            assert tier.delete([extents[1 - first]], reason="user") == 1
            assert located(tier, kv) == [-1] * 4

    def test_a_state_is_found_again_after_reopening(self, make_tier: Callable[[int], Tier]) -> None:
        if not self.persistent:
            pytest.skip("this tier forgets with its process")
        tier = make_tier(self.capacity_bytes)
        kvs = [prompt(4, seed=seed, representation=STATEFUL) for seed in range(3)]
        for kv in kvs:
            put(tier, kv)
            assert tier.write(kv.image(1, 1, state_bytes=900), STATEFUL).reason == "written"
        tier.close()
        again = make_tier(self.capacity_bytes)
        for kv in kvs:
            placement = again.locate(STATEFUL.digest, kv.keys)
            assert placement.states is not None
            assert (placement.states >= 0).tolist() == [False, True, False, False]
            assert read(again, ExtentId(int(placement.states[1])), 0, 4096) == bytes(kv.image(1, 1, state_bytes=900)[:4096])
        assert again.check() == []
        again.close()

    def test_a_state_may_be_much_larger_than_blocks(self, tier: Tier) -> None:
        kv = prompt(2, representation=STATEFUL)
        state_bytes = tier.max_extent_bytes(STATEFUL, state_bytes=200_000) // 2
        extent = put(tier, kv, state_bytes=state_bytes)
        assert read(tier, extent, 0, 4096) == bytes(kv.image(state_bytes=state_bytes)[:4096])

    # A lease protects.

    def test_a_leased_extent_survives_pressure(self, tier: Tier) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        assert tier.lease([extent]) == [True]
        self.press(tier)
        assert located(tier, kv) == [extent] * 4
        assert read(tier, extent, 0, 4096) == bytes(kv.image()[:4096])
        tier.release([extent])

    def test_a_released_extent_gives_way(self, tier: Tier) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        assert tier.lease([extent]) == [True]
        tier.release([extent])
        self.press(tier)
        assert located(tier, kv) == [-1] * 4
        assert tier.lease([extent]) == [False]

    def test_leases_are_counted(self, tier: Tier) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        assert tier.lease([extent, extent]) == [True, True]
        tier.release([extent])
        self.press(tier)
        assert located(tier, kv) == [extent] * 4
        tier.release([extent])
        assert tier.delete([extent], reason="user") == 1

    def test_a_leased_extent_is_not_deleted(self, tier: Tier) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        assert tier.lease([extent]) == [True]
        assert tier.delete([extent], reason="user") == 0
        assert read(tier, extent, 0, 4096) == bytes(kv.image()[:4096])
        tier.release([extent])
        assert tier.delete([extent], reason="user") == 1

    def test_a_tier_whose_every_extent_is_leased_says_full(self, tier: Tier) -> None:
        held: list[ExtentId] = []
        outcomes = []
        for seed in range(self.extents_to_fill() * 2):
            kv = prompt(4, seed=seed)
            outcomes.append(tier.write(kv.image(), TINY))
            if outcomes[-1].stored:
                held.append(ExtentId(located(tier, kv)[0]))
                assert tier.lease([held[-1]]) == [True]
            assert tier.statistics().allocated_bytes <= self.capacity_bytes
        assert (outcomes[-1].stored, outcomes[-1].reason) == (False, "full")
        assert all(tier.info(extent) is not None for extent in held)
        tier.release(held)
        assert tier.write(prompt(4, seed=10_000).image(), TINY).reason == "written"

    # Capacity, order of eviction.

    def test_allocated_bytes_never_exceed_the_capacity(self, tier: Tier) -> None:
        for seed in range(self.extents_to_fill() * 3):
            assert tier.write(prompt(1 + seed % 7, seed=seed).image(), TINY).stored
            statistics = tier.statistics()
            assert statistics.live_bytes <= statistics.allocated_bytes <= self.capacity_bytes

    def test_evictions_are_counted_and_leave_the_newest(self, tier: Tier) -> None:
        self.press(tier)
        statistics = tier.statistics()
        assert sum(n for name, n in statistics.counters.items() if name.startswith("evicted_")) > 0
        assert -1 not in located(tier, prompt(4, seed=1000 + self.extents_to_fill() * 3 - 1))

    def test_looking_does_not_extend_a_life_and_touching_does(self, tier: Tier) -> None:
        looked_at, touched = prompt(4, seed=1), prompt(4, seed=2)
        put(tier, looked_at)
        put(tier, touched)
        seed = 100
        while -1 not in located(tier, looked_at):
            tier.touch(sorted({ExtentId(e) for e in located(tier, touched)}))
            assert tier.write(prompt(4, seed=seed).image(), TINY).stored
            seed += 1
            assert seed < 100 + 4 * self.extents_to_fill(), "nothing is ever evicted"
        assert -1 not in located(tier, touched)

    def test_the_first_one_touched_is_the_most_recently_used(self, tier: Tier) -> None:
        kvs = [prompt(2, seed=s) for s in range(3)]
        extents = [put(tier, kv) for kv in kvs]
        tier.touch(extents)
        order = [info.last_used for e in extents if (info := tier.info(e)) is not None]
        assert order == sorted(order, reverse=True)
        assert len(set(order)) == 3

    # Promises and pins, of a tier that outlives its process; any other may be asked all the same.

    def test_a_pinned_extent_survives_pressure_and_is_not_deleted_until_it_is_unpinned(self, tier: Tier) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        promised = self.persistent and self.promises
        assert tier.pin([extent, GONE], until_ms=None) == [promised, False]
        if promised:
            self.press(tier)
            assert located(tier, kv) == [extent] * 4
            assert tier.delete([extent], reason="user") == 0
        tier.unpin([extent])
        self.press(tier)
        assert located(tier, kv) == [-1] * 4

    def test_pins_leave_half_to_everything_else(self, tier: Tier) -> None:
        extents = [put(tier, prompt(4, seed=seed)) for seed in range(self.extents_to_fill() * 3 // 4)]
        pinned = tier.pin(extents, until_ms=None)
        assert sum(pinned) * len(prompt(4).image()) <= self.capacity_bytes // 2
        assert any(pinned) == (self.persistent and self.promises)
        self.press(tier)
        assert all(tier.info(extent) is not None for extent, ok in zip(extents, pinned, strict=True) if ok)

    def test_what_is_kept_as_a_class_with_a_guarantee_outlives_what_is_not(self, tier: Tier) -> None:
        kept = [prompt(4, seed=seed) for seed in range(4)]
        tier.keep([*(put(tier, kv) for kv in kept), GONE], Terms("agent"))
        self.press(tier)
        assert [-1 not in located(tier, kv) for kv in kept] == [
            self.persistent and self.promises
        ] * 4  # maybe written anew elsewhere

    # Deletion.

    def test_a_deleted_extent_is_gone_and_can_be_written_again_under_a_new_name(self, tier: Tier) -> None:
        kv = prompt(4)
        extent = put(tier, kv)
        assert tier.delete([extent], reason="user") == 1
        assert located(tier, kv) == [-1] * 4
        assert tier.info(extent) is None
        assert tier.statistics().extents == 0
        again = put(tier, kv)
        assert again != extent
        assert read(tier, again, 0, 4096) == bytes(kv.image()[:4096])

    def test_deleting_one_of_two_extents_that_share_blocks_keeps_the_others_readable(self, tier: Tier) -> None:
        kv = prompt(4)
        short = put(tier, kv, pieces=3)
        assert tier.write(kv.image(), TINY).stored
        long = next(info.id for info in tier.scan() if info.id != short)
        for victim in (short, long):
            tier.delete([victim], reason="user")
            for extent in {e for e in located(tier, kv) if e != -1}:
                assert read(tier, ExtentId(extent), 0, 4096) in (bytes(kv.image()[:4096]), bytes(kv.image(0, 3)[:4096]))
        assert tier.statistics().extents == 0

    def test_reading_what_was_deleted_fails_as_a_store_does(self, tier: Tier) -> None:
        extent = put(tier, prompt(4))
        tier.delete([extent], reason="user")
        with pytest.raises((StoreError, OSError)):
            tier.read([ReadRange(extent, 0, [memoryview(bytearray(4096))])])

    def test_reading_past_the_end_fails_as_a_store_does(self, tier: Tier) -> None:
        kv = prompt(1)
        extent = put(tier, kv)
        with pytest.raises((StoreError, OSError)):
            read(tier, extent, len(kv.image()) - 4096, 8192)

    # Books.

    def test_statistics_count_extents_blocks_and_bytes(self, tier: Tier) -> None:
        kv, other = prompt(4), prompt(2, seed=1)
        extent = put(tier, kv)
        put(tier, other)
        read(tier, extent, 0, 4096)
        statistics = tier.statistics()
        assert (statistics.name, statistics.capacity_bytes) == (tier.name, self.capacity_bytes)
        assert (statistics.extents, statistics.blocks) == (2, 6)
        assert statistics.live_bytes >= len(kv.image()) + len(other.image())
        assert statistics.counters["bytes_written"] >= len(kv.image()) + len(other.image())
        assert statistics.counters["bytes_read"] >= 4096

    def test_readers_writers_and_deleters_never_see_wrong_bytes(self, tier: Tier) -> None:
        kvs = [prompt(4, seed=s) for s in range(self.extents_to_fill() * 2)]
        images = [kv.image() for kv in kvs]
        wrong: list[int] = []

        def visit(thread: int) -> None:
            for step in range(60):
                n = (step * 7 + thread * 13) % len(kvs)
                placement = tier.locate(TINY.digest, kvs[n].keys[:1])
                extent = ExtentId(int(placement.extents[0]))
                if extent == -1:
                    tier.write(images[n], TINY)
                elif tier.lease([extent])[0]:
                    got = bytearray(16384)
                    tier.read([ReadRange(extent, 0, [memoryview(got)])])
                    if got != images[n][:16384]:
                        wrong.append(n)
                    tier.release([extent])
                    if step % 9 == 0:
                        tier.delete([extent], reason="user")

        together(visit, count=4)
        assert wrong == []
        assert tier.statistics().allocated_bytes <= self.capacity_bytes

    # What outlives the process.

    def test_a_reopened_tier_gives_what_the_closed_one_had(self, make_tier: Callable[[int], Tier]) -> None:
        if not self.persistent:
            pytest.skip("this tier forgets with its process")
        kept, dropped = [prompt(4, seed=s) for s in range(3)], prompt(4, seed=9)
        tier = make_tier(self.capacity_bytes)
        for kv in kept:
            put(tier, kv)
        tier.delete([put(tier, dropped)], reason="user")
        tier.touch([ExtentId(located(tier, kept[0])[0])])
        before = tier.statistics()
        order = [i.keys[0][:16] for i in sorted(tier.scan(), key=lambda i: i.last_used)]
        tier.close()
        again = make_tier(self.capacity_bytes)
        assert again.check() == []
        for kv in kept:
            extent = ExtentId(located(again, kv)[0])
            assert read(again, extent, 0, len(kv.image())) == bytes(kv.image())
        assert located(again, dropped) == [-1] * 4
        assert [i.keys[0][:16] for i in sorted(again.scan(), key=lambda i: i.last_used)] == order
        assert again.statistics().live_bytes == before.live_bytes
        assert again.statistics().allocated_bytes <= self.capacity_bytes
        assert again.check() == []
        again.close()

    def test_a_reopened_tier_stays_within_its_capacity(self, make_tier: Callable[[int], Tier]) -> None:
        if not self.persistent:
            pytest.skip("this tier forgets with its process")
        for start in range(3):
            tier = make_tier(self.capacity_bytes)
            assert tier.statistics().allocated_bytes <= self.capacity_bytes
            for seed in range(self.extents_to_fill()):
                assert tier.write(prompt(4, seed=start * 1000 + seed).image(), TINY).stored
                assert tier.statistics().allocated_bytes <= self.capacity_bytes
            assert tier.check() == []
            tier.close()

    def extents_to_fill(self) -> int:
        """How many extents of four blocks of TINY the capacity could hold at best."""
        return self.capacity_bytes // len(prompt(4).image()) + 1

    def press(self, tier: Tier) -> None:
        """Write three times what the tier holds; all of it new."""
        for seed in range(self.extents_to_fill() * 3):
            assert tier.write(prompt(4, seed=1000 + seed).image(), TINY).stored


def prompt(pieces: int, *, seed: int = 0, representation: Representation = TINY) -> FakeKV:
    """Return the KV of a prompt of `pieces` full pieces and some tokens more; another `seed` shares no prefix with it."""
    count = pieces * representation.piece_tokens + 7
    tokens = np.arange(count, dtype=np.uint32) * np.uint32(31) + np.uint32(seed * 1_000_003 % 2**32)
    return FakeKV(representation, tokens.tolist())


def located(tier: Tier, kv: FakeKV) -> list[int]:
    return [int(e) for e in tier.locate(kv.representation.digest, kv.keys).extents]


def put(tier: Tier, kv: FakeKV, *, first: int = 0, pieces: int | None = None, state_bytes: int = 0) -> ExtentId:
    """Write one extent that must be new, and return its id."""
    outcome = tier.write(kv.image(first, pieces, state_bytes=state_bytes), kv.representation)
    assert (outcome.stored, outcome.reason) == (True, "written")
    return ExtentId(located(tier, kv)[first * kv.representation.blocks_per_piece])


def read(tier: Tier, extent: ExtentId, offset: int, nbytes: int) -> bytes:
    """Read one range under a lease."""
    buffer = bytearray(nbytes)
    assert tier.lease([extent]) == [True]
    try:
        assert tier.read([ReadRange(extent, offset, [memoryview(buffer)])]) == nbytes
    finally:
        tier.release([extent])
    return bytes(buffer)


def together(work: Callable[[int], None], *, count: int, timeout_s: float = 60.0) -> None:
    """Run work(0) … work(count-1) at the same time, wait for all, and raise the first thing that one of them raised."""
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait(timeout_s)
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(run, n) for n in range(count)]:
            future.result(timeout_s)


def header_and_extent_bytes(representation: Representation, blocks: int) -> tuple[int, int]:
    layout = layout_of(representation, blocks)
    return layout.header_bytes, layout.extent_bytes
