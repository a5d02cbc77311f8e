"""The real openai client against a real server: what clients do every day works as with the API they were written for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from api.serving import Running, running
from headstart.testing.fake_engine import FakeEngine

LONG = "All of this stands before the question. " * 8  # 320 bytes: five blocks


@pytest.fixture
def server() -> Iterator[Running]:
    with running(FakeEngine()) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def usage(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.usage.model_dump()
    return found


def test_models_lists_what_is_served(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object, model.model_extra) == ("fake", "model", {"max_model_len": 2048})
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt/4")
    assert caught.value.code == "model_not_found"


def test_chat_answers_and_counts(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=user("hello"), max_tokens=12)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert len(choice.message.content or "") == 12
    assert choice.finish_reason == "length"
    assert usage(answer)["completion_tokens"] == 12
    assert answer._request_id


def test_streamed_text_and_usage_equal_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=user(LONG), max_tokens=20, extra_body={"cache_salt": "a"})
    with client.chat.completions.create(
        model="fake",
        messages=user(LONG),
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": "b"},
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[-3:-1]] == [None, "length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert usage(chunks[-1]) == usage(whole)
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_comes_in_a_stream_only_when_asked(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model="fake", messages=user("hi"), max_tokens=3, stream=True) as stream:
        chunks = list(stream)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_usage_names_every_number_also_at_zero(client: openai.OpenAI) -> None:
    cold = usage(client.chat.completions.create(model="fake", messages=user(LONG), max_tokens=2))
    warm = usage(client.chat.completions.create(model="fake", messages=user(LONG), max_tokens=2))
    for found, cached in ((cold, 0), (warm, 320)):
        assert found["prompt_tokens_details"]["cached_tokens"] == cached
        assert found["prompt_cache_hit_tokens"] == cached
        assert found["prompt_cache_hit_tokens"] + found["prompt_cache_miss_tokens"] == found["prompt_tokens"] == 326
        assert found["total_tokens"] == 328
        assert found["completion_tokens_details"]["reasoning_tokens"] == 0


def test_five_salts_never_share_and_each_finds_its_own(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        answer = client.chat.completions.create(
            model="fake", messages=user(LONG), max_tokens=1, extra_body={"cache_salt": salt}
        )
        return int(usage(answer)["prompt_tokens_details"]["cached_tokens"])

    salts = ["a", "b", "c", "d", "e"]
    assert [cached(salt) for salt in salts] == [0] * 5
    assert [cached(salt) for salt in salts] == [320] * 5


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="once upon")
    assert (whole.object, len(whole.choices[0].text), whole.choices[0].finish_reason) == ("text_completion", 16, "length")
    with client.completions.create(
        model="fake", prompt=list(b"once upon"), stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert usage(chunks[-1]) == usage(whole)


@pytest.mark.parametrize("prompt", ["once", ["once"], list(b"once"), [list(b"once")]])
def test_one_prompt_may_be_written_in_four_ways(server: Running, client: openai.OpenAI, prompt: Any) -> None:
    client.completions.create(model="fake", prompt=prompt, max_tokens=1)
    assert server.engine.submitted[0].prompt == tuple(b"once")


def test_a_limit_may_be_written_as_a_float(server: Running) -> None:
    for path, body in (("chat/completions", {"messages": user("x")}), ("completions", {"prompt": "x"})):
        answer = httpx.post(f"{server.url}/v1/{path}", json=body | {"max_tokens": 5.0}, timeout=20)
        assert answer.json()["usage"]["completion_tokens"] == 5


def test_stop_texts_end_the_answer_and_stay_out_of_it() -> None:
    with running(FakeEngine(answer=b"one, two, three, four")) as server, server.client() as client:
        whole = client.chat.completions.create(model="fake", messages=user("count"), stop=", three")
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("one, two", "stop")
        with client.chat.completions.create(
            model="fake",
            messages=user("count"),
            stop=["never", ", three"],
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "one, two"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert usage(chunks[-1]) == usage(whole)


def test_log_and_usage_count_the_same_tokens_of_a_stopped_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headstart")
    with running(FakeEngine(answer=b"one, two" + b"." * 500)) as server, server.client() as client:
        for stream in (False, True):
            more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = client.chat.completions.create(model="fake", messages=user("count"), stop="two", **more)
            told = list(answer)[-1] if stream else answer
            assert usage(told)["completion_tokens"] == len("one, two")
    lines = [record.getMessage() for record in caplog.records if "first token" in record.getMessage()]
    assert [line.split("; ")[2].split(",")[0] for line in lines] == ["8 tokens"] * 2
    assert all(line.endswith("; stop") for line in lines)


def test_tools_are_taken_with_one_remark(client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headstart")
    tools: list[Any] = [{"type": "function", "function": {"name": "look"}}]
    for _ in range(2):
        client.chat.completions.create(model="fake", messages=user("x"), max_tokens=1, tools=tools, tool_choice="auto")
    assert len([record for record in caplog.records if " tools" in record.getMessage()]) == 1


def test_an_empty_answer_has_role_finish_and_usage() -> None:
    with running(FakeEngine(answer=b"")) as server, server.client() as client:
        with client.chat.completions.create(
            model="fake", messages=user("say nothing"), stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        assert [len(chunk.choices) for chunk in chunks] == [1, 1, 0]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[1].choices[0].finish_reason == "stop"
        assert usage(chunks[2])["completion_tokens"] == 0


def test_equal_seeds_give_equal_answers(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.chat.completions.create(
            model="fake", messages=user("dice"), max_tokens=30, temperature=1.0, top_p=0.9, seed=seed
        )
        return answer.choices[0].message.content or ""

    assert text(1) == text(1) != text(2)


def test_sampling_reaches_the_engine(server: Running, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="fake",
        messages=user("x"),
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.25,
        seed=7,
        extra_body={"top_k": 40, "cache_salt": "tenant"},
    )
    (request,) = server.engine.submitted
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k, request.sampling.seed) == (
        0.5,
        0.25,
        40,
        7,
    )
    assert (request.max_tokens, request.salt, request.stop_ids) == (3, "tenant", frozenset({0}))


def test_an_answer_without_a_limit_may_fill_the_context(server: Running, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="fake", messages=user("x"))
    client.chat.completions.create(model="fake", messages=user("x"), max_tokens=100_000)
    assert [len(request.prompt) + request.max_tokens for request in server.engine.submitted] == [2048, 2048]


def test_another_model_name_and_unknown_fields_are_served_with_one_log_line(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headstart")
    for _ in range(2):
        client.chat.completions.create(
            model="gpt-4o", messages=user("x"), max_tokens=1, extra_body={"frobnicate": 1}, user="somebody"
        )
    said = [record.getMessage() for record in caplog.records if "ignoring" in record.getMessage()]
    assert sorted(said) == [
        "ignoring unknown field 'frobnicate'",
        "ignoring unknown field 'user'",
        "ignoring unknown model name 'gpt-4o'",
    ]


def test_each_request_leaves_one_line(client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headstart")
    for _ in range(2):
        client.chat.completions.create(model="fake", messages=user(LONG), max_tokens=2)
    lines = [record.getMessage() for record in caplog.records if "first token" in record.getMessage()]
    assert len(lines) == 2
    assert "prompt 326, cached 0 from memory and 0 from disk, new 326; first token" in lines[0]
    assert "cached 320 from memory and 0 from disk, new 6" in lines[1]
    assert lines[1].endswith("; length")


def test_a_client_that_closes_its_stream_ends_the_request(server: Running, client: openai.OpenAI) -> None:
    seen = threading.Event()
    stream = client.chat.completions.create(model="fake", messages=user("x"), stream=True)
    for chunk in stream:
        if chunk.choices[0].delta.content:
            server.engine.gate.clear()
            break
    stream.close()
    for _ in range(200):
        if server.engine.aborted and server.engine.load().running == 0:
            seen.set()
            break
        threading.Event().wait(0.02)
    assert seen.is_set()


def test_a_client_that_leaves_before_a_whole_answer_ends_the_request(server: Running) -> None:
    server.engine.gate.clear()
    body = {"messages": user("x")}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.3)
    for _ in range(200):
        if server.engine.aborted and server.engine.load().running == 0:
            break
        threading.Event().wait(0.02)
    assert server.engine.load().running == 0
    assert len(server.engine.aborted) == 1


def test_a_long_prefill_is_kept_alive_by_comments() -> None:
    with running(FakeEngine(answer=b"done"), keepalive_s=0.02) as server:
        server.engine.gate.clear()
        body = {"messages": user("x"), "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=20) as response:
            lines = []
            for line in response.iter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 2:
                    server.engine.gate.set()
        data = [line for line in lines if line.startswith("data: ")]
        assert json.loads(data[0][6:])["choices"][0]["delta"]["role"] == "assistant"
        assert data[-1] == "data: [DONE]"


def test_a_failure_in_mid_stream_is_an_error_event_and_whole_a_500() -> None:
    with running(FakeEngine(fail_after=2)) as server, server.client() as client:
        stream = client.chat.completions.create(model="fake", messages=user("x"), stream=True)
        with pytest.raises(openai.APIError, match="told to fail"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="fake", messages=user("x"))
        assert (caught.value.code, caught.value.type) == ("generation_failed", "server_error")


def test_many_streams_at_once_stay_apart(server: Running) -> None:
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        with server.client() as client:
            answer = client.chat.completions.create(model="fake", messages=user(f"question {i}"), max_tokens=50)
            texts[i] = answer.choices[0].message.content or ""

    threads = [threading.Thread(target=ask, args=(i % 6,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(texts.values())) == 6
