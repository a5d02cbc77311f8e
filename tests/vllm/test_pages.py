"""vLLM's pages come back as they were, whatever their layout, and nothing else is touched; without a model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_kit as kit

from headstart.cache.prefix_cache import PrefixCache
from headstart.connect.vllm import worker as worker_room
from headstart.connect.vllm.memory import UnknownLayout, page_view
from headstart.connect.vllm.messages import LoadOrder, Orders
from headstart.testing.faults import Fault, FaultyTier
from headstart.tier.disk import DiskTier

HEADS, HEAD = 2, 64


def heads_first(seed: int) -> torch.Tensor:
    """[blocks, heads, tokens, K and V], as vLLM has it on a CPU."""
    return kit.filled((kit.BLOCKS, HEADS, 16, 2 * HEAD), seed=seed)


def tokens_first(seed: int) -> torch.Tensor:
    return kit.filled((kit.BLOCKS, 16, HEADS, 2 * HEAD), seed=seed).transpose(1, 2)


def layers_inside(seed: int) -> torch.Tensor:
    """A block of one layer lies between those of others."""
    return kit.filled((kit.BLOCKS, 3, HEADS, 16, 2 * HEAD), seed=seed)[:, 1]


def heads_outside(seed: int) -> torch.Tensor:
    """All blocks of one head, then all of the other."""
    return kit.filled((HEADS, kit.BLOCKS, 16, 2 * HEAD), seed=seed).transpose(0, 1)


def kernel_blocks(seed: int) -> torch.Tensor:
    """Each block is two blocks of the kernel."""
    return kit.filled((2 * kit.BLOCKS, HEADS, 8, 2 * HEAD), seed=seed)


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit: among random bits are numbers that are not equal to themselves."""
    return found.contiguous().view(torch.uint8).equal(want.contiguous().view(torch.uint8))


LAYOUTS = [heads_first, tokens_first, layers_inside, heads_outside, kernel_blocks]


def test_rules_of_tiers_are_taken_up_from_the_file_while_a_worker_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "headstart.toml"
    file.write_text("")
    monkeypatch.setenv("HEADSTART_CONFIG", str(file))
    names = ["model.layers.0.attn"]
    memory = {names[0]: heads_first(1)}
    worker = kit.started(monkeypatch, tmp_path / "kv", kit.kv_config((kit.gqa_spec(), names)), memory)
    said = kit.prompt(128)
    kit.save(worker, said, range(8))
    assert kit.load(worker, said, range(8, 16)) == (set(), set())
    file.write_text('[cache.tiering]\nrules = ["drop from disk"]\n')
    kit.until(lambda: kit.load(worker, said, range(8, 16)) != (set(), set()))
    worker.close()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_pages_come_back_bit_for_bit_into_other_blocks(layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn", "model.layers.1.attn"]))
    written = {f"model.layers.{n}.attn": layout(n) for n in range(2)}
    said = kit.prompt(192)
    table = [3, 9, 4, 1, 30, 31, 5, 6, 7, 2, 8, 12]
    writer = kit.started(monkeypatch, tmp_path, config, written)
    kit.save(writer, said, table)
    writer.close()
    memory = {name: layout(7) for name in written}
    before = {name: view.clone() for name, view in memory.items()}
    reader = kit.started(monkeypatch, tmp_path, config, memory)
    other = list(range(20, 32))
    assert kit.load(reader, said, other) == (set(), set())
    reader.close()
    for name, view in memory.items():
        blocks = view if len(view) == kit.BLOCKS else view.unflatten(0, (kit.BLOCKS, -1))
        source = written[name] if len(view) == kit.BLOCKS else written[name].unflatten(0, (kit.BLOCKS, -1))
        old = before[name] if len(view) == kit.BLOCKS else before[name].unflatten(0, (kit.BLOCKS, -1))
        for block in range(kit.BLOCKS):
            want = source[table[other.index(block)]] if block in other else old[block]
            assert same(blocks[block], want), block


def test_mla_s_latent_of_512_and_64_comes_back_and_is_written_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kit.kv_config((kit.mla_spec(), ["model.layers.0.attn"]), replicas=2)
    written = kit.filled((kit.BLOCKS, 1, 64, 576), torch.bfloat16, seed=1)
    said, table = kit.prompt(256), [3, 9, 4, 1]
    ranks = [
        kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": written}, rank=rank, ranks=2) for rank in (0, 1)
    ]
    for worker in ranks:
        kit.save(worker, said, table)
    assert [worker._taking.counters.get("saves") for worker in ranks] == [1, 0]
    for worker in ranks:
        worker.close()
    read = torch.zeros_like(written)
    reader = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": read}, rank=1, ranks=2)
    assert reader.handshake is not None
    assert b"replicated" in (reader.handshake.representation or b"")
    assert kit.load(reader, said, [11, 12, 13, 14]) == (set(), set())
    reader.close()
    assert same(read[[11, 12, 13, 14]], written[table])


def test_ranks_that_split_heads_never_read_each_other_s_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"]))
    first = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": heads_first(0)}, rank=0, ranks=2)
    second = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": heads_first(1)}, rank=1, ranks=2)
    said = kit.prompt(128)
    kit.save(first, said, range(8))
    assert kit.load(second, said, range(8)) == (set(), set(range(1, 8)))
    first.close()
    second.close()


def test_what_is_copied_is_what_stood_there_when_the_step_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"]))
    memory = heads_first(0)
    kept = memory.clone()
    writer = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": memory})
    said = kit.prompt(128)
    worker_saves = writer._taking.counters
    writer.save([kit.SaveOrder("it", said, (tuple(range(1, 9)),), 0)])
    memory.zero_()  # freed, and written by the next request at once
    kit.until(lambda: worker_saves.get("saves") == 1)
    assert kit.load(writer, said, range(11, 19)) == (set(), set())
    assert same(memory[11:19], kept[1:9])
    writer.close()


def test_pages_that_vllm_has_already_are_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"]))
    memory = heads_first(0)
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": memory})
    said = kit.prompt(192)
    kit.save(worker, said, range(1, 13))
    shared = memory[1:6].clone()
    memory[1:] = 0
    memory[1:6] = 42.0  # five pages, within the second piece, that other requests attend to right now
    assert kit.load(worker, said, range(1, 13), skip=80) == (set(), set())
    assert (memory[1:6] == 42.0).all()
    assert not same(shared, memory[1:6])
    assert memory[6:13].view(torch.uint8).any()
    worker.close()


def test_groups_with_a_window_are_restored_whole_and_what_slid_out_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kit.kv_config((kit.gqa_spec(), ["model.layers.1.attn"]), (kit.window_spec(), ["model.layers.0.attn"]))
    shared = heads_first(0)  # two groups lie in one memory, in blocks of their own
    memory = {"model.layers.0.attn": shared, "model.layers.1.attn": shared}
    worker = kit.started(monkeypatch, tmp_path, config, memory)
    said = kit.prompt(128)
    kept = shared.clone()
    kit.save(worker, said, range(1, 9), range(11, 19))
    shared.zero_()
    assert kit.load(worker, said, range(1, 9), [0, 0, 0, 0, 21, 22, 23, 24]) == (set(), set())
    assert same(shared[1:9], kept[1:9])
    assert same(shared[21:25], kept[15:19])
    assert not shared[0].any()
    assert not shared[11:19].any()
    assert kit.load(worker, kit.prompt(128, seed=6), range(1, 9), range(11, 19)) == ({"loaded"}, set())
    worker.close()


def test_layers_that_read_another_s_kv_are_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = heads_first(0)
    config = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn", "model.layers.1.attn"]))
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": memory, "model.layers.1.attn": memory})
    assert worker._cache is not None
    assert worker._cache.representation.layers == 1
    worker.close()


def test_states_of_recurrent_layers_come_back_with_the_kv_before_them_and_touch_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, names = kit.hybrid()
    kv = config.kv_cache_groups[0].layer_names[0]
    written = kit.allocated(config, seed=1)
    writer = kit.started(monkeypatch, tmp_path, config, written)
    kit.save(writer, kit.prompt(128), range(1, 9), states=(20, 21))
    kit.save(writer, kit.prompt(192), range(9, 13), first=128, states=(22, 23))
    writer.close()
    memory = kit.allocated(config, seed=2)
    before = {name: view.clone() for name, view in memory.items()}
    reader = kit.started(monkeypatch, tmp_path, config, memory)
    table, places = [31, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], (27, 29)
    assert kit.load(reader, kit.prompt(192), table, states=places) == (set(), set())
    reader.close()
    for place, block in enumerate(table):
        assert same(memory[kv][block], written[kv][place + 1]), place
    of_group = {names[0]: 0, names[1]: 0, names[2]: 1}
    for name, group in of_group.items():
        assert same(memory[name][places[group]], written[name][(22, 23)[group]])
        for block in set(range(12, kit.BLOCKS)) - {31, *places}:  # those before hold what was loaded for the layer with KV
            assert same(memory[name][block], before[name][block]), block


def test_a_prefix_whose_state_is_damaged_or_not_its_own_fails_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, names = kit.hybrid()
    memory = kit.allocated(config, seed=1)
    worker = kit.started(monkeypatch, tmp_path, config, memory)
    kit.save(worker, kit.prompt(192), range(1, 13), states=(20, 21))
    kept = memory[names[0]].clone()
    short = kit.prompt(128)  # its blocks are stored, but no state behind them
    assert kit.load(worker, short, range(1, 9), states=(27, 29)) == ({"loaded"}, set())
    assert worker.short() == {"loaded": 0}
    worker.close()
    broken(monkeypatch, tmp_path, Fault("read", "flip"))
    worker = kit.started(monkeypatch, tmp_path, config, memory)
    assert kit.load(worker, kit.prompt(192), range(1, 13), states=(27, 29)) == ({"loaded"}, set())
    assert same(memory[names[0]][[27, 29]], kept[[27, 29]])
    worker.close()


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (
            [(kit.gqa_spec(), ["model.layers.0.attn"]), (kit.state_spec(mode="none"), ["model.layers.1.conv"])],
            "needs to be align",
        ),
        ([(kit.state_spec(), ["model.layers.1.conv"])], "recurrent layers alone"),
    ],
    ids=["no states kept", "no KV"],
)
def test_recurrent_layers_whose_states_are_of_no_use_are_served_without_and_the_reason_is_told(
    groups: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = kit.started(monkeypatch, tmp_path, kit.kv_config(*groups), {})
    assert worker.handshake is not None
    assert worker.handshake.representation is None
    assert reason in worker.handshake.reason
    worker.close()


def test_a_page_that_lies_in_too_many_parts_is_refused() -> None:
    scattered = torch.zeros(16, 8, 4, 6)[:, ::2, ::2]
    with pytest.raises(UnknownLayout, match="too many parts"):
        page_view(scattered, blocks=16)


def broken(monkeypatch: pytest.MonkeyPatch, directory: Path, fault: Fault | None = None, **settings: Any) -> FaultyTier:
    """Have the next worker's disk tier fail."""
    tier = FaultyTier(DiskTier.open(directory, capacity_bytes=64 << 20))
    if fault is not None:
        tier.inject(fault)
    monkeypatch.setattr(
        worker_room,
        "open_cache",
        lambda config, *, identity, representation, match_timeout_s: PrefixCache(
            [tier],
            identity=identity,
            representation=representation,
            load_timeout_s=config.load_timeout_s,
            match_timeout_s=match_timeout_s,
        ),
    )
    return tier


def stored(monkeypatch: pytest.MonkeyPatch, directory: Path, config: Any, said: Any) -> None:
    writer = kit.started(monkeypatch, directory, config, {"model.layers.0.attn": heads_first(0)})
    kit.save(writer, said, range(1, 9))
    writer.close()


def test_a_read_that_hangs_ends_at_the_deadline_and_never_touches_a_page_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"])), kit.prompt(128)
    stored(monkeypatch, tmp_path, config, said)
    tier = broken(monkeypatch, tmp_path, Fault("read", "stall"))
    memory = torch.zeros_like(heads_first(0))
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": memory}, **{"cache.load_timeout_s": 0.3})
    assert kit.load(worker, said, range(1, 9)) == (set(), set(range(1, 9)))
    tier.heal()
    worker.close()
    assert not memory.any()


def test_a_read_that_fails_is_reported_with_the_blocks_that_lack_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"])), kit.prompt(128)
    stored(monkeypatch, tmp_path, config, said)
    broken(monkeypatch, tmp_path, Fault("read", "flip"))
    memory = torch.zeros_like(heads_first(0))
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": memory})
    failed, bad = kit.load(worker, said, range(1, 9))
    assert not failed
    assert bad in (set(range(1, 9)), set(range(5, 9)))
    assert not memory[sorted(bad)].any()
    worker.close()


def test_a_lookup_that_waits_for_its_turn_is_a_later_load_and_no_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"])), kit.prompt(128)
    stored(monkeypatch, tmp_path, config, said)
    tier = broken(monkeypatch, tmp_path, Fault("locate", "stall", times=1))
    tier._stall_s = 0.8  # longer than an engine's thread would wait, and than what others did takes to be known here
    memory = torch.zeros_like(heads_first(0))
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": memory})
    assert kit.load(worker, said, range(1, 9)) == (set(), set())
    assert worker.short() == {}
    worker.close()


def test_a_load_that_takes_longer_than_computing_is_given_up_and_what_came_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"])), kit.prompt(128)
    stored(monkeypatch, tmp_path, config, said)
    tier = broken(monkeypatch, tmp_path, Fault("read", "stall"))
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": torch.zeros_like(heads_first(0))})
    assert kit.load(worker, said, range(1, 9), within_s=0.3) == (set(), set(range(1, 9)))
    assert worker.short() == {"loaded": 0}
    assert worker.short() == {}
    tier.heal()
    worker.close()


def test_a_request_that_is_over_gives_its_blocks_back_at_once_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, said = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"])), kit.prompt(128)
    stored(monkeypatch, tmp_path, config, said)
    tier = broken(monkeypatch, tmp_path, Fault("read", "stall"))
    memory = torch.zeros_like(heads_first(0))
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": memory})
    worker.obey(Orders([LoadOrder("aborted", said, (tuple(range(1, 9)),), 0)]))
    assert worker.finished(set()) == (set(), set(), set(), set())
    assert worker.finished({"aborted"}) == (set(), {"aborted"}, set(), set())
    tier.heal()
    assert worker.finished({"aborted"}) == (set(), set(), set(), set())
    worker.close()
    assert not memory.any()


def test_a_full_disk_costs_saves_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, said = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"])), kit.prompt(128)
    broken(monkeypatch, tmp_path, Fault("write", "enospc"))
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": heads_first(0)})
    kit.save(worker, said, range(1, 9))
    assert worker._taking.counters.get("saves_dropped") == 1
    assert kit.load(worker, said, range(1, 9)) == (set(), set(range(1, 9)))
    worker.close()


def test_what_cannot_be_found_because_its_beginning_is_gone_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"]))
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": heads_first(0)})
    kit.save(worker, kit.prompt(128), range(5, 9), first=64)
    assert worker._taking.counters.get("saves_dropped") == 1
    assert worker._taking.counters.get("saved_bytes") == 0
    worker.close()


def test_closing_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    config = kit.kv_config((kit.gqa_spec(), ["model.layers.0.attn"]))
    worker = kit.started(monkeypatch, tmp_path, config, {"model.layers.0.attn": heads_first(0)})
    kit.save(worker, kit.prompt(128), range(1, 9))
    worker.close()
    worker.close()
    assert {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("connector")} == set()
