"""Space that was not given back when its extents were removed, in files of the living too: the next opening gives it back, and
so does whoever lives, while nobody else is at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from disk_kit import Clock, extent_of, found, image, save

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.faulty_disk import DiskFaultKind, FaultyDisk, ProcessDied
from headstart.tier.disk import DiskTier
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Handle
from headstart.tier.disk.records import Record
from headstart.tier.disk.removal import give_back_left

ROOT = Path("/disk/kv")
CAPACITY = 1 << 20
SAVED = 7
GOING = (0, 2)  # of those in the first segment


class Dying(FaultyDisk):
    """A process that dies before the first call of that name."""

    def __init__(self, inner: CrashDisk, call: str) -> None:
        super().__init__(inner)
        self._last = call

    def _strike(self, name: str) -> tuple[DiskFaultKind | None, bool]:
        return (None, True) if name == self._last else super()._strike(name)


class Meanwhile(FaultyDisk):
    """A process that is slow to punch: `act` is done before each."""

    act: Callable[[], object] = staticmethod(lambda: None)

    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        self.act()
        return super().punch(handle, offset, nbytes)


class Coarse(CrashDisk):
    """A file system whose blocks are larger than its holes: it says that it punched, and charges what it did."""

    def punch(self, handle: Handle, offset: int, nbytes: int) -> bool:
        charged = set(self._opened(handle)[0].pages)
        done = super().punch(handle, offset, nbytes)
        self._opened(handle)[0].pages |= charged
        return done


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_tier(disk: CrashDisk | FaultyDisk, clock: Clock) -> DiskTier:
    return DiskTier.open(ROOT, capacity_bytes=CAPACITY, disk=disk, clock=clock)


def survivor_of(disk: CrashDisk | FaultyDisk, clock: Clock) -> tuple[DiskTier, range]:
    """Return a process whose first segment is full and whose second one is not, and the seeds of what lies in the first."""
    tier = open_tier(disk, clock)
    saved = 0
    while len(segment_files(disk)) < 2:
        assert save(tier, saved)
        saved += 1
    assert all(save(tier, seed) for seed in range(saved, SAVED))
    assert len(segment_files(disk)) == 2
    return tier, range(saved - 1)


def segment_files(disk: CrashDisk | FaultyDisk) -> list[Path]:
    inner = disk.inner if isinstance(disk, FaultyDisk) else disk
    assert isinstance(inner, CrashDisk)
    return [path for path in inner.files() if path.suffix == ".seg"]


def dies_removing(disk: CrashDisk, clock: Clock, seeds: Iterable[int], *, call: str) -> None:
    """Another process removes, and dies when that is said and its space is not given back yet."""
    mortal = Dying(disk, call)
    tier = open_tier(mortal, clock)
    with pytest.raises(ProcessDied):
        tier.delete([extent_of(tier, seed) for seed in seeds], reason="user")
    mortal.bury()


def opens(tier: DiskTier, disk: CrashDisk, clock: Clock) -> None:
    newcomer = open_tier(disk, clock)
    assert newcomer.check() == []
    newcomer.close()


def tends(tier: DiskTier, disk: CrashDisk, clock: Clock) -> None:
    tier.tend()


def checks(tier: DiskTier, disk: CrashDisk, clock: Clock) -> None:
    assert tier.check() == []


WAYS = pytest.mark.parametrize("gives_back", [opens, tends, checks])


@WAYS
def test_what_a_process_had_not_punched_when_it_died_is_given_back_though_the_writer_lives(
    clock: Clock, gives_back: Callable[[DiskTier, CrashDisk, Clock], None]
) -> None:
    disk = CrashDisk()
    tier, _ = survivor_of(disk, clock)
    dies_removing(disk, clock, GOING, call="punch")
    before = disk.allocated_bytes()
    clock.now += 1
    gives_back(tier, disk, clock)
    assert before - disk.allocated_bytes() >= len(GOING) * len(image(0)) - (16 << 10)  # beside the newcomer's journal
    clock.now += 1
    assert tier.check() == []
    assert found(tier, range(SAVED)) == set(range(SAVED)) - set(GOING)
    tier.close()


@pytest.mark.parametrize("call", ["truncate", "unlink"])
@WAYS
def test_a_file_that_a_process_emptied_and_did_not_remove_goes_though_its_writer_lives(
    clock: Clock, call: str, gives_back: Callable[[DiskTier, CrashDisk, Clock], None]
) -> None:
    disk = CrashDisk()
    tier, inside = survivor_of(disk, clock)
    first = segment_files(disk)[0]
    dies_removing(disk, clock, inside, call=call)
    assert first in segment_files(disk)
    clock.now += 1
    gives_back(tier, disk, clock)
    assert first not in segment_files(disk)
    clock.now += 1
    assert tier.check() == []
    assert found(tier, range(SAVED)) == set(range(SAVED)) - set(inside)
    tier.close()


def test_in_a_file_that_still_grows_it_is_given_back_once_that_is_full(clock: Clock) -> None:
    disk = CrashDisk()
    tier, inside = survivor_of(disk, clock)
    dies_removing(disk, clock, [len(inside)], call="punch")
    clock.now += 1
    newcomer = open_tier(disk, clock)
    assert newcomer.check() == []
    seed = SAVED
    while len(segment_files(disk)) < 3:
        assert save(tier, seed)
        seed += 1
    before = disk.allocated_bytes()
    clock.now += 1
    tier.tend()
    assert before - disk.allocated_bytes() == len(image(0))
    assert found(newcomer, range(seed)) == found(tier, range(seed)) == set(range(seed)) - {len(inside)}
    assert tier.check() == newcomer.check() == []
    newcomer.close()
    tier.close()


def test_an_extent_whose_record_is_being_written_is_not_taken_for_what_is_dead(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = CrashDisk()
    tier, inside = survivor_of(disk, clock)
    dies_removing(disk, clock, range(len(inside), SAVED - 1), call="punch")
    clock.now += 1
    store = tier._store
    goes_on = store.upkeep.append

    def append(records: Sequence[Record]) -> None:
        give_back_left(store)  # as making room for a record in the journal does
        goes_on(records)

    monkeypatch.setattr(store.upkeep, "append", append)
    assert save(tier, SAVED)
    assert len(segment_files(disk)) == 2
    assert found(tier, [SAVED]) == {SAVED}
    assert tier.check() == []
    tier.close()


def test_room_that_was_not_given_back_is_taken_before_anything_gives_way(clock: Clock) -> None:
    disk = CrashDisk()
    tier, inside = survivor_of(disk, clock)
    dies_removing(disk, clock, inside[1:], call="punch")
    clock.now += 1
    saved = SAVED
    while tier.room_bytes > 2 * len(image(0)):
        assert save(tier, saved)
        saved += 1
    for more in range(len(inside) // 2):
        assert save(tier, saved + more)
    assert "evicted_capacity" not in tier.statistics().counters
    assert tier.check() == []
    tier.close()


def test_who_is_still_removing_is_not_forestalled_and_what_it_gives_back_is_counted(clock: Clock) -> None:
    inner = CrashDisk()
    disk, slow = FaultyDisk(inner), Meanwhile(inner)
    tier, _ = survivor_of(disk, clock)
    other = open_tier(slow, clock)

    def look() -> None:
        clock.now += 1
        tier.tend()
        assert tier.check() == []

    slow.act = look
    assert other.delete([extent_of(other, seed) for seed in GOING], reason="user") == len(GOING)
    assert disk.calls["punch"] == 0 < slow.calls["punch"]
    look()
    assert tier.statistics().allocated_bytes == pytest.approx(inner.allocated_bytes(), abs=8192)  # of the marker and folders
    other.close()
    tier.close()


def test_where_holes_bring_nothing_back_they_are_not_made_again_and_again(clock: Clock) -> None:
    disk = FaultyDisk(Coarse())
    tier, inside = survivor_of(disk, clock)
    for seed in inside[1:]:
        tier.delete([extent_of(tier, seed)], reason="user")
    for _ in range(3):
        clock.now += 60
        tier.tend()
    punched = disk.calls["punch"]
    for _ in range(20):
        clock.now += 60
        tier.tend()
    assert disk.calls["punch"] == punched
    assert found(tier, inside) == {inside[0]}
    tier.close()


@pytest.mark.parametrize("act", ["check", "save"])
def test_what_a_process_died_over_writing_goes_with_the_next_check_or_save_of_one_that_lives(clock: Clock, act: str) -> None:
    disk = CrashDisk()
    living = open_tier(disk, clock)
    dying = Dying(disk, "rename")
    with pytest.raises(ProcessDied):
        open_tier(dying, clock)
    dying.bury()
    assert [path for path in disk.files() if path.suffix == ".tmp"]
    assert save(living, 1) if act == "save" else living.check() == []
    assert [path for path in disk.files() if path.suffix == ".tmp"] == []
    assert living.check() == []
    living.close()


def test_what_a_living_process_is_still_writing_stays(clock: Clock) -> None:
    disk = CrashDisk()
    living = open_tier(disk, clock)
    path, handle = Directory(disk, ROOT).create_temporary(ROOT / "journals")
    living._store.marker.unsure = True
    assert save(living, 1)
    assert living.check() == []
    assert path in disk.files()
    disk.unlink(path)
    disk.close(handle)
    assert living.check() == []
    living.close()
