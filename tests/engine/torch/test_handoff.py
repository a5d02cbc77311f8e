"""A prompt computed by one worker and gone on with by another gives the tokens of one worker, and is paid for once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handoff_kit import CONTEXT, IDENTITY, alone, pair, worker
from reference import ask, loaded, some_tokens

from asking import eventually
from headstart.engine.base import Sampling, TokenEvent
from headstart.engine.handoff import HandoffEngine
from headstart.engine.handoff.outgoing import Outgoing, Part
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.model import TorchModel
from headstart.errors import ConfigError
from model_fixtures import LATENT_KINDS
from odd_models import RECURRENT

Folders = Callable[..., Path]
MLA = LATENT_KINDS["deepseek-v3, queries of low rank, YaRN, grouped experts"]


@pytest.fixture(scope="module")
def model(tiny_model_folder: Folders) -> Callable[[], TorchModel]:
    found = loaded(tiny_model_folder("llama"))
    return lambda: found


@pytest.fixture
def two(model: Callable[[], TorchModel], tmp_path: Path) -> Iterator[tuple[HandoffEngine, HandoffEngine]]:
    with pair(model, tmp_path) as both:
        yield both


@pytest.fixture(scope="module")
def one(model: Callable[[], TorchModel]) -> Iterator[TorchEngine]:
    with alone(model()) as engine:
        yield engine


SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, top_p=0.95, seed=7),
    Sampling(temperature=1.1, seed=3, presence_penalty=1.5, frequency_penalty=0.5),
    Sampling(repetition_penalty=1.3),
)


@pytest.mark.parametrize("way", [0, 1], ids=["shared memory", "tcp"])
def test_the_tokens_are_those_of_one_worker(two: tuple[HandoffEngine, HandoffEngine], one: TorchEngine, way: int) -> None:
    prefill, decode = two
    for number, sampling in enumerate(SAMPLINGS):
        prompt = some_tokens(400, seed=number)
        there = ask(decode, prompt, 10, sampling=sampling, prefill_at=prefill.addresses[way])
        here = ask(one, prompt, 10, sampling=sampling)
        assert there.result().finish == "length"
        here.result()
        assert there.tokens == here.tokens
    counters = decode.load().counters
    assert counters["handoff_taken"] == 4
    assert counters["handoff_tokens"] == 4 * 384  # whole blocks
    assert counters["cached_memory_tokens"] == 4 * 384  # which the engine did not compute


def test_kv_goes_over_while_the_prompt_is_computed(two: tuple[HandoffEngine, HandoffEngine]) -> None:
    prefill, decode = two
    ask(decode, some_tokens(900), 2, prefill_at=prefill.addresses[0]).result()
    counters = prefill.load().counters
    assert counters["handoff_sent_bytes"] == decode.load().counters["handoff_received_bytes"]
    # Eight passes of 128 tokens: all but the last layers of the last one can be sent before the first token is known.
    assert 0 < counters["handoff_sent_early_bytes"] <= counters["handoff_sent_bytes"]


def test_latent_attention_is_handed_over(tiny_model_folder: Folders, tmp_path: Path) -> None:
    kind, config = MLA
    found = loaded(tiny_model_folder(kind, **config))
    prompt = some_tokens(500)
    with pair(lambda: found, tmp_path) as (prefill, decode), alone(found) as engine:
        there = ask(decode, prompt, 8, prefill_at=prefill.addresses[0])
        here = ask(engine, prompt, 8)
        there.result(), here.result()
        assert there.tokens == here.tokens
        assert decode.load().counters["handoff_tokens"] == 448


@pytest.mark.parametrize(
    ("warm", "cached"), [("neither", 0), ("prefill", 448), ("decode", 448), ("both", 448)], ids=lambda one: str(one)
)
def test_a_token_is_counted_once(two: tuple[HandoffEngine, HandoffEngine], warm: str, cached: int) -> None:
    prefill, decode = two
    prompt = some_tokens(500)
    for name, engine in (("prefill", prefill), ("decode", decode)):
        if warm in (name, "both"):
            ask(engine, prompt, 1).result()
            eventually(lambda engine=engine: engine._cache.statistics().counters.get("saves_done", 0) >= 1)
    receipt = ask(decode, prompt, 4, prefill_at=prefill.addresses[0]).result().receipt
    assert receipt is not None
    assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.cached_tokens) == (500, 4, cached)
    assert receipt.written_tokens <= 500 - cached
    assert receipt.first_token_s is not None
    assert receipt.first_token_s <= receipt.total_s


def test_what_the_decoding_worker_has_is_not_sent(two: tuple[HandoffEngine, HandoffEngine], one: TorchEngine) -> None:
    prefill, decode = two
    prompt = some_tokens(700)
    ask(decode, prompt[:400], 1).result()
    eventually(lambda: decode._cache.statistics().counters.get("saves_done", 0) >= 1)
    there, here = ask(decode, prompt, 6, prefill_at=prefill.addresses[0]), ask(one, prompt, 6)
    there.result(), here.result()
    assert there.tokens == here.tokens
    assert decode.load().counters["handoff_tokens"] == 640 - 384


def test_a_tenant_s_prompt_is_found_under_its_salt_alone(two: tuple[HandoffEngine, HandoffEngine]) -> None:
    prefill, decode = two
    prompt = some_tokens(300)
    there = ask(decode, prompt, 4, prefill_at=prefill.addresses[0], salt="\ud800acme", tenant="acme")
    there.result()
    assert decode.load().counters["handoff_tokens"] == 256
    assert decode._cache.match(prompt, salt="\ud800acme").tokens == 256
    assert decode._cache.match(prompt).tokens == 0
    assert prefill._cache.match(prompt).tokens == 0


def test_an_answer_of_one_token_needs_the_computing_worker_alone(
    two: tuple[HandoffEngine, HandoffEngine], one: TorchEngine
) -> None:
    prefill, decode = two
    prompt = some_tokens(200)
    there, here = ask(decode, prompt, 1, prefill_at=prefill.addresses[1], logprobs=3), ask(one, prompt, 1, logprobs=3)
    last, wanted = there.result(), here.result()
    assert (there.tokens, last.finish) == (here.tokens, "length")
    assert last.logprobs is not None
    assert wanted.logprobs is not None
    assert last.logprobs.token == pytest.approx(wanted.logprobs.token, abs=1e-4)
    assert decode.inner.load().counters.get("prompt_tokens", 0) == 0


def test_a_stop_token_that_comes_first_ends_the_answer(two: tuple[HandoffEngine, HandoffEngine], one: TorchEngine) -> None:
    prefill, decode = two
    prompt = some_tokens(200)
    wanted = ask(one, prompt, 1)
    wanted.result()
    there = ask(decode, prompt, 5, prefill_at=prefill.addresses[1], stop_ids=frozenset(wanted.tokens))
    last = there.result()
    assert (there.tokens, last.finish) == ([], "stop")
    assert last.receipt is not None
    assert last.receipt.completion_tokens == 0
    later = ask(decode, prompt, 5, prefill_at=prefill.addresses[1], stop_ids=frozenset(wanted.tokens), min_tokens=1)
    here = ask(one, prompt, 5, stop_ids=frozenset(wanted.tokens), min_tokens=1)
    later.result(), here.result()
    assert later.tokens == here.tokens


class _Only:
    """Allows two tokens in turn."""

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)

    def allowed(self) -> bytes | None:
        mask = bytearray(64)
        mask[self.left[0] // 8] |= 1 << self.left[0] % 8
        return bytes(mask)

    def accept(self, token: int) -> None:
        assert token == self.left.pop(0)


def test_a_constrained_answer_goes_on_where_its_first_token_left_it(two: tuple[HandoffEngine, HandoffEngine]) -> None:
    prefill, decode = two
    answer = ask(decode, some_tokens(200), 3, prefill_at=prefill.addresses[0], constraint=_Only(17, 300, 5))
    answer.result()
    assert answer.tokens == [17, 300, 5]
    assert decode.load().counters["handoff_taken"] == 1


def test_progress_is_told_from_where_the_prompt_is_computed(two: tuple[HandoffEngine, HandoffEngine]) -> None:
    prefill, decode = two
    answer = ask(decode, some_tokens(700), 2, prefill_at=prefill.addresses[0], progress=True)
    answer.result()
    assert [step.processed_tokens for step in answer.steps] == sorted({128 * n for n in range(1, 6)} | {700})


def test_many_at_once(two: tuple[HandoffEngine, HandoffEngine], one: TorchEngine) -> None:
    prefill, decode = two
    prompts = [some_tokens(150 + 40 * n, seed=n) for n in range(8)]
    there = [ask(decode, prompt, 5, prefill_at=prefill.addresses[n % 2]) for n, prompt in enumerate(prompts)]
    here = [ask(one, prompt, 5) for prompt in prompts]
    for a, b in zip(there, here, strict=True):
        a.result(), b.result()
        assert a.tokens == b.tokens
    eventually(lambda: prefill.load().kv_used_bytes == decode.load().kv_used_bytes == 0)
    for engine in two:
        assert engine._cache.check() == []


def test_kv_on_a_device_goes_over_with_each_pass(model: Callable[[], TorchModel], one: TorchEngine, tmp_path: Path) -> None:
    shape = model().shape
    beside = KVMemory(shape, 2 * shape.region_bytes(CONTEXT), context_tokens=CONTEXT, device=torch.device("cpu"))
    listen = [f"ipc://{tmp_path}/p.sock"]
    with worker(model(), listen=listen, engine={"memory": beside}) as prefill, worker(model()) as decode:
        prompt = some_tokens(500)
        there, here = ask(decode, prompt, 4, prefill_at=prefill.addresses[0]), ask(one, prompt, 4)
        there.result(), here.result()
        assert there.tokens == here.tokens
        assert decode.load().counters["handoff_tokens"] == 448
        eventually(lambda: beside.used_bytes == 0)


class _KV:
    """Counts who holds it."""

    held = 0

    def retain(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1

    def buffers(self, layer: int, first: int, sizes: Any) -> Any:
        raise NotImplementedError


def test_whatever_a_prompt_goes_through_all_of_it_is_sent(model: Callable[[], TorchModel]) -> None:
    representation = model().shape.representation(query_heads=4)  # of three layers
    out = Outgoing(representation, have=1, pieces=6, wake=lambda: None)
    kv = _KV()
    out.computed(kv, layers=2, tokens=200)  # a pass that is given up,
    out.computed(kv, layers=1, tokens=130)  # a shorter one,
    out.computed(kv, layers=3, tokens=130)
    out.computed(kv, layers=3, tokens=64)  # it gave way, and is computed again from the start,
    out.computed(kv, layers=1, tokens=400)
    out.computed(kv, layers=3, tokens=400)  # to the end
    out.told(TokenEvent(7, "length"))
    assert isinstance(out.next(0.0), TokenEvent)  # before all KV
    whole: dict[tuple[int, int], set[int]] = {}
    while isinstance(part := out.next(0.0), Part):
        whole.setdefault((part.first, part.count), set()).add(part.layer)
        out.sent(part)
    sent = sorted(
        piece for (first, count), layers in whole.items() if len(layers) == 3 for piece in range(first, first + count)
    )
    assert sent == [1, 2, 3, 4, 5]
    assert (kv.held, out.done) == (0, True)


def test_a_request_that_names_nobody_is_computed_here(two: tuple[HandoffEngine, HandoffEngine]) -> None:
    ask(two[1], some_tokens(200), 2).result()
    assert "handoff_tokens" not in two[1].load().counters


# Roles, and who is refused.


def _lost(engine: HandoffEngine) -> dict[str, int]:
    return {name: count for name, count in engine.load().counters.items() if name.startswith("handoff_lost")}


def _same(decode: HandoffEngine, one: TorchEngine, at: str, **more: Any) -> None:
    prompt = some_tokens(300)
    there, here = ask(decode, prompt, 4, prefill_at=at, **more), ask(one, prompt, 4)
    assert there.result().finish == "length"
    here.result()
    assert there.tokens == here.tokens


def test_a_role_changes_while_running(two: tuple[HandoffEngine, HandoffEngine], one: TorchEngine) -> None:
    prefill, decode = two
    prefill.role = "decode"
    _same(decode, one, prefill.addresses[0])
    assert _lost(decode) == {"handoff_lost_refused_role": 1}
    prefill.role = "both"
    ask(decode, some_tokens(300, seed=2), 4, prefill_at=prefill.addresses[0]).result()
    assert decode.load().counters["handoff_taken"] == 1
    decode.role = "prefill"
    ask(decode, some_tokens(300, seed=3), 4, prefill_at=prefill.addresses[0]).result()
    assert decode.load().counters["handoff_taken"] == 1


def test_a_worker_with_other_weights_is_not_asked_for_kv(
    two: tuple[HandoffEngine, HandoffEngine], model: Callable[[], TorchModel], one: TorchEngine
) -> None:
    with worker(model(), role="decode", identity=replace(IDENTITY, weights=b"\1" * 32)) as other:
        _same(other, one, two[0].addresses[0])
        assert _lost(other) == {"handoff_lost_refused_model": 1}
        assert other.load().counters["handoff_tokens"] == 0


def test_kv_laid_down_in_another_way_is_not_taken(two: tuple[HandoffEngine, HandoffEngine], tiny_model_folder: Folders) -> None:
    wide = loaded(tiny_model_folder("llama", num_key_value_heads=4))
    with worker(wide, role="decode") as other:
        ask(other, some_tokens(300), 4, prefill_at=two[0].addresses[0]).result()
        assert _lost(other) == {"handoff_lost_refused_representation": 1}


@pytest.mark.parametrize("secret", [b"", b"another secret of the house"], ids=["none", "another"])
def test_another_secret_is_refused(model: Callable[[], TorchModel], one: TorchEngine, secret: bytes) -> None:
    with worker(model(), listen=["tcp://127.0.0.1:0"], secret=b"the secret of the house") as prefill:
        with worker(model(), secret=secret) as decode:
            _same(decode, one, prefill.addresses[0])
            assert _lost(decode) == {"handoff_lost_secret": 1}
        with worker(model(), secret=b"the secret of the house") as decode:
            _same(decode, one, prefill.addresses[0])
            assert decode.load().counters["handoff_taken"] == 1


def test_without_a_secret_only_this_machine_is_talked_to(two: tuple[HandoffEngine, HandoffEngine], model: Any) -> None:
    nowhere = ("tcp://192.0.2.1:7000", "http://127.0.0.1/", ",", "tcp://127.0.0.1:1" + ", tcp://127.0.0.1:1" * 9)
    for number, at in enumerate(nowhere):
        assert ask(two[1], some_tokens(100, seed=number), 4, prefill_at=at).result().finish == "length"
    assert _lost(two[1]) == {"handoff_lost_address": 4}
    engine = alone(model())
    with pytest.raises(ConfigError, match="--handoff-secret"):
        HandoffEngine(engine, two[1]._cache, listen=["tcp://*:0"])
    engine.close()


def test_a_model_with_states_computes_its_prompts_itself(tiny_model_folder: Folders) -> None:
    kind, config = RECURRENT["qwen3.5, gated delta nets"]
    found = loaded(tiny_model_folder(kind, **config))
    with worker(found, role="decode") as decode:
        answer = ask(decode, some_tokens(150), 3, prefill_at="tcp://127.0.0.1:1")
        assert answer.result().finish == "length"
        assert _lost(decode) == {"handoff_lost_no_room": 1}
