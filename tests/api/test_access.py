"""Whoever a browser speaks for: a server on loopback answers its own names and pages only, and bodies that are JSON."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from api.serving import Listening, listening, served
from headstart.api.access import is_loopback
from headstart.api.service import Service
from headstart.testing.fake_engine import FakeEngine


def serving(host: str) -> Iterator[Listening]:
    service, engine = Service(), FakeEngine()
    service.ready(served(engine))
    with listening(service, host=host) as url:
        yield Listening(url, service)
    engine.close()


@pytest.fixture(scope="module")
def local() -> Iterator[Listening]:
    yield from serving("127.0.0.1")


@pytest.fixture(scope="module")
def remote() -> Iterator[Listening]:
    yield from serving("0.0.0.0")


def answer(server: Listening, **headers: str) -> tuple[int, str]:
    response = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=20)
    assert response.headers["x-request-id"]
    return response.status_code, response.json().get("error", {}).get("code", "")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.8.8.8:1", "[::1]", "[::1]:8000"])
def test_a_local_server_answers_its_own_names(local: Listening, host: str) -> None:
    assert answer(local, host=host) == (200, "")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.5", "", "[::"]
)
def test_a_local_server_refuses_other_names(local: Listening, host: str) -> None:
    assert answer(local, host=host) == (403, "forbidden_host")
    refused = httpx.get(f"{local.url}/metrics", headers={"host": host}, timeout=20)
    assert refused.status_code == 403
    assert "answers to localhost only" in refused.json()["error"]["message"]


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:8000", "https://[::1]"])
def test_a_local_server_answers_pages_of_its_machine(local: Listening, origin: str) -> None:
    assert answer(local, origin=origin) == (200, "")


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost.evil.example", "null", "", "file://localhost"])
def test_a_local_server_refuses_pages_from_elsewhere(local: Listening, origin: str) -> None:
    assert answer(local, origin=origin) == (403, "forbidden_origin")


def test_a_server_for_others_answers_any_name_but_only_pages_of_that_name(remote: Listening) -> None:
    assert answer(remote, host="kv.example") == (200, "")
    assert answer(remote, host="kv.example:8000", origin="https://kv.example") == (200, "")
    assert answer(remote, host="kv.example", origin="https://evil.example") == (403, "forbidden_origin")
    assert answer(remote, host="", origin="null") == (403, "forbidden_origin")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", None])
def test_a_body_that_does_not_say_it_is_json_is_a_415(local: Listening, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    for path in ("chat/completions", "completions"):
        response = httpx.post(f"{local.url}/v1/{path}", content=b'{"prompt": "x"}', headers=headers, timeout=20)
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert "content-type: application/json" in response.json()["error"]["message"]


def test_a_charset_may_stand_beside_json(local: Listening) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = b'{"prompt": "x", "max_tokens": 1}'
    assert httpx.post(f"{local.url}/v1/completions", content=body, headers=headers, timeout=20).status_code == 200


@pytest.mark.parametrize(
    ("host", "only_here"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "192.168.1.5", "myhost", "")],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here
