"""The real vLLM over a disk that fails, is full or slow, with requests aborted and preempted amid loads."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.vllm_server import Answer, Server, connector, serving

REQUESTS, AT_ONCE = 200, 8
_random = random.Random(7)
_BEGINNINGS = [[_random.randrange(5, 500) for _ in range(128 * _random.choice([2, 3, 4]))] for _ in range(12)]
MANY = [_random.choice(_BEGINNINGS) + [_random.randrange(5, 500) for _ in range(20)] for _ in range(REQUESTS)]
SMALL_MEMORY = ["--num-gpu-blocks-override", "40"]  # 5,120 tokens: eight requests fit, what they began with does not stay


@dataclass(slots=True)
class Faulty:
    server: Server
    switch: Path

    def set(self, **faults: Any) -> None:
        self.switch.write_text(json.dumps(faults))


def tiny(tiny_model_folder: Any) -> Path:
    folder: Path = tiny_model_folder("llama", hidden_size=256, head_dim=64)
    return folder


def ask_all(server: Server, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(lambda one: server.ask(one, tokens=4), prompts))


def differing(one: Sequence[Answer], other: Sequence[Answer]) -> int:
    return sum(a.tokens != b.tokens for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def plain(tiny_model_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Answer], list[Answer]]:
    """Two runs of the same requests without the connector."""
    with serving(tiny(tiny_model_folder), log=tmp_path_factory.mktemp("plain") / "log") as server:
        first = ask_all(server, MANY)
        server.forget()
        return first, ask_all(server, MANY)


@pytest.fixture(scope="module")
def faulty(tiny_model_folder: Any, plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    place = tmp_path_factory.mktemp("faulty")
    switch = place / "faults.json"
    switch.write_text("{}")
    transfer = connector(place / "kv", module="faulty", **{"cache.load_timeout_s": 5})
    with serving(
        tiny(tiny_model_folder),
        log=place / "log",
        transfer=transfer,
        arguments=SMALL_MEMORY,
        environment={"FAULTS": str(switch)},
    ) as server:
        yield Faulty(server, switch)


def test_200_requests_at_once_with_one_read_in_ten_failing_answer_as_plain_vllm_does(
    faulty: Faulty, plain: tuple[list[Answer], list[Answer]]
) -> None:
    first, second = plain
    warm = ask_all(faulty.server, MANY[:40])
    assert differing(warm, first[:40]) <= differing(second[:40], first[:40])
    faulty.set(read=["eio", 10])
    found = ask_all(faulty.server, MANY)
    faulty.set()
    assert differing(found, first) <= differing(second, first)
    assert faulty.server.metric("headstart_loads_failed") > 0, faulty.server.tail()
    assert faulty.server.metric("headstart_loaded_tokens") > 0


def test_a_disk_that_gives_nothing_at_all_costs_only_hits(faulty: Faulty, plain: tuple[list[Answer], list[Answer]]) -> None:
    first, second = plain
    faulty.set(read=["eio", 1])
    faulty.server.forget()
    found = ask_all(faulty.server, MANY[:40])
    faulty.set()
    assert differing(found, first[:40]) <= differing(second[:40], first[:40])


def test_a_full_disk_costs_only_saves(faulty: Faulty) -> None:
    faulty.set(write=["enospc", 1], reserve=["enospc", 1])
    dice = random.Random(11)
    new = [dice.randrange(5, 500) for _ in range(300)]
    computed = faulty.server.ask(new)
    faulty.server.wait_for("headstart_saves_dropped", 1)
    faulty.set()
    faulty.server.forget()
    assert faulty.server.ask(new).tokens == computed.tokens


def test_requests_aborted_amid_their_load_leave_nothing_behind(faulty: Faulty) -> None:
    server = faulty.server
    dice = random.Random(12)
    long = [dice.randrange(5, 500) for _ in range(1500)]
    before = server.metric("headstart_loaded_tokens")
    deadline = time.monotonic() + 60
    while server.metric("headstart_loaded_tokens") < before + 1000:  # a disk that was full takes a while to be believed again
        assert time.monotonic() < deadline
        computed = server.ask(long)
        server.forget()
    faulty.set(read_delay_s=1.0)
    cancelled = server.metric("headstart_loads_cancelled")
    for _ in range(3):
        server.forget()
        with server.client.stream("POST", "/v1/completions", json=server.request(long)) as response:
            assert response.status_code == 200
            threading.Event().wait(0.3)  # the load has begun; the connection ends before it does
    server.wait_for("headstart_loads_cancelled", cancelled + 3)
    faulty.set()
    server.forget()  # succeeds only if no block is held by anyone
    assert server.ask(long).tokens == computed.tokens


def test_requests_that_give_way_while_others_load_answer_the_same(faulty: Faulty) -> None:
    """Five answers that outgrow the memory beside loads that take their time."""
    server = faulty.server
    dice = random.Random(20)
    prompts = [[dice.randrange(5, 500) for _ in range(700)] for _ in range(6)]
    alone = [server.ask(one, tokens=300) for one in prompts]
    server.forget()
    before = server.metric("vllm:num_preemptions")
    faulty.set(read_delay_s=0.05)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        together = list(threads.map(lambda one: server.ask(one, tokens=300), prompts))
    faulty.set()
    assert server.metric("vllm:num_preemptions") > before
    assert differing(together, alone) == 0
