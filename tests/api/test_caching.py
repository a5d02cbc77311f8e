"""What callers say about the cache, in the fields of three providers, and what becomes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from api.serving import Running, listening, running, served
from headstart.api.caching import Caching, Options, caching_of, controls_in, salt_of
from headstart.api.service import Service
from headstart.engine.base import GenerationRequest
from headstart.errors import RequestError
from headstart.testing.fake_engine import FakeEngine

DAY_S = 86400.0
TEXT = "What is the same in every request stands first. " * 4 + "x"
MARK = {"type": "ephemeral"}


@pytest.fixture
def server() -> Iterator[Running]:
    engine = FakeEngine(answer=b"yes")
    service = Service(longest_promise_s=7 * DAY_S)
    service.ready(served(engine))
    with listening(service) as url:
        try:
            yield Running(url, service, engine)
        finally:
            engine.close()


def post(server: Running, path: str = "chat/completions", **body: Any) -> httpx.Response:
    body = body if "prompt" in body else {"messages": [{"role": "user", "content": TEXT}], **body}
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def asked(server: Running, **body: Any) -> GenerationRequest:
    answer = post(server, "completions" if "prompt" in body else "chat/completions", **body)
    assert answer.status_code == 200, answer.text
    return server.engine.submitted[-1]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800),
        ({"prompt_cache_options": {"ttl": "12h"}}, DAY_S / 2),
        ({"prompt_cache_options": {"ttl": "365d"}}, 7 * DAY_S),  # no caller promises itself more than the longest class
        ({"prompt_cache_retention": "24h"}, DAY_S),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"cache_control": MARK}, 300),
        ({"cache_control": MARK | {"ttl": "1h"}}, 3600),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": MARK | {"ttl": "1h"}}]}]},
            3600,
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": MARK}]}, 300),
        ({"cache_control": {"type": "something new"}}, 0),
    ],
)
def test_a_time_that_is_asked_for_is_what_the_engine_promises(server: Running, fields: dict[str, Any], seconds: float) -> None:
    assert asked(server, **fields).keep_s == seconds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "-5m"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_retention": "for ever"}, "prompt_cache_retention"),
        ({"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
        ({"user_id": "a b"}, "user_id"),
        ({"user_id": ""}, "user_id"),
        ({"cache_control": MARK | {"ttl": "1y"}}, "cache_control.ttl"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_field_that_is_wrong_is_refused_by_its_name(server: Running, fields: dict[str, Any], param: str) -> None:
    answer = post(server, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_user_id_and_cache_salt_keep_prompts_apart_and_prompt_cache_key_does_not(server: Running) -> None:
    def cached(**fields: Any) -> int:
        return int(post(server, **fields).json()["usage"]["prompt_cache_hit_tokens"])

    assert [cached(), cached()] == [0, 192]
    for apart in ({"user_id": "u1"}, {"user_id": "u2"}, {"cache_salt": "u1"}, {"user_id": "u1", "cache_salt": "s"}):
        assert [cached(**apart), cached(**apart)] == [0, 192]
    assert cached(prompt_cache_key="conversation 7") == 192
    assert server.engine.submitted[-1].session == "conversation 7"
    assert len({salt_of("a", None), salt_of(None, "a"), salt_of("a", "a"), salt_of(None, None)}) == 4


def test_the_header_names_the_conversation_before_the_field(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt_cache_key": "field"}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"x-headstart-session": "header"}).raise_for_status()
    assert server.engine.submitted[-1].session == "header"


EXPLICIT = {"prompt_cache_options": {"mode": "explicit"}}


def test_explicit_without_breakpoints_looks_nothing_up_and_keeps_nothing(server: Running) -> None:
    for _ in range(2):
        request = asked(server, **EXPLICIT)
        assert (request.use_cache, request.keep_tokens) == (False, 0)
    assert asked(server).use_cache
    assert asked(server, prompt="x", **EXPLICIT).use_cache is False
    assert asked(server, prompt_cache_options={"mode": "implicit"}).keep_tokens is None


def test_explicit_with_breakpoints_keeps_up_to_the_last_one(server: Running) -> None:
    here = {"prompt_cache_breakpoint": {"mode": "explicit"}}

    def part(text: str, **more: Any) -> dict[str, Any]:
        return {"type": "text", "text": text, **more}

    first = {"role": "system", "content": [part("one ", **here), part("two ", **here), part("three")]}
    for last, kept in [
        ({"role": "user", "content": "q"}, "<system>one two "),
        ({"role": "user", "content": "q", **here}, "<system>one two three<user>q"),
        ({"role": "user", "content": [part("q"), part("r")], **here}, "<system>one two three<user>qr"),
    ]:
        request = asked(server, messages=[first, last], **EXPLICIT)
        assert request.use_cache
        assert bytes(request.prompt[: request.keep_tokens]).decode() == kept
        assert bytes(request.prompt).decode().startswith("<system>one two three<user>q")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", [{"prompt": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}])
def test_prewarming_computes_and_keeps_a_prompt_and_says_nothing(server: Running, what: dict[str, Any], stream: bool) -> None:
    path = "completions" if "prompt" in what else "chat/completions"
    warm = {**what, "prompt_cache_options": {"prewarm": True, "ttl": "30m"}, "min_tokens": 4, "max_tokens": 5}
    answer = post(server, path, **warm, stream=stream, stream_options={"include_usage": True} if stream else None)
    assert answer.status_code == 200, answer.text
    request = server.engine.submitted[-1]
    assert (request.max_tokens, request.min_tokens, request.keep_s) == (0, 0, 1800)
    if not stream:
        body = answer.json()
        assert body["usage"]["completion_tokens"] == 0
        assert body["choices"][0]["finish_reason"] == "length"
        assert (body["choices"][0].get("text") or body["choices"][0].get("message", {}).get("content") or "") == ""
    usage = post(server, path, **what).json()["usage"]
    assert usage["prompt_cache_hit_tokens"] == 192


def test_how_far_a_prompt_is_comes_as_llama_cpp_says_it_and_the_openai_library_reads_it(server: Running) -> None:
    client = server.client()
    messages: Any = [{"role": "user", "content": TEXT}]
    chunks = list(
        client.chat.completions.create(model="fake", messages=messages, stream=True, extra_body={"return_progress": True})
    )
    assert chunks[0].model_extra is not None
    total = len("<user>" + TEXT)
    assert chunks[0].model_extra["prompt_progress"] == {"total": total, "cache": 0, "processed": total, "time_ms": 0}
    assert chunks[0].choices[0].delta.content is None
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "yes"
    again = list(client.completions.create(model="fake", prompt=TEXT, stream=True, extra_body={"return_progress": True}))
    assert again[0].model_extra is not None
    assert set(again[0].model_extra["prompt_progress"]) == {"total", "cache", "processed", "time_ms"}
    silent = client.chat.completions.create(model="fake", messages=messages, stream=True)
    assert all("prompt_progress" not in (chunk.model_extra or {}) for chunk in silent)
    whole = post(server, return_progress=True).json()
    assert "prompt_progress" not in json.dumps(whole)


def test_what_is_asked_for_in_memory_is_kept_there_alone(server: Running) -> None:
    for value, alone in (("in_memory", True), ("in-memory", True), ("24h", False)):
        assert asked(server, prompt_cache_retention=value).memory_only is alone


def test_the_fields_that_the_openai_library_sends_are_taken(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "x"}],
        extra_body={
            "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "implicit", "ttl": "30m", "comparison_response_id": "resp_1"},
        },
    )
    request = server.engine.submitted[-1]
    assert (request.session, request.keep_s) == ("k", 1800)


def test_rules_that_acted_are_named_in_a_header_of_whole_answers_and_streams(server: Running) -> None:
    parts = [{"type": "text", "text": "x", "cache_control": MARK}]
    for stream in (False, True):
        answer = post(server, messages=[{"role": "user", "content": parts}], stream=stream)
        assert answer.headers["x-headstart-canonical"] == "cache-control, text-parts"
        assert "x-headstart-canonical" not in post(server, stream=stream).headers


def test_caching_says_nothing_where_nothing_is_said() -> None:
    assert caching_of() == Caching()
    assert caching_of(options=Options(), controls=[None, 7, {}, "x"]) == Caching()
    assert list(controls_in("text")) == list(controls_in([7, None, {"content": [1]}])) == []
    with pytest.raises(RequestError):
        salt_of(None, "a" * 513)


def test_an_answer_that_was_cut_off_is_not_remembered() -> None:
    with running(FakeEngine(answer=b"yes no")) as server:
        body = {"messages": [{"role": "user", "content": "x"}]}
        for more in ({"stop": " "}, {"max_tokens": 3}):
            httpx.post(f"{server.url}/v1/chat/completions", json=body | more).raise_for_status()
        assert server.service.prompting._answers._kept.owners == 0
        httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status()
        assert server.service.prompting._answers._kept.owners == 1


def test_what_is_counted_and_rendered_without_generating_is_canonical_too(server: Running) -> None:
    header = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    counts = set()
    for number in ("fa690", "65abc1"):
        system = [{"type": "text", "text": header.format(number)}, {"type": "text", "text": TEXT, "cache_control": MARK}]
        body = {"model": "fake", "system": system, "messages": [{"role": "user", "content": "q"}]}
        told = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body)
        answer = httpx.post(f"{server.url}/v1/messages", json=body | {"max_tokens": 5})
        assert "billing-header" in answer.headers["x-headstart-canonical"]
        counts.add(told.json()["input_tokens"])
        assert server.engine.submitted[-1].keep_s == 300
    assert counts == {len(server.engine.submitted[-1].prompt)}
    assert answer.json()["usage"]["cache_read_input_tokens"] == 192


def test_responses_and_messages_take_what_concerns_the_cache(server: Running) -> None:
    def asked_of(path: str, **body: Any) -> GenerationRequest:
        answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "fake", **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        return server.engine.submitted[-1]

    warm = {"prompt_cache_options": {"prewarm": True, "ttl": "12h"}, "prompt_cache_key": "k"}
    request = asked_of("responses", input=TEXT, **warm)
    assert (request.max_tokens, request.keep_s, request.session) == (0, DAY_S / 2, "k")
    request = asked_of("messages", messages=[{"role": "user", "content": TEXT}], max_tokens=9, **warm)
    assert (request.max_tokens, request.keep_s) == (0, DAY_S / 2)
    user = {"metadata": {"user_id": "user_1_session_2"}}
    assert asked_of("messages", messages=[{"role": "user", "content": TEXT}], max_tokens=9, **user).salt is None
    here = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [{"type": "input_text", "text": "one ", **here}, {"type": "input_text", "text": "two"}]
    request = asked_of("responses", input=[{"role": "user", "content": parts}], **EXPLICIT)
    assert bytes(request.prompt[: request.keep_tokens]).decode() == "<user>one "


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_a_dialect_that_cannot_say_how_far_a_prompt_is_goes_on_as_it_does(server: Running, path: str) -> None:
    said: dict[str, Any] = {"input": TEXT} if path == "responses" else {"messages": [{"role": "user", "content": TEXT}]}
    body = {"model": "fake", "max_tokens": 9, "stream": True, "return_progress": True, **said}
    events = [line for line in httpx.post(f"{server.url}/v1/{path}", json=body).text.splitlines() if line.startswith("event")]
    assert events[0 if path == "responses" else -1] in ("event: response.created", "event: message_stop")
    assert server.engine.submitted[-1].progress
