"""Wrong use over HTTP: each mistake has a status, a stable code, the parameter and a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from api.serving import Running, running, served
from headstart.api import app, plumbing
from headstart.errors import ModelError
from headstart.testing.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(context_tokens=100)) as server:
        yield server


JSON = {"content-type": "application/json"}


def post(server: Running, body: Any, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
    content = {"content": body, "headers": JSON} if isinstance(body, bytes) else {"json": body}
    response = httpx.post(server.url + path, timeout=20, **content)
    assert response.headers["x-request-id"]
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert isinstance(found["code"], str)
    return response.status_code, found


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"max_tokens": -5}, "max_tokens", "max_tokens must be at least 1, but is -5"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "must be at least 1"),
        ({"max_tokens": 5.5}, "max_tokens", "max_tokens must be a whole number"),
        ({"max_tokens": "many"}, "max_tokens", "max_tokens must be a whole number"),
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": -2}, "top_k", "0 (all tokens) or more"),
        ({"n": 17}, "n", "n must be between 1 and 16, but is 17"),
        ({"n": 0}, "n", "between 1 and 16"),
        ({"min_p": 1.1}, "min_p", "between 0 and 1"),
        ({"presence_penalty": -2.5}, "presence_penalty", "between -2 and 2"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "between -2 and 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "between 0.01 and 100"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "must have token ids for names, but has 'the'"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100, but that of 5 is 101"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", "at most 1024 tokens"),
        ({"logit_bias": [5]}, "logit_bias", "logit_bias must be an object"),
        ({"top_logprobs": 2}, "top_logprobs", "goes with logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"logprobs": 2}, "logprobs", "must be true or false"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "which are 0 or more"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "between 0 and max_tokens, but is 5"),
        ({"min_tokens": -1}, "min_tokens", "between 0 and max_tokens"),
        ({"cache_salt": ""}, "cache_salt", "1 to 1024 characters"),
        ({"cache_salt": "s" * 1025}, "cache_salt", "1 to 1024 characters"),
        ({"stop": 5}, "stop", "stop must be a text or a list"),
        ({"stop": ["x"] * 100_000}, "stop", "at most 64 texts of 1024 characters"),
        ({"stop": "x" * 1025}, "stop", "at most 64 texts of 1024 characters"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024 token ids"),
        ({"messages": [{"role": "user", "content": ""}] * 100_001}, "messages", "must be at most 100000, but are 100001"),
        ({"n": 10**9}, "n", "between 1 and 16"),
        ({"max_tokens": -(10**30)}, "max_tokens", ""),
        ({"temperature": 1e300}, "temperature", "between 0 and 100"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "description": "x" * (5 << 20)}}]},
            "tools",
            "at most 4 MiB",
        ),
        ({"chat_template_kwargs": {"x": "x" * (5 << 20)}}, "chat_template_kwargs", "at most 4 MiB"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "has type 'image_url'; this server reads parts of text only",
        ),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hello"}, "messages", "messages must be a list"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "must be one of"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "must be true or false"),
    ],
)
def test_a_wrong_parameter_is_named(server: Running, change: dict[str, Any], param: str, says: str) -> None:
    status, error = post(server, {"messages": MESSAGES} | change)
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert says in error["message"]


NOT_FOLLOWED = [
    ({"functions": [{"name": "f"}]}, "functions", []),
    ({"modalities": ["text", "audio"]}, "modalities", ["text"]),
]


@pytest.mark.parametrize(("change", "param", "neutral"), NOT_FOLLOWED)
def test_what_would_change_the_answer_and_is_not_followed_is_refused(
    server: Running, change: dict[str, Any], param: str, neutral: object
) -> None:
    status, error = post(server, {"messages": MESSAGES} | change)
    assert (status, error["param"]) == (400, param)
    assert error["message"] == f"{param} is not supported by this version; leave it out"
    for nothing in (None, neutral):
        body = {"messages": MESSAGES, "max_tokens": 1, param: nothing}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20).status_code == 200


def test_what_a_completion_cannot_have_is_refused(server: Running) -> None:
    assert post(server, {"prompt": "a", "logprobs": 21}, "/v1/completions")[1]["param"] == "logprobs"
    assert post(server, {"prompt": "a", "logprobs": True}, "/v1/completions")[1]["param"] == "logprobs"
    assert post(server, {"prompt": "a", "suffix": "b"}, "/v1/completions")[1]["param"] == "suffix"


@pytest.mark.parametrize(
    ("name", "value"), [("priority", "high"), ("priority", "10000"), ("session", "s" * 257), ("retention", "r" * 65)]
)
def test_a_wrong_header_is_named(server: Running, name: str, value: str) -> None:
    header = f"x-headstart-{name}"
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers={header: value}, timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, header)


def test_a_missing_parameter_is_named(server: Running) -> None:
    assert post(server, {"model": "fake"})[1]["message"] == "messages is missing"
    assert post(server, {"model": "fake"}, "/v1/completions")[1]["param"] == "prompt"


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b"[1]", b'"text"', b"[" * 100_000])
def test_invalid_json_is_a_400(server: Running, body: bytes) -> None:
    status, error = post(server, body)
    assert (status, error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_said_to_be_empty(server: Running, body: bytes) -> None:
    assert post(server, body)[1]["message"] == "the body is empty; send a JSON object"


def test_several_prompts_and_echo_are_refused_in_a_sentence(server: Running) -> None:
    for prompts in (["a", "b"], [[1], [2]], ["a", 1], [[1], 2]):
        status, error = post(server, {"prompt": prompts}, "/v1/completions")
        assert (status, error["param"]) == (400, "prompt"), prompts
    assert "2 prompts" in post(server, {"prompt": [[1], [2]]}, "/v1/completions")[1]["message"]
    assert post(server, {"prompt": "a", "echo": True}, "/v1/completions")[1]["param"] == "echo"


def test_a_prompt_longer_than_the_context_names_both_numbers(server: Running) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "y" * 200}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "206" in caught.value.message
    assert "100" in caught.value.message
    with server.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="y" * 200, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_body_over_the_limit_is_a_413(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_BYTES", 1000)
    assert post(server, b"x" * 1001)[0] == 413
    chunked = httpx.post(f"{server.url}/v1/chat/completions", content=iter([b"x" * 600] * 2), headers=JSON, timeout=20)
    assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "request_too_large")


def test_bodies_that_are_too_large_together_are_a_429(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plumbing, "BODIES_BYTES", 1000)
    status, error = post(server, {"messages": [{"role": "user", "content": "x" * 1000}]})
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    assert server.service.bodies.held_bytes == 0


def test_a_large_body_is_parsed_beside_the_loop(server: Running) -> None:
    status, error = post(server, {"messages": [{"role": "user", "content": "x" * app.INLINE_BYTES}]})
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_unknown_paths_and_methods_answer_in_json(server: Running) -> None:
    status, error = post(server, {}, "/v1/embeddings")
    assert status == 404
    assert error["message"].startswith("there is no /v1/embeddings here; there are /health, ")
    assert "/v1/models, /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages" in error["message"]
    response = httpx.get(f"{server.url}/v1/chat/completions")
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")


def test_a_request_id_is_kept_if_plain_and_replaced_if_not(server: Running) -> None:
    assert httpx.get(f"{server.url}/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert httpx.get(f"{server.url}/version", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")


def test_a_bug_is_a_500_with_a_sentence_and_the_server_goes_on(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: object, on_event: object) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(type(server.engine), "submit", lambda self, request, on_event: broken(request, on_event))
        status, error = post(server, {"messages": MESSAGES})
    assert (status, error["type"]) == (500, "server_error")
    assert "planted" not in error["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_error_that_is_not_the_client_s_is_a_500_that_tells_no_path(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ModelError("/home/somebody/model is gone; fetch the model again")

    with monkeypatch.context() as patch:
        patch.setattr(type(server.engine), "submit", broken)
        status, error = post(server, {"messages": MESSAGES})
    assert (status, error["type"]) == (500, "server_error")
    assert "somebody" not in error["message"]
    assert "/home/somebody/model is gone" in caplog.text


def test_more_than_may_wait_is_a_429_and_the_client_comes_back() -> None:
    with running(FakeEngine(answer=b"ok", max_running=1), max_waiting=1) as server:
        server.engine.gate.clear()
        streams = []
        with server.client() as client:
            for _ in range(2):  # one runs, one waits
                streams.append(
                    client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}], stream=True)
                )
                wait_until(lambda: server.engine.load().running == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}])
            assert caught.value.response.headers["retry-after"] == "1"
            server.engine.gate.set()
            with server.client(retries=2) as patient:
                answer = patient.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}])
            assert answer.choices[0].message.content == "ok"
            for stream in streams:
                assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "ok"


def test_before_it_is_ready_the_server_says_how_far_it_is() -> None:
    with running(FakeEngine(answer=b"ok"), ready=False) as server:
        server.service.progress("reading weights", 0.25)
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (
            503,
            {"status": "loading", "stage": "reading weights", "progress": 0.25},
        )
        response = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": MESSAGES})
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert response.json()["error"]["code"] == "model_loading"
        assert "reading weights (25%)" in response.json()["error"]["message"]
        assert "headstart_ready 0.0" in httpx.get(f"{server.url}/metrics").text

        server.service.failed(ModelError("/home/somebody/model has no config.json"))
        public = "the model could not be loaded; the server's log says why"  # whose folders are whose is for the log
        assert httpx.get(f"{server.url}/health").json() == {"status": "failed", "error": public}
        with server.client() as client, pytest.raises(openai.InternalServerError, match=public):
            client.models.list()

        server.service.ready(served(server.engine))
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 200
        assert health.json()["status"] == "ok"
        assert health.json()["cache"] == server.engine.info.cache


def test_an_engine_that_failed_is_a_503_with_a_sentence() -> None:
    sentence = "the engine stopped; restart the server"
    with running(FakeEngine(failed=sentence)) as server:
        health = httpx.get(f"{server.url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed", "error": sentence})
        status, error = post(server, {"messages": MESSAGES})
        assert (status, error["code"], error["message"]) == (503, "engine_failed", sentence)


def wait_until(condition: Any) -> None:
    import threading

    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("did not come true within five seconds")
