"""The real vLLM as a process group of its own, asked over HTTP. For benchmarks and for tests/vllm."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
READY_S = 900.0  # a bound, for a busy machine
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "2",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "vllm")]),
}


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    first_token_s: float
    seconds: float


class Server:
    """A running vLLM; `process` leads its group."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.client = httpx.Client(base_url=url, timeout=300.0, limits=httpx.Limits(max_connections=64))

    def ask(self, prompt: Sequence[int], *, tokens: int = 8, **more: Any) -> Answer:
        """Ask greedily, as a stream; return what came and when the first token did."""
        began = time.perf_counter()
        first: float | None = None
        found: list[int] = []
        logprobs: list[float] = []
        with self.client.stream("POST", "/v1/completions", json=self.request(prompt, tokens=tokens, **more)) as response:
            if response.status_code != 200:
                raise AssertionError(response.read().decode())
            for event in _events(response):
                if "choices" not in event:
                    raise AssertionError(f"vLLM ends the stream with {event}; its log is {self.log}")
                choice = event["choices"][0]
                if choice.get("token_ids"):
                    first = first or time.perf_counter()
                    found += choice["token_ids"]
                    logprobs += choice["logprobs"]["token_logprobs"]
        now = time.perf_counter()
        return Answer(tuple(found), tuple(logprobs), (first or now) - began, now - began)

    def request(self, prompt: Sequence[int], *, tokens: int = 8, **more: Any) -> dict[str, Any]:
        return {
            "model": "it",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "stream": True,
            "return_token_ids": True,
            **more,
        }

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        response = self.client.post("/reset_prefix_cache")
        assert response.status_code == 200, response.text

    def metric(self, name: str) -> float:
        """Return a counter of /metrics, summed over labels."""
        text = self.client.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:_total)?(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def wait_for(self, name: str, at_least: float, *, timeout_s: float = 60.0) -> float:
        """Return a counter once it has come so far. It is told with steps, so something small is asked meanwhile."""
        deadline = time.monotonic() + timeout_s
        while (value := self.metric(name)) < at_least:
            assert time.monotonic() < deadline, f"{name} is {value}, not {at_least}; {self.tail()}"
            self.ask([7, 8, 9], tokens=2)
        return value

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End the whole group at once, as a crash of the machine would."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.client.close()


def group_cpu_s(group: int) -> float:
    """Return CPU seconds that the living processes of a group have used, and those that they have waited for."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """Return CPU seconds that the machine's cores have not been idle, with those that a host below took from them."""
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(
    model: Path,
    *,
    log: Path,
    transfer: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    port: int | None = None,
) -> Iterator[Server]:
    """Start vLLM on `port`, or a free one, and wait until it answers; kill it at the end. `python`: of the environment that it
    is in."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "it"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    command += ["--max-model-len", "2048", "--max-num-batched-tokens", "512", *arguments]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + READY_S
        while True:
            assert process.poll() is None, f"vLLM ended with {process.returncode}:\n{server.tail()}"
            assert time.monotonic() < deadline, f"vLLM is not ready:\n{server.tail()}"
            with suppress(httpx.TransportError):
                if server.client.get("/health").status_code == 200:
                    break
            time.sleep(0.2)
        yield server
    finally:
        server.kill()


def connector(
    directory: Path, *, module: str = "headstart.connect.vllm", name: str = "HeadstartConnector", **extra: Any
) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cache.directory": str(directory),
            "cache.capacity": "2GiB",
            "cache.min_free": "0",
            **extra,
        },
    }


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])
