"""Asking a running server about requests that it served."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from headstart.errors import ConfigError, NoServer, NotThere, RequestError

TIMEOUT_S = 60.0
URL = "http://127.0.0.1:8000"


def asked_of(url: str, api_key: str | None, id: str, what: str) -> dict[str, Any]:
    """Return what a server tells of request `id` under `what`. Raises NoServer, NotThere or RequestError."""
    return _asked(url, api_key, f"/v1/headstart/requests/{quote(id, safe='')}/{what}", id, flag="--url")


def decision_of(url: str, api_key: str | None, id: str) -> dict[str, Any]:
    """Return where a router sent request `id`, and why. Raises as `asked_of` does."""
    return _asked(url, api_key, f"/router/decisions?request={quote(id, safe='')}", id, flag="--router")


def require_address(url: str, flag: str) -> str:
    """Return an address that was given with `flag`. Raises ConfigError for what is none."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{flag} {url!r} is no address; write it as in {flag} {URL}")
    return url


def _asked(url: str, api_key: str | None, path: str, id: str, *, flag: str) -> dict[str, Any]:
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    # Not httpx, which takes longer to import than the rest of `why` takes.
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    require_address(url, flag)
    what, command = ("router", "route") if flag == "--router" else ("server", "serve")
    try:
        asking = Request(f"{url.rstrip('/')}{path}", headers=headers)
        try:
            with urlopen(asking, timeout=TIMEOUT_S) as answer:
                status, content = answer.status, answer.read()
        except HTTPError as error:
            status, content = error.code, error.read()
    except (URLError, HTTPException, OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise NoServer(
            f"no {what} answers at {url} ({why}); start one with headstart {command}, or say where with {flag}"
        ) from error
    try:
        told = json.loads(content)
        if status == 200 and isinstance(told, dict):
            return told
        said = str(told["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise NoServer(f"what answers at {url} is no headstart {what} (HTTP {status}); say where with {flag}") from None
    if status == 404:
        raise NotThere(said, id=id, url=url)
    raise RequestError(f"{url}: {said}")
