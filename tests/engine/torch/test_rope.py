"""RoPE that follows the length of the text: held still for texts of up to the context, and then the numbers that transformers
gives for a text of that length, in whatever portions it is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import some_tokens, stock, stock_logits
from transformers import LlamaConfig

from headstart.engine.torch.model import Model, TorchModel, load_model
from headstart.engine.torch.rope import hold_still

Folders = Callable[..., Path]

FIRST = 64  # tokens that the model was first trained for
LONG = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": FIRST,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": FIRST,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + number / 2 for number in range(8)],
    },
}
GROWING = {"max_position_embeddings": FIRST, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}


def loaded(folder: Path, context: int | None) -> Model:
    return load_model(folder, device="cpu", dtype="float32", on_progress=lambda *_: None, context=context)


@pytest.mark.parametrize(
    ("kind", "config", "context", "tokens"),
    [("phi3", LONG, None, 200), ("phi3", LONG, FIRST, FIRST), ("llama", LONG, None, 200), ("llama", GROWING, FIRST, FIRST)],
    ids=["long", "short", "long in another kind", "dynamic that never grows"],
)
def test_a_text_gets_the_logits_of_transformers_computed_in_portions(
    kind: str, config: dict[str, object], context: int | None, tokens: int, tiny_model_folder: Folders
) -> None:
    folder = tiny_model_folder(kind, **config)
    model = loaded(folder, context)
    assert isinstance(model, TorchModel), model.why
    text = some_tokens(tokens)
    torch.testing.assert_close(model.next_logits(text, chunk_tokens=48), stock_logits(stock(folder), text)[-1])


def test_a_module_that_chooses_by_itself_is_not_held_still() -> None:
    class Chooses(torch.nn.Module):
        rope_type = "longrope"

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scale = 2.0 if int(position_ids.max()) >= FIRST else 1.0
            angles = position_ids.float()[..., None]
            return angles.cos() * scale, angles.sin() * scale

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    model.rotary = Chooses()
    model.config = LlamaConfig(hidden_size=16, num_attention_heads=1, **LONG)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Chooses embeds a position by the length of the text"):
        hold_still(model, 256)
    hold_still(model, FIRST)  # no text is that long


def test_a_key_does_not_depend_on_what_comes_after_it(tiny_model_folder: Folders) -> None:
    model = loaded(tiny_model_folder("phi3", **LONG), None)
    text = some_tokens(200)
    alone = model.next_logits(text[:FIRST])
    model.next_logits(text)
    assert torch.equal(model.next_logits(text[:FIRST]), alone)


def test_keys_of_one_length_are_not_read_for_another(tiny_model_folder: Folders) -> None:
    folder = tiny_model_folder("phi3", **LONG)
    long, short = (loaded(folder, context).shape.representation(query_heads=4) for context in (None, FIRST))
    assert long.digest != short.digest


def test_beyond_what_a_dynamic_rope_was_trained_for_the_reason_names_the_way_out(tiny_model_folder: Folders) -> None:
    model = loaded(tiny_model_folder("llama", **GROWING), None)
    assert not isinstance(model, TorchModel)
    assert f"with engine.context of at most {FIRST} it would not" in model.why
