"""Asking a running server about requests that it served."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx

from headstart.errors import NoServer, NotThere, RequestError

TIMEOUT_S = 60.0
URL = "http://127.0.0.1:8000"


def asked_of(url: str, api_key: str | None, id: str, what: str) -> dict[str, Any]:
    """Return what a server tells of request `id` under `what`. Raises NoServer, NotThere or RequestError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
            answer = client.get(f"/v1/headstart/requests/{quote(id, safe='')}/{what}")
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise NoServer(
            f"no server answers at {url} ({error}); start one with headstart serve, or say where with --url"
        ) from error
    try:
        told = answer.json()
        if answer.status_code == 200 and isinstance(told, dict):
            return told
        said = str(told["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise NoServer(
            f"what answers at {url} is no headstart server (HTTP {answer.status_code}); say where with --url"
        ) from None
    if answer.status_code == 404:
        raise NotThere(said, id=id, url=url)
    raise RequestError(f"{url}: {said}")
