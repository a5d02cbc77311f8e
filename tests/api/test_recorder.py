"""`record`: what passes is the same to the byte, streams come at once, and what is kept has no key and no text."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from api.serving import running
from diagnose.logs import clock, linted, turns
from headstart.api.recorder import Recorder, RecordFile
from headstart.diagnose.causes import Cause
from headstart.testing.fake_engine import FakeEngine

SECRET = "sk-very-secret-1234"


@contextmanager
def listening(app: Any, *, close: Callable[[], Any] | None = None) -> Iterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", server_header=False, date_header=False)
    server = uvicorn.Server(config)

    async def serve() -> None:
        await server.serve(sockets=[listener])
        if close is not None:
            await close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()


@contextmanager
def recording(to: str, path: Path, *, text: bool = False) -> Iterator[str]:
    """What was sent is in the file when the block ends."""
    file = RecordFile(path, text=text)
    recorder = Recorder(httpx.URL(to), file)
    with listening(recorder, close=recorder.close) as url:
        yield url
    file.close()


class Upstream:
    """Keeps what came and answers what it is told to, part by part."""

    def __init__(self, parts: list[bytes], headers: Sequence[tuple[bytes, bytes]] = (), status: int = 200) -> None:
        self.parts, self.headers, self.status = parts, headers, status
        self.scopes: list[Scope] = []
        self.bodies: list[bytes] = []
        self.next = threading.Semaphore(0)
        self.gone = threading.Event()
        self.waits = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for part in self.parts:
            if self.waits:
                while not self.next.acquire(blocking=False):
                    if await self._disconnected(receive):
                        self.gone.set()
                        return
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _disconnected(self, receive: Receive) -> bool:
        try:
            return bool((await asyncio.wait_for(receive(), 0.02))["type"] == "http.disconnect")
        except TimeoutError:
            return False


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("packed", [False, True])
def test_requests_and_answers_pass_to_the_byte(tmp_path: Path, packed: bool) -> None:
    answer = json.dumps({"id": "x", "usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 64}}}).encode()
    sent = gzip.compress(answer) if packed else answer
    headers = [(b"x-odd", b"\xe9 1"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
    upstream = Upstream([sent[:7], sent[7:]], [*headers, *([(b"content-encoding", b"gzip")] if packed else [])], status=207)
    body = b'{ "messages": [{"role":"user","content":"Gr\\u00fc\xc3\x9fe"}],  "model": "m"}'
    with listening(upstream) as to, recording(f"{to}/base", tmp_path / "log.jsonl") as url:
        asked = {"authorization": f"Bearer {SECRET}", "x-odd": "2", "content-type": "application/json"}
        with httpx.stream("POST", f"{url}/v1/x%2Fy?a=%20b", content=body, headers=asked) as response:
            got = b"".join(response.iter_raw())
    (scope,) = upstream.scopes
    assert (scope["method"], scope["raw_path"], scope["query_string"]) == ("POST", b"/base/v1/x%2Fy", b"a=%20b")
    assert upstream.bodies == [body]
    assert dict(scope["headers"])[b"authorization"] == f"Bearer {SECRET}".encode()
    assert (response.status_code, got) == (207, sent)
    assert [pair for pair in response.headers.raw if pair[0].lower() in (b"x-odd", b"set-cookie")] == headers
    (line,) = lines(tmp_path / "log.jsonl")
    assert line["usage"] == {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 64}}


def test_a_request_without_a_body_waits_for_its_answer(tmp_path: Path) -> None:
    upstream = Upstream([b"one", b"two"], [(b"content-length", b"6")])
    upstream.waits = True
    timer = threading.Timer(0.3, lambda: upstream.next.release(2))
    with listening(upstream) as to, recording(to, tmp_path / "log.jsonl") as url:
        timer.start()
        assert httpx.get(f"{url}/v1/models", timeout=20).content == b"onetwo"
    timer.join()


def test_parts_of_a_stream_come_one_by_one_and_a_client_that_goes_ends_it(tmp_path: Path) -> None:
    upstream = Upstream([b"data: one\n\n", b"data: two\n\n", b"data: three\n\n"])
    upstream.waits = True
    body = json.dumps(turns(1)[0]).encode()
    with listening(upstream) as to, recording(to, tmp_path / "log.jsonl") as url:
        with httpx.stream("POST", f"{url}/v1/chat/completions", content=body, timeout=20) as response:
            parts = response.iter_raw()
            for part in upstream.parts[:2]:
                upstream.next.release()
                assert next(parts) == part
        assert upstream.gone.wait(20)
    (line,) = lines(tmp_path / "log.jsonl")
    assert not line["complete"]


def test_neither_keys_nor_texts_are_kept_and_lint_finds_the_cause_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with running(FakeEngine(context_tokens=20_000)) as server, recording(server.url, path) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=SECRET, max_retries=0)
        for body in turns(3, system=clock):
            answer = client.chat.completions.create(**{**body, "model": "fake"}, max_tokens=2, user="Ada")
            assert answer.usage is not None
        for _ in client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hello."}], stream=True, stream_options={"include_usage": True}
        ):
            pass
        assert client.models.list().data
        client.close()
    kept = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = Path(f"{path}.key")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    for word in (SECRET, "10:1", "Question", "operations assistant", "Hello", secret.read_bytes().hex()):
        assert word not in kept
    assert len(lines(path)) == 4
    assert all(line["usage"]["prompt_tokens"] for line in lines(path))
    lint = linted(path)
    assert [(one.cause, one.place, one.requests) for one in lint.findings] == [(Cause.TIME, "messages[*].content", 2)]
    assert lint.logged is not None
    assert lint.logged.requests == 4
    assert len(lint.groups["tenant"]) == 1


def test_with_texts_the_log_is_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with running(FakeEngine(context_tokens=20_000)) as server, recording(server.url, path, text=True) as url:
        for body in turns(3, system=clock):
            httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 2}, headers={"x-api-key": SECRET}, timeout=20)
    assert SECRET not in path.read_text()
    assert [line["body"]["messages"] for line in lines(path)] == [body["messages"] for body in turns(3, system=clock)]
    assert [one.cause for one in linted(path).findings] == [Cause.TIME]


def test_what_record_keeps_and_what_is_read_from_texts_agree(tmp_path: Path) -> None:
    """The same requests, with their texts and without: the same tokens found again."""
    body = [json.dumps(one).encode() for one in (*turns(4), *turns(2, system=clock))]
    for text in (False, True):
        file = RecordFile(tmp_path / f"{text}.jsonl", text=text)
        for n, one in enumerate(body):
            assert file.keep(one, {"id": str(n), "at": n}, caller=b"")
        file.close()
        file.close()
    without, whole = linted(tmp_path / "False.jsonl"), linted(tmp_path / "True.jsonl")
    assert (without.all.tokens, without.all.kept) == (whole.all.tokens, whole.all.kept)


def test_a_server_that_does_not_answer_is_a_502(tmp_path: Path) -> None:
    with recording("http://127.0.0.1:1", tmp_path / "log.jsonl") as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=turns(1)[0], timeout=20)
    assert response.status_code == 502
    assert "does not answer" in response.json()["error"]["message"]


def test_the_command_records_until_it_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with running(FakeEngine(context_tokens=20_000)) as server:
        command = [sys.executable, "-m", "headstart.cli", "record", "--to", server.url, "--log", str(path), "--port", "0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        assert process.stderr is not None
        line = process.stderr.readline()
        url = line.split()[2]
        assert url.startswith("http://127.0.0.1:"), line
        ends = time.monotonic() + 30
        while True:
            try:
                answer = httpx.post(f"{url}/v1/chat/completions", json={**turns(1)[0], "max_tokens": 2}, timeout=20)
                break
            except httpx.ConnectError:
                assert time.monotonic() < ends
        assert answer.status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        with process.stderr:
            assert "1 requests kept" in process.stderr.read()
    assert len(lines(path)) == 1
