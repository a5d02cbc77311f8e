"""Attention over a packed batch, each request against its own contiguous KV. Exact; writes the new k and v where they belong.

    rows of the batch     │ request A: 1 │ request B: 64            │      one row of tokens, no padding
    keys that they see    │ A [0 … n]    │ B [0 … computed) + square│

A chunk of a prompt is attended in two parts that are merged by log-sum-exp: what was there before (no mask; the query heads
that share a KV head are folded into rows, so K and V are read once and never repeated) and the square of the new tokens
(causal). A decoding request is the first part alone. Nothing is concatenated. Layers with a sliding window that matters, and
devices or types without the CPU flash kernel, take one masked call over the keys in sight.

`transformers` calls `attend` for every layer (AttentionInterface); the `Step` reaches it as the keyword `headstart`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from headstart.errors import ModelError

NAME = "headstart"

# Keywords that attention layers pass along and that change no number here: masks and positions are ours, dropout is training.
_HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "position_embeddings", "use_cache", "output_attentions"})

_FLASH_TYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class KV(Protocol):
    """Where attention finds one request's keys and values of a layer."""

    def keys(self, layer: int) -> Tensor: ...  # [kv_heads, capacity, head_dim]

    def values(self, layer: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start … start+count-1 of the batch: the tokens at positions first … first+count-1 of one request."""

    kv: KV
    start: int
    count: int
    first: int


@dataclass(slots=True)
class Step:
    """What one forward pass needs to know beside token ids. `before_layer` may wait for a layer's KV, or raise to give up."""

    segments: Sequence[Segment]
    before_layer: Callable[[int], None] | None = None
    attended: list[int] = field(default_factory=list)  # layers, in the order in which they called


def register() -> None:
    """Make `attend` known to transformers under NAME, without masks. Twice is fine."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    headstart: Step,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [1, rows, heads, head_dim]. Raises ModelError for anything that would change the numbers and is not known."""
    for name, given in others.items():
        if given is not None and name not in _HARMLESS:
            raise ModelError(
                f"{type(module).__name__} asks its attention for {name!r}, which this version does not compute; "
                "use a Llama, Qwen2, Qwen3 or Mistral kind of model",
                keyword=name,
            )
    if attention_mask is not None or query.shape[0] != 1:
        raise ModelError(f"{type(module).__name__} brings an attention mask of its own, which this version does not serve")
    if value.shape[-1] != query.shape[-1] or key.shape[-1] != query.shape[-1]:
        raise ModelError(f"{type(module).__name__} has keys and values of unequal width, which this version does not serve")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if headstart.before_layer is not None:
        headstart.before_layer(layer)
    headstart.attended.append(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.empty(query.shape[2], query.shape[1], query.shape[3], dtype=query.dtype, device=query.device)
    for segment in headstart.segments:
        rows = slice(segment.start, segment.start + segment.count)
        seen = segment.first + segment.count
        keys, values = segment.kv.keys(layer), segment.kv.values(layer)
        keys[:, segment.first : seen] = key[0, :, rows]
        values[:, segment.first : seen] = value[0, :, rows]
        q = query[:, :, rows]
        if sliding_window is not None and seen > sliding_window:
            out[rows] = _windowed(q, keys, values, first=segment.first, window=sliding_window, scale=scale)
        elif q.device.type == "cpu" and q.dtype in _FLASH_TYPES:
            out[rows] = _in_two_parts(q, keys, values, first=segment.first, scale=scale)
        else:
            out[rows] = _windowed(q, keys, values, first=segment.first, window=seen, scale=scale)
    return out.unsqueeze(0), None


def _in_two_parts(q: Tensor, keys: Tensor, values: Tensor, *, first: int, scale: float) -> Tensor:
    """Return [rows, heads, head_dim] of rows at positions first … over all keys up to each."""
    _, heads, count, width = q.shape
    seen = first + count
    if count == 1:  # all that the row sees, itself included, is one unmasked part
        out, _ = _flash(_folded(q, keys), keys[None, :, :seen], values[None, :, :seen], causal=False, scale=scale)
        return out.reshape(1, heads, width)
    square, square_lse = _flash(q, keys[None, :, first:seen], values[None, :, first:seen], causal=True, scale=scale)
    if first == 0:
        return square[0].transpose(0, 1)
    prefix, prefix_lse = _flash(_folded(q, keys), keys[None, :, :first], values[None, :, :first], causal=False, scale=scale)
    prefix = prefix.reshape(heads, count, width)
    # reshape, not view: the kernel returns its log-sum-exps transposed
    share = torch.sigmoid(square_lse.reshape(heads, count, 1) - prefix_lse.reshape(heads, count, 1))
    return torch.lerp(prefix, square[0], share.to(prefix.dtype)).transpose(0, 1)


def _folded(q: Tensor, keys: Tensor) -> Tensor:
    """Return [1, kv_heads, group · rows, head_dim]: query heads that share a KV head become rows."""
    return q.reshape(1, keys.shape[0], -1, q.shape[-1])


def _flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=None, scale=scale)
    return out, lse


def _windowed(q: Tensor, keys: Tensor, values: Tensor, *, first: int, window: int, scale: float) -> Tensor:
    """Return [rows, heads, head_dim] where a row sees itself and the window-1 keys before it, by one masked call."""
    count = q.shape[2]
    seen = first + count
    low = max(0, seen - count - window + 1)
    k, v = keys[:, low:seen], values[:, low:seen]
    mask = None
    if count > 1:
        rows = torch.arange(first, seen, device=q.device).unsqueeze(1)
        columns = torch.arange(low, seen, device=q.device)
        mask = (columns <= rows) & (columns > rows - window)
    group = q.shape[1] // k.shape[0]
    if group > 1:  # repeated by hand: not every device's kernel groups heads by itself
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    out = functional.scaled_dot_product_attention(q, k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)
