"""A worker's stream on its way to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headstart.api.dialects.base import KEEPALIVE, Shape
from headstart.api.errors import ReaderTooSlow
from headstart.api.plumbing import WhileThere
from headstart.errors import RequestError
from headstart.gateway.forward import Flight
from headstart.gateway.sending import Refused, Said

log = logging.getLogger("headstart")
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


class Passing:
    """The stream of a worker, as an ASGI application. Nothing is said before there is something; what fails before that is
    answered or raised as if there were no stream. A client that takes nothing for `stall_s` is cut; who goes away ends the
    request at the worker. `shape`: makes the form of what the router itself has to say; `quiet_s`: after which it says that it
    is still there; `on_end`: called once it has ended, however it did."""

    def __init__(
        self, flight: Flight, shape: Callable[[], Shape], *, quiet_s: float, stall_s: float, on_end: Callable[[], None]
    ) -> None:
        self._flight = flight
        self._shape = shape
        self._events = flight.stream(quiet_s)
        self._stall_s = stall_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        account = self._flight.account
        refused: Said | None = None
        try:
            async with WhileThere(receive):
                refused = await self._pass(scope, send)
        except _Stalled:
            account.status = ReaderTooSlow.status
            log.info("a stream ended: its client took nothing for %g s", self._stall_s)
        finally:
            await self._events.aclose()
            if not account.closed:
                account.left()
            self._flight.order.let_go()
            self._on_end()
        if refused is not None:
            await as_said(refused)(scope, receive, send)

    async def _pass(self, scope: Scope, send: Send) -> Said | None:
        """Pass on what comes until it ends. Return what a worker refused the request with before anything was said; raises
        RequestError for what else went wrong before."""
        began = False
        try:
            async for event in self._events:
                if not began:
                    began = True
                    scope["headstart.meaningless"] = KEEPALIVE  # for who may write into the stream
                    await self._send(send, {"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await self._say(send, self._shape().quiet() if event is None else event)
        except Refused as refusal:
            if not began:
                return refusal.said
            await self._say(send, b"".join(self._shape().failure(_told_of(refusal.said))))
        except RequestError as error:
            if not began:
                raise
            await self._say(send, b"".join(self._shape().failure(error)))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        return None

    async def _say(self, send: Send, data: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await send(message)
        except TimeoutError as error:
            raise _Stalled from error


class _Stalled(Exception):
    """The client does not read."""


def as_said(said: Said) -> Response:
    """Return a worker's whole answer as ours."""
    return Response(said.content, said.status, dict(said.headers))


def _told_of(said: Said) -> RequestError:
    """Return a worker's refusal as an error of ours."""
    try:
        error = msgspec.json.decode(said.content)["error"]
        message, code = str(error["message"]), error.get("code")
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError):
        message, code = f"a worker answered {said.status}", None
    refusal = RequestError(message, code=code if isinstance(code, str) else "refused")
    refusal.status = said.status
    return refusal
