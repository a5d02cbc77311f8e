"""Who may ask. A server on loopback is reached by every web page that its user opens, so requests are judged by their headers.

A page may send requests to any address, and under a name of its own that suddenly means 127.0.0.1 it may even read the
answers (DNS rebinding). Browsers cannot be made to lie in Host and Origin, so these tell: Host must be a name of this
machine, Origin, where there is one, too. A server that others may reach cannot know its names; there, Origin must be Host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headstart.api.accounts import Accounts
from headstart.api.errors import Forbidden, UnsupportedMediaType, WrongKey, error_response
from headstart.api.keyring import ANYBODY, Caller
from headstart.errors import RequestError

OPEN = frozenset({"/health", "/ready", "/version"})  # for whoever watches over the server; they tell of nobody
_CALLER = "headstart.caller"


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name counts as reachable by others unless it is localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_json(headers: Headers) -> None:
    """Raise UnsupportedMediaType unless the body is JSON: any page may send other kinds without asking (CORS)."""
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaType(
            f"content-type is {kind[:64]!r}; send the header content-type: application/json", code="unsupported_media_type"
        )


class HostCheck:
    """Answer 403 to requests that came here under a foreign name or from a foreign page."""

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self._app = app
        self._host = host.lower()
        self._local = is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Headers(scope=scope))) is not None:
            response = error_response(refusal, scope)
            response.headers["connection"] = "close"  # what comes behind it was not meant for here
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> RequestError | None:
        if "transfer-encoding" in headers and "content-length" in headers:  # servers on the way may read it in another way
            return RequestError(
                "the request has both content-length and transfer-encoding; send one of them", code="invalid_http"
            )
        host, origin = _host_of(f"//{headers.get('host', '')}"), headers.get("origin")
        if self._local and not self._is_ours(host):
            return Forbidden(
                f"the header Host names {host[:64]!r}, but this server answers to localhost only; use http://localhost, or a "
                "proxy that passes on its own upstream's name",
                code="forbidden_host",
            )
        if origin is not None:
            asker = _host_of(origin)
            if not (self._is_ours(asker) if self._local else asker and asker == host):
                return Forbidden(
                    f"a page of {origin[:64]!r} may not use this server; serve it from the same host, or put a proxy between",
                    code="forbidden_origin",
                )
        return None

    def _is_ours(self, host: str) -> bool:
        return host == self._host or is_loopback(host)


class KeyCheck:
    """Let in whoever has a key, where there are keys; everything but `OPEN` is behind it. `on_error` makes the answer to who
    has none."""

    def __init__(
        self, app: ASGIApp, accounts: Accounts, *, on_error: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self._app = app
        self._accounts = accounts
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                scope[_CALLER] = self._accounts.caller(Headers(scope=scope))
            except WrongKey as error:
                response = await self._on_error(Request(scope), error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Return who sent a request."""
    caller: Caller = request.scope.get(_CALLER, ANYBODY)
    return caller


def _host_of(url: str) -> str:
    """Return the host in lower case, without port and brackets; "" for what is no address of the web."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "") if parts.scheme in ("", "http", "https") else ""
    except ValueError:
        return ""
