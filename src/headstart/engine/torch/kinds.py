"""What some kinds of model do by a row's place in the text, told to our attention, which has rows of several texts.

    attention in chunks (Llama 4)      a row sees the keys of its own chunk alone; set on the module as `attention_chunk`
    queries scaled by their position   a row's own place is needed, not its place in the batch; set as `scale_queries`

Such things begin after thousands of tokens. So that a short probe sees them, they can be made to begin early (`begun_early`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headstart.engine.torch.attention import NAME

_EARLY = {"attention_chunk_size": 16, "attention_chunk": 16, "floor_scale": 8, "index_topk": 12}  # attributes that say when


def attach(model: nn.Module) -> None:
    """Tell attention modules what they are. Their stock attention goes on working."""
    module: Any
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        number = getattr(module, "layer_idx", None)
        types = getattr(config, "layer_types", None)
        if not isinstance(number, int) or not types:
            continue
        if types[number] == "chunked_attention":
            module.attention_chunk = config.attention_chunk_size
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            module.scale_queries = partial(_temperature, module)
            module.register_forward_pre_hook(_leaves_scaling(module))


@contextmanager
def begun_early(model: nn.Module) -> Iterator[None]:
    """Have what begins after thousands of tokens begin after a few, in stock attention and in ours."""
    places: dict[int, Any] = {}
    for module in model.modules():
        for place in (module, getattr(module, "config", None)):
            places[id(place)] = place
    changed = []
    for place in places.values():
        for name, early in _EARLY.items():
            value = getattr(place, name, None)
            if isinstance(value, int | float) and value > early:
                changed.append((place, name, value))
                setattr(place, name, early)
    try:
        yield
    finally:
        for place, name, value in changed:
            setattr(place, name, value)


def _temperature(module: Any, positions: Sequence[int]) -> Tensor:
    """Return a factor for each row: queries grow with the logarithm of their position, every `floor_scale` tokens."""
    places = torch.tensor(positions, dtype=torch.float32)
    factors: Tensor = torch.log1p(torch.floor((places + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    return factors


def _leaves_scaling(module: Any) -> Callable[..., None]:
    tuned = module.attn_temperature_tuning

    def before(one: Any, _: Any) -> None:
        one.attn_temperature_tuning = tuned and one.config._attn_implementation != NAME

    return before
