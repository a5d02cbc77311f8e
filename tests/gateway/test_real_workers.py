"""Two real engines behind a router: what one worker answers, they answer, in each dialect; what each holds is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from asking import eventually
from gateway.gateway_kit import Routed, real_workers, routed
from headstart.render import Renderer

LONG = "What is the same in every request stands first, and there is quite a lot of it. " * 20


@pytest.fixture(scope="module")
def folder(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("llama")


@pytest.fixture(scope="module")
def workers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with real_workers(folder, tmp_path_factory.mktemp("workers"), 2) as urls:
        yield urls


@pytest.fixture(scope="module")
def router(folder: Path, workers: list[str]) -> Iterator[Routed]:
    with routed(workers, renderer=Renderer.load(folder)) as router:
        eventually(lambda: router.ready() == 2)
        yield router


def asked(number: int) -> list[Any]:
    return [{"role": "system", "content": LONG}, {"role": "user", "content": f"question {number}"}]


def said(url: str, number: int) -> str:
    body = {"messages": asked(number), "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


def test_the_answers_are_those_of_one_worker(router: Routed, workers: list[str]) -> None:
    alone = [said(workers[0], number) for number in range(6)]
    assert [said(router.url, number) for number in range(6)] == alone


def test_the_router_s_keys_are_those_of_the_workers_events(router: Routed) -> None:
    with router.client() as client:
        first = client.chat.completions.create(model="any", messages=asked(50), max_tokens=4)
        assert first.usage is not None
        held = first.usage.prompt_tokens // 64
        eventually(lambda: len(router.router.fleet.routing.holders) >= held)
        again = client.chat.completions.create(model="any", messages=asked(50), max_tokens=4)
        decision = router.get("/router/decisions", params={"request": again.id})
        eventually(lambda: _score(router, client, 50)["reused_tokens"] >= 64 * held - 64)
    assert decision["tokens"] == first.usage.prompt_tokens
    assert decision["tokens_by"] == "tokenizer"


def _score(router: Routed, client: Any, number: int) -> dict[str, Any]:
    answer = client.chat.completions.create(model="any", messages=asked(number), max_tokens=1)
    found: dict[str, Any] = router.get("/router/decisions", params={"request": answer.id})["attempts"][0]["scores"][0]
    return found


TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
    }
]
OTHER_TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]
PARTS = [{"type": "text", "text": LONG}, {"type": "text", "text": "and a question"}]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": LONG, "max_tokens": 2}),
    "token ids": ("/v1/completions", {"prompt": list(range(3, 400)), "max_tokens": 2}),
    "chat with tools": ("/v1/chat/completions", {"messages": asked(1), "tools": TOOLS, "max_tokens": 2}),
    "chat in parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": PARTS}], "max_tokens": 2}),
    "chat with a salt": ("/v1/chat/completions", {"messages": asked(2), "cache_salt": "own", "max_tokens": 2}),
    "response": ("/v1/responses", {"input": LONG, "instructions": "be brief", "max_output_tokens": 2}),
    "message": ("/v1/messages", {"system": LONG, "messages": asked(3)[1:], "tools": OTHER_TOOLS, "max_tokens": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_every_kind_of_request_the_router_has_the_worker_s_tokens_and_keys(kind: str, router: Routed) -> None:
    path, body = KINDS[kind]

    def sent() -> tuple[dict[str, Any], dict[str, Any]]:
        answer = router.http.post(path, json=body).raise_for_status()
        told = router.get("/router/decisions", params={"request": answer.headers["x-request-id"]})
        return answer.json()["usage"], told

    usage, told = sent()
    cached, written = (usage.get(name, 0) for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    tokens = usage.get("prompt_tokens", usage.get("input_tokens")) + cached + written
    assert told["tokens"] == tokens
    held = (tokens - 1) // 64 * 64
    assert held >= 256
    eventually(lambda: max(one["reused_tokens"] for one in sent()[1]["attempts"][0]["scores"]) >= held)


def test_a_salt_keeps_prompts_apart_in_the_router_too(router: Routed) -> None:
    body = {"messages": asked(77), "max_tokens": 1}

    def reused(salt: str) -> int:
        answer = router.http.post("/v1/chat/completions", json={**body, "cache_salt": salt}).raise_for_status()
        told = router.get("/router/decisions", params={"request": answer.headers["x-request-id"]})
        return max(int(one["reused_tokens"]) for one in told["attempts"][0]["scores"])

    reused("mine")
    eventually(lambda: reused("mine") > 0)
    assert reused("yours") == 0
