"""Connections to the server: how many there may be, how long one may be held without a request, and what is no HTTP.

uvicorn's own protocol bounds none of it. Whoever opens connections and sends nothing, or a header a minute, would take all
descriptors of the process, those for reading the cache included; keys do not help, since none is asked for before a request.
What comes is read in C: a long body is then put together once (docs/decisions/0062).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import uuid
from collections import deque
from typing import Any, ClassVar

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headstart.api.errors import error_object
from headstart.errors import RequestError

HEAD_S = 30.0  # in which the headers of a request must have come, from the connection's opening or their first byte on
HEAD_BYTES = 64 << 10
_BODY_BYTES = 256 << 10  # of one body, before anybody counts them
_SMALL_BYTES = 4096
_LOOK_S = 0.02  # how often, at first, it is looked whether who sends no more has gone
_OFFERS = (b"upgrade", b"http2-settings")
_TCP_CLOSE = 7  # of the kernel's states
_TOLD_S = 60.0  # how often the log says that there are too many
_log = logging.getLogger("headstart")


def connection_type(*, head_s: float = HEAD_S, most: int | None = None) -> type[HttpToolsProtocol]:
    """Return the protocol for one server's connections. `most`: at once, by default half of what the process may open."""
    return type("Connection", (_Connection,), {"head_s": head_s, "most": _half_of_all() if most is None else most})


class _Connection(HttpToolsProtocol):
    head_s: ClassVar[float]
    most: ClassVar[int]
    tell_from_s: ClassVar[float] = 0.0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._waiting: asyncio.TimerHandle | None = None  # for a head; set while there is no request
        self._cycles: deque[RequestResponseCycle] = deque()  # of requests without their whole answer; the first one runs
        self._amid_head = False
        self._head_bytes = 0  # of a head, and of what stands behind its body, as far as the parser tells of it
        self._silent_bytes = 0  # since it told of anything

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the one above
        super().connection_made(transport)
        # asyncio does it for sockets that say that they are TCP; those of a listener that was made before do not: a head and
        # what is behind it would then be 40 ms apart, until the other side's delayed acknowledgement.
        if (connection := transport.get_extra_info("socket")) is not None and connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.most:
            self._tell()
            transport.abort()
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._await_no_more()
        for cycle in self._unanswered():  # uvicorn tells the last one alone
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's own closes the connection
        """The client sends nothing more. It may have gone, or wait for its answer, and nobody can know before something is
        written, which one that has gone refuses. So something without meaning is."""
        cycle = next(iter(self._unanswered()), None)
        if cycle is None or cycle.more_body or cycle.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False  # there is no next request
        if not cycle.response_started:
            cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif isinstance(meaningless := cycle.scope.get("headstart.meaningless"), bytes) and cycle.chunked_encoding:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(meaningless), meaningless))
        self._look_after_eof(_LOOK_S)
        return True

    def _look_after_eof(self, after_s: float) -> None:
        if self.transport.is_closing():
            return
        if _is_reset(self.transport):
            self.transport.abort()
            return
        self.loop.call_later(after_s, self._look_after_eof, min(2 * after_s, 1.0))

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        before = self.cycle
        self._silent_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(str(error.__context__ if isinstance(error.__context__, _Wrong) else error))
            return
        if self._head_bytes + self._silent_bytes > HEAD_BYTES:  # the parser holds it, and grows
            self._refuse("the head is too long")
            return
        if self.cycle is not before:
            self._await_no_more()
        if not self._unanswered():  # what came was no whole head
            self._await_head()

    def _parse(self, data: bytes) -> None:
        """Raises httptools.HttpParserError."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._parse_without_offer()

    def _parse_without_offer(self) -> None:
        """Take a head that offers another protocol as if it did not: the parser believes that what comes behind is spoken in
        that one, and is no body."""
        kept = b""
        for name, value in self.headers:
            if name == b"connection":  # it may say more, as that the connection ends with the answer
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in _OFFERS)
            if name not in _OFFERS:
                kept += b"%b: %b\r\n" % (name, value)
        version = self.parser.get_http_version().encode()
        head = b"".join((self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n", kept, b"\r\n"))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(head)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._amid_head, self._head_bytes, self._silent_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self._amid_head:  # what stands behind a body is none: whoever looked at the head has not seen it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._amid_head = False
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            raise _Wrong(f"HTTP/{version}, or CONNECT, is not spoken here")
        if version == "1.1" and sum(name == b"host" for name, _ in self.headers) != 1:
            raise _Wrong("there is no Host, or more than one")
        if self.parser.should_upgrade():  # it comes again
            return
        super().on_headers_complete()
        self.cycle.transport = _HeadFirst(self.transport, self.loop)  # type: ignore[assignment]  # as much as a cycle needs
        if version == "1.0":  # which knows no chunks: what comes until the connection ends is the answer
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _AnyLength()
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Keep it until there is much or all of it: who reads it needs it whole, and is woken once."""
        self._silent_bytes = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        if not isinstance(cycle.body, _Pieces):
            cycle.body = _Pieces()  # type: ignore[assignment]  # as much as a cycle needs
        cycle.body += body
        if len(cycle.body) > _BODY_BYTES:
            self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._head_bytes = self._silent_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _count(self, nbytes: int) -> None:
        self._head_bytes += nbytes
        self._silent_bytes = 0
        if self._head_bytes > HEAD_BYTES:
            raise _Wrong("the head is too long")

    def _unanswered(self) -> deque[RequestResponseCycle]:
        while self._cycles and self._cycles[0].response_complete:  # they end in their order
            self._cycles.popleft()
        return self._cycles

    def _refuse(self, why: str) -> None:
        """Answer what is not HTTP, in the form of most clients, since nobody can know which of them it was."""
        running = self._unanswered()
        if not (len(running) > 1 or any(cycle.response_started or not cycle.more_body for cycle in running)):
            if "Content-Length" in why and "Transfer-Encoding" in why:
                why = "the request has both content-length and transfer-encoding"
            told = f"what came is no HTTP ({why}); send HTTP/1.1, with one Host and a head under {HEAD_BYTES >> 10} KiB"
            error = RequestError(told, code="invalid_http")
            body = msgspec.json.encode(error_object(error))
            head = (
                f"HTTP/1.1 {error.status} Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"connection: close\r\nx-request-id: req_{uuid.uuid4().hex}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()  # who has its answer, or waits for it, went on with nonsense

    def _await_head(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(self.head_s, self.transport.close)

    def _await_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _tell(self) -> None:
        if self.loop.time() >= self.tell_from_s:
            type(self).tell_from_s = self.loop.time() + _TOLD_S
            _log.warning("more than %d connections are open; new ones are closed until some end", self.most)


class _Wrong(Exception):
    """A head that the parser lets pass."""


class _Pieces:
    """A body as it comes, put together once; but small ones at once, each of which would take more than it holds."""

    def __init__(self) -> None:
        self._pieces: list[bytes | bytearray] = []
        self._bytes = 0

    def __iadd__(self, piece: bytes) -> _Pieces:
        if len(piece) >= _SMALL_BYTES:
            self._pieces.append(piece)
        elif self._pieces and isinstance(last := self._pieces[-1], bytearray):
            last += piece
        else:
            self._pieces.append(bytearray(piece))
        self._bytes += len(piece)
        return self

    def __len__(self) -> int:
        return self._bytes

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)


class _HeadFirst:
    """A transport for one answer: its head waits for what comes right behind it, and both go out at once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self._begun = False

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun, self._head = True, data
            self._loop.call_soon(self._flush)
        elif self._head is not None:
            data, self._head = self._head + data, None
            self._transport.write(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head)


class _AnyLength(int):
    """Of an answer that ends with its connection: whatever comes is as much as was said."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _AnyLength:
        return self

    __hash__ = None  # type: ignore[assignment]  # nothing is looked up by it


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the other side has refused what was written; False where the system cannot tell, and the next write will."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    try:
        return bool(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)
    except OSError:
        return True


def _half_of_all() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if allowed == resource.RLIM_INFINITY else max(16, allowed // 2)
