"""Workers that fail: what they had not begun to answer goes elsewhere, what they had ends in a clear error; nothing hangs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from api.serving import Running, running
from asking import eventually
from gateway.fakes import CHUNKED, STREAM, Fake, Say, chunk, chunked, completion, http, stream
from gateway.gateway_kit import Routed, routed
from headstart.api.accounts import Accounts
from headstart.api.keyring import Keyring
from headstart.api.keys import append_key, make_key
from headstart.gateway import sending
from headstart.gateway.worker import Address
from headstart.ledger.log import UsageLog
from headstart.ledger.reading import Reading, entries
from headstart.policy.routing.router import Routing
from headstart.testing.fake_engine import FakeEngine

ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def well(path: str, body: bytes) -> Any:
    return stream("all ", "is ", "well") if json.loads(body).get("stream") else completion("all is well")


def text_of(client: openai.OpenAI, **more: Any) -> str:
    if more.get("stream"):
        return "".join(part.choices[0].delta.content or "" for part in client.chat.completions.create(**ASKED, **more))
    return client.chat.completions.create(**ASKED, **more).choices[0].message.content or ""


FAILING: dict[str, Say] = {
    "says 500": lambda path, body: http(500, b'{"error": {"message": "broken", "type": "server_error"}}'),
    "says 503": lambda path, body: http(503, b"{}"),
    "has no room": lambda path, body: http(429, b"{}"),
    "refuses the router's key": lambda path, body: http(401, b"{}"),
    "says what is no HTTP": lambda path, body: [b"\x00\x01 what is this"],
    "says what is no JSON": lambda path, body: http(200, b"<html>hello</html>", "text/html"),
    "says JSON of another kind": lambda path, body: http(200, b"[1, 2]"),
    "sends a chunk that is none": lambda path, body: [CHUNKED + chunked(chunk(None)), b"zz\r\n"],
    "hangs up": lambda path, body: [],
    "ends before the first token": lambda path, body: [STREAM, chunk(None)],
    "streams garbage": lambda path, body: [STREAM, b"data: {nonsense\n\n"],
    "streams an error": lambda path, body: [
        STREAM,
        b'data: {"error": {"message": "no", "type": "server_error", "code": "x"}}\n\n',
    ],
}


def test_who_refused_a_prompt_is_not_presumed_to_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    presumed: list[str] = []
    monkeypatch.setattr(sending, "_PRESUMED_AFTER_S", 1.0)  # far behind the refusal
    monkeypatch.setattr(Routing, "presume", lambda self, name, keys: presumed.append(name))
    with Fake(well) as good, Fake(FAILING["has no room"]) as full, routed([good.url, full.url]) as router:
        eventually(lambda: router.ready() == 2)
        with router.client() as client:
            while not full.posts():
                assert text_of(client) == "all is well"
        eventually(lambda: len(presumed) == good.posts())
        eventually(lambda: router.router.in_flight == 0)
    assert set(presumed) == {Address.of(good.url).id}


@pytest.fixture(scope="module")
def beside_a_good_one() -> Iterator[tuple[Routed, openai.OpenAI]]:
    with Fake(well) as good, routed([good.url]) as router, router.client() as client:
        eventually(lambda: router.ready() == 1)
        yield router, client


@pytest.mark.parametrize("how", FAILING)
def test_a_request_is_answered_by_another_worker_where_one(how: str, beside_a_good_one: tuple[Routed, openai.OpenAI]) -> None:
    router, client = beside_a_good_one
    with Fake(FAILING[how]) as bad:
        router.add(bad.url)
        for streams in (False, True):
            before = bad.posts()
            while bad.posts() == before:  # by lot
                assert text_of(client, stream=streams) == "all is well"
        eventually(lambda: router.router.in_flight == 0)
        told = router.workers()[bad.url]
        assert (told["in_flight"], told["requests"]) == (0, bad.posts())
        router.remove(bad.url)


def test_a_stream_that_breaks_off_ends_in_a_clear_error() -> None:
    with Fake(lambda path, body: stream("half ", ends=False)) as bad, routed([bad.url]) as router, router.client() as client:
        eventually(lambda: router.ready() == 1)
        parts = iter(client.chat.completions.create(**ASKED, stream=True))
        heard = [next(parts).choices[0].delta.content for _ in range(2)]
        assert heard == [None, "half "]
        with pytest.raises(openai.APIError, match="lost midway"):
            next(parts)
        assert bad.posts() == 1  # nothing is said twice


def test_a_worker_that_hangs_loses_what_it_had_not_begun(tmp_path: Path) -> None:
    """The hanging one is told apart by the requests to it being never answered, and its health neither."""
    with ExitStack() as stack:
        good = stack.enter_context(Fake(well))
        bad = stack.enter_context(Fake(lambda path, body: None))
        router = stack.enter_context(routed([bad.url], dead_after_s=1.0))
        client = stack.enter_context(router.client())
        eventually(lambda: router.ready() == 1)
        bad._about = lambda path: b""  # type: ignore[method-assign]  # from now on it says nothing at all
        router.add(good.url)
        for _ in range(4):
            assert text_of(client) == "all is well"
        eventually(lambda: router.workers()[bad.url]["state"] == "down")
        assert text_of(client, stream=True) == "all is well"


def test_where_no_worker_is_there_it_is_said_after_the_patience_and_a_late_one_is_waited_for() -> None:
    with Fake(well) as late, routed([], patience_s=0.0) as router, router.client() as client:
        with pytest.raises(openai.InternalServerError, match="no worker") as caught:
            text_of(client)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "2"
        router.router.patience_s = 60.0
        added = httpx.post(f"{router.url}/router/workers", json={"url": late.url, "role": "both"})
        assert (added.status_code, added.json()["id"]) == (201, late.url.removeprefix("http://"))
        assert text_of(client) == "all is well"  # it was not ready yet


def test_a_client_s_own_mistake_is_told_as_the_worker_tells_it_and_asked_once() -> None:
    wrong = http(
        400, b'{"error": {"message": "top_p is wrong", "type": "invalid_request_error", "code": "x", "param": "top_p"}}'
    )
    with Fake(lambda path, body: wrong) as one, routed([one.url]) as router, router.client() as client:
        eventually(lambda: router.ready() == 1)
        for streams in (False, True):
            with pytest.raises(openai.BadRequestError, match="top_p is wrong"):
                text_of(client, stream=streams)
        assert one.posts() == 2
        assert router.workers()[one.url]["failures"] == 0


def test_a_request_that_breaks_workers_is_given_up_after_three() -> None:
    with ExitStack() as stack:
        bad = [stack.enter_context(Fake(FAILING["hangs up"])) for _ in range(5)]
        router = stack.enter_context(routed([one.url for one in bad]))
        client = stack.enter_context(router.client())
        eventually(lambda: router.ready() == 5)
        with pytest.raises(openai.InternalServerError, match="3 workers failed"):
            text_of(client)
        assert sum(one.posts() for one in bad) == 3


def test_a_worker_that_starts_anew_holds_nothing() -> None:
    with Fake(well) as one, routed([one.url]) as router, router.client() as client:
        eventually(lambda: router.ready() == 1)
        long = [{"role": "user", "content": "what is said again and again " * 40}]
        for _ in range(2):
            answer = client.chat.completions.create(model="tiny", messages=long)  # type: ignore[arg-type]

        def reused() -> int:
            id = client.chat.completions.with_raw_response.create(model="tiny", messages=long).headers["x-request-id"]  # type: ignore[arg-type]
            told = router.get("/router/decisions", params={"request": id})
            return int(told["attempts"][0]["scores"][0]["reused_tokens"])

        assert answer.choices
        eventually(lambda: reused() > 200)  # the router presumes a little later
        one.started = 2.0
        eventually(lambda: router.workers()[one.url]["instance"] == "2.0")
        assert reused() == 0


def test_a_worker_that_starts_anew_is_not_presumed_to_hold_what_it_was_sent_before(monkeypatch: pytest.MonkeyPatch) -> None:
    presumed: list[str] = []
    monkeypatch.setattr(sending, "_PRESUMED_AFTER_S", 2.0)  # far behind its start
    monkeypatch.setattr(Routing, "presume", lambda self, name, keys: presumed.append(name))
    with Fake(well) as one, routed([one.url]) as router, router.client() as client:
        eventually(lambda: router.ready() == 1)
        text_of(client)
        one.started = 2.0
        eventually(lambda: router.workers()[one.url]["instance"] == "2.0")
        text_of(client)
        eventually(lambda: bool(presumed))
    assert len(presumed) == 1


@pytest.fixture
def worker() -> Iterator[Running]:
    with running(FakeEngine()) as worker:
        yield worker


def test_a_client_that_leaves_ends_its_request_at_the_worker(worker: Running) -> None:
    worker.engine.gate.clear()
    with routed([worker.url]) as router:
        eventually(lambda: router.ready() == 1)
        for streams in (False, True):
            before = len(worker.engine.submitted)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{router.url}/v1/chat/completions", json={**ASKED, "stream": streams}, timeout=0.5)
            eventually(lambda before=before: len(worker.engine.submitted) > before)  # type: ignore[misc]
            eventually(lambda: len(worker.engine.aborted) >= len(worker.engine.submitted))
        eventually(lambda: router.router.in_flight == 0)
    worker.engine.gate.set()


def go_on_asking(client: openai.OpenAI, until: threading.Event) -> None:
    """Ask something every moment, whether or not what was asked before is answered."""
    asked = []
    while not until.wait(0.05):
        asked.append(threading.Thread(target=lambda: text_of(client)))
        asked[-1].start()
    for one in asked:
        one.join(60)


def test_a_worker_whose_engine_hangs_though_it_says_that_it_is_well_loses_its_requests_and_comes_back() -> None:
    with ExitStack() as stack:
        engine = FakeEngine(max_running=1)
        engine.gate.clear()
        hanging = stack.enter_context(running(engine))
        good = stack.enter_context(running(FakeEngine()))
        router = stack.enter_context(routed([hanging.url], stuck_after_s=0.3))
        client = stack.enter_context(router.client())
        eventually(lambda: router.ready() == 1)
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(text_of(client)))
        asking.start()
        eventually(lambda: len(engine.submitted) == 1)
        answered = threading.Event()
        more = threading.Thread(target=lambda: go_on_asking(client, answered))
        more.start()
        eventually(lambda: len(engine.submitted) > 3)  # its queue grows, which is no progress
        router.add(good.url)
        asking.join(60)
        answered.set()
        more.join(60)
        assert answers == [text_of(client)]
        told = router.workers()[hanging.url]
        assert told["state"] == "down"
        assert "no further with" in told["why"]
        eventually(lambda: engine.submitted[-1].max_tokens == 1)  # it is asked for a token, in vain
        assert router.workers()[hanging.url]["state"] == "down"
        engine.gate.set()
        eventually(lambda: router.workers()[hanging.url]["state"] == "ready")


@pytest.mark.parametrize("status", [404, 405])
def test_what_one_worker_does_not_have_is_asked_of_another_and_of_that_one_no_more(status: int) -> None:
    with Fake(lambda path, body: http(status, b'{"detail": "Not Found"}')) as old, routed([old.url]) as router:
        eventually(lambda: router.ready() == 1)
        alone = httpx.post(f"{router.url}/v1/chat/completions", json=ASKED)
        assert (alone.status_code, alone.json()) == (status, {"detail": "Not Found"})  # nobody knows better
        with Fake(well) as new, router.client() as client:
            router.add(new.url)
            assert [text_of(client, stream=streams) for streams in (False, True) * 4] == ["all is well"] * 8
            assert (old.posts(), router.workers()[old.url]["failures"]) == (1, 0)


LACKS = http(404, b'{"error": {"message": "there is no adapter x", "type": "invalid_request_error", "code": "x"}}')


@pytest.mark.parametrize("streams", [False, True])
def test_who_lacks_it_does_not_speak_for_one_that_has_it_and_is_full(streams: bool) -> None:
    full = http(429, b'{"error": {"message": "all is full", "type": "rate_limit_error"}}')
    with Fake(lambda path, body: LACKS) as lacking, Fake(lambda path, body: full) as busy:
        for urls in ([lacking.url, busy.url], [busy.url, lacking.url]):
            with routed(urls) as router:
                eventually(lambda router=router: router.ready() == 2)  # type: ignore[misc]
                for _ in range(4):
                    said = httpx.post(f"{router.url}/v1/chat/completions", json={**ASKED, "stream": streams}, timeout=60)
                    assert (said.status_code, said.json()["error"]["message"]) == (429, "all is full")


def test_who_lacks_it_does_not_speak_for_one_that_has_it_and_is_starting() -> None:
    asked: list[int] = []

    def starts(path: str, body: bytes) -> Any:
        asked.append(1)
        return http(503, b"{}") if len(asked) <= 6 else well(path, body)

    with ExitStack() as stack:
        lacking, starting = (stack.enter_context(Fake(say)) for say in (lambda path, body: LACKS, starts))
        router = stack.enter_context(routed([lacking.url, starting.url]))
        client = stack.enter_context(router.client())
        eventually(lambda: router.ready() == 2)
        assert text_of(client) == "all is well"
        assert lacking.posts() <= 1


@pytest.mark.parametrize("lacking", [1, 3, 5])
def test_what_all_lack_waits_for_one_that_is_starting(lacking: int) -> None:
    with ExitStack() as stack:
        others = [stack.enter_context(Fake(lambda path, body: LACKS)) for _ in range(lacking)]
        late = stack.enter_context(Fake(well))
        late.ready = False
        router = stack.enter_context(routed([*(one.url for one in others), late.url]))
        client = stack.enter_context(router.client())
        eventually(lambda: router.ready() == lacking)
        said: list[str] = []
        asking = threading.Thread(target=lambda: said.append(text_of(client)))
        asking.start()
        eventually(lambda: sum(one.posts() for one in others) == min(lacking, 3))
        late.ready = True
        asking.join(60)
        assert said == ["all is well"]
        assert sum(one.posts() for one in others) == min(lacking, 3)


def test_what_all_lack_is_refused_once_who_started_lacks_it_too_or_takes_too_long() -> None:
    with ExitStack() as stack:
        lacks, late = (stack.enter_context(Fake(lambda path, body: LACKS)) for _ in range(2))
        late.ready = False
        router = stack.enter_context(routed([lacks.url, late.url], patience_s=0.3))
        client = stack.enter_context(router.client())
        eventually(lambda: router.ready() == 1)
        with pytest.raises(openai.NotFoundError, match="there is no adapter x"):
            text_of(client)
        assert late.posts() == 0
        late.ready = True
        eventually(lambda: router.ready() == 2)
        with pytest.raises(openai.NotFoundError, match="there is no adapter x"):
            text_of(client)


def test_a_model_whose_only_worker_says_that_it_loads_it_is_waited_for() -> None:
    with ExitStack() as stack:
        other = stack.enter_context(Fake(well, models=("other",)))
        late = stack.enter_context(Fake(well, models=("tiny",)))
        router = stack.enter_context(routed([other.url, late.url]))
        client = stack.enter_context(router.client())
        eventually(lambda: router.ready() == 2)
        late.ready = False
        eventually(lambda: router.workers()[late.url]["state"] == "starting")
        said: list[str] = []
        asking = threading.Thread(target=lambda: said.append(text_of(client)))
        asking.start()
        eventually(lambda: router.router.in_flight == 1)
        late.ready = True
        asking.join(60)
        assert (said, other.posts(), late.posts()) == (["all is well"], 0, 1)


def test_what_no_worker_has_is_asked_of_three() -> None:
    with ExitStack() as stack:
        fakes = [stack.enter_context(Fake(lambda path, body: LACKS)) for _ in range(5)]
        router = stack.enter_context(routed([one.url for one in fakes]))
        client = stack.enter_context(router.client())
        eventually(lambda: router.ready() == 5)
        with pytest.raises(openai.NotFoundError, match="there is no adapter x"):
            text_of(client)
        assert sum(one.posts() for one in fakes) == 3


def test_a_router_sees_what_another_sends() -> None:
    """Each knows only its own requests, and of the rest what workers say of their queues."""
    with ExitStack() as stack:
        engines = [FakeEngine(), FakeEngine()]
        engines[0].gate.clear()
        busy, free = (stack.enter_context(running(engine)) for engine in engines)
        one = stack.enter_context(routed([busy.url]))
        other = stack.enter_context(routed([busy.url, free.url]))
        eventually(lambda: one.ready() == 1 and other.ready() == 2)
        sending = [
            threading.Thread(target=lambda: httpx.post(f"{one.url}/v1/chat/completions", json=ASKED, timeout=60))
            for _ in range(6)
        ]
        for thread in sending:
            thread.start()
        eventually(lambda: other.workers()[busy.url]["running"] == 6)
        client = stack.enter_context(other.client())
        for number in range(6):
            client.chat.completions.create(model="fake", messages=[{"role": "user", "content": f"number {number}"}])
        assert (len(engines[0].submitted), len(engines[1].submitted)) == (6, 6)
        engines[0].gate.set()
        for thread in sending:
            thread.join(60)


def test_tenants_are_known_to_workers_that_trust_the_router_and_usage_is_counted_once(tmp_path: Path) -> None:
    keys = {name: make_key({"tenant": name, "class": "agent"}) for name in ("acme", "other")}
    for key in keys.values():
        append_key(tmp_path / "keys", key.key)
    secret = "known-to-router-and-worker"
    engine = FakeEngine()
    log, own = (UsageLog(tmp_path / name, keep_bytes=1 << 20) for name in ("router", "worker"))
    with ExitStack() as stack:
        worker = stack.enter_context(running(engine, accounts=Accounts(router_key=secret, log=own)))
        accounts = Accounts(keyring=Keyring(tmp_path / "keys"), log=log)
        router = stack.enter_context(routed([worker.url], accounts=accounts, headers={"authorization": f"Bearer {secret}"}))
        refused = httpx.post(f"{worker.url}/v1/chat/completions", json=ASKED)
        assert refused.status_code == 401
        forged = httpx.post(
            f"{worker.url}/v1/chat/completions",
            json=ASKED,
            headers={"x-headstart-caller": '{"id":"k3f9c2a1","tenant":"acme"}', "authorization": "Bearer guessed"},
        )
        assert forged.status_code == 401
        fleet = router.router.fleet
        eventually(lambda: len(router.on_loop(lambda: fleet.able("fake"))) == 1)
        for name, key in keys.items():
            with router.client(key=key.text) as client:
                assert client.chat.completions.create(**{**ASKED, "stream": False}).usage
                assert engine.submitted[-1].tenant == name
                assert engine.submitted[-1].retention == "agent"
        assert engine.submitted[0].salt != engine.submitted[1].salt
        assert httpx.get(f"{router.url}/router/workers").status_code == 401
        own_key = {"authorization": f"Bearer {keys['acme'].text}"}
        assert httpx.get(f"{router.url}/router/workers", headers=own_key).status_code == 403
    log.close()
    own.close()
    counted = list(entries(tmp_path / "router", Reading()))
    assert [one.tenant for one in counted] == ["acme", "other"]
    assert all(one.prompt > 0 and one.output == 4 for one in counted)
    assert list(entries(tmp_path / "worker", Reading())) == []
