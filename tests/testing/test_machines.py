"""The state machines: over every tier and a whole cache, and two canaries that must be caught."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import IDENTITY, STATEFUL, TINY
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.machines import CacheMachine, TierMachine
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier


class MemoryMachine(TierMachine):
    def make_tier(self) -> Tier:
        return MemoryTier(self.capacity_bytes)


class DiskMachine(TierMachine):
    persistent = True
    capacity_bytes = 4 << 20

    def __init__(self) -> None:
        self.disk = CrashDisk()
        super().__init__()

    def make_tier(self) -> Tier:
        return DiskTier.open(self.disk.root / "kv", capacity_bytes=self.capacity_bytes, disk=self.disk)


class MemoryStatesMachine(MemoryMachine):
    representation = STATEFUL


class DiskStatesMachine(DiskMachine):
    representation = STATEFUL


class WholeCacheMachine(CacheMachine):
    def open_cache(self) -> PrefixCache:
        disk = DiskTier.open(self.disk.root / "kv", capacity_bytes=4 << 20, disk=self.faulty_disk)
        self.faulty = FaultyTier(disk)
        return PrefixCache(
            [MemoryTier(512 << 10), self.faulty],
            identity=IDENTITY,
            representation=self.representation,
            load_timeout_s=5.0,
            match_timeout_s=5.0,
        )


class DiskOnlyCacheMachine(WholeCacheMachine):
    """Small enough that a prompt of a few saves is worth joining."""

    now = 1000.0

    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    def open_cache(self) -> PrefixCache:
        disk = DiskTier.open(
            self.disk.root / "kv",
            capacity_bytes=1 << 20,
            disk=self.faulty_disk,
            clock=lambda: self.now,
            wall_clock=lambda: self.now,
        )
        self.faulty = FaultyTier(disk)
        return PrefixCache(
            [self.faulty],
            identity=IDENTITY,
            representation=self.representation,
            load_timeout_s=5.0,
            match_timeout_s=5.0,
        )


class StatesMachine(WholeCacheMachine):
    representation = STATEFUL


class DiskOnlyStatesMachine(DiskOnlyCacheMachine):
    representation = STATEFUL


class NeighboursBytes(TierMachine):
    """A tier that now and then returns its neighbour's bytes."""

    def make_tier(self) -> Tier:
        return FaultyTier(MemoryTier(self.capacity_bytes), Fault("read", "foreign", every=5))


class BelievesItsTiers(CacheMachine):
    """A cache that verifies nothing, over a tier that lies in its second read; the first brings a checked header."""

    def open_cache(self) -> PrefixCache:
        self.faulty = FaultyTier(MemoryTier(4 << 20), Fault("read", "flip", start=2, every=3))
        self.faulty.trusted = True
        self.disturbed = True
        return PrefixCache([self.faulty], identity=IDENTITY, representation=TINY)


MACHINES: list[type[TierMachine | CacheMachine]] = [
    MemoryMachine,
    DiskMachine,
    MemoryStatesMachine,
    DiskStatesMachine,
    WholeCacheMachine,
    DiskOnlyCacheMachine,
    StatesMachine,
    DiskOnlyStatesMachine,
]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_no_history_breaks_a_promise(machine: type[TierMachine | CacheMachine]) -> None:
    examples = settings().max_examples * 3 // (20 if machine.representation is STATEFUL else 5)  # the same rules once more
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=25, max_examples=examples))


@pytest.mark.soak
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_no_long_history_breaks_a_promise(machine: type[TierMachine | CacheMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=80))


@pytest.mark.parametrize("canary", [NeighboursBytes, BelievesItsTiers], ids=lambda machine: machine.__name__)
def test_a_machine_over_a_liar_fails(canary: type[TierMachine | CacheMachine]) -> None:
    unshrunk = settings(
        max_examples=300, report_multiple_bugs=False, stateful_step_count=25, database=None, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, ExceptionGroup)) as caught:
        run_state_machine_as_test(canary, settings=unshrunk)
    # Threads read in any order, so the same history may be lied to elsewhere: hypothesis then calls it flaky, in a group.
    said = "\n".join(map(str, _leaves(caught.value)))
    assert "other bytes than were written" in said or "wrong bytes were called usable" in said


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error]
