"""Connections to the server: how many there may be, and how long one may be held without a request.

uvicorn's own protocol bounds neither. Whoever opens connections and sends nothing, or a header a minute, would take all
descriptors of the process, those for reading the cache included; keys do not help, since none is asked for before a request.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import uuid
from typing import Any, ClassVar

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from headstart.api.errors import error_object
from headstart.errors import RequestError

HEAD_S = 30.0  # in which the headers of a request must have come, from the connection's opening or their first byte on
_LOOK_S = 0.02  # how often, at first, it is looked whether who sends no more has gone
_TCP_CLOSE = 7  # of the kernel's states
_TOLD_S = 60.0  # how often the log says that there are too many
_log = logging.getLogger("headstart")


def connection_type(*, head_s: float = HEAD_S, most: int | None = None) -> type[H11Protocol]:
    """Return the protocol for one server's connections. `most`: at once, by default half of what the process may open."""
    return type("Connection", (_Connection,), {"head_s": head_s, "most": _half_of_all() if most is None else most})


class _Connection(H11Protocol):
    head_s: ClassVar[float]
    most: ClassVar[int]
    tell_from_s: ClassVar[float] = 0.0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._waiting: asyncio.TimerHandle | None = None  # for a head; set while there is no request

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
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's own closes the connection
        """The client sends nothing more. It may have gone, or wait for its answer, and nobody can know before something is
        written, which one that has gone refuses. So something without meaning is."""
        cycle = self.cycle
        whole = self.conn.their_state is not h11.SEND_BODY
        if cycle is None or cycle.response_complete or not whole or self.conn.their_http_version != b"1.1":
            return False
        cycle.keep_alive = False  # there is no next request
        if not cycle.response_started:
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        elif isinstance(meaningless := self.scope.get("headstart.meaningless"), bytes):
            self.transport.write(self.conn.send(h11.Data(data=meaningless)) or b"")
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
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._await_no_more()
        if self.cycle is None or self.cycle.response_complete:  # what came was no whole head
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in the form of most clients, since nobody can know which of them it was."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # it has its answer, and went on with nonsense
            self.transport.close()
            return
        error = RequestError(f"{msg.rstrip('.')}; send HTTP/1.1, with one Host and a head under 64 KiB", code="invalid_http")
        body = msgspec.json.encode(error_object(error))
        named = {"content-type": "application/json", "connection": "close", "x-request-id": f"req_{uuid.uuid4().hex}"}
        head = h11.Response(status_code=error.status, headers=list(named.items()), reason="Bad Request")
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

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
