"""What an engine has to know of any Hugging Face decoder, told by its configuration and its forward pass."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Self

import torch

_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "context_length")
_UNBOUNDED = 32768  # tokens, for models that name no limit: recurrent ones, and those whose attention fades with distance
_CACHES = ("cache", "past_key_values", "cache_params")  # what layers call transformers' cache, newest name first

PROBE_CHUNKS = (33, 7, 1)  # of a short text: prefill, prefill behind a prefix, decode
# What a model's code raises when it is called in a way that it was not made for.
CANNOT_RUN = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    context_tokens: int
    vocabulary: int
    layers: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, module: Any) -> Self:
        text = module.config.get_text_config(decoder=True)
        weights = next(module.parameters())
        return cls(
            context_tokens=context_of(text),
            vocabulary=text.vocab_size,
            layers=getattr(text, "num_hidden_layers", 0),
            device=weights.device,
            dtype=weights.dtype,
        )


def context_of(text: Any) -> int:
    """Return up to how many tokens a text may have, as a model's configuration says."""
    contexts = (getattr(text, name, None) for name in _CONTEXTS)
    context = next((one for one in contexts if isinstance(one, int) and one > 0), _UNBOUNDED)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":  # it is there to go beyond what the model was trained for
        context = int(context * rope.get("factor", 1))
    return context


def signature(module: torch.nn.Module) -> inspect.Signature:
    """Return how a module's forward pass is called, decorators taken off."""
    whole = inspect.signature(inspect.unwrap(type(module).forward))
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def name_of_cache(module: torch.nn.Module) -> str | None:
    """Return by which argument a module takes transformers' cache."""
    parameters = signature(module).parameters
    return next((name for name in _CACHES if name in parameters), None)


def probe_tokens(vocabulary: int) -> list[int]:
    """Return a short text by whose logits it is told whether a model is run right."""
    return [(7919 * (index + 1)) % vocabulary for index in range(sum(PROBE_CHUNKS))]


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
