"""Whatever fits the OpenAPI description is answered, soon and never with a failure of the server."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case

from api.serving import Running, running
from headstart.api.openapi import description
from headstart.testing.fake_engine import FakeEngine

PATHS = sorted(path for path, methods in description()["paths"].items() if "post" in methods)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(answer=b"Rome."), family="hermes") as server:
        yield server


def answers_all(server: Running, path: str, examples: int) -> None:
    schema = schemathesis.openapi.from_dict(description())
    with httpx.Client(base_url=server.url, timeout=20) as client:

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=schema[path]["POST"].as_strategy())
        def answers(case: Case) -> None:
            content = b"" if case.body is None or not isinstance(case.body, dict | list) else None
            body = {"content": content} if content is not None else {"json": case.body}
            response = client.post(path, headers={"content-type": "application/json"}, **body)
            assert response.status_code < 500, response.text
            assert response.headers["x-request-id"]

        answers()
    assert client.is_closed


@pytest.mark.parametrize("path", PATHS)
def test_no_body_that_fits_the_description_fails_the_server(server: Running, path: str) -> None:
    answers_all(server, path, examples=8)


@pytest.mark.soak
@pytest.mark.parametrize("path", PATHS)
def test_no_body_that_fits_the_description_fails_the_server_for_long(server: Running, path: str) -> None:
    answers_all(server, path, examples=20_000)


def test_the_description_is_served(server: Running) -> None:
    served = httpx.get(server.url + "/openapi.json", timeout=20).json()
    assert served == description()
    assert len(PATHS) == 9
