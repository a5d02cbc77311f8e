"""Workers that say what no worker says, and what the router makes of it: that one is out, all others go on."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from asking import eventually
from gateway.fakes import CHUNKED, STREAM, Fake, chunk, chunked, completion, stream
from gateway.gateway_kit import routed
from headstart.errors import ConfigError
from headstart.gateway.asking import Unwell, ask
from headstart.gateway.connections import Answer, Connections, Lost, parts_of
from headstart.gateway.decisions import Asked, Attempt
from headstart.gateway.fleet import Fleet
from headstart.gateway.following import Change, Follower, Following
from headstart.gateway.translating import BlockStored, Translator
from headstart.gateway.worker import Address, Report, Worker
from headstart.policy.routing.estimate import Estimate
from headstart.policy.routing.router import Decision

ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
ESTIMATE = Estimate(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
OURS = {"object": "headstart.worker", "instance": "i", "status": "ok"}


def well(path: str, body: bytes) -> Any:
    return stream("all ", "is ", "well") if json.loads(body).get("stream") else completion("all is well")


class Saying(Connections):
    """To a worker that says of each path what `answer` does."""

    def __init__(self, answer: Callable[[str], Answer]) -> None:
        super().__init__(connect_s=1.0)
        self._answer = answer

    async def ask(self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None) -> Answer:
        return self._answer(urlsplit(url).path)


def told(answer: Callable[[str], Answer]) -> Report:
    return asyncio.run(ask(Saying(answer), Address.of("http://worker:1"), {}, None))


def test_what_a_worker_of_ours_says_is_taken() -> None:
    assert told(lambda path: Answer(200, "application/json", json.dumps(OURS).encode())).ready


@pytest.mark.parametrize(
    "more",
    [
        {"events": {}},
        {"events": {"endpoint": "no endpoint"}},
        {"speeds": {"prefill": [1.0], "step": [1.0]}},
        {"speeds": {"prefill": [-1.0, 0.0], "step": [1.0, 0.0, 0.0]}},
        {"speeds": {"prefill": "fast", "step": "too"}},
        {"roots": {"tiny": "no hex"}},
        {"roots": {"tiny": "00"}},
        {"handoff": {"role": "both", "addresses": ["nowhere"]}},
        {"kv": {"capacity_tokens": 1 << 80}},
        {"running": 1, "waiting_tokens": 1 << 80},
    ],
    ids=str,
)
def test_what_a_worker_of_ours_would_not_say_makes_it_unwell(more: dict[str, Any]) -> None:
    with pytest.raises(Unwell):
        told(lambda path: Answer(200, "application/json", json.dumps(OURS | more).encode()))


@pytest.mark.parametrize(
    ("path", "content"),
    [("/v1/models", '{"data": ["tiny"]}'), ("/v1/models", "[" * 5000), ("/metrics", "vllm:num_requests_running 1e999\n")],
)
def test_what_no_other_server_would_say_makes_it_unwell(path: str, content: str) -> None:
    usual = {"/health": "", "/metrics": "", "/v1/models": '{"data": [{"id": "tiny"}]}', path: content}

    def answer(path: str) -> Answer:
        found = usual.get(path)
        return Answer(404 if found is None else 200, "text/plain", (found or "").encode())

    with pytest.raises(Unwell):
        told(answer)


@pytest.mark.parametrize(("number", "gone"), [(errno.ECONNREFUSED, True), (errno.EMFILE, False), (errno.ENETUNREACH, False)])
def test_only_who_is_refused_is_gone(number: int, gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*arguments: object, **more: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", fails)
    with pytest.raises(Unwell) as caught:
        asyncio.run(ask(Connections(connect_s=10.0), Address.of("http://127.0.0.1:1"), {}, None))
    assert caught.value.gone == gone


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_where_nothing_listens_it_is_gone(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def run() -> None:
        connections = Connections(connect_s=10.0)
        try:
            await ask(connections, Address.of(f"http://{host}:{port}"), {}, None)
        finally:
            await connections.close()

    with pytest.raises(Unwell) as caught:
        asyncio.run(run())
    assert caught.value.gone


def test_an_address_has_no_secrets_in_it() -> None:
    with pytest.raises(ConfigError, match="router_key"):
        Address.of("http://user:password@10.0.0.5:8000")


def test_a_worker_is_watched_on_whatever_happens_while_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with Fake(well) as one, routed([], dead_after_s=1.0) as router:
        routing = router.router.fleet.routing
        up, times = routing.up, []

        def fails_once(*arguments: Any, **more: Any) -> None:
            times.append(1)
            if len(times) == 1:
                raise KeyError("whatever")
            up(*arguments, **more)

        monkeypatch.setattr(routing, "up", fails_once)
        router.add(one.url)
        assert len(times) == 2


def test_a_router_that_was_held_still_blames_no_worker() -> None:
    """Between two of its looks more time has passed than a worker may need: nobody knows what it did meanwhile."""
    now_s = [0.0]
    fleet = Fleet(max_workers=1, blocks=100, poll_s=1.0, dead_after_s=10.0, stuck_after_s=300.0, clock=lambda: now_s[0])
    worker = Worker(Address.of("http://worker:1"), "both", 1)
    worker.flights["one"] = lambda: None
    report = Report(ours=True, ready=True, progress=1)
    for now_s[0] in (1.0, 2.0, 1000.0, 1001.0):
        fleet._look_for_progress(worker, report, report)
    assert not worker.stuck


def test_a_queue_that_grows_is_no_progress() -> None:
    """Those that a hung worker gets meanwhile are all that changes there."""
    metrics = "vllm:num_requests_running 1\nvllm:num_requests_waiting {}\n"

    def other(path: str, waiting: int) -> Answer:
        content = metrics.format(waiting) if path == "/metrics" else '{"data": [{"id": "tiny"}]}'
        return Answer(404 if path.startswith("/v1/headstart") else 200, "", content.encode())

    def progress(waiting: int) -> tuple[int | None, int | None]:
        ours = OURS | {"running": 1, "waiting": waiting, "waiting_tokens": 10 * waiting, "counters": {"steps": 5}}
        said = told(lambda path: Answer(200, "", json.dumps(ours).encode()))
        return said.progress, told(lambda path: other(path, waiting)).progress

    assert progress(1) == progress(2)
    assert None not in progress(1)


def stuck(fleet: Fleet, worker: Worker, report: Report, now_s: list[float], *, every_s: float) -> bool:
    """Whether it is, once a worker with a request has said the same for some time."""
    worker.report = report
    worker.flights["one"] = lambda: None
    for _ in range(int(400 / every_s)):
        now_s[0] += every_s
        fleet._look_for_progress(worker, report, report)
    return worker.stuck


@pytest.mark.parametrize(("poll_s", "dead_after_s"), [(1.0, 10.0), (60.0, 1.0)])
def test_only_who_has_something_to_do_is_stuck(poll_s: float, dead_after_s: float) -> None:
    """Who has nothing to do may have said all, to a client that reads slowly."""

    async def looked() -> None:
        now_s = [0.0]
        fleet = Fleet(max_workers=1, blocks=100, poll_s=poll_s, dead_after_s=dead_after_s, clock=lambda: now_s[0])
        fleet.connections = Saying(lambda path: Answer(500, "", b""))
        worker = Worker(Address.of("http://worker:1"), "both", 1)
        assert not stuck(fleet, worker, Report(ours=True, ready=True, progress=1, running=0, waiting=0), now_s, every_s=poll_s)
        assert stuck(fleet, worker, Report(ours=True, ready=True, progress=1, running=1, waiting=0), now_s, every_s=poll_s)
        assert worker.trying is not None
        await worker.trying
        assert worker.stuck

    asyncio.run(looked())


@pytest.mark.parametrize("hangs", [True, False])
def test_who_was_stuck_and_has_only_chats_is_tried_with_one(hangs: bool) -> None:
    """What it says of itself tells little: its engine may hang though nothing is left to do for it."""

    def say(path: str) -> Answer:
        if path == "/v1/completions":
            return Answer(404, "", b"")
        if hangs:
            raise TimeoutError
        return Answer(200, "", b"{}")

    async def looked() -> None:
        now_s = [0.0]
        fleet = Fleet(max_workers=1, blocks=100, poll_s=0.01, dead_after_s=10.0, clock=lambda: now_s[0])
        fleet.connections = Saying(say)
        worker = Worker(Address.of("http://worker:1"), "both", 1)
        assert stuck(fleet, worker, Report(ours=True, ready=True, progress=1, running=1, waiting=0), now_s, every_s=10.0)
        worker.report = Report(ours=True, ready=True, progress=1, running=0, waiting=0)
        assert worker.trying is not None
        await worker.trying
        assert worker.stuck == hangs

    asyncio.run(looked())


def test_who_was_stuck_does_not_come_back_by_noticing_that_its_requests_were_given_up() -> None:
    async def looked() -> None:
        now_s = [0.0]
        fleet = Fleet(max_workers=1, blocks=100, poll_s=0.01, dead_after_s=10.0, clock=lambda: now_s[0])
        fleet.connections = Saying(lambda path: Answer(404, "", b""))
        worker = Worker(Address.of("http://worker:1"), "both", 1)
        assert stuck(fleet, worker, Report(ours=True, ready=True, progress=1, running=2, waiting=0), now_s, every_s=10.0)
        assert worker.trying is not None
        await asyncio.sleep(0)
        worker.report = Report(ours=True, ready=True, progress=2, running=1, waiting=0)  # one of two was aborted
        await worker.trying
        assert worker.stuck

    asyncio.run(looked())


def test_who_was_stuck_and_cannot_be_tried_comes_back_by_what_it_says() -> None:
    """One that has only chats, say."""

    async def looked() -> None:
        now_s = [0.0]
        fleet = Fleet(max_workers=1, blocks=100, poll_s=0.01, dead_after_s=10.0, clock=lambda: now_s[0])
        fleet.connections = Saying(lambda path: Answer(404, "", b""))
        worker = Worker(Address.of("http://worker:1"), "both", 1)
        busy = Report(ours=True, ready=True, progress=1, running=1, waiting=0)
        assert stuck(fleet, worker, busy, now_s, every_s=10.0)
        assert worker.trying is not None
        await worker.trying
        assert worker.stuck
        worker.report = idle = Report(ours=True, ready=True, progress=1, running=0, waiting=0)
        fleet._look_for_progress(worker, idle, busy)
        assert worker.trying is not None
        await worker.trying
        assert not worker.stuck

    asyncio.run(looked())


@pytest.mark.parametrize("waits", [False, True])
def test_a_chunk_that_is_none_ends_the_answer_whether_or_not_it_is_waited_for(waits: bool) -> None:
    go_on, closed = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(CHUNKED + chunked(b"good"))
                go_on.wait(60)
                connection.sendall(b"zz\r\n")
                while connection.recv(1 << 16):
                    pass
                closed.set()

        async def read() -> None:
            connections = Connections(connect_s=10.0)
            response = await connections.begin("GET", f"http://127.0.0.1:{listener.getsockname()[1]}/", headers={})
            parts = parts_of(response)
            assert await anext(parts) == b"good"
            if waits:
                asyncio.get_running_loop().call_later(0.05, go_on.set)
            else:
                go_on.set()
                await asyncio.to_thread(closed.wait, 60)
            with pytest.raises(Lost):
                async with asyncio.timeout(10):
                    await anext(parts)
            response.close()
            await connections.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            asyncio.run(read())
        finally:
            go_on.set()
            thread.join(60)


def test_whoever_is_lost_twice_is_lost_once() -> None:
    """The second time comes before the request has heard of the first."""
    with Fake(lambda path, body: None) as one, Fake(well) as other, routed([one.url]) as router:
        eventually(lambda: router.ready() == 1)
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{router.url}/v1/chat/completions", json=ASKED, timeout=60))
        )
        asking.start()
        eventually(lambda: one.posts() == 1)
        router.add(other.url)
        fleet = router.router.fleet
        worker = fleet.workers[one.url.removeprefix("http://")]

        async def lost() -> None:
            fleet._lose(worker, "once")
            await asyncio.sleep(0)
            fleet._lose(worker, "and once more")

        asyncio.run_coroutine_threadsafe(lost(), router._loop).result(60)
        asking.join(60)
        assert [answer.status_code for answer in answers] == [200]


def test_events_that_are_none_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The publisher is a socket here, which says what no engine does."""
    zmq = pytest.importorskip("zmq")
    context = zmq.Context()
    live = context.socket(zmq.PUB)
    port = live.bind_to_random_port("tcp://127.0.0.1")
    changes: list[Change] = []

    async def run() -> None:
        follower = Follower(asyncio.get_running_loop())
        translator = Translator(lambda adapter: bytes(32), most=100)
        bad = BlockStored([1], None, [-1] * 64, 64)
        good = BlockStored([2], None, list(range(64)), 64)
        raising = iter([True])

        def on_change(change: Change) -> None:
            if next(raising, False):
                raise ValueError("whatever")
            changes.append(change)

        follower.follow(Following("odd", f"tcp://127.0.0.1:{port}", "", translator, on_change))

        def say() -> bool:
            for number, event in enumerate((bad, good, good)):
                payload = msgspec.msgpack.encode([0.0, [event], None])
                live.send_multipart((b"", number.to_bytes(8, "big"), payload))
            return any(change.changes for change in changes)

        await asyncio.to_thread(eventually, say)
        await asyncio.to_thread(follower.close)

    try:
        asyncio.run(run())
    finally:
        live.close(0)
        context.term()


def test_tries_that_lead_to_nothing_are_not_all_kept() -> None:
    asked = Asked("request", "acme", 0.0, "tiny", 100, "text")
    tries = [Attempt(Decision(str(number), ESTIMATE, None, dict), {}) for number in range(100)]
    for attempt in tries:
        asked.tried(attempt)
    assert asked.attempts == [tries[0], *tries[-7:]]
    assert asked.told()["tries"] == 100


def test_an_answer_that_only_ever_opens_is_not_all_held() -> None:
    held = threading.Event()

    def opens(path: str, body: bytes) -> Iterator[bytes]:
        yield STREAM
        for _ in range(2000):
            yield chunk(None, filler="x" * 1000)
        assert held.wait(60)
        yield from stream("said")[2:]

    with Fake(opens) as one, routed([one.url], keepalive_s=600.0) as router:
        eventually(lambda: router.ready() == 1)
        with httpx.stream("POST", f"{router.url}/v1/chat/completions", json={**ASKED, "stream": True}, timeout=60) as answer:
            next(answer.iter_bytes())
            held.set()  # it has begun long before the worker says something


def test_what_has_ended_stays_well_ended_when_its_worker_is_lost() -> None:
    held = threading.Event()

    def says(path: str, body: bytes) -> Iterator[bytes]:
        yield from stream("all ", "said")
        held.wait(60)

    with Fake(says) as one, routed([one.url]) as router:
        eventually(lambda: router.ready() == 1)
        lines: list[str] = []

        def read() -> None:
            url = f"{router.url}/v1/chat/completions"
            with httpx.stream("POST", url, json={**ASKED, "stream": True}, timeout=60) as answer:
                for line in answer.iter_lines():
                    lines.append(line)

        reading = threading.Thread(target=read)
        reading.start()
        eventually(lambda: "data: [DONE]" in lines)
        router.remove(one.url)
        reading.join(60)
        held.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "garbage",
    [
        b'data: {"choices": [{"index": "x", "delta": {"content": "y"}, "finish_reason": "stop"}]}\n\n',
        b'data: {"usage": ' + b"[" * 100_000 + b"\n\n",
    ],
    ids=["an index that is none", "brackets without an end"],
)
@pytest.mark.parametrize("begun", [False, True])
def test_garbage_ends_in_an_error_that_clients_read(garbage: bytes, begun: bool) -> None:
    before = [chunk("well ")] if begun else []
    with Fake(lambda path, body: [STREAM, *before, garbage]) as one, routed([one.url]) as router:
        eventually(lambda: router.ready() == 1)
        answer = httpx.post(f"{router.url}/v1/chat/completions", json={**ASKED, "stream": True}, timeout=60)
        assert ("worker_lost" in answer.text) == begun, answer.text
        assert answer.status_code == (200 if begun else 502)
