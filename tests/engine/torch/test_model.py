"""What is served is checked, and what is not served is refused with a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import loaded, stock

from headstart.engine.torch.model import TorchModel, load_model, probe
from headstart.engine.torch.packing import PackedLinear
from headstart.engine.torch.stock import StockModel
from headstart.errors import ConfigError, ModelError
from model_fixtures import LATENT_KINDS

Folders = Callable[..., Path]


def _changed(folder: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return to


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder"),
        ({"model_type": "vit"}, "does not load for generating text"),
        ({"model_type": "qwen2_vl"}, "does not load for generating text"),
        ({"num_attention_heads": 5}, "cannot be read"),
        ({"model_type": "no-such-kind"}, "cannot be read"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tiny_model_folder: Folders, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = _changed(tiny_model_folder("llama"), tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=said):
        loaded(folder)


def test_attention_that_takes_nothing_from_us_makes_a_model_run_as_it_is(
    tiny_model_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchModel, "_tell_directly", lambda self: None)
    model = load_model(tiny_model_folder("stablelm"), device="cpu", dtype="float32", on_progress=lambda *_: None)
    assert isinstance(model, StockModel)
    assert "StableLmAttention does not pass on" in model.why


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        loaded(tmp_path)


def test_a_checkpoint_that_lacks_tensors_is_not_filled_with_random_ones(tiny_model_folder: Folders, tmp_path: Path) -> None:
    folder = _changed(tiny_model_folder("llama"), tmp_path / "model", num_hidden_layers=4)
    with pytest.raises(ModelError, match="lacks 9 tensors"):
        loaded(folder)


def test_damaged_weights_are_refused(tiny_model_folder: Folders, tmp_path: Path) -> None:
    folder = _changed(tiny_model_folder("llama"), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        loaded(folder)


def test_a_model_that_gives_other_logits_through_our_attention_is_refused(tiny_model_folder: Folders) -> None:
    module = stock(tiny_model_folder("llama"))
    for layer in module.model.layers:
        layer.self_attn.scaling = 0.5  # both see it
    model = TorchModel(module, name="odd")
    probe(model)
    real = model.forward

    def wrong(*args: Any, **more: Any) -> torch.Tensor:
        return real(*args, **more) * 1.01

    model.forward = wrong  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="gives other logits"):
        probe(model)


def test_weights_that_are_not_finite_are_refused(tiny_model_folder: Folders) -> None:
    module = stock(tiny_model_folder("llama"))
    module.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ModelError, match="gives other logits"):
        probe(TorchModel(module, name="broken"))


def test_a_device_or_type_that_is_not_here_is_a_configuration_error() -> None:
    from headstart.engine.torch.hardware import choose_device, choose_dtype

    with pytest.raises(ConfigError, match=r"engine\.device"):
        choose_device("tpu")
    with pytest.raises(ConfigError, match=r"engine\.dtype"):
        choose_dtype("int8", torch.device("cpu"))
    assert choose_dtype("auto", torch.device("cpu")) is torch.float32


def test_packed_weights_that_give_other_logits_are_given_up_with_a_sentence(
    tiny_model_folder: Folders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model_folder("qwen2")  # with biases
    plain = dict(stock(folder).named_parameters())
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, rows: right(self, rows) * 1.1)
    model = loaded(folder)
    assert "runs with plain weights" in caplog.text
    assert not any(isinstance(module, PackedLinear) for module in model.module.modules())
    assert all(torch.equal(parameter, plain[name]) for name, parameter in model.module.named_parameters())


def test_a_chunk_whose_last_row_alone_is_wanted_computes_no_other_in_the_last_layer(tiny_model_folder: Folders) -> None:
    model, seen = loaded(tiny_model_folder("llama")), []
    model.module.model.layers[-1].self_attn.o_proj.register_forward_pre_hook(lambda _, rows: seen.append(rows[0]))
    model.next_logits(list(range(50)))
    assert (seen[-1].abs().sum(dim=-1) > 0)[0].nonzero().flatten().tolist() == [49]


def test_a_layer_whose_weights_are_read_stays_plain_and_all_others_are_packed(tiny_model_folder: Folders) -> None:
    kind, config = LATENT_KINDS["longcat-flash, two attentions a layer"]
    model = loaded(tiny_model_folder(kind, **config))
    packed = {name for name, module in model.module.named_modules() if isinstance(module, PackedLinear)}
    assert any(name.endswith("mlps.0.down_proj") for name in packed)
    assert not any(name.endswith("router.classifier") for name in packed)  # made anew in every pass otherwise
