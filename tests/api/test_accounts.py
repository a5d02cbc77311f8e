"""Keys, tenants, limits, receipts and the usage log, over the fake engine and with real clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api.serving import Running, running, served
from headstart.api import generation as generation_module
from headstart.api import limits
from headstart.api.accounts import Account, Accounts
from headstart.api.keyring import Keyring
from headstart.api.keys import Made, append_key, make_key, remove_keys
from headstart.api.receipts import Times
from headstart.api.shared import SharedPrefixes
from headstart.api.usage import Usage
from headstart.cli.opening import disk_quotas
from headstart.config import CacheConfig
from headstart.engine.base import Receipt
from headstart.ledger.entry import Entry
from headstart.ledger.log import UsageLog
from headstart.ledger.reading import Reading, add_up, entries
from headstart.testing.fake_engine import FakeEngine

LONG = "The same beginning for everybody, longer than some blocks of tokens. " * 5  # 345 bytes, five blocks


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


@pytest.fixture
def give(file: Path) -> Callable[..., Made]:
    def give(tenant: str, **fields: Any) -> Made:
        made = make_key({"tenant": tenant, **fields})
        append_key(file, made.key)
        return made

    return give


@contextmanager
def keyed(engine: FakeEngine, file: Path, **more: Any) -> Iterator[Running]:
    accounts = Accounts(keyring=Keyring(file), log=UsageLog(file.parent / "usage", keep_bytes=1 << 20), **more)
    with running(engine, accounts=accounts) as server:
        yield server


def logged(folder: Path) -> list[Entry]:
    return list(entries(folder / "usage", Reading()))


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask(server: Running, key: str, content: str = LONG, **more: Any) -> Any:
    with server.client(key=key) as client:
        messages: Any = [{"role": "user", "content": content}]
        return client.chat.completions.create(model="fake", messages=messages, **{"max_tokens": 4, **more})


def cached(answer: Any) -> int:
    found: int = answer.usage.prompt_tokens_details.cached_tokens
    return found


def test_without_a_key_nothing_is_told_but_that_the_server_lives(
    engine: FakeEngine, file: Path, give: Callable[..., Made]
) -> None:
    give("acme")
    with keyed(engine, file) as server, httpx.Client(base_url=server.url) as http:
        paths = ["/metrics", "/v1/models", "/v1/headstart/requests/x", "/nowhere", "/openapi.json"]
        assert {path: http.get(path).status_code for path in paths} == dict.fromkeys(paths, 401)
        assert http.post("/v1/chat/completions", json={}).status_code == 401
        assert {path: http.get(path).status_code for path in ("/health", "/version")} == {"/health": 200, "/version": 200}
        refusal = http.get("/v1/models")
        assert refusal.headers["www-authenticate"] == "Bearer"
        assert refusal.json()["error"]["code"] == "invalid_api_key"
        assert refusal.json()["error"]["type"] == "authentication_error"
        assert refusal.headers["x-request-id"]
        asked_in_anthropic_s = http.post("/v1/messages", json={})
        assert asked_in_anthropic_s.status_code == 401
        assert asked_in_anthropic_s.json()["type"] == "error"
        assert asked_in_anthropic_s.json()["error"]["type"] == "authentication_error"
        for path in ("/v1/responses", "/v1/messages/count_tokens", "/tokenize", "/detokenize", "/v1/completions/render"):
            assert http.post(path, json={}).status_code == 401
        with server.client(key="hs-none-wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_a_key_is_taken_from_either_header_and_wrong_in_any_character(
    engine: FakeEngine, file: Path, give: Callable[..., Made]
) -> None:
    text = give("acme").text
    with keyed(engine, file) as server, httpx.Client(base_url=server.url) as http:

        def status(**headers: str) -> int:
            return http.get(
                "/v1/models", headers={name.replace("_", "-"): value for name, value in headers.items()}
            ).status_code

        assert status(authorization=f"Bearer {text}") == status(authorization=f"bearer {text}") == status(x_api_key=text) == 200
        for wrong in (text[:-1], text + "x", text.swapcase(), text.replace("hs-", ""), "x" * 5000, "hs--", "ÿ"):
            header = {"x-api-key": wrong.encode()}
            assert http.get("/v1/models", headers=header).status_code == 401, wrong
        assert status(authorization="Basic abc") == 401


def test_keys_change_while_the_server_runs_and_a_broken_file_changes_nothing(
    engine: FakeEngine, file: Path, give: Callable[..., Made], caplog: pytest.LogCaptureFixture
) -> None:
    first = give("acme")
    with keyed(engine, file) as server:

        def status(key: str) -> int:
            return httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key}).status_code

        second = give("beta")
        eventually(lambda: status(second.text) == 200)
        remove_keys(file, [first.key.id])
        eventually(lambda: status(first.text) == 401)
        with file.open("a") as stream:
            stream.write("{broken\n")
        eventually(lambda: status(second.text) == 200 and "until then the keys hold" in caplog.text)
        file.unlink()
        eventually(lambda: status(second.text) == 200 and caplog.text.count("until then the keys hold") == 2)


def test_what_keys_say_of_the_disk_is_told_again_when_they_change(
    engine: FakeEngine, file: Path, give: Callable[..., Made]
) -> None:
    given = give("acme", disk="1GiB")
    told: list[dict[str, str]] = []
    with keyed(engine, file) as server:
        keyring = server.service.accounts.keyring
        assert keyring is not None
        keyring.watch(lambda keys: told.append(disk_quotas(CacheConfig(quotas="beta=5%"), keys)))
        give("beta", disk="10%")
        give("gamma", disk="2GiB")
        eventually(lambda: bool(ask(server, given.text)) and "gamma" in told[-1])
    assert told[0] == {"acme": "1GiB", "beta": "5%"}
    assert told[-1] == {"acme": "1GiB", "beta": "5%", "gamma": "2GiB"}


def test_five_tenants_share_no_prefix_whatever_salt_they_give_and_each_finds_its_own(
    engine: FakeEngine, file: Path, give: Callable[..., Made]
) -> None:
    keys = [give(f"tenant{n}").text for n in range(5)]
    again = give("tenant0").text
    with keyed(engine, file) as server:
        assert [cached(ask(server, key)) for key in keys] == [0] * 5
        assert [cached(ask(server, key)) for key in keys] == [320] * 5
        assert cached(ask(server, again)) == 320  # another key of the same tenant
        assert cached(ask(server, keys[1], extra_body={"cache_salt": "own"})) == 0
        assert cached(ask(server, keys[2], extra_body={"cache_salt": "own"})) == 0  # and not the other tenant's
        assert cached(ask(server, keys[1], extra_body={"cache_salt": "own"})) == 320
    salts = {request.salt for request in engine.submitted}
    assert len(salts) == 7
    assert all(isinstance(salt, bytes) and salt[:1] == b"\xff" for salt in salts), "no text has these bytes"


def test_what_the_operator_declared_shared_is_found_by_all_and_nothing_behind_it(
    engine: FakeEngine, file: Path, give: Callable[..., Made]
) -> None:
    first, second = give("a").text, give("b").text
    with keyed(engine, file) as server:
        shared = SharedPrefixes([list(f"<user>{LONG}"[:200].encode())])
        server.service.ready(replace(served(engine), shared=shared))
        assert cached(ask(server, first)) == 0
        assert cached(ask(server, second)) == 192
        assert cached(ask(server, second)) == 320


def test_a_receipt_is_told_to_its_own_tenant_alone(engine: FakeEngine, file: Path, give: Callable[..., Made]) -> None:
    mine, other, ours = give("a", **{"class": "agent"}), give("b"), give("a")
    with keyed(engine, file) as server:
        answer = ask(server, mine.text)

        def told(id: str, key: str) -> httpx.Response:
            return httpx.get(f"{server.url}/v1/headstart/requests/{id}", headers={"x-api-key": key})

        eventually(lambda: told(answer.id, mine.text).status_code == 200)
        receipt = told(answer.id, ours.text).json()
        assert receipt["usage"] == {
            "prompt": 351,
            "cached_memory": 0,
            "cached_disk": 0,
            "computed": 351,
            "written": 320,
            "output": 4,
            "kept_output": 0,
        }
        assert set(receipt["seconds"]) == {"tokenise", "queue", "match", "load", "compute", "first_token", "decode", "total"}
        assert receipt["load_decision"]["choice"] == "miss"
        assert (receipt["class"], receipt["finish"], receipt["status"]) == ("agent", "length", 200)
        refused, unknown = told(answer.id, other.text), told("chatcmpl-none", other.text)
        assert (refused.status_code, unknown.status_code) == (404, 404)
        assert refused.text.replace(answer.id, "ID") == unknown.text.replace("chatcmpl-none", "ID")


def test_usage_and_times_stand_in_every_answer_also_at_0(engine: FakeEngine) -> None:
    with running(engine) as server:
        body = {"prompt": "x", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == details["cached_memory_tokens"] == details["cached_disk_tokens"] == 0
        assert details["cache_write_tokens"] == 0
        timing = answer.headers["server-timing"]
        assert [part.split(";")[0] for part in timing.split(", ")] == [
            "tokenise",
            "queue",
            "match",
            "load",
            "compute",
            "first_token",
            "decode",
            "total",
        ]
        first = ask(server, "none").usage.prompt_tokens_details
        assert (first.cached_tokens, first.cache_write_tokens) == (0, 320)
        second = ask(server, "none").usage.prompt_tokens_details
        assert (second.cached_tokens, second.cache_write_tokens) == (320, 0)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"max_tokens": 1}, {"stop": ["a", "e", "i", "o", "u"]}, {"min_tokens": 0}])
def test_usage_is_the_same_streamed_and_whole(engine: FakeEngine, more: dict[str, Any]) -> None:
    with running(engine) as server:
        ask(server, "none")
        extra = {"extra_body": {"min_tokens": 0}} if "min_tokens" in more else more
        engine.answer = b"" if "min_tokens" in more else None  # nothing at all is said
        whole = ask(server, "none", **extra).usage
        with server.client() as client:
            chunks = list(
                client.chat.completions.create(
                    model="fake",
                    messages=[{"role": "user", "content": LONG}],
                    stream=True,
                    stream_options={"include_usage": True},
                    **{"max_tokens": 4, **extra},
                )
            )
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole
    assert whole.prompt_tokens_details.cached_tokens == 320


def test_nothing_over_http_clears_exports_or_imports_what_is_stored(engine: FakeEngine) -> None:
    with running(engine) as server, httpx.Client(base_url=server.url) as http:
        for path in ("/reset_prefix_cache", "/flush_cache", "/v1/cache", "/cache/clear", "/v1/headstart/cache", "/env"):
            for method in ("GET", "POST", "DELETE", "PUT"):
                refused = http.request(method, path, headers={"x-forwarded-for": "8.8.8.8"})
                assert refused.status_code == 404, (method, path)
                assert "/root" not in refused.text
                assert "/home" not in refused.text


def test_limits_of_a_key_are_429_with_the_time_to_wait(engine: FakeEngine, file: Path, give: Callable[..., Made]) -> None:
    requests = give("a", requests_per_minute=2).text
    tokens = give("b", tokens_per_minute=300).text
    flights = give("c", in_flight=1).text
    small = give("d", body_bytes=100).text
    now_s = [0.0]
    with keyed(engine, file, clock=lambda: now_s[0]) as server:

        def refused(key: str) -> int:
            with pytest.raises(openai.RateLimitError) as raised:
                ask(server, key, "hello")
            assert raised.value.code == "rate_limit_exceeded"
            wait_s = int(raised.value.response.headers["retry-after"])
            assert int(raised.value.response.headers["retry-after-ms"]) == 1000 * wait_s
            return wait_s

        for _ in range(2):
            ask(server, requests, "hello")
        assert refused(requests) == 30
        now_s[0] += 30
        ask(server, requests, "hello")
        ask(server, tokens, LONG)  # 355 of 300: what is over is waited for
        assert refused(tokens) == 12
        engine.gate.clear()
        stuck = threading.Thread(target=ask, args=(server, flights, "hello"))
        stuck.start()
        eventually(lambda: engine.load().running == 1)
        assert refused(flights) == 1
        engine.gate.set()
        stuck.join()
        ask(server, flights, "hello")
        with pytest.raises(openai.APIStatusError) as raised:
            ask(server, small)
        assert raised.value.status_code == 413
        # What generates nothing is within the same limits, and has no line in the log.
        text, messages = {"prompt": "x" * 100}, {"messages": [{"role": "user", "content": "x" * 100}]}
        for path, body in {
            "/tokenize": text,
            "/v1/completions/render": text,
            "/v1/chat/completions/render": messages,
            "/v1/messages/count_tokens": messages,
        }.items():
            now_s[0] += 60
            statuses = [httpx.post(server.url + path, json=body, headers={"x-api-key": requests}).status_code for _ in range(3)]
            assert statuses == [200, 200, 429], path
            assert httpx.post(server.url + path, json=body, headers={"x-api-key": small}).status_code == 413
    assert sorted(one.status for one in logged(file.parent)) == [200] * 6 + [413, 429, 429, 429]


def test_a_key_that_is_refused_without_end_does_not_fill_the_log(
    engine: FakeEngine, file: Path, give: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REFUSAL_LINES", 3)
    key = give("a", requests_per_minute=1).text
    with keyed(engine, file, clock=lambda: 0.0) as server, httpx.Client(base_url=server.url) as http:
        body, headers = {"prompt": "x", "max_tokens": 1}, {"x-api-key": key}
        statuses = [http.post("/v1/completions", json=body, headers=headers).status_code for _ in range(20)]
    assert statuses == [200] + [429] * 19
    lines = logged(file.parent)
    assert [one.requests for one in lines if one.finish == "refused"] == [1, 1, 1, 16]
    assert next(iter(add_up(lines, ["tenant"]).values())).counts["requests"] == 20


def test_a_tenant_has_its_class_and_its_priority_and_no_more(engine: FakeEngine, file: Path, give: Callable[..., Made]) -> None:
    low, high = give("a", **{"class": "agent"}).text, give("b", priority=5).text
    with keyed(engine, file) as server:
        ask(server, low, extra_headers={"x-headstart-priority": "9", "x-headstart-session": "s"})
        ask(server, high, extra_headers={"x-headstart-priority": "9", "x-headstart-retention": "chat"})
        ask(server, high, extra_headers={"x-headstart-priority": "-2"})
    told = [(one.tenant, one.priority, one.retention, one.session) for one in engine.submitted]
    assert told == [("a", 0, "agent", "a/s"), ("b", 5, "chat", ""), ("b", -2, "default", "")]


def test_metrics_tell_of_all_tenants_to_an_operator_alone(engine: FakeEngine, file: Path, give: Callable[..., Made]) -> None:
    plain, operator = give("a").text, give("ops", operator=True).text
    with keyed(engine, file) as server:
        ask(server, plain)

        def scrape(key: str) -> httpx.Response:
            return httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {key}"})

        assert scrape(plain).status_code == 403
        assert "headstart" not in scrape(plain).text.replace("headstart keys", "")
        eventually(lambda: 'headstart_tenant_prompt_tokens_total{tenant="a"} 351.0' in scrape(operator).text)


def test_a_deadline_ends_a_request_with_a_name(engine: FakeEngine, tmp_path: Path) -> None:
    engine.answer = b"x" * 100
    accounts = Accounts(log=UsageLog(tmp_path / "usage", keep_bytes=1 << 20))
    with running(engine, accounts=accounts) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        engine.gate.clear()
        body = {"prompt": "x", "max_tokens": 50}
        soon = {"x-headstart-deadline": "2"}  # not so soon that the prompt is not tokenised on a loaded machine
        late = http.post("/v1/completions", json=body, headers=soon)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert late.headers["x-should-retry"] == "false"
        stream = http.post("/v1/completions", json={**body, "stream": True}, headers=soon)
        assert stream.status_code == 200
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        wrong = http.post("/v1/completions", json=body, headers={"x-headstart-deadline": "-1"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-headstart-deadline")
        engine.gate.set()
    assert [(one.finish, one.status) for one in logged(tmp_path)] == [("abort", 504), ("abort", 504), ("refused", 400)]


def test_a_full_queue_tells_by_its_pace_when_to_come_again(engine: FakeEngine) -> None:
    engine.max_running = 1
    with running(engine, max_waiting=2) as server:
        for _ in range(3):
            ask(server, "none", "hello")
        engine.gate.clear()
        threads = [threading.Thread(target=ask, args=(server, "none", "hello")) for _ in range(3)]
        threads[0].start()
        eventually(lambda: engine.load().running == 1)  # before that it waits, too, and the third would be one too many
        for thread in threads[1:]:
            thread.start()
        eventually(lambda: engine.load().waiting == 2)
        with pytest.raises(openai.RateLimitError) as raised:
            ask(server, "none", "hello")
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60
        engine.gate.set()
        for thread in threads:
            thread.join()


def test_a_client_that_reads_nothing_is_cut_and_its_request_ended(tmp_path: Path) -> None:
    engine = FakeEngine(context_tokens=400_000, answer=b"x" * 300_000)
    accounts = Accounts(log=UsageLog(tmp_path / "usage", keep_bytes=1 << 20))
    with running(engine, accounts=accounts, stall_s=0.5) as server:
        port = int(server.url.rpartition(":")[2])
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            body = json.dumps({"prompt": "x", "max_tokens": 300_000, "stream": True}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            eventually(lambda: len(engine.aborted) == 1)
            eventually(lambda: bool(logged(tmp_path)))
        eventually(lambda: engine.load().running == 0)
    (line,) = logged(tmp_path)
    assert (line.finish, line.status) == ("abort", 408)
    assert line.output < 300_000


def test_what_a_slow_client_leaves_lying_is_bounded_and_it_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_module, "STUCK_S", 0.1)
    engine = FakeEngine(context_tokens=400_000, answer=b"x" * 300_000)
    with running(engine) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        body = json.dumps({"prompt": "x", "max_tokens": 300_000, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: len(engine.aborted) == 1)
        (generation,) = server.service._flights.values() or [None]
        if generation is not None:
            assert generation._events.qsize() <= generation_module.MOST_BURST + 1
        received = b""
        while piece := client.recv(1 << 20):
            received = (received + piece)[-4096:]
    assert b"reader_too_slow" in received


def test_a_bug_and_a_client_that_leaves_while_sending_are_in_the_log(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = Accounts(log=UsageLog(tmp_path / "usage", keep_bytes=1 << 20))
    with running(engine, accounts=accounts) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: 1000\r\n\r\nhalf".encode())
        eventually(lambda: len(logged(tmp_path)) == 1)

        def bug(*_: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(server.service, "start", bug)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 500
    assert [(one.finish, one.status) for one in logged(tmp_path)] == [("abort", 499), ("error", 500)]


def test_the_log_has_a_line_for_each_request_and_sums_to_the_engines_counters(engine: FakeEngine, tmp_path: Path) -> None:
    accounts = Accounts(log=UsageLog(tmp_path / "usage", keep_bytes=1 << 20))
    with running(engine, accounts=accounts) as server:
        ask(server, "none")
        ask(server, "none", n=3)
        ask(server, "none", stream=True).close()
        ask(server, "none", stop=["a", "e", "i", " "], max_tokens=50)
        engine.fail_after = 2
        with pytest.raises(openai.InternalServerError):
            ask(server, "none")
        engine.fail_after = None
        with pytest.raises(openai.BadRequestError):
            ask(server, "none", "x" * 5000)
        eventually(lambda: server.engine.load().running == 0)
        counters = engine.load().counters
    lines = logged(tmp_path)
    assert len({one.id for one in lines}) == len(lines) == 6
    sums = next(iter(add_up(lines, []).values())).counts
    assert sums["engine_prompt"] == counters["prompt_tokens"]
    assert sums["engine_cached_memory"] == counters["cached_memory_tokens"]
    assert sums["engine_generated"] == counters["generated_tokens"]
    assert sums["engine_written"] == counters["written_tokens"]
    assert all(one.cached_memory + one.cached_disk + one.written <= one.prompt for one in lines)
    assert sorted(one.finish for one in lines)[-2:] == ["refused", "stop"]
    assert [one.status for one in lines if one.finish in ("error", "refused")] == [500, 400]


def test_numbers_that_do_not_add_up_are_cut_and_counted_and_fail_no_request() -> None:
    receipt = Receipt(17050, 1, 768, 0, 0, 0.0, 0.0, 0.0, 0.1, 0.2)
    usage = Usage.of(replace(receipt, cached_disk_tokens=20000, written_tokens=9), output_tokens=1)
    assert (usage.cached_memory_tokens, usage.cached_disk_tokens, usage.written_tokens) == (768, 16282, 0)
    assert usage.clamped
    assert not Usage.of(receipt, output_tokens=1).clamped


def test_a_fault_in_keeping_accounts_reaches_no_request(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __call__(self, account: Account, entry: Entry, times: Times | None) -> None:
            raise RuntimeError("accounts are down")

        def close(self) -> None: ...

    accounts = Accounts(on_ended=Failing())
    with running(engine, accounts=accounts) as server:
        assert ask(server, "none").choices[0].finish_reason == "length"
        eventually(lambda: accounts.counters.get("account_faults") == 1)
        monkeypatch.setattr(server.service.metrics, "observe", Failing())
        assert ask(server, "none").choices[0].finish_reason == "length"
        eventually(lambda: accounts.counters.get("account_faults") == 3)
    assert "accounts are down" in caplog.text
