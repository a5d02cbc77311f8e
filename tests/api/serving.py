"""A real server on a free loopback port in a thread, over the fake engine and a renderer whose tokens are bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, cast

import openai
import uvicorn

from headstart.api.accounts import Accounts
from headstart.api.app import build_app
from headstart.api.connections import HEAD_S, connection_type
from headstart.api.served import Served
from headstart.api.service import Service
from headstart.errors import RequestError
from headstart.render import Renderer, Tokens
from headstart.render.answers import FAMILIES
from headstart.render.generated import Generated
from headstart.render.messages import normal_messages
from headstart.render.special import Special
from headstart.render.stretches import Stretches, Told
from headstart.render.tokenising import Tokeniser
from headstart.testing.fake_engine import FakeEngine


class ByteRenderer:
    """What `render.Renderer` promises, with bytes as tokens and a template of one tag a message."""

    stop_ids = frozenset({0})
    ends = frozenset({"<user>"})
    vocabulary = 256
    begin_id = None
    special_tokens: ClassVar[dict[str, int]] = {"<|end|>": 0}
    template = ""
    response_template = None

    def chat(
        self,
        messages: Sequence[object],
        *,
        tools: Sequence[object] | None = None,
        arguments: Mapping[str, object] | None = None,
        context_tokens: int | None = None,
    ) -> list[int]:
        return self.written(self.write(messages, tools=tools, arguments=arguments))

    def write(
        self,
        messages: Sequence[object],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, object] | None = None,
        join_parts: bool = True,
    ) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in normal_messages(messages, join_parts=join_parts))

    def written(self, text: str, *, context_tokens: int | None = None, owner: str = "") -> list[int]:
        return list(text.encode())

    def told(self, text: str, answers: Iterable[Generated], *, context_tokens: int | None = None, owner: str = "") -> Told:
        def encode(parts: list[str | array[int]]) -> list[Sequence[int]]:
            return [part.encode() if isinstance(part, str) else part for part in parts]

        tokeniser = Tokeniser(lambda texts: [text.encode() for text in texts], Special(()), vocabulary=256)
        return Stretches(tokeniser, self.ends).told(text, answers, encode, owner=owner)

    def completion(self, prompt: str | Sequence[int], *, context_tokens: int | None = None) -> list[int]:
        if isinstance(prompt, str):
            return list(prompt.encode())
        if any(not 0 <= token < self.vocabulary for token in prompt):
            raise RequestError("prompt holds what is no token id", param="prompt")
        return list(prompt)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def tokenise(self, text: str, *, special_tokens: bool) -> Tokens:
        return Tokens(list(text.encode()), [])

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return bytes(tokens).decode("utf-8", "replace")


def served(engine: FakeEngine, *, family: str | None = None) -> Served:
    answers = None if family is None else FAMILIES[family]
    return Served(name="fake", engine=engine, renderer=cast(Renderer, ByteRenderer()), answers=answers)


@dataclass(frozen=True, slots=True)
class Listening:
    url: str
    service: Service

    def client(self, *, retries: int = 0, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=retries, timeout=60)


@dataclass(frozen=True, slots=True)
class Running(Listening):
    engine: FakeEngine


@contextmanager
def listening(
    service: Service, *, host: str = "127.0.0.1", stall_s: float = 30.0, head_s: float = HEAD_S, most: int | None = None
) -> Iterator[str]:
    """Serve `service` and give the address; `host` is what the application believes to listen on."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)  # before the server is there
    config = uvicorn.Config(
        build_app(service, host=host, stall_s=stall_s),
        http=connection_type(head_s=head_s, most=most),
        ws="none",
        log_config=None,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), name="test-server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        service.close()
        listener.close()
    assert not thread.is_alive()


@contextmanager
def running(
    engine: FakeEngine,
    *,
    ready: bool = True,
    max_waiting: int = 256,
    keepalive_s: float = 10.0,
    accounts: Accounts | None = None,
    stall_s: float = 30.0,
    family: str | None = None,
) -> Iterator[Running]:
    service = Service(max_waiting=max_waiting, keepalive_s=keepalive_s, accounts=accounts)
    if ready:
        service.ready(served(engine, family=family))
    with listening(service, stall_s=stall_s) as url:
        try:
            yield Running(url, service, engine)
        finally:
            engine.gate.set()
            engine.close()


@contextmanager
def running_model(model: Served, *, accounts: Accounts | None = None) -> Iterator[Listening]:
    """Serve a real model and close its engine afterwards."""
    service = Service(accounts=accounts)
    service.ready(model)
    try:
        with listening(service) as url:
            yield Listening(url, service)
    finally:
        model.engine.close()
