"""Two servers of one tiny model: what is asked of one is computed by the other where a header says so, and roles change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.serving import running, running_model
from headstart.api.accounts import Accounts
from headstart.api.keyring import Keyring
from headstart.api.keys import append_key, make_key
from headstart.cli.opening import open_model
from headstart.config import load_config
from headstart.errors import ConfigError
from headstart.testing.fake_engine import FakeEngine

PROMPT = "What one worker computes, another goes on with. " * 12


def _settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "models_directory": folder.parent,
        "cache.capacity": "0",
        "cache.memory": "16MiB",
        "engine.kv_memory": "32MiB",
        **more,
    }


@pytest.fixture(scope="module")
def folder(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("llama")


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[Callable[..., str]]:
    with ExitStack() as stack:

        def serve(accounts: Accounts | None = None, **more: Any) -> str:
            model = open_model(load_config(overrides=_settings(folder, **more)), on_progress=lambda stage, fraction: None)
            return stack.enter_context(running_model(model, accounts=accounts)).url

        yield serve


def _ask(url: str, at: str = "", key: str = "", **more: Any) -> dict[str, Any]:
    headers = {"x-headstart-prefill-at": at} if at else {}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def _metric(url: str, name: str, key: str = "") -> float:
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"} if key else {}).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"headstart_engine_{name}{{"))


def test_a_header_says_where_a_prompt_is_computed(served: Callable[..., str], tmp_path: Path) -> None:
    at = f"ipc://{tmp_path}/p.sock"
    alone = served()
    prefill = served(**{"server.role": "prefill", "handoff.listen": at})
    decode = served(**{"server.role": "decode"})
    for more in ({}, {"temperature": 1.0, "seed": 5}, {"logprobs": 2}):
        here, there = _ask(alone, **more), _ask(decode, at, **more)
        assert there["choices"][0]["text"] == here["choices"][0]["text"]
        if not more:  # neither had anything of it
            assert there["usage"] == here["usage"]
        for usage in (here["usage"], there["usage"]):
            assert (usage["completion_tokens"], usage["prompt_tokens"]) == (8, here["usage"]["prompt_tokens"])
    assert _metric(decode, "handoff_taken_total") >= 1
    assert _metric(prefill, "handoff_given_total") >= 1
    role = httpx.get(f"{prefill}/v1/headstart/role").json()
    assert role == {"role": "prefill", "addresses": [at], "changes": True}
    changed = httpx.patch(f"{prefill}/v1/headstart/role", json={"role": "decode"})
    assert changed.json()["role"] == "decode"
    before = _metric(decode, "handoff_lost_total")
    _ask(decode, at, prompt="Another prompt, of which nobody has anything. " * 12)
    assert _metric(decode, "handoff_lost_total") == before + 1
    assert httpx.patch(f"{prefill}/v1/headstart/role", json={"role": "judge"}).status_code == 400
    refused = httpx.patch(f"{decode}/v1/headstart/role", json={"role": "prefill"})
    assert refused.status_code == 400
    assert "--handoff-listen" in refused.json()["error"]["message"]


def test_only_operators_say_where_a_worker_connects_to(served: Callable[..., str], tmp_path: Path) -> None:
    made = [make_key({"tenant": name, "operator": name == "boss"}) for name in ("acme", "boss")]
    for one in made:
        append_key(tmp_path / "keys", one.key)
    tenant, operator = (one.text for one in made)
    decode = served(Accounts(keyring=Keyring(tmp_path / "keys")), **{"server.role": "decode"})
    nobody = f"ipc://{tmp_path}/nobody.sock"
    _ask(decode, nobody, key=tenant)
    assert _metric(decode, "handoff_lost_total", operator) == 0
    _ask(decode, nobody, key=operator)
    assert _metric(decode, "handoff_lost_total", operator) == 1
    headers = {"authorization": f"Bearer {tenant}"}
    assert httpx.get(f"{decode}/v1/headstart/role", headers=headers).status_code == 403


def test_a_server_without_roles_says_so() -> None:
    with running(FakeEngine()) as server:
        assert httpx.get(f"{server.url}/v1/headstart/role").json() == {"role": "both", "addresses": [], "changes": False}
        refused = httpx.patch(f"{server.url}/v1/headstart/role", json={"role": "decode"})
        assert refused.json()["error"]["code"] == "no_roles"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"server.role": "prefill"}, "--handoff-listen"),
        ({"server.role": "decode", "cache.enabled": False}, "cannot hand prompts over"),
        ({"server.role": "decode", "cache.memory": "0", "cache.capacity": "64MiB"}, r"cache\.memory"),
        ({"handoff.listen": "tcp://*:0"}, "--handoff-secret"),
        ({"handoff.secret": "/nowhere/secret"}, "openssl rand"),
    ],
)
def test_what_cannot_be_is_told_at_the_start(folder: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    settings = {"cache.directory": tmp_path, **settings}
    with pytest.raises(ConfigError, match=said):
        open_model(load_config(overrides=_settings(folder, **settings)), on_progress=lambda stage, fraction: None)
