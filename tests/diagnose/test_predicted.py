"""What `lint` says would be found again is what a running server counts: the same log, token for token."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.serving import Listening, listening
from diagnose.logs import Body, clock, linted, turns, written
from diagnose.pairs import SYSTEM, TOOLS
from headstart.api.accounts import Accounts
from headstart.api.keyring import Keyring
from headstart.api.keys import append_key, make_key
from headstart.api.service import Service
from headstart.cli.opening import open_model
from headstart.config import load_config
from headstart.diagnose.lint import Lint
from headstart.diagnose.reading import Reading
from headstart.render import Renderer
from headstart.render.canonical import RULES

TENANTS = ("harbour", "lock")


@pytest.fixture(scope="module")
def folder(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("llama")


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return Renderer.load(folder, light=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    file, made = tmp_path_factory.mktemp("keys") / "keys.jsonl", {name: make_key({"tenant": name}) for name in TENANTS}
    for one in made.values():
        append_key(file, one.key)
    return file, {name: one.text for name, one in made.items()}


@pytest.fixture(scope="module")
def server(folder: Path, keys: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    place = tmp_path_factory.mktemp("predicted")
    told = {
        "cache.directory": place / "kv",
        "cache.capacity": "256MiB",
        "cache.memory": "64MiB",
        "engine.kv_memory": "64MiB",
    }
    config = load_config(overrides={"model": str(folder), "models_directory": place, **told})
    service = Service(accounts=Accounts(keyring=Keyring(keys[0])))
    model = open_model(config, on_progress=lambda stage, fraction: None)
    service.ready(model)
    try:
        with listening(service) as url:
            yield Listening(url, service)
    finally:
        model.engine.close()


class Talk:
    """Sends requests one after another and keeps them as a log does."""

    def __init__(self, server: Listening, keys: dict[str, str], words: list[int]) -> None:
        self._server, self._keys, self._words = server, keys, words
        self.lines: list[Any] = []

    def say(self, body: Body, tenant: str) -> str:
        """Return what was answered: words, since a model of random weights would write what no client can send back."""
        asked = {"max_tokens": 1 + len(self.lines) % 5, "temperature": 0, "logit_bias": {self._words[len(self.lines) % 3]: 100}}
        headers = {"authorization": f"Bearer {self._keys[tenant]}"}
        answer = httpx.post(
            f"{self._server.url}/v1/chat/completions", json={**asked, **body}, headers=headers, timeout=120
        ).json()
        assert "choices" in answer, answer
        self._wait()
        self.lines.append({"tenant": tenant, "body": body, "response": answer})
        return str(answer["choices"][0]["message"]["content"])

    def _wait(self) -> None:
        model = self._server.service.served
        assert model is not None
        assert model.cache is not None
        deadline = time.monotonic() + 60
        while (c := model.cache.statistics().counters).get("save_calls", 0) != c.get("saves_done", 0):
            assert time.monotonic() < deadline
            time.sleep(0.002)


def noisy(body: Body, n: int) -> Body:
    """The same request as clients send it at another time: nothing here changes a token that the server computes."""
    body = copy.deepcopy(body)
    messages = body["messages"]
    header = f"x-anthropic-billing-header: cc_version=2.1.4; cch={n:05x};\n"
    if n % 2:
        messages[0]["content"] = header + messages[0]["content"]
    else:
        messages[0]["content"] = [{"type": "text", "text": header}, {"type": "text", "text": messages[0]["content"]}]
    marked = messages[n % len(messages)]
    if isinstance(marked["content"], str):
        marked["content"] = [{"type": "text", "text": marked["content"], "cache_control": {"type": "ephemeral"}}]
    if body.get("tools"):
        body["tools"][n % len(body["tools"])]["cache_control"] = {"type": "ephemeral"}
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps({"tag": "TB1"}, indent=n % 3 or None)
    return body


@pytest.fixture(scope="module")
def lines(server: Listening, keys: tuple[Path, dict[str, str]], renderer: Renderer) -> list[Any]:
    """Conversations of two tenants, one after the other and mixed, with answers sent back and with others in their place."""
    words = [renderer.ids(f" {word}", special_tokens=False)[-1] for word in ("and", "of", "to")]
    talk = Talk(server, keys[1], words)
    for n, body in enumerate(
        [*turns(5, tools=lambda n: []), *turns(4, system=clock, tools=lambda n: []), *turns(4, tools=lambda n: TOOLS[:1])]
    ):
        talk.say(noisy(body, n), TENANTS[n % 2])
    call = {"id": "c", "type": "function", "function": {"name": "read_sensor", "arguments": "{}"}}
    for tenant in TENANTS:
        said: list[Any] = [{"role": "system", "content": SYSTEM}]
        for n in range(19):
            said = [*said, {"role": "user", "content": f"Gate {n}? " + "Look twice before it opens. " * (n % 4)}]
            answer = talk.say(noisy({"model": "m", "messages": said}, n), tenant)
            said = [*said, {"role": "assistant", "content": answer if n % 3 else "The keeper has changed this answer."}]
            if n % 5 == 4:
                said[-1]["tool_calls"] = [call]
                said = [*said, {"role": "tool", "tool_call_id": "c", "content": '{"level": 412}'}]
    assert len(talk.lines) >= 50
    return talk.lines


def of(lines: list[Any], tmp_path: Path, renderer: Renderer, **more: Any) -> Lint:
    reading = Reading(renderer, **{"rules": frozenset(RULES), "tenants_apart": True, **more})
    return linted(written(tmp_path / "log.jsonl", lines), reading=reading)


def test_predicted_hits_are_those_that_the_server_counts(lines: list[Any], renderer: Renderer, tmp_path: Path) -> None:
    lint = of(lines, tmp_path, renderer)
    assert lint.logged is not None
    assert lint.logged.requests == lint.logged.equal == len(lines)
    assert lint.logged.cached == lint.all.kept > lint.all.tokens / 2
    assert lint.logged.tokens == lint.all.tokens
    assert lint.canonical == len(lines)


def test_what_the_server_leaves_out_is_a_loss_where_it_is_counted(lines: list[Any], renderer: Renderer, tmp_path: Path) -> None:
    lint = of(lines, tmp_path, renderer, rules=frozenset())
    assert lint.logged is not None
    assert lint.logged.more > 40
    assert lint.findings[0].cause == "request_header"
    shared = of(lines, tmp_path, renderer, tenants_apart=False)
    assert shared.logged is not None
    assert shared.logged.short > 0


def test_a_provider_s_own_count_is_told_beside_the_predicted_one(lines: list[Any], renderer: Renderer, tmp_path: Path) -> None:
    """Half of what could be found was found."""
    told = copy.deepcopy(lines)
    for n, line in enumerate(told):
        details = line["response"]["usage"]["prompt_tokens_details"]
        details["cached_tokens"] = 0 if n % 2 else details["cached_tokens"]
    logged = of(told, tmp_path, renderer).logged
    assert logged is not None
    assert logged.predicted - logged.cached == logged.short_tokens > 0
    assert logged.short + logged.equal == logged.requests
