"""Latent attention (MLA): a token keeps one vector a layer, of which all heads make their keys and values.

    kept      latent = [c | r]           c after the latent's norm, r after RoPE; nothing of any head
    a head's  key = [K c | r], value = V c      K [nope, rank], V [value, rank]: rows of the module's `kv_b_proj`

    expanded  keys and values of a run of tokens are made, attended and forgotten, so that memory stays bounded
    absorbed  q·[K c | r] = [q_nope K | q_rope]·[c | r] and Σ p (V c) = V (Σ p c): to attention, one KV head whose keys and
              values are both the latent, with all query heads on it

`policy.latent` tells which form is cheaper, for each request or group that shares a prefix. Both go through the attention that
plain layers go through, so packed batches, prefixes and masks are its matter, and parts merge by log-sum-exp.

Of a model's own code all is used up to its `expand_kv`: it has then projected and normed, applied its kind of RoPE to query and
latent, and is about to make the keys and values of all heads; `attach` has it hand out the latent instead. Thus what differs
between models (low-rank queries, interleaved or split RoPE, YaRN's factor in cos, sin and scale, other scales) stays theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.engine.torch import index
from headstart.engine.torch.attention import NAME, Part, Prefix, Rule, Segment, Step, grouped, merged, over
from headstart.engine.torch.index import Choice
from headstart.errors import ModelError
from headstart.policy.latent import LatentShape, absorbs

_EXPANDED_BYTES = 64 << 20  # of keys and values at once


class Heads(nn.Linear):
    """Stands for a module's `kv_b_proj`, with the same weight [heads · (nope + value), rank]."""

    def __init__(self, plain: nn.Linear, shape: LatentShape) -> None:
        with torch.device("meta"):
            super().__init__(plain.in_features, plain.out_features, bias=False)
        self.weight = plain.weight
        self.shape = shape
        self.heads = plain.out_features // (shape.nope + shape.value)

    def attend(
        self, step: Step, layer: int, query: Tensor, segments: Sequence[Segment], rule: Rule, choice: Choice | None = None
    ) -> Tensor:
        """Return [rows, heads, value] for queries [1, heads, rows, nope + rope]; rows of no segment get zeros. `choice`: which
        keys the rows attend."""
        out = query.new_zeros(query.shape[2], self.heads, self.shape.value)
        if choice is not None:
            choice.choose(step)
            sparse = [one for one in segments if choice.of(one) is not None]
            segments = [one for one in segments if choice.of(one) is None]
            for one in sparse:
                out[one.rows] = self._chosen(query[:, :, one.rows], one, layer, rule, choice.of(one))
        absorbed: list[Segment] = []
        for prefix, members in grouped(segments):
            if self._absorbs(prefix, members):
                absorbed += members
                continue
            result = self._expanded(query, prefix, members, layer, rule)
            for one, part in zip(members, result, strict=True):
                out[one.rows] = part.transpose(0, 1)
        if absorbed:
            rows = torch.cat([torch.arange(one.start, one.start + one.count, device=query.device) for one in absorbed])
            out[rows] = self._absorbed(step, layer, query[0].index_select(1, rows), absorbed, rule)
        return out

    def _absorbs(self, prefix: Prefix | None, members: Sequence[Segment]) -> bool:
        shared = 0 if prefix is None else prefix.tokens
        return absorbs(
            self.shape,
            rows=sum(one.count for one in members),
            keys=shared + sum(one.first - shared + one.count for one in members),
            pairs=sum(one.count * one.first + one.count * (one.count + 1) // 2 for one in members),
        )

    def _absorbed(self, step: Step, layer: int, query: Tensor, segments: Sequence[Segment], rule: Rule) -> Tensor:
        """Return [rows, heads, value]; `query` [heads, rows, nope + rope] has the rows of the segments one behind the other."""
        start, moved = 0, []
        for one in segments:
            moved.append(replace(one, start=start))
            start += one.count
        inner = self._inner(query)
        alike = inner[:, :1]  # a row of it is as wide as a latent
        plan = tuple((one.start, one.count) for one in segments)
        sums = over(step, layer, inner, moved, rule, new=(alike, alike), plan=plan, keep=False)
        return self._outer(sums.transpose(0, 1))

    def _chosen(self, query: Tensor, segment: Segment, layer: int, rule: Rule, chosen: Tensor | None) -> Tensor:
        """Return [rows, heads, value] of a segment's rows over the keys that are chosen [rows, keys]."""
        assert chosen is not None
        latents = segment.kv.keys(layer)[:, : segment.first + segment.count - (segment.prefix.tokens if segment.prefix else 0)]
        if segment.prefix is not None:
            latents = torch.cat([segment.prefix.kv.keys(layer)[:, : segment.prefix.tokens], latents], dim=1)
        mask = torch.zeros(chosen.shape, dtype=query.dtype, device=query.device)
        mask.masked_fill_(~chosen, torch.finfo(query.dtype).min / 2)
        return self._outer(rule.written_out(self._inner(query[0]), latents, latents, mask).out).contiguous()

    def _inner(self, query: Tensor) -> Tensor:
        """Return queries [heads, rows, nope + rope] as they meet latents: [1, heads, rows, rank + rope]."""
        inner = torch.bmm(query[:, :, : self.shape.nope], self._by_head()[:, : self.shape.nope])
        return torch.cat([inner, query[:, :, self.shape.nope :]], dim=-1).unsqueeze(0)

    def _outer(self, sums: Tensor) -> Tensor:
        """Return [rows, heads, value] of sums of latents [heads, rows, rank + rope]."""
        return torch.bmm(sums[:, :, : self.shape.rank], self._by_head()[:, self.shape.nope :].transpose(1, 2)).transpose(0, 1)

    def _expanded(
        self, query: Tensor, prefix: Prefix | None, members: Sequence[Segment], layer: int, rule: Rule
    ) -> list[Tensor]:
        """Return [heads, rows, value] of each member."""
        parts: list[Part | None] = [None] * len(members)
        queries = [query[:, :, one.rows] for one in members]
        if prefix is not None:
            all_of_them = torch.cat(queries, dim=2)
            runs = [(one.first, one.count) for one in members]
            together: Part | None = None
            for begin, keys, values in self._made(prefix.kv.keys(layer)[0], 0, prefix.tokens):
                together = _with(together, rule.attend(all_of_them, keys, values, runs=runs, at=begin))
            if together is not None:
                end = 0
                for index, one in enumerate(members):
                    rows, end = slice(end, end + one.count), end + one.count
                    parts[index] = Part(together.out[:, rows], together.lse[:, rows])
        for index, (one, q) in enumerate(zip(members, queries, strict=True)):
            base = 0 if prefix is None else prefix.tokens
            latents = one.kv.keys(layer)[0]
            old = one.first - base
            for first, last in ((0, old), (old, old + one.count)):  # the new ones apart: only they need a mask
                for begin, keys, values in self._made(latents, first, last):
                    skipped = max(0, begin - old)  # rows before these keys
                    part = rule.attend(
                        q[:, :, skipped:], keys, values, runs=[(one.first + skipped, one.count - skipped)], at=base + begin
                    )
                    parts[index] = _with(parts[index], part)
        width = self.shape.value
        return [part.out[:, :, -width:] for part in parts if part is not None]

    def _made(self, latents: Tensor, first: int, last: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (begin, keys, values) for runs of the tokens first … last-1, keys and values [heads, tokens, nope + rope]; of a
        value's numbers the last `value` count."""
        shape, width = self.shape, self.shape.nope + self.shape.rope
        each = self.heads * (width + shape.value) * latents.dtype.itemsize
        at_once = max(64, _EXPANDED_BYTES // each // 64 * 64)
        for begin in range(first, last, at_once):
            run = latents[begin : min(begin + at_once, last)]
            made = functional.linear(run[:, : shape.rank], self.weight).view(len(run), self.heads, -1).transpose(0, 1)
            both = run.new_empty(self.heads, len(run), width + shape.value)  # [key without RoPE | RoPE | value]
            both[:, :, : shape.nope] = made[:, :, : shape.nope]
            both[:, :, shape.nope : width] = run[:, shape.rank :]
            both[:, :, width:] = made[:, :, shape.nope :]
            # Kernels want keys and values of one width: a value then begins with numbers of the key, which nobody reads after.
            yield begin, both[:, :, :width], both[:, :, min(width, shape.value) :]

    def _by_head(self) -> Tensor:
        return self.weight.view(self.heads, -1, self.shape.rank)


def attach(model: nn.Module) -> frozenset[int]:
    """Have layers with latent attention keep their latents, and return the numbers of those layers. Their stock attention goes
    on working. Raises ModelError for those that choose keys by an index and are not as we know them otherwise."""
    found: set[int] = set()
    for module in model.modules():
        if not hasattr(module, "expand_kv"):
            continue
        plain: Any = module.kv_b_proj
        shape = LatentShape(
            *(getattr(module, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        )
        head = shape.nope + shape.value
        if (
            type(plain) is not nn.Linear
            or plain.bias is not None
            or plain.in_features != shape.rank
            or plain.out_features % head
        ):
            if hasattr(module, "indexer"):
                raise ModelError(
                    f"{type(module).__name__} chooses keys by an index, and makes them in a way that this version does not know"
                )
            continue  # not as we know it: its keys and values are kept
        heads = Heads(plain, shape)
        module.kv_b_proj = heads
        module.attend_latent = heads.attend
        if getattr(module, "indexer", None) is not None:
            module.index_width = index.attach(module, NAME)
        _hand_out_latents(module, value=shape.value)
        found.add(module.layer_idx)
    return frozenset(found)


def _hand_out_latents(module: Any, *, value: int) -> None:
    stock = module.expand_kv

    def expand_kv(self: Any, c: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        if self.config._attn_implementation != NAME:
            both: tuple[Tensor, Tensor] = stock(c, rope)
            return both
        return torch.cat([c, rope], dim=-1), c.new_empty(*c.shape[:3], value)  # the second tells a width and no more

    module.expand_kv = MethodType(expand_kv, module)


def _with(sum_: Part | None, part: Part | None) -> Part | None:
    """Merge a part into a sum; `part` may have only the last rows of it."""
    if sum_ is None or part is None:
        return part if sum_ is None else sum_
    rows = part.out.shape[1]
    if rows == sum_.out.shape[1]:
        return merged(sum_, part)
    skipped = sum_.out.shape[1] - rows
    last = merged(Part(sum_.out[:, skipped:], sum_.lse[:, skipped:]), part)
    return Part(torch.cat([sum_.out[:, :skipped], last.out], 1), torch.cat([sum_.lse[:, :skipped], last.lse], 1))
