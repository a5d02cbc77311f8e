"""The API over the real engine, renderer and cache with a tiny random model: what is counted, kept apart and said."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api.serving import Listening, running_model
from headstart.cli.opening import open_model, sampling_defaults
from headstart.config import Config, load_config
from headstart.engine.base import Sampling
from headstart.errors import ModelError

PROMPT = "What is the same in every request stands first. " * 30


@pytest.fixture
def config(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> Config:
    return load_config(
        overrides={
            "model": str(tiny_model_folder("llama")),
            "models_directory": tmp_path,
            "cache.directory": tmp_path / "kv",
            "cache.capacity": "64MiB",
            "cache.memory": "8MiB",
            "engine.kv_memory": "64MiB",
        }
    )


def opened(config: Config) -> Any:
    return running_model(open_model(config, on_progress=lambda stage, fraction: None))


@pytest.fixture
def server(config: Config) -> Iterator[Listening]:
    with opened(config) as server:
        yield server


def ask(client: openai.OpenAI, question: str = "q", **more: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0, **more)
    assert answer.usage is not None
    usage = answer.usage.model_dump()
    assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
    return usage | {"text": answer.choices[0].message.content, "cached": usage["prompt_tokens_details"]["cached_tokens"]}


def saved(server: Listening) -> None:
    """Wait, by the tickets' own count, until everything is written."""
    import time

    deadline = time.monotonic() + 30
    while "headstart_saves_pending{" in (text := httpx.get(f"{server.url}/metrics").text):
        pending = next(line for line in text.splitlines() if line.startswith("headstart_saves_pending{"))
        if pending.endswith(" 0.0"):
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_five_salts_never_share_and_each_finds_its_own(server: Listening) -> None:
    salts = ["a", "b", "c", "d", "e"]
    with server.client() as client:
        first = [ask(client, extra_body={"cache_salt": salt}) for salt in salts]
        assert [answer["cached"] for answer in first] == [0] * 5
        saved(server)
        again = [ask(client, extra_body={"cache_salt": salt}) for salt in salts]
    assert [answer["cached"] for answer in again] == [first[0]["prompt_tokens"] // 64 * 64] * 5
    assert {answer["text"] for answer in first + again} == {first[0]["text"]}


def test_a_prompt_that_was_warmed_is_found_after_a_restart_and_its_time_is_promised(config: Config) -> None:
    body = {"messages": [{"role": "system", "content": PROMPT}], "prompt_cache_options": {"prewarm": True, "ttl": "12h"}}
    with opened(config) as server:
        server.service._longest_promise_s = 7 * 86400.0
        usage = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
        assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (0, 0)
        saved(server)
    with opened(config) as server, server.client() as client:
        served = server.service.served
        assert served is not None
        cache = served.cache
        assert cache is not None
        (disk,) = [source.tier for source in cache._sources if source.tier.name == "disk"]
        promised = [info.guaranteed_until_ms - info.created_ms for info in disk.scan()]
        assert promised
        assert all(12 * 3600 * 1000 <= one < 13 * 3600 * 1000 for one in promised)
        assert ask(client)["cached"] >= (usage["prompt_tokens"] - 16) // 64 * 64 > 0


def test_explicit_without_breakpoints_computes_all_and_keeps_nothing(server: Listening) -> None:
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    with server.client() as client:
        for _ in range(2):
            assert ask(client, extra_body=explicit)["cached"] == 0
            saved(server)
        assert ask(client)["cached"] == 0
        saved(server)
        assert ask(client, extra_body=explicit)["cached"] == 0
        assert ask(client)["cached"] > 0


def test_the_next_turn_of_a_chat_hits_everything_before_it(server: Listening) -> None:
    with server.client() as client:
        messages: list[Any] = [{"role": "user", "content": PROMPT}]
        first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=70, temperature=0)
        saved(server)
        messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "more"}]
        second = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    # Random text need not be tokenised again as it was generated, the prompt itself is.
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens // 64 * 64


def test_usage_is_the_same_streamed_and_whole(server: Listening) -> None:
    with server.client() as client:
        ask(client)
        saved(server)
        whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0)
        saved(server)
        assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1).usage is not None
        once_more = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0)
        streamed = list(
            client.completions.create(
                model="tiny",
                prompt=PROMPT,
                max_tokens=9,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "".join(chunk.choices[0].text for chunk in streamed[:-1]) == whole.choices[0].text == once_more.choices[0].text
    assert streamed[-1].usage is not None
    assert once_more.usage is not None
    assert streamed[-1].usage.model_dump() == once_more.usage.model_dump()


def test_a_text_far_over_the_context_is_refused_unread(server: Listening) -> None:
    with server.client() as client, pytest.raises(openai.BadRequestError, match=r"has at least [0-9]+ tokens") as caught:
        client.completions.create(model="tiny", prompt="word " * 1_000_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_without_a_cache_usage_says_0_and_health_says_why(config: Config) -> None:
    off = dataclasses.replace(config, cache=dataclasses.replace(config.cache, enabled=False))
    with opened(off) as server, server.client() as client:
        assert [ask(client)["cached"] for _ in range(2)] == [0, 0]
        said = httpx.get(f"{server.url}/health").json()
        assert (said["status"], said["cache"]) == ("ok", "off by configuration")
        assert "prefix_cache_queries" not in httpx.get(f"{server.url}/metrics").text


def a_file(place: Path) -> Path:
    place.write_text("not a directory")
    return place


def read_only(place: Path) -> Path:
    return Path("/proc/headstart")  # nobody, not even root, can make a directory there


@pytest.mark.parametrize("spoiled", [a_file, read_only])
def test_a_cache_directory_that_cannot_be_used_stops_nothing(
    config: Config, tmp_path: Path, spoiled: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = spoiled(tmp_path / "spoiled")
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, directory=directory))
    with opened(config) as server, server.client() as client:
        assert ask(client)["cached"] == 0
        said = httpx.get(f"{server.url}/health").json()
    assert (said["status"], said["cache"]) == ("ok", "prefixes are kept in memory; the server's log says why")
    assert any(str(directory) in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def test_a_cache_of_another_format_version_stops_nothing(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    with opened(config):
        pass
    marks = [file for file in config.cache.directory.iterdir() if file.is_file() and b'"version"' in file.read_bytes()]
    assert marks
    for mark in marks:
        mark.write_bytes(mark.read_bytes().replace(b'"version":1', b'"version":99').replace(b'"version": 1', b'"version": 99'))
    with opened(config) as server, server.client() as client:
        assert ask(client)["cached"] == 0
        said = httpx.get(f"{server.url}/health").json()
    assert (said["status"], said["cache"]) == ("ok", "prefixes are kept in memory; the server's log says why")
    assert any("99" in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def test_a_recommended_penalty_holds_for_greedy_answers_too(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    for penalty in ("null", "1.0", "1"):
        file.write_text(f'{{"repetition_penalty": {penalty}}}')
        assert sampling_defaults(tmp_path) == Sampling()
    file.write_text('{"repetition_penalty": 1.05}')
    assert sampling_defaults(tmp_path) == Sampling(repetition_penalty=1.05)


def test_sampling_follows_the_models_makers_unless_asked_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert sampling_defaults(tmp_path) == Sampling()
    file.write_text('{"temperature": 0.6, "top_p": 0.9}')
    assert sampling_defaults(tmp_path) == Sampling()  # without do_sample its makers decode greedily
    file.write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "eos_token_id": [1, 2]}')
    assert sampling_defaults(tmp_path) == Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1)
    file.write_text('{"do_sample": ')
    with pytest.raises(ModelError, match=r"generation_config.json cannot be read"):
        sampling_defaults(tmp_path)


def test_a_random_model_writes_json_of_a_schema_and_calls_with_arguments_of_theirs(server: Listening) -> None:
    place = {
        "type": "object",
        "properties": {"city": {"enum": ["Rom", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 200}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": place, "strict": True}}
    tool = {"type": "function", "function": {"name": "visit", "parameters": place}}
    with server.client() as client:
        for temperature in (0.0, 1.5):
            told = client.chat.completions.create(**asked, temperature=temperature, response_format=form, n=2, seed=1)
            texts = [choice.message.content for choice in told.choices]
            message = client.chat.completions.create(
                **asked, temperature=temperature, tools=[tool], tool_choice="required", parallel_tool_calls=False
            ).choices[0]
            assert message.finish_reason == "tool_calls"
            texts += [call.function.arguments for call in message.message.tool_calls or ()]
            assert len(texts) == 3
            for text in texts:
                value = json.loads(text or "")
                assert value["city"] in ("Rom", "Köln")
                assert 1 <= value["days"] <= 9
