"""An answer as server-sent events. What they say is the dialect's; here is only when.

While a long prompt is computed something without meaning goes out now and then, so that nothing in between gives up on the
connection. A failure after the first byte is an event too, as each dialect writes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from headstart.api.dialects.base import KEEPALIVE, Shape
from headstart.api.errors import ReaderTooSlow
from headstart.api.generation import Generation
from headstart.errors import RequestError

STALL_S = 30.0  # how long a client may take nothing at all of what is sent to it
_log = logging.getLogger("headstart")


class EventStream(StreamingResponse):
    """A stream that ends its request in the engine however it ends itself, begun or not. A client that takes nothing for
    `stall_s` is cut, so that nothing is held for it."""

    def __init__(self, generation: Generation, shape: Shape, headers: dict[str, str], *, stall_s: float = STALL_S) -> None:
        headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events(generation, shape), media_type="text/event-stream", headers=headers)
        self._generation = generation
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send(message)
            except TimeoutError as error:
                raise _Stalled from error

        scope["headstart.meaningless"] = KEEPALIVE  # for who may write into the stream
        with self._generation:
            try:
                await super().__call__(scope, receive, send_in_time)
            except _Stalled:
                self._generation.account.status = ReaderTooSlow.status
                _log.info("%s ended: its client took nothing for %g s", self._generation.id, self._stall_s)


class _Stalled(Exception):
    """The client does not read."""


async def events(generation: Generation, shape: Shape) -> AsyncIterator[bytes]:
    """Yield the stream. Cancelled when the client goes away; whoever made the generation ends it."""
    begun = False
    try:
        if opening := b"".join(shape.open()):
            yield opening
        async for piece in generation.pieces():
            if piece is None:
                yield shape.quiet()
                continue
            if piece.progress is not None:  # not every dialect can say how far a prompt is
                yield b"".join(shape.piece(piece)) or shape.quiet()
                continue
            beginning = b"" if begun else b"".join(shape.begin(generation.usage()))
            begun = True
            if written := beginning + b"".join(shape.piece(piece)):
                yield written
    except RequestError as error:
        yield b"".join(shape.failure(error))
        return
    yield b"".join(shape.end(generation.usage()))
