"""Tenants: what each may have, whose extents give way, and that nobody pays for another."""

from __future__ import annotations

import pytest
from disk_kit import CAPACITY, image, keys, located, prompt
from test_disk_retention import ROOT, Times, there

from headstart.policy.retention import Retention
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import TINY
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.tier.base import ExtentId, Terms, WriteOutcome
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import Disk

NBYTES = len(image(0))
ACME, BETA, GAMMA = (Terms(tenant=name) for name in ("acme", "beta", "gamma"))


def open_tier(disk: Disk, quotas: str, *, capacity_bytes: int = CAPACITY) -> DiskTier:
    times = Times()
    retention = Retention.of("", quotas)
    return DiskTier.open(ROOT, capacity_bytes=capacity_bytes, disk=disk, clock=lambda: times.ticks_s, retention=retention)


def save(tier: DiskTier, seed: int, terms: Terms) -> WriteOutcome:
    return tier.write(image(seed), TINY, terms=terms)


def extent(tier: DiskTier, seed: int) -> ExtentId:
    return ExtentId(located(tier, seed)[0])


def test_a_tenant_over_its_quota_loses_its_own_least_recently_used() -> None:
    tier = open_tier(CrashDisk(), f"acme={4 * NBYTES}")
    for seed in range(6):
        assert save(tier, seed, ACME).reason == "written"
    tier.touch([extent(tier, 2)])
    assert save(tier, 6, ACME).reason == "written"
    assert there(tier, range(7)) == {2, 4, 5, 6}
    assert tier.statistics().live_bytes_by_tenant == {"acme": 4 * NBYTES}
    assert tier.statistics().counters["evicted_quota"] == 3
    assert tier.check() == []
    tier.close()


def test_three_tenants_under_pressure_keep_what_is_theirs() -> None:
    """One is over its quota all the time: the other two lose nothing while there is room, and each keeps to its own."""
    capacity = 2 << 20
    tier = open_tier(CrashDisk(), "*=30%", capacity_bytes=capacity)
    quota = capacity * 30 // 100
    mine = {ACME: range(8), BETA: range(100, 108)}
    for terms, seeds in mine.items():
        for seed in seeds:
            assert save(tier, seed, terms).stored
    for seed in range(1000, 1100):
        assert save(tier, seed, GAMMA).stored
        assert tier.statistics().live_bytes_by_tenant["gamma"] <= quota
    assert there(tier, mine[ACME]) == set(mine[ACME])
    assert there(tier, mine[BETA]) == set(mine[BETA])
    for seed in range(2000, 2060):  # somebody without a name has no quota and fills the rest
        assert save(tier, seed, Terms()).stored
    assert tier.statistics().allocated_bytes <= capacity
    assert set(tier.statistics().live_bytes_by_tenant) >= {""}
    tier.close()


def test_what_may_not_go_makes_a_refusal_and_nothing_is_lost() -> None:
    tier = open_tier(CrashDisk(), f"acme={2 * NBYTES}")
    assert save(tier, 1, ACME).stored
    assert save(tier, 2, ACME).stored
    assert tier.lease([extent(tier, 1)]) == [True]
    assert tier.pin([extent(tier, 2)], until_ms=None) == [True]
    assert save(tier, 3, ACME) == WriteOutcome(stored=False, reason="quota")
    assert there(tier, range(4)) == {1, 2}
    assert tier.statistics().counters["write_failed_quota"] == 1
    assert save(tier, 3, BETA).stored
    tier.release([extent(tier, 1)])
    assert save(tier, 4, ACME).stored
    assert there(tier, range(5)) == {2, 3, 4}
    tier.close()


def test_an_extent_larger_than_the_quota_is_refused_without_evicting() -> None:
    tier = open_tier(CrashDisk(), f"acme={NBYTES}")
    assert save(tier, 1, ACME).stored
    assert tier.write(image(2, 8), TINY, terms=ACME).reason == "quota"
    assert there(tier, [1]) == {1}
    tier.close()


def test_a_head_that_anothers_prompts_continue_does_not_go_for_its_writers_quota() -> None:
    tier = open_tier(CrashDisk(), f"acme={2 * NBYTES}")
    kv = prompt(8, seed=5)
    assert tier.write(kv.image(0, 4), TINY, terms=ACME).stored
    assert tier.write(kv.image(4, 4), TINY, terms=BETA).stored
    for seed in range(100, 110):
        assert save(tier, seed, ACME).stored
    assert -1 not in tier.locate(TINY.digest, kv.keys).extents
    tier.close()


def test_a_tenant_whose_only_extent_others_continue_is_refused() -> None:
    tier = open_tier(CrashDisk(), f"acme={NBYTES}")
    kv = prompt(8, seed=5)
    assert tier.write(kv.image(0, 4), TINY, terms=ACME).stored
    assert tier.write(kv.image(4, 4), TINY, terms=BETA).stored
    assert save(tier, 100, ACME).reason == "quota"
    assert -1 not in tier.locate(TINY.digest, kv.keys).extents
    tier.close()


def test_a_shared_extent_counts_for_who_wrote_it_first() -> None:
    tier = open_tier(CrashDisk(), "*=50%")
    assert save(tier, 1, ACME).reason == "written"
    assert save(tier, 1, BETA).reason == "present"
    assert tier.statistics().live_bytes_by_tenant == {"acme": NBYTES}
    tier.close()


def test_tenants_survive_restarts_and_renewed_journals() -> None:
    disk = CrashDisk()
    for seed, terms in enumerate((ACME, BETA, Terms())):
        tier = open_tier(disk, "")
        assert save(tier, seed, terms).stored
        assert tier._store.renew()
        tier.close()
    tier = open_tier(disk, "")
    assert tier.statistics().live_bytes_by_tenant == {"acme": NBYTES, "beta": NBYTES, "": NBYTES}
    assert {info.tenant for info in tier.scan()} == {"acme", "beta", ""}
    tier.close()


def test_who_is_over_a_lowered_quota_gives_way_before_others_do() -> None:
    disk, capacity = CrashDisk(), 2 << 20
    tier = open_tier(disk, "", capacity_bytes=capacity)
    for seed in range(10):
        assert save(tier, seed, BETA).stored
    for seed in range(100, 120):
        assert save(tier, seed, ACME).stored
    tier.close()
    tier = open_tier(disk, f"acme={5 * NBYTES}", capacity_bytes=capacity)
    for seed in range(200, 210):
        assert save(tier, seed, Terms()).stored
    assert there(tier, range(10)) == set(range(10))
    assert tier.statistics().live_bytes_by_tenant["acme"] == 5 * NBYTES
    tier.close()


def test_a_quota_is_kept_where_no_holes_can_be_made() -> None:
    disk = FaultyDisk(CrashDisk())
    disk.inject(DiskFault("punch", "eio"))
    tier = open_tier(disk, f"acme={4 * NBYTES}")
    for seed in range(40):
        assert save(tier, seed, ACME).stored
    assert tier.statistics().live_bytes_by_tenant == {"acme": 4 * NBYTES}
    tier.close()


@pytest.mark.parametrize("tenant", ["acme", ""])
def test_without_quotas_a_tenant_may_fill_all(tenant: str) -> None:
    tier = open_tier(CrashDisk(), "", capacity_bytes=1 << 20)
    for seed in range(40):
        assert save(tier, seed, Terms(tenant=tenant)).stored
    assert "evicted_quota" not in tier.statistics().counters
    assert len(there(tier, range(40))) > 10
    assert -1 not in tier.locate(TINY.digest, keys(39)).extents
    tier.close()
