"""The openai and anthropic libraries through a router, whole and streamed, in every dialect; what it passes on and counts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx
import openai
import pytest

from api.serving import Running, running
from asking import eventually
from gateway.gateway_kit import Routed, routed
from headstart.testing.fake_engine import FakeEngine

USER: list[Any] = [{"role": "user", "content": "hello " * 40}]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Running]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running(FakeEngine(), keepalive_s=0.05)) for _ in range(2)]


@pytest.fixture(scope="module")
def router(workers: list[Running]) -> Iterator[Routed]:
    with routed([worker.url for worker in workers], keepalive_s=0.2) as router:
        eventually(lambda: router.ready() == 2)
        yield router


@pytest.fixture(scope="module")
def client(router: Routed) -> Iterator[openai.OpenAI]:
    with router.client() as client:
        yield client


@pytest.fixture(scope="module")
def messages(router: Routed) -> Iterator[anthropic.Anthropic]:
    with router.anthropic() as client:
        yield client


def test_a_chat_whole_and_streamed_says_and_counts_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=USER, max_tokens=6)
    chunks = list(client.chat.completions.create(model="fake", messages=USER, max_tokens=6, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert all(chunk.choices for chunk in chunks)  # the usage that the router asked for is its own
    told = list(
        client.chat.completions.create(
            model="fake", messages=USER, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    assert whole.usage is not None
    assert told[-1].usage is not None
    assert told[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_and_responses(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="fake", prompt="once upon", max_tokens=5)
    assert len(plain.choices[0].text) == 5
    assert len("".join(part.choices[0].text for part in client.completions.create(
        model="fake", prompt="once upon", max_tokens=5, stream=True
    ))) == 5  # fmt: skip
    events = list(client.responses.create(model="fake", input="hello", max_output_tokens=5, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"


def test_a_response_goes_on_where_the_earlier_one_was_given(client: openai.OpenAI, workers: list[Running]) -> None:
    for number in range(4):
        first = client.responses.create(model="fake", input=f"hello {number}", max_output_tokens=5)
        again = client.responses.create(model="fake", input="and", max_output_tokens=5, previous_response_id=first.id)
        assert again.id != first.id
        assert client.responses.retrieve(first.id).output_text == first.output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="fake", input="and", previous_response_id="resp_none")


def test_messages_whole_and_streamed_and_counted(messages: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "any", "max_tokens": 6, "messages": USER}
    whole = messages.messages.create(**asked)
    with messages.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert final.usage.output_tokens == 6
    assert messages.messages.count_tokens(model="any", messages=USER).input_tokens == 246
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        messages.messages.create(**{**asked, "max_tokens": -1})


def test_keepalives_go_out_while_a_prompt_waits_in_each_dialect(router: Routed, workers: list[Running]) -> None:
    for worker in workers:
        worker.engine.gate.clear()
    try:
        for path, body, said in (
            ("/v1/chat/completions", {"messages": USER, "max_tokens": 2}, b": keep-alive"),
            ("/v1/messages", {"messages": USER, "max_tokens": 2}, b"event: ping"),
        ):
            with router.http.stream("POST", path, json={**body, "stream": True}) as answer:
                assert answer.status_code == 200
                heard = b""
                for part in answer.iter_raw():
                    heard += part
                    if heard.count(said) >= 2:
                        break
                assert b"delta" not in heard
    finally:
        for worker in workers:
            worker.engine.gate.set()
    eventually(lambda: router.router.in_flight == 0)


def test_what_a_worker_knows_of_a_request_is_asked_there(router: Routed, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER, max_tokens=3)
    assert answer.usage is not None
    eventually(lambda: router.http.get(f"/v1/headstart/requests/{answer.id}").status_code == 200)
    receipt = router.get(f"/v1/headstart/requests/{answer.id}")
    assert receipt["usage"]["prompt"] == answer.usage.prompt_tokens
    assert router.http.get("/v1/headstart/requests/none").status_code == 404
    head = router.http.head(f"/v1/headstart/requests/{answer.id}", timeout=10)
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0
    tokens = router.http.post("/tokenize", json={"prompt": "hello"}).json()
    assert tokens["count"] == 5


def test_models_health_and_metrics_are_the_router_s(router: Routed, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    assert router.get("/health")["ready"] == 2
    assert router.get("/ready") == {"ready": True}
    text = router.http.get("/metrics").text
    assert 'headstart_router_workers{state="ready"} 2.0' in text
    assert 'headstart_router_requests_total{finish="length"}' in text


def test_a_decision_can_be_asked_for_by_either_id(router: Routed, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="fake", messages=USER, max_tokens=1)
    by_request = router.get("/router/decisions", params={"request": raw.headers["x-request-id"]})
    by_answer = router.get("/router/decisions", params={"request": raw.parse().id})
    assert by_request == by_answer
    (attempt,) = by_request["attempts"]
    assert attempt["outcome"] == "answered"
    assert {one["worker"] for one in attempt["scores"]} == set(router.router.fleet.workers)
    assert "first token in about" in attempt["reason"]
    assert router.get("/router/decisions", params={"limit": 1})["decisions"][0] == by_request
    assert router.http.get("/router/decisions?request=none").status_code == 404


def test_a_worker_is_drained_before_it_goes(
    router: Routed, workers: list[Running], client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headstart")
    with running(FakeEngine()) as third:
        router.add(third.url)
        id = third.url.removeprefix("http://")
        assert router.http.patch(f"/router/workers/{id}", json={"role": "decode"}).json()["role"] == "decode"
        assert router.http.patch(f"/router/workers/{id}", json={"role": "cook"}).status_code == 400
        unknown = router.http.patch(f"/router/workers/{id}", json={"drain": True}).json()["error"]
        assert (unknown["param"], unknown["message"]) == ("drain", "drain is not known here")
        third.engine.gate.clear()
        others = [one.url.removeprefix("http://") for one in workers]
        for other in others:
            router.http.patch(f"/router/workers/{other}", json={"draining": True}).raise_for_status()
        with router.http.stream(
            "POST", "/v1/chat/completions", json={"messages": USER, "max_tokens": 2, "stream": True}
        ) as one:
            eventually(lambda: router.workers()[third.url]["in_flight"] == 1)
            assert router.http.delete(f"/router/workers/{id}").status_code == 202
            assert router.workers()[third.url]["state"] == "draining"
            for other in others:
                router.http.patch(f"/router/workers/{other}", json={"draining": False}).raise_for_status()
            assert client.chat.completions.create(model="fake", messages=USER, max_tokens=1).choices
            assert not third.engine.aborted
            third.engine.gate.set()
            assert b"[DONE]" in one.read()
        eventually(lambda: third.url not in router.workers())
        assert router.http.get(f"/router/workers/{id}").status_code == 404
        eventually(lambda: f"worker {id} removed" in caplog.text)
        assert f"worker {id} is down" not in caplog.text  # who was asked to go is no failure


def test_pages_of_elsewhere_and_strangers_are_refused(router: Routed) -> None:
    assert httpx.get(f"{router.url}/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert router.http.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    unknown = router.http.get("/nowhere")
    assert unknown.status_code == 404
    assert "/v1/messages" in unknown.json()["error"]["message"]
