"""A real model, four servers: prompts computed by one and answered by another, which is killed, or whose partner is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.cli.server_process import ServerProcess

pytestmark = [pytest.mark.cluster, pytest.mark.real_model]

TOKENS = 700


@dataclass
class Fleet:
    alone: ServerProcess
    prefill: ServerProcess
    decode: ServerProcess
    over_nixl: ServerProcess  # as `decode`, but for how KV comes from other machines
    addresses: list[str]


@pytest.fixture(scope="module")
def fleet(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp("fleet")
    secret = home / "secret"
    secret.write_text("the secret of these three workers")
    common = [str(smollm2_folder), "--cache-capacity", "0", "--cache-memory", "512MiB", "--context", "2048"]
    common += ["--prefill-chunk", "128", "--handoff-secret", str(secret)]
    listen = f"ipc://{home}/p.sock, tcp://127.0.0.1:0"
    words: dict[str, list[str]] = {
        "alone": [],
        "prefill": ["--role", "prefill", "--handoff-listen", listen, "--handoff-nixl"],
        "decode": ["--role", "decode"],
        "over_nixl": ["--role", "decode", "--handoff-nixl"],
    }
    with ExitStack() as stack:

        def started(name: str) -> ServerProcess:
            return stack.enter_context(ServerProcess([*common, *words[name]], log=home / f"{name}.log"))

        with ThreadPoolExecutor(len(words)) as starting:
            alone, prefill, decode, over_nixl = starting.map(started, words)
        yield Fleet(alone, prefill, decode, over_nixl, _addresses(prefill))


def _addresses(prefill: ServerProcess) -> list[str]:
    addresses: list[str] = httpx.get(f"{prefill.url}/v1/headstart/role", trust_env=False).json()["addresses"]
    return addresses


def _prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 40_000) for _ in range(TOKENS)]


def _ask(server: ServerProcess, prompt: list[int], at: str = "", **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    headers = {"x-headstart-prefill-at": at} if at else {}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def _eventually(what: Callable[[], bool], timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.02)


def _begun(fleet: Fleet, prompt: list[int], pool: ThreadPoolExecutor) -> Future[dict[str, Any]]:
    """Ask, and return when some of the prompt's KV has gone over and not all of it."""
    before = fleet.decode.metric("headstart_engine_handoff_received_bytes_total")
    answer = pool.submit(_ask, fleet.decode, prompt, fleet.addresses[1])
    _eventually(lambda: fleet.decode.metric("headstart_engine_handoff_received_bytes_total") > before)
    assert not answer.done()
    return answer


@pytest.mark.parametrize("way", [0, 1, 2], ids=["shared memory", "tcp", "nixl"])
def test_the_tokens_are_those_of_one_worker(fleet: Fleet, way: int) -> None:
    decode, address = (fleet.over_nixl, fleet.addresses[1]) if way == 2 else (fleet.decode, fleet.addresses[way])
    written = fleet.prefill.metric("headstart_engine_handoff_nixl_bytes_total")
    for number, more in enumerate(({}, {"temperature": 0.8, "top_p": 0.9, "seed": 11})):
        prompt = _prompt(10 * way + number)
        sent = fleet.prefill.metric("headstart_engine_handoff_sent_bytes_total")
        early = fleet.prefill.metric("headstart_engine_handoff_sent_early_bytes_total")
        here, there = _ask(fleet.alone, prompt, **more), _ask(decode, prompt, address, **more)
        assert there["choices"][0]["text"] == here["choices"][0]["text"]
        assert there["usage"] == here["usage"]
        sent = fleet.prefill.metric("headstart_engine_handoff_sent_bytes_total") - sent
        early = fleet.prefill.metric("headstart_engine_handoff_sent_early_bytes_total") - early
        assert sent == 640 * 46_080
        assert early > sent / 2  # five of six passes were over by then
    written = fleet.prefill.metric("headstart_engine_handoff_nixl_bytes_total") - written
    assert written == (2 * 640 * 46_080 if way == 2 else 0)


def test_a_worker_that_takes_kv_over_nixl_is_killed_in_the_middle(fleet: Fleet) -> None:
    with ThreadPoolExecutor(1) as pool:
        before = fleet.prefill.metric("headstart_engine_handoff_nixl_bytes_total")
        answer = pool.submit(_ask, fleet.over_nixl, _prompt(300), fleet.addresses[1])
        _eventually(lambda: fleet.prefill.metric("headstart_engine_handoff_nixl_bytes_total") > before)
        fleet.over_nixl.kill()
        with pytest.raises(httpx.TransportError):
            answer.result(300)
    _eventually(lambda: fleet.prefill.metric("vllm:num_requests_running") == 0)
    fleet.over_nixl.start()
    prompt = _prompt(301)
    before = fleet.prefill.metric("headstart_engine_handoff_nixl_bytes_total")
    there, here = _ask(fleet.over_nixl, prompt, fleet.addresses[1]), _ask(fleet.alone, prompt)
    assert there["choices"][0]["text"] == here["choices"][0]["text"]
    assert fleet.prefill.metric("headstart_engine_handoff_nixl_bytes_total") == before + 640 * 46_080
    assert fleet.over_nixl.metric("headstart_engine_handoff_lost_total") == 0


def test_the_computing_worker_is_killed_in_the_middle(fleet: Fleet) -> None:
    prompt = _prompt(100)
    wanted = _ask(fleet.alone, prompt)
    with ThreadPoolExecutor(1) as pool:
        answer = _begun(fleet, prompt, pool)
        fleet.prefill.kill()
        told = answer.result(300)
    assert told["choices"][0]["text"] == wanted["choices"][0]["text"]
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert fleet.decode.metric("headstart_engine_handoff_lost_total") == 1
    assert fleet.decode.metric("headstart_engine_handoff_tokens_total") < 5 * 640
    # Nobody is there: computed here, and again apart as soon as it is back, on the same path.
    prompt = _prompt(101)
    assert _ask(fleet.decode, prompt, fleet.addresses[0])["choices"] is not None
    assert fleet.decode.metric("headstart_engine_handoff_lost_total") == 2
    fleet.prefill.start()
    fleet.addresses = _addresses(fleet.prefill)
    prompt = _prompt(102)
    there, here = _ask(fleet.decode, prompt, fleet.addresses[0]), _ask(fleet.alone, prompt)
    assert there["choices"][0]["text"] == here["choices"][0]["text"]
    assert fleet.decode.metric("headstart_engine_handoff_lost_total") == 2


def test_the_decoding_worker_is_killed_in_the_middle(fleet: Fleet) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = _begun(fleet, _prompt(200), pool)
        fleet.decode.kill()
        with pytest.raises(httpx.TransportError):
            answer.result(300)
    _eventually(lambda: fleet.prefill.metric("vllm:num_requests_running") == 0)
    fleet.decode.start()
    prompt = _prompt(201)
    there, here = _ask(fleet.decode, prompt, fleet.addresses[1]), _ask(fleet.alone, prompt)
    assert there["choices"][0]["text"] == here["choices"][0]["text"]
