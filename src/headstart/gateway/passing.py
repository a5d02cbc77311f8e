"""A worker's stream on its way to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from headstart.api.dialects.base import KEEPALIVE, Shape
from headstart.api.errors import ReaderTooSlow
from headstart.errors import RequestError
from headstart.gateway.forward import Flight
from headstart.gateway.sending import Refused, Said

log = logging.getLogger("headstart")


class Passing(StreamingResponse):
    """A stream of a worker. A client that takes nothing for a while is cut; who goes away ends the request at the worker.
    `shape`: makes the form of what the router itself has to say; `on_end`: called once it has ended, however it did."""

    def __init__(
        self,
        flight: Flight,
        events: AsyncGenerator[bytes | None, None],
        first: bytes | None,
        shape: Callable[[], Shape],
        *,
        stall_s: float,
        on_end: Callable[[], None],
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._parts(events, first, shape), media_type="text/event-stream", headers=headers)
        self._stall_s = stall_s
        self._on_end = on_end
        self._flight = flight
        self._events = events

    async def _parts(
        self, events: AsyncGenerator[bytes | None, None], first: bytes | None, shape: Callable[[], Shape]
    ) -> AsyncIterator[bytes]:
        yield shape().quiet() if first is None else first
        try:
            async for event in events:
                yield shape().quiet() if event is None else event
        except Refused as refused:  # after keep-alives went out it can only be told as an event
            yield b"".join(shape().failure(_told_of(refused.said)))
        except RequestError as error:
            yield b"".join(shape().failure(error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stall_s = self._stall_s

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(stall_s):
                    await send(message)
            except TimeoutError as error:
                raise _Stalled from error

        scope["headstart.meaningless"] = KEEPALIVE
        try:
            await super().__call__(scope, receive, send_in_time)
        except _Stalled:
            self._flight.account.status = ReaderTooSlow.status
            log.info("a stream ended: its client took nothing for %g s", stall_s)
        finally:
            await self._events.aclose()
            self._flight.order.let_go()
            self._on_end()


class _Stalled(Exception):
    """The client does not read."""


async def first_of(events: AsyncGenerator[bytes | None, None]) -> tuple[bytes | None]:
    """Return the first item, in a tuple so that None can be one."""
    async for event in events:
        return (event,)
    return (b"",)


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
