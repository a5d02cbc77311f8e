"""Why a served prompt was not found: each cause that only a server knows, brought about in a real cache under a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, cast

import anthropic
import httpx
import pytest

from api.serving import ByteRenderer, Listening, Running, listening, running
from headstart.api.accounts import Accounts
from headstart.api.ask import Ask
from headstart.api.asked import AskedPrompts
from headstart.api.keyring import Keyring
from headstart.api.keys import append_key, make_key
from headstart.api.service import Service
from headstart.cli import run_cli
from headstart.cli.diff import DIFFERS
from headstart.cli.opening import open_model
from headstart.config import load_config
from headstart.policy.loading import Plan
from headstart.render import Renderer
from headstart.testing.fake_engine import FakeEngine
from headstart.tier.base import ExtentId, WriteOutcome

WORDS = "The keeper of the archive notes every gate, every hour and every name. "
A, B = WORDS * 9, "Another beginning altogether. " + WORDS * 9


class Asking:
    """A server with a real engine and a real cache, and what is asked of it."""

    def __init__(self, server: Listening) -> None:
        self.url, self.service = server.url, server.service
        model = self.service.served
        assert model is not None
        assert model.cache is not None
        self.model, self.cache = model, model.cache

    def ask(self, prompt: Any, **more: Any) -> dict[str, Any]:
        what = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        path = "completions" if isinstance(prompt, str) else "chat/completions"
        answer = httpx.post(f"{self.url}/v1/{path}", json={**what, "max_tokens": 2, "temperature": 0, **more}, timeout=120)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def settle(self) -> None:
        """Wait until everything is written."""
        until(lambda: (c := self.cache.statistics().counters).get("save_calls", 0) == c.get("saves_done", 0))

    def why(self, answer: dict[str, Any]) -> dict[str, Any]:
        told = httpx.get(f"{self.url}/v1/headstart/requests/{answer['id']}/why", timeout=60)
        assert told.status_code == 200, told.text
        found: dict[str, Any] = told.json()
        lost = sum(one["tokens"] for one in found["lost"])
        assert sum(found["reused"].values()) + lost + found["new_tokens"] == found["prompt_tokens"]
        assert found["new_tokens"] > 0
        return found

    def extents(self) -> list[ExtentId]:
        return [info.id for info in self.tier.scan()]

    @property
    def tier(self) -> Any:
        return self.cache._sources[-1].tier


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def serving(folder: Path, store: Path, *, keep_prompts: bool = False, **told: object) -> Iterator[Asking]:
    settings = {"cache.directory": store, "cache.capacity": "64MiB", "cache.memory": "0", "engine.kv_memory": "64MiB"}
    settings |= {key.replace("__", "."): value for key, value in told.items()}
    config = load_config(overrides={"model": str(folder), "models_directory": store.parent, **settings})
    service = Service(keep_prompts=keep_prompts)
    model = open_model(config, on_progress=lambda stage, fraction: None)
    service.ready(model)
    try:
        with listening(service) as url:
            yield Asking(Listening(url, service))
    finally:
        model.engine.close()


@pytest.fixture(scope="module")
def folder(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("llama")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    with serving(folder, tmp_path_factory.mktemp("why") / "kv", keep_prompts=True) as server:
        yield server


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> None:
    """Nothing is stored when a test begins, and no prompt is remembered."""
    if "server" in request.fixturenames:
        server: Asking = request.getfixturevalue("server")
        server.settle()
        server.tier.delete(server.extents(), reason="user")
        server.service.asked = AskedPrompts(keep_ids=True)


def causes(why: dict[str, Any]) -> list[str]:
    return [one["cause"] for one in why["lost"]]


def test_what_was_found_is_told_by_tier_and_nothing_is_lost(server: Asking) -> None:
    server.ask(A)
    server.settle()
    again = server.ask(A)
    why = server.why(again)
    details = again["usage"]["prompt_tokens_details"]
    assert why["reused"] == {"memory": 0, "disk": details["cached_tokens"]}
    assert details["cached_tokens"] > 0
    assert why["lost"] == []
    assert why["parted"] is None
    assert why["common_tokens"] == why["prompt_tokens"]


def test_what_was_removed_is_told_with_when_and_by_what(server: Asking) -> None:
    server.ask(A)
    server.settle()
    begun = time.time()
    for reason, cause in (("expired", "expired"), ("corrupt", "corrupt"), ("capacity", "evicted"), ("user", "deleted")):
        assert server.tier.delete(server.extents(), reason=reason) > 0
        why = server.why(server.ask(A))
        assert causes(why) == [cause]
        assert begun - 1 <= why["lost"][0]["time"] <= time.time() + 1
        assert "disk" in why["lost"][0]["evidence"]
        assert why["lost"][0]["tokens"] == (why["prompt_tokens"] - 1) // 64 * 64
        server.settle()


def test_a_small_store_evicts_and_says_for_what(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "kv", cache__capacity="1MiB") as server:
        server.ask(A)
        server.settle()
        for n in range(12):
            server.ask(f"{n}: {B}")
            server.settle()
        why = server.why(server.ask(A))
        assert "evicted" in causes(why)
        assert "room was needed" in why["lost"][0]["evidence"]


def test_bytes_that_rot_are_told_as_corrupt(server: Asking) -> None:
    server.ask(A)
    server.settle()
    for file in sorted(Path(server.tier.devices[0].path).rglob("*.seg")):
        data = bytearray(file.read_bytes())
        at = next(i for i in range(len(data) - 64, 0, -64) if any(data[i : i + 64]))
        data[at] ^= 0xFF
        data[len(data) // 2] ^= 0xFF
        with file.open("r+b") as handle:
            handle.write(data)
    why = server.why(server.ask(A))
    assert causes(why) == ["corrupt"]


def test_a_prompt_sent_before_the_first_is_written_is_told_so(server: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = Event()
    saver = server.cache._saver
    save = saver._save

    def held(request: Any) -> Any:
        goes_on.wait(60)
        return save(request)

    monkeypatch.setattr(saver, "_save", held)
    server.ask(A)
    second = server.ask(A)
    goes_on.set()
    server.settle()
    assert causes(server.why(second)) == ["not_yet_written"]


def test_a_write_that_was_dropped_is_told_so(server: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    for reason, cause in (("full", "store_full"), ("error", "write_dropped"), ("quota", "store_full")):
        server.tier.delete(server.extents(), reason="user")
        with monkeypatch.context() as patch:
            patch.setattr(type(server.tier), "write", lambda *_, reason=reason, **__: WriteOutcome(stored=False, reason=reason))
            server.ask(A)
            server.settle()
        assert causes(server.why(server.ask(A))) == [cause]
        server.settle()


def test_a_write_budget_that_is_used_up_is_told(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "kv", cache__write_budget="1") as server:
        server.ask(A)
        server.settle()
        assert causes(server.why(server.ask(A))) == ["write_budget"]


def test_recomputing_that_was_cheaper_is_told_with_the_estimates(server: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ask(A)
    server.settle()
    monkeypatch.setattr(
        "headstart.engine.serving.bridge.plan_load", lambda *_, **__: Plan("compute", 0, load_s=2.0, compute_s=0.5)
    )
    why = server.why(server.ask(A))
    assert causes(why) == ["recompute_cheaper"]
    assert "2 s" in why["lost"][0]["evidence"]
    assert "0.5 s" in why["lost"][0]["evidence"]


def test_what_another_representation_wrote_is_told(
    tiny_model_folder: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path / "kv", engine__dtype="float32") as server:
        server.ask(A)
        server.settle()
    with serving(folder, tmp_path / "kv", engine__dtype="bfloat16") as server:
        first = server.why(server.ask(A))
        assert first["compared_with"] is None  # another process asked
        server.settle()
        server.tier.delete([one for one in server.extents() if is_own(server, one)], reason="user")
        server.cache._saver.history._saves.clear()
        forget_removals(server)
        assert causes(server.why(server.ask(A))) == ["other_representation"]


def test_what_grew_older_than_its_class_may_is_told_as_expired(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "kv", cache__retention="default=0s..1s") as server:
        server.ask(A)
        server.settle()
        until(lambda: not server.extents())
        assert causes(server.why(server.ask(A))) == ["expired"]


def test_a_store_in_which_nothing_may_go_is_told_as_full(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "kv", cache__capacity="1MiB") as server:
        for n in range(8):
            server.ask(f"{n}: {B}")
            server.settle()
        read = server.extents()
        server.tier.lease(read)  # as a request does that reads them
        server.ask(A)
        server.settle()
        server.tier.release(read)
        why = server.why(server.ask(A))
        assert causes(why)[-1] == "store_full"
        assert "nothing that could go" in why["lost"][-1]["evidence"]


def test_a_save_that_found_the_queue_full_is_told_so(server: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = Event()
    saver = server.cache._saver
    save = saver._save

    def held(request: Any) -> Any:
        goes_on.wait(60)
        return save(request)

    monkeypatch.setattr(saver, "_save", held)
    monkeypatch.setattr(saver, "_queue_bytes", 1)
    first = server.cache.statistics().counters.get("save_calls", 0)
    for n in range(3):  # one is written, one waits, there is no room for more
        server.ask(f"{n}: {B}")
        until(lambda n=n: server.cache.statistics().counters.get("save_calls", 0) > first + n)
    server.ask(A)
    goes_on.set()
    server.settle()
    why = server.why(server.ask(A))
    assert causes(why) == ["write_dropped"]
    assert "queue of saves was full" in why["lost"][0]["evidence"]


def test_what_was_found_and_could_not_be_read_is_told_so(server: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ask(A)
    server.settle()

    def broken(*_: object, **__: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("headstart.transfer.native.reader", lambda: None)  # it asks the kernel itself
    monkeypatch.setattr(type(server.tier.devices[0].tier._store.disk), "read", broken)
    again = server.ask(A)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    why = server.why(again)
    assert causes(why) == ["load_failed"]
    assert any("the rest was computed" in note for note in why["notes"])


@pytest.mark.parametrize("off", [0, 1])
def test_a_request_that_wanted_no_caching_is_told_as_that(server: Asking, off: int) -> None:
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    answers = []
    for n in range(2):
        answers.append(server.ask(chat(1), **(explicit if n == off else {})))
        server.settle()
    why = server.why(answers[1])
    assert causes(why) == ["caching_off"]
    assert ("asked that it not be kept" in why["lost"][0]["evidence"]) == (off == 0)


def test_what_is_too_long_ago_is_said_to_be_not_remembered(server: Asking) -> None:
    server.ask(A)
    server.settle()
    server.tier.delete(server.extents(), reason="user")
    server.cache._saver.history._saves.clear()
    forget_removals(server)
    assert causes(server.why(server.ask(A))) == ["not_remembered"]


def test_what_another_process_stored_and_was_taken_away_is_told_from_the_journals(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "kv") as server:
        server.ask(A)
        server.settle()
        server.tier.delete(server.extents(), reason="capacity")
    with serving(folder, tmp_path / "kv") as server:
        why = server.why(server.ask(A))
        assert why["compared_with"] is None
        assert causes(why) == ["evicted"]
        assert why["lost"][0]["tokens"] == (why["prompt_tokens"] - 1) // 64 * 64
        assert any("another process" in note for note in why["notes"])


def is_own(server: Asking, extent: ExtentId) -> bool:
    return bool(server.tier.info(extent).representation == server.cache.representation.digest)


def forget_removals(server: Asking) -> None:
    for device in server.tier.devices:
        device.tier._store.books.removals.clear()


SYSTEM = "You are careful. It is 10:00:0{} now. " + WORDS * 3
LONG = "The same beginning for everybody, longer than some blocks of tokens. " * 5


def chat(second: int, *more: str) -> list[dict[str, str]]:
    said = [{"role": "system", "content": SYSTEM.format(second)}, {"role": "user", "content": "Which gate opens first?"}]
    return [*said, *({"role": ("assistant", "user")[n % 2], "content": text} for n, text in enumerate(more))]


def test_where_two_prompts_part_is_told_to_the_token_with_its_cause_where_ids_are_kept(server: Asking) -> None:
    first = server.ask(chat(1))
    server.settle()
    why = server.why(server.ask(chat(2)))
    assert why["exact"]
    assert why["compared_with"]["id"] == first["id"]
    parted = why["parted"]
    assert (parted["cause"], parted["path"], parted["anthropic_reason"]) == ("time", "messages[0]", "system_changed")
    assert parted["a"]["text"] != parted["b"]["text"]
    assert parted["token"] == why["common_tokens"] > 0
    assert parted["alike_tokens"] > 100


def test_a_conversation_that_goes_on_parts_from_nothing(server: Asking) -> None:
    first = server.ask(chat(1))
    server.settle()
    said = first["choices"][0]["message"]["content"]
    why = server.why(server.ask(chat(1, said, "And which one closes last?")))
    assert why["compared_with"]["id"] == first["id"]
    assert why["lost"] == []


@pytest.mark.parametrize(
    ("change", "cause", "path"),
    [
        ({"system": "Another one. " * 20}, "system_changed", "messages[0]"),
        ({"last": "Another question"}, "other_text", "messages[1]"),
        ({"cache_salt": "own"}, "salt_changed", ""),
    ],
)
def test_without_ids_digests_tell_which_part_changed_and_nothing_can_be_read(
    change: dict[str, str], cause: str, path: str
) -> None:
    def ask(system: str, last: str, **more: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": last}]
        body = {"messages": messages, "max_tokens": 2, "prompt_cache_key": "c1", **more}
        told: dict[str, Any] = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
        return told

    with running(FakeEngine()) as server:
        told = {"system": LONG, "last": "A question"}
        ask(**told)
        found = httpx.get(f"{server.url}/v1/headstart/requests/{ask(**(told | change))['id']}/why").json()
        assert not found["exact"]
        if path:
            assert (found["parted"]["cause"], found["parted"]["path"]) == (cause, path)
        else:
            assert (causes(found), found["parted"]) == ([cause], None)
        assert "archive" not in json.dumps(found)
        assert all(one.ids is None for kept in server.service.asked._kept.values() for one in kept.values())


def test_nobody_is_told_of_another_tenants_request_nor_compared_with_it(tmp_path: Path) -> None:
    made = [make_key({"tenant": name}) for name in ("a", "b")]
    for one in made:
        append_key(tmp_path / "keys.jsonl", one.key)
    with running(FakeEngine(), accounts=Accounts(keyring=Keyring(tmp_path / "keys.jsonl"))) as server:
        ids = []
        for one in made:
            headers = {"authorization": f"Bearer {one.text}"}
            body = {"prompt": LONG, "max_tokens": 2}
            ids.append(httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).json()["id"])
        path = f"{server.url}/v1/headstart/requests/{ids[1]}/why"
        assert httpx.get(path, headers={"authorization": f"Bearer {made[0].text}"}).status_code == 404
        own = httpx.get(path, headers={"authorization": f"Bearer {made[1].text}"}).json()
        assert own["compared_with"] is None


def test_what_is_remembered_is_bounded_and_the_largest_tenant_gives_way() -> None:
    asked = AskedPrompts(most_bytes=20_000)
    with running(FakeEngine()) as server:
        model = server.service.served
        assert model is not None
        for n in range(40):
            request = model.request(f"r{n}", tuple(LONG.encode()))
            asked.begin(asked.of(model, Ask(id_prefix="", prompt=LONG), request), f"r{n}", "small" if n == 0 else "large")
        assert asked.find("r0", "small") is not None
        assert asked.find("r1", "large") is None
        assert asked.find("r39", "large") is not None
        assert sum(asked._bytes.values()) <= 20_000


def test_the_command_tells_it_for_people_and_as_json(server: Asking, capsys: pytest.CaptureFixture[str]) -> None:
    server.ask(A)
    server.settle()
    server.tier.delete(server.extents(), reason="expired")
    id = server.ask(A)["id"]
    assert run_cli(["why", id, "--url", server.url]) == 0
    said = capsys.readouterr().out
    assert "  cause   expired: removed from disk at" in said
    assert "reused    0 tokens from memory, 0 from disk" in said
    assert run_cli(["why", id, "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lost"][0]["cause"] == "expired"
    assert run_cli(["why", "nobody", "--url", server.url]) == 3
    assert "there is no request 'nobody'" in capsys.readouterr().err
    assert run_cli(["why", id, "--url", "http://127.0.0.1:9"]) == 4
    assert "no server answers" in capsys.readouterr().err


def test_the_command_starts_with_nothing_that_takes_time() -> None:
    arguments = ["why", "it", "--url", "http://127.0.0.1:9"]
    code = f"import sys; from headstart.cli import run_cli; print(run_cli({arguments!r}), *sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout.split()
    assert said[0] == "4"
    assert not {"torch", "transformers", "numpy", "httpx", "aiohttp", "rich", "headstart.cache"} & set(said)


def test_diff_takes_requests_of_a_running_server(server: Asking, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (f"request:{server.ask(chat(second))['id']}" for second in (1, 2))
    assert run_cli(["diff", a, b, "--url", server.url, "--model", str(folder), "--json"]) == DIFFERS
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0]["cause"] == "time"
    assert run_cli(["diff", a, a, "--url", server.url]) == 0
    assert "the same to the end" in capsys.readouterr().out
    assert run_cli(["diff", a, "request:none", "--url", server.url]) == 3
    assert "no request 'none'" in capsys.readouterr().err


def test_diff_says_which_setting_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeEngine()) as server, server.client() as client:
        id = client.completions.create(model="fake", prompt=LONG, max_tokens=2).id
        assert run_cli(["diff", f"request:{id}", f"request:{id}", "--url", server.url]) == 3
        assert "server.keep_prompts" in capsys.readouterr().err


class TellingRenderer(ByteRenderer):
    """Its template writes tools and arguments, too."""

    def write(self, messages: Any, *, tools: Any = None, arguments: Any = None, **more: Any) -> str:
        return json.dumps([tools, arguments or {}]) + super().write(messages, **more)


@contextmanager
def telling() -> Iterator[Running]:
    with running(FakeEngine()) as server:
        model = server.service.served
        assert model is not None
        server.service.ready(replace(model, renderer=cast(Renderer, TellingRenderer())))
        yield server


TOOLS: Any = [{"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ("cache_hit", None)),
        ({"tools": TOOLS}, ("cache_miss", "tools_changed")),
        ({"instructions": "Another one"}, ("cache_miss", "input_changed")),
        ({"input": LONG[:100] + "!" + LONG}, ("cache_miss", "input_changed")),
        ({"reasoning": {"effort": "low"}}, ("cache_miss", "reasoning_effort_changed")),
        ({"extra_body": {"cache_salt": "own"}}, ("cache_miss", "prompt_cache_key_changed")),
        ({"forget": True}, ("unavailable", None)),
        ({"compare_with": "resp_none"}, ("comparison_response_not_found", None)),
    ],
    ids=lambda value: next(iter(value), "same") if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_compared_with_the_one_that_its_client_names(
    change: dict[str, Any], told: tuple[str, str | None], stream: bool
) -> None:
    def ask(compare_with: str | None = None, forget: bool = False, **more: Any) -> Any:
        if forget:
            server.engine._stored.clear()
        body = more.pop("extra_body", {}) | (
            {"prompt_cache_options": {"comparison_response_id": compare_with}} if compare_with else {}
        )
        asked = {"model": "fake", "input": LONG, "instructions": "Be brief. " * 20, "max_output_tokens": 4, **more}
        if not stream:
            return client.responses.create(**asked, extra_body=body)
        events = list(client.responses.create(**asked, extra_body=body, stream=True))
        return events[-1].response

    with telling() as server, server.client() as client:
        first = ask()
        assert first.prompt_cache_diagnostics is None
        found = ask(**{"compare_with": first.id, **change}).prompt_cache_diagnostics
        assert (found.type, getattr(found, "reason", None)) == told
        if found.type == "cache_miss":
            assert 0 < found.cache_missed_tokens <= found.comparison_reusable_tokens


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"tools": [{"name": "clock", "input_schema": {"type": "object"}}]}, "tools_changed"),
        ({"system": "Another one. " + "Be brief. " * 20}, "system_changed"),
        ({"messages": [{"role": "user", "content": "x" + LONG}]}, "messages_changed"),
        ({"extra_body": {"cache_salt": "own"}}, "unavailable"),
        ({"diagnostics": {"previous_message_id": "msg_none"}}, "previous_message_not_found"),
        ({"diagnostics": {"previous_message_id": None}}, None),
    ],
    ids=lambda value: next(iter(value), "same") if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_compared_with_the_one_that_its_client_names(
    change: dict[str, Any], told: str | None, stream: bool
) -> None:
    def ask(**more: Any) -> Any:
        messages = [{"role": "user", "content": LONG}]
        asked = {"model": "fake", "messages": messages, "system": "Be brief. " * 20, "max_tokens": 4, **more}
        if not stream:
            return client.messages.create(**asked)
        return next(event.message for event in client.messages.create(**asked, stream=True) if event.type == "message_start")

    with (
        telling() as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        first = ask()
        assert first.diagnostics is None
        found = ask(**{"diagnostics": {"previous_message_id": first.id}, **change}).diagnostics
        assert (None if found is None else found.cache_miss_reason.type) == told
        if told is not None and told.endswith("_changed"):
            assert found.cache_miss_reason.cache_missed_input_tokens > 0
