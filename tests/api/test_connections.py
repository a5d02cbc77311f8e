"""Whoever holds connections without asking anything, or leaves in the middle, costs others nothing and the log no trace."""

from __future__ import annotations

import itertools
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from api.serving import listening, running, served
from headstart.api.accounts import Accounts
from headstart.api.connections import connection_type
from headstart.api.service import Service
from headstart.ledger.log import UsageLog
from headstart.ledger.reading import Reading, entries
from headstart.testing.fake_engine import FakeEngine

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30)


def read_all(client: socket.socket) -> bytes:
    got = b""
    try:
        while piece := client.recv(1 << 16):
            got += piece
    except ConnectionResetError:
        pass
    return got


def ask_version(client: socket.socket) -> None:
    client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    got = b""
    while not got.endswith(b"}"):
        got += client.recv(1 << 16)
    assert got.startswith(b"HTTP/1.1 200")


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_connection_without_a_whole_head_is_closed_and_one_that_waits_for_its_answer_is_not() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    service = Service()
    service.ready(served(engine))
    answers: list[int] = []

    def ask(url: str) -> None:
        answers.append(httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60).status_code)

    with listening(service, head_s=0.3) as url:
        asking = threading.Thread(target=ask, args=(url,))
        asking.start()
        eventually(lambda: engine.load().running == 1)
        with connected(url) as silent, connected(url) as dripping, connected(url) as again:
            ask_version(again)
            again.sendall(b"GET /ver")  # the next one on a connection that was in use
            dripping.sendall(HEAD)
            while not select.select([dripping], [], [], 0.05)[0]:
                dripping.sendall(b"a: b\r\n")
            left = [read_all(client) for client in (dripping, silent, again)]
        engine.gate.set()
        asking.join()
    engine.close()
    assert left == [b"", b"", b""]
    assert answers == [200]


def test_there_are_only_so_many_connections_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    service = Service()
    with caplog.at_level(logging.WARNING), listening(service, most=2) as url:
        with connected(url) as first, connected(url) as second:
            for client in (first, second):
                ask_version(client)
            for _ in range(3):
                with connected(url) as third:
                    assert read_all(third) == b""

        def answered() -> bool:
            try:
                return httpx.get(f"{url}/version", timeout=30).status_code == 200
            except httpx.TransportError:
                return False

        eventually(answered)
    assert [record.message for record in caplog.records if "connections are open" in record.message] == [
        "more than 2 connections are open; new ones are closed until some end"
    ]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /version HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x00not http\r\n\r\n",
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /version HTTP/2.0\r\nHost: localhost\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nnone\r\n",
    ],
    ids=["no host", "not http", "negative length", "two lengths", "large head", "two hosts", "another http", "bad chunk"],
)
def test_what_is_not_http_is_answered_like_any_mistake(sent: bytes) -> None:
    with listening(Service()) as url, connected(url) as client:
        client.sendall(sent)
        head, _, body = read_all(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: req_" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_client_that_leaves_amid_its_body_is_one_line_of_the_usage_log_and_no_trace_in_the_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accounts = Accounts(log=UsageLog(tmp_path, keep_bytes=1 << 20))
    with caplog.at_level(logging.INFO), running(FakeEngine(), accounts=accounts) as server:
        for path in (b"/v1/completions", b"/v1/messages", b"/v1/messages/count_tokens", b"/tokenize"):
            with connected(server.url) as client:
                client.sendall(HEAD.replace(b"/v1/completions", path) + b'Content-Length: 100\r\n\r\n{"prompt":')
        eventually(lambda: len(list(entries(tmp_path, Reading()))) == 2)
    assert [(line.finish, line.status) for line in entries(tmp_path, Reading())] == [("abort", 499)] * 2
    assert [record.message for record in caplog.records if record.exc_info or "Exception" in record.message] == []


def test_half_of_a_character_is_named() -> None:
    with running(FakeEngine()) as server:
        for half in (rb'"\ud83d"', rb'"\udc00x"', rb'"\ud83d and more"'):
            body = b'{"prompt": ' + half + b', "max_tokens": 1}'
            answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400
            assert "is half of a character that is written as two" in answer.json()["error"]["message"], answer.text
        whole = httpx.post(f"{server.url}/v1/completions", json={"prompt": "\U0001f600", "max_tokens": 1})
        assert whole.status_code == 200


def test_who_sends_no_more_is_answered_and_who_has_gone_is_not() -> None:
    """Both send the same; only what is written to them tells them apart."""
    engine = FakeEngine(answer=b"Rome.")
    with running(engine) as server:
        for stream in (b"false", b"true"):
            body = b'{"prompt": "x", "max_tokens": 5, "stream": ' + stream + b"}"
            head = HEAD + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n"
            engine.gate.clear()
            with connected(server.url) as reads, connected(server.url) as gone:
                for client in (reads, gone):
                    client.sendall(head + body)
                eventually(lambda: engine.load().running == 2)
                reads.shutdown(socket.SHUT_WR)
                gone.close()
                eventually(lambda: engine.load().running == 1)
                engine.gate.set()
                got = read_all(reads)
            assert b"HTTP/1.1 200 OK" in got
            assert b"Rome." in got if stream == b"false" else got.count(b"data: ") == 7
        assert len(engine.aborted) == 2


def test_a_body_that_is_framed_twice_is_refused_and_nothing_behind_it_is_read() -> None:
    smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running(FakeEngine()) as server, connected(server.url) as client:
        framed = b"Content-Length: " + str(5 + len(smuggled)).encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(HEAD + framed + b"0\r\n\r\n" + smuggled)
        got = read_all(client)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert b"both content-length and transfer-encoding" in got
    assert b'"version"' not in got


def test_a_head_without_end_is_refused_before_it_is_much() -> None:
    with listening(Service()) as url, connected(url) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: ")
        sent = 0
        try:
            while sent < 64 << 20:
                sent += client.send(b"x" * (1 << 16))
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert sent < 64 << 20


def test_what_stands_behind_a_body_is_no_header_and_has_an_end() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            while (await receive()).get("more_body"):
                pass
            seen.append(scope["headers"])
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    server = uvicorn.Server(uvicorn.Config(app, http=connection_type(), lifespan="off", log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            with connected(url) as client:
                client.sendall(chunked + b"1\r\na\r\n0\r\nAuthorization: Bearer another\r\n\r\n")
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            for endless in (b"0\r\nX: ", b"5;x="):
                with connected(url) as client:
                    client.sendall(chunked + endless)
                    sent = 0
                    try:
                        while sent < 64 << 20:
                            sent += client.send(b"x" * (1 << 16))
                    except (ConnectionResetError, BrokenPipeError):
                        pass
                assert sent < 64 << 20
        finally:
            server.should_exit = True
            thread.join()
    assert [name for name, _ in seen[0]] == [b"host", b"content-type", b"transfer-encoding"]


def test_a_head_may_be_as_long_in_many_pieces_as_in_one() -> None:
    more = b"".join(b"x-%d: %b\r\n" % (number, b"y" * 500) for number in range(110))
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + more + b"Connection: close\r\n\r\n"
    with listening(Service()) as url, connected(url) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(head), 700):
            client.sendall(head[at : at + 700])
            select.select([client], [], [], 0.001)
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


def test_who_asks_for_two_things_at_once_and_leaves_has_both_ended() -> None:
    engine = FakeEngine(answer=b"Rome.")
    engine.gate.clear()
    body = b'{"prompt": "x", "max_tokens": 5, "stream": true}'
    head = HEAD + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n"
    with running(engine) as server, connected(server.url) as client:
        client.sendall(2 * (head + body))
        eventually(lambda: engine.load().running == 1)
        client.close()
        eventually(lambda: len(engine.aborted) == 1)
        engine.gate.set()


def test_two_requests_sent_at_once_are_answered_one_after_the_other() -> None:
    body = b'{"prompt": "x", "max_tokens": 5}'
    head = HEAD + b"Content-Length: " + str(len(body)).encode() + b"\r\n"
    with running(FakeEngine(answer=b"Rome.")) as server, connected(server.url) as client:
        client.sendall(head + b"\r\n" + body + head + b"Connection: close\r\n\r\n" + body)
        got = read_all(client)
    assert got.count(b"HTTP/1.1 200 OK") == got.count(b"Rome.") == 2


@pytest.mark.parametrize("offer", [b"", b"Connection: upgrade\r\nUpgrade: h2c\r\n"], ids=["plain", "offers another protocol"])
def test_an_old_client_gets_its_stream_without_chunks_and_then_the_end_of_the_connection(offer: bytes) -> None:
    body = b'{"prompt": "x", "max_tokens": 5, "stream": true}'
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + offer + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n"
    with running(FakeEngine(answer=b"Rome.")) as server, connected(server.url) as client:
        client.sendall(head + body)
        named, _, got = read_all(client).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in named.lower()
    assert got.startswith(b"data: ")
    assert got.endswith(b"data: [DONE]\n\n")


def test_a_client_that_offers_another_protocol_is_answered_in_this_one() -> None:
    """As Java's own client does at first."""
    body = b'{"prompt": "x", "max_tokens": 5}'
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    head = HEAD + offer + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n"
    with running(FakeEngine(answer=b"Rome.")) as server, connected(server.url) as client:
        client.sendall(head)
        client.sendall(body)
        got = b""
        while b"Rome." not in got:
            piece = client.recv(1 << 16)
            assert piece
            got += piece
        ask_version(client)
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\nGET /ver")
        client.sendall(b"sion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_all(client).count(b"HTTP/1.1 200 OK") == 2


def test_who_offers_another_protocol_and_asks_for_the_end_of_the_connection_gets_it() -> None:
    with listening(Service()) as url, connected(url) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n")
        assert b"\r\nconnection: close\r\n" in read_all(client).lower()


def test_a_body_is_what_was_sent_however_it_comes() -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000)))
    body = json.dumps({"prompt": text, "max_tokens": 1}, ensure_ascii=False).encode()
    ends = [*range(0, 20_000, 7), *range(20_001, 40_000, 4096)]
    pieces = [body[begin:end] for begin, end in itertools.pairwise([*ends, len(body)])]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    engine = FakeEngine()
    with running(engine) as server, connected(server.url) as client:
        client.sendall(HEAD.replace(b"completions", b"completions/render") + b"Transfer-Encoding: chunked\r\n\r\n")
        client.sendall(chunks)
        whole = httpx.post(f"{server.url}/v1/completions/render", json={"prompt": text, "max_tokens": 1}, timeout=60)
        got = b""
        while whole.content not in got:
            piece = client.recv(1 << 16)
            assert piece, got[:1000]
            got += piece
    assert whole.status_code == 200
