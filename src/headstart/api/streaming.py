"""An answer as server-sent events. What they say is the dialect's; here is only when.

While a long prompt is computed something without meaning goes out now and then, so that nothing in between gives up on the
connection. A failure after the first byte is an event too, as each dialect writes it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from headstart.api.dialects.base import Shape
from headstart.api.generation import Generation
from headstart.errors import RequestError


async def events(generation: Generation, shape: Shape) -> AsyncIterator[bytes]:
    """Yield the stream. Cancelled when the client goes away; whoever made the generation ends it."""
    try:
        async for piece in generation.pieces():
            if piece is None:
                yield shape.quiet()
            elif written := b"".join(shape.piece(piece)):
                yield written
    except RequestError as error:
        yield b"".join(shape.failure(error))
        return
    yield b"".join(shape.end(generation.usage()))
