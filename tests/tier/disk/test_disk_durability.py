"""durability: "data" is said of nothing that a power loss could take; "none" promises no more than to lose and not to lie."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from disk_kit import CAPACITY, Clock, found, image, save

from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import DiskFault, FaultyDisk, ProcessDied
from headstart.tier.disk import DiskTier

ROOT = Path("/disk/deep/er/kv")


def open_tier(disk: CrashDisk | FaultyDisk, *, data: bool, clock: Clock | None = None) -> DiskTier:
    return DiskTier.open(
        ROOT, capacity_bytes=CAPACITY, disk=disk, clock=clock or Clock(), durability="data" if data else "none"
    )


@pytest.mark.parametrize("seed", range(30))
def test_what_others_stored_without_syncing_is_synced_before_it_is_called_present(seed: int) -> None:
    disk = CrashDisk()
    careless = open_tier(disk, data=False)
    assert save(careless, 1)
    if seed % 3 == 0:
        careless.close()
    careful = open_tier(disk, data=True)
    assert careful.write(image(1), TINY).reason == "present"
    assert careful.write(image(1), TINY).reason == "present"
    disk.power_cut(seed)
    tier = open_tier(disk, data=True)
    assert found(tier, [1]) == {1}
    assert tier.check() == []


@pytest.mark.parametrize("seed", range(60))
def test_folders_that_others_made_and_died_over_hold_what_was_acknowledged(seed: int) -> None:
    disk = CrashDisk()
    mortal = FaultyDisk(disk)
    mortal.die_at(1 + seed // 2, after=True)
    with suppress(ProcessDied):
        open_tier(mortal, data=False)
    mortal.bury()
    tier = open_tier(disk, data=True)
    for number in range(4):
        assert save(tier, number)
    disk.power_cut(seed)
    tier = open_tier(disk, data=False)
    assert found(tier, range(4)) == set(range(4))
    assert tier.check() == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("failing", [["sync_directory"], ["sync_directory", "unlink"]])
def test_a_journal_that_could_not_be_begun_anew_takes_nothing_along_that_is_acknowledged_later(
    failing: list[str], seed: int
) -> None:
    disk = CrashDisk()
    faulty = FaultyDisk(disk)
    tier = open_tier(faulty, data=True)
    assert save(tier, 1)
    faulty.inject(*(DiskFault(call, "eio") for call in failing))
    assert not tier._store.renew()
    faulty.heal()
    assert save(tier, 2)
    disk.power_cut(seed)
    tier = open_tier(disk, data=True)
    assert found(tier, [1, 2]) == {1, 2}
    assert tier.check() == []


def test_what_cannot_be_synced_is_not_called_stored() -> None:
    disk = FaultyDisk(CrashDisk())
    careless = open_tier(disk, data=False)
    assert save(careless, 1)
    careful = open_tier(disk, data=True)
    disk.inject(DiskFault("sync", "eio"))
    assert not careful.write(image(1), TINY).stored
    assert not careful.write(image(2), TINY).stored
    assert careless.write(image(1), TINY).stored
    disk.heal()
    careful.close()
    careless.close()
