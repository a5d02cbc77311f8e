"""A proxy that changes nothing and keeps what `lint` needs: for people who have no logs of what their programs send.

    client ──▶ recorder ──▶ the server       bytes of requests and answers pass as they come, streams at once
                  └─▶ FILE                   names of blocks and pieces, times, usage; texts only where asked for

No header is written down: of the key a caller has, and of sessions, digests under a secret that lies beside the file. What
goes wrong with keeping is logged and disturbs no request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from starlette.types import Receive, Scope, Send

from headstart.diagnose.entries import entries_of, whole_answer
from headstart.diagnose.prints import record_line
from headstart.errors import NotThere, RequestError

log = logging.getLogger("headstart")

KEPT_BYTES = 32 << 20  # of a request, and of an answer; larger ones pass and are not kept
_AT_ONCE = 2  # requests that are worked on for the file
_CONNECT_S = 15.0
_HOPS = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}


class RecordFile:
    """Lines of JSON in a file that only its owner may read, and the secret beside it. `close` is safe twice."""

    def __init__(self, path: Path, *, text: bool) -> None:
        """Open for appending. Raises NotThere."""
        self.path = path
        self._text = text
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._key = _secret(path.with_name(f"{path.name}.key"))
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NotThere(f"{path} cannot be written: {error.strerror}", path=path, errno=error.errno) from error
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._file)

    def keep(self, body: bytes, facts: dict[str, Any], *, caller: bytes) -> bool:
        """Append what is to be known of a request; return False for what is none. Raises OSError, RequestError, ValueError."""
        value = json.loads(body)
        found = entries_of("the request", value) if isinstance(value, Mapping) else []
        if not found or found[0].source is None:
            return False
        if self._text:
            line = {**facts, "tenant": self._digest(caller), "body": value}
        else:
            session = found[0].session
            conversation = found[0].source.conversation(as_sent=True)
            named = {"tenant": self._digest(caller), "session": None if session is None else self._digest(session.encode())}
            line = {**facts, **named, **record_line(conversation, self._key)}
        content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._file, content)
        if written != len(content):
            raise OSError(f"{written} of {len(content)} bytes were written")
        return True

    def _digest(self, content: bytes) -> str | None:
        return hashlib.blake2b(content, digest_size=6, key=self._key).hexdigest() if content else None


def _secret(path: Path) -> bytes:
    """Return the secret in a file, made on first use."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        key = path.read_bytes()
        if len(key) != 32:
            raise NotThere(f"{path} holds no secret of 32 bytes; remove it, and names will be made anew", path=path) from None
        return key
    with os.fdopen(file, "wb") as new:
        key = secrets.token_bytes(32)
        new.write(key)
    return key


class Recorder:
    """An ASGI application that passes requests to `to` and keeps them in `file`."""

    def __init__(self, to: httpx.URL, file: RecordFile) -> None:
        self._to = to
        self._file = file
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_S), follow_redirects=False)
        self._client.headers.clear()  # only what the client sends
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._keeping: set[asyncio.Task[None]] = set()
        self.kept = 0

    async def close(self) -> None:
        """Wait for what is still to be kept."""
        while self._keeping:
            await asyncio.wait(self._keeping)
        await self._client.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        begun = time.time()
        asked, answered = _Copy(), _Copy()
        raw_path = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        url = self._to.copy_with(raw_path=self._to.raw_path.rstrip(b"/") + raw_path + query)
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOPS and name != b"host"]
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        body = asked.passing(_body(receive)) if has_body else None
        request = self._client.build_request(scope["method"], url, headers=headers, content=body)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            log.warning("the server did not answer: %s", error or type(error).__name__)
            await _refuse(send, f"{self._to.host} does not answer: {error or type(error).__name__}")
            return
        told = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _HOPS]
        whole = False
        try:
            await send({"type": "http.response.start", "status": response.status_code, "headers": told})
            whole = await _passed(answered.passing(response.aiter_raw()), receive, send)
            await send({"type": "http.response.body", "body": b""})
        except httpx.HTTPError as error:
            log.warning("an answer broke off: %s", error or type(error).__name__)
            raise
        finally:
            await response.aclose()
            if scope["method"] == "POST" and asked.whole:
                facts = {"id": uuid.uuid4().hex, "at": begun, "end": time.time(), "path": scope["path"]}
                facts |= {"status": response.status_code, "complete": whole}
                self._keep(asked.content, answered, response.headers.get("content-encoding", ""), facts, _caller(headers))

    def _keep(self, body: bytes, answered: _Copy, encoding: str, facts: dict[str, Any], caller: bytes) -> None:
        async def keep() -> None:
            async with self._turns:
                try:
                    facts["usage"] = await asyncio.to_thread(_usage, answered, encoding)
                    self.kept += await asyncio.to_thread(self._file.keep, body, facts, caller=caller)
                except (OSError, RequestError, ValueError, RecursionError) as error:
                    log.warning("a request was not kept: %s", error)

        task = asyncio.get_running_loop().create_task(keep())
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)


class _Copy:
    """What passed by, up to a bound; `whole` says whether all of it is here."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0
        self.whole = False

    async def passing(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for part in parts:
            self._bytes += len(part)
            if self._bytes <= KEPT_BYTES:
                self._parts.append(part)
            else:
                self._parts.clear()
            yield part
        self.whole = self._bytes <= KEPT_BYTES

    @property
    def content(self) -> bytes:
        return b"".join(self._parts)


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise httpx.ReadError("the client has gone")
        more = message.get("more_body", False)
        if message.get("body"):
            yield message["body"]


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # the body of a request that has none


async def _passed(parts: AsyncIterator[bytes], receive: Receive, send: Send) -> bool:
    """Send every part at once. Return False if the client went away before the end; then the rest is not asked for."""
    gone = asyncio.ensure_future(_until_gone(receive))
    coming: asyncio.Future[bytes] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(parts))
            await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return False
            try:
                part = coming.result()
            except StopAsyncIteration:
                return True
            await send({"type": "http.response.body", "body": part, "more_body": True})
            if gone.done():
                return False
    finally:
        for task in (gone, coming):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait({task})


async def _refuse(send: Send, message: str) -> None:
    content = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": "bad_gateway"}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": 502, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _caller(headers: list[tuple[bytes, bytes]]) -> bytes:
    told = dict(headers)
    return told.get(b"x-api-key") or told.get(b"authorization", b"").removeprefix(b"Bearer ")


def _usage(answered: _Copy, encoding: str) -> dict[str, Any] | None:
    """Return the counts of an answer; None where it has none or is packed in a way that Python cannot read."""
    content = answered.content
    if encoding in ("gzip", "deflate"):
        try:
            unpacker = zlib.decompressobj(47)
            content = unpacker.decompress(content, 4 * KEPT_BYTES)
        except zlib.error:
            return None
    elif encoding not in ("", "identity"):
        return None
    answer = whole_answer(content.decode("utf-8", "replace"))
    usage = (answer or {}).get("usage")
    return _counts(usage) if isinstance(usage, Mapping) else None


def _counts(told: Mapping[str, Any]) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, Mapping):
            counts[name] = _counts(value)
        elif isinstance(value, int | float):
            counts[name] = value
    return counts
