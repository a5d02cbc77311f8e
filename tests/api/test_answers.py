"""Several answers to one prompt, and log probabilities, with the real openai client against a real server and a fake engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from api.serving import Running, running
from headstart.testing.fake_engine import FakeEngine


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


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


DICE: dict[str, Any] = {"messages": user("throw the dice " * 10), "model": "fake", "temperature": 1.0, "seed": 7}


def test_several_answers_are_those_of_the_next_seeds_and_the_prompt_is_counted_once(client: openai.OpenAI) -> None:
    def alone(seed: int) -> str | None:
        return client.chat.completions.create(**DICE | {"seed": seed, "max_tokens": 20}).choices[0].message.content

    several = client.chat.completions.create(**DICE, n=3, max_tokens=20)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert [choice.message.content for choice in several.choices] == [alone(7), alone(8), alone(9)]
    assert {choice.finish_reason for choice in several.choices} == {"length"}
    assert several.usage is not None
    one = client.chat.completions.create(**DICE, max_tokens=20).usage
    assert one is not None
    assert several.usage.prompt_tokens == one.prompt_tokens
    assert (several.usage.completion_tokens, several.usage.total_tokens) == (60, one.prompt_tokens + 60)
    assert several.usage.prompt_tokens_details is not None
    assert several.usage.prompt_tokens_details.cached_tokens == 0  # as the first one found it


def test_several_streamed_answers_are_told_apart_by_their_index(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**DICE, n=3, max_tokens=20)
    with client.chat.completions.create(
        **DICE, n=3, max_tokens=20, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    last = chunks.pop()
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 60
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["length"]
        assert mine[-1].finish_reason == "length"
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_several_completions_each_stop_at_their_own_place() -> None:
    with running(FakeEngine(answer=b"one, two, three")) as server, server.client() as client:
        answer = client.completions.create(model="fake", prompt="count", n=2, stop=", three", max_tokens=50)
        assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [("one, two", "stop")] * 2
        until(lambda: server.engine.load().running == 0)


def test_all_answers_end_when_the_client_goes_streaming_or_not() -> None:
    with running(FakeEngine(answer=b"x" * 1000, max_running=2)) as server:
        server.engine.gate.clear()
        with server.client() as client:
            stream = client.chat.completions.create(model="fake", messages=user("x"), n=4, stream=True)
            until(lambda: server.engine.load().waiting == 2)
            stream.close()
            until(lambda: server.engine.load().waiting + server.engine.load().running == 0)
        with server.client().with_options(timeout=0.3) as client:
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(model="fake", messages=user("x"), n=4)
            until(lambda: len(server.engine.submitted) == 8)
            until(lambda: server.engine.load().waiting + server.engine.load().running == 0)
        assert sorted(server.engine.aborted) == sorted(request.id for request in server.engine.submitted)


def test_one_answer_that_fails_fails_the_request_and_ends_the_others() -> None:
    with running(FakeEngine(fail_after=3, max_running=1)) as server, server.client() as client:
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="fake", messages=user("x"), n=3)
        until(lambda: server.engine.load().waiting + server.engine.load().running == 0)
        with (
            pytest.raises(openai.APIError),
            client.chat.completions.create(model="fake", messages=user("x"), n=3, stream=True) as stream,
        ):
            _ = list(stream)
        until(lambda: server.engine.load().waiting + server.engine.load().running == 0)


def test_each_answer_takes_a_place_among_those_that_wait() -> None:
    with running(FakeEngine(max_running=1), max_waiting=3) as server:
        server.engine.gate.clear()
        with server.client() as client:
            first = client.chat.completions.create(model="fake", messages=user("x"), stream=True)
            until(lambda: server.engine.load().running == 1)
            second = client.chat.completions.create(model="fake", messages=user("x"), n=2, stream=True)
            until(lambda: server.engine.load().waiting == 2)
            with pytest.raises(openai.RateLimitError):
                client.chat.completions.create(model="fake", messages=user("x"), n=2)
            first.close()
            second.close()
            until(lambda: server.engine.load().waiting + server.engine.load().running == 0)
            many = client.chat.completions.create(model="fake", messages=user("x"), n=5, max_tokens=1, stream=True)
            until(lambda: server.engine.load().waiting == 4)  # more than may wait, and nobody else does: taken
            server.engine.gate.set()
            assert len([chunk for chunk in many if chunk.choices[0].finish_reason]) == 5


def test_chat_tells_log_probabilities_with_tokens_and_bytes() -> None:
    with running(FakeEngine(answer="añ".encode())) as server, server.client() as client:
        answer = client.chat.completions.create(model="fake", messages=user("x"), logprobs=True, top_logprobs=2)
        told = answer.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        assert [(one.token, one.bytes, one.logprob) for one in told.content] == [
            ("a", [97], -1.0),
            ("\\xc3", [0xC3], -1.0),
            ("\\xb1", [0xB1], -1.0),
        ]
        assert [[(top.token, top.logprob) for top in one.top_logprobs] for one in told.content[:1]] == [
            [("a", -1.0), ("b", -2.0)]
        ]
        none = client.chat.completions.create(model="fake", messages=user("x"), logprobs=True).choices[0].logprobs
        assert none is not None
        assert none.content is not None
        assert [one.top_logprobs for one in none.content] == [[], [], []]
        assert client.chat.completions.create(model="fake", messages=user("x")).choices[0].logprobs is None


def test_streamed_log_probabilities_come_with_the_text_they_are_of() -> None:
    with running(FakeEngine(answer="aña, b".encode())) as server, server.client() as client:
        asked: dict[str, Any] = {"messages": user("x"), "model": "fake", "logprobs": True, "top_logprobs": 1, "stop": ", c"}
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.create(**asked, stream=True) as stream:
            chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        told = [
            (choice.delta.content, choice.logprobs.content) for choice in chunks if choice.logprobs and choice.logprobs.content
        ]
        assert [(text, [one.token for one in tokens]) for text, tokens in told] == [
            ("a", ["a"]),
            ("ñ", ["\\xc3", "\\xb1"]),
            ("a", ["a"]),
            (", b", [",", " ", "b"]),
        ]
        assert whole.choices[0].logprobs is not None
        assert [one for _, tokens in told for one in tokens] == whole.choices[0].logprobs.content


def test_completions_tell_log_probabilities_with_offsets_in_the_text() -> None:
    with running(FakeEngine(answer="añb".encode())) as server, server.client() as client:
        for stream in (False, True):
            answer: Any = client.completions.create(model="fake", prompt="x", logprobs=1, stream=stream)
            parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
            parts = [part for part in parts if part is not None]
            assert [token for part in parts for token in part.tokens] == ["a", "bytes:\\xc3", "bytes:\\xb1", "b"]
            assert [offset for part in parts for offset in part.text_offset] == [0, 1, 1, 2]
            assert [log for part in parts for log in part.token_logprobs] == [-1.0] * 4
            assert next(top for part in parts for top in part.top_logprobs) == {"a": -1.0}
        zero = client.completions.create(model="fake", prompt="x", logprobs=0).choices[0].logprobs
        assert zero is not None
        assert zero.top_logprobs is not None
        assert zero.top_logprobs[-1] == {"b": -1.0}  # the token's own at least


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_stop_text_cuts_off_is_not_told_either(stream: bool) -> None:
    with running(FakeEngine(answer=b"one, two, three, four")) as server, server.client() as client:
        answer: Any = client.completions.create(
            model="fake", prompt="x", logprobs=0, stop=", three", stream=stream, max_tokens=50
        )
        parts = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(part.text for part in parts) == "one, two"
        assert "".join(token for part in parts if part.logprobs for token in part.logprobs.tokens) == "one, two"


def test_a_stop_text_does_not_count_in_the_least_tokens_of_an_answer() -> None:
    with running(FakeEngine(answer=b"one, two, one, two")) as server, server.client() as client:

        def text(least: int) -> str:
            return (
                client.completions.create(model="fake", prompt="x", stop="two", max_tokens=50, extra_body={"min_tokens": least})
                .choices[0]
                .text
            )

        assert [text(least) for least in (0, 7, 8, 17, 18)] == ["one, "] * 2 + ["one, two, one, "] * 2 + ["one, two, one, two"]


def test_everything_that_is_asked_of_sampling_and_handling_reaches_the_engine(server: Running, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="fake",
        messages=user("x"),
        max_tokens=9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "9": 5},
        logprobs=True,
        top_logprobs=3,
        extra_body={"min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [65], "min_tokens": 4},
        extra_headers={"x-headstart-priority": "-3", "x-headstart-session": "s1", "x-headstart-retention": "agent"},
    )
    client.completions.create(model="fake", prompt="x", extra_body={"ignore_eos": True, "stop_token_ids": [66]})
    first, second = server.engine.submitted
    sampling = first.sampling
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, ((7, -100.0), (9, 5.0)))
    assert (first.logprobs, first.min_tokens, first.stop_ids) == (3, 4, frozenset({0, 65}))
    assert (first.priority, first.session, first.retention) == (-3, "s1", "agent")
    assert (second.stop_ids, second.logprobs) == (frozenset({66}), None)
    assert (second.priority, second.session, second.retention) == (0, "", "default")


def test_an_adapter_is_a_model_of_its_own_name() -> None:
    engine = FakeEngine()
    engine.info = replace(engine.info, adapters=("sql",))
    with running(engine) as server, server.client() as client:
        assert [model.id for model in client.models.list()] == ["fake", "sql"]
        assert client.models.retrieve("sql").id == "sql"
        assert client.completions.create(model="sql", prompt="x").model == "sql"
        assert client.completions.create(model="gpt-4o", prompt="x").model == "fake"
        assert [request.adapter for request in engine.submitted] == ["sql", None]


def test_a_name_that_may_be_meant_for_an_adapter_is_not_answered_by_the_model_alone() -> None:
    engine = FakeEngine()
    engine.info = replace(engine.info, adapters=("support-de",))
    with running(engine) as server, server.client() as client:
        for name in ("support_de", "Support-DE", "suport-de"):
            with pytest.raises(openai.NotFoundError, match=r"has 'fake', 'support-de'; did you mean 'support-de'\?"):
                client.completions.create(model=name, prompt="x")
        assert engine.submitted == []
