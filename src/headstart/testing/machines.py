"""Random histories against models that may lose but never lie (hypothesis state machines).

`TierMachine` drives a tier beside a set of what was written: what it locates must have been written and must read back to
the bit, what is leased must stay, and its books must be whole after each step. `CacheMachine` drives a whole PrefixCache, its
disk included: saves, loads, leases, pressure, faults, rot, a process that dies amid any call to the disk, power cuts.

A subclass says what is under test; a canary subclass whose tier lies must fail, or the harness looks away:

    class MemoryMachine(TierMachine):
        def make_tier(self): return MemoryTier(self.capacity_bytes)

    TestMemory = MemoryMachine.TestCase
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headstart.block.extent import layout_of
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import Lease, PrefixCache, Ticket
from headstart.errors import StoreError
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import STATE_BYTES, TINY, FakeDestination, FakeKV
from headstart.testing.faults import Fault, FaultyTier, TierFault, TierVerb
from headstart.testing.faulty_disk import DiskFault, FaultyDisk, ProcessDied
from headstart.testing.round_trip import TIMEOUT_S, finish, match
from headstart.tier.base import ExtentId, ReadRange, Terms, Tier

PROMPTS = 8
_LONGEST = 12  # pieces of a prompt at most
_STEPS = 200  # of upkeep, more than there can be to do


@lru_cache(maxsize=512)
def machine_prompt(number: int, pieces: int, salt: str | None = None, representation: Representation = TINY) -> FakeKV:
    """Return one of a family of prompts in which some share a head of three pieces and then part."""
    head = np.arange(3 * 64, dtype=np.uint32) + np.uint32(number % 2 * 1000)
    tail = np.arange(_LONGEST * 64, dtype=np.uint32) + np.uint32(1_000_000 * (number + 1))
    return FakeKV(representation, np.concatenate([head, tail])[: pieces * 64 + 1].tolist(), salt=salt)


_numbers = st.integers(0, PROMPTS - 1)
_lengths = st.integers(1, _LONGEST)
_edges = st.sets(st.integers(1, _LONGEST - 1), max_size=3).map(sorted)


class TierMachine(RuleBasedStateMachine):
    """Subclasses make the tier; a `persistent` one is closed and made again between steps. One whose tier has a clock of the
    test's own lets it go on in `pass_time`."""

    persistent = False
    capacity_bytes = 1 << 20
    representation: Representation = TINY  # of pieces of 64 tokens; where it needs boundary states, some extents end with one

    def make_tier(self) -> Tier:
        raise NotImplementedError

    def pass_time(self, seconds: int) -> None:
        pass

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.make_tier()
        self.written: set[bytes] = set()  # keys of every block that was ever handed over
        self.states_written: set[bytes] = set()  # and of those with a state behind them
        self.held: Counter[ExtentId] = Counter()
        self.pinned: set[ExtentId] = set()

    @rule(number=_numbers, pieces=_lengths, first=st.integers(0, _LONGEST - 1), with_state=st.booleans())
    def write(self, number: int, pieces: int, first: int, with_state: bool) -> None:
        kv = self._prompt(number)
        count = min(pieces, _LONGEST - first)
        with_state &= self.representation.state == "required"
        outcome = self.tier.write(kv.image(first, count, state_bytes=STATE_BYTES * with_state), self.representation)
        keys = kv.keys[first : first + count]
        self.written |= set(keys)
        self.states_written |= set(keys[-1:]) if with_state else set()
        assert outcome.stored == (outcome.reason in ("written", "present"))
        if outcome.stored:
            assert self.tier.locate(self.representation.digest, keys).holds(state=with_state)

    @rule(number=_numbers)
    def read_what_is_located(self, number: int) -> None:
        kv = self._prompt(number)
        placement = self.tier.locate(self.representation.digest, kv.keys)
        for pieces, extent in enumerate([] if placement.states is None else placement.states.tolist(), 1):
            if extent != -1:
                assert kv.keys[pieces - 1] in self.states_written, "a state is found that nobody wrote"
                self._compare_state(kv, pieces, ExtentId(extent))
        for block, key in enumerate(kv.keys):
            extent, position = ExtentId(int(placement.extents[block])), int(placement.positions[block])
            if extent == -1:
                continue
            assert key in self.written, "a block is found that nobody wrote"
            assert self.tier.lease([extent]) == [True]
            self._compare(kv, block, extent, position)
            self.tier.release([extent])

    @rule(number=_numbers)
    def lease(self, number: int) -> None:
        for extent in self._extents_of(number):
            if self.tier.lease([extent])[0]:
                self.held[extent] += 1

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 1000))
    def release(self, pick: int) -> None:
        extent = sorted(self.held)[pick % len(self.held)]
        self.tier.release([extent])
        self.held[extent] -= 1
        self.held += Counter()  # drops what is at zero

    @rule(number=_numbers, times=st.integers(1, 3))
    def touch(self, number: int, times: int) -> None:
        for _ in range(times):
            self.tier.touch(self._extents_of(number))

    @rule(number=_numbers, edges=st.sets(st.integers(1, _LONGEST - 1), min_size=1, max_size=4).map(sorted))
    def converse(self, number: int, edges: list[int]) -> None:
        """A conversation grows turn by turn, and is used again."""
        for first, end in zip([0, *edges], [*edges, _LONGEST], strict=True):
            self.write(number, end - first, first, with_state=end % 2 == 0)
        self.touch(number, times=3)

    @rule(seconds=st.sampled_from([1, 31, 61]))
    def tend(self, seconds: int) -> None:
        before = self._pinned_blocks()
        self.pass_time(seconds)
        assert any(not self.tier.tend() for _ in range(_STEPS)), "upkeep finds no end"
        self.pinned = {info.id for info in self.tier.scan() if info.pinned_until_ms is not None}
        assert before <= self._pinned_blocks(), "a pin was lost when extents were joined"

    @rule(number=_numbers)
    def delete(self, number: int) -> None:
        extents = self._extents_of(number)
        stay = {extent for extent in extents if extent in self.held or extent in self.pinned}
        assert self.tier.delete(extents, reason="user") == len(extents) - len(stay)
        assert {e for e in extents if self.tier.info(e) is not None} == stay

    @rule(number=_numbers, retention=st.sampled_from(["default", "agent", "chat", "unheard of"]))
    def keep(self, number: int, retention: str) -> None:
        extents = self._extents_of(number)
        before = self._promises(extents)
        self.tier.keep(extents, Terms(retention))
        assert all(now >= then for now, then in zip(self._promises(extents), before, strict=True))

    @rule(number=_numbers)
    def pin(self, number: int) -> None:
        extents = self._extents_of(number)
        done = self.tier.pin(extents, until_ms=None)
        self.pinned |= {extent for extent, ok in zip(extents, done, strict=True) if ok}

    @rule(number=_numbers)
    def unpin(self, number: int) -> None:
        extents = self._extents_of(number)
        self.tier.unpin(extents)
        self.pinned -= set(extents)

    @precondition(lambda self: self.persistent)
    @rule()
    def reopen(self) -> None:
        before = self._what_is_there()
        self._let_go()
        self.tier.close()
        self.tier = self.make_tier()
        assert self._what_is_there() == before
        self.pinned = {info.id for info in self.tier.scan() if info.pinned_until_ms is not None}

    @invariant()
    def books_are_whole(self) -> None:
        statistics = self.tier.statistics()
        assert statistics.live_bytes <= statistics.allocated_bytes <= self.capacity_bytes
        scanned = list(self.tier.scan())
        assert (len(scanned), sum(info.blocks for info in scanned)) == (statistics.extents, statistics.blocks)
        assert self.tier.check() == []

    @invariant()
    def leased_and_pinned_extents_are_there(self) -> None:
        assert all(self.tier.info(extent) is not None for extent in {*self.held, *self.pinned})

    def teardown(self) -> None:
        self._let_go()
        assert self.tier.check() == []
        self.tier.close()

    def _compare(self, kv: FakeKV, block: int, extent: ExtentId, position: int) -> None:
        info = self.tier.info(extent)
        assert info is not None
        layout = layout_of(self.representation, info.blocks)
        for layer in range(self.representation.layers):
            offset, nbytes = layout.piece_range(layer, position, 1)
            got = bytearray(nbytes)
            self.tier.read([ReadRange(extent, offset, [memoryview(got)])])
            assert got == kv.piece(layer, block).tobytes(), f"block {block}, layer {layer}: other bytes than were written"

    def _compare_state(self, kv: FakeKV, pieces: int, extent: ExtentId) -> None:
        info = self.tier.info(extent)
        assert info is not None
        assert info.state
        assert self.tier.lease([extent]) == [True]
        got = bytearray(STATE_BYTES)
        offset = layout_of(self.representation, info.blocks, state_bytes=STATE_BYTES).state_offset
        self.tier.read([ReadRange(extent, offset, [memoryview(got)])])
        self.tier.release([extent])
        assert got == kv.state(pieces), f"behind {pieces} pieces: another state than was written"

    def _prompt(self, number: int) -> FakeKV:
        return machine_prompt(number, _LONGEST, representation=self.representation)

    def _extents_of(self, number: int) -> list[ExtentId]:
        found = self.tier.locate(self.representation.digest, self._prompt(number).keys)
        states = [] if found.states is None else found.states.tolist()
        return [ExtentId(e) for e in dict.fromkeys(found.extents.tolist() + states) if e != -1]

    def _pinned_blocks(self) -> set[bytes]:
        return {key for info in self.tier.scan() if info.id in self.pinned for key in info.keys}

    def _promises(self, extents: list[ExtentId]) -> list[int]:
        return [0 if (info := self.tier.info(extent)) is None else info.guaranteed_until_ms for extent in extents]

    def _what_is_there(self) -> dict[tuple[bool, tuple[bytes, ...]], tuple[object, ...]]:
        return {
            (info.state, info.keys): (info.extent_bytes, info.retention, info.guaranteed_until_ms, info.pinned_until_ms)
            for info in self.tier.scan()
        }

    def _let_go(self) -> None:
        for extent, count in self.held.items():
            self.tier.release([extent] * count)
        self.held.clear()


class CacheMachine(RuleBasedStateMachine):
    """A subclass opens the cache on `self.faulty_disk` in `open_cache`, its slowest tier wrapped in a FaultyTier that it keeps
    in `self.faulty`; capacity small enough that some dozen saves fill it. `pass_time` as in TierMachine. Where its
    `representation`, of pieces of 64 tokens, needs boundary states, saves put some of them, and matches end at these alone."""

    faulty: FaultyTier
    representation: Representation = TINY

    def open_cache(self) -> PrefixCache:
        raise NotImplementedError

    def pass_time(self, seconds: int) -> None:
        pass

    def __init__(self) -> None:
        super().__init__()
        self._hook = threading.excepthook
        threading.excepthook = lambda args: None if args.exc_type is ProcessDied else self._hook(args)
        self.disk = CrashDisk()
        self.faulty_disk = FaultyDisk(self.disk)
        # How many pieces a match may end with: of all that were ever handed over, or where a state was handed over.
        self.saved: dict[tuple[int, str | None], set[int]] = {}
        self.leases: list[tuple[Lease, FakeKV]] = []
        self.disturbed = False  # a fault was injected since the cache was opened: what it matches may not load
        self.rotten = False  # bytes at rest were changed; that stays so, and `check` may say so
        self.powerless = False  # bytes were lost; what is matched may not load from then on
        self.cache = self.open_cache()

    @rule(number=_numbers, pieces=_lengths, salt=st.sampled_from([None, "a"]), behind=_edges)
    def save(self, number: int, pieces: int, salt: str | None, behind: list[int]) -> None:
        result = self._save(number, pieces, salt, behind).wait(TIMEOUT_S)
        assert 0 <= result.stored_tokens <= pieces * 64
        assert result.reason != "timeout"
        if not self.disturbed and result.reason is None:
            assert result.stored_tokens == pieces * 64

    @rule(number=_numbers, pieces=_lengths, salt=st.sampled_from([None, "a", "b"]))
    def load(self, number: int, pieces: int, salt: str | None) -> None:
        kv = self._prompt(number, pieces, salt)
        with match(self.cache, kv) as lease:
            self._may_be_there(lease, number, salt)
            self._load(lease, kv)

    @rule(number=_numbers, pieces=_lengths, edges=_edges)
    def load_by_ranges(self, number: int, pieces: int, edges: list[int]) -> None:
        kv = self._prompt(number, pieces)
        with match(self.cache, kv) as lease:
            self._may_be_there(lease, number, None)
            matched = lease.tokens // 64
            bounds = [0, *(edge for edge in edges if edge < matched), matched]
            destination = FakeDestination(self.representation, matched)
            loads = [lease.load(destination, 64 * first, 64 * end) for first, end in pairwise(bounds)]
            for first, load in zip(bounds, loads, strict=False):
                usable = load.result(TIMEOUT_S)
                assert destination.wrong(kv, first=first, pieces=usable // 64) == [], "wrong bytes were called usable"
                if not (self.disturbed or self.rotten or self.powerless):
                    assert usable == load.pieces * 64, "a leased block was not there"

    @rule(number=_numbers, pieces=_lengths)
    def match_twice(self, number: int, pieces: int) -> None:
        kv = self._prompt(number, pieces)
        with match(self.cache, kv) as one, match(self.cache, kv) as two:
            if not self.disturbed:
                assert one.tokens == two.tokens

    @precondition(lambda self: len(self.leases) < 4)
    @rule(number=_numbers, pieces=_lengths)
    def hold(self, number: int, pieces: int) -> None:
        kv = self._prompt(number, pieces)
        lease = match(self.cache, kv)
        self._may_be_there(lease, number, None)
        self.leases.append((lease, kv))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 3), load=st.booleans())
    def let_go(self, pick: int, load: bool) -> None:
        lease, kv = self.leases.pop(pick % len(self.leases))
        if load:
            self._load(lease, kv)
        lease.release()
        lease.release()

    @rule(start=st.integers(0, 50))
    def press(self, start: int) -> None:
        """More than there is room for, all of it new."""
        for number in range(100 + start, 112 + start):
            self._save(number, _LONGEST, None, []).wait(TIMEOUT_S)

    @rule(
        verb=st.sampled_from(["read", "write", "locate", "lease", "touch", "delete"]),
        kind=st.sampled_from(["eio", "enospc", "corrupt"]),
        every=st.integers(1, 4),
    )
    def tier_fails(self, verb: TierVerb, kind: TierFault, every: int) -> None:
        self.disturbed = True
        self.faulty.inject(Fault(verb, kind, every=every))

    @rule(kind=st.sampled_from(["flip", "foreign", "short"]), every=st.integers(1, 4))
    def tier_lies(self, kind: TierFault, every: int) -> None:
        self.disturbed = True
        self.faulty.inject(Fault("read", kind, every=every))

    @rule(
        call=st.sampled_from(["any", "open", "read", "write", "sync", "punch", "truncate", "rename", "unlink"]),
        kind=st.sampled_from(["eio", "enospc", "emfile", "late", "short", "flip"]),
        every=st.integers(1, 5),
    )
    def disk_fails(self, call: str, kind: Any, every: int) -> None:
        self.disturbed = True
        self.faulty_disk.inject(DiskFault(call, kind, every=every))

    @rule()
    def heal(self) -> None:
        self.faulty.heal()
        self.faulty_disk.heal()

    @rule(share=st.floats(0, 1, exclude_max=True), pick=st.integers(0, 1000))
    def rot(self, share: float, pick: int) -> None:
        """A byte of a segment or a journal changes. The marker is left out: without it the directory is not ours."""
        files = [(path, len(data)) for path, data in self.disk.files().items() if data and path.suffix != ".json"]
        if files:
            self.disturbed = self.rotten = True
            path, nbytes = files[pick % len(files)]
            self.disk.damage(path, int(share * nbytes))

    @rule()
    def reopen(self) -> None:
        self.heal()
        self._release_all()
        self.cache.close()
        self._open_again()

    @rule(power_cut=st.none() | st.integers(0, 10_000))
    def crash(self, power_cut: int | None) -> None:
        self.faulty.heal()
        self.faulty_disk.bury()
        if power_cut is None:
            self.disk.kill()
        else:
            self.disk.power_cut(power_cut)
            self.powerless = True
        self.leases.clear()  # they died with their process
        with suppress(ProcessDied):
            self.cache.close()
        self._open_again()

    @rule(call=st.integers(1, 40), after=st.booleans(), number=_numbers, pieces=_lengths, behind=_edges)
    def die_amid_a_save(self, call: int, after: bool, number: int, pieces: int, behind: list[int]) -> None:
        self.faulty_disk.die_at(call, after=after)
        with suppress(ProcessDied):
            ticket = self._save(number, pieces, None, behind)
            deadline = time.monotonic() + TIMEOUT_S
            while not ticket.done and not self.faulty_disk.died.wait(0.0005):
                assert time.monotonic() < deadline, "a save neither ends nor dies"
        self.crash(power_cut=None)

    @rule(number=_numbers, edges=st.sets(st.integers(1, _LONGEST - 1), min_size=1, max_size=4).map(sorted))
    def converse(self, number: int, edges: list[int]) -> None:
        """A conversation grows turn by turn, and is used again."""
        for pieces in [*edges, _LONGEST, _LONGEST, _LONGEST]:
            self.save(number, pieces, None, [])

    @rule(seconds=st.sampled_from([1, 31, 61]))
    def tend(self, seconds: int) -> None:
        self.pass_time(seconds)
        for _ in range(_STEPS):
            with suppress(OSError, StoreError):
                if not self.faulty.tend():
                    break

    @rule(call=st.integers(1, 60), after=st.booleans())
    def die_amid_upkeep(self, call: int, after: bool) -> None:
        self.faulty_disk.die_at(call, after=after)
        with suppress(ProcessDied):
            self.tend(61)
        self.crash(power_cut=None)

    @invariant()
    def capacity_is_kept(self) -> None:
        for statistics in self.cache.statistics().tiers:
            assert statistics.allocated_bytes <= statistics.capacity_bytes, statistics
            if not (self.powerless or self.rotten):  # else extents may be listed again whose bytes are gone: they are misses
                assert statistics.live_bytes <= statistics.allocated_bytes, statistics

    @invariant()
    def books_are_whole(self) -> None:
        if not self.disturbed and not self.rotten:
            problems = self.cache.check()
            assert problems == [], problems

    def teardown(self) -> None:
        self.heal()
        self._release_all()
        with suppress(ProcessDied):
            self.cache.close()
        threading.excepthook = self._hook

    def _open_again(self) -> None:
        self.faulty_disk = FaultyDisk(self.disk)
        self.disturbed = False
        self.cache = self.open_cache()
        self.books_are_whole()

    def _load(self, lease: Lease, kv: FakeKV) -> None:
        found = finish(lease, kv)
        assert found.wrong == [], f"wrong bytes were called usable: {found.wrong[0]}"
        if not (self.disturbed or self.rotten or self.powerless):
            assert found.usable_tokens == lease.tokens, "a leased block was not there"

    def _may_be_there(self, lease: Lease, number: int, salt: str | None) -> None:
        ends = {end for other in self.saved.items() for end in self._shared(number, salt, other)}
        assert lease.tokens // 64 in {0, *ends}, "a prompt is found that nobody saved, or up to where no state was"

    def _shared(self, number: int, salt: str | None, other: tuple[tuple[int, str | None], set[int]]) -> set[int]:
        (saved_number, saved_salt), ends = other
        if salt != saved_salt:
            return set()
        if number == saved_number:
            return ends
        return {end for end in ends if end <= 3} if number % 2 == saved_number % 2 else set()

    def _prompt(self, number: int, pieces: int, salt: str | None = None) -> FakeKV:
        return machine_prompt(number, pieces, salt, self.representation)

    def _save(self, number: int, pieces: int, salt: str | None, behind: list[int]) -> Ticket:
        """Hand a prompt over, with states behind so many pieces and behind the last one."""
        kv = self._prompt(number, pieces, salt)
        with_state = self.representation.state == "required"
        ends = {*(end for end in behind if end < pieces), pieces} if with_state else set(range(1, pieces + 1))
        self.saved.setdefault((number, salt), set()).update(ends)
        return self.cache.save(kv.tokens.tolist(), kv, salt=salt, states=kv.states(*ends) if with_state else None)

    def _release_all(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()
