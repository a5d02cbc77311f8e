"""`headstart serve` as a process, a tiny random model in it and a cache directory under it: killed, restarted, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

PROMPT = [{"role": "system", "content": "What is the same in every request stands first. " * 30}]


class Child:
    """A `headstart serve` whose output lies in `log`."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.log = folder / "serve.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADSTART_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "headstart.cli", "serve", *arguments, "--port", "0"),
                    *("--models-directory", str(folder), "--usage-log", str(folder / "usage")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | {"OMP_NUM_THREADS": "1"},
            )
        self.url = ""

    def until_listening(self) -> Child:
        self._until(lambda: "listening on http://" in self.text)
        self.url = self.text.split("listening on ")[1].split(",")[0]
        return self

    def until_ready(self) -> Child:
        self.until_listening()
        self._until(lambda: httpx.get(f"{self.url}/health", timeout=30).status_code == 200)
        return self

    def until_saved(self) -> None:
        self._until(lambda: self.metric("headstart_saves_pending") == 0)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.text
            if condition():
                return
            time.sleep(0.05)
        raise AssertionError(self.text)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(90)  # a bound for a busy machine, no expectation


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Child]:
    child = Child(folder, arguments)
    try:
        yield child
    finally:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait(30)


def ask(client: openai.OpenAI, question: str, **more: Any) -> dict[str, Any]:
    messages: list[Any] = [*PROMPT, {"role": "user", "content": question}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0, **more)
    assert answer.usage is not None
    usage = answer.usage.model_dump()
    assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
    return usage | {"text": answer.choices[0].message.content, "cached": usage["prompt_tokens_details"]["cached_tokens"]}


@pytest.fixture
def tiny(tiny_model_folder: Callable[..., Path]) -> str:
    return str(tiny_model_folder("llama"))


def test_a_prefix_is_found_again_by_the_server_after_a_kill(tiny: str, tmp_path: Path) -> None:
    cache = ("--cache-directory", str(tmp_path / "kv"), "--cache-capacity", "256MiB", "--cache-memory", "32MiB")
    with serving(tmp_path, tiny, *cache) as first:
        first.until_ready()
        with first.client() as client:
            cold = ask(client, "first question")
            assert cold["cached"] == 0
        first.until_saved()
        first.end(signal.SIGKILL)
    with serving(tmp_path, tiny, *cache) as second:
        second.until_ready()
        with second.client() as client:
            warm = ask(client, "first question")
            assert warm["cached"] == cold["prompt_tokens"] // 64 * 64
            assert warm["prompt_tokens_details"]["cached_disk_tokens"] == warm["cached"]
            assert warm["text"] == cold["text"]
            assert second.metric("vllm:external_prefix_cache_hits_total") == warm["cached"]
            assert second.metric("headstart_load_bytes_read_total") > 0
        assert f"cached 0 from memory and {warm['cached']} from disk" in second.text


def test_a_server_that_is_told_to_stop_ends_running_requests_and_exits_with_0(tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny, "--cache-directory", str(tmp_path / "kv"), "--cache-capacity", "64MiB") as server:
        server.until_ready()
        body = {"prompt": "tell", "max_tokens": 300, "temperature": 1, "seed": 1, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.text
        assert server.text.rstrip().endswith("stopped")


def test_a_second_interrupt_cuts_a_streamed_answer_without_a_trace_in_the_log(tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny, "--no-cache", "--context", "4000") as server:
        server.until_ready()
        body = {"prompt": "tell", "max_tokens": 3900, "temperature": 0, "stream": True}
        with (
            suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            server._until(lambda: "1 request still runs, it has 10 seconds" in server.text)
            server.process.send_signal(signal.SIGINT)
            assert "data: [DONE]" not in list(lines)
        assert server.process.wait(60) == 130
        assert "Traceback" not in server.text
        assert "Exception in ASGI" not in server.text


def test_stopping_while_the_model_loads_exits_with_0(tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny, "--no-cache") as server:
        server.until_listening()
        assert server.end(signal.SIGTERM) == 0
        assert "Traceback" not in server.text


def test_an_unknown_model_ends_serve_with_a_sentence_and_its_code(tmp_path: Path) -> None:
    with serving(tmp_path, "smollm") as server:
        assert server.process.wait(60) == 3
        assert "headstart: unknown model 'smollm'" in server.text
        assert "Traceback" not in server.text
