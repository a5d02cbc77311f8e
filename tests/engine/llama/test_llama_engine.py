"""Requests through the llama engine: hits at every edge, the same tokens as without a cache, whatever runs beside or fails."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from llama_kit import WORDS, Made, opened, receipt_of, saved

from asking import Answer, ask, eventually, some_tokens
from gguf_fixtures import Kind
from headstart.cache import saver
from headstart.cache.history import SaveHistory
from headstart.engine.base import Sampling
from headstart.engine.exactness import same_tokens
from headstart.engine.llama import opening, reading
from headstart.engine.llama.binding import Library
from headstart.engine.llama.context import Context, WrongState
from headstart.engine.llama.engine import LlamaEngine
from headstart.engine.llama.sampler import Sampler
from headstart.errors import ContextLengthExceeded, RequestError
from headstart.policy import admission
from headstart.tier import memory
from headstart.tier.disk import joining


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as exact as libllama has it, with KV in 32 bits: answers then hardly ever part."""
    monkeypatch.setattr(opening, "_FUSED", False)


@pytest.fixture
def engine(exact: None, gguf: Made, tmp_path: Path) -> Iterator[LlamaEngine]:
    with opened(gguf("llama"), tmp_path, kv_type="f32") as engine:
        yield engine
        eventually(lambda: engine.load().kv_used_bytes == 0)


def prompt_of(count: int, seed: int = 1) -> list[int]:
    return some_tokens(count, seed, WORDS)


def same(engine: LlamaEngine, prompt: list[int], a: Answer, b: Answer) -> bool:
    """Greedy answers are equal, or part where the model itself is undecided. Fused attention of libllama's computes in 16 bits,
    in tiles that depend on how a prompt was cut, so what is undecided is wider there."""
    scale = float(np.abs(engine.next_logits(prompt)).max())
    tolerance = (1e-4 if "f32 KV" in engine.info.dtype else 5e-3) * scale
    return same_tokens(engine.next_logits, prompt, a.tokens, b.tokens, tolerance=tolerance)


@pytest.mark.parametrize(("kind", "kv_type"), [("llama", "q8_0"), ("gemma3", "f16")])
def test_a_hit_after_a_restart_ends_at_every_block_edge(kind: Kind, kv_type: str, gguf: Made, tmp_path: Path) -> None:
    prompt = prompt_of(1100)
    with opened(gguf(kind), tmp_path, kv_type=kv_type) as engine:
        ask(engine, prompt).result()
        saved(engine)
    with opened(gguf(kind), tmp_path, kv_type=kv_type, cache={"memory": "0"}) as engine:
        for edge in (64, 128, 640, 1024):
            parted = [*prompt[:edge], 7, *prompt_of(50, seed=edge)]
            cold, hit = ask(engine, parted, use_cache=False), ask(engine, parted)
            receipt = receipt_of(hit)
            assert (receipt.cached_disk_tokens, receipt.cached_memory_tokens) == (edge, 0)
            cold.result()
            assert same(engine, parted, cold, hit)
            saved(engine)
        assert engine.cache is not None
        assert engine.cache.check() == []


@pytest.mark.parametrize("kind", ["lfm2", "granitehybrid", "mamba"])
def test_a_recurrent_model_goes_on_from_saved_points(
    kind: Kind, gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_RANGE_BYTES", 80 << 10)  # so that it is read in several
    prompt = prompt_of(500)
    with opened(gguf(kind), tmp_path, cache={"save_every": 128}) as engine:
        ask(engine, prompt).result()
        saved(engine)
    with opened(gguf(kind), tmp_path, cache={"memory": "0", "save_every": 128}) as engine:
        for end, edge in ((500, 448), (300, 256), (200, 128)):
            parted = [*prompt[:end], *prompt_of(20, seed=end)]
            cold = ask(engine, parted, use_cache=False)
            hit = ask(engine, parted)
            assert receipt_of(hit).cached_disk_tokens == edge
            cold.result()
            assert same(engine, parted, cold, hit)
            saved(engine)


def test_other_kv_types_weights_builds_and_kernels_find_nothing(
    gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(300)
    with opened(gguf("llama"), tmp_path, kv_type="f16") as engine:
        ask(engine, prompt).result()
        saved(engine)
    with opened(gguf("llama"), tmp_path, kv_type="q8_0") as engine:
        assert receipt_of(ask(engine, prompt)).cached_tokens == 0
    with opened(gguf("lfm2"), tmp_path) as engine:
        assert receipt_of(ask(engine, prompt)).cached_tokens == 0
    with monkeypatch.context() as changed:
        changed.setattr(Library, "build", property(lambda self: "another build, or another processor"))
        with opened(gguf("llama"), tmp_path, kv_type="f16") as engine:
            assert receipt_of(ask(engine, prompt)).cached_tokens == 0
    with monkeypatch.context() as changed:
        changed.setattr(opening, "_FUSED", False)
        with opened(gguf("llama"), tmp_path, kv_type="f16") as engine:
            assert receipt_of(ask(engine, prompt)).cached_tokens == 0
    with opened(gguf("llama"), tmp_path, kv_type="f16") as engine:
        assert receipt_of(ask(engine, prompt)).cached_tokens == 256


def test_many_at_once_get_the_tokens_that_each_gets_alone(engine: LlamaEngine) -> None:
    prompts = [prompt_of(count, seed=count) for count in (1, 2, 63, 64, 65, 128, 300, 500)]
    alone = []
    for prompt in prompts:
        alone.append(ask(engine, prompt, 10, use_cache=False))
        alone[-1].result()
    together = [ask(engine, prompt, 10, use_cache=False) for prompt in prompts]
    for prompt, one, other in zip(prompts, alone, together, strict=True):
        assert receipt_of(other).completion_tokens == 10
        assert same(engine, prompt, one, other)


def test_a_beginning_that_has_left_a_window_is_not_shared_and_no_answer_is_wrong(
    exact: None, gguf: Made, tmp_path: Path
) -> None:
    with opened(gguf("gemma3"), tmp_path, kv_type="f32", context=1024, kv_memory="3MiB", cache={"memory": "0"}) as engine:
        begin = prompt_of(300)
        answers = [ask(engine, [*begin[: 64 * count], count], 40) for count in (1, 4, 3, 4, 2)]
        for count, answer in zip((1, 4, 3, 4, 2), answers, strict=True):
            cold = ask(engine, [*begin[: 64 * count], count], 40, use_cache=False)
            cold.result()
            answer.result()
            assert same(engine, [*begin[: 64 * count], count], cold, answer)


def test_requests_that_begin_alike_compute_that_once(engine: LlamaEngine) -> None:
    begin = prompt_of(640)
    first = ask(engine, [*begin, 1], 40)
    first.first_token.wait(30)
    others = [ask(engine, [*begin, number], 8) for number in (2, 3)]
    for number, other in zip((2, 3), others, strict=True):
        assert receipt_of(other).cached_memory_tokens == 640
        cold = ask(engine, [*begin, number], 8, use_cache=False)
        cold.result()
        assert same(engine, [*begin, number], cold, other)
    first.result()


def test_who_finds_no_cells_waits_or_takes_those_of_a_lower_rank(exact: None, gguf: Made, tmp_path: Path) -> None:
    with opened(gguf("llama"), tmp_path, kv_memory="1400000", context=1024, kv_type="f32") as engine:
        capacity = engine.load().kv_capacity_bytes // engine.info.kv_bytes_per_token
        assert capacity < 3 * 600
        prompts = [prompt_of(500, seed=seed) for seed in range(5)]
        cold = [ask(engine, prompt, 60, use_cache=False) for prompt in prompts]
        answers = [ask(engine, prompt, 60, priority=number % 2) for number, prompt in enumerate(prompts)]
        assert {receipt_of(one).completion_tokens for one in [*cold, *answers]} == {60}
        eventually(lambda: engine.load().kv_used_bytes == 0)
        for prompt, one, other in zip(prompts, cold, answers, strict=True):
            assert same(engine, prompt, one, other)


def test_an_aborted_request_ends_and_gives_back_what_it_held(engine: LlamaEngine) -> None:
    answers = [ask(engine, prompt_of(400, seed=seed), 1000, id=f"a{seed}") for seed in range(6)]
    answers[0].first_token.wait(30)
    for seed in range(6):
        engine.abort(f"a{seed}")
    assert {answer.result().finish for answer in answers} == {"abort"}


def test_a_deadline_ends_a_request(engine: LlamaEngine) -> None:
    last = ask(engine, prompt_of(10), 2000, deadline_s=0.05).result()
    assert last.finish == "abort"
    assert last.receipt is not None
    assert "its deadline passed" in last.receipt.notes


def test_stop_ids_end_an_answer_and_not_before_min_tokens(engine: LlamaEngine) -> None:
    plain = ask(engine, prompt_of(40), 12)
    plain.result()
    stop = plain.tokens[3]
    stopped = ask(engine, prompt_of(40), 12, stop_ids=frozenset({stop}))
    assert stopped.result().finish == "stop"
    assert stopped.tokens == plain.tokens[: plain.tokens.index(stop)]
    longer = ask(engine, prompt_of(40), 12, stop_ids=frozenset({stop}), min_tokens=6)
    longer.result()
    assert stop not in longer.tokens[:6]
    assert len(longer.tokens) >= 6


def test_seeds_repeat_and_differ(engine: LlamaEngine) -> None:
    def drawn(seed: int | None) -> list[int]:
        answer = ask(engine, prompt_of(30), 20, sampling=Sampling(temperature=1.5, top_p=0.95, top_k=100, seed=seed))
        answer.result()
        return answer.tokens

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(None) != drawn(None)


def test_what_can_never_run_is_refused_at_once(engine: LlamaEngine) -> None:
    with pytest.raises(ContextLengthExceeded):
        ask(engine, prompt_of(5000))
    with pytest.raises(RequestError, match="token ids must lie in"):
        ask(engine, [10_000])
    assert ask(engine, prompt_of(5)).result().finish == "length"


def test_what_is_saved_when_the_engine_closes_is_there_afterwards(gguf: Made, tmp_path: Path) -> None:
    prompt = prompt_of(1500)
    with opened(gguf("llama"), tmp_path, cache={"memory": "0"}) as engine:
        ask(engine, prompt, 1).result()
    with opened(gguf("llama"), tmp_path, cache={"memory": "0"}) as engine:
        assert receipt_of(ask(engine, prompt, 1)).cached_disk_tokens == 1472
    engine.close()  # twice is fine
    with pytest.raises(RequestError, match="shutting down"):
        ask(engine, prompt)


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_wrong_bytes_on_disk_are_computed_instead(
    kind: Kind, gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_RANGE_BYTES", 80 << 10)
    prompt = prompt_of(1500)
    with opened(gguf(kind), tmp_path, cache={"memory": "0"}) as engine:
        cold = ask(engine, prompt)
        cold.result()
        saved(engine)
    (segment,) = (tmp_path / "kv").rglob("*.seg")
    data = bytearray(segment.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    segment.write_bytes(data)
    with opened(gguf(kind), tmp_path, cache={"memory": "0"}) as engine:
        hit = ask(engine, prompt)
        cached = receipt_of(hit).cached_disk_tokens
        assert 0 < cached < 1472 if kind == "llama" else cached == 0, "of a recurrent model a part is of no use"
        assert same(engine, prompt, cold, hit)


def test_a_range_that_the_context_does_not_take_is_computed_while_the_rest_is_read(
    gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_RANGE_BYTES", 80 << 10)
    put_in = Context.put_in

    def refusing(self: Context, sequence: int, data: memoryview, first: int, end: int) -> None:
        if first == 256:
            raise WrongState("not this one")
        put_in(self, sequence, data, first, end)

    prompt = prompt_of(1000)
    with opened(gguf("llama"), tmp_path, cache={"memory": "0"}) as engine:
        cold = ask(engine, prompt)
        cold.result()
        saved(engine)
        monkeypatch.setattr(Context, "put_in", refusing)
        hit = ask(engine, prompt)
        assert 0 < receipt_of(hit).cached_disk_tokens < 960
        assert engine.load().counters.get("loads_timed_out", 0) == 0
        assert same(engine, prompt, cold, hit)


def test_reads_that_find_no_room_to_land_in_go_on_when_others_have_landed(
    gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_PASSAGE_BYTES", 0)  # then it has room for the least number of blocks
    prompts = [prompt_of(1000, seed) for seed in range(4)]
    with opened(gguf("llama"), tmp_path, cache={"memory": "0"}) as engine:
        for prompt in prompts:
            ask(engine, prompt).result()
        saved(engine)
        for answer in [ask(engine, prompt) for prompt in prompts]:
            assert receipt_of(answer).cached_disk_tokens == 960


def test_a_model_whose_states_do_not_come_back_is_served_without_a_cache(
    gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in = Context.put_in
    monkeypatch.setattr(Context, "put_in", lambda self, to, data, first, end: put_in(self, to, _negated(data), first, end))
    with opened(gguf("llama"), tmp_path, kv_type="f32") as engine:
        assert engine.info.cache.startswith("off: what libllama gives back of this architecture is not what was computed: ")
        assert receipt_of(ask(engine, prompt_of(200))).completion_tokens == 8


def _negated(data: memoryview) -> memoryview:
    """The state of a range with its last values turned round."""
    changed = bytearray(data)
    for at in range(len(changed) - 4 * 64 * 32 + 3, len(changed), 4):
        changed[at] ^= 0x80
    return memoryview(changed)


def test_a_request_that_is_refused_leaves_no_sampler_behind(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    close = Sampler.close
    monkeypatch.setattr(Sampler, "close", lambda self: (closed.append(self), close(self)))
    first = ask(engine, prompt_of(400), 200, id="twice")
    with pytest.raises(RequestError, match="still running"):
        ask(engine, prompt_of(5), id="twice")
    assert len(closed) == 1
    engine.abort("twice")
    first.result()
    eventually(lambda: len(closed) == 2)


def test_8_sessions_that_abort_at_random_all_end_and_none_is_wrong(exact: None, gguf: Made, tmp_path: Path) -> None:
    sessions(gguf("llama"), tmp_path, turns=6, seed=1)


@pytest.mark.soak
def test_ten_minutes_of_8_sessions_leave_memory_flat(
    exact: None, gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is remembered of the latest saves and extents is bounded, by more of them than ten minutes have.
    monkeypatch.setattr(saver, "SaveHistory", partial(SaveHistory, most_saves=64))
    for module, bound in ((memory, "_REMOVALS_KEPT"), (joining, "_TRACKED"), (admission, "_REMEMBERED")):
        monkeypatch.setattr(module, bound, 64)
    resident = sessions(gguf("llama"), tmp_path, seconds=600.0, seed=2)
    quarter = len(resident) // 4
    warm, end = (statistics.median(resident[at : at + quarter]) / 2**20 for at in (quarter, 3 * quarter))
    print(f"{len(resident)} turns; {warm:.1f} MiB resident in the second quarter, {end:.1f} MiB in the last")
    assert end <= 1.02 * warm, "what is kept in memory is bounded, and full after a quarter of the time"


def sessions(file: Path, directory: Path, *, seed: int, turns: int = 1 << 30, seconds: float = 1e9) -> list[int]:
    """Eight conversations that grow, some turns of which are given up; every request ends and no answer is wrong. Return the
    bytes that this process held in memory after each turn, once its tiers had been full; `seconds` count from then."""
    draw, resident = random.Random(seed), []
    until = None
    cache = {"capacity": "16MiB", "memory": "4MiB"}
    with opened(file, directory, kv_memory="2MiB", context=1024, max_running=8, kv_type="f32", cache=cache) as engine:
        assert engine.cache is not None
        texts = [prompt_of(draw.randrange(50, 200), seed=number) for number in range(8)]
        for turn in range(turns):
            if until is None and full(engine):
                until = time.monotonic() + seconds
            if until is not None and time.monotonic() > until:
                break
            asked = {}
            for number, text in enumerate(texts):
                if len(text) > 800:
                    del text[100:]
                text += prompt_of(draw.randrange(5, 60), seed=1000 * turn + number)
                asked[number] = ask(engine, text, draw.randrange(1, 40), id=f"{turn}-{number}", session=str(number))
            given_up = {number for number in asked if draw.random() < 0.3}
            for number in given_up:
                engine.abort(f"{turn}-{number}")
            for number, answer in asked.items():
                last = answer.result()
                assert last.finish == "length" or (last.finish == "abort" and number in given_up), last
            checked = draw.choice(sorted(set(asked) - given_up) or [0])
            if checked not in given_up:
                cold = ask(engine, texts[checked], len(asked[checked].tokens), use_cache=False)
                cold.result()
                assert same(engine, texts[checked], cold, asked[checked])
            for number in set(asked) - given_up:
                texts[number] += asked[number].tokens
            if until is not None:
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        eventually(lambda: engine.load().kv_used_bytes == 0)
        assert engine.cache.check() == []
    return resident


def full(engine: LlamaEngine) -> bool:
    """Whether every tier has had to give something up."""
    assert engine.cache is not None
    counted = [tier.counters for tier in engine.cache.statistics().tiers]
    return all(any(name.startswith("evicted_") and count for name, count in one.items()) for one in counted)
