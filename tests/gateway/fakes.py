"""Workers that misbehave, for faults that real ones cannot be brought to: raw bytes on a socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any

Say = Callable[[str, bytes], "bytes | Iterable[bytes] | None"]


class Fake:
    """Answers each request with what `say(path, body)` gives: bytes, or several pieces after which the connection ends; None
    says nothing and holds the connection. `/v1/headstart/worker` is not there, so it is taken for another server than ours."""

    def __init__(self, say: Say, *, models: tuple[str, ...] = ("tiny",), started: float = 1.0) -> None:
        self.say = say
        self.models = models
        self.started = started
        self.ready = True  # as it says when it is asked how it is
        self.asked: list[tuple[str, bytes]] = []
        self.heads: list[dict[str, str]] = []  # of each of those
        self.hung_up = threading.Event()  # a client went away
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def posts(self) -> int:
        return sum(path.startswith("/v1/") for path, _ in self.asked)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)
        self._listener.close()
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while (request := _request(connection)) is not None:
                method, path, head, body = request
                if method == "GET":
                    connection.sendall(self._about(path))
                    continue
                if path == "/tokenize":
                    connection.sendall(http(404, b"{}"))
                    continue
                self.heads.append(head)
                self.asked.append((path, body))
                said = self.say(path, body)
                if said is None:
                    while connection.recv(1):
                        pass
                    self.hung_up.set()
                    return
                if isinstance(said, bytes):
                    connection.sendall(said)
                    continue
                for piece in said:
                    connection.sendall(piece)
                return
        except OSError:
            self.hung_up.set()
        finally:
            self._open.discard(connection)
            connection.close()

    def _about(self, path: str) -> bytes:
        if path == "/health":
            return http(200 if self.ready else 503, b"{}")
        if path == "/metrics":
            return http(200, f"process_start_time_seconds {self.started}\nvllm:num_requests_running 0\n".encode(), "text/plain")
        if path == "/v1/models":
            return http(200, json.dumps({"data": [{"id": name, "max_model_len": 4096} for name in self.models]}).encode())
        return http(404, b"{}")


def http(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def completion(text: str = "fine", **usage: int) -> bytes:
    counts = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, **usage}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    content = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny", "choices": [choice]}
    return http(200, json.dumps(content | {"usage": counts}).encode())


STREAM = b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


CHUNKED = STREAM.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")


def chunked(piece: bytes) -> bytes:
    """Return it as HTTP's chunks have it."""
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def chunk(text: str | None, finish: str | None = None, **more: Any) -> bytes:
    delta = {"role": "assistant"} if text is None else {"content": text}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    content = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": choices}
    return b"data: " + json.dumps(content | more).encode() + b"\n\n"


def stream(*texts: str, ends: bool = True) -> list[bytes]:
    usage = {"prompt_tokens": 10, "completion_tokens": len(texts), "total_tokens": 10 + len(texts)}
    end = [chunk("", "stop"), chunk(None, choices=[], usage=usage), b"data: [DONE]\n\n"]
    return [STREAM, chunk(None), *map(chunk, texts), *(end if ends else [])]


def _request(connection: socket.socket) -> tuple[str, str, dict[str, str], bytes] | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(1 << 16)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    named = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    size = int(named.get("content-length", 0))
    while len(body) < size:
        more = connection.recv(1 << 16)
        if not more:
            return None
        body += more
    method, path, _ = lines[0].split(" ", 2)
    return method, path, named, body
