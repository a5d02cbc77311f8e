"""Between clients and a server: passes everything on, or does what networks and busy services do."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Literal

Mode = Literal["pass", "busy", "hang", "gone"]
_BUSY = b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class FaultyProxy:
    """`with FaultyProxy(port) as proxy: proxy.mode = "busy"`. "busy": every request is answered 503; "hang": nothing is passed
    on or answered; "gone": every connection is refused or broken. `hang_after`: so many
    bytes more are passed to the server, and then it hangs."""

    def __init__(self, port: int) -> None:
        self.mode: Mode = "pass"
        self.hang_after: int | None = None
        self._to = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with ExitStack() as stack:
            stack.enter_context(near)
            if self.mode == "gone":
                return
            far = stack.enter_context(socket.create_connection(self._to))
            back = threading.Thread(target=self._copy, args=(far, near), kwargs={"answers": True}, daemon=True)
            back.start()
            self._copy(near, far, answers=False)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket, *, answers: bool) -> None:
        source.settimeout(0.1)
        with suppress(OSError):
            while not self._ended.is_set():
                try:
                    data = source.recv(1 << 16)
                except TimeoutError:
                    if self.mode == "gone":
                        break
                    continue
                if not data or self.mode == "gone":
                    break
                while self.mode == "hang" and not self._ended.wait(0.05):
                    pass
                if self.mode == "busy":
                    (target if answers else source).sendall(_BUSY)
                    break
                target.sendall(data)
                if not answers and self.hang_after is not None:
                    self.hang_after -= len(data)
                    self.mode = "hang" if self.hang_after < 0 else self.mode
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
