"""The router's HTTP towards workers: answers as servers write them, good and bad, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headstart.gateway import connections as module
from headstart.gateway.connections import Connections, Lost, NotTaken, parts_of

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Serve = Callable[[socket.socket], None]


@contextmanager
def serving(*serves: Serve) -> Iterator[str]:
    """Yield the address of who does with each connection in turn what is said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for serve in serves:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.settimeout(30)
                with connection:
                    serve(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30)
        assert not thread.is_alive()


def request(connection: socket.socket) -> bytes:
    """Return one request, its head and as much of its body as that says."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(1 << 16)):
            return data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < sum(lengths):
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def answering(*answers: bytes, heard: list[bytes] | None = None) -> Serve:
    def serve(connection: socket.socket) -> None:
        for answer in answers:
            got = request(connection)
            if heard is not None:
                heard.append(got)
            connection.sendall(answer)

    return serve


def run(work: Callable[[Connections], Coroutine[Any, Any, Any]], *, connect_s: float = 10.0) -> Any:
    async def all() -> Any:
        connections = Connections(connect_s=connect_s)
        try:
            async with asyncio.timeout(30):
                return await work(connections)
        finally:
            await connections.close()
            await connections.close()

    return asyncio.run(all())


def test_one_connection_serves_several_requests() -> None:
    heard: list[bytes] = []
    with serving(answering(OK, OK, OK, heard=heard)) as url:

        async def work(connections: Connections) -> None:
            for number in range(3):
                answer = await connections.ask("POST", f"{url}/v1/x?n={number}", headers={"a": "b"}, body=b"body")
                assert (answer.status, answer.content) == (200, b"ok")

        run(work)
    host = url.removeprefix("http://").encode()
    assert heard[2] == b"POST /v1/x?n=2 HTTP/1.1\r\nhost: " + host + b"\r\na: b\r\ncontent-length: 4\r\n\r\nbody"


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n3\r\nall\r\n0\r\n\r\n", b"okall"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
    ids=["interim answers", "chunks", "no body", "an empty one"],
)
def test_an_answer_is_read_to_its_end_and_the_connection_kept(answer: bytes, content: bytes) -> None:
    with serving(answering(answer, OK)) as url:

        async def work(connections: Connections) -> list[bytes]:
            return [(await connections.ask("GET", url, headers={})).content for _ in range(2)]

        assert run(work) == [content, b"ok"]


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_an_answer_that_does_not_say_where_it_ends_ends_with_its_connection(head: bytes) -> None:
    with serving(answering(head + b"so much"), answering(OK)) as url:

        async def work(connections: Connections) -> list[bytes]:
            return [(await connections.ask("GET", url, headers={})).content for _ in range(2)]

        assert run(work) == [b"so much", b"ok"]


def test_who_answers_what_nobody_asked_gets_the_next_request_on_another_connection() -> None:
    with serving(answering(OK + b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong"), answering(OK)) as url:

        async def work(connections: Connections) -> list[bytes]:
            return [(await connections.ask("GET", url, headers={})).content for _ in range(2)]

        assert run(work) == [b"ok", b"ok"]


def test_an_answer_that_nobody_asked_for_is_none_to_the_next_request_though_only_its_beginning_came_before() -> None:
    asked = threading.Event()

    def serve(connection: socket.socket) -> None:
        request(connection)
        connection.sendall(OK + b"HTTP/1.1 200 OK\r\ncontent-le")
        assert asked.wait(30)
        with suppress(OSError):  # it is cut off
            connection.sendall(b"ngth: 5\r\n\r\nwrong")

    with serving(serve, answering(OK)) as url:

        async def work(connections: Connections) -> list[bytes]:
            first = await connections.ask("GET", url, headers={})
            asking = asyncio.ensure_future(connections.ask("GET", url, headers={}))
            await asyncio.sleep(0)  # it is sent
            asked.set()
            return [first.content, (await asking).content]

        assert run(work) == [b"ok", b"ok"]


def test_a_head_that_is_too_long_is_not_put_together_first() -> None:
    names: set[str] = set()

    class Noting(dict[str, str]):
        def __setitem__(self, name: str, value: str) -> None:
            names.add(name)

    async def work(connections: Connections) -> None:
        connection = module._Connection(connections, module._origin("http", "127.0.0.1:1"))
        connection._answer = answer = module.Response(connection)
        connection._headers = Noting()
        connection.data_received(b"HTTP/1.1 200 OK\r\n" + b"".join(b"%d:\r\n" % number for number in range(60_000)) + b"\r\n")
        assert answer._failure is not None

    run(work)
    assert len(names) < 20_000


def test_trailers_are_no_headers_of_the_next_answer() -> None:
    with serving(answering(CHUNKED + b"2\r\nok\r\n0\r\nserver-timing: x\r\n\r\n", OK)) as url:

        async def work(connections: Connections) -> list[dict[str, str]]:
            found = []
            for _ in range(2):
                response = await connections.begin("GET", url, headers={})
                assert b"".join([part async for part in parts_of(response)]) == b"ok"
                found.append(response.headers)
            return found

        assert run(work) == [{"transfer-encoding": "chunked"}, {"content-length": "2"}]


def test_an_answer_that_ends_with_its_connection_is_not_whole_where_that_was_cut_here() -> None:
    def serve(connection: socket.socket) -> None:
        request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nso much")
        assert not connection.recv(1)

    with serving(serve) as url:

        async def work(connections: Connections) -> None:
            response = await connections.begin("GET", url, headers={})
            await connections.close()
            with pytest.raises(Lost):
                [part async for part in parts_of(response)]

        run(work)


def test_nothing_is_sent_on_a_connection_that_has_just_broken() -> None:
    with serving(answering(OK), answering(OK)) as url:

        async def work(connections: Connections) -> bytes:
            await connections.ask("GET", url, headers={})
            (kept,) = connections._open
            assert kept._transport is not None
            kept._transport.abort()  # as when it is reset: that it is lost is told only later
            return (await connections.ask("GET", url, headers={})).content

        assert run(work) == b"ok"


def test_who_closes_a_connection_gets_the_next_request_on_another() -> None:
    with serving(
        answering(OK), answering(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"), answering(OK)
    ) as url:

        async def work(connections: Connections) -> list[bytes]:
            found = []
            for _ in range(3):
                found.append((await connections.ask("GET", url, headers={})).content)
                await asyncio.sleep(0.05)  # the end of the connection comes
            return found

        assert run(work) == [b"ok", b"", b"ok"]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * (80 << 10) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * (20 << 10),
        b"HTTP/1.1 199 So far\r\ncontent-length: 5\r\n\r\nwrong" + OK,
        CHUNKED + b"2\r\nok\r\n0\r\n" + b"a: b\r\n" * (80 << 10),
        CHUNKED + b"2\r\nok\r\n2;" + b"a" * (400 << 10),
    ],
)
def test_what_is_no_whole_answer_is_lost(answer: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        request(connection)
        with suppress(OSError):  # it is cut off amid the head
            connection.sendall(answer)

    with serving(serve, answering(OK)) as url:

        async def work(connections: Connections) -> bytes:
            with pytest.raises(Lost):
                await connections.ask("GET", url, headers={})
            return (await connections.ask("GET", url, headers={})).content

        assert run(work) == b"ok"


def test_an_answer_before_the_whole_body_ends_the_sending_of_it() -> None:
    got = 0

    def refuses(connection: socket.socket) -> None:
        nonlocal got
        got = len(connection.recv(1 << 16))
        connection.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        try:
            while more := connection.recv(1 << 20):
                got += len(more)
        except OSError:
            pass

    with serving(refuses, answering(OK)) as url:
        body = bytes(64 << 20)

        async def work(connections: Connections) -> list[tuple[int, bytes]]:
            answers = [await connections.ask("POST", url, headers={}, body=part) for part in (body, b"")]
            return [(answer.status, answer.content) for answer in answers]

        assert run(work) == [(413, b"big"), (200, b"ok")]
    assert got < len(body)


def test_a_long_body_comes_whole_and_its_connection_is_kept() -> None:
    heard: list[bytes] = []
    body = bytes(range(256)) * (5 << 10)
    with serving(answering(OK, OK, heard=heard)) as url:

        async def work(connections: Connections) -> None:
            for _ in range(2):
                await connections.ask("POST", url, headers={}, body=body)

        run(work)
    assert [one.partition(b"\r\n\r\n")[2] == body for one in heard] == [True, True]


@pytest.mark.parametrize("cancelled", [False, True])
def test_who_is_not_read_to_the_end_is_cut_off(cancelled: bool) -> None:
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        request(connection)
        if not cancelled:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok")
        try:
            while connection.recv(1 << 16):
                pass
        except OSError:
            pass
        ended.set()

    with serving(serve) as url:

        async def work(connections: Connections) -> None:
            if cancelled:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await connections.begin("GET", url, headers={})
            else:
                response = await connections.begin("GET", url, headers={})
                assert await anext(parts_of(response)) == b"ok"
                response.close()
                response.close()
                with pytest.raises(Lost):
                    await anext(parts_of(response))
            assert await asyncio.to_thread(ended.wait, 30)

        run(work)


def test_a_worker_waits_for_who_does_not_read() -> None:
    sent = 0
    full = threading.Event()

    def serve(connection: socket.socket) -> None:
        nonlocal sent
        request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        connection.settimeout(0.5)
        try:
            while sent < 64 << 20:
                sent += connection.send(bytes(min(1 << 20, (64 << 20) - sent)))
        except TimeoutError:
            full.set()
            connection.settimeout(30)
            while sent < 64 << 20:
                sent += connection.send(bytes(min(1 << 20, (64 << 20) - sent)))

    with serving(serve) as url:

        async def work(connections: Connections) -> int:
            response = await connections.begin("GET", url, headers={})
            assert await asyncio.to_thread(full.wait, 30)
            return sum([len(part) async for part in parts_of(response)])

        assert run(work) == 64 << 20


def test_a_header_is_one_line() -> None:
    async def work(connections: Connections) -> None:
        for value in ("a\r\nb: c", "a\n", "a\0"):
            with pytest.raises(ValueError, match="end of a line"):
                await connections.begin("GET", "http://127.0.0.1:1", headers={"x": value})

    run(work)


def test_a_connection_is_not_kept_for_longer_than_servers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT_S", 0.01)
    with serving(answering(OK), answering(OK)) as url:

        async def work(connections: Connections) -> None:
            for _ in range(2):
                await connections.ask("GET", url, headers={})
                while connections._open:
                    await asyncio.sleep(0.01)

        run(work)


def test_a_name_that_nobody_knows_was_not_refused() -> None:
    async def work(connections: Connections) -> NotTaken:
        with pytest.raises(NotTaken) as caught:
            await connections.begin("GET", "http://nobody.invalid:80", headers={})
        return caught.value

    assert not run(work).refused


def test_a_worker_behind_tls_is_asked_only_if_it_is_who_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(made, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve(connection: socket.socket) -> None:
        try:
            with context.wrap_socket(connection, server_side=True) as secure:
                answering(OK)(secure)
        except OSError:  # it does not believe us
            pass

    trusting = ssl.create_default_context(cafile=str(certificate))
    with serving(serve, serve) as url:
        there = url.replace("http://127.0.0.1", "https://localhost")

        async def work(connections: Connections) -> bytes:
            with pytest.raises(NotTaken):
                await connections.ask("GET", there, headers={})
            monkeypatch.setattr(module, "_trusting", lambda: trusting)
            return (await connections.ask("GET", there, headers={})).content

        assert run(work) == b"ok"
