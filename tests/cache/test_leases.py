"""A lease protects what it names and nothing longer: whatever happens in between, none is left over."""

from __future__ import annotations

import random
from collections.abc import Sequence
from threading import Event

import pytest
from cache_kit import TIMEOUT_S, cache_of, disk, extents, leased_bytes, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.testing.fake_kv import TINY, FakeDestination
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.round_trip import load, match, save
from headstart.testing.tier_contract import put
from headstart.tier.base import ExtentId
from headstart.tier.memory import MemoryTier


def test_what_is_leased_survives_pressure_and_goes_when_released() -> None:
    tier = MemoryTier(400 << 10)
    kv = prompt(10 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        with match(cache, kv) as lease:
            for seed in range(1, 8):
                save(cache, prompt(10 * 64, seed=seed))
            with match(cache, kv) as again:
                assert again.tokens == lease.tokens == 640
        for seed in range(8, 16):
            save(cache, prompt(10 * 64, seed=seed))
        assert load(cache, kv).matched_tokens == 0


class Racing(MemoryTier):
    """A tier in which an extent goes between being found and being leased."""

    going: ExtentId | None = None

    def lease(self, extents: Sequence[ExtentId]) -> list[bool]:
        if self.going in extents:
            self.delete([self.going], reason="user")
        return super().lease(extents)


def test_what_lies_behind_an_extent_that_went_before_its_lease_is_not_kept() -> None:
    tier, kv = Racing(4 << 20), prompt(6 * 64 + 1)
    parts = [put(tier, kv, first=first, pieces=2) for first in (0, 2, 4)]
    with cache_of(tier) as cache:
        tier.going = parts[1]
        with match(cache, kv) as lease:
            assert lease.tokens == 2 * 64
            assert tier.delete([parts[2]], reason="user") == 1
            assert tier.delete([parts[0]], reason="user") == 0
        assert leased_bytes(tier) == 0


def test_a_lease_that_is_released_while_its_load_reads_protects_until_the_last_byte() -> None:
    inner = MemoryTier(4 << 20)
    tier = FaultyTier(inner)
    kv = prompt(10 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        extent = next(iter(inner.scan())).id
        tier.inject(Fault("read", "stall", times=1))
        lease, destination, ended = match(cache, kv), FakeDestination(TINY, 10), Event()
        running = lease.load(into=destination)
        running.add_done_callback(lambda _: ended.set())
        assert tier.stalled.wait(TIMEOUT_S)
        lease.release()
        assert inner.delete([extent], reason="user") == 0
        tier.heal()
        assert ended.wait(TIMEOUT_S)
        assert running.result() == 640
        assert destination.wrong(kv, pieces=10) == []
        assert inner.delete([extent], reason="user") == 1


def test_a_lease_loads_a_token_once_and_nothing_after_its_release() -> None:
    with cache_of(disk()) as cache:
        save(cache, prompt(300))
        lease = match(cache, prompt(300))
        lease.load(into=FakeDestination(TINY, 4)).result()
        with pytest.raises(ValueError, match="loaded already"):
            lease.load(into=FakeDestination(TINY, 4))
        lease.release()
        lease.release()
        with pytest.raises(ValueError, match="released"):
            match_released(cache).load(into=FakeDestination(TINY, 4))


def match_released(cache: object) -> object:
    lease = match(cache, prompt(300))  # type: ignore[arg-type]
    lease.release()
    return lease


def test_a_lease_reads_well_in_a_log() -> None:
    memory, slow = MemoryTier(4 << 20), disk()
    with cache_of(memory, slow) as cache:
        save(cache, prompt(300))
        with match(cache, prompt(300)) as lease:
            assert repr(lease) == "<Lease on 256 tokens: 256 from memory>"
        assert repr(lease) == "<Lease on 256 tokens: 256 from memory, released>"
        assert repr(match(cache, prompt(300, seed=1))) == "<Lease on 0 tokens: a miss>"


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_no_lease_is_left_over_after_any_sequence(seed: int) -> None:
    """25 examples × 400 operations = 10,000."""
    rng = random.Random(seed)
    memory, inner = MemoryTier(200 << 10), MemoryTier(600 << 10)
    slow = FaultyTier(inner)
    with cache_of(memory, slow) as cache:
        held = []
        for _ in range(400):
            kv = prompt(rng.randrange(1, 14) * 64 + 1, seed=rng.randrange(4))
            step = rng.randrange(10)
            if step < 3:
                held.append((match(cache, kv), kv))
            elif step < 5 and held:
                held.pop(rng.randrange(len(held)))[0].release()
            elif step < 7 and held:
                lease, of = held.pop(rng.randrange(len(held)))
                destination = FakeDestination(TINY, of.pieces, shift=rng.choice([0, 8]))
                running = lease.load(into=destination)
                if rng.random() < 0.2:
                    running.cancel()
                if rng.random() < 0.5:
                    lease.release()
                usable = running.result(TIMEOUT_S)
                assert destination.wrong(of, pieces=usable // 64) == []
                lease.release()
            elif step < 9:
                save(cache, kv)
            else:
                slow.heal()
                kind = rng.choice(["eio", "flip", "short", None])
                if kind:
                    slow.inject(Fault("read", kind, every=rng.randrange(2, 6), times=3))
        slow.heal()
        for lease, _ in held:
            lease.release()
        assert cache.check() == []
        assert [leased_bytes(memory), leased_bytes(inner)] == [0, 0]
        assert [extents(memory), extents(inner)] == [0, 0]
