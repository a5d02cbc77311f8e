"""Requests through the engine's thread: the same tokens as stock transformers, whatever runs beside them or goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from held_cache import eventually
from reference import Answer, ask, engine_of, loaded, some_tokens, stock, stock_greedy

from headstart.engine.base import GenerationRequest, Sampling, TokenEvent
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.model import TorchModel
from headstart.engine.torch.sequence import Sequence
from headstart.errors import ContextLengthExceeded, RequestError

Folders = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model_folder: Folders) -> TorchModel:
    return loaded(tiny_model_folder("llama"))


@pytest.fixture
def engine(model: TorchModel) -> Iterator[TorchEngine]:
    with engine_of(model, chunk_tokens=64) as engine:
        yield engine
        eventually(lambda: engine.load().kv_used_bytes == 0)


def test_tokens_equal_stock_generation_for_many_requests_at_once(engine: TorchEngine, tiny_model_folder: Folders) -> None:
    reference = stock(tiny_model_folder("llama"))
    prompts = [some_tokens(count, seed=count) for count in (1, 2, 63, 64, 65, 127, 128, 129, 200, 300, 17, 5)]
    answers = [ask(engine, prompt, 12) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        last = answer.result()
        assert answer.tokens == stock_greedy(reference, prompt, 12)
        assert last.finish == "length"
        assert last.token == answer.tokens[-1]


def test_with_no_tokens_asked_for_the_prompt_is_computed_and_nothing_is_told_but_the_end(engine: TorchEngine) -> None:
    answer = ask(engine, some_tokens(200), 0)
    last = answer.result()
    assert (answer.tokens, last.token, last.finish) == ([], None, "length")
    assert last.receipt is not None
    assert (last.receipt.prompt_tokens, last.receipt.completion_tokens, last.receipt.first_token_s) == (200, 0, None)


def test_who_asks_is_told_how_far_the_prompt_is(engine: TorchEngine) -> None:
    told = ask(engine, some_tokens(200), 2, progress=True)
    told.result()
    assert [(step.total_tokens, step.cached_tokens, step.processed_tokens) for step in told.steps] == [
        (200, 0, done) for done in (64, 128, 192, 200)
    ]
    assert sorted(step.seconds for step in told.steps) == [step.seconds for step in told.steps]
    silent = ask(engine, some_tokens(200, seed=9), 2)
    silent.result()
    assert silent.steps == []


def test_a_receipt_tells_where_tokens_and_time_went(engine: TorchEngine) -> None:
    receipt = ask(engine, some_tokens(100), 5).result().receipt
    assert receipt is not None
    assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens, receipt.bytes_read) == (100, 5, 0, 0)
    assert receipt.first_token_s is not None
    assert 0 <= receipt.queue_s <= receipt.first_token_s <= receipt.total_s


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(engine: TorchEngine) -> None:
    prompt = some_tokens(20)
    tokens = ask(engine, prompt, 6)
    tokens.result()
    stop = tokens.tokens[3]
    answer = ask(engine, prompt, 6, stop_ids=frozenset({stop}))
    last = answer.result()
    assert answer.tokens == tokens.tokens[: tokens.tokens.index(stop)]
    assert (last.finish, last.token) == ("stop", None)


def test_an_answer_that_would_leave_the_context_ends_with_length(engine: TorchEngine) -> None:
    answer = ask(engine, some_tokens(500), 1000)
    assert answer.result().finish == "length"
    assert len(answer.tokens) == 12


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (GenerationRequest("r", (), 4), "prompt"),
        (GenerationRequest("r", (1, 512), 4), "prompt"),
        (GenerationRequest("r", (1, -1), 4), "prompt"),
        (GenerationRequest("r", (1,), -1), "max_tokens"),
        (GenerationRequest("r", (1,), 4, Sampling(temperature=-1)), "temperature"),
        (GenerationRequest("r", (1,), 4, Sampling(temperature=float("nan"))), "temperature"),
        (GenerationRequest("r", (1,), 4, Sampling(top_p=0)), "top_p"),
        (GenerationRequest("r", (1,), 4, Sampling(top_k=-1)), "top_k"),
    ],
)
def test_what_can_never_run_is_refused_at_once(engine: TorchEngine, request_: GenerationRequest, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        engine.submit(request_, Answer())
    assert refused.value.param == param


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(engine: TorchEngine) -> None:
    with pytest.raises(ContextLengthExceeded) as refused:
        ask(engine, some_tokens(512))
    assert (refused.value.prompt_tokens, refused.value.context_tokens) == (512, 512)
    assert ask(engine, some_tokens(511)).result().finish == "length"


def test_an_id_that_is_still_running_is_refused_and_can_be_used_again_later(engine: TorchEngine) -> None:
    first = ask(engine, some_tokens(10), 400, id="same")
    with pytest.raises(RequestError, match="same"):
        ask(engine, some_tokens(10), id="same")
    engine.abort("same")
    first.result()
    assert ask(engine, some_tokens(10), id="same").result().finish == "length"


def test_a_short_request_does_not_wait_for_the_end_of_a_long_one(engine: TorchEngine) -> None:
    long = ask(engine, some_tokens(10), 400)
    short = ask(engine, some_tokens(300), 4)
    assert short.result().finish == "length"
    assert long.last is None
    engine.abort("unknown ids are ignored")
    long.result()


def test_requests_wait_in_order_when_kv_memory_is_taken(model: TorchModel) -> None:
    with engine_of(model, full_contexts=1) as engine:
        finished: list[str] = []

        def receiver(name: str) -> Callable[[TokenEvent], None]:
            return lambda event: finished.append(name) if event.finish else None

        for name in "abcd":
            engine.submit(GenerationRequest(name, tuple(some_tokens(400)), 60), receiver(name))
        assert engine.load().waiting >= 2
        eventually(lambda: len(finished) == 4)
        assert finished == list("abcd")


def test_equal_seeds_give_equal_tokens_whatever_runs_beside(engine: TorchEngine) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=7)
    alone = ask(engine, some_tokens(40), 20, sampling=sampling)
    alone.result()
    others = [ask(engine, some_tokens(30 + n, seed=n), 20, sampling=Sampling(temperature=1.0)) for n in range(3)]
    again = ask(engine, some_tokens(40), 20, sampling=sampling)
    other_seed = ask(engine, some_tokens(40), 20, sampling=Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=8))
    for answer in (*others, again, other_seed):
        answer.result()
    assert again.tokens == alone.tokens
    assert other_seed.tokens != alone.tokens


def test_aborts_in_every_state_free_everything_once(model: TorchModel) -> None:
    draw = random.Random(4)
    with engine_of(model, full_contexts=2, chunk_tokens=32) as engine:
        answers = {}
        for number in range(60):
            name = f"r{number}"
            answers[name] = ask(engine, some_tokens(draw.randrange(1, 400), seed=number), draw.randrange(1, 60), id=name)
            if draw.random() < 0.5:
                engine.abort(f"r{draw.randrange(number + 1)}")
        for name in list(answers)[::3]:
            engine.abort(name)
            engine.abort(name)
        finishes = {answer.result().finish for answer in answers.values()}
        assert finishes == {"length", "abort"}
        eventually(lambda: engine.load().kv_used_bytes == 0)
        load = engine.load()
        assert (load.running, load.waiting) == (0, 0)
        assert load.counters.get("engine_faults", 0) == load.counters.get("step_faults", 0) == 0
        assert ask(engine, some_tokens(10)).result().finish == "length"


@pytest.mark.parametrize(
    ("aborted", "given_up"),
    [(["stream"], False), (["stream", "other"], False), (["prompt"], True), (["stream", "other", "prompt"], True)],
)
def test_a_step_is_given_up_for_its_prompt_only_or_when_nobody_is_left(
    model: TorchModel, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, aborted: list[str], given_up: bool
) -> None:
    real = model.forward
    outcomes: list[bool] = []

    def forward(tokens: Any, step: Any, *, rows: Any) -> torch.Tensor:
        before_layer = step.before_layer

        def abort_in_the_middle(layer: int) -> None:
            if layer == 1:
                for name in aborted:
                    engine.abort(name)
            before_layer(layer)

        if len(step.segments) < 3 or outcomes:
            return real(tokens, step, rows=rows)
        step.before_layer = abort_in_the_middle
        outcomes.append(True)
        logits = real(tokens, step, rows=rows)
        outcomes[0] = False
        return logits

    monkeypatch.setattr(model, "forward", forward)
    answers = {name: ask(engine, some_tokens(10), 400, id=name) for name in ("stream", "other")}
    for answer in answers.values():
        assert answer.first_token.wait(30)
    answers["prompt"] = ask(engine, some_tokens(300), 4, id="prompt")
    for name in aborted:
        assert answers[name].result().finish == "abort"
    assert outcomes == [given_up]
    if "prompt" not in aborted:
        assert answers["prompt"].result().finish == "length"


def test_logits_that_are_not_finite_end_one_request_and_no_other(
    model: TorchModel, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = model.forward

    def forward(tokens: Any, step: Any, *, rows: Any) -> torch.Tensor:
        logits = real(tokens, step, rows=rows).clone()
        for index, row in enumerate(rows):
            if tokens[row] == 13:  # only the last token of the bad prompt: an answer never comes to it
                logits[index, 5] = float("nan")
            else:
                logits[index, 13] = float("-inf")
        return logits

    monkeypatch.setattr(model, "forward", forward)
    good = ask(engine, [9, 9, 9], 3)
    bad = ask(engine, [9, 9, 13], 3)
    assert bad.result().finish == "error"
    assert "not finite" in str(bad.result().error)
    assert good.result().finish == "length"


def test_settings_at_the_edge_of_numbers_end_no_stream(engine: TorchEngine) -> None:
    stream = ask(engine, some_tokens(10), 100)
    edges = [Sampling(temperature=1e-39), Sampling(temperature=1, top_p=1e-46), Sampling(temperature=1e308, top_k=2)]
    answers = [ask(engine, some_tokens(20), 10, sampling=sampling) for sampling in edges]
    assert [answer.result().finish for answer in (*answers, stream)] == ["length"] * 4


def test_an_exception_in_a_step_ends_its_requests_and_the_engine_goes_on(
    model: TorchModel, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", broken)
        last = ask(engine, some_tokens(10)).result()
    assert last.finish == "error"
    assert "RuntimeError" in str(last.error)
    assert "out of luck" in caplog.text
    assert engine.load().counters["step_faults"] == 1
    assert ask(engine, some_tokens(10)).result().finish == "length"


def test_a_fault_while_idle_does_not_end_the_engine(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bool:
        monkeypatch.undo()
        raise RuntimeError("nothing to do, and yet")

    monkeypatch.setattr(engine, "_use_idle_moment", broken)
    assert ask(engine, some_tokens(10)).result().finish == "length"
    eventually(lambda: engine.load().counters.get("engine_faults") == 1)
    engine.warm_up()  # in a later round
    assert ask(engine, some_tokens(10)).result().finish == "length"
    assert engine.failed is None
    assert "nothing to do, and yet" in caplog.text


def test_a_request_that_a_fault_ended_before_it_was_taken_in_never_runs(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = engine._take_mail

    def broken() -> None:
        if engine._roster.mail:
            monkeypatch.undo()
            raise RuntimeError("no mail today")
        real()

    monkeypatch.setattr(engine, "_take_mail", broken)
    assert ask(engine, some_tokens(10), 50).result().finish == "error"
    assert ask(engine, some_tokens(10), 60).result().finish == "length"
    assert engine.load().counters["generated_tokens"] == 60


def test_when_the_thread_dies_every_request_and_call_is_told_and_new_ones_are_refused(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def deadly() -> bool:
        eventually(lambda: len(engine._calls) == 1)
        raise SystemExit("out of here")

    answers = [ask(engine, some_tokens(300, seed=n), 200) for n in range(3)]
    monkeypatch.setattr(engine, "_round", deadly)
    with pytest.raises(RequestError, match="internal error"):
        engine.next_logits([1, 2, 3])
    for answer in answers:
        assert answer.result().finish == "error"
        assert answer.result().error == engine.failed
    assert "out of here" in caplog.text
    assert (engine.load().running, engine.load().waiting, engine.load().kv_used_bytes) == (0, 0, 0)
    for refused in (lambda: ask(engine, [1]), lambda: engine.next_logits([1])):
        with pytest.raises(RequestError, match="restart the server"):
            refused()


def test_a_request_that_cannot_give_back_its_memory_still_gets_its_last_event(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Sequence.release_kv

    def broken(sequence: Sequence) -> None:
        real(sequence)
        raise RuntimeError(f"lost by {sequence.request.id}")

    answers = [ask(engine, some_tokens(300, seed=n), 200, id=f"r{n}") for n in range(3)]
    monkeypatch.setattr(Sequence, "release_kv", broken)
    engine.close()
    assert [answer.result().finish for answer in answers] == ["abort"] * 3
    assert "lost by r0" in caplog.text
    assert engine.load().counters["engine_faults"] == 3


def test_a_receiver_that_fails_ends_its_own_request_only(engine: TorchEngine, caplog: pytest.LogCaptureFixture) -> None:
    def receiver(event: TokenEvent) -> None:
        raise ValueError("cannot take it")

    engine.submit(GenerationRequest("bad", (1, 2, 3), 300), receiver)
    assert ask(engine, some_tokens(10), 10).result().finish == "length"
    eventually(lambda: engine.load().running == 0)
    assert engine.load().counters["finished_abort"] == 1
    assert "cannot take it" in caplog.text


def test_closing_ends_every_request_and_refuses_new_ones(model: TorchModel) -> None:
    engine = engine_of(model, full_contexts=1)
    answers = [ask(engine, some_tokens(400, seed=n), 100) for n in range(3)]
    engine.close()
    engine.close()
    assert [answer.result().finish for answer in answers] == ["abort"] * 3
    assert engine.load().kv_used_bytes == 0
    with pytest.raises(RequestError, match="shutting down"):
        ask(engine, [1])


def test_the_floor_is_measured_without_leaving_anything_behind(engine: TorchEngine) -> None:
    assert len(engine.measure_floor(some_tokens(200), 128, 3)) == 3
    assert engine.load().kv_used_bytes == 0
    with pytest.raises(ValueError, match="cached_tokens"):
        engine.measure_floor(some_tokens(64), 64, 1)
