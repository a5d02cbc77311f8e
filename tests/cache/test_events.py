"""Routers follow what is stored by KV events: what a subscriber was told is what a match finds."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from tests.cache.cache_kit import TIMEOUT_S, prompt
from tests.cache.following import AllBlocksCleared, BlockRemoved, Follower

from asking import eventually
from headstart.block.keys import chain_keys
from headstart.cache import telling
from headstart.cache.open import open_cache
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig, load_config
from headstart.errors import ConfigError
from headstart.events import BlockStored, Publisher
from headstart.metrics import Counters
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier
from headstart.tier.object import Bucket, ObjectTier
from headstart.tier.pool import PoolTier

LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
def publisher() -> Publisher:
    for _ in range(20):
        try:
            return Publisher(LOOPBACK)
        except OSError:  # the port behind the free one is taken
            continue
    raise AssertionError("no two free ports")


def told_cache(publisher: Publisher, *tiers: Tier) -> PrefixCache:
    return PrefixCache(
        tiers, identity=IDENTITY, representation=TINY, publisher=publisher, match_timeout_s=TIMEOUT_S, load_timeout_s=TIMEOUT_S
    )


def follow(publisher: Publisher) -> Follower:
    return Follower(publisher.endpoint, publisher.replay_endpoint)


def names(kv: FakeKV, **salt: str) -> list[bytes]:
    return [key[:16] for key in chain_keys(kv.tokens, root=IDENTITY.root(), **salt)]


def saved(cache: PrefixCache, kv: FakeKV, **options: str) -> None:
    assert cache.save(kv.tokens, kv, **options).wait(TIMEOUT_S).reason is None


def test_what_is_stored_is_told_with_tokens_parents_and_medium(publisher: Publisher) -> None:
    with told_cache(publisher, MemoryTier(16 << 20)) as cache, follow(publisher) as router:
        kv = prompt(5 * 64)
        saved(cache, kv)
        router.until(lambda: len(router.blocks.get("CPU", {})) == 5)
        parent = None
        for place, name in enumerate(names(kv)):
            assert router.blocks["CPU"][name] == (parent, tuple(kv.tokens[64 * place : 64 * place + 64]), None)
            parent = name


def test_what_continues_a_prompt_is_told_with_its_parent(publisher: Publisher) -> None:
    with told_cache(publisher, MemoryTier(16 << 20)) as cache, follow(publisher) as router:
        kv, longer = prompt(2 * 64), prompt(4 * 64)
        saved(cache, kv)
        saved(cache, longer)
        router.until(lambda: len(router.blocks.get("CPU", {})) == 4)
        assert router.blocks["CPU"][names(longer)[2]][0] == names(kv)[-1]


def test_what_a_full_tier_evicts_is_told_as_removed(publisher: Publisher) -> None:
    tier = MemoryTier(512 << 10)
    with told_cache(publisher, tier) as cache, follow(publisher) as router:
        kvs = [prompt(8 * 64, seed=seed) for seed in range(40)]
        saved(cache, kvs[0])
        router.until(lambda: names(kvs[0])[0] in router.blocks.get("CPU", {}))
        for kv in kvs[1:]:
            saved(cache, kv)
        assert tier.statistics().counters["evicted_capacity"]
        there = [name for kv in kvs for name in names(kv) if tier.locate(TINY.digest, [full(kv, name)]).extents[0] >= 0]
        router.until(lambda: router.blocks.get("CPU", {}).keys() == set(there))
        assert any(isinstance(event, BlockRemoved) for event in router.seen)


def full(kv: FakeKV, name: bytes) -> bytes:
    return next(key for key in chain_keys(kv.tokens, root=IDENTITY.root()) if key.startswith(name))


def test_a_block_that_lies_in_a_second_extent_is_not_told_as_removed(publisher: Publisher) -> None:
    tier = MemoryTier(16 << 20)
    with told_cache(publisher, tier) as cache, follow(publisher) as router:
        kv, other = prompt(3 * 64), prompt(3 * 64, seed=9)
        saved(cache, kv)
        (extent,) = [info.id for info in tier.scan()]
        copies = MemoryTier(16 << 20)
        with PrefixCache([copies], identity=IDENTITY, representation=TINY) as second:
            longer = prompt(4 * 64)
            saved(second, longer)
            (info,) = copies.scan()
            image = memoryview(bytearray(info.extent_bytes))
            assert copies.lease([info.id]) == [True]
            copies.read([telling.ReadRange(info.id, 0, [image])])
            copies.release([info.id])
        assert tier.write(image, TINY).reason == "written"
        assert tier.delete([extent], reason="user") == 1
        saved(cache, other)
        router.until(lambda: names(other)[-1] in router.blocks.get("CPU", {}))
        assert set(names(longer)) <= router.blocks["CPU"].keys()


def test_what_is_moved_to_another_tier_of_its_medium_is_not_told_as_removed(publisher: Publisher, tmp_path: Path) -> None:
    disk, pool = DiskTier.open(tmp_path / "disk", capacity_bytes=16 << 20), PoolTier.open(tmp_path, capacity_bytes=16 << 20)
    with told_cache(publisher, disk, pool) as cache, follow(publisher) as router:
        kv, other = prompt(3 * 64), prompt(3 * 64, seed=9)
        saved(cache, kv)
        router.until(lambda: len(router.blocks.get("STORAGE", {})) == 3)
        eventually(lambda: disk.delete([info.id for info in disk.scan()], reason="moved") == 1)  # it may just be read for this
        saved(cache, other)
        router.until(lambda: names(other)[-1] in router.blocks["STORAGE"])
        assert set(names(kv)) <= router.blocks["STORAGE"].keys()
        eventually(lambda: pool.delete([info.id for info in pool.scan()], reason="user") >= 0 and not list(pool.scan()))
        router.until(lambda: not set(names(kv)) & router.blocks["STORAGE"].keys())


def test_nothing_is_read_from_an_object_store_to_be_told(publisher: Publisher) -> None:
    stores = pytest.importorskip("obstore.store")
    bucket = Bucket(stores.MemoryStore(), where="bucket/prefix", counters=Counters())
    store = ObjectTier.open_bucket(bucket, capacity_bytes=16 << 20)
    with told_cache(publisher, MemoryTier(16 << 20), store) as cache, follow(publisher) as router:
        kv = prompt(3 * 64)
        saved(cache, kv)
        router.until(lambda: len(router.blocks.get("CPU", {})) == 3)
        router.catch_up(0)
        assert "STORAGE" not in router.blocks
        assert store.statistics().counters.get("bytes_read", 0) == 0


def test_after_a_restart_everything_is_cleared_and_what_is_on_disk_is_told(tmp_path: Path) -> None:
    config = CacheConfig(directory=tmp_path, capacity="64MiB", min_free="0", memory="0", write_budget="unlimited")
    kvs = [prompt(tokens * 64, seed=seed) for seed in (1, 2) for tokens in (1, 3, 9)]
    with open_cache(config, identity=IDENTITY, representation=TINY) as cache:
        for kv in kvs:
            saved(cache, kv)
        saved(cache, kvs[0], salt="a tenant's")
    config = replace(config, kv_events=taken_and_freed())
    wanted = {name for kv in kvs for name in names(kv)} | {*names(kvs[0], salt="a tenant's")}
    with open_cache(config, identity=IDENTITY, representation=TINY) as cache:
        assert not cache.warnings
        host, port = config.kv_events.rsplit(":", 1)
        with Follower(config.kv_events, f"{host}:{int(port) + 1}") as router:
            router.catch_up(0)
            assert isinstance(router.seen[0], AllBlocksCleared)
            assert router.blocks["STORAGE"].keys() == wanted
            for parent, _, _ in router.blocks["STORAGE"].values():
                assert parent is None or parent in wanted
            order = [name for event in router.seen[1:] for name in event.block_hashes]
            for name, (parent, _, _) in router.blocks["STORAGE"].items():
                assert parent is None or order.index(parent) < order.index(name)


def taken_and_freed() -> str:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return f"tcp://127.0.0.1:{one.getsockname()[1]}"


def test_what_another_process_keeps_and_removes_is_told(tmp_path: Path, publisher: Publisher) -> None:
    config = CacheConfig(directory=tmp_path, capacity="64MiB", min_free="0", memory="0", write_budget="unlimited")
    with open_cache(config, identity=IDENTITY, representation=TINY) as other:
        mine = open_cache(config, identity=IDENTITY, representation=TINY)
        disk = mine._sources[0].tier
        with told_cache(publisher, disk), follow(publisher) as router:
            kv = prompt(4 * 64)
            saved(other, kv)
            disk.refresh()
            router.until(lambda: router.blocks.get("STORAGE", {}).keys() == set(names(kv)))
            theirs = other._sources[0].tier
            assert theirs.delete([info.id for info in theirs.scan()], reason="user")
            disk.refresh()
            router.until(lambda: not router.blocks.get("STORAGE"))
        mine.close()


def test_who_missed_something_is_sent_it_again(publisher: Publisher) -> None:
    with told_cache(publisher, MemoryTier(16 << 20)) as cache, follow(publisher) as router:
        saved(cache, prompt(64))
        router.until(lambda: len(router.blocks.get("CPU", {})) == 1)
        at, seen = router.last, len(router.seen)
        saved(cache, prompt(64, seed=1))
        router.until(lambda: len(router.blocks["CPU"]) == 2)
        with follow(publisher) as late:
            late.last = at
            late.until(lambda: late.last == router.last)
            assert late.seen == router.seen[seen:]


def test_who_missed_more_than_is_kept_is_told_what_is_there(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.events.KEPT_BATCHES", 1)
    with told_cache(publisher, MemoryTier(16 << 20)) as cache, follow(publisher) as router:
        for seed in range(5):
            saved(cache, prompt(64, seed=seed))
        router.until(lambda: len(router.blocks.get("CPU", {})) == 5)
        with follow(publisher) as late:
            late.catch_up(1)
            assert isinstance(late.seen[0], AllBlocksCleared)
            assert late.blocks == router.blocks
            assert late.last == router.last


def test_changes_that_come_too_fast_are_told_anew(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "_MAX_CHANGES", 0)
    with told_cache(publisher, MemoryTier(16 << 20)) as cache, follow(publisher) as router:
        kv = prompt(3 * 64)
        saved(cache, kv)
        router.until(lambda: router.blocks.get("CPU", {}).keys() == set(names(kv)))
        assert cache.statistics().counters["events_told_anew"] >= 2


def test_a_subscriber_that_never_reads_holds_up_nobody(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.events.KEPT_BYTES", 1 << 20)
    context = zmq.Context()
    idle = context.socket(zmq.SUB)
    idle.setsockopt(zmq.RCVHWM, 1)
    idle.setsockopt(zmq.SUBSCRIBE, b"")
    idle.connect(publisher.endpoint)
    event = BlockStored([b"\0" * 16], None, list(range(1 << 16, (1 << 16) + 64)), 64, None, "CPU", None)
    for _ in range(30_000):  # three times what is kept for it
        publisher.publish([event] * 4)
    assert publisher._kept_bytes <= 1 << 20
    assert publisher.holds(publisher.next_number)
    assert not publisher.holds(0)
    publisher.close()
    context.destroy(linger=0)


def test_the_first_block_of_an_adapter_s_prompt_begins_one(publisher: Publisher) -> None:
    identity = replace(IDENTITY, adapters=(b"\xab" * 32,))
    with told_cache(publisher, MemoryTier(16 << 20)) as cache, follow(publisher) as router:
        kv = prompt(64)
        assert cache.save(kv.tokens, kv, identity=identity).wait(TIMEOUT_S).reason is None
        router.until(lambda: len(router.blocks.get("CPU", {})) == 1)
        assert router.blocks["CPU"][chain_keys(kv.tokens, root=identity.root())[0][:16]] == (None, tuple(kv.tokens), "ab" * 32)


def test_a_taken_port_costs_the_events_and_nothing_else(tmp_path: Path, publisher: Publisher) -> None:
    config = CacheConfig(directory=tmp_path, capacity="64MiB", min_free="0", memory="1MiB", kv_events=publisher.endpoint)
    with open_cache(config, identity=IDENTITY, representation=TINY) as cache:
        assert any("no KV events" in warning and publisher.endpoint in warning for warning in cache.warnings)
        saved(cache, prompt(64))
    publisher.close()


def test_others_may_not_read_prompts_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://example.org:5557", "tcp://[::]:5557"):
        with pytest.raises(ConfigError, match="can be reached by others"):
            load_config(overrides={"cache.kv_events": endpoint})
        assert load_config(overrides={"cache.kv_events": endpoint, "server.allow_remote": True}).cache.kv_events == endpoint
    for endpoint in ("tcp://127.0.0.1:5557", "tcp://localhost:1", "tcp://[::1]:5557", "ipc:///run/kv", ""):
        assert load_config(overrides={"cache.kv_events": endpoint}).cache.kv_events == endpoint


@pytest.mark.parametrize("text", ["5557", "tcp://127.0.0.1", "tcp://127.0.0.1:65535", "tcp://:1", "ipc://here", "udp://a:1"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:5557"):
        load_config(overrides={"cache.kv_events": text})
