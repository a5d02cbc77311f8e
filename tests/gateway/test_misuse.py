"""Clients that ask for what they may not have, or leave at a bad moment: each costs itself alone."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from asking import eventually
from gateway.fakes import STREAM, Fake, Say, chunk, completion, http, stream
from gateway.gateway_kit import Routed, routed
from headstart.api.accounts import Accounts
from headstart.api.keyring import Keyring
from headstart.api.keys import append_key, make_key
from headstart.api.plumbing import Bodies
from headstart.ledger.log import UsageLog
from headstart.ledger.reading import Reading, entries

ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def well(path: str, body: bytes) -> Any:
    return stream("all ", "is ", "well") if json.loads(body).get("stream") else completion("all is well")


class House:
    """A router with keys, one fake worker and one usage log."""

    def __init__(self, router: Routed, worker: Fake, keys: dict[str, str], log: UsageLog, place: Path) -> None:
        self.router = router
        self.worker = worker
        self.log = log
        self._keys = keys
        self._place = place

    def ask(self, who: str, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        headers["authorization"] = f"Bearer {self._keys[who]}"
        return httpx.post(f"{self.router.url}{path}", json=body, headers=headers, timeout=60)

    def lines(self) -> list[Any]:
        return list(entries(self._place, Reading()))


@contextmanager
def house(place: Path, say: Say, *, key: dict[str, Any] | None = None, **more: Any) -> Iterator[House]:
    texts = {}
    for name in ("acme", "other"):
        made = make_key({"tenant": name, **(key or {})})
        append_key(place / "keys", made.key)
        texts[name] = made.text
    with ExitStack() as stack:
        log = UsageLog(place / "usage", keep_bytes=1 << 20)
        worker = stack.enter_context(Fake(say))
        accounts = Accounts(keyring=Keyring(place / "keys"), log=log)
        router = stack.enter_context(routed([worker.url], accounts=accounts, **more))
        eventually(lambda: len(router.on_loop(lambda: router.router.fleet.able("tiny"))) == 1)
        yield House(router, worker, texts, log, place / "usage")


def test_a_stream_that_fails_behind_a_keep_alive_gives_its_place_back(tmp_path: Path) -> None:
    go_on = threading.Event()

    def broken(path: str, body: bytes) -> bytes:
        go_on.wait(60)
        return http(500, b"{}")

    with house(tmp_path, broken, key={"in_flight": 1}, keepalive_s=0.02) as all:
        body = {**ASKED, "stream": True}
        for _ in range(2):
            go_on.clear()
            threading.Timer(0.3, go_on.set).start()
            answer = all.ask("acme", body)
            assert answer.status_code == 200, answer.text
            assert ": keep-alive" in answer.text
            assert '"error"' in answer.text
    assert [(one.finish, one.status) for one in all.lines()] == [("error", 500)] * 2


def test_a_client_that_leaves_before_the_first_token_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Fake(lambda path, body: None) as one, routed([one.url]) as router:
        eventually(lambda: router.ready() == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{router.url}/v1/chat/completions", json={**ASKED, "stream": True}, timeout=0.5)
        assert one.hung_up.wait(60)
        eventually(lambda: router.router.in_flight == 0)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_what_a_stream_used_is_counted_where_its_client_leaves(tmp_path: Path) -> None:
    held = threading.Event()

    def slow(path: str, body: bytes) -> Any:
        def pieces() -> Iterator[bytes]:
            yield from (STREAM, chunk(None), *map(chunk, ("one", " two", " three")))
            held.wait(60)

        return pieces()

    with house(tmp_path, slow) as all:
        headers = {"authorization": f"Bearer {all._keys['acme']}"}
        url = f"{all.router.url}/v1/chat/completions"
        with httpx.stream("POST", url, json={**ASKED, "stream": True}, headers=headers, timeout=60) as answer:
            said = ""
            for text in answer.iter_text():
                said += text
                if "three" in said:
                    break
        eventually(lambda: all.router.router.in_flight == 0)
        held.set()
        all.log.close()
    (line,) = all.lines()
    assert (line.finish, line.output) == ("abort", 3)
    assert line.prompt > 0


@pytest.fixture(scope="module")
def open_router() -> Iterator[tuple[Routed, Fake]]:
    with Fake(well) as one, routed([one.url]) as router:
        eventually(lambda: router.ready() == 1)
        yield router, one


@pytest.mark.parametrize("ids", [[-1], [1 << 40], [1 << 80]])
def test_token_ids_that_are_none_are_the_worker_s_to_refuse(ids: list[int], open_router: tuple[Routed, Fake]) -> None:
    router, worker = open_router
    answer = httpx.post(f"{router.url}/v1/completions", json={"model": "tiny", "prompt": ids, "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert json.loads(worker.asked[-1][1])["prompt"] == ids


@pytest.mark.parametrize("session", ["\xe9t\xe9".encode(), "\xe9t\xe9".encode("latin-1")], ids=["UTF-8", "Latin-1"])
def test_headers_pass_as_they_are(session: bytes, open_router: tuple[Routed, Fake]) -> None:
    router, worker = open_router
    headers = {"x-headstart-session": session}
    answer = httpx.post(f"{router.url}/v1/chat/completions", json=ASKED, headers=headers, timeout=60)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    # What is no UTF-8 is not lost, but becomes it: HTTP's header values have no other encoding any more.
    assert worker.heads[-1]["x-headstart-session"].encode("latin-1") == "\xe9t\xe9".encode()
    ours = {"host", "content-length", "content-type", "x-request-id", "accept", "x-headstart-session"}
    assert worker.heads[-1].keys() <= ours


def test_a_long_body_passes_as_it_is(open_router: tuple[Routed, Fake]) -> None:
    router, worker = open_router
    body = json.dumps(ASKED | {"messages": [{"role": "user", "content": "so long that it goes in pieces, " * 30_000}]}).encode()
    kind = {"content-type": "application/json"}
    answer = httpx.post(f"{router.url}/v1/chat/completions", content=body, headers=kind, timeout=60)
    assert answer.status_code == 200, answer.text
    assert worker.asked[-1][1] == body
    assert worker.heads[-1]["content-length"] == str(len(body))


def test_names_without_an_end_are_not_kept(open_router: tuple[Routed, Fake]) -> None:
    router, _ = open_router
    answer = httpx.post(f"{router.url}/v1/chat/completions", json={**ASKED, "model": "x" * 1_000_000}, timeout=60)
    assert answer.status_code == 404
    assert len(answer.text) < 1000


@pytest.mark.parametrize("id", ["../../health", "a\nb", "x?y=1", "é" * 40, "r" * 100_000])
def test_the_name_of_an_earlier_answer_is_a_name_and_no_path(id: str, open_router: tuple[Routed, Fake]) -> None:
    router, _ = open_router
    body = {"model": "tiny", "input": "hello", "previous_response_id": id}
    answer = httpx.post(f"{router.url}/v1/responses", json=body, timeout=60)
    assert answer.status_code in (200, 404), answer.text
    assert not router.router._places.keys() & {id}


def test_another_tenant_s_answer_is_not_gone_on_from(tmp_path: Path) -> None:
    def responses(path: str, body: bytes) -> bytes:
        content = {"id": "resp_1", "object": "response", "status": "completed", "output": [], "usage": {"input_tokens": 3}}
        return http(200, json.dumps(content).encode())

    with house(tmp_path, responses) as all:
        first = all.ask("acme", {"model": "tiny", "input": "my secret"}, "/v1/responses")
        assert first.json()["id"] == "resp_1"
        goes_on = {"model": "tiny", "input": "and then?", "previous_response_id": "resp_1"}
        assert all.ask("acme", goes_on, "/v1/responses").status_code == 200
        before = all.worker.posts()
        refused = all.ask("other", goes_on, "/v1/responses")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")
        assert all.worker.posts() == before


def test_a_key_s_limits_hold_at_workers_that_know_no_tenants(tmp_path: Path) -> None:
    with house(tmp_path, well, key={"priority": 1}) as all:
        assert all.ask("acme", ASKED, **{"x-headstart-priority": "9", "x-headstart-session": "mine"}).status_code == 200
        head = all.worker.heads[-1]
    assert head["x-headstart-priority"] == "1"
    assert head["x-headstart-session"] == "acme/mine"


def test_bodies_that_wait_have_a_bound_and_are_let_go_with_the_first_token() -> None:
    held = threading.Event()

    def says(path: str, body: bytes) -> Any:
        if not json.loads(body).get("stream"):
            held.wait(60)
            return completion("at last")

        def pieces() -> Iterator[bytes]:
            yield from (STREAM, chunk("one"))
            held.wait(60)
            yield from stream("two")[2:]

        return pieces()

    with Fake(says) as one, routed([one.url]) as router:
        eventually(lambda: router.ready() == 1)
        url = f"{router.url}/v1/chat/completions"
        unsent = router.router.unsent = Bodies(2 * len(httpx.Request("POST", url, json=ASKED).content))
        with httpx.stream("POST", url, json={**ASKED, "stream": True}, timeout=60) as streaming:
            next(streaming.iter_bytes())
            assert unsent.held_bytes == 0
            answers: list[int] = []
            waiting = [
                threading.Thread(target=lambda: answers.append(httpx.post(url, json=ASKED, timeout=60).status_code))
                for _ in range(3)
            ]
            for thread in waiting:
                thread.start()
            eventually(lambda: answers != [])  # whoever finds no room is told so at once
            assert set(answers) == {429}
            held.set()
            for thread in waiting:
                thread.join(60)
        eventually(lambda: router.router.in_flight == 0)
        assert set(answers) == {200, 429}
        assert unsent.held_bytes == 0
