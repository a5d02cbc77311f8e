"""Connections to workers, kept for a while after each answer. The one place that knows the HTTP client.

aiohttp's, since it reads answers in C: a request takes an eighth of the CPU that it takes with httpx (docs/decisions/0055).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

MOST_BYTES = 64 << 20  # of an answer in one piece
_KEPT_S = 4.0  # a connection without a request; servers close theirs after five seconds and more
_PIECE_BYTES = 1 << 18  # of a body that goes out piece by piece, each when the one before has gone
_OWN_HEADERS = ("accept", "accept-encoding", "content-type", "user-agent")  # that the client would add


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole one. `kind`: its content-type."""

    status: int
    kind: str
    content: bytes


class Connections:
    """For one event loop, and made anywhere. `connect_s`: in which a worker must have taken a connection; answers take as long
    as they take, so whoever waits for one has a deadline of its own."""

    def __init__(self, *, connect_s: float) -> None:
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None

    async def begin(
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None
    ) -> aiohttp.ClientResponse:
        """Send a request and return its answer once the head is there. Whoever has it closes it: what was not read to its end
        by then is cut off at the worker. `headers`: as Starlette reads them, and no others are sent beside HTTP's own.

        Raises aiohttp.ClientError."""
        told = {name: _as_it_came(value) for name, value in headers.items()}
        data: bytes | AsyncIterator[bytes] | None = body
        if body is not None and len(body) > _PIECE_BYTES:
            told["content-length"] = str(len(body))
            data = _in_pieces(body)
        return await self._opened().request(method, URL(url, encoded=True), data=data, headers=told, allow_redirects=False)

    async def ask(self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None) -> Answer:
        """Return a whole answer. Raises aiohttp.ClientError, and ValueError for one without end."""
        response = await self.begin(method, url, headers=headers, body=body)
        try:
            content = bytearray()
            async for part in parts_of(response):
                content += part
                if len(content) > MOST_BYTES:
                    raise ValueError(f"{url} answers more than {MOST_BYTES >> 20} MiB")
        finally:
            response.close()
        return Answer(response.status, response.headers.get("content-type", "application/json"), bytes(content))

    async def close(self) -> None:
        """Twice is fine."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S, resolver=aiohttp.ThreadedResolver()),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_OWN_HEADERS,
            )
        return self._session


async def parts_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield what comes of an answer as it comes. Raises aiohttp.ClientError, also where aiohttp closes the connection over a
    chunk that is none, of which it tells no reader."""
    content, connection = response.content, response.connection
    closed = None if connection is None or connection.protocol is None else connection.protocol.closed

    def cut(closed: asyncio.Future[None]) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection ended amid the answer"))

    def whole() -> None:
        if closed is not None:
            closed.remove_done_callback(cut)

    if closed is not None:
        closed.remove_done_callback(_heard)  # once a connection
        closed.add_done_callback(_heard)
        closed.add_done_callback(cut)
        content.on_eof(whole)
    try:
        async for part in content.iter_any():
            yield part
    except RuntimeError as error:  # it was closed before it was read
        raise aiohttp.ClientPayloadError("the connection ended amid the answer") from error


def _heard(closed: asyncio.Future[None]) -> None:
    """Nobody need be told how a connection ended that has no answer under way."""
    if not closed.cancelled():
        closed.exception()


async def _in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]


def _as_it_came(value: str) -> str:
    """Return what is written as the bytes that `value` was read from: Starlette reads Latin-1, aiohttp writes UTF-8."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value
