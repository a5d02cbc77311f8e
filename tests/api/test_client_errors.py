"""Each class of error as the exception that the `openai` and `anthropic` libraries make of it, headers, time limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from api.serving import Running, running
from headstart.api import app
from headstart.api.accounts import Accounts
from headstart.api.keyring import Keyring
from headstart.api.keys import append_key, make_key
from headstart.testing.fake_engine import FakeEngine

MESSAGES: list[Any] = [{"role": "user", "content": "Rom?"}]
ASKED: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "max_tokens": 20}
LONG: dict[str, Any] = ASKED | {"messages": [{"role": "user", "content": "x" * 3000}]}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    made = {name: make_key({"tenant": "acme", **more}) for name, more in KEYS.items()}
    for one in made.values():
        append_key(tmp_path / "keys.jsonl", one.key)
    return {name: one.text for name, one in made.items()} | {"wrong": "hs-abcd-wrong"}


KEYS: dict[str, dict[str, Any]] = {"good": {}, "spent": {"requests_per_minute": 1}, "small": {"body_bytes": 100}}


@pytest.fixture
def server(keys: dict[str, str], tmp_path: Path) -> Iterator[Running]:
    with running(FakeEngine(answer=b"Rome."), accounts=Accounts(keyring=Keyring(tmp_path / "keys.jsonl"))) as server:
        yield server


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def openai_of(server: Running, key: str, **more: Any) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, **{"timeout": 60, **more})


def anthropic_of(server: Running, key: str, **more: Any) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, **{"timeout": 60, **more})


def asks_of(client: Any) -> Callable[..., Any]:
    return client.chat.completions.create if isinstance(client, openai.OpenAI) else client.messages.create


@pytest.mark.parametrize(("of", "library"), [(openai_of, openai), (anthropic_of, anthropic)], ids=["openai", "anthropic"])
def test_each_status_is_the_clients_own_exception(server: Running, keys: dict[str, str], of: Any, library: Any) -> None:
    def caught(kind: type[Exception], key: str = "good", asked: dict[str, Any] = ASKED, **more: Any) -> Any:
        with of(server, keys[key]) as client, pytest.raises(kind) as caught:
            asks_of(client)(**asked, **more)
        assert caught.value.request_id
        assert caught.value.request_id == caught.value.response.headers["x-request-id"]
        return caught.value

    assert caught(library.BadRequestError, asked=LONG).status_code == 400
    assert "the API key is wrong" in str(caught(library.AuthenticationError, "wrong").body)
    evil = {"extra_headers": {"origin": "https://evil.example"}}
    assert caught(library.PermissionDeniedError, **evil).status_code == 403
    with of(server, keys["good"]) as client, pytest.raises(library.NotFoundError):
        client.models.retrieve("another")
    too_large = anthropic.RequestTooLargeError if library is anthropic else openai.APIStatusError
    assert caught(too_large, "small", LONG).status_code == 413
    with of(server, keys["spent"]) as client:
        asks_of(client)(**ASKED)
    late = caught(library.RateLimitError, "spent")
    assert int(late.response.headers["retry-after"]) >= 1
    server.engine.fail_after = 2
    assert caught(library.InternalServerError).status_code == 500
    with of(server, keys["good"]) as client, pytest.raises(library.APIError, match="told to fail"):
        list(asks_of(client)(**ASKED, stream=True))
    server.engine.fail_after = None
    server.engine.gate.clear()
    deadline = {"extra_headers": {"x-headstart-deadline": "0.05"}}
    past = caught(library.APIStatusError, **deadline)
    assert (past.status_code, past.response.headers["x-should-retry"]) == (504, "false")
    server.engine.gate.set()
    server.engine.failed = "the engine stopped"
    assert caught(library.APIStatusError).status_code == 503


@pytest.mark.parametrize(("of", "library"), [(openai_of, openai), (anthropic_of, anthropic)], ids=["openai", "anthropic"])
def test_a_client_that_gives_up_waiting_ends_its_request(server: Running, keys: dict[str, str], of: Any, library: Any) -> None:
    server.engine.gate.clear()
    with of(server, keys["good"], timeout=0.3) as client, pytest.raises(library.APITimeoutError):
        asks_of(client)(**ASKED)
    eventually(lambda: len(server.engine.aborted) == 1 and server.engine.load().running == 0)


@pytest.mark.parametrize("of", [openai_of, anthropic_of], ids=["openai", "anthropic"])
def test_raw_answers_show_their_headers(server: Running, keys: dict[str, str], of: Any) -> None:
    with of(server, keys["good"]) as client:
        raw = (client.chat.completions if of is openai_of else client.messages).with_raw_response.create(**ASKED)
        assert "tokenise;dur=" in raw.headers["server-timing"]
        assert raw.headers["x-request-id"]
        assert raw.parse().id


def test_a_cancelled_response_is_a_conflict_to_who_waits_for_it(server: Running, keys: dict[str, str]) -> None:
    caught: list[openai.ConflictError] = []

    def ask() -> None:
        with openai_of(server, keys["good"]) as client, pytest.raises(openai.ConflictError) as raised:
            client.responses.create(model="fake", input="Rom?")
        caught.append(raised.value)

    server.engine.gate.clear()
    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: server.engine.load().running == 1)
    url = f"{server.url}/v1/responses/{server.engine.submitted[-1].id}/cancel"
    assert httpx.post(url, headers={"x-api-key": keys["wrong"]}).status_code == 401
    assert httpx.post(url, headers={"x-api-key": keys["good"]}).json()["status"] == "cancelled"
    asking.join(30)
    assert caught[0].code == "cancelled"


def test_a_body_over_the_limit_is_told_before_it_is_read(server: Running, keys: dict[str, str]) -> None:
    assert app.BODY_BYTES == 32 << 20
    with openai_of(server, keys["small"]) as client, pytest.raises(openai.APIStatusError, match="larger than 100 bytes"):
        client.chat.completions.create(**LONG)
