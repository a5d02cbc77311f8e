"""A router in a thread of this process, on a free port, and workers that are servers of ours in other threads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import anthropic
import httpx
import openai
import uvicorn

from api.serving import listening
from asking import eventually
from headstart.api.accounts import Accounts
from headstart.api.connections import connection_type
from headstart.api.service import Service
from headstart.cli.opening import open_model
from headstart.config import load_config
from headstart.gateway.app import build_app
from headstart.gateway.fleet import Fleet
from headstart.gateway.prompts import Prompts
from headstart.gateway.router import Router
from headstart.gateway.worker import Address
from headstart.render import Renderer
from headstart.tier.base import Tier

T = TypeVar("T")


class Routed:
    """A router that runs. `on_loop` runs something where its things live."""

    def __init__(self, url: str, router: Router, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.router = router
        self._loop = loop
        self.http = httpx.Client(base_url=url, timeout=120, verify=False, trust_env=False)

    def on_loop(self, what: Callable[[], T]) -> T:
        async def run() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def client(self, *, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=120)

    def get(self, path: str, **more: Any) -> Any:
        return self.http.get(path, **more).raise_for_status().json()

    def workers(self) -> dict[str, dict[str, Any]]:
        return {one["url"]: one for one in self.get("/router/workers")["workers"]}

    def add(self, url: str, **more: str) -> None:
        """Add a worker and wait until it is ready."""
        self.http.post("/router/workers", json={"url": url, **more}).raise_for_status()
        eventually(lambda: self.workers()[url]["state"] == "ready")

    def remove(self, url: str) -> None:
        id = url.removeprefix("http://")
        self.http.delete(f"/router/workers/{id}?now=1").raise_for_status()

    def ready(self) -> int:
        return sum(one["state"] == "ready" for one in self.workers().values())


@contextmanager
def routed(
    urls: Sequence[str],
    *,
    accounts: Accounts | None = None,
    renderer: Renderer | None = None,
    pool: Tier | None = None,
    headers: dict[str, str] | None = None,
    dead_after_s: float = 30.0,
    stuck_after_s: float = 300.0,
    patience_s: float = 60.0,
    blocks: int = 10_000,
    **more: Any,
) -> Iterator[Routed]:
    """Route to `urls`, which `Address.parse` reads, until the block ends."""
    started = threading.Event()
    ends: list[Callable[[], None]] = []
    made: list[Routed] = []
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        fleet = Fleet(
            max_workers=64,
            blocks=blocks,
            poll_s=0.05,
            dead_after_s=dead_after_s,
            stuck_after_s=stuck_after_s,
            headers=headers,
            random=Random(0),
        )
        prompts = Prompts(fleet.connections, renderer=renderer, pool=pool)
        router = Router(fleet, prompts, accounts=accounts, patience_s=patience_s, **more)
        for url in urls:
            fleet.add(Address.parse(url))
        settings = uvicorn.Config(
            build_app(router, host="127.0.0.1"),
            http=connection_type(),
            ws="none",
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(settings)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        ends.append(lambda: setattr(server, "should_exit", True))
        made.append(Routed(f"http://127.0.0.1:{listener.getsockname()[1]}", router, asyncio.get_running_loop()))
        started.set()
        try:
            await server.serve(sockets=[listener])
        finally:
            await router.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="test-router")
    thread.start()
    try:
        assert started.wait(60)
        yield made[0]
    finally:
        if made:
            made[0].http.close()
        ends[0]()
        thread.join(60)
        listener.close()
    assert not thread.is_alive()


@contextmanager
def real_workers(
    folder: Path, place: Path, count: int, *, events: bool = True, settings: Sequence[dict[str, Any]] = ()
) -> Iterator[list[str]]:
    """Run servers of ours with a real engine each, in this process; give their addresses. `settings`: each one's own."""
    with ExitStack() as stack:
        urls = []
        for number in range(count):
            config = load_config(
                overrides={
                    "model": str(folder),
                    "models_directory": place,
                    "cache.directory": place / f"kv-{number}",
                    "cache.capacity": "64MiB",
                    "cache.memory": "8MiB",
                    "cache.min_free": "0",
                    "cache.kv_events": "tcp://127.0.0.1:0" if events else "",
                    "engine.kv_memory": "64MiB",
                }
                | (settings[number] if settings else {})
            )
            model = open_model(config, on_progress=lambda stage, fraction: None)
            stack.callback(model.engine.close)
            service = Service()
            service.ready(model)
            urls.append(stack.enter_context(listening(service)))
        yield urls
