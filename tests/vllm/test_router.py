"""Two real vLLMs behind `headstart route`: the answers of one, hits by its own KV events, one of them killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.vllm_server import Server, serving

from cluster.router_kit import Clients, whole

READY_S = 900.0  # a bound, for a busy machine
SYSTEM = "What is the same in every request stands first. " * 30


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


class Routed:
    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path, workers: list[Server]) -> None:
        self.url = url
        self.process = process
        self.log = log
        self.workers = workers

    def told(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=60, trust_env=False).raise_for_status().json()

    def states(self) -> list[str]:
        return [one["state"] for one in self.told("/router/workers")["workers"]]

    def all_are(self, *states: str) -> bool:
        try:
            return set(self.states()) <= set(states)
        except httpx.TransportError:
            return False

    def until(self, true: Callable[[], bool]) -> None:
        ends = time.monotonic() + READY_S
        while not true():
            assert time.monotonic() < ends, self.log.read_text()[-3000:]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)


def said(url: str, number: int) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"question {number}"}]
    body = {"model": "it", "messages": messages, "max_tokens": 6, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


class Fleet:
    """Two vLLMs on ports that stay theirs, and a router that follows their KV events."""

    def __init__(self, model: Path, place: Path, stack: ExitStack) -> None:
        self._model = model
        self._place = place
        self._stack = stack
        self._ports = free_ports(7)
        with ThreadPoolExecutor(2) as starting:
            workers = list(starting.map(self.started, range(2)))
        words = ["route", "--port", str(self._ports[6]), "--tokenizer", str(model), "--usage-keep", "0", "--poll-s", "0.2"]
        for number, worker in enumerate(workers):
            live, replay = self._ports[2 * number : 2 * number + 2]
            words += ["--worker", f"{worker.url},events=tcp://127.0.0.1:{live},replay=tcp://127.0.0.1:{replay}"]
        log = place / "router.log"
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-m", "headstart.cli", *words], stdout=output, stderr=output)
        stack.callback(process.wait)
        stack.callback(process.kill)
        self.routed = Routed(f"http://127.0.0.1:{self._ports[6]}", process, log, workers)
        self.routed.until(lambda: self.routed.all_are("ready"))

    def started(self, number: int) -> Server:
        """Start one, or start it anew."""
        endpoint, replay = (f"tcp://*:{port}" for port in self._ports[2 * number : 2 * number + 2])
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}
        arguments = ("--kv-events-config", json.dumps(events))
        log = self._place / f"vllm-{number}-{time.monotonic_ns()}.log"
        return self._stack.enter_context(serving(self._model, log=log, arguments=arguments, port=self._ports[4 + number]))


@pytest.fixture(scope="module")
def model(tiny_model_folder: Any) -> Path:
    folder: Path = tiny_model_folder("llama", hidden_size=256, head_dim=64, max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="module")
def routed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    with ExitStack() as stack:
        yield Fleet(model, tmp_path_factory.mktemp("routed"), stack).routed


def test_the_answers_are_those_of_one_and_events_tell_who_holds_what(routed: Routed) -> None:
    right = [said(routed.workers[0].url, number) for number in range(8)]
    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(lambda number: said(routed.url, number), range(8))) == right

    def known() -> bool:
        said(routed.url, 100)
        decision = routed.told("/router/decisions?limit=1")["decisions"][0]
        assert decision["tokens_by"] == "tokenizer"
        return all(one["reused_tokens"] >= 64 for one in decision["attempts"][0]["scores"][:1])

    routed.until(known)
    assert all(one["events"] for one in routed.told("/router/workers")["workers"])


def test_other_dialects_and_usage_pass(routed: Routed) -> None:
    messages = [{"role": "user", "content": "hello"}]
    told = {"model": "it", "messages": messages, "max_tokens": 4}
    answer = httpx.post(f"{routed.url}/v1/messages", json=told, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["output_tokens"] == 4
    with httpx.stream(
        "POST", f"{routed.url}/v1/chat/completions", json={**told, "stream": True}, timeout=300, trust_env=False
    ) as stream:
        chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert all(chunk["choices"] for chunk in chunks)  # usage, which the router asked for, is not passed on


def test_one_that_is_killed_is_left_out_and_nothing_is_wrong(routed: Routed) -> None:
    right = [said(routed.url, number) for number in range(6)]
    os.killpg(routed.workers[1].process.pid, signal.SIGKILL)
    with ThreadPoolExecutor(3) as clients:
        assert list(clients.map(lambda number: said(routed.url, number), range(6))) == right
    routed.until(lambda: sorted(routed.states()) == ["down", "ready"])


@pytest.mark.soak
def test_no_answer_is_wrong_while_a_vllm_is_killed_every_three_minutes(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleet = Fleet(model, tmp_path, stack)
        routed = fleet.routed
        right = [whole(routed.workers[0].url, number, 12) for number in range(24)]
        assert [whole(routed.url, number, 12) for number in range(24)] == right
        clients = Clients(routed.url, right, 12, 16)
        try:
            for turn in range(3):
                begun_s, before = time.monotonic(), clients.answered
                routed.until(lambda before=before: clients.answered > before + 16 or bool(clients.wrong))
                os.killpg(routed.workers[turn % 2].process.pid, signal.SIGKILL)
                routed.until(lambda: "down" in routed.states())
                routed.workers[turn % 2] = fleet.started(turn % 2)
                routed.until(lambda: routed.all_are("ready"))
                while time.monotonic() < begun_s + 180 and not clients.wrong:
                    time.sleep(1)
        finally:
            clients.end()
        print(f"{clients.answered} answered, {clients.lost} streams lost midway")
        assert not clients.wrong
