"""A router and its workers as processes: the same answers as one worker, also while workers are killed, stopped, started."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router_kit import Clients, Cluster, Process, environment, eventually, killed_in_turn, question, streamed, whole

TOKENS = 24
TINY = ("--kv-memory", "256MiB", "--cache-memory", "16MiB", "--deterministic", "--max-running", "4")


@pytest.fixture
def tiny(tiny_model_folder: Callable[..., Path]) -> Path:
    environment()
    return tiny_model_folder("llama")


@pytest.mark.cluster
def test_no_answer_is_wrong_and_every_request_ends_while_workers_are_killed(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tiny, tmp_path, 2, words=TINY) as cluster:
        right = [whole(cluster.workers[0].url, number, TOKENS) for number in range(12)]
        assert [whole(cluster.router.url, number, TOKENS) for number in range(12)] == right
        clients = Clients(cluster.router.url, right, TOKENS, 16)
        try:
            killed_in_turn(cluster, clients, every_s=0.0, times=3)
        finally:
            clients.end()
        assert not clients.wrong
        assert clients.answered > 20


@pytest.mark.soak
@pytest.mark.parametrize("workers", [2, 4])
def test_no_answer_is_wrong_while_a_worker_is_killed_every_20_seconds(
    workers: int, smollm2_folder: Path, tmp_path: Path
) -> None:
    environment()
    words = ("--kv-memory", "1GiB", "--cache-memory", "128MiB", "--deterministic")
    with Cluster(smollm2_folder, tmp_path, workers, words=words) as cluster:
        right = [whole(cluster.workers[0].url, number, TOKENS) for number in range(24)]
        assert [whole(cluster.router.url, number, TOKENS) for number in range(24)] == right
        clients = Clients(cluster.router.url, right, TOKENS, 16)
        try:
            killed_in_turn(cluster, clients, every_s=20.0, times=12)
        finally:
            clients.end()
        print(f"{clients.answered} answered, {clients.lost} streams lost midway")
        assert not clients.wrong


@pytest.mark.cluster
def test_a_worker_that_is_stopped_loses_its_requests_to_another_and_comes_back(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tiny, tmp_path, 2, words=TINY, route=("--dead-after-s", "2")) as cluster:
        right = [whole(cluster.workers[0].url, number, TOKENS) for number in range(6)]
        stopped = cluster.workers[1]
        stopped.signal(signal.SIGSTOP)
        assert [whole(cluster.router.url, number, TOKENS) for number in range(6)] == right
        assert [streamed(cluster.router.url, number, TOKENS) for number in range(6)] == [(one, None) for one in right]
        eventually(lambda: cluster.state(stopped) == "down", "its silence is seen")
        stopped.signal(signal.SIGCONT)
        eventually(lambda: cluster.state(stopped) == "ready", "it is taken back")


def reused(router: Process, number: int) -> dict[str, int]:
    """Ask a long prompt; return of which worker its router thought that it has how much of it."""
    body: dict[str, Any] = {"messages": question(number, 600), "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    asked = {"request": answer.headers["x-request-id"]}
    told = httpx.get(f"{router.url}/router/decisions", params=asked, trust_env=False).json()
    return {one["worker"]: int(one["reused_tokens"]) for one in told["attempts"][0]["scores"]}


@pytest.mark.cluster
def test_two_routers_over_the_same_workers_agree_well_enough(tiny: Path, tmp_path: Path) -> None:
    """They know nothing of each other: what one sent where, the other sees by events and by queues."""
    with Cluster(tiny, tmp_path, 2, words=TINY, routers=2) as cluster:
        one, other = cluster.routers
        eventually(lambda: max(reused(one, 1).values()) > 600, "the one knows where the prompt is")
        eventually(lambda: reused(other, 1) == reused(one, 1), "the other says the same")
        right = [whole(cluster.workers[0].url, number, TOKENS) for number in range(12)]
        before = [{url: told["requests"] for url, told in cluster.told(router).items()} for router in cluster.routers]
        clients = [Clients(router.url, right, TOKENS, 8) for router in cluster.routers]
        try:
            for some in clients:
                eventually(lambda some=some: some.answered > 60 or bool(some.wrong), "answers come")  # type: ignore[misc]
        finally:
            for some in clients:
                some.end()
        assert [some.wrong for some in clients] == [[], []]
        after = [{url: told["requests"] for url, told in cluster.told(router).items()} for router in cluster.routers]
        had = [sum(b[url] - a[url] for a, b in zip(before, after, strict=True)) for url in after[0]]
        assert min(had) > sum(had) / 4  # of two workers neither is left to itself


@pytest.mark.cluster
def test_a_router_that_starts_anew_knows_what_workers_hold(tiny: Path, tmp_path: Path) -> None:
    def most(number: int) -> int:
        return max(reused(cluster.router, number).values())

    with Cluster(tiny, tmp_path, 2, words=TINY) as cluster:
        assert most(1) == 0
        eventually(lambda: most(1) > 600, "it is known where the prompt is")
        cluster.router.kill()
        cluster.router.start()
        eventually(lambda: cluster.ready() == 2, "the router is there again")
        eventually(lambda: most(1) > 600, "it knows again")
        # A worker that starts anew has its disk, and says so; one whose disk is new has nothing.
        for worker in cluster.workers:
            worker.kill()
            eventually(lambda worker=worker: cluster.state(worker) == "down", "its end is seen")  # type: ignore[misc]
        for number, worker in enumerate(cluster.workers):
            worker.words[worker.words.index("--cache-directory") + 1] = str(tmp_path / f"new-{number}")
            worker.start()
        eventually(lambda: cluster.ready() == 2, "they are there again")
        assert most(1) == 0
