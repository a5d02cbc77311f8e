"""A router over workers with roles: a prompt goes where it is computed, the answer comes from where it is written, once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import Routed, real_workers, routed

from asking import eventually
from headstart.gateway import apart
from headstart.policy.routing.disaggregation import Parting
from headstart.policy.routing.estimate import View

PROMPT = "One worker computes what another goes on with, and nobody pays for it twice. " * 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("apart")


@pytest.fixture(scope="module")
def workers(tiny_model_folder: Callable[..., Path], place: Path) -> Iterator[list[str]]:
    roles: list[dict[str, Any]] = [
        {"server.role": "prefill", "handoff.listen": f"ipc://{place}/p.sock, tcp://127.0.0.1:0"},
        {"server.role": "decode"},
    ]
    with real_workers(tiny_model_folder("llama"), place, 2, settings=roles) as urls:
        yield urls


@pytest.fixture(scope="module")
def router(workers: list[str]) -> Iterator[Routed]:
    with routed(workers) as router:
        eventually(
            lambda: [one["role"] for one in router.workers().values()] == ["prefill", "decode"]
        )  # they say so themselves
        eventually(lambda: router.ready() == 2)
        yield router


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt is worth the way: when it is, is the policy's, and tested there."""

    def parting(decode: View, prefills: Sequence[View], **_: Any) -> Parting:
        return Parting(prefills[0].worker, first_token_s=0.1, next_token_s=0.01, cost_s=0.1, together_s=1.0)

    monkeypatch.setattr(apart, "part", parting)


def _ask(router: Routed, prompt: str = PROMPT, **more: Any) -> Any:
    return router.client().completions.create(
        model="any", prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}, **more
    )


def _computed_by(router: Routed) -> tuple[str, str]:
    attempt = router.get("/router/decisions?limit=1")["decisions"][0]["attempts"][-1]
    return attempt["worker"], attempt["prompt_computed_by"]


def _metric(router: Routed, url: str, name: str) -> float:
    lines = router.http.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"headstart_engine_{name}_total{{"))


@pytest.mark.usefixtures("always")
def test_a_prompt_is_computed_by_one_and_answered_by_another(router: Routed, workers: list[str]) -> None:
    prefill, decode = (url.removeprefix("http://") for url in workers)
    before = _metric(router, workers[1], "handoff_taken"), _metric(router, workers[0], "handoff_given")
    whole = _ask(router)
    assert _computed_by(router) == (decode, prefill)
    assert whole.usage.completion_tokens == 8
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    streamed = "".join(chunk.choices[0].text for chunk in _ask(router, "Again. " + PROMPT, stream=True))
    assert (_metric(router, workers[1], "handoff_taken"), _metric(router, workers[0], "handoff_given")) == (
        before[0] + 2,
        before[1] + 2,
    )
    # The same of the decoding worker alone, which computes it where nothing says otherwise.
    for text, prompt in ((whole.choices[0].text, PROMPT), (streamed, "Again. " + PROMPT)):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert router.http.post(f"{workers[1]}/v1/completions", json=body).json()["choices"][0]["text"] == text
    eventually(lambda: router.on_loop(lambda: router.router.fleet.routing.requests(prefill)) == 0)


@pytest.mark.usefixtures("always")
def test_two_requests_of_one_name_are_two(router: Routed, workers: list[str]) -> None:
    """The name is the client's, and some send a request again under it while the first still runs."""
    prefill = workers[0].removeprefix("http://")
    again = {"x-request-id": "again"}
    asking = [threading.Thread(target=_ask, args=(router, f"{n}. {PROMPT}"), kwargs={"extra_headers": again}) for n in range(3)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    routing = router.router.fleet.routing
    eventually(lambda: router.on_loop(lambda: routing.requests(prefill)) == 0)
    assert router.on_loop(lambda: (routing._workers[prefill].held, routing._workers[prefill].waiting_tokens)) == (0, 0)


@pytest.mark.usefixtures("always")
def test_a_worker_that_computes_prompts_and_is_lost_costs_no_answer(router: Routed, workers: list[str], place: Path) -> None:
    first = _ask(router, "Lost. " + PROMPT).choices[0].text
    lost = _metric(router, workers[1], "handoff_lost")
    (place / "p.sock").unlink()  # nobody reaches it there any more,
    worker = router.on_loop(lambda: router.router.fleet.workers[workers[0].removeprefix("http://")])
    report = worker.report
    assert report is not None
    assert report.handoff is not None
    assert [address[:3] for address in report.handoff.addresses] == ["ipc", "tcp"]
    assert _ask(router, "And again. " + PROMPT).usage.completion_tokens == 8
    assert _metric(router, workers[1], "handoff_lost") == lost  # but there
    assert _ask(router, "Lost. " + PROMPT).choices[0].text == first


def test_a_prompt_is_computed_elsewhere_by_the_router_s_own_choice_while_answers_are_written(
    router: Routed, workers: list[str]
) -> None:
    prefill, decode = (url.removeprefix("http://") for url in workers)
    numbers = itertools.count()
    before = _metric(router, workers[1], "handoff_taken")
    with ExitStack() as stack:
        for number in range(3):
            more = {"ignore_eos": True}
            answer = router.client().completions.create(
                model="any", prompt=f"{number}", max_tokens=800, stream=True, extra_body=more
            )
            stack.callback(answer.close)
            next(iter(answer))

        def parted() -> bool:
            _ask(router, f"{next(numbers)}. {PROMPT}")
            return _computed_by(router) == (decode, prefill)

        eventually(parted)
    assert _metric(router, workers[1], "handoff_taken") > before


def test_a_short_prompt_stays_whole(router: Routed, workers: list[str]) -> None:
    decode = workers[1].removeprefix("http://")
    before = _metric(router, workers[1], "handoff_taken")
    _ask(router, "Short.")
    assert _computed_by(router) == (decode, decode)
    assert _metric(router, workers[1], "handoff_taken") == before


def test_a_role_is_changed_through_the_router_for_all_routers(router: Routed, workers: list[str]) -> None:
    prefill, decode = (url.removeprefix("http://") for url in workers)
    with routed(workers) as other:
        eventually(lambda: other.ready() == 2)
        assert router.http.patch(f"/router/workers/{prefill}", json={"role": "both"}).json()["role"] == "both"
        assert router.get(f"{workers[0]}/v1/headstart/role")["role"] == "both"
        eventually(lambda: other.workers()[workers[0]]["role"] == "both")
    with routed([f"{workers[0]},role=decode"]) as third:  # said where it is added, and told to the worker
        eventually(lambda: third.ready() == 1)
        eventually(lambda: router.workers()[workers[0]]["role"] == "decode")
    assert router.http.patch(f"/router/workers/{prefill}", json={"role": "prefill"}).json()["role"] == "prefill"
    refused = router.http.patch(f"/router/workers/{decode}", json={"role": "prefill"})  # it listens nowhere
    assert refused.status_code == 400
    assert "--handoff-listen" in refused.json()["error"]["message"]
    assert router.workers()[workers[1]]["role"] == "decode"
