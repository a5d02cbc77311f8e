"""Short runs of a conversation that pauses become one long run: the same bytes, whatever fails meanwhile, and nothing beside it
gives way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from disk_kit import Clock, segments

from headstart.block.representation import Representation
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import OPAQUE, PAGED, STATE_BYTES, STATEFUL, TINY, UNEVEN, FakeKV
from headstart.testing.faulty_disk import DiskFault, FaultyDisk, ProcessDied
from headstart.testing.tier_contract import prompt, read
from headstart.tier.base import ExtentId, Terms
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import Disk

CAPACITY = 1 << 20  # segments, and so extents, are a fourth of it, and half of that is long
TURNS = (4, 4, 5)
PIECES = sum(TURNS)


def open_tier(disk: Disk | None, clock: Clock, *, root: Path | None = None, capacity_bytes: int = CAPACITY) -> DiskTier:
    if root is None:
        assert isinstance(disk, CrashDisk | FaultyDisk)
        root = Path("/disk/kv")
    return DiskTier.open(root, capacity_bytes=capacity_bytes, disk=disk, clock=clock, wall_clock=lambda: 1e9)


def extents_of(tier: DiskTier, kv: FakeKV) -> list[ExtentId]:
    found = tier.locate(kv.representation.digest, kv.keys).extents.tolist()
    return [ExtentId(extent) for extent in dict.fromkeys(found) if extent >= 0]


def converse(tier: DiskTier, kv: FakeKV, turns: Sequence[int] = TURNS) -> None:
    """Save a conversation turn by turn. Each turn uses what was there twice, at the end of its prompt and of its answer."""
    first = 0
    for pieces in turns:
        assert tier.write(kv.image(first, pieces), kv.representation).stored
        first += pieces
        tier.touch(extents_of(tier, kv))
        tier.touch(extents_of(tier, kv))
    tier.touch(extents_of(tier, kv))


def pause(tier: DiskTier, clock: Clock) -> None:
    """Let a minute pass in which nothing else happens."""
    clock.now += 61
    for _ in range(50):
        if not tier.tend():
            return
    raise AssertionError("tending finds no end")


def right(tier: DiskTier, kv: FakeKV) -> int:
    """Return how many pieces are there, each compared to the bit."""
    per_piece = kv.representation.blocks_per_piece
    placement = tier.locate(kv.representation.digest, kv.keys)
    there = 0
    for piece in range(kv.pieces):
        extent, position = int(placement.extents[piece * per_piece]), int(placement.positions[piece * per_piece])
        if extent < 0:
            continue
        there += 1
        info = tier.info(ExtentId(extent))
        assert info is not None
        first = piece - position // per_piece
        whole = kv.image(first, info.blocks // per_piece)
        assert read(tier, ExtentId(extent), 0, len(whole)) == whole, f"piece {piece} came back with other bytes"
    return there


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def disk() -> CrashDisk:
    return CrashDisk()


@pytest.fixture
def tier(disk: CrashDisk, clock: Clock) -> DiskTier:
    return open_tier(disk, clock)


@pytest.mark.parametrize("representation", [TINY, UNEVEN, PAGED, OPAQUE], ids=["tiny", "uneven", "paged", "opaque"])
def test_a_conversation_that_pauses_becomes_one_run(disk: CrashDisk, clock: Clock, representation: Representation) -> None:
    tier = open_tier(disk, clock)
    pieces = {TINY: 13, UNEVEN: 24, PAGED: 32, OPAQUE: 32}[representation]
    kv = FakeKV(representation, list(range(pieces * representation.piece_tokens)))
    converse(tier, kv, [pieces // 4, pieces // 4, pieces - 2 * (pieces // 4)])
    assert len(extents_of(tier, kv)) == 3
    pause(tier, clock)
    (extent,) = extents_of(tier, kv)
    assert read(tier, extent, 0, len(kv.image())) == kv.image()
    counters = tier.statistics().counters
    assert (counters["joined_extents"], counters["joined_bytes"]) == (3, len(kv.image()))
    assert [removal.reason for removal in tier.removals()] == ["joined"] * 3
    assert tier.check() == []
    tier.close()
    assert right(open_tier(disk, clock), kv) == pieces


def test_what_was_saved_once_stays_as_it_is(tier: DiskTier, clock: Clock) -> None:
    kv = prompt(PIECES)
    for first, pieces in ((0, 4), (4, 4), (8, 5)):
        tier.write(kv.image(first, pieces), TINY)
    tier.touch(extents_of(tier, kv))  # at the end of the prompt
    tier.touch(extents_of(tier, kv))  # at the end of the answer
    pause(tier, clock)
    assert len(extents_of(tier, kv)) == 3


def test_what_is_in_use_is_not_joined_before_it_pauses(tier: DiskTier, clock: Clock) -> None:
    kv = prompt(PIECES)
    converse(tier, kv)
    clock.now += 30
    assert not tier.tend()
    tier.touch(extents_of(tier, kv))
    clock.now += 40
    assert not tier.tend()
    assert len(extents_of(tier, kv)) == 3
    pause(tier, clock)
    assert len(extents_of(tier, kv)) == 1


def test_a_joined_extent_is_as_recent_as_the_latest_of_its_parts(tier: DiskTier, clock: Clock) -> None:
    kv = prompt(PIECES)
    converse(tier, kv)
    infos = [tier.info(extent) for extent in extents_of(tier, kv)]
    pause(tier, clock)
    joined = tier.info(extents_of(tier, kv)[0])
    assert joined is not None
    assert joined.last_used == max(info.last_used for info in infos if info is not None)


def test_a_joined_extent_is_promised_what_each_of_its_parts_was(disk: CrashDisk, clock: Clock) -> None:
    tier = open_tier(disk, clock)
    kv = prompt(PIECES)
    converse(tier, kv)
    _, two, three = extents_of(tier, kv)
    tier.keep([two], Terms(retention="agent"))
    assert tier.pin([three], until_ms=2 * 10**12) == [True]
    promised = tier.info(two)
    assert promised is not None
    pause(tier, clock)
    for again in range(2):
        if again:
            tier.close()
            tier = open_tier(disk, clock)
        (extent,) = extents_of(tier, kv)
        joined = tier.info(extent)
        assert joined is not None
        assert (joined.retention, joined.pinned_until_ms) == ("agent", 2 * 10**12)
        assert joined.guaranteed_until_ms == promised.guaranteed_until_ms > joined.created_ms


def test_what_is_pinned_and_double_is_dropped_only_once_the_other_one_is_pinned_too(disk: CrashDisk, clock: Clock) -> None:
    tier = open_tier(disk, clock)
    kv = prompt(PIECES)
    tier.write(kv.image(4, 4), TINY)
    (part,) = extents_of(tier, kv)
    assert tier.pin([part], until_ms=2 * 10**12) == [True]
    tier.write(kv.image(), TINY)
    assert len(extents_of(tier, kv)) == 2
    pause(tier, clock)
    (whole,) = extents_of(tier, kv)
    info = tier.info(whole)
    assert info is not None
    assert info.pinned_until_ms == 2 * 10**12
    assert tier.statistics().blocks == PIECES


def test_joining_never_lets_pins_take_more_than_they_may(tier: DiskTier, clock: Clock) -> None:
    kvs = [prompt(PIECES, seed=seed) for seed in range(4)]
    for kv in kvs:
        converse(tier, kv)
        assert tier.pin(extents_of(tier, kv)[:1], until_ms=None) == [True]
    pause(tier, clock)
    pinned = [info.extent_bytes for info in tier.scan() if info.pinned_until_ms is not None]
    assert tier.statistics().counters["joined_extents"] > 0
    assert len(pinned) == len(kvs)
    assert sum(pinned) <= CAPACITY // 2
    assert tier.check() == []


def test_a_double_that_is_pinned_stays_where_pinning_the_whole_would_take_too_much(tier: DiskTier, clock: Clock) -> None:
    kvs = [prompt(PIECES, seed=seed) for seed in range(4)]
    for kv in kvs:
        tier.write(kv.image(4, 4), TINY)
        assert tier.pin(extents_of(tier, kv), until_ms=None) == [True]
        tier.write(kv.image(), TINY)
    pause(tier, clock)
    pinned = [info.extent_bytes for info in tier.scan() if info.pinned_until_ms is not None]
    assert len(pinned) == len(kvs)
    assert len(set(pinned)) == 2, "some moved to the whole, the rest is where it was"
    assert sum(pinned) <= CAPACITY // 2
    assert [len(extents_of(tier, kv)) for kv in kvs].count(2) > 0
    assert tier.check() == []


def test_extents_of_two_tenants_are_not_joined(tier: DiskTier, clock: Clock) -> None:
    kv = prompt(PIECES)
    for tenant, first, pieces in (("a", 0, 4), ("b", 4, 4), ("a", 8, 5)):
        tier.write(kv.image(first, pieces), TINY, terms=Terms(tenant=tenant))
    for _ in range(4):
        tier.touch(extents_of(tier, kv))
    pause(tier, clock)
    assert len(extents_of(tier, kv)) == 3


def test_a_leased_chain_is_left_alone_until_it_is_used_again(tier: DiskTier, clock: Clock) -> None:
    kv = prompt(PIECES)
    converse(tier, kv)
    leased = extents_of(tier, kv)[1:2]
    assert tier.lease(leased) == [True]
    pause(tier, clock)
    assert len(extents_of(tier, kv)) == 3
    tier.release(leased)
    tier.touch(extents_of(tier, kv))
    pause(tier, clock)
    assert len(extents_of(tier, kv)) == 1


def test_a_part_that_rotted_is_dropped_and_nothing_of_it_is_carried_over(disk: CrashDisk, clock: Clock) -> None:
    tier = open_tier(disk, clock)
    kv = prompt(PIECES)
    converse(tier, kv)
    (path,) = [path for path in disk.files() if path.suffix == ".seg"]
    at = disk.files()[path].index(kv.piece(1, 5).tobytes())
    disk.damage(path, at + 1000)
    pause(tier, clock)
    assert right(tier, kv) == PIECES - 4
    counters = tier.statistics().counters
    assert counters["join_failed_corrupt"] == 1
    assert counters["quarantined_corrupt"] == 1
    assert counters.get("joined_bytes", 0) == 0


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("where", ["header", "first byte", "last byte"])
def test_any_bit_that_rotted_costs_its_part_alone(disk: CrashDisk, clock: Clock, part: int, where: str) -> None:
    tier = open_tier(disk, clock)
    kv = prompt(PIECES)
    converse(tier, kv)
    first = sum(TURNS[:part])
    image = kv.image(first, TURNS[part]).tobytes()
    (path,) = [path for path in disk.files() if path.suffix == ".seg"]
    start = disk.files()[path].index(image)
    disk.damage(path, start + {"header": 200, "first byte": 4096, "last byte": len(image) - 1}[where], mask=0x40)
    pause(tier, clock)
    assert right(tier, kv) == PIECES - TURNS[part]
    assert tier.check() == []


def test_without_room_nothing_is_joined_and_nothing_gives_way(tier: DiskTier, clock: Clock) -> None:
    kv = prompt(PIECES)
    converse(tier, kv)
    others = [prompt(4, seed=seed) for seed in range(1, 30)]
    for other in others:
        tier.write(other.image(), TINY)
        tier.touch(extents_of(tier, kv))
        if tier.statistics().counters.get("evicted_capacity"):
            break
    while tier.room_bytes > 150_000:
        others.append(prompt(4, seed=len(others) + 100))
        tier.write(others[-1].image(), TINY)
    there = [right(tier, other) for other in others]
    pause(tier, clock)
    assert len(extents_of(tier, kv)) == 3
    assert [right(tier, other) for other in others] == there
    assert tier.statistics().counters["join_failed_full"] == 1


def test_where_the_room_goes_while_it_reads_nothing_gives_way_either(
    tier: DiskTier, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = prompt(PIECES)
    converse(tier, kv)
    joiner = tier._tending.joiner
    replaces = joiner._replace
    left: list[set[ExtentId]] = []

    def crowded(*args: object) -> int:
        seed = 1
        while tier.room_bytes > 100_000:
            tier.write(prompt(2, seed=seed).image(), TINY)
            seed += 1
        left.append({info.id for info in tier.scan()})
        return replaces(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(joiner, "_replace", crowded)
    pause(tier, clock)
    assert [{info.id for info in tier.scan()}] == left


def test_two_extents_that_changed_places_are_not_joined(disk: CrashDisk, clock: Clock) -> None:
    tier = open_tier(disk, clock)
    kv = prompt(PIECES)
    converse(tier, kv)
    (path,) = [path for path in disk.files() if path.suffix == ".seg"]
    one, two = kv.image(0, 4).tobytes(), kv.image(4, 4).tobytes()
    data = disk.files()[path]
    handle = disk.open(path, "write")
    disk.write(handle, two, data.index(one))
    disk.write(handle, one, data.index(two))
    disk.close(handle)
    pause(tier, clock)
    assert tier.statistics().counters.get("joined_bytes", 0) == 0
    assert tier.statistics().counters["quarantined_corrupt"] == 1


def test_what_cannot_be_leased_is_not_read(tier: DiskTier, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    converse(tier, prompt(PIECES))
    leases = tier.lease

    def refused(extents: Sequence[ExtentId]) -> list[bool]:
        assert leases(extents[:2]) == [True, True]
        return [True, True, False]  # another process is removing it

    with monkeypatch.context() as patch:
        patch.setattr(tier, "lease", refused)
        pause(tier, clock)
    counters = tier.statistics().counters
    assert (counters.get("joined_bytes", 0), counters.get("quarantined_corrupt", 0)) == (0, 0)
    assert not any(info.leased for info in tier.scan())


# Failing and dying.


def calls_of_a_join() -> Counter[str]:
    disk, clock = CrashDisk(), Clock()
    faulty = FaultyDisk(disk)
    tier = open_tier(faulty, clock)
    converse(tier, prompt(PIECES))
    before = faulty.calls.copy()
    pause(tier, clock)
    assert len(extents_of(tier, prompt(PIECES))) == 1
    return faulty.calls - before


@pytest.mark.parametrize("after", [False, True], ids=["in-part", "whole"])
def test_dead_amid_any_call_of_a_join_nothing_is_lost_and_nothing_stays_double(after: bool) -> None:
    kv, doubled = prompt(PIECES), 0
    for die_at in range(1, calls_of_a_join().total() + 1):
        disk, clock = CrashDisk(), Clock()
        faulty = FaultyDisk(disk)
        tier = open_tier(faulty, clock)
        converse(tier, kv)
        faulty.die_at(die_at, after=after)
        with suppress(ProcessDied):
            pause(tier, clock)
        faulty.bury()
        disk.kill()
        tier = open_tier(disk, clock)
        assert right(tier, kv) == PIECES, f"after dying in call {die_at}"
        doubled += tier.statistics().blocks > PIECES
        pause(tier, clock)
        assert right(tier, kv) == tier.statistics().blocks == PIECES, f"after dying in call {die_at}"
        assert tier.check() == []
        tier.close()
    assert doubled, "no death left the old ones beside the new one"


@pytest.mark.parametrize("seed", range(20))
def test_after_a_power_loss_amid_a_join_what_is_found_is_right_or_fails_its_checks(seed: int) -> None:
    kv, disk, clock = prompt(PIECES), CrashDisk(), Clock()
    faulty = FaultyDisk(disk)
    tier = DiskTier.open(
        disk.root / "kv", capacity_bytes=CAPACITY, durability="data", disk=faulty, clock=clock, wall_clock=lambda: 1e9
    )
    converse(tier, kv)
    faulty.die_at(1 + seed * calls_of_a_join().total() // 20, after=bool(seed % 2))
    with suppress(ProcessDied):
        pause(tier, clock)
    faulty.bury()
    disk.power_cut(seed)
    tier = open_tier(disk, clock)
    assert right(tier, kv) == PIECES, "with durability data, what was acknowledged stays, joined or not"
    assert tier.check() == []


@pytest.mark.parametrize("seed", range(30))
def test_what_a_power_loss_could_not_touch_it_cannot_touch_once_it_is_joined(seed: int) -> None:
    """Also where the process that joins does not sync what it saves."""
    kv, disk, clock = prompt(PIECES), CrashDisk(), Clock()
    tier = DiskTier.open(
        disk.root / "kv", capacity_bytes=CAPACITY, durability="data", disk=disk, clock=clock, wall_clock=lambda: 1e9
    )
    converse(tier, kv)
    tier.close()
    tier = open_tier(disk, clock)
    for _ in range(3):
        tier.touch(extents_of(tier, kv))
    pause(tier, clock)
    assert tier.statistics().counters["joined_extents"] == 3
    disk.power_cut(seed)
    assert right(open_tier(disk, clock), kv) == PIECES


@pytest.mark.parametrize("seed", range(10))
def test_nor_once_a_double_of_it_is_dropped(seed: int) -> None:
    kv, disk, clock = prompt(PIECES), CrashDisk(), Clock()
    tier = DiskTier.open(
        disk.root / "kv", capacity_bytes=CAPACITY, durability="data", disk=disk, clock=clock, wall_clock=lambda: 1e9
    )
    tier.write(kv.image(4, 4), TINY)
    tier.close()
    tier = open_tier(disk, clock)
    tier.write(kv.image(), TINY)
    pause(tier, clock)
    assert tier.statistics().blocks == PIECES
    disk.power_cut(seed)
    tier = open_tier(disk, clock)
    assert right(tier, kv) >= 4
    assert -1 not in tier.locate(TINY.digest, kv.keys[4:8]).extents


@pytest.mark.parametrize("kind", ["eio", "enospc", "late", "short"])
def test_a_join_that_fails_in_any_call_loses_nothing_but_what_it_could_not_read(kind: str) -> None:
    kv, calls = prompt(PIECES), calls_of_a_join()
    # A handle that cannot be closed keeps its lock, and a file that is made although making it failed is found by the next
    # opening: neither is the join's.
    del calls["close"]
    if kind == "late":
        del calls["open"]
    for call, start in [(call, start) for call, count in calls.items() for start in range(1, count + 1)]:
        disk, clock = CrashDisk(), Clock()
        faulty = FaultyDisk(disk)
        tier = open_tier(faulty, clock)
        converse(tier, kv)
        faulty.inject(DiskFault(call, kind, start=start, times=1))  # type: ignore[arg-type]
        pause(tier, clock)
        assert faulty.injected.total() == 1
        faulty.heal()
        pause(tier, clock)
        assert tier.statistics().allocated_bytes <= CAPACITY
        lost = PIECES - right(tier, kv)
        assert lost == 0 or (kind == "short" and tier.statistics().counters["quarantined_corrupt"]), (call, start)
        assert tier.check() == []
        tier.close()


def test_a_read_that_lies_is_never_written_down_as_the_truth() -> None:
    kv = prompt(PIECES)
    for start in range(1, 20):
        disk, clock = CrashDisk(), Clock()
        faulty = FaultyDisk(disk)
        tier = open_tier(faulty, clock)
        converse(tier, kv)
        faulty.inject(DiskFault("read", "flip", start=start, times=1))
        pause(tier, clock)
        faulty.heal()
        right(tier, kv)
        tier.close()


# Several processes.


@pytest.fixture
def two(tmp_path: Path) -> Callable[[], tuple[DiskTier, DiskTier, Clock]]:
    def opened() -> tuple[DiskTier, DiskTier, Clock]:
        clock = Clock()
        return open_tier(None, clock, root=tmp_path / "kv"), open_tier(None, clock, root=tmp_path / "kv"), clock

    return opened


def test_what_another_process_reads_stays_until_it_is_done_and_goes_then(
    two: Callable[[], tuple[DiskTier, DiskTier, Clock]],
) -> None:
    one, other, clock = two()
    kv = prompt(PIECES)
    converse(one, kv)
    other.refresh()
    reading = extents_of(other, kv)[1]
    assert other.lease([reading]) == [True]
    pause(one, clock)
    assert one.statistics().blocks == PIECES + TURNS[1]
    assert read(other, reading, 0, len(kv.image(4, 4))) == kv.image(4, 4)
    other.release([reading])
    pause(one, clock)
    assert one.statistics().blocks == right(one, kv) == PIECES
    assert len(extents_of(one, kv)) == 1
    other.refresh()
    assert right(other, kv) == PIECES
    assert one.check() == other.check() == []
    one.close()
    other.close()


def test_what_another_process_uses_has_not_paused(two: Callable[[], tuple[DiskTier, DiskTier, Clock]]) -> None:
    one, other, clock = two()
    kv = prompt(PIECES)
    converse(one, kv)
    assert not one.tend()
    clock.now += 6
    assert not one.tend()  # which tells the other one of the uses
    clock.now += 50
    other.refresh()
    other.touch(extents_of(other, kv))
    pause(one, clock)
    assert len(extents_of(one, kv)) == 3
    pause(one, clock)
    assert len(extents_of(one, kv)) == 1
    one.close()
    other.close()


@pytest.mark.parametrize("when", ["_header", "_replace"], ids=["while it reads", "once it has read"])
def test_two_processes_that_join_the_same_chain_at_once_leave_one(
    two: Callable[[], tuple[DiskTier, DiskTier, Clock]], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    one, other, clock = two()
    kv = prompt(PIECES)
    converse(one, kv)
    clock.now += 6
    assert not one.tend()  # which tells the other one of the uses
    other.refresh()
    for _ in range(3):
        other.touch(extents_of(other, kv))
    clock.now += 6
    assert not other.tend()
    one.refresh()
    joiner = one._tending.joiner
    goes_on = getattr(joiner, when)

    def overtaken(*args: object) -> object:
        if not other.statistics().counters.get("joined_bytes"):
            pause(other, clock)
            assert other.statistics().counters["joined_bytes"]
        return goes_on(*args)

    pause(one, clock)  # the other one's touches
    monkeypatch.setattr(joiner, when, overtaken)
    pause(one, clock)
    assert other.statistics().counters["joined_bytes"]
    assert one.statistics().counters.get("joined_bytes", 0) == 0
    pause(one, clock)  # what was read is not read any more
    one.refresh()
    other.refresh()
    assert one.statistics().blocks == right(one, kv) == right(other, kv) == PIECES
    assert len(extents_of(one, kv)) == 1
    assert one.check() == other.check() == []
    one.close()
    other.close()


def test_on_a_real_disk_too(tmp_path: Path, clock: Clock) -> None:
    tier = open_tier(None, clock, root=tmp_path / "kv")
    kv = prompt(PIECES)
    converse(tier, kv)
    pause(tier, clock)
    (extent,) = extents_of(tier, kv)
    assert read(tier, extent, 0, len(kv.image())) == kv.image()
    assert tier.check() == []
    assert sum(path.stat().st_blocks * 512 for path in segments(tmp_path / "kv")) < 2 * len(kv.image())
    tier.close()


def with_states(tier: DiskTier, kv: FakeKV) -> list[int]:
    """Return behind which pieces a state stands, each read and compared to the bit."""
    states = tier.locate(STATEFUL.digest, kv.keys).states
    found = []
    for piece, extent in enumerate([] if states is None else states.tolist(), 1):
        if extent < 0:
            continue
        info = tier.info(ExtentId(extent))
        assert info is not None
        assert info.state
        whole = kv.image(piece - info.blocks, info.blocks, state_bytes=STATE_BYTES)
        assert read(tier, ExtentId(extent), 0, len(whole)) == whole, f"behind piece {piece} stands another state"
        found.append(piece)
    return found


def test_joining_ends_at_a_state_and_takes_it_along(tier: DiskTier, disk: CrashDisk, clock: Clock) -> None:
    kv = prompt(26, representation=STATEFUL)
    first = 0
    for pieces, state_bytes in ((5, 0), (8, STATE_BYTES), (5, 0), (8, STATE_BYTES)):
        assert tier.write(kv.image(first, pieces, state_bytes=state_bytes), STATEFUL).stored
        first += pieces
        for _ in range(3):
            tier.touch(extents_of(tier, kv))
    pause(tier, clock)
    assert [info.blocks for extent in extents_of(tier, kv) if (info := tier.info(extent))] == [13, 13]
    assert with_states(tier, kv) == [13, 26]
    assert tier.statistics().counters["joined_extents"] == 4
    tier.close()
    assert with_states(open_tier(disk, clock), kv) == [13, 26]


def test_the_only_holder_of_a_state_is_no_double(tier: DiskTier, disk: CrashDisk, clock: Clock) -> None:
    kv = prompt(12, representation=STATEFUL)
    assert tier.write(kv.image(), STATEFUL).stored
    for behind in (3, 8, 12):
        assert tier.write(kv.image(behind - 1, 1, state_bytes=STATE_BYTES), STATEFUL).reason == "written"
    for _ in range(3):
        clock.now += 31
        tier.touch([info.id for info in tier.scan()])
        pause(tier, clock)
    assert (tier.statistics().extents, with_states(tier, kv)) == (4, [3, 8, 12])
    tier.close()
    tier = open_tier(disk, clock)
    pause(tier, clock)
    assert with_states(tier, kv) == [3, 8, 12]
    assert tier.check() == []


def test_of_two_that_carry_the_same_state_one_goes(tier: DiskTier, disk: CrashDisk, clock: Clock) -> None:
    """As a crash leaves them between the joined extent and the removal of its parts."""
    kv = prompt(9, representation=STATEFUL)
    assert tier.write(kv.image(4, 5, state_bytes=STATE_BYTES), STATEFUL).stored
    store = tier._store
    store.books.present = lambda *_, **__: False  # type: ignore[method-assign]
    assert tier.write(kv.image(0, 9, state_bytes=STATE_BYTES), STATEFUL).reason == "written"
    assert tier.write(kv.image(0, 9), STATEFUL).reason == "written"
    del store.books.present
    assert tier.statistics().extents == 3
    pause(tier, clock)
    assert (tier.statistics().extents, with_states(tier, kv), right_with_state(tier, kv)) == (1, [9], True)


def right_with_state(tier: DiskTier, kv: FakeKV) -> bool:
    (info,) = tier.scan()
    whole = kv.image(state_bytes=STATE_BYTES)
    return info.state and read(tier, info.id, 0, len(whole)) == whole


@pytest.mark.parametrize("call", range(1, 30, 4))
def test_dying_amid_joining_loses_no_state(call: int) -> None:
    disk, clock = CrashDisk(), Clock()
    faulty = FaultyDisk(disk)
    tier = open_tier(faulty, clock)
    kv = prompt(13, representation=STATEFUL)
    first = 0
    for pieces, state_bytes in ((4, 0), (4, 0), (5, STATE_BYTES)):
        assert tier.write(kv.image(first, pieces, state_bytes=state_bytes), STATEFUL).stored
        first += pieces
        for _ in range(3):
            tier.touch(extents_of(tier, kv))
    assert tier.write(kv.image(5, 1, state_bytes=STATE_BYTES), STATEFUL).stored
    faulty.die_at(call, after=bool(call % 2))
    with suppress(ProcessDied, OSError):
        pause(tier, clock)
    faulty.bury()
    disk.kill()
    again = open_tier(FaultyDisk(disk), clock)
    assert with_states(again, kv) == [6, 13]
    pause(again, clock)
    pause(again, clock)
    assert with_states(again, kv) == [6, 13]
    assert again.check() == []
    again.close()
