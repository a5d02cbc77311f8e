"""Connections to workers, kept for a while after each answer. The one place that speaks HTTP to them.

Answers are read in C, by the parser that the server has. A request goes out in one piece, and its answer comes back without a
task between the socket and who waits for it (docs/decisions/0068).

    begin ─▶ a kept connection, or a new one ─▶ head ─▶ parts ─▶ whole: kept for the next request
                                                          └─▶ closed before: cut off at the worker
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

import httptools

MOST_BYTES = 64 << 20  # of an answer in one piece
_KEPT_S = 4.0  # a connection without a request; servers close theirs after five seconds and more
_JOINED_BYTES = 1 << 16  # of a body that goes out with the head before it
_PIECE_BYTES = 1 << 18  # of a body that goes out piece by piece, each when the one before has gone
_UNREAD_BYTES = 1 << 18  # of an answer, before the worker has to wait for who reads it
_BESIDE_BYTES = 64 << 10  # of an answer without one of its body: a head, what stands between chunks, trailers
_LONG_HEAD = f"more than {_BESIDE_BYTES >> 10} KiB of its answer are none of its body"
_UNTOLD = (204, 304)  # answers without a body


class Lost(Exception):
    """What was begun with a worker came to nothing, or to something that is no HTTP."""


class NotTaken(Lost):
    """The worker never heard of it. `refused`: nothing listens there; `late`: nothing was heard in time."""

    def __init__(self, why: str, *, refused: bool = False, late: bool = False) -> None:
        super().__init__(why)
        self.refused = refused
        self.late = late


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
        self._kept: dict[_Origin, list[_Connection]] = {}
        self._open: set[_Connection] = set()

    async def begin(self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None) -> Response:
        """Send a request and return its answer once the head is there. Whoever has it closes it: what was not read to its end
        by then is cut off at the worker. `method`: not HEAD, whose answers announce a body that the parser would wait for.
        `headers`: as Starlette reads them, and no others are sent beside HTTP's own.

        Raises Lost, and ValueError for headers that are none."""
        assert method != "HEAD"
        origin, path = _target(url)
        head = _head(method, origin, path, headers, body)
        connection = self._free(origin) or await self._connected(origin)
        try:
            return await connection.ask(head, body or b"")
        except BaseException:
            connection.cut()
            raise

    async def ask(self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None) -> Answer:
        """Return a whole answer. Raises Lost, and ValueError for one without end."""
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
        for connection in list(self._open):
            connection.cut()
        while self._open:
            await asyncio.sleep(0)

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def keep(self, connection: _Connection) -> None:
        """Have it ready for the next request."""
        self._kept.setdefault(connection.origin, []).append(connection)

    def forget(self, connection: _Connection) -> None:
        """It has ended, or is not to be used again."""
        kept = self._kept.get(connection.origin, [])
        if connection in kept:
            kept.remove(connection)
            if not kept:
                del self._kept[connection.origin]

    def ended(self, connection: _Connection) -> None:
        self.forget(connection)
        self._open.discard(connection)

    def _free(self, origin: _Origin) -> _Connection | None:
        """Return the connection that was used last of those kept that are not ending: on one that is, nothing is sent."""
        while kept := self._kept.get(origin):
            connection = kept[-1]
            self.forget(connection)
            if not connection.ending:
                return connection
        return None

    async def _connected(self, origin: _Origin) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
                return await self._first_of([str(address[0]) for *_, address in found], origin)
        except TimeoutError as error:
            raise NotTaken(f"nothing at {origin} takes a connection within {self._connect_s:g} s", late=True) from error
        except OSError as error:  # the name is not known, for instance
            raise NotTaken(f"nothing answers at {origin}: {error}") from error

    async def _first_of(self, hosts: list[str], origin: _Origin) -> _Connection:
        """Return a connection to the first address of a name that takes one, each having its share of the time."""
        loop = asyncio.get_running_loop()
        failed: list[OSError] = []
        hosts = list(dict.fromkeys(hosts))
        for left, host in zip(range(len(hosts), 0, -1), hosts, strict=True):
            try:
                async with asyncio.timeout(self._connect_s / 2 if left > 1 else None):
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self, origin),
                        host,
                        origin.port,
                        ssl=_trusting() if origin.secure else None,
                        server_hostname=origin.host if origin.secure else None,
                    )
                return connection
            except OSError as error:  # a timeout is one, too
                failed.append(error)
        refused = all(isinstance(error, ConnectionRefusedError) for error in failed)
        raise NotTaken(f"nothing answers at {origin}: {failed[-1]}", refused=refused) from failed[-1]


class Response:
    """An answer. `headers`: by their names in small letters."""

    def __init__(self, connection: _Connection) -> None:
        self.status = 0  # until the head is there
        self.headers: dict[str, str] = {}
        self._connection = connection
        self._parts: list[bytes] = []
        self._unread_bytes = 0
        self._whole = False
        self._failure: Lost | None = None
        self._waiting: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Nothing more is read of it. Twice is fine."""
        if not self._whole and self._failure is None:
            self.fails(Lost("the answer was closed"))
            self._connection.cut()

    def fails(self, error: Lost) -> None:
        if not self._whole and self._failure is None:
            self._failure = error
            self.wake()

    def begins(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        self.wake()

    def takes(self, part: bytes) -> bool:
        """Add a part; return whether there is room for more."""
        self._parts.append(part)
        self._unread_bytes += len(part)
        self.wake()
        return self._unread_bytes <= _UNREAD_BYTES

    def ends(self) -> None:
        self._whole = True
        self.wake()

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def more(self) -> None:
        """Return when something has come. Raises Lost where nothing more comes."""
        if self._failure is not None:
            raise self._failure
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    async def parts(self) -> AsyncIterator[bytes]:
        while True:
            if self._parts:
                part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts, self._unread_bytes = [], 0
                self._connection.go_on()
                yield part
            elif self._whole:
                return
            else:
                await self.more()


def parts_of(response: Response) -> AsyncIterator[bytes]:
    """Yield what comes of an answer as it comes. Raises Lost."""
    return response.parts()


class _Connection(asyncio.Protocol):
    """One, and the answer that is expected on it or comes."""

    def __init__(self, all: Connections, origin: _Origin) -> None:
        self.origin = origin
        self._all = all
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Response | None = None
        self._sent = True  # all of the request
        self._full = False  # what was written has not gone
        self._paused = False
        self._headers: dict[str, str] = {}
        self._beside_bytes = 0
        self._head_bytes = 0
        self._interim = False
        self._at_end = False  # the worker has said all
        self._until_closed = False  # the answer says neither how long it is nor where it ends
        self._expiring: asyncio.TimerHandle | None = None

    @property
    def ending(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes) -> Response:
        """Send a request; return its answer as soon as that has a head. Raises Lost."""
        transport = self._transport
        assert transport is not None
        assert self._answer is None
        if self._expiring is not None:
            self._expiring.cancel()
            self._expiring = None
        self._answer = answer = Response(self)
        self._sent = False
        if len(body) <= _JOINED_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            await self._write(transport, answer, body)
        self._sent = not answer.status
        while not answer.status:
            await answer.more()
        return answer

    async def _write(self, transport: asyncio.Transport, answer: Response, body: bytes) -> None:
        """Write a long body piece by piece, as far as it is wanted."""
        for start in range(0, len(body), _PIECE_BYTES):
            while self._full and not answer.status:
                await answer.more()
            if answer.status:
                return
            transport.write(body[start : start + _PIECE_BYTES])  # the whole, uncopied, where it is one piece

    def cut(self) -> None:
        """End it, whatever is under way."""
        self._all.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def go_on(self) -> None:
        """There is room for more of the answer."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._all.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._all.ended(self)
        if self._expiring is not None:
            self._expiring.cancel()
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if answer.status and self._until_closed and self._at_end and error is None:
            answer.ends()
        else:
            amid = "amid the answer" if answer.status else "before an answer came"
            answer.fails(Lost(f"the connection ended {amid}" + (f": {error}" if error else "")))

    def eof_received(self) -> None:
        self._at_end = True
        self._all.forget(self)  # it closes

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._answer is not None:
            self._answer.wake()

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nobody asked
            self.cut()
            return
        try:
            self._beside_bytes += len(data)
            self._parser.feed_data(data)
            if self._answer is not None and self._beside_bytes > _BESIDE_BYTES:
                raise Lost(_LONG_HEAD)
        except (Lost, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._answer is not None:
                self._answer.fails(error if isinstance(error, Lost) else Lost(f"what it answers is no HTTP: {error}"))
            self.cut()

    # What the parser tells.

    def on_message_begin(self) -> None:
        if self._answer is None:  # with as little as its first byte left, the next answer would be this one
            raise Lost("it answers what nobody asked")
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is None or self._answer.status:
            return  # a trailer
        self._head_bytes += len(name) + len(value) + len(": \r\n")
        if self._head_bytes > _BESIDE_BYTES:  # at once: one name a hundred thousand times would be put together for a second
            raise Lost(_LONG_HEAD)
        key, said = name.decode("latin-1").lower(), value.decode("latin-1")
        before = self._headers.get(key)
        self._headers[key] = said if before is None else f"{before}, {said}"

    def on_headers_complete(self) -> None:
        status, headers = self._parser.get_status_code(), self._headers
        self._headers = {}
        self._interim = status < 200
        if self._interim:
            return
        assert self._answer is not None
        self._until_closed = not {"content-length", "transfer-encoding"} & headers.keys() and status not in _UNTOLD
        self._answer.begins(status, headers)

    def on_body(self, body: bytes) -> None:
        if self._interim:
            raise Lost("an interim answer has a body")
        self._beside_bytes = 0
        if self._answer is not None and not self._answer.takes(body) and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._beside_bytes = 0
        if self._interim:
            return
        answer, self._answer = self._answer, None
        assert answer is not None
        answer.ends()
        self.go_on()
        if self._transport is None or self._transport.is_closing():
            return
        if self._sent and self._parser.should_keep_alive():
            self._expiring = asyncio.get_running_loop().call_later(_KEPT_S, self.cut)
            self._all.keep(self)
        else:
            self._transport.abort()


@dataclass(frozen=True, slots=True)
class _Origin:
    """Whom a connection goes to. `said`: as in an address."""

    secure: bool
    host: str
    port: int
    said: str

    def __str__(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.said}"


@lru_cache(maxsize=1024)
def _origin(scheme: str, netloc: str) -> _Origin:
    parts = urlsplit(f"{scheme}://{netloc}")
    secure = scheme == "https"
    return _Origin(secure, parts.hostname or "", parts.port or (443 if secure else 80), netloc)


def _target(url: str) -> tuple[_Origin, str]:
    scheme, _, rest = url.partition("://")
    netloc, slash, path = rest.partition("/")
    return _origin(scheme.lower(), netloc), slash + path or "/"


def _head(method: str, origin: _Origin, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Return the head of a request. Raises ValueError for what would be more than one line."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {origin.said}", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    text = "\r\n".join(lines)
    if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
        raise ValueError("a header holds the end of a line")
    return (text if text.isascii() else "\r\n".join(map(_as_it_came, lines))).encode() + b"\r\n\r\n"


def _as_it_came(line: str) -> str:
    """Return what is written in UTF-8 as the bytes that `line` was read from, if they were that: Starlette reads Latin-1."""
    try:
        return line.encode("latin-1").decode()
    except UnicodeError:
        return line


@lru_cache(maxsize=1)
def _trusting() -> ssl.SSLContext:
    return ssl.create_default_context()
