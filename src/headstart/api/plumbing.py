"""What every HTTP application of ours has: bodies within limits, request ids, clients that leave, errors in their dialect."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.api.accounts import GONE
from headstart.api.errors import BodyTooLarge, BodyTooSlow, TooManyWaiting, error_response, plain_response
from headstart.errors import HeadstartError, RequestError

log = logging.getLogger("headstart")
T = TypeVar("T")

BODY_BYTES = 32 << 20
BODY_S = 60.0  # in which a body must have come
BODIES_BYTES = 128 << 20  # of all bodies together
INLINE_BYTES = 64 << 10  # parsed on the loop, in well under a millisecond


async def read_body(request: Request, more: Callable[[int], None], *, most: int) -> bytes:
    """Return the body, each piece announced to `more`. Raises BodyTooLarge as soon as it is known to have more than `most`
    bytes, without the rest, and BodyTooSlow when it takes too long."""
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(request, more, most)
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not come within {BODY_S:g} s; send it faster", code="request_timeout") from error


async def _read(request: Request, more: Callable[[int], None], most: int) -> bytes:
    told = request.headers.get("content-length", "")
    size = int(told) if told.isdecimal() else 0
    chunks: list[bytes] = []
    if size <= most:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                break
            more(len(chunk))
            chunks.append(chunk)
    if size > most:
        limit = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most} bytes"
        raise BodyTooLarge(f"the body is larger than {limit}", code="request_too_large")
    return b"".join(chunks)


class Bodies:
    """How many bytes of bodies are held at once, at most `most_bytes`: by default those that are being read, parsed or
    tokenised."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self.held_bytes = 0
        self._most_bytes = most_bytes

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of one body while it is held: call what is given with each piece's size.

        It raises TooManyWaiting where all bodies together would be more than may be."""
        mine = 0

        def more(nbytes: int) -> None:
            nonlocal mine
            mine += nbytes
            self.held_bytes += nbytes
            if self.held_bytes > (self._most_bytes or BODIES_BYTES):
                raise TooManyWaiting(
                    "the requests that are being read are too large together; try again in a moment",
                    code="rate_limit_exceeded",
                    retry_after_s=1,
                )

        try:
            yield more
        finally:
            self.held_bytes -= mine


class WhileThere:
    """Lets a block of code run while the client is there: where it goes away first the block is cancelled, and `gone` is true
    behind it.

        async with WhileThere(request.receive) as client:
            …
        if client.gone: …"""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._receive = receive

    async def __aenter__(self) -> WhileThere:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watching = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self._watching.cancel()
        return self.gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()  # which waits inside the block, since this runs


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns, or None, with the work cancelled and ended, when the client goes away first."""
    async with WhileThere(request.receive):
        return await work
    return None


class RequestId:
    """Give every answer an x-request-id: the client's own if it is short and plain, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if re.fullmatch(rb"[\w.:-]{1,128}", given) else f"req_{uuid.uuid4().hex}".encode()

        scope["headstart.request_id"] = request_id.decode()
        anthropic = str(scope["path"]).startswith("/v1/messages")  # whose clients know it by another name

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = [b"x-request-id", *([b"request-id"] if anthropic else [])]
                message["headers"] = [*message["headers"], *((name, request_id) for name in named)]
            await send(message)

        await self._app(scope, receive, send_with_id)


async def on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadstartError)
    if not isinstance(error, RequestError):  # not the client's doing, and it may name folders of this machine
        log.error("a request failed: %s", error.message, exc_info=error)
        return await on_bug(request, error)
    return error_response(error, request.scope)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    there = ", ".join(route.path for route in request.app.routes if "{" not in route.path)
    said = {
        404: f"there is no {request.url.path[:64]} here; there are {there}",
        405: f"{request.method[:16]} does not go with {request.url.path[:64]}",
    }
    headers = dict(error.headers) if error.headers else None
    return plain_response(error.status_code, said.get(error.status_code, error.detail), request.scope, headers)


async def on_gone(request: Request, error: Exception) -> Response:
    """The client went away; nobody reads this, and the log says "abort" where there was something to abort."""
    return Response(status_code=GONE)


async def on_bug(request: Request, error: Exception) -> Response:
    """The error itself is for the log; of a bug the server writes the traceback there."""
    return plain_response(500, "the server failed on this request; its log has the details", request.scope)


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


HANDLERS = {
    HeadstartError: on_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_gone,
    Exception: on_bug,
}
