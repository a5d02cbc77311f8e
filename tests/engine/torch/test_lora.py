"""LoRA adapters: the numbers of merged weights, in mixed batches, and never another adapter's blocks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from held_cache import eventually
from reference import Answer, ask, some_tokens, stock, stock_logits
from safetensors.torch import save_file

from headstart.config import load_config
from headstart.engine.torch import open_engine
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.lora import AdaptedLinear, read_adapter
from headstart.errors import ConfigError, ModelError, RequestError
from model_fixtures import LATENT_KINDS

LAYERS = [
    f"model.layers.{layer}.{name}" for layer in range(3) for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]
PROMPT = some_tokens(200, seed=4)


def make_adapter(folder: Path, module: Any, *, seed: int, rank: int = 4, layers: list[str] = LAYERS, **config: Any) -> Path:
    """Write an adapter for the linear layers named, in peft's format."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in layers:
        plain = module.get_submodule(layer)
        name = f"base_model.model.{layer}.lora_"
        tensors[f"{name}A.weight"] = torch.randn(rank, plain.in_features, generator=draw) * 0.1
        tensors[f"{name}B.weight"] = torch.randn(plain.out_features, rank, generator=draw) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": 12, "bias": "none", "lora_dropout": 0.1, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**said, "use_dora": False, "modules_to_save": None, **config}))
    return folder


def merged(folder: Path, adapter: Path) -> Any:
    """The stock model with an adapter's product added to its weights."""
    from safetensors.torch import load_file

    module = stock(folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, up in tensors.items():
        if name.endswith("lora_B.weight"):
            layer = module.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_B.weight"))
            layer.weight.data += scale * up @ tensors[name.replace("lora_B", "lora_A")]
    return module


@pytest.fixture
def folder(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("llama")


@contextmanager
def opened(folder: Path, place: Path, adapters: dict[str, Path], **settings: Any) -> Iterator[TorchEngine]:
    said = {
        "models_directory": place,
        "cache.directory": place / "kv",
        "cache.capacity": "64MiB",
        "cache.memory": "16MiB",
        "engine.kv_memory": "64MiB",
        "engine.context": 512,
        "engine.adapters": ", ".join(f"{name}={path}" for name, path in adapters.items()),
    }
    engine = open_engine(folder, load_config(overrides=said | settings), on_progress=lambda *_: None)
    try:
        yield engine
        eventually(lambda: engine.load().kv_used_bytes == 0)
    finally:
        engine.close()


def agrees(module: Any, prompt: list[int], answer: Answer) -> None:
    """Each token's log probability, and the likeliest one's, is what `module` has."""
    last = answer.result()
    assert last.error is None
    tokens = [*prompt, *answer.tokens]
    logs = stock_logits(module, tokens).log_softmax(dim=-1)
    for at, told in enumerate(answer.logprobs, start=len(prompt) - 1):
        assert told.token == pytest.approx(float(logs[at, tokens[at + 1]]), abs=2e-4)
        assert told.top[0][1] == pytest.approx(float(logs[at].max()), abs=2e-4)


class Told(Answer):
    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[Any] = []

    def __call__(self, event: Any) -> None:
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        super().__call__(event)


def told(engine: TorchEngine, prompt: list[int], **more: Any) -> Told:
    from headstart.engine.base import GenerationRequest

    answer = Told()
    engine.submit(GenerationRequest(f"told-{id(answer)}", tuple(prompt), 6, logprobs=1, **more), answer)
    return answer


def cached(answer: Answer) -> int:
    receipt = answer.result().receipt
    assert receipt is not None
    return receipt.cached_tokens


@pytest.mark.parametrize("packed", [True, False])
def test_a_mixed_batch_gives_each_request_the_numbers_of_its_merged_weights(
    folder: Path, tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr("headstart.engine.torch.packing.pack", lambda module: False)
    plain = stock(folder)
    first = make_adapter(tmp_path / "first", plain, seed=1)
    second = make_adapter(tmp_path / "second", plain, seed=2, rank=3, layers=LAYERS[1:4], use_rslora=True)
    modules = {None: plain, "one": merged(folder, first), "two": merged(folder, second)}
    with opened(folder, tmp_path, {"one": first, "two": second}) as engine:
        assert engine.info.adapters == ("one", "two")
        prompts = [some_tokens(20 + 30 * n, seed=n) for n in range(6)]
        asked = list(zip(prompts, [None, "one", "two"] * 2, strict=True))
        answers = [told(engine, prompt, adapter=adapter) for prompt, adapter in asked]
        for (prompt, adapter), answer in zip(asked, answers, strict=True):
            agrees(modules[adapter], prompt, answer)
    logits = [stock_logits(module, PROMPT)[-1] for module in modules.values()]
    assert not torch.allclose(logits[0], logits[1], atol=0.1)
    assert not torch.allclose(logits[0], logits[2], atol=0.1)


def test_an_adapter_s_blocks_are_its_own_whatever_its_name(folder: Path, tmp_path: Path) -> None:
    plain = stock(folder)
    first = make_adapter(tmp_path / "first", plain, seed=1)
    second = make_adapter(tmp_path / "second", plain, seed=2)
    one, two = merged(folder, first), merged(folder, second)
    with opened(folder, tmp_path, {"x": first, "y": second}) as engine:
        for adapter, module in (("x", one), ("y", two), (None, plain), ("x", one)):
            answer = told(engine, PROMPT, adapter=adapter)
            agrees(module, PROMPT, answer)
            eventually(lambda: engine.load().kv_used_bytes == 0)
        assert cached(answer) == 192  # the only one that came again
    shutil.copytree(first, tmp_path / "copy")
    with opened(folder, tmp_path, {"x": second, "renamed": tmp_path / "copy"}) as engine:
        renamed, other = told(engine, PROMPT, adapter="renamed"), told(engine, PROMPT, adapter="x")
        agrees(one, PROMPT, renamed)
        agrees(two, PROMPT, other)
        assert cached(renamed) == cached(other) == 192
    third = make_adapter(tmp_path / "third", plain, seed=1, lora_alpha=13)
    with opened(folder, tmp_path, {"x": third}) as engine:
        assert cached(told(engine, PROMPT, adapter="x")) == 0


def test_requests_that_begin_alike_share_no_kv_across_adapters(folder: Path, tmp_path: Path) -> None:
    plain = stock(folder)
    first = make_adapter(tmp_path / "first", plain, seed=1)
    with opened(folder, tmp_path, {"one": first}) as engine:
        answers = [told(engine, PROMPT, adapter=adapter) for adapter in (None, "one", None, "one")]
        for answer, module in zip(answers, [plain, merged(folder, first)] * 2, strict=True):
            agrees(module, PROMPT, answer)
        assert engine.load().counters["prefixes_shared"] == 2


def test_deterministic_mode_serves_adapters_as_well(folder: Path, tmp_path: Path) -> None:
    first = make_adapter(tmp_path / "first", stock(folder), seed=1)
    prompt = some_tokens(300, seed=8)
    with opened(folder, tmp_path, {"one": first}, **{"engine.deterministic": True}) as engine:
        cold = told(engine, prompt, adapter="one")
        agrees(merged(folder, first), prompt, cold)
        eventually(lambda: engine.load().kv_used_bytes == 0)
        hit = told(engine, prompt, adapter="one")
        assert cached(hit) == 256
        assert hit.logprobs == cold.logprobs


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "IA3"}, "only LORA is served"),
        ({"bias": "all"}, "trains biases"),
        ({"use_dora": True}, "asks for use_dora"),
        ({"modules_to_save": ["lm_head"]}, "asks for modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "asks for rank_pattern"),
        ({"something_new": 1}, "asks for something_new"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": 5}, "not both there with rank 5"),
        ({"r": None}, "no rank"),
    ],
)
def test_an_adapter_that_is_more_than_plain_lora_is_refused(folder: Path, tmp_path: Path, config: Any, says: str) -> None:
    place = make_adapter(tmp_path / "adapter", stock(folder), seed=1)
    file = place / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ModelError, match=says):
        read_adapter(place)


def test_an_adapter_that_is_not_there_or_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing/adapter_config.json cannot be read: No such file .*; name a folder"):
        read_adapter(tmp_path / "nothing")
    module = stock(folder)
    head = make_adapter(tmp_path / "head", module, seed=1, layers=["lm_head"])
    with (
        pytest.raises(ModelError, match="no linear layer of this model that can be adapted"),
        opened(folder, tmp_path, {"a": head}),
    ):
        pass
    save_file({"model.embed.weight": torch.zeros(2, 2)}, head / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="no part of plain LoRA"):
        read_adapter(head)
    fits = make_adapter(tmp_path / "fits", module, seed=1)
    with pytest.raises(ConfigError, match="the model's own name"), opened(folder, tmp_path, {folder.name: fits}):
        pass
    with opened(folder, tmp_path, {"a": fits}) as engine, pytest.raises(RequestError, match="no adapter 'b'"):
        ask(engine, PROMPT, 2, adapter="b")


def _without(self: AdaptedLinear, rows: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.plain(rows)
    return out


def _for_everybody(self: AdaptedLinear, rows: torch.Tensor) -> torch.Tensor:
    self.worked |= self._parts.keys()
    return _without(self, rows) + 0.1 * len(self._now.rows)


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (_without, "is for model.layers.0.self_attn.q_proj, whose weights the model reads in a way of its own"),
        (_for_everybody, "changes what the model says without it"),
        (lambda self, rows: self.weight, "cannot be run with this model"),
    ],
)
def test_an_adapter_is_tried_at_opening(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: Any, says: str
) -> None:
    place = make_adapter(tmp_path / "a", stock(folder), seed=1, layers=LAYERS[:1])
    monkeypatch.setattr(AdaptedLinear, "forward", forward)
    with pytest.raises(ModelError, match=f"adapter 'a' {says}"), opened(folder, tmp_path, {"a": place}):
        pass


def test_an_adapter_of_numbers_that_are_not_finite_is_refused(folder: Path, tmp_path: Path) -> None:
    place = make_adapter(tmp_path / "a", stock(folder), seed=1, lora_alpha=float("inf"))
    with pytest.raises(ModelError, match="makes numbers that are not finite"), opened(folder, tmp_path, {"a": place}):
        pass


def test_an_adapter_of_a_model_with_latent_attention_is_refused(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    kind, changes = LATENT_KINDS["deepseek-v3, RoPE in halves"]
    folder = tiny_model_folder(kind, **changes)
    place = make_adapter(tmp_path / "a", stock(folder), seed=1, layers=["model.layers.0.self_attn.kv_b_proj"])
    with (
        pytest.raises(ModelError, match="which is not plain attention"),
        opened(folder, tmp_path, {"a": place}),
    ):
        pass
