"""What the router adds to a first token, beside rendering and tokenising: 64 workers, a million indexed blocks, 32k tokens.

The workers are fakes in one process that answer at once; the router is a process of its own. The same prompt goes to a fake
directly and through the router, in turns, streamed. Of the difference what rendering and tokenising took, as the router itself
counts it, is taken off: what is left is reading the body, keys, the choice, sending, and passing the first token on.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import resource
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from benchmarks.harness import benchmark_home, where_it_ran

WORDS = (
    "cache",
    "prefix",
    "token",
    "block",
    "worker",
    "router",
    "answer",
    "prompt",
    "memory",
    "disk",
    "reads",
    "writes",
    "of",
    "the",
)
_CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"fake",'
    b'"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
)
_END = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"fake","choices":[],"usage":{"prompt_tokens":1,'
    b'"completion_tokens":1,"total_tokens":2}}\n\ndata: [DONE]\n\n'
)


def run(*, smoke: bool = False, model: str = "smollm2-135m") -> dict[str, Any]:
    """Return milliseconds that the router adds, by length of the prompt."""
    workers, blocks, rounds = (4, 10_000, 3) if smoke else (64, 1_000_000, 60)
    lengths = (512,) if smoke else (512, 8192, 32768)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    fakes = context.Process(target=_fakes, args=(workers, theirs), daemon=True)
    fakes.start()
    urls = ours.recv()
    route = context.Process(target=_route, args=(urls, blocks, model, theirs), daemon=True)
    route.start()
    try:
        url = ours.recv()
        rows = [_measured(url, urls[0], tokens, rounds) for tokens in lengths]
        with httpx.Client(trust_env=False) as client:
            text = client.get(f"{url}/metrics").text
        ours.send("end")
        memory_mb = ours.recv()
    finally:
        for process in (route, fakes):
            process.terminate()
            process.join(30)
    return {
        "where": where_it_ran(benchmark_home()),
        "workers": workers,
        "blocks": int(_value(text, "headstart_router_blocks")),
        "memory_mb": memory_mb,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        f"{result['workers']} workers, {result['blocks']:,} indexed blocks; milliseconds, medians (90 % in brackets). The "
        f"router had at most {result['memory_mb']:,.0f} MB.",
        "",
        "| tokens of the prompt | direct | through the router | of it rendering and tokenising | added |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(
            f"| {row['tokens']:,} | {row['direct_ms']:.2f} | {row['routed_ms']:.2f} | {row['rendered_ms']:.2f} "
            f"| **{row['added_ms']:.2f}** [{row['added_p90_ms']:.2f}] |"
        )
    return "\n".join(lines)


def _measured(url: str, direct: str, tokens: int, rounds: int) -> dict[str, float]:
    draw = random.Random(tokens)
    directs, routeds, rendereds, addeds = [], [], [], []
    with httpx.Client(trust_env=False, timeout=120) as client:
        for number in range(rounds + 5):
            text = " ".join([str(number), *draw.choices(WORDS, k=tokens)])
            body = msgspec.json.encode({"model": "fake", "stream": True, "messages": [{"role": "user", "content": text}]})
            alone_s = _first_token_s(client, direct, body)
            before = _value(client.get(f"{url}/metrics").text, "headstart_router_tokenise_seconds_sum")
            routed_s = _first_token_s(client, url, body)
            rendered_s = _value(client.get(f"{url}/metrics").text, "headstart_router_tokenise_seconds_sum") - before
            if number >= 5:
                directs.append(1000 * alone_s)
                routeds.append(1000 * routed_s)
                rendereds.append(1000 * rendered_s)
                addeds.append(1000 * (routed_s - alone_s - rendered_s))
    return {
        "tokens": tokens,
        "direct_ms": statistics.median(directs),
        "routed_ms": statistics.median(routeds),
        "rendered_ms": statistics.median(rendereds),
        "added_ms": statistics.median(addeds),
        "added_p90_ms": sorted(addeds)[len(addeds) * 9 // 10],
    }


def _first_token_s(client: httpx.Client, url: str, body: bytes) -> float:
    begun_s = time.perf_counter()
    with client.stream(
        "POST", f"{url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    ) as answer:
        first_s = None
        for part in answer.iter_raw():
            if first_s is None and b'"x"' in part:
                first_s = time.perf_counter() - begun_s
    assert first_s is not None
    return first_s


def _value(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


def _fakes(count: int, told: Connection) -> None:
    """Serve on so many ports what looks like servers of ours that answer at once."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
                await reader.readexactly(size)
                if head.startswith(b"GET"):
                    content = msgspec.json.encode(_state(port))
                    writer.write(
                        b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
                    )
                    writer.write(content)
                else:
                    whole = _CHUNK + _END
                    writer.write(
                        b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(whole)
                    )
                    writer.write(whole)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def serve() -> None:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for one in listeners:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        servers = []
        for one in listeners:
            port = one.getsockname()[1]
            servers.append(await asyncio.start_server(lambda r, w, port=port: answer(r, w, port), sock=one))
        told.send([f"http://127.0.0.1:{one.getsockname()[1]}" for one in listeners])
        await asyncio.gather(*(server.serve_forever() for server in servers))

    asyncio.run(serve())


def _state(port: int) -> dict[str, Any]:
    speeds = {"prefill": [1e-4, 1e-9], "step": [1e-2, 1e-4, 1e-8], "chunk_tokens": 1024, "disk": [1e-5, 1e-3]}
    return {
        "object": "headstart.worker",
        "instance": str(port),
        "status": "ok",
        "models": ["fake"],
        "kv": {"token_bytes": 1 << 16, "capacity_tokens": 400_000, "used_tokens": 0},
        "speeds": speeds,
        "roots": {"fake": "00" * 32},
        "tiers": ["memory", "disk"],
    }


def _route(urls: list[str], blocks: int, model: str, told: Connection) -> None:
    """Run the router with a full index."""
    import uvicorn

    from headstart.api.connections import connection_type
    from headstart.engine.models import resolve_tokenizer
    from headstart.gateway.app import build_app
    from headstart.gateway.fleet import Fleet
    from headstart.gateway.prompts import Prompts
    from headstart.gateway.router import Router
    from headstart.gateway.worker import Address
    from headstart.render import Renderer

    async def serve() -> None:
        fleet = Fleet(max_workers=64, blocks=blocks + blocks // 20, poll_s=1.0, dead_after_s=10.0)
        renderer = Renderer.load(resolve_tokenizer(model, Path(_models()), on_progress=lambda *_: None), light=True)
        renderer.warm_up()
        router = Router(fleet, Prompts(fleet.connections, renderer=renderer))
        for url in urls:
            fleet.add(Address.parse(url))
        while len(fleet.able("fake")) < len(urls):
            await asyncio.sleep(0.05)
        draw = np.random.default_rng(0)
        for number, worker in enumerate([*fleet.workers] * 16):
            share = blocks // (16 * len(urls)) + (number == 0)
            fleet.routing.stored(worker, draw.integers(1, 1 << 63, share).astype(np.uint64), number % 2)
        listener = socket.create_server(("127.0.0.1", 0))
        settings = uvicorn.Config(
            build_app(router, host="127.0.0.1"), http=connection_type(), ws="none", log_config=None, lifespan="off"
        )
        server = uvicorn.Server(settings)
        told.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.to_thread(told.recv)
        told.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        server.should_exit = True
        await serving
        await router.close()

    asyncio.run(serve())


def _models() -> str:
    from headstart.config import load_config

    return str(load_config().models_directory)
