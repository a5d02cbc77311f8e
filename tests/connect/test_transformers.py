"""model.generate(…) with a HeadstartCache: the same tokens, fewer of them computed, whatever becomes of the disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asking import eventually
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import load_config
from headstart.connect.transformers import Store, open_store
from headstart.connect.transformers.identity import identity_of_model
from headstart.connect.transformers.store import _shape_of
from headstart.engine.base import GenerationRequest, TokenEvent
from headstart.engine.checkpoint import identity_of
from headstart.engine.torch import open_engine
from headstart.engine.torch.facts import name_of_cache
from headstart.errors import ModelError
from headstart.testing.fake_kv import IDENTITY
from headstart.testing.faults import Fault, FaultyTier
from headstart.tier.memory import MemoryTier

TIMEOUT_S = 60.0
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 40, "num_hidden_layers": 6},
    "mistral": {"sliding_window": 70},
    "deepseek_v3": {
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "v_head_dim": 24,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}

Folders = Callable[..., Path]


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def folder(tiny_model_folder: Folders) -> Path:
    return tiny_model_folder("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return loaded(folder)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, object]:
    return {
        "cache.directory": str(tmp_path / "kv"),
        "cache.capacity": "64MiB",
        "cache.min_free": "0",
        "cache.memory": "0",
        "cache.write_budget": "unlimited",
        "models_directory": str(tmp_path / "models"),
    }


def prompt(tokens: int, *, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 250, (1, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, ids: torch.Tensor, cache: Any = None, *, new: int = 8, **options: Any) -> list[int]:
    argument = name_of_cache(model)
    assert argument is not None
    with_cache = {} if cache is None else {argument: cache}
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 2} | options
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **with_cache, **options)
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def kept(store: Store, model: Any, ids: torch.Tensor, **options: Any) -> tuple[list[int], int]:
    """Generate with the store; return the tokens, and how many came from it. Everything is stored when this returns."""
    with store.cache(ids) as cache:
        tokens = generate(model, ids, cache, **options)
    if cache.ticket is not None:
        assert cache.ticket.wait(TIMEOUT_S).reason is None
    return tokens, cache.cached_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_generation_reads_what_the_first_computed_also_after_a_restart(
    tiny_model_folder: Folders, settings: dict[str, object], kind: str
) -> None:
    model = loaded(tiny_model_folder(kind, **KINDS[kind]))
    ids = prompt(200)
    plain = generate(model, ids)
    with open_store(model, settings) as store:
        assert kept(store, model, ids) == (plain, 0)
        assert kept(store, model, ids) == (plain, 192)
    with open_store(model, settings) as store:
        assert kept(store, model, ids) == (plain, 192)
        longer = torch.cat([ids, prompt(40, seed=2)], dim=1)
        assert kept(store, model, longer) == (generate(model, longer), 192)


def test_rules_of_tiers_are_taken_up_from_the_file_while_it_is_open(
    model: Any, settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "headstart.toml"
    file.write_text("")
    monkeypatch.setenv("HEADSTART_CONFIG", str(file))
    ids = prompt(200)
    with open_store(model, settings) as store:
        kept(store, model, ids)
        assert kept(store, model, ids)[1] == 192
        file.write_text('[cache.tiering]\nrules = ["drop from disk"]\n')
        eventually(lambda: store.statistics().counters.get("tiering_dropped_extents", 0) >= 1)


def test_a_turn_that_goes_on_finds_the_answer_too(model: Any, settings: dict[str, object]) -> None:
    ids = prompt(100)
    with open_store(model, settings) as store:
        answer, _ = kept(store, model, ids, new=60)
        turn = torch.cat([ids, torch.tensor([answer]), prompt(20, seed=3)], dim=1)
        assert kept(store, model, turn) == (generate(model, turn), 128)  # of 159 that were run


def test_what_is_sampled_with_one_seed_is_the_same(model: Any, settings: dict[str, object]) -> None:
    ids, sampling = prompt(150), {"do_sample": True, "temperature": 0.9, "top_k": 40}
    torch.manual_seed(7)
    plain = generate(model, ids, **sampling)
    with open_store(model, settings) as store:
        kept(store, model, ids)
        torch.manual_seed(7)
        assert kept(store, model, ids, **sampling) == (plain, 128)


def test_what_serve_keeps_is_found_here(folder: Path, model: Any, settings: dict[str, object]) -> None:
    ids = prompt(200)
    engine = open_engine(folder, load_config(overrides=settings), on_progress=lambda stage, fraction: None)
    answer: list[TokenEvent] = []
    done = Event()

    def on_event(event: TokenEvent) -> None:
        answer.append(event)
        if event.finish is not None:
            done.set()

    engine.submit(GenerationRequest(id="a", prompt=tuple(ids[0].tolist()), max_tokens=8), on_event)
    assert done.wait(TIMEOUT_S)
    engine.close()
    tokens = [event.token for event in answer if event.token is not None]
    with open_store(model, settings) as store:
        assert kept(store, model, ids) == (tokens, 192)


@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("kind", ["flip", "eio"])
def test_what_cannot_be_read_is_computed_in_the_midst_of_the_pass(model: Any, kind: Any, start: int) -> None:
    shape = _shape_of(model)
    tier = FaultyTier(MemoryTier(16 << 20))
    representation = shape.representation(query_heads=4)
    cache = PrefixCache([tier], identity=IDENTITY, representation=representation, match_timeout_s=TIMEOUT_S)
    with Store(model, shape, cache, load_timeout_s=TIMEOUT_S) as store:
        ids = prompt(260)
        plain, _ = kept(store, model, ids)
        tier.inject(Fault("read", kind, start=start, every=1))
        tokens, cached = kept(store, model, ids)
        assert tokens == plain
        assert cached < 256
        assert sum(tier.injected.values()) > 0
        tier.heal()
        assert kept(store, model, ids)[0] == plain


def test_a_broken_directory_costs_the_hits_and_nothing_else(model: Any, settings: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("no directory")
    ids = prompt(100)
    with open_store(model, settings) as store:
        assert kept_without(store, model, ids) == generate(model, ids)


def kept_without(store: Store, model: Any, ids: torch.Tensor) -> list[int]:
    with store.cache(ids) as cache:
        return generate(model, ids, cache)


def test_salts_keep_prompts_apart(model: Any, settings: dict[str, object]) -> None:
    ids = prompt(100)
    with open_store(model, settings) as store:
        with store.cache(ids, salt="one") as cache:
            generate(model, ids, cache)
        assert cache.ticket is not None
        cache.ticket.wait(TIMEOUT_S)
        for salt, cached in (("one", 64), ("two", 0), (None, 0)):
            with store.cache(ids, salt=salt) as cache:
                generate(model, ids, cache, new=1)
            assert cache.cached_tokens == cached


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}], ids=["beams", "several answers"]
)
def test_beams_and_several_answers_begin_with_what_is_stored_and_leave_the_prompt(
    model: Any, settings: dict[str, object], options: dict[str, Any]
) -> None:
    ids = prompt(140)

    def answered(cache: Any = None) -> list[int]:
        torch.manual_seed(3)
        return generate(model, ids, cache, **options)

    with open_store(model, settings) as store:
        for cached in (0, 128):
            with store.cache(ids) as cache:
                assert answered(cache) == answered()
            assert cache.cached_tokens == cached
            assert cache.ticket is not None
            assert cache.ticket.wait(TIMEOUT_S).stored_tokens == 128
        assert kept(store, model, ids) == (generate(model, ids), 128)


def test_a_batch_of_several_prompts_is_refused(model: Any, settings: dict[str, object]) -> None:
    ids = prompt(100)
    both = torch.cat([ids, prompt(100, seed=7)])
    with open_store(model, settings) as store:
        kept(store, model, ids)
        with pytest.raises(ValueError, match="one prompt"), store.cache(ids) as cache:
            generate(model, both, cache)
        assert cache.ticket is None
        with pytest.raises(ValueError, match="one sequence"):
            store.cache(both)
        assert kept(store, model, ids) == (generate(model, ids), 64)


def test_padding_and_odd_positions_are_refused(model: Any, settings: dict[str, object]) -> None:
    ids = prompt(100)
    argument = name_of_cache(model)
    with open_store(model, settings) as store:
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        for options in ({"attention_mask": mask}, {"position_ids": torch.arange(5, 105)[None]}):
            with pytest.raises(ValueError, match=r"padding|position_ids"), store.cache(ids) as cache:
                model(ids, use_cache=True, **{argument: cache}, **options)
            assert cache.ticket is None


def test_tokens_that_are_taken_back_are_not_kept(model: Any, settings: dict[str, object]) -> None:
    ids, other = prompt(130), prompt(130, seed=5)
    argument = name_of_cache(model)
    with open_store(model, settings) as store, torch.no_grad():
        with store.cache(ids) as cache:
            model(ids, use_cache=True, **{argument: cache})
            cache.crop(-70)
            model(other[:, :70], use_cache=True, **{argument: cache})
        assert cache.ticket is not None
        assert cache.ticket.wait(TIMEOUT_S).stored_tokens == 128
        both = torch.cat([ids[:, :60], other[:, :70]], dim=1)
        assert kept(store, model, ids)[1] == 0
        assert kept(store, model, both) == (generate(model, both), 128)


def test_embeddings_are_served_and_not_kept(model: Any, settings: dict[str, object]) -> None:
    ids = prompt(100)
    argument = name_of_cache(model)
    with open_store(model, settings) as store, torch.no_grad():
        with store.cache(ids) as cache:
            model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=True, **{argument: cache})
        assert cache.ticket is None


def test_a_model_s_identity_is_its_folder_s_until_it_is_changed(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder)
    assert identity_of_model(model, digests=None) == identity_of(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 0.01
    changed = identity_of_model(model, digests=None)
    assert changed.weights != identity_of(folder).weights
    other = loaded(folder)
    other.config.rms_norm_eps = 1e-3
    assert identity_of_model(other, digests=None).root() not in (changed.root(), identity_of(folder).root())
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    assert identity_of_model(loaded(copied), digests=None) == identity_of(folder)
    (copied / "model.safetensors").unlink()
    there = loaded(folder)
    there.config._name_or_path = str(copied)
    alone = identity_of_model(there, digests=None)
    assert alone == identity_of_model(there, digests=None)
    assert alone.weights != changed.weights


def test_weights_that_change_under_an_open_store_are_noticed(folder: Path, settings: dict[str, object]) -> None:
    model, ids = loaded(folder), prompt(100)
    with open_store(model, settings) as store:
        with store.cache(ids) as cache:
            generate(model, ids, cache)
            with torch.no_grad():
                model.model.embed_tokens.weight.mul_(1.5)
        assert cache.ticket is None
        with pytest.raises(ValueError, match="weights have changed"):
            store.cache(ids)


@pytest.mark.parametrize("kind", ["mamba", "qwen3_next"])
def test_models_that_keep_states_are_refused(tiny_model_folder: Folders, settings: dict[str, object], kind: str) -> None:
    model = stateful(kind)
    with pytest.raises(ModelError, match=r"cache|states"):
        open_store(model, settings)


def stateful(kind: str) -> Any:
    from transformers import AutoConfig

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4}
    if kind == "qwen3_next":
        sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "intermediate_size": 16}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()


def test_a_model_in_training_is_refused(folder: Path, settings: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"eval\(\)"):
        open_store(loaded(folder).train(), settings)
