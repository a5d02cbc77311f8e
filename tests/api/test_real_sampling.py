"""Sampling over HTTP with the real openai client, engine, renderer and cache, and a tiny random model: against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from api.serving import Listening, running_model
from headstart.cli.opening import open_model
from headstart.config import load_config
from headstart.render import Renderer

PROMPT = "What is the same in every request stands first. " * 30


@pytest.fixture(scope="module")
def folder(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("llama")


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return Renderer.load(folder)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    place = tmp_path_factory.mktemp("sampling")
    config = load_config(
        overrides={
            "model": str(folder),
            "models_directory": place,
            "cache.directory": place / "kv",
            "cache.capacity": "64MiB",
            "cache.memory": "8MiB",
            "engine.kv_memory": "64MiB",
        }
    )
    with running_model(open_model(config, on_progress=lambda stage, fraction: None)) as server:
        yield server


@pytest.fixture
def client(server: Listening) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@torch.inference_mode()
def stock_logs(stock: Any, tokens: list[int]) -> torch.Tensor:
    logs: torch.Tensor = stock(torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(dim=-1)
    return logs


def counter(server: Listening, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_log_probabilities_are_those_of_transformers(
    client: openai.OpenAI, renderer: Renderer, stock: Any, temperature: float
) -> None:
    prompt = renderer.completion("tell me of the sea, ")
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": temperature,
        "seed": 3,
        "logprobs": 4,
    }
    told = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    # The tokens themselves are found again by their place among transformers' log probabilities.
    tokens = list(prompt)
    for mine, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
        logs = stock_logs(stock, tokens)[-1]
        assert mine is not None
        token = int((logs - mine).abs().argmin())
        assert float(logs[token]) == pytest.approx(mine, abs=1e-4)
        best = logs.topk(4)
        assert sorted(top.values(), reverse=True)[:4] == pytest.approx(best.values.tolist(), abs=1e-4)
        if temperature == 0:
            assert token == int(logs.argmax())
        tokens.append(token)
    assert len(tokens) == len(prompt) + 12


def test_chat_streamed_and_whole_tell_the_same_log_probabilities(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 20,
        "temperature": 1.0,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert whole.logprobs is not None
    assert whole.logprobs.content
    streamed = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content or []]
    # A cached prompt and a computed one may differ in the last bits.
    assert [one.token for one in streamed] == [one.token for one in whole.logprobs.content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in whole.logprobs.content], abs=1e-4)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    text = b"".join(bytes(one.bytes or ()) for one in streamed if not one.token.startswith("<|")).decode("utf-8", "replace")
    assert text == whole.message.content


def test_several_answers_share_the_prompt_and_are_those_of_their_seeds(server: Listening, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": 5}
    asked["extra_body"] = {"cache_salt": "several", "ignore_eos": True}
    before = counter(server, "headstart_engine_prefixes_shared_total")
    several = client.completions.create(**asked, n=4)
    assert counter(server, "headstart_engine_prefixes_shared_total") == before + 3
    alone = [client.completions.create(**asked | {"seed": 5 + index}).choices[0].text for index in range(4)]
    assert [choice.text for choice in several.choices] == alone
    assert several.usage is not None
    assert several.usage.completion_tokens == 4 * 8
    assert several.usage.model_dump()["prompt_cache_hit_tokens"] == 0


def test_penalties_and_bias_change_a_greedy_answer_as_they_should(
    client: openai.OpenAI, renderer: Renderer, stock: Any
) -> None:
    prompt = renderer.completion("once upon a time")

    def answer(**more: Any) -> list[str]:
        extra = {"ignore_eos": True, **more.pop("extra_body", {})}
        told = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=10, temperature=0, logprobs=0, extra_body=extra, **more
        )
        assert told.choices[0].logprobs is not None
        assert told.choices[0].logprobs.tokens is not None
        return told.choices[0].logprobs.tokens

    best = int(stock_logs(stock, list(prompt))[-1].argmax())
    assert answer(logit_bias={"77": 100})[0] == renderer.decode([77])
    assert answer(logit_bias={str(best): -100})[0] != answer()[0]
    frequent = answer(frequency_penalty=2.0)
    assert len(set(frequent)) >= len(set(answer()))
    tokens = list(prompt)
    for _ in range(10):  # what transformers' generate does with the same penalty
        with torch.no_grad():
            logits = stock(torch.tensor([tokens]), use_cache=False).logits[0, -1].clone()
        seen = torch.tensor(sorted(set(tokens)))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.8, logits[seen] * 1.8)
        tokens.append(int(logits.argmax()))
    want = [renderer.token_bytes(token).decode("utf-8", "backslashreplace") for token in tokens[len(prompt) :]]
    assert [token.removeprefix("bytes:") for token in answer(extra_body={"repetition_penalty": 1.8})] == want


def test_a_stop_token_ends_an_answer_that_ignores_the_end_of_text(client: openai.OpenAI, renderer: Renderer) -> None:
    (end,) = renderer.stop_ids if len(renderer.stop_ids) == 1 else (max(renderer.stop_ids),)
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 6, "temperature": 0, "logit_bias": {str(end): 100}}

    def ended(**extra: Any) -> tuple[str, int]:
        answer = client.completions.create(**asked, extra_body=extra)
        assert answer.usage is not None
        return answer.choices[0].finish_reason, answer.usage.completion_tokens

    assert ended() == ("stop", 0)
    assert ended(min_tokens=3) == ("stop", 3)
    assert ended(ignore_eos=True) == ("length", 6)
    assert ended(ignore_eos=True, stop_token_ids=[end]) == ("stop", 0)
    assert ended(ignore_eos=True, stop_token_ids=[end], min_tokens=6) == ("length", 6)


def test_min_p_of_1_draws_what_a_greedy_answer_takes(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 10}
    greedy = client.completions.create(**asked, temperature=0).choices[0].text
    hot = client.completions.create(**asked, temperature=5, seed=1).choices[0].text
    drawn = client.completions.create(**asked, temperature=5, seed=1, extra_body={"min_p": 1.0}).choices[0].text
    assert drawn == greedy != hot


def test_a_bias_on_a_token_that_the_model_has_not_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", logit_bias={"99999": 1}, n=2)
    assert caught.value.param == "logit_bias"
