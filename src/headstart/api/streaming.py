"""An answer as server-sent events, exactly as clients of the OpenAI API read them.

    role chunk · text chunks · finish reason · usage (when asked, no choices) · [DONE]

Of several answers each has its own first three, in whatever order they come.

While a long prompt is computed a comment goes out now and then, so that nothing in between gives up on the connection;
clients skip comments. A failure after the first byte is a data event with an error object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from headstart.api.errors import error_object
from headstart.api.generation import Generation
from headstart.api.writing import Shape
from headstart.errors import RequestError

_DONE = b"data: [DONE]\n\n"
_KEEPALIVE = b": keep-alive\n\n"


async def events(generation: Generation, shape: Shape) -> AsyncIterator[bytes]:
    """Yield the stream. Cancelled when the client goes away; whoever made the generation ends it."""
    begun: set[int] = set()
    try:
        async for piece in generation.pieces():
            if piece is None:
                yield _KEEPALIVE
                continue
            # The role goes out with the first text, not before: clients take the first chunk for the first token.
            if piece.index not in begun and (role := shape.role(piece.index)):
                yield _event(role)
            begun.add(piece.index)
            if piece.text or piece.told:
                yield _event(shape.text(piece))
            if piece.finish is not None:
                yield _event(shape.finish(piece.index, piece.finish))
    except RequestError as error:
        yield _event(error_object(error))
        return
    if shape.include_usage:
        yield _event(shape.usage(generation.usage()))
    yield _DONE


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
