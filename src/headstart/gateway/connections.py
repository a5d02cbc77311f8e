"""Connections to workers: kept, and a pool for each worker, since a pool looks at all of its connections for each request."""

from __future__ import annotations

import ssl
from functools import cached_property

import httpx

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=4.0)


class PerWorker(httpx.AsyncBaseTransport):
    """For `httpx.AsyncClient`. Its users know a bounded number of workers, and `forget` those that are gone."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, str, int | None], httpx.AsyncHTTPTransport] = {}

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context()  # which takes a while to read, and is asked for where there is TLS alone

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        key = url.scheme, url.host, url.port
        pool = self._pools.get(key)
        if pool is None:
            verify = self._trusted if url.scheme == "https" else False
            pool = self._pools[key] = httpx.AsyncHTTPTransport(verify=verify, limits=_LIMITS, trust_env=False)
        return await pool.handle_async_request(request)

    async def forget(self, address: str) -> None:
        """Close what is kept of a worker."""
        url = httpx.URL(address)
        pool = self._pools.pop((url.scheme, url.host, url.port), None)
        if pool is not None:
            await pool.aclose()

    async def aclose(self) -> None:
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            await pool.aclose()
