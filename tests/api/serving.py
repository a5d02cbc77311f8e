"""A real server on a free loopback port in a thread, over the fake engine and a renderer whose tokens are bytes."""

from __future__ import annotations

import asyncio
import codecs
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai
import uvicorn

from headstart.api.app import build_app
from headstart.api.openai import Ask
from headstart.api.service import Served, Service
from headstart.testing.fake_engine import FakeEngine


class ByteText:
    """Bytes to text, with stop texts cut off; a part of a stop text is held back until it is sure."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stopped = False
        self._stop = stop
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        self._held += self._decoder.decode(bytes([token]))
        for stop in self._stop:
            if stop in self._held:
                self.stopped = True
                return self._held.split(stop)[0]
        keep = max((n for stop in self._stop for n in range(len(stop)) if self._held.endswith(stop[:n])), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def finish(self) -> str:
        return "" if self.stopped else self._held


def chat_ids(ask: Ask) -> tuple[int, ...]:
    return tuple("".join(f"<{m['role']}>{m['content']}" for m in ask.messages).encode())


def completion_ids(ask: Ask) -> tuple[int, ...]:
    return tuple(ask.prompt.encode()) if isinstance(ask.prompt, str) else ask.prompt


def served(engine: FakeEngine) -> Served:
    return Served(name="fake", engine=engine, chat=chat_ids, completion=completion_ids, text=ByteText, stop_ids=frozenset({0}))


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    service: Service
    engine: FakeEngine

    def client(self, *, retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=retries, timeout=20)


@contextmanager
def running(engine: FakeEngine, *, ready: bool = True, max_waiting: int = 256, keepalive_s: float = 10.0) -> Iterator[Running]:
    service = Service(max_waiting=max_waiting, keepalive_s=keepalive_s)
    if ready:
        service.ready(served(engine))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build_app(service), log_config=None, lifespan="off", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), name="test-server")
    thread.start()
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service, engine)
    finally:
        engine.gate.set()
        server.should_exit = True
        thread.join(20)
        service.close()
        engine.close()
        listener.close()
    assert not thread.is_alive()
