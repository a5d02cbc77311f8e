"""A `headstart serve` of our own in another process: started, awaited, asked, killed. For the demo, benchmarks and tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from headstart.errors import HeadstartError


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer as a client saw it. Times in seconds from sending the request."""

    id: str
    text: str
    first_token_s: float
    total_s: float
    usage: dict[str, Any]


class ServerProcess:
    """`with ServerProcess(["smollm2-135m", …]) as server:` runs `headstart serve … --port 0` until the block ends.

    The port is the operating system's choice. `log` receives the server's output and is quoted when it fails to start.
    """

    def __init__(self, arguments: Sequence[str], *, log: Path, ready_timeout_s: float = 600.0) -> None:
        self._arguments = [sys.executable, "-m", "headstart.cli", "serve", *arguments, "--port", "0", "--usage-keep", "0"]
        self._log = log
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        import httpx

        # One client, made before anything is timed: making one reads certificates for longer than a small request takes.
        self._client = httpx.Client(timeout=900.0, trust_env=False)
        self.url = ""

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self._client.close()

    def start(self, *, on_progress: Callable[[str], None] = lambda stage: None) -> None:
        """Start and return once /health says ok. Raises HeadstartError with the end of the log when it does not."""
        offset = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            # In a session of its own: Ctrl-C is for whoever started it, which then ends it.
            self._process = subprocess.Popen(
                self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if not self.url:
                self.url = self._announced_url(offset)
            if self.url and self._healthy(on_progress):
                return
            time.sleep(0.05)
        code = self._process.poll()
        self.stop()
        tail = self._log.read_text(errors="replace")[-2000:]
        raise HeadstartError(f"the server did not become ready (exit code {code}); the end of its log, {self._log}:\n{tail}")

    def _announced_url(self, offset: int) -> str:
        """The first "http://host:port" in the log since this start; the server prints it before it loads the model."""
        with self._log.open("rb") as log:
            log.seek(offset)
            for word in log.read().decode(errors="replace").split():
                if word.startswith("http://"):
                    return word.rstrip(".,;)")
        return ""

    def _healthy(self, on_progress: Callable[[str], None]) -> bool:
        import httpx

        try:
            health = self._client.get(f"{self.url}/health", timeout=5.0)
        except httpx.TransportError:
            return False
        if health.status_code != 200:
            on_progress(str(health.json().get("stage", "")))
        return health.status_code == 200

    def kill(self) -> None:
        """SIGKILL: no goodbye, nothing flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after half a minute. Twice is fine."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process, self.url = self._process, None, ""
        if process is None or process.poll() is not None:
            return
        process.send_signal(how)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=30)

    def ask(
        self, messages: Sequence[dict[str, str]], *, max_tokens: int, on_text: Callable[[str], None] | None = None
    ) -> Answer:
        """Send one chat request, greedy, streaming, and time its first token."""
        body = {
            "model": "demo",
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        id = ""
        text: list[str] = []
        usage: dict[str, Any] = {}
        first: float | None = None
        start = time.perf_counter()
        with self._client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise HeadstartError(f"the server answered {response.status_code}: {response.text[:500]}")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise HeadstartError(f"the server ended the answer: {event['error'].get('message')}")
                id = event["id"]
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece:
                        first = first or time.perf_counter() - start
                        text.append(piece)
                        if on_text:
                            on_text(piece)
        total = time.perf_counter() - start
        return Answer(id, "".join(text), first if first is not None else total, total, usage)

    def receipt(self, answer: Answer) -> dict[str, Any]:
        """Return what the server says of an answer that it gave a while ago."""
        told: dict[str, Any] = self._client.get(f"{self.url}/v1/headstart/requests/{answer.id}", timeout=30.0).json()
        return told

    def metric(self, name: str, *, tier: str | None = None) -> float:
        """Sum of all samples of one series in /metrics, or of those of one tier; 0 when it is not there."""
        total = 0.0
        for line in self._client.get(f"{self.url}/metrics", timeout=30.0).text.splitlines():
            series = line.split("{", 1)[0].split(" ", 1)[0]
            if series == name and (tier is None or f'tier="{tier}"' in line):
                total += float(line.rsplit(" ", 1)[1])
        return total
