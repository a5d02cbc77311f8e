"""Keys chosen by an index (DSA: DeepSeek V3.2, GLM 5 and their kin): a row attends the few that its layer's indexer likes best.

    kept      latent │ index key                      of each token, one behind the other
    chosen    the model's own indexer, called once a request: its index keys go to that request's KV, it gets all that are there
    attended  while no more keys are there than are chosen: all of them, as any latent attention; then only those (`mla`)

An indexer writes scores out for each of its heads, so of a long request it is given a few rows at a time. Layers that choose
what the one before chose (GLM 5) hand the same `Choice` on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headstart.errors import ModelError

if TYPE_CHECKING:
    from headstart.engine.torch.attention import Segment, Step

_SCORES = 1 << 24  # at once: 64 MiB of them


class Choice:
    """What a layer's indexer was asked in one pass, and what it chose."""

    def __init__(
        self, module: nn.Module, stock: Callable[..., Tensor], hidden: Tensor, queries: Tensor, rope: tuple[Tensor, ...]
    ) -> None:
        self._module: Any = module
        self._stock = stock
        self._hidden, self._queries, self._rope = hidden, queries, rope  # [1, rows, …] each
        self._masks: list[tuple[Segment, Tensor | None]] = []

    def choose(self, step: Step) -> None:
        """Keep the index keys of the step's rows, and choose. Once: later calls change nothing."""
        if not self._masks:
            self._masks = [(one, self._chosen(one)) for one in step.segments]

    def of(self, segment: Segment) -> Tensor | None:
        """Return, for a segment of the step or some of its last rows, which keys are chosen: bool [rows, keys]; None: all."""
        whole, mask = next(one for one in self._masks if one[0].start <= segment.start < one[0].start + one[0].count)
        first = segment.start - whole.start
        return None if mask is None else mask[first : first + segment.count]

    def _chosen(self, segment: Segment) -> Tensor | None:
        end = segment.first + segment.count
        least, heads = self._module.index_topk, self._module.n_heads
        masks, at = [], 0
        while at < segment.count:
            count = min(segment.count - at, max(1, _SCORES // (heads * end)))
            found = self._asked(segment, at, count)
            seen = segment.first + at + count
            if end > least:
                rows = torch.arange(segment.first + at, seen, device=found.device).unsqueeze(1)
                mask = torch.zeros(count, end, dtype=torch.bool, device=found.device).scatter_(1, found.long(), True)
                masks.append(mask & (torch.arange(end, device=found.device) <= rows))
            at += count
        return torch.cat(masks) if masks else None

    def _asked(self, segment: Segment, at: int, count: int) -> Tensor:
        """Return the indexes of the keys that `count` rows of the segment from `at` on like best [rows, most]."""
        rows = slice(segment.start + at, segment.start + at + count)
        first = segment.first + at
        keys = torch.arange(first + count, device=self._hidden.device)
        visible = (keys <= torch.arange(first, first + count, device=keys.device).unsqueeze(1)).unsqueeze(0)
        found: Tensor = self._stock(
            self._hidden[:, rows],
            self._queries[:, rows],
            tuple(one[:, rows] for one in self._rope),
            visible,
            None,
            cache=_Keys(segment, at),
        )
        return found[0]


class _Keys:
    """What an indexer takes for transformers' cache: the index keys of one request."""

    def __init__(self, segment: Segment, at: int) -> None:
        self._segment, self._at = segment, at

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Keep `keys` [1, rows, width] of some rows of the segment; return all that they may see [1, keys, width]."""
        one, shared = self._segment, self._segment.prefix
        base = 0 if shared is None else shared.tokens
        own = one.kv.index_keys(layer)
        begin = one.first + self._at - base
        own[begin : begin + keys.shape[1]] = keys[0]
        own = own[: begin + keys.shape[1]]
        if shared is not None:
            own = torch.cat([shared.kv.index_keys(layer)[:base], own])
        return own.unsqueeze(0)


def attach(module: Any, name: str) -> int:
    """Have an attention layer's indexer choose request by request where attention is the one called `name`; return how many
    numbers an index key has. Its stock way goes on working."""
    indexer = module.indexer
    if not all(hasattr(indexer, needed) for needed in ("index_topk", "n_heads", "head_dim", "config")):
        raise ModelError(f"{type(module).__name__} chooses keys by an index of its own, which this version does not know")
    stock = indexer.forward

    def forward(hidden: Tensor, queries: Tensor, rope: tuple[Tensor, ...], *others: Any, **named: Any) -> Any:
        if indexer.config._attn_implementation != name:
            return stock(hidden, queries, rope, *others, **named)
        return Choice(indexer, stock, hidden, queries, rope)

    indexer.forward = forward
    return int(indexer.head_dim)
