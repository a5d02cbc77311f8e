"""The HTTP application: routes, bodies, request ids, errors. `service` makes answers, `dialects` say how they are written."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart import __version__
from headstart.api import metrics, streaming
from headstart.api.access import HostCheck, require_json
from headstart.api.dialects import chat, completions
from headstart.api.dialects.base import About, Dialect, Shape
from headstart.api.errors import BodyTooLarge, error_response, plain_response
from headstart.api.generation import Generation
from headstart.api.pieces import Piece, joined
from headstart.api.service import Service
from headstart.errors import HeadstartError, RequestError

log = logging.getLogger("headstart")
T = TypeVar("T")

BODY_BYTES = 32 << 20
INLINE_BYTES = 64 << 10  # parsed on the loop, in well under a millisecond


def build_app(service: Service, *, host: str) -> ASGIApp:
    """Return the application that serves what `service` has, now and as it changes. `host`: the address it listens on."""

    async def health(request: Request) -> Response:
        status, content = service.health()
        return _json(content, status, {"retry-after": "2"} if status == 503 else None)

    async def version(request: Request) -> Response:
        return _json({"version": __version__})

    async def scrape(request: Request) -> Response:
        text = await asyncio.to_thread(service.metrics.exposition)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def models(request: Request) -> Response:
        names = service.require_served().names
        return _json({"object": "list", "data": [service.model_object(name) for name in names]})

    async def model(request: Request) -> Response:
        return _json(service.model_object(request.path_params["name"]))

    def answering(dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        return partial(answer, dialect)

    async def answer(dialect: Dialect, request: Request) -> Response:
        require_json(request.headers)
        served = service.require_served()
        with service.holding_body() as more:
            body = await _body(request, more)
            # A large body would hold up everybody's streams for as long as it takes to read what stands in it.
            on_loop = len(body) <= INLINE_BYTES
            ask = (
                dialect.parse(body, request.headers)
                if on_loop
                else await service.off_loop(dialect.parse, body, request.headers)
            )
            del body
            generation = await service.start(ask)
        shape = dialect.shape(ask, About(generation.id, int(time.time()), served.adapter_of(ask.model) or served.name))
        headers = {"x-headstart-canonical": ", ".join(sorted(generation.acted))} if generation.acted else {}
        if ask.stream:
            return _EventStream(generation, shape, headers)
        with generation:
            answers = await _unless_gone(request, _whole(generation))
        if answers is None:
            return Response(status_code=499)  # nobody reads it; the log line says "abort"
        return _json(shape.whole(answers, generation.usage()), headers=headers)

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/version", version),
            Route("/metrics", scrape),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", answering(chat), methods=["POST"]),
            Route("/v1/completions", answering(completions), methods=["POST"]),
        ],
        exception_handlers={HeadstartError: _on_error, HTTPException: _on_http_error, Exception: _on_bug},
    )
    return _RequestId(HostCheck(app, host=host))  # the id outside of everything, so that the answer to a bug has its id too


async def _body(request: Request, more: Callable[[int], None]) -> bytes:
    """Return the body, each piece announced to `more`. Raises BodyTooLarge as soon as it is known to be, without the rest."""
    told = request.headers.get("content-length", "")
    size = int(told) if told.isdecimal() else 0
    chunks: list[bytes] = []
    if size <= BODY_BYTES:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > BODY_BYTES:
                break
            more(len(chunk))
            chunks.append(chunk)
    if size > BODY_BYTES:
        raise BodyTooLarge(f"the body is larger than {BODY_BYTES >> 20} MiB", code="request_too_large")
    return b"".join(chunks)


async def _whole(generation: Generation) -> list[Piece]:
    """Return each answer in one piece."""
    pieces = [piece async for piece in generation.pieces() if piece is not None]
    return [joined([piece for piece in pieces if piece.index == answer.index]) for answer in generation.answers]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns, or None, with the work cancelled, when the client goes away first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        leaving.cancel()


class _EventStream(StreamingResponse):
    """A stream that ends its request in the engine however it ends itself, begun or not."""

    def __init__(self, generation: Generation, shape: Shape, headers: dict[str, str]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(streaming.events(generation, shape), media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            await super().__call__(scope, receive, send)


class _RequestId:
    """Give every answer an x-request-id: the client's own if it is short and plain, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if re.fullmatch(rb"[\w.:-]{1,128}", given) else f"req_{uuid.uuid4().hex}".encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadstartError)
    if not isinstance(error, RequestError):  # not the client's doing, and it may name folders of this machine
        log.error("a request failed: %s", error.message, exc_info=error)
        return await _on_bug(request, error)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    there = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
    said = {
        404: f"there is no {request.url.path} here; there are {there}",
        405: f"{request.method} does not go with {request.url.path}",
    }
    headers = dict(error.headers) if error.headers else None
    return plain_response(error.status_code, said.get(error.status_code, error.detail), headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    """The error itself is for the log; of a bug the server writes the traceback there."""
    return plain_response(500, "the server failed on this request; its log has the details")


def _json(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
