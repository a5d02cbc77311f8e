"""SGLang's HiCache contract over the store, called as its cache controller calls it; SGLang's own classes where they import."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asking import eventually
from connect.sglang_stand_in import HostPool, contract
from headstart.errors import ConfigError

SGLANG = contract()
from headstart.connect.sglang import HeadstartHiCache  # noqa: E402 - it imports SGLang

Attach = Callable[..., HeadstartHiCache]


@pytest.fixture
def attach(tmp_path: Path, tiny_model_folder: Callable[..., Path]) -> Iterator[Attach]:
    """Attach a backend to host pools, as SGLang's controller does; each call is one more process on the same store."""
    open_ones: list[HeadstartHiCache] = []

    def attached(
        pool: HostPool, *, rank: int = 0, ranks: int = 1, mla: bool = False, v1: bool = True, more: Any = None, **settings: Any
    ) -> HeadstartHiCache:
        store = {"cache.directory": str(tmp_path / "kv"), "cache.capacity": "256MiB", "cache.min_free": "0"}
        store |= {"cache.write_budget": "unlimited", "models_directory": str(tmp_path)} | settings
        extra = {"backend_name": "headstart", "module_path": "headstart.connect.sglang", "class_name": "HeadstartHiCache"}
        config = SGLANG.HiCacheStorageConfig(
            tp_rank=rank,
            tp_size=ranks,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=mla,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name=str(tiny_model_folder("llama")),
            extra_config=extra | {"interface_v1": int(v1), "headstart": store},
        )
        backend = HeadstartHiCache(config, {})
        backend.register_mem_pool_host(pool)
        for name, sidecar in (more or {}).items():
            backend.register_mem_host_pool_v2(sidecar, name)
        backend.on_host_pools_registered()
        open_ones.append(backend)
        return backend

    yield attached
    for backend in open_ones:
        backend.close()
        backend.close()


def keys(count: int, *, seed: str = "") -> list[str]:
    """Page hashes as SGLang chains them."""
    chained, last = [], seed
    for page in range(count):
        last = hashlib.sha256(f"{last}{page}".encode()).hexdigest()
        chained.append(last)
    return chained


def filled(pages: int, *, seed: int, **options: Any) -> HostPool:
    pool = HostPool(pages, **options)
    pool.fill(seed=seed)
    return pool


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "through a flat page"])
def test_v1_pages_come_back_in_another_process_bit_for_bit(attach: Attach, in_place: bool) -> None:
    pool, names = filled(6, seed=1, in_place=in_place), keys(5)
    first = attach(pool)
    assert first.batch_exists(names) == 0
    assert first.batch_set_v1(names[:4], pool.indices(5, 0, 3, 1)) == [True] * 4
    first.close()
    other = HostPool(6, in_place=in_place)
    second = attach(other)
    assert second.batch_exists(names) == 4
    assert second.batch_get_v1(names, other.indices(0, 1, 2, 3, 4)) == [True, True, True, True, False]
    for place, page in enumerate((5, 0, 3, 1)):
        assert torch.equal(other.page(place), pool.page(page))


def test_rules_of_tiers_are_taken_up_from_the_file_while_it_runs(
    attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "headstart.toml"
    file.write_text("")
    monkeypatch.setenv("HEADSTART_CONFIG", str(file))
    pool, names = filled(3, seed=1), keys(3)
    backend = attach(pool)
    assert backend.batch_set_v1(names, pool.indices(0, 1, 2)) == [True] * 3
    assert backend.batch_exists(names) == 3
    file.write_text('[cache.tiering]\nrules = ["drop from disk"]\n')
    eventually(lambda: backend.batch_exists(names) == 0)


def test_v0_pages_come_back_bit_for_bit(attach: Attach) -> None:
    pool, names = filled(4, seed=2), keys(4)
    first = attach(pool, v1=False)
    assert first.batch_set(names[:3], [pool.get_data_page(index) for index in (0, 16, 32)])
    assert first.set(names[3], pool.get_data_page(48))
    assert first.exists(names[0])
    assert not first.exists("no such page")
    first.close()
    second = attach(HostPool(4), v1=False)
    assert second.batch_exists([*names, "another"]) == 4
    found = second.batch_get([*names, "another"], [pool.get_dummy_flat_data_page() for _ in range(5)])
    assert found[4] is None
    for place, page in enumerate(found[:4]):
        assert torch.equal(page, pool.get_data_page(place * 16))
    assert torch.equal(second.get(names[1], pool.get_dummy_flat_data_page()), pool.get_data_page(16))
    assert second.get("another", pool.get_dummy_flat_data_page()) is None


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headstart-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_processes_share_the_nodes_memory_without_any_disk(attach: Attach, shared_memory: Path) -> None:
    shared = {"cache.node_memory": "8MiB", "cache.node_directory": str(shared_memory / "node"), "cache.capacity": "0"}
    pool, names = filled(3, seed=8), keys(3)
    writer, reader = attach(pool, **shared), attach(target := HostPool(3), **shared)
    assert writer.batch_set_v1(names, pool.indices(0, 1, 2)) == [True] * 3
    assert reader.batch_exists(names) == 3  # at once
    assert reader.batch_get_v1(names, target.indices(0, 1, 2)) == [True] * 3
    assert torch.equal(target.kv_buffer, pool.kv_buffer)


def test_pages_without_tokens_are_told_to_no_router(attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    socket = tmp_path / "events"
    backend = attach(pool := filled(1, seed=12), **{"cache.kv_events": f"ipc://{socket}"})
    assert backend.batch_set_v1(keys(1), pool.indices(0)) == [True]
    assert not socket.exists()
    assert "--kv-events-config" in caplog.text


def test_more_pages_than_wait_at_once_are_kept(attach: Attach) -> None:
    pool, names = filled(128, seed=3), keys(128)
    backend = attach(pool)
    assert all(backend.batch_set_v1(names, pool.indices(*range(128))))
    assert backend.batch_exists(names) == 128
    before = pool.kv_buffer.clone()
    pool.kv_buffer.zero_()
    assert all(backend.batch_get_v1(names, pool.indices(*range(128))))
    assert torch.equal(pool.kv_buffer, before)


def test_of_what_all_ranks_hold_alike_one_writes_and_all_read(attach: Attach) -> None:
    pool, names = filled(3, seed=4), keys(3)
    writer, reader = attach(pool, rank=0, ranks=2, mla=True), attach(HostPool(3), rank=1, ranks=2, mla=True)
    assert reader.batch_set_v1(names, pool.indices(0, 1, 2)) == [True] * 3
    assert reader.counters.snapshot().get("pages_saved", 0) == 0
    assert writer.batch_exists(names) == 0
    assert writer.batch_set_v1(names, pool.indices(0, 1, 2)) == [True] * 3
    late = attach(target := HostPool(3), rank=1, ranks=2, mla=True)
    assert late.batch_get_v1(names, target.indices(0, 1, 2)) == [True] * 3
    assert torch.equal(target.kv_buffer, pool.kv_buffer)


def test_shards_of_two_ranks_are_two_things(attach: Attach) -> None:
    pools, names = [filled(2, seed=seed) for seed in (5, 6)], keys(2)
    for rank, pool in enumerate(pools):
        backend = attach(pool, rank=rank, ranks=2)
        assert backend.batch_exists(names) == 0
        assert all(backend.batch_set_v1(names, pool.indices(0, 1)))
        backend.close()
    for rank, pool in enumerate(pools):
        backend = attach(target := HostPool(2), rank=rank, ranks=2)
        assert all(backend.batch_get_v1(names, target.indices(0, 1)))
        assert torch.equal(target.kv_buffer, pool.kv_buffer)
        backend.close()
    assert attach(HostPool(2), rank=0, ranks=4).batch_exists(names) == 0
    assert attach(HostPool(2, heads=4), rank=0, ranks=2).batch_exists(names) == 0


def transfer(name: str, pool: HostPool, names: list[str], *pages: int, policy: str = "ALL_PAGES") -> Any:
    return SGLANG.PoolTransfer(
        name=name, host_indices=pool.indices(*pages), keys=names, hit_policy=SGLANG.PoolHitPolicy[policy]
    )


def test_sidecars_come_back_with_their_kv_or_shorten_the_hit(attach: Attach) -> None:
    pool, indexer, names = filled(4, seed=7), filled(4, seed=8, heads=1), keys(4)
    backend = attach(pool, more={"indexer": indexer})
    assert backend.batch_set_v2([transfer("indexer", indexer, names[:3], 0, 1, 2)]) == {"indexer": [True] * 3}
    assert all(backend.batch_set_v1(names, pool.indices(0, 1, 2, 3)))
    asked = [transfer("indexer", indexer, names, 0, 1, 2, 3)]
    found = backend.batch_exists_v2(names, asked)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (3, {"kv": 4, "indexer": 3})
    assert found.restorable_prefix_pages == [1, 2, 3]
    kept = indexer.kv_buffer.clone()
    indexer.kv_buffer.zero_()
    assert backend.batch_get_v2(asked) == {"indexer": [True, True, True, False]}
    assert torch.equal(indexer.kv_buffer[:, :48], kept[:, :48])
    groups = [transfer("indexer", indexer, names, 0, 1, 2, 3, policy="BLOCK_GROUPS")]
    assert backend.batch_exists_v2(names, groups).kv_hit_pages == 4


def test_states_at_the_end_decide_which_prefixes_can_be_restored(attach: Attach) -> None:
    pool, states, names = filled(6, seed=9), filled(6, seed=10, heads=1), keys(6)
    backend = attach(pool, more={"mamba": states})
    assert all(backend.batch_set_v1(names, pool.indices(*range(6))))
    for page in (1, 4):
        assert backend.batch_set_v2([transfer("mamba", states, [names[page]], page)]) == {"mamba": [True]}
    found = backend.batch_exists_v2(names, [transfer("mamba", states, [names[5]], 5, policy="TRAILING_PAGES")])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 5])


def test_nothing_raises_on_the_data_path(attach: Attach, tmp_path: Path) -> None:
    pool, names = filled(2, seed=11), keys(2)
    backend = attach(pool)
    assert backend.batch_set_v1(names, None) == [False, False]
    assert backend.batch_get_v1(names, "nonsense") == [False, False]
    assert backend.batch_get_v2([transfer("unknown", pool, names, 0, 1)]) == {"unknown": [False, False]}
    assert backend.batch_set_v2([transfer("kv", pool, names, 0)]) == {"kv": [False, False]}
    assert backend.batch_exists_v2(names, [transfer("unknown", pool, names, 0, 1)]).kv_hit_pages == 0
    assert backend.batch_get(names, [None, None]) == [None, None]
    assert backend.set(names[0], None) is False
    assert backend.clear() is False
    assert backend.counters.snapshot()["errors"] >= 4
    backend.close()
    assert backend.batch_exists(names) == 0
    assert backend.batch_set_v1(names, pool.indices(0, 1)) == [False, False]


def test_a_store_that_cannot_be_had_is_missed_and_nothing_else(attach: Attach, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    backend = attach(pool := filled(2, seed=12), **{"cache.directory": str(tmp_path / "file")})
    assert backend.batch_set_v1(keys(2), pool.indices(0, 1)) == [False, False]
    assert backend.batch_get_v1(keys(2), pool.indices(0, 1)) == [False, False]


def test_rot_on_the_medium_is_a_missed_page(attach: Attach, tmp_path: Path) -> None:
    pool, names = filled(8, seed=13), keys(8)
    backend = attach(pool)
    assert all(backend.batch_set_v1(names, pool.indices(*range(8))))
    backend.close()
    for file in (tmp_path / "kv").rglob("*"):
        if file.is_file() and "segment" in str(file.relative_to(tmp_path)):
            with file.open("r+b") as stream:
                stream.seek(os.path.getsize(file) // 2)
                stream.write(b"rot" * 2000)
    target = HostPool(8)
    good = attach(target).batch_get_v1(names, target.indices(*range(8)))
    assert not all(good)
    for place, ok in enumerate(good):
        assert not ok or torch.equal(target.page(place), pool.page(place))


@pytest.mark.parametrize("wrong", [{"cache.directroy": "/x"}, {"model": "some/name"}], ids=["setting", "model"])
def test_what_is_wrong_at_the_start_refuses_the_attachment(attach: Attach, wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"cache\.directory|version"):
        attach(HostPool(1), **wrong)
