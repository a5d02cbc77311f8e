"""The router's admin API, as the planner, `up`, `ps` and `top` ask it."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from headstart.errors import NoServer, RequestError

_TIMEOUT_S = 10.0


class RouterClient:
    """`url`: of a `headstart route`; `api_key`: of an operator, where it asks for keys."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(timeout=_TIMEOUT_S, trust_env=False, headers=headers)

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def workers(self) -> list[dict[str, Any]]:
        """Return what the router tells of its workers. Raises NoServer, or RequestError where it refuses."""
        told = self._ask("GET", "")
        found = told.get("workers") if isinstance(told, dict) else None
        if not isinstance(found, list):
            raise NoServer(f"what answers at {self.url} is no headstart router; say where with --router")
        return found

    def add(self, url: str, role: str) -> None:
        self._ask("POST", "", {"url": url, "role": role})

    def set_role(self, id: str, role: str) -> None:
        self._ask("PATCH", f"/{quote(id, safe='')}", {"role": role})

    def drain(self, id: str) -> None:
        """Have it get nothing new and be forgotten when its requests have ended. One that is not there is forgotten already."""
        self._ask("DELETE", f"/{quote(id, safe='')}", gone=True)

    def forget(self, id: str) -> None:
        """Have it be forgotten at once; its requests that have no token yet are sent elsewhere."""
        self._ask("DELETE", f"/{quote(id, safe='')}?now=1", gone=True)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None, *, gone: bool = False) -> Any:
        try:
            answer = self._client.request(method, f"{self.url}/router/workers{path}", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise NoServer(
                f"no router answers at {self.url} ({error}); start one with headstart up or headstart route, or say where with "
                "--router"
            ) from error
        if answer.status_code == 404 and gone:
            return None
        try:
            told: Any = answer.json() if answer.content else None
            if answer.is_success:
                return told
            said = str(told["error"]["message"])
        except (ValueError, KeyError, TypeError):
            raise NoServer(
                f"what answers at {self.url} is no headstart router (HTTP {answer.status_code}); say where with --router"
            ) from None
        raise RequestError(f"{self.url}: {said}")
