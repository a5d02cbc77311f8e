"""`headstart serve --engine vllm MODEL`: the real vLLM behind our server, in the dialects that clients speak; killed, ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from benchmarks.vllm_server import ENVIRONMENT
from vllm.distributed.kv_events import BlockStored, KVEventBatch

READY_S = 900.0  # a bound, for a busy machine
VLLM = "--enforce-eager --max-num-seqs 8 --max-model-len 2048 --max-num-batched-tokens 512"
SYSTEM = "What is the same in every request stands first. " * 40


def eventually(true: Callable[[], bool], *, timeout_s: float = READY_S, told: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


class Served:
    def __init__(self, model: Path, place: Path) -> None:
        self.log = place / "serve.log"
        with socket.socket() as free:  # and the port behind it is for what was missed
            free.bind(("127.0.0.1", 0))
            self.events = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "headstart.cli", "serve", "--engine", "vllm", str(model), "--port", "0"]
        command += ["--dtype", "float32", "--vllm-arguments", VLLM, "--models-directory", str(place)]
        command += ["--cache-directory", str(place / "kv"), "--cache-capacity", "1GiB", "--cache-min-free", "0"]
        command += ["--cache-kv-events", self.events, "--usage-log", str(place / "usage")]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}
            )
        self.url = ""

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def until(self, true: Callable[[], bool], **more: Any) -> None:
        def still() -> bool:
            assert self.process.poll() is None, self.text
            return true()

        eventually(still, told=lambda: self.text, **more)

    def until_ready(self) -> None:
        self.until(lambda: "listening on http://" in self.log.read_text(errors="replace"))
        self.url = self.log.read_text(errors="replace").split("listening on ")[1].split(",")[0]
        self.until(lambda: httpx.get(f"{self.url}/health", timeout=30).status_code == 200)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"model": "it", **body}, timeout=300)

    def told(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=30).raise_for_status().json()

    def children(self) -> list[int]:
        """Return every process below ours."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(stat.parent.name)] = int(fields[1])
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found - {self.process.pid})

    def vllm(self) -> int:
        """Return the API server's process: what the guard runs."""
        for pid in self.children():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "vllm.entrypoints.openai.api_server" in words and "headstart.engine.vllm.guard" not in words:
                return pid
        raise AssertionError(self.text)


@pytest.fixture(scope="module")
def served(tiny_model_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model_folder("llama", hidden_size=256, head_dim=64, max_position_embeddings=4096)
    served = Served(model, tmp_path_factory.mktemp("served"))
    try:
        served.until_ready()
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()  # which takes vLLM along
        served.process.wait()


@pytest.fixture
def follower(served: Served) -> Iterator[zmq.Socket[bytes]]:
    """What asks for all events that were told, as vLLM's own example of a subscriber does."""
    host, port = served.events.rsplit(":", 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.linger = 0
        replay.connect(f"{host}:{int(port) + 1}")
        yield replay


def chat(served: Served, question: str) -> tuple[dict[str, Any], str]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    answer = served.post("/v1/chat/completions", messages=messages, max_tokens=4, temperature=0).raise_for_status().json()
    return answer, answer["choices"][0]["message"]["content"]


def test_every_dialect_answers_and_receipts_add_up(served: Served) -> None:
    answer, text = chat(served, "first question")
    usage = answer["usage"]
    assert usage["completion_tokens"] == 4
    again, text_again = chat(served, "first question")
    assert text_again == text
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    receipt = served.told(f"/v1/headstart/requests/{again['id']}")
    assert any("from its memory and which from disk" in note for note in receipt["notes"])
    why = served.told(f"/v1/headstart/requests/{again['id']}/why")
    reused = sum(why["reused"].values())
    assert reused == again["usage"]["prompt_tokens_details"]["cached_tokens"]

    messages = [{"role": "user", "content": "second question"}]
    one = served.post("/v1/messages", system=SYSTEM, messages=messages, max_tokens=4, temperature=0).raise_for_status().json()
    assert one["usage"]["output_tokens"] == 4
    two = served.post("/v1/responses", input="third question", max_output_tokens=4, temperature=0).raise_for_status().json()
    assert two["usage"]["output_tokens"] == 4
    three = served.post("/v1/completions", prompt="Gates open in", max_tokens=4, temperature=0).raise_for_status().json()
    assert three["usage"]["completion_tokens"] == 4
    refused = served.post("/v1/chat/completions", messages=messages, response_format={"type": "json_object"})
    assert refused.status_code == 400
    assert "form" in refused.json()["error"]["message"]


def test_vllm_s_own_types_read_our_events(served: Served, follower: zmq.Socket[bytes]) -> None:
    prompt = chat(served, "a question whose prompt is stored")[0]["usage"]["prompt_tokens"]
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    stored: dict[bytes, BlockStored] = {}

    def enough() -> bool:
        follower.send_multipart((b"", (0).to_bytes(8, "big")))
        while follower.poll(5000):
            _, _, number, payload = follower.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                break
            for event in decoder.decode(payload).events:
                if isinstance(event, BlockStored):
                    stored.update(dict.fromkeys(event.block_hashes, event))
        return len(stored) >= prompt // 128 * 2

    served.until(enough, timeout_s=120)
    for event in stored.values():
        assert (event.block_size, event.medium) == (64, "STORAGE")
        assert len(event.token_ids) == 64 * len(event.block_hashes)
        assert event.parent_block_hash is None or event.parent_block_hash in stored


def test_a_vllm_that_is_killed_ends_its_requests_with_a_sentence_and_comes_back_with_what_was_stored(served: Served) -> None:
    before, text = chat(served, "asked before the end")
    assert any((Path(served.log).parent / "kv").iterdir())
    os.kill(served.vllm(), signal.SIGKILL)
    served.until(lambda: httpx.get(f"{served.url}/health", timeout=30).status_code == 503, timeout_s=60)
    told = httpx.get(f"{served.url}/health", timeout=30)
    assert "started again" in told.text
    refused = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "now?"}], max_tokens=1)
    assert refused.status_code >= 500
    assert "vLLM ended" in refused.text
    served.until(lambda: httpx.get(f"{served.url}/health", timeout=30).status_code == 200)
    after, text_after = chat(served, "asked before the end")
    assert text_after == text
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= before["usage"]["prompt_tokens"] // 128 * 128 - 128


def test_sigterm_ends_vllm_too_and_nothing_stays(served: Served) -> None:
    children = served.children()
    assert children
    served.process.send_signal(signal.SIGTERM)
    eventually(lambda: served.process.poll() is not None, timeout_s=120, told=lambda: served.text)
    assert served.process.returncode == 0, served.text
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), timeout_s=60, told=lambda: served.text)
