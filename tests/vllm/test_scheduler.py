"""What is offered to vLLM's scheduler and what workers are told to do, request by request; without a model."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import worker_kit as kit
from vllm.lora.request import LoRARequest

from headstart.cache.prefix_cache import PrefixCache
from headstart.connect.vllm.identity import AdapterDigests
from headstart.connect.vllm.messages import Handshake
from headstart.connect.vllm.scheduler import Scheduler
from headstart.connect.vllm.settings import read_settings
from headstart.connect.vllm.worker import Worker
from headstart.engine.speeds import Speeds
from headstart.metrics import Counters

TOKENS = 200  # three blocks of 64, and a remainder
NAME = "model.layers.0.attn"


def request(name: str = "it", **more: Any) -> Any:
    tokens = kit.prompt(TOKENS).array.tolist()
    plain = {
        "request_id": name,
        "prompt_embeds": None,
        "lora_request": None,
        "kv_transfer_params": None,
        "all_token_ids": tokens,
        "num_tokens": TOKENS,
        "num_prompt_tokens": TOKENS,
        "num_computed_tokens": 0,
        "num_in_flight_tokens": 0,
        "num_nans_in_logits": 0,
        "cache_salt": None,
        "mm_features": [],
        "session_id": None,
        "skip_reading_prefix_cache": False,
        "shared_prefix_boundary": 0,
    }
    return SimpleNamespace(**{**plain, **more})


def step(scheduler: Scheduler, tables: list[list[int]], offered: Any = (), **counts: int) -> Any:
    """Have requests compute so many tokens, all of them from their start. `offered`: states that stand then, as vLLM tells."""
    scheduled = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in counts],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda _: tuple(tables), boundary_state_offloads=dict.fromkeys(counts, offered)
        ),
    )
    return scheduler.orders(scheduled)


def found(scheduler: Scheduler, asked: Any, local: int) -> tuple[int | None, bool]:
    """Ask as vLLM does: again, for as long as it is being looked up."""
    answers: list[tuple[int | None, bool]] = []

    def known() -> bool:
        answers.append(scheduler.find(asked, local))
        return answers[-1][0] is not None

    kit.until(known)
    return answers[-1]


def came_back(*, received: set[str] = frozenset(), bad: set[int] = frozenset(), failed: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    return SimpleNamespace(finished_recving=set(received), invalid_block_ids=set(bad), failed_recving=set(failed))


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """One that has three blocks of the prompt stored."""
    config = kit.kv_config((kit.gqa_spec(), [NAME]))
    memory = kit.filled((kit.BLOCKS, 2, 16, 128), seed=0)
    worker = kit.started(monkeypatch, tmp_path / "kv", config, {NAME: memory})
    kit.save(worker, kit.prompt(192), range(1, 13))
    yield worker
    worker.close()


@pytest.fixture
def scheduler(tmp_path: Path, worker: Worker) -> Iterator[Scheduler]:
    scheduler = new(tmp_path)
    scheduler.shake_hands({(0, 0): told(worker)})
    yield scheduler
    scheduler.close()


def new(tmp_path: Path, *, ranks: int = 1, recurrent: int = 0, **more: str) -> Scheduler:
    """`recurrent`: how many groups of recurrent layers there are behind the one that holds KV."""
    extra = {"cache.directory": str(tmp_path / "kv"), "cache.capacity": "64MiB", "cache.min_free": "0", **more}
    return Scheduler(
        read_settings(extra),
        ranks=ranks,
        block_tokens=[16] * (1 + recurrent),
        save_always=False,
        chunk_tokens=512,
        recurrent=frozenset(range(1, 1 + recurrent)),
    )


def told(worker: Worker) -> Handshake:
    assert worker.handshake is not None
    return worker.handshake


def test_nothing_is_found_before_every_rank_has_said_how_its_kv_lies(tmp_path: Path, worker: Worker) -> None:
    scheduler = new(tmp_path, ranks=2)
    scheduler.shake_hands({(0, 0): told(worker)})
    assert scheduler.find(request(), 0) == (None, False)
    scheduler.close()


def test_a_prefix_is_as_long_as_the_shortest_of_all_ranks(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kit.kv_config((kit.gqa_spec(), [NAME]))
    memory = kit.filled((kit.BLOCKS, 2, 16, 128), seed=0)
    ranks = [kit.started(monkeypatch, tmp_path / "kv", config, {NAME: memory}, rank=rank, ranks=2) for rank in (0, 1)]
    kit.save(ranks[0], kit.prompt(192), range(1, 13))
    kit.save(ranks[1], kit.prompt(128), range(1, 9))
    scheduler = new(tmp_path, ranks=2)
    scheduler.shake_hands({(0, rank): told(one) for rank, one in enumerate(ranks)})
    assert found(scheduler, request(), 0) == (128, True)
    scheduler.close()
    for one in ranks:
        one.close()


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headstart-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_what_is_stored_of_a_request_that_waits_is_brought_to_the_nodes_memory(
    tmp_path: Path, shared_memory: Path, worker: Worker
) -> None:
    node = {"cache.node_memory": "32MiB", "cache.node_directory": str(shared_memory / "node")}
    scheduler = new(tmp_path, **node)
    scheduler.shake_hands({(0, 0): told(worker)})
    assert scheduler._lookups is not None
    (cache,) = scheduler._lookups._caches

    def where() -> dict[str, int]:
        with cache.match(kit.prompt(TOKENS).array) as lease:
            return lease.tokens_by_tier

    asked_at_once, waits = request("at once"), request("waits")
    scheduler.queued(asked_at_once)
    assert found(scheduler, asked_at_once, 0) == (192, True)
    step(scheduler, [], other=1)
    assert scheduler._lookups._bringing is None  # its own load reads it
    scheduler.queued(waits)
    assert where() == {"disk": 192}
    step(scheduler, [], other=1)
    kit.until(lambda: where() == {"memory": 192})
    assert found(scheduler, waits, 0) == (192, True)
    scheduler.queued(request("given up"))
    scheduler.ended(request("given up"), [])
    assert not scheduler._queued
    scheduler.close()


def test_an_adapter_that_changes_behind_the_offer_is_loaded_as_offered_and_not_saved(
    tmp_path: Path, worker: Worker, scheduler: Scheduler
) -> None:
    (tmp_path / "lora").mkdir()
    file = tmp_path / "lora" / "adapter_model.safetensors"
    file.write_bytes(b"one")
    lora = LoRARequest("sql", 1, str(file.parent))
    digest = AdapterDigests(read_settings({"models_directory": str(tmp_path)})).of(lora)
    assert digest is not None
    kit.save(worker, replace(kit.prompt(128), adapters=(digest,)), range(1, 9))
    # What one process stores another knows of a moment later.
    kit.until(lambda: found(scheduler, request("before", lora_request=lora), 0) == (128, True))
    asked = request(lora_request=lora)
    assert found(scheduler, asked, 0) == (128, True)
    file.write_bytes(b"another")
    scheduler.allocated(asked, [list(range(1, 14))], 128)
    orders = step(scheduler, [list(range(1, 14))], it=TOKENS)
    assert [(order.prompt.adapters, len(order.prompt.tokens)) for order in orders.loads] == [((digest,), 4 * 128)]
    assert not orders.saves


def test_what_is_stored_is_offered_beyond_what_vllm_has_and_ordered_once_there_are_blocks(scheduler: Scheduler) -> None:
    asked = request()
    assert found(scheduler, asked, 64) == (128, True)
    scheduler.allocated(asked, [list(range(1, 14))], 128)
    (order,) = step(scheduler, [], other=1).loads
    assert (order.tables, order.skip, len(order.prompt.tokens)) == ((tuple(range(1, 13)),), 64, 4 * 192)
    assert step(scheduler, [], other=1).loads == []


def test_a_request_whose_load_failed_is_computed_and_what_failed_is_saved_again(scheduler: Scheduler) -> None:
    asked = request()
    assert found(scheduler, asked, 0) == (192, True)
    scheduler.allocated(asked, [list(range(1, 14))], 192)
    assert len(step(scheduler, []).loads) == 1
    scheduler.stepped(came_back(received={"it"}, bad={5, 6}), {"it": 64})
    assert found(scheduler, asked, 0) == (0, False)  # or a disk that has what it cannot give would keep it for ever
    (save,) = step(scheduler, [list(range(1, 14))], it=TOKENS).saves
    assert (save.first, len(save.prompt.tokens)) == (0, 4 * 192)


def test_what_failed_to_load_is_not_offered_to_others_for_a_while_and_what_lies_before_it_is(scheduler: Scheduler) -> None:
    asked = request()
    found(scheduler, asked, 0)
    scheduler.allocated(asked, [list(range(1, 14))], 192)
    scheduler.stepped(came_back(received={"it"}, bad={9, 10, 11, 12}), {"it": 128})
    assert found(scheduler, request("other"), 0) == (128, True)
    assert found(scheduler, request("third"), 128) == (0, False)


def test_after_failures_in_a_row_one_at_a_time_tries_again(scheduler: Scheduler) -> None:
    def tried(name: str, *, bad: set[int]) -> bool:
        asked = request(name)
        if found(scheduler, asked, 0)[0]:
            scheduler.allocated(asked, [list(range(1, 14))], 192)
            scheduler.stepped(came_back(received={name}, bad=bad), {name: 0})
            return True
        return False

    for number in range(3):
        assert tried(f"bad {number}", bad={1})
        scheduler._lookups._avoided.clear()  # as if it were another prompt
    assert not tried("next", bad=set())
    scheduler._trying.until_s = 0.0  # some time later
    assert tried("later", bad=set())
    assert tried("and others", bad=set())


def test_a_stored_prefix_that_is_computed_sooner_is_computed_and_counted(scheduler: Scheduler) -> None:
    now = [0.0]
    speeds = scheduler._speeds = Speeds(Counters(), chunk_tokens=512, clock=lambda: now[0])
    for rows in (64, 128, 512):
        speeds.passed(rows, rows * rows / 2, rows / 1000)  # a thousand tokens a second
    for _ in range(3):  # and a disk that gives a tenth of that
        speeds.asked("disk", 100 * kit.TOKEN_BYTES)
        now[0] += 1.0
        speeds.came("disk", 100 * kit.TOKEN_BYTES, asked_bytes=100 * kit.TOKEN_BYTES)
    asked = request()
    assert found(scheduler, asked, 0) == (0, False)
    scheduler.allocated(asked, [list(range(1, 14))], 0)
    assert scheduler._counters.get("outrun_tokens") == 192
    assert step(scheduler, [list(range(1, 14))], it=TOKENS).saves == []  # it is stored
    now[0] += 1000.0  # long ago measured, so it is tried again
    assert found(scheduler, request("later"), 0) == (192, True)


def test_vllm_is_told_to_ask_again_while_a_lookup_takes_its_time(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    match = PrefixCache.match
    monkeypatch.setattr(PrefixCache, "match", lambda *args, **named: go_on.wait(30) and match(*args, **named))
    asked = request()
    assert scheduler.find(asked, 0) == (None, False)
    assert scheduler.find(asked, 0) == (None, False)
    go_on.set()
    assert found(scheduler, asked, 0) == (192, True)
    assert scheduler.ended(asked, [list(range(1, 14))]) is False


def test_what_is_stored_is_not_saved_again(scheduler: Scheduler) -> None:
    asked = request()
    found(scheduler, asked, 0)
    scheduler.allocated(asked, [list(range(1, 14))], 192)
    step(scheduler, [])
    scheduler.stepped(came_back(received={"it"}), {})
    assert step(scheduler, [list(range(1, 14))], it=TOKENS).saves == []


def test_a_request_that_ends_amid_its_load_saves_nothing(scheduler: Scheduler) -> None:
    asked = request(num_computed_tokens=192)
    found(scheduler, asked, 0)
    scheduler.allocated(asked, [list(range(1, 14))], 192)
    assert scheduler.ended(asked, [list(range(1, 14))]) is False
    assert step(scheduler, []).saves == []


def test_the_end_of_an_answer_is_saved_while_vllm_keeps_its_blocks(scheduler: Scheduler) -> None:
    asked = request()
    found(scheduler, asked, 192)
    asked.all_token_ids = [*asked.all_token_ids, *range(100)]
    asked.num_tokens = asked.num_computed_tokens = 300
    assert scheduler.ended(asked, [list(range(1, 20))]) is True
    (save,) = step(scheduler, []).saves
    assert (save.first, save.last, len(save.prompt.tokens)) == (192, True, 4 * 256)
    assert save.tables == (tuple(range(13, 17)),)


def test_numbers_that_are_none_are_not_kept(scheduler: Scheduler) -> None:
    asked = request(num_computed_tokens=200, num_nans_in_logits=3, all_token_ids=list(range(200)))
    found(scheduler, asked, 0)
    assert scheduler.ended(asked, [list(range(1, 14))]) is False


def test_after_a_reset_nothing_is_found_or_kept(scheduler: Scheduler) -> None:
    assert found(scheduler, request(), 0) == (192, True)
    assert scheduler.reset() is True
    assert found(scheduler, request(), 0) == (0, False)
    assert step(scheduler, [list(range(1, 14))], it=TOKENS).saves == []


@pytest.fixture
def stateful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    """One for a model with two groups of recurrent layers and two ranks, of which one has a state more."""
    config, _ = kit.hybrid()
    ranks = [
        kit.started(monkeypatch, tmp_path / "kv", config, kit.allocated(config, seed=rank), rank=rank, ranks=2)
        for rank in (0, 1)
    ]
    for worker in ranks:
        kit.save(worker, kit.prompt(128), range(1, 9), states=(20, 21))
    kit.save(ranks[0], kit.prompt(192), range(9, 13), first=128, states=(22, 23))
    scheduler = new(tmp_path, ranks=2, recurrent=2)
    scheduler.shake_hands({(0, rank): told(worker) for rank, worker in enumerate(ranks)})
    yield scheduler
    scheduler.close()
    for worker in ranks:
        worker.close()


def test_a_prefix_ends_where_all_ranks_have_a_state_which_is_loaded_into_the_block_behind_it(stateful: Scheduler) -> None:
    asked = request()
    assert found(stateful, asked, 0) == (128, True)
    stateful.allocated(asked, [list(range(1, 9)), [0] * 7 + [24], [0] * 7 + [25]], 128)
    (order,) = step(stateful, []).loads
    assert (order.tables, order.states) == ((tuple(range(1, 9)),), (24, 25))
    stateful.stepped(came_back(received={"it"}, failed={"it"}), {"it": 0})
    assert found(stateful, request("other"), 0) == (0, False)  # for a while: no state of it could be read


@pytest.mark.parametrize(
    ("at", "more", "kept"),
    [
        (192, {}, True),  # no later state of this prompt leaves a token to compute
        (64, {}, False),
        (64, {"shared_prefix_boundary": 64}, True),
        (64, {"num_prompt_tokens": 100}, True),  # tokens of an answer follow
        (176, {}, False),  # no whole piece
    ],
    ids=["the prompt's end", "within the prompt", "where prompts part", "within the answer", "between pieces"],
)
def test_states_are_kept_that_are_worth_it(tmp_path: Path, stateful: Scheduler, at: int, more: Any, kept: bool) -> None:
    asked = request(all_token_ids=kit.prompt(TOKENS, seed=9).array.tolist(), **more)
    assert found(stateful, asked, 0) == (0, False)
    tables = [list(range(1, 14)), [0] * 12 + [29], [0] * 12 + [30]]
    saves = step(stateful, tables, [(1, 24, at), (2, 25, at)], it=at).saves
    assert [(save.first, len(save.prompt.tokens) // 4, save.tables, save.states) for save in saves] == (
        [(0, at, (tuple(range(1, 1 + at // 16)),), (24, 25))] if kept else []
    )
    assert step(stateful, tables, [(1, 24, at)], it=at).saves == []  # nor a part of one
    assert stateful.ended(asked, tables) is False
