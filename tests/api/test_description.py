"""The OpenAPI description is true: whatever fits it is answered, soon, never with a failure of the server, and in the form that
it gives."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import Case

from api.serving import Running, running
from headstart.api.openapi import description
from headstart.testing.fake_engine import FakeEngine

DESCRIPTION = description()
PATHS = sorted(path for path, methods in DESCRIPTION["paths"].items() if "post" in methods)
SOAK_S = 3600.0  # for all paths together


def closed(schema: Any) -> Any:
    """Return a copy in which an object has no property that is not described."""
    schema = copy.deepcopy(schema)
    for one in schema["components"]["schemas"].values():
        if "properties" in one:
            one["additionalProperties"] = False
    return schema


CLOSED = closed(DESCRIPTION)


def holds(response: httpx.Response, path: str, method: str = "post") -> Any:
    """Assert that a response is as described, and that nothing is in it that is not; return what it says."""
    answers = DESCRIPTION["paths"][path][method]["responses"]
    kind = response.headers["content-type"].partition(";")[0]
    schema = answers.get(str(response.status_code), answers["default"])["content"][kind]["schema"]
    content = response.json() if kind == "application/json" else response.text
    jsonschema.Draft202012Validator({**CLOSED, **schema}).validate(content)
    return content


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(answer=b"Rome."), family="hermes") as server:
        yield server


def answers_all(server: Running, path: str, *, examples: int, number: int = 0) -> None:
    schema = schemathesis.openapi.from_dict(DESCRIPTION)
    with httpx.Client(base_url=server.url, timeout=60) as client:

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @seed(number)
        @given(case=schema[path]["POST"].as_strategy())
        def answers(case: Case) -> None:
            content = b"" if case.body is None or not isinstance(case.body, dict | list) else None
            body = {"content": content} if content is not None else {"json": case.body}
            response = client.post(path, headers={"content-type": "application/json"}, **body)
            assert response.status_code < 500, response.text
            assert response.headers["x-request-id"]
            holds(response, path)

        answers()
    assert client.is_closed


@pytest.mark.parametrize("path", PATHS)
def test_no_body_that_fits_the_description_fails_the_server(server: Running, path: str) -> None:
    answers_all(server, path, examples=8)


@pytest.mark.soak
@pytest.mark.parametrize("path", PATHS)
def test_no_body_that_fits_the_description_fails_the_server_for_an_hour(server: Running, path: str) -> None:
    until_s, number = time.monotonic() + SOAK_S / len(PATHS), 0
    while time.monotonic() < until_s:
        number += 1
        answers_all(server, path, examples=200, number=number)


def test_the_description_is_served(server: Running) -> None:
    served = httpx.get(server.url + "/openapi.json", timeout=20).json()
    assert served == description()
    assert len(PATHS) == 9


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
TOOL = {"name": "look", "parameters": {"type": "object"}}
FUNCTION = {"type": "function", "function": TOOL}
ANSWER = b'<think>\nWhere?\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at": "Rome"}}\n</tool_call>'


def test_answers_of_every_kind_are_as_described(server: Running) -> None:
    """With reasoning, calls, log probabilities and several answers; and what is told of a request afterwards."""
    server.engine.answer = ANSWER
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {**CHAT, "tools": [FUNCTION], "n": 2, "logprobs": True, "top_logprobs": 2},
        "/v1/completions": {"prompt": "hi", "max_tokens": 9, "logprobs": 2, "n": 2},
        "/v1/responses": {"input": "hi", "tools": [{"type": "function", **TOOL}], "top_logprobs": 1, "metadata": {"a": "b"}},
        "/v1/messages": {**CHAT, "tools": [{"name": "look", "input_schema": {}}], "diagnostics": {"previous_message_id": "x"}},
        "/v1/messages/count_tokens": CHAT,
        "/v1/chat/completions/render": {**CHAT, "tools": [FUNCTION]},
        "/v1/completions/render": {"prompt": [104, 105]},
        "/tokenize": {"prompt": "hi", "return_token_strs": True},
        "/detokenize": {"tokens": [104]},
    }
    assert sorted(bodies) == PATHS
    with httpx.Client(base_url=server.url, timeout=60) as http:
        said = {path: holds(http.post(path, json=body), path) for path, body in bodies.items()}
        assert said["/v1/chat/completions"]["choices"][1]["message"]["tool_calls"][0]["function"]["name"] == "look"
        assert [one["type"] for one in said["/v1/responses"]["output"]] == ["reasoning", "message", "function_call"]
        assert [one["type"] for one in said["/v1/messages"]["content"]] == ["thinking", "text", "tool_use"]
        assert said["/v1/messages"]["diagnostics"]["cache_miss_reason"]["type"] == "previous_message_not_found"
        for path in ("/v1/responses", "/v1/messages", "/v1/chat/completions", "/v1/completions"):
            assert holds(http.post(path, json={**bodies[path], "stream": True}), path)
            assert http.post(path, json={}).status_code == 400
            holds(http.post(path, json={}), path)
        for path in ("/health", "/ready", "/version", "/v1/models"):
            holds(http.get(path), path, "get")
        holds(http.get("/v1/models/fake"), "/v1/models/{name}", "get")
        id = said["/v1/chat/completions"]["id"]
        for path in ("/v1/headstart/requests/{id}", "/v1/headstart/requests/{id}/why", "/v1/headstart/requests/{id}/tokens"):
            holds(http.get(path.replace("{id}", id)), path, "get")
        holds(http.get("/v1/models/none"), "/v1/models/{name}", "get")
    server.engine.answer = b"Rome."
