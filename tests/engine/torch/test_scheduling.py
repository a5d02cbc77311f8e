"""Many requests and little memory: who grows, who gives way, whose turn it is; answers stay what they would be alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from held_cache import HeldCache
from reference import ask, finish, loaded, running, some_tokens, stepped, stock, stock_greedy

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import Sampling
from headstart.engine.torch.branches import BranchKV
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.model import TorchModel
from headstart.errors import RequestError
from headstart.tier.memory import MemoryTier

Folders = Callable[..., Path]
_SAMPLED = Sampling(temperature=0.9, seed=11)


@pytest.fixture(scope="module")
def model(tiny_model_folder: Folders) -> TorchModel:
    return loaded(tiny_model_folder("llama"))


@pytest.fixture(scope="module")
def alone(tiny_model_folder: Folders) -> Callable[[list[int], int], list[int]]:
    reference = stock(tiny_model_folder("llama"))
    return lambda prompt, count: stock_greedy(reference, prompt, count)


def memory_of(model: TorchModel, tokens: int, *, context: int = 512, on_device: bool = False) -> KVMemory:
    device = torch.device("cpu") if on_device else None
    return KVMemory(model.shape, model.shape.region_bytes(tokens), context_tokens=context, device=device)


@contextmanager
def cached(model: TorchModel, **settings: Any) -> Iterator[TorchEngine]:
    """An engine with a real cache in memory, clean in the end."""
    representation = model.shape.representation(query_heads=model.heads)
    cache = PrefixCache(
        [MemoryTier(64 << 20)], identity=Identity(weights=b"w" * 32, architecture=b"c"), representation=representation
    )
    with stepped(model, cache=cache, **settings) as engine:
        yield engine
        while (counters := cache.statistics().counters).get("saves_done", 0) < counters.get("save_calls", 0):
            engine._roster.wake.wait(0.01)
        assert engine.load().kv_used_bytes == 0
        assert cache.check() == []
        assert engine.load().counters.get("engine_faults", 0) == engine.load().counters.get("step_faults", 0) == 0


def counted(engine: TorchEngine, name: str) -> int:
    return engine.load().counters.get(name, 0)


def step(engine: TorchEngine, times: int = 1) -> None:
    for _ in range(times):
        engine._round()


@pytest.mark.parametrize("on_device", [False, True])
def test_an_answer_gets_room_as_it_grows_and_stays_the_same(
    model: TorchModel, alone: Callable[[list[int], int], list[int]], on_device: bool
) -> None:
    memory = memory_of(model, 2048, on_device=on_device)
    with cached(model, memory=memory, room_tokens=64) as engine:
        answer = ask(engine, some_tokens(20), 400)
        step(engine)
        assert memory.used_bytes == model.shape.region_bytes(20 + 64)  # not all that it may become
        finish(engine, answer)
    assert answer.tokens == alone(some_tokens(20), 400)
    assert counted(engine, "kv_grown") > 2
    assert counted(engine, "kv_grown_tokens") < 5 * 400  # each was copied a few times
    assert counted(engine, "preempted_memory") == 0


def test_a_beginning_that_is_shared_is_not_copied_when_its_owner_or_its_readers_grow(
    model: TorchModel, alone: Callable[[list[int], int], list[int]]
) -> None:
    memory = memory_of(model, 2048)
    beginning = some_tokens(256)
    with cached(model, memory=memory, room_tokens=64) as engine:
        owner = ask(engine, beginning, 200, id="owner")
        step(engine)
        reader = ask(engine, [*beginning, 7], 200, id="reader")
        step(engine, 2)
        finish(engine, owner, reader)
    assert counted(engine, "prefixes_shared") == 1
    assert counted(engine, "kv_grown") == 3
    assert counted(engine, "kv_grown_tokens") < 2 * 5 * 200
    assert owner.tokens == alone(beginning, 200)
    assert reader.tokens == alone([*beginning, 7], 200)


def test_who_shared_its_beginning_reads_it_where_it_was_after_it_grew(model: TorchModel) -> None:
    memory = memory_of(model, 2048)
    beginning = some_tokens(256)
    with cached(model, memory=memory, room_tokens=64) as engine:
        ask(engine, beginning, 200, id="owner")
        step(engine)
        ask(engine, [*beginning, 7], 200, id="reader")
        step(engine, 100)
        owner, reader = engine._roster.running
        assert isinstance(owner.kv, BranchKV)
        assert isinstance(reader.kv, BranchKV)
        assert owner.kv.prefix is reader.kv.prefix  # so that both attend it in one go
        engine.abort("owner")
        engine.abort("reader")
        step(engine)


def test_the_younger_gives_its_memory_and_goes_on_from_the_cache(
    model: TorchModel, alone: Callable[[list[int], int], list[int]]
) -> None:
    prompts = [some_tokens(128, seed=seed) for seed in (1, 2)]
    with cached(model, memory=memory_of(model, 768), room_tokens=64) as engine:
        answers = [ask(engine, prompt, 250) for prompt in prompts]
        finish(engine, *answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == alone(prompt, 250)
    older, younger = (answer.result().receipt for answer in answers)
    assert older is not None
    assert younger is not None
    assert older.preemptions == 0
    assert younger.preemptions == counted(engine, "preempted_memory") > 0
    assert younger.cached_tokens == 0  # what was its own is no hit
    assert counted(engine, "resumed_tokens") >= younger.preemptions * 128
    assert counted(engine, "recomputed_tokens") <= younger.preemptions * 64  # what filled no block


def test_without_a_cache_who_gave_way_computes_again_what_it_had(
    model: TorchModel, alone: Callable[[list[int], int], list[int]]
) -> None:
    prompts = [some_tokens(128, seed=seed) for seed in (1, 2)]
    with stepped(model, memory=memory_of(model, 768), room_tokens=64) as engine:
        answers = [ask(engine, prompt, 250) for prompt in prompts]
        finish(engine, *answers)
        assert engine.load().kv_used_bytes == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == alone(prompt, 250)
    assert counted(engine, "recomputed_tokens") >= 128
    assert counted(engine, "resumed_tokens") == 0


def test_one_that_is_alone_and_finds_no_room_beside_itself_asks_for_all_of_it(
    model: TorchModel, alone: Callable[[list[int], int], list[int]]
) -> None:
    with cached(model, memory=memory_of(model, 512), room_tokens=64) as engine:
        answer = ask(engine, some_tokens(300), 200)
        finish(engine, answer)
    assert answer.tokens == alone(some_tokens(300), 200)
    assert counted(engine, "preempted_memory") == 1
    assert counted(engine, "recomputed_tokens") < 64


def test_a_higher_priority_takes_a_place_at_once_and_gives_it_back(
    model: TorchModel, alone: Callable[[list[int], int], list[int]]
) -> None:
    with cached(model, max_running=1) as engine:
        low = ask(engine, some_tokens(200), 60, id="low", sampling=_SAMPLED)
        step(engine, 20)
        high = ask(engine, some_tokens(100, seed=2), 5, id="high", priority=1)
        equal = ask(engine, some_tokens(90, seed=3), 5, id="equal")
        step(engine, 2)
        assert running(engine) == ["high"]
        finish(engine, high)
        assert equal.last is None
        step(engine, 2)
        assert running(engine) == ["low"]  # before those who came after it
        finish(engine, low, equal)
        undisturbed = ask(engine, some_tokens(200), 60, sampling=_SAMPLED)
        finish(engine, undisturbed)
    assert high.tokens == alone(some_tokens(100, seed=2), 5)
    assert low.tokens == undisturbed.tokens
    assert low.result().receipt.preemptions == 1  # type: ignore[union-attr]
    assert counted(engine, "resumed_tokens") == 192
    assert counted(engine, "preempted_place") == 1


def waited(engine: TorchEngine, seconds: float = 100.0) -> None:
    """So much time passes for all that run or wait."""
    engine._preemption._last_s -= seconds
    for one in engine._roster.all():
        one.waiting_s -= seconds
        one.running_s -= seconds


def test_who_waited_long_takes_the_place_of_an_equal_once_and_never_that_of_the_first(model: TorchModel) -> None:
    with cached(model, max_running=2, patience_s=60.0) as engine:
        answers = {name: ask(engine, some_tokens(20, seed=int(name)), 300, id=name) for name in "123"}
        step(engine, 3)
        assert running(engine) == ["1", "2"]
        waited(engine)
        step(engine)
        assert running(engine) == ["1", "3"]  # not the first in rank, whoever waits
        waited(engine)
        step(engine)
        assert running(engine) == ["1", "2"]  # the older one; 3 is younger
        waited(engine)
        step(engine)
        assert running(engine) == ["1", "2"]  # it gave way to a younger one before
        finish(engine, *answers.values())
    receipts = [answer.result().receipt for answer in answers.values()]
    assert [receipt.preemptions for receipt in receipts if receipt] == [0, 1, 1]


def test_one_who_is_given_way_to_while_memory_is_still_written_comes_before_who_gave_it(model: TorchModel) -> None:
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    with stepped(model, cache=cache, memory=memory_of(model, 640), patience_s=60.0) as engine:
        for seed, name in enumerate(("first", "second")):
            ask(engine, some_tokens(200, seed=seed), 60, id=name)
        step(engine, 3)
        cache.hold_saves = True
        ask(engine, some_tokens(200, seed=3), 60, id="third")
        step(engine)
        assert running(engine) == ["first", "second"]
        second = engine._roster.running[1]
        second.saved = 0  # so that all of it is saved once more
        waited(engine)
        step(engine, 3)
        assert running(engine) == ["first"]
        for ticket in cache.tickets:
            ticket.end()
        cache.hold_saves = False
        step(engine)
        assert running(engine) == ["first", "third"]
        for name in ("first", "second", "third"):
            engine.abort(name)
        step(engine)


def test_tenants_take_turns_whoever_came_first(model: TorchModel) -> None:
    with cached(model, max_running=1) as engine:
        ended: list[str] = []
        answers = []
        for number in range(6):
            answers.append(ask(engine, some_tokens(30, seed=number), 4, id=f"a{number}", tenant="a"))
        for number in range(2):
            answers.append(ask(engine, some_tokens(30, seed=10 + number), 4, id=f"b{number}", tenant="b"))
        before: list[str] = []
        while any(answer.last is None for answer in answers):
            step(engine)
            if running(engine) != before:
                before = running(engine)
                ended += before
    assert ended[:4] == ["a0", "b0", "a1", "b1"]


def test_streams_advance_in_every_step_while_a_long_prompt_comes_in(model: TorchModel) -> None:
    with cached(model, context=4096, full_contexts=2, chunk_tokens=256) as engine:
        streams = [ask(engine, some_tokens(10, seed=seed), 300) for seed in (1, 2)]
        step(engine, 3)
        long = ask(engine, some_tokens(3000), 4)
        gaps = []
        while not long.tokens:
            had = [len(stream.tokens) for stream in streams]
            step(engine)
            gaps += [len(stream.tokens) - before for stream, before in zip(streams, had, strict=True)]
            beside = engine._stepper._pace.beside_tokens(least=32, most=256)
            assert 32 <= beside <= 256
        assert set(gaps) == {1}
        assert len(gaps) // 2 >= 3000 // 256
        finish(engine, *streams, long)
    for answer in (*streams, long):
        assert answer.result().receipt.longest_gap_s > 0  # type: ignore[union-attr]


def test_a_short_prompt_waits_for_one_turn_of_a_long_one_and_not_for_its_end(model: TorchModel) -> None:
    with cached(model, context=4096, full_contexts=2, chunk_tokens=128) as engine:
        long = ask(engine, some_tokens(3000), 4)
        step(engine, 2)
        short = ask(engine, some_tokens(40, seed=2), 4)
        steps = 0
        while not short.tokens:
            step(engine)
            steps += 1
        assert steps <= 2
        assert not long.tokens
        finish(engine, long, short)


def test_short_prompts_are_computed_in_one_step(model: TorchModel) -> None:
    with cached(model, chunk_tokens=256) as engine:
        answers = [ask(engine, some_tokens(20, seed=seed), 4) for seed in range(3)]
        step(engine)
        assert [len(answer.tokens) for answer in answers] == [1, 1, 1]
        finish(engine, *answers)


def test_a_long_prompt_is_saved_on_its_way_with_its_terms(model: TorchModel) -> None:
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    with stepped(model, cache=cache, chunk_tokens=64, save_every=128) as engine:
        terms = {"retention": "agent", "tenant": "t", "session": "s", "keep_s": 60.0, "memory_only": False}
        answer = ask(engine, some_tokens(330), 70, **terms)
        step(engine, 5)
        assert [len(tokens) for tokens in cache.saves] == [128, 256]
        finish(engine, answer)
    assert [len(tokens) for tokens in cache.saves] == [128, 256, 330, 399]
    assert cache.terms == [terms] * 4
    assert cache.own_tokens == [0, 128, 256, 320]


def test_a_save_that_is_under_way_is_not_joined_by_another_before_the_prompt_ends(model: TorchModel) -> None:
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    cache.hold_saves = True
    with stepped(model, cache=cache, chunk_tokens=64, save_every=128) as engine:
        answer = ask(engine, some_tokens(330), 4)
        finish(engine, answer)
        for ticket in cache.tickets:
            ticket.end()
    assert [len(tokens) for tokens in cache.saves] == [128, 330]


@pytest.mark.parametrize("state", ["waiting", "loading", "prefilling", "decoding", "preempted"])
def test_a_deadline_ends_a_request_in_every_state(model: TorchModel, state: str) -> None:
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    memory = memory_of(model, 1024)
    with stepped(model, cache=cache, memory=memory, chunk_tokens=64, max_running=1) as engine:
        before = ask(engine, some_tokens(200), 2)
        finish(engine, before)
        if state == "waiting":
            ask(engine, some_tokens(30, seed=5), 100)
        prompt = some_tokens(200) if state == "loading" else some_tokens(180, seed=2)
        answer = ask(engine, prompt, 100, deadline_s=60)
        if state == "loading":
            engine._take_mail()
            engine._admission.admit()
            assert cache.loads
        elif state == "waiting":
            step(engine, 2)
        else:
            step(engine, 1 if state == "prefilling" else 8)
        if state == "preempted":
            ask(engine, some_tokens(30, seed=6), 100, priority=1)
            step(engine, 2)
        assert answer.last is None
        (sequence,) = [one for one in engine._roster.all() if one.request.deadline_s]
        sequence.submitted_s -= 61
        step(engine)
        last = answer.result()
        assert last.finish == "abort"
        assert last.receipt is not None
        assert last.receipt.notes[-1] == "its deadline passed"
        assert counted(engine, "deadlines_passed") == 1
        assert sequence.kv is None
        for load in cache.loads:
            assert load.cancelled
            load.end(0)
    assert memory.used_bytes == 0


@pytest.mark.parametrize("wrong", [{"deadline_s": 0.0}, {"deadline_s": float("nan")}, {"retention": ""}])
def test_what_no_request_can_ask_for_is_refused(model: TorchModel, wrong: dict[str, Any]) -> None:
    with stepped(model) as engine, pytest.raises(RequestError) as refused:
        ask(engine, [1, 2], **wrong)
    assert refused.value.param == next(iter(wrong))


def test_an_abort_while_a_save_holds_the_memory_that_another_waits_for_ends_both_well(model: TorchModel) -> None:
    """Preempted for memory, its save is under way, and then nobody wants it any more; nor the one that wants to grow."""
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    memory = memory_of(model, 640)
    with stepped(model, cache=cache, memory=memory, room_tokens=64) as engine:
        cache.hold_saves = True
        older = ask(engine, some_tokens(128, seed=1), 250, id="older")
        younger = ask(engine, some_tokens(128, seed=2), 250, id="younger")
        while not counted(engine, "preempted_memory"):
            step(engine)
        grown = counted(engine, "kv_grown")
        step(engine, 5)
        assert running(engine) == ["older"]
        assert engine._roster.running[0].stalled  # its room comes with the end of the save
        assert counted(engine, "kv_grown") == grown
        for name in ("younger", "older"):
            engine.abort(name)
        step(engine)
        assert younger.result().finish == older.result().finish == "abort"
        assert memory.used_bytes > 0
        for ticket in cache.tickets:
            ticket.end()
    assert memory.used_bytes == 0


def test_what_comes_free_is_for_who_waits_to_grow_before_it_is_for_newcomers(model: TorchModel) -> None:
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    with stepped(model, cache=cache, memory=memory_of(model, 832), room_tokens=64) as engine:
        cache.hold_saves = True
        older = ask(engine, some_tokens(192, seed=1), 250, id="older")
        younger = ask(engine, some_tokens(192, seed=2), 250, id="younger")
        while not engine._roster.running or not engine._roster.running[0].stalled:
            step(engine)
        assert running(engine) == ["older"]
        ask(engine, some_tokens(20, seed=3), 250, id="newcomer", tenant="b")  # for which there would be memory now
        step(engine, 3)
        assert running(engine) == ["older"]
        ask(engine, some_tokens(20, seed=4), 250, id="higher", priority=1)
        step(engine)
        assert running(engine) == ["older", "higher"]
        for ticket in cache.tickets:
            ticket.end()
        cache.hold_saves = False
        step(engine)
        assert not engine._roster.running[0].stalled
        for name in ("older", "younger", "newcomer", "higher"):
            engine.abort(name)
        step(engine)
        assert older.result().finish == younger.result().finish == "abort"


def test_saves_that_have_ended_are_forgotten(model: TorchModel) -> None:
    cache = HeldCache(model.shape.representation(query_heads=model.heads))
    cache.hold_saves = True
    with stepped(model, cache=cache) as engine:
        for seed in range(5):
            finish(engine, ask(engine, some_tokens(80, seed=seed), 2))
            for ticket in cache.tickets:
                ticket.end()
        assert len(engine._endings._rooms._leaving) <= 1  # the last one, until the next comes
