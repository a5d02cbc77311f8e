"""Rules of tiers over a real disk and a real pool: what they say happens, once, and whatever fails costs nothing but that."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

import pytest
from cache_kit import cache_of, prompt

from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig
from headstart.metrics import Counters
from headstart.policy.rule_text import parse_rules
from headstart.testing.fake_kv import IDENTITY, TINY
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.round_trip import load, save
from headstart.tier.base import Terms, Tier, WriteOutcome
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier
from headstart.tier.object import Bucket, ObjectTier
from headstart.tier.pool import PoolTier, Timing

CAPACITY = 64 << 20
HOUR_S = 3600.0


def until(condition: Callable[[], bool]) -> None:
    """Return once the moving thread has made `condition` true; it is asked now and then, since asking takes its time."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


class Wall:
    """A wall clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def disk(tmp_path: Path, wall: Wall) -> DiskTier:
    return DiskTier.open(tmp_path / "disk", capacity_bytes=CAPACITY, wall_clock=wall)


@pytest.fixture
def pool(tmp_path: Path, wall: Wall) -> PoolTier:
    (tmp_path / "pool").mkdir()
    return PoolTier.open(tmp_path / "pool", capacity_bytes=CAPACITY, wall_clock=wall)


@pytest.fixture
def cache(disk: DiskTier, pool: PoolTier) -> Iterator[PrefixCache]:
    with cache_of(disk, pool) as cache:
        yield cache
        assert cache.check() == []


def extents(cache: PrefixCache) -> dict[str, int]:
    return {tier.name: tier.extents for tier in cache.statistics().tiers}


def counted(cache: PrefixCache, name: str) -> int:
    return cache.statistics().counters.get(f"tiering_{name}", 0)


def apply(cache: PrefixCache, *rules: str) -> None:
    cache.apply_rules(parse_rules(rules))


def test_without_rules_a_save_goes_to_every_tier_and_nothing_moves(cache: PrefixCache) -> None:
    save(cache, prompt(641))
    assert extents(cache) == {"disk": 1, "pool": 1}
    assert cache._tiering._thread is None


def test_what_a_rule_moves_is_found_where_it_went_and_comes_back_by_being_used(cache: PrefixCache) -> None:
    kv, chat = prompt(641), prompt(641, seed=1)
    apply(cache, "write to disk")
    save(cache, kv, retention="agent")
    save(cache, chat, retention="chat")
    assert extents(cache) == {"disk": 2, "pool": 0}
    apply(cache, "write to disk", "when class = agent then move to pool")
    until(lambda: extents(cache) == {"disk": 1, "pool": 1})
    loaded = load(cache, kv)
    assert (loaded.wrong, loaded.load.tokens_by_tier) == ([], {"pool": 640})
    assert load(cache, chat).load.tokens_by_tier == {"disk": 640}
    apply(cache)
    save(cache, kv)  # as engines do at the end of a prompt: the disk lacks it
    assert load(cache, kv).load.tokens_by_tier == {"disk": 640}


def test_idle_is_counted_from_the_last_use_also_by_another_process_after_a_restart(tmp_path: Path, wall: Wall) -> None:
    (tmp_path / "pool").mkdir()
    used, idle = prompt(641), prompt(641, seed=1)

    def opened() -> PrefixCache:
        disk = DiskTier.open(tmp_path / "disk", capacity_bytes=CAPACITY, wall_clock=wall)
        return cache_of(disk, PoolTier.open(tmp_path / "pool", capacity_bytes=CAPACITY, wall_clock=wall))

    with opened() as cache:
        apply(cache, "write to disk")
        save(cache, used)
        save(cache, idle)
    wall.now_s += 5 * HOUR_S
    with opened() as cache:
        load(cache, used)
    wall.now_s += 2 * HOUR_S
    with opened() as cache:
        apply(cache, "write to disk", "when idle > 6h then move to pool")
        until(lambda: extents(cache) == {"disk": 1, "pool": 1})
        assert load(cache, idle).load.tokens_by_tier == {"pool": 640}
        assert load(cache, used).load.tokens_by_tier == {"disk": 640}


def test_a_thousand_extents_are_moved_and_none_is_lost_or_doubled(cache: PrefixCache, disk: DiskTier, pool: PoolTier) -> None:
    kv = prompt(64_001)
    for block in range(1000):
        disk.write(kv.image(block, 1), TINY)
    apply(cache, "move to pool")
    until(lambda: disk.statistics().extents == 0)
    until(lambda: counted(cache, "moved_extents") == 1000)
    assert pool.statistics().extents == 1000
    loaded = load(cache, kv)
    assert (loaded.wrong, loaded.load.tokens_by_tier) == ([], {"pool": 64_000})


def test_what_was_copied_before_a_crash_is_only_let_go(cache: PrefixCache, disk: DiskTier, pool: PoolTier) -> None:
    kv = prompt(641)
    disk.write(kv.image(0, 10), TINY)
    pool.write(kv.image(0, 10), TINY)
    written = pool.statistics().counters["bytes_written"]
    apply(cache, "move to pool")
    until(lambda: disk.statistics().extents == 0)
    assert pool.statistics().counters["bytes_written"] == written
    assert counted(cache, "written_bytes") == 0


def test_what_was_promised_is_written_down_before_anything_is_removed(
    cache: PrefixCache, disk: DiskTier, pool: PoolTier, wall: Wall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed right after a move has shortened no promise: another machine knows of it."""
    disk.write(prompt(641).image(0, 10), TINY, terms=Terms("agent", keep_s=9 * 24 * HOUR_S))
    (info,) = disk.scan()
    seen: list[int] = []

    def another_machine_looks(extents: object, *, reason: str) -> int:
        other = PoolTier.open(tmp_path / "pool", capacity_bytes=CAPACITY, wall_clock=wall, read_only=True, background=False)
        seen.extend(one.guaranteed_until_ms for one in other.scan())
        other.close()
        return 0

    monkeypatch.setattr(disk, "delete", another_machine_looks)
    apply(cache, "move to pool")
    until(lambda: bool(seen))
    assert min(seen) >= info.guaranteed_until_ms


def test_what_is_pinned_or_read_stays_until_it_is_not(cache: PrefixCache, disk: DiskTier) -> None:
    kvs = [prompt(641, seed=seed) for seed in range(3)]
    for kv in kvs:
        disk.write(kv.image(0, 10), TINY)
    ids = [disk.locate(TINY.digest, kv.keys).ids()[0] for kv in kvs]
    assert disk.pin(ids[:1], until_ms=None) == [True]
    assert disk.lease(ids[1:2]) == [True]
    apply(cache, "move to pool")
    until(lambda: disk.statistics().extents == 2)
    disk.release(ids[1:2])
    apply(cache, "move to pool")  # anew: it is looked at again at once
    until(lambda: disk.statistics().extents == 1)
    assert [info.id for info in disk.scan()] == ids[:1]


def test_what_goes_later_is_copied_behind_the_save_which_does_not_wait(cache: PrefixCache, pool: PoolTier) -> None:
    kv, chat = prompt(641), prompt(641, seed=1)
    apply(cache, "when class = agent then write to disk, pool behind", "write to disk")
    assert save(cache, kv, retention="agent").stored_tokens == 640
    save(cache, chat, retention="chat")
    until(lambda: counted(cache, "copied_extents") == 1)
    assert extents(cache) == {"disk": 2, "pool": 1}
    pool.delete([info.id for info in pool.scan()], reason="user")
    cache._tiering.step(cache._tiering.policy)
    assert extents(cache) == {"disk": 2, "pool": 0}  # what the pool let go is not pressed on it again


def test_what_is_idle_goes_down_one_tier_after_the_other_to_an_object_store(disk: DiskTier, pool: PoolTier) -> None:
    stores = pytest.importorskip("obstore.store")
    bucket = Bucket(stores.MemoryStore(), where="bucket/prefix", counters=Counters())
    kvs = [prompt(641, seed=seed) for seed in range(3)]
    for kv in kvs:
        disk.write(kv.image(0, 10), TINY)
    with cache_of(disk, pool, ObjectTier.open_bucket(bucket, capacity_bytes=CAPACITY)) as cache:
        apply(cache, "when tier = disk then move to pool", "when tier = pool then copy to object")
        until(lambda: extents(cache) == {"disk": 0, "pool": 3, "object": 3})
        apply(cache, "move to object")
        until(lambda: extents(cache) == {"disk": 0, "pool": 0, "object": 3})
        for kv in kvs:
            loaded = load(cache, kv)
            assert (loaded.wrong, loaded.load.tokens_by_tier) == ([], {"object": 640})
        assert cache.check() == []


def test_memory_is_let_go_by_rule_and_kept_by_an_earlier_one(tmp_path: Path) -> None:
    memory, disk = MemoryTier(8 << 20), DiskTier.open(tmp_path / "disk", capacity_bytes=CAPACITY)
    with cache_of(memory, disk) as cache:
        save(cache, prompt(641), retention="agent")
        save(cache, prompt(641, seed=1), retention="chat")
        apply(cache, "when class = chat then keep in memory", "when idle >= 0s then drop from memory")
        until(lambda: extents(cache) == {"memory": 1, "disk": 2})
        assert [info.retention for info in memory.scan()] == ["chat"]
        assert counted(cache, "dropped_extents") == 1


@pytest.mark.parametrize("fault", ["enospc", "eio"])
def test_a_tier_that_fails_costs_nothing_and_is_left_alone_for_a_while(disk: DiskTier, fault: str, tmp_path: Path) -> None:
    target = FaultyTier(DiskTier.open(tmp_path / "other", capacity_bytes=CAPACITY), Fault("write", fault))  # type: ignore[arg-type]
    target.name = "pool"
    kvs = [prompt(641, seed=seed) for seed in range(20)]
    for kv in kvs:
        disk.write(kv.image(0, 10), TINY)
    with cache_of(disk, target) as cache:
        apply(cache, "move to pool")
        until(lambda: counted(cache, "failed_error") == 1)
        cache._tiering.step(cache._tiering.policy)
        cache._tiering.step(cache._tiering.policy)
        assert target.calls["write"] == 1
        assert disk.statistics().extents == 20
        target.heal()
        cache._tiering._trouble.clear()  # the while is over
        cache._tiering._avoided.clear()
        cache._tiering.wake()
        until(lambda: disk.statistics().extents == 0)
        assert all(load(cache, kv).wrong == [] for kv in kvs)


class Full:
    """Answers every write the same."""

    def __init__(self, inner: Tier, reason: str) -> None:
        self.inner, self.reason, self.asked = inner, reason, 0
        self.name, self.trusted, self.in_memory = "pool", False, False

    def __getattr__(self, verb: str) -> object:
        if verb in ("survey", "moving", "representation", "write_all"):
            raise AttributeError(verb)
        return getattr(self.inner, verb)

    def write(self, *_: object, **__: object) -> WriteOutcome:
        self.asked += 1
        return WriteOutcome(stored=False, reason=self.reason)


@pytest.mark.parametrize("reason", ["full", "stopped", "quota"])
def test_a_tier_that_takes_nothing_is_asked_once_and_then_later(disk: DiskTier, reason: str) -> None:
    for seed in range(20):
        disk.write(prompt(641, seed=seed).image(0, 10), TINY)
    full = Full(MemoryTier(8 << 20), reason)
    with cache_of(disk, full) as cache:  # type: ignore[arg-type]
        apply(cache, "move to pool")
        until(lambda: counted(cache, f"failed_{reason}") == 1)
        cache._tiering.step(cache._tiering.policy)
        assert (full.asked, disk.statistics().extents) == (1, 20)


def test_a_tier_that_hangs_holds_up_nobody(disk: DiskTier) -> None:
    target = FaultyTier(MemoryTier(8 << 20), Fault("write", "stall", times=1), stall_s=600.0)
    target.name = "pool"
    disk.write(prompt(641).image(0, 10), TINY)
    with cache_of(disk, target) as cache:
        apply(cache, "write to disk", "move to pool")
        assert target.stalled.wait(20)
        kv = prompt(641, seed=1)
        assert save(cache, kv).stored_tokens == 640
        assert load(cache, kv).load.tokens_by_tier == {"disk": 640}
        apply(cache, "write to disk")
        target.heal()


def test_what_is_corrupt_is_dropped_and_never_moved(disk: DiskTier, pool: PoolTier) -> None:
    faulty = FaultyTier(disk, Fault("read", "flip", times=1))
    disk.write(prompt(641).image(0, 10), TINY)
    with cache_of(faulty, pool) as cache:
        apply(cache, "move to pool")
        until(lambda: counted(cache, "failed_corrupt") == 1 and disk.statistics().extents == 0)
        assert pool.statistics().extents == 0


def test_one_process_at_a_time_moves_out_of_a_directory(disk: DiskTier, pool: PoolTier, tmp_path: Path) -> None:
    disk.write(prompt(641).image(0, 10), TINY)
    other = DiskTier.open(tmp_path / "disk", capacity_bytes=CAPACITY)
    with cache_of(disk, pool) as cache:
        with other.moving() as mine:
            assert mine
            with disk.moving() as also:
                assert not also
            apply(cache, "move to pool")
            cache._tiering.step(cache._tiering.policy)
            assert extents(cache) == {"disk": 1, "pool": 0}
        cache._tiering.wake()
        until(lambda: extents(cache) == {"disk": 0, "pool": 1})
    other.close()


def test_a_tier_that_lets_nothing_go_is_said_so_once_and_asked_later(
    cache: PrefixCache, disk: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses() -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    disk.write(prompt(641).image(0, 10), TINY)
    monkeypatch.setattr(disk, "moving", refuses)
    monkeypatch.setattr("headstart.cache.tiering._TROUBLE_S", 300.0)
    apply(cache, "move to pool")
    until(lambda: counted(cache, "failed_source") == 1)
    for _ in range(2):
        cache._tiering.step(cache._tiering.policy)
    assert counted(cache, "failed_source") == caplog.text.count("nothing is moved out of the tier 'disk'") == 1
    monkeypatch.undo()

    def moved_once_the_while_is_over() -> bool:
        cache._tiering._trouble.clear()
        cache._tiering.wake()
        return extents(cache) == {"disk": 0, "pool": 1}

    until(moved_once_the_while_is_over)


def test_rules_of_the_configuration_hold_from_the_beginning_and_those_without_effect_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from headstart.config import load_config

    config = load_config(
        overrides={
            "cache.directory": tmp_path / "disk",
            "cache.capacity": "64MiB",
            "cache.memory": "0",
            "cache.tiering.rules": "move to object; when class = agent then write to disk",
        }
    )
    with caplog.at_level(logging.WARNING), open_cache(config.cache, identity=IDENTITY, representation=TINY) as cache:
        assert cache.tiering.rules == 2
        assert isinstance(config.cache, CacheConfig)
    assert "rule 1 of cache.tiering does nothing: there is no tier 'object'" in caplog.text


def test_new_rules_end_what_old_ones_began(cache: PrefixCache, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.cache.moving.AT_ONCE", 8)
    for seed in range(50):
        disk.write(prompt(641, seed=seed).image(0, 10), TINY)
    under_way, go_on = Event(), Event()
    real = cache._tiering._rest

    def rest(*given: object) -> None:
        under_way.set()
        assert go_on.wait(60)
        real(*given)  # type: ignore[arg-type]

    cache._tiering._rest = rest  # type: ignore[method-assign]
    apply(cache, "move to pool")
    assert under_way.wait(60)
    apply(cache, "write to disk")
    go_on.set()
    cache._tiering.close(60)
    assert extents(cache) == {"disk": 42, "pool": 8}


RULES = [
    (),
    ("write to memory",),
    ("write to disk", "move to pool"),
    ("write to memory, disk, pool behind", "when class = agent then drop from memory"),
    ("when class = chat then keep in disk", "when blocks > 3 then copy to pool", "when size > 100kB then move to pool"),
    ("drop from memory", "drop from disk", "when class = agent then drop from pool"),
]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_rules_that_change_all_the_time_under_saves_and_loads_never_bring_a_wrong_byte(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    (tmp_path / "pool").mkdir()
    memory = MemoryTier(4 << 20)
    disk = DiskTier.open(tmp_path / "disk", capacity_bytes=8 << 20)
    pool = PoolTier.open(tmp_path / "pool", capacity_bytes=32 << 20, timing=Timing(grace_s=0.0, collect_s=0.2))
    kvs = [prompt(rng.randrange(65, 1300), seed=number) for number in range(60)]
    wrong: list[object] = []
    usable: list[int] = []
    ended = Event()

    def work(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        while not ended.is_set():
            kv = draw.choice(kvs)
            loaded = load(cache, kv)
            wrong.extend(loaded.wrong)
            usable.append(loaded.usable_tokens)
            save(cache, kv, retention=draw.choice(["agent", "chat"]))

    with cache_of(memory, disk, pool) as cache:
        threads = [Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            apply(cache, *rng.choice(RULES))
            ended.wait(0.1)
        ended.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert wrong == []
        assert any(usable)
        assert counted(cache, "errors") == 0
        cache._tiering.close(60)
        assert cache.check() == []
