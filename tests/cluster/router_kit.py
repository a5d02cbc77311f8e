"""Real processes: workers on ports that stay theirs, so that one that was killed comes back under its address, and a router."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

READY_S = 300.0  # a bound, for a busy machine


def free_port(*, pairs: bool = False) -> int:
    """Return a port that is free now; with `pairs` the one behind it is, too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                if pairs:
                    other.bind(("127.0.0.1", port + 1))
                return port
            except OSError:
                continue


def eventually(true: Callable[[], bool], what: str, *, within_s: float = READY_S) -> None:
    ends = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < ends, f"it did not come to pass: {what}"
        time.sleep(0.05)


class Process:
    """`headstart` with these words, its output in `log`. `start` again after `kill`: the same once more."""

    def __init__(self, words: Sequence[str], log: Path, port: int) -> None:
        self.words = [sys.executable, "-m", "headstart.cli", *words, "--port", str(port)]
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(60)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


class Cluster:
    """So many workers of one model, and a router in front, or several that do not know of each other."""

    def __init__(
        self,
        model: Path,
        place: Path,
        workers: int,
        *,
        words: Sequence[str] = (),
        route: Sequence[str] = (),
        routers: int = 1,
    ) -> None:
        self.workers = []
        for number in range(workers):
            own = ["serve", str(model), "--cache-directory", str(place / f"kv-{number}"), "--cache-capacity", "512MiB"]
            own += ["--cache-min-free", "0", "--usage-keep", "0", "--models-directory", str(place), *words]
            own += ["--cache-kv-events", f"tcp://127.0.0.1:{free_port(pairs=True)}"]
            self.workers.append(Process(own, place / f"worker-{number}.log", free_port()))
        named = [word for worker in self.workers for word in ("--worker", worker.url)]
        own = ["route", *named, "--tokenizer", str(model), "--usage-keep", "0", "--poll-s", "0.2", *route]
        self.routers = [Process(own, place / f"router-{number}.log", free_port()) for number in range(routers)]
        self.router = self.routers[0]
        self.client = httpx.Client(timeout=READY_S, trust_env=False)

    def __enter__(self) -> Cluster:
        try:
            for one in (*self.workers, *self.routers):
                one.start()
            for router in self.routers:
                eventually(lambda router=router: self.ready(router) == len(self.workers), "every worker is ready")  # type: ignore[misc]
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for one in (*self.routers, *self.workers):
            one.kill()
        self.client.close()
        if error is not None:
            for one in (*self.routers, *self.workers):
                print(one.log.name, one.said(), file=sys.stderr)

    def told(self, router: Process | None = None) -> dict[str, dict[str, Any]]:
        try:
            answer = self.client.get(f"{(router or self.router).url}/router/workers")
        except httpx.TransportError:
            return {}
        return {one["url"]: one for one in answer.json()["workers"]}

    def state(self, worker: Process) -> str:
        return str(self.told().get(worker.url, {}).get("state"))

    def ready(self, router: Process | None = None) -> int:
        return sum(one["state"] == "ready" for one in self.told(router).values())


def question(number: int, words: int = 60) -> list[dict[str, str]]:
    system = "You answer in few words, and what stands here is the same for everybody. " * (words // 12)
    return [{"role": "system", "content": system}, {"role": "user", "content": f"Say something about the number {number}."}]


def whole(url: str, number: int, tokens: int) -> str:
    """Return an answer that came in one piece."""
    body = {"messages": question(number), "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=READY_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(url: str, number: int, tokens: int) -> tuple[str, dict[str, Any] | None]:
    """Return an answer as far as it came, and the error that ended it, if one did."""
    import json

    body = {"messages": question(number), "max_tokens": tokens, "temperature": 0, "stream": True}
    text, last = [], ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=READY_S, trust_env=False) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                last = line[6:]
                if last == "[DONE]":
                    break
                content = json.loads(last)
                if "error" in content:
                    return "".join(text), content["error"]
                text += [choice["delta"].get("content") or "" for choice in content["choices"]]
    assert last == "[DONE]", f"a stream without an end: {last}"
    return "".join(text), None


class Clients:
    """So many at once, each asking again and again until told to stop; what they heard is held against `right`."""

    def __init__(self, url: str, right: Sequence[str], tokens: int, count: int) -> None:
        self.answered = self.lost = 0
        self.wrong: list[str] = []
        self._url = url
        self._right = right
        self._tokens = tokens
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Return when every request has ended."""
        self._ending.set()
        for thread in self._threads:
            thread.join(READY_S)
            assert not thread.is_alive(), "a request did not end"

    def _ask(self, number: int) -> None:
        turn = number
        while not self._ending.is_set():
            turn += 1
            which = turn % len(self._right)
            try:
                if (turn + number) % 2:
                    text, error = whole(self._url, which, self._tokens), None
                else:
                    text, error = streamed(self._url, which, self._tokens)
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is told
                with self._lock:
                    self.wrong.append(repr(failure))
                return
            with self._lock:
                self.answered += error is None
                self.lost += error is not None
                good = text == self._right[which] if error is None else self._right[which].startswith(text)
                if not good or (error is not None and error.get("code") != "worker_lost"):
                    self.wrong.append(f"{which}: {text!r} for {self._right[which]!r}, {error}")


def killed_in_turn(cluster: Cluster, clients: Clients, *, every_s: float, times: int) -> None:
    """Kill one worker after another and start it again, which counts as done when the router says that it is ready."""
    for turn in range(times):
        worker = cluster.workers[turn % len(cluster.workers)]
        before, begun_s = clients.answered, time.monotonic()
        eventually(lambda before=before: clients.answered > before + 4 or bool(clients.wrong), "answers go on")  # type: ignore[misc]
        worker.kill()
        eventually(lambda worker=worker: cluster.state(worker) == "down", "its end is seen")  # type: ignore[misc]
        worker.start()
        eventually(lambda worker=worker: cluster.state(worker) == "ready", "it is taken back")  # type: ignore[misc]
        if (left_s := every_s - (time.monotonic() - begun_s)) > 0:
            time.sleep(left_s)


def environment() -> None:
    """One thread for each process: several of them share a small machine."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
