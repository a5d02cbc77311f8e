"""Attention over a packed batch, each request against its own KV and the prefix that it shares. Exact; writes new k and v.

    rows of the batch      │ A: 1 │ B: 64              │ C: 1 │      one row of tokens, no padding
    keys in a shared prefix│ [0 … tokens), once for all its rows │      A, B and C have it
    keys of one's own      │ [tokens … n] │ [… first) + square │ …

What a row sees is cut into parts that need no mask or the causal square alone; each part gives an output and a log-sum-exp, and
parts are merged by those. Query heads that share a KV head are folded into rows, so K and V are read once and never repeated,
and nothing is concatenated. Where a sliding window cuts, a part has a mask; capped scores, and devices or types without the
CPU's flash kernel, go through plain matrix products or the device's own kernel. A sink is one more key without a value: it only
scales the output, by what the log-sum-exp tells.

In float32 on a CPU, the optional C kernel (`kernel.py`) does all of a layer in one call, by the same parts; without it, for
capped scores and for odd widths, torch's operations here do.

`transformers` calls `attend` for every layer (AttentionInterface); the `Step` reaches it as the keyword `headstart`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import functional

from headstart.engine.torch.index import Choice
from headstart.engine.torch.kernel import Plan, Shape, kernel
from headstart.engine.torch.kv_memory import LayerKV
from headstart.errors import ModelError

NAME = "headstart"

# Keywords that attention layers pass along and that change no number here: masks and positions are ours, dropout is training.
_HARMLESS = frozenset(
    {
        "dropout",
        "is_causal",
        "position_ids",
        "position_embeddings",
        "use_cache",
        "output_attentions",
        "output_router_logits",
    }
)

_FLASH_TYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})

_PLAIN_SCORES = 1 << 24  # at once, where scores are written out: 64 MiB of them

_LEAST_RUN = 512  # keys; splitting shorter runs among threads costs more than it brings


class KV(Protocol):
    """Where attention finds keys and values of a layer; where it keeps latents, they are both."""

    def keys(self, layer: int) -> Tensor: ...  # [kv_heads, capacity, head_dim]

    def values(self, layer: int) -> Tensor: ...

    def index_keys(self, layer: int) -> Tensor: ...  # [capacity, width], where it chooses by an index


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Prefix:
    """The KV of positions 0 … tokens-1, read only. Segments that name the same `Prefix` attend it together."""

    kv: KV
    tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start … start+count-1 of the batch: the tokens at positions first … first+count-1 of one request.

    `kv` begins with position 0, or behind `prefix`. Keys before position `sees_from` are none of theirs."""

    kv: KV
    start: int
    count: int
    first: int
    prefix: Prefix | None = None
    sees_from: int = 0

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.count)


@dataclass(slots=True)
class Step:
    """What one forward pass needs to know beside token ids. `before_layer` may wait for a layer's KV, or raise to give up."""

    segments: Sequence[Segment]
    before_layer: Callable[[int], None] | None = None
    last: tuple[int, frozenset[int]] | None = None  # the last layer, and the rows that are wanted of it; None: all
    adapted: Sequence[tuple[slice, str]] = ()  # rows, and the adapter that works on them
    attended: list[int] = field(default_factory=list)  # layers, in the order in which they called
    masks: dict[object, Tensor] = field(default_factory=dict)  # layers mask alike
    plans: dict[tuple[Shape, object], Plan] = field(default_factory=dict)  # of the C kernel, for all rows and for those wanted
    found: list[LayerKV] | None = None  # given: nothing is attended, layers are only told as they call
    brought: dict[int, tuple[ReferenceType[Tensor], int]] = field(default_factory=dict)  # new keys by id, and whose they are

    def owner(self, layer: int, key: Tensor) -> int:
        """Return the layer whose KV `key` is new in: an earlier one that brought the very same, or else `layer`."""
        known = self.brought.get(id(key))
        if known is not None and known[0]() is key:
            return known[1]
        self.brought[id(key)] = ref(key), layer
        return layer

    def positions(self) -> list[int]:
        """Return the position of each row."""
        return [position for one in self.segments for position in range(one.first, one.first + one.count)]


@dataclass(frozen=True, slots=True)
class Sight:
    """What a model makes for its layers in place of a mask: how many keys a row sees, itself included; None: all before it.

    Some kinds of model tell their layers of a window by the mask alone, so this goes before the keyword."""

    window: int | None

    def __getitem__(self, part: object) -> Sight:
        """Return what all rows and keys of a head see, which is the same. Raises ModelError for a part of them."""
        if isinstance(part, tuple) and all(one in (0, slice(None), slice(0, None)) for one in part):
            return self
        raise ModelError("the model cuts its mask in a way of its own, which this version does not serve")


class Part(NamedTuple):
    """Rows against some of their keys: `out` [heads, rows, head_dim], `lse` [heads, rows, 1], natural log."""

    out: Tensor
    lse: Tensor


def register() -> None:
    """Make `attend` and its `Sight`, in place of masks, known to transformers under NAME. Twice is fine."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _sight)


def _sight(*_: Any, local_size: int | None = None, use_vmap: bool = False, **__: Any) -> Sight:
    if use_vmap:
        raise ModelError("the model changes its causal mask by a function of its own, which this version does not serve")
    return Sight(local_size)


def attend(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,
    attention_mask: Sight | Tensor | None,
    *,
    headstart: Step | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # a sink for each head
    indices: Choice | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [1, rows, heads, head_dim]. Raises ModelError for anything that would change the numbers and is not known."""
    if headstart is None:
        raise ModelError(f"{type(module).__name__} does not pass on to its attention what this version tells it")
    for name, given in others.items():
        if given is not None and name not in _HARMLESS:
            raise ModelError(
                f"{type(module).__name__} asks its attention for {name!r}, which this version does not compute; "
                "use another model, for example one of the Llama, Qwen or Mistral kinds",
                keyword=name,
            )
    if isinstance(attention_mask, Tensor) or query.shape[0] != 1:
        raise ModelError(f"{type(module).__name__} brings an attention mask of its own, which this version does not serve")
    attend_latent = getattr(module, "attend_latent", None)  # see `mla`
    chunk: int | None = getattr(module, "attention_chunk", None)  # see `kinds`
    number: int = module.layer_idx  # type: ignore[assignment]
    layer = headstart.owner(number, key)
    owns = layer == number
    if headstart.found is not None:
        if owns:
            headstart.found.append(
                LayerKV.of(
                    layer,
                    key.shape[1],
                    key.shape[3],
                    value.shape[3],
                    latent=attend_latent is not None,
                    index_width=getattr(module, "index_width", 0),
                )
            )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    if owns:
        if headstart.before_layer is not None:
            headstart.before_layer(layer)
        headstart.attended.append(layer)
    scale_queries = getattr(module, "scale_queries", None)  # see `kinds`
    if scale_queries is not None:
        query = query * scale_queries(headstart.positions()).to(query)[:, None]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = attention_mask.window if attention_mask is not None else sliding_window
    rule = Rule(scale, window if chunk is None else None, softcap, headstart.masks)
    wanted, cut = headstart.segments, False
    if headstart.last is not None and headstart.attended[-1] == headstart.last[0]:  # and of those behind it, which keep nothing
        wanted, cut = _wanted(wanted, headstart.last[1]), True
    if chunk is not None:
        wanted = in_chunks(wanted, chunk)
    if attend_latent is not None:
        if s_aux is not None or softcap is not None or chunk is not None:
            raise ModelError(
                f"{type(module).__name__} has latent attention with sinks, caps or chunks, which this version does not serve"
            )
        for segment in headstart.segments:
            begin = segment.first - _base(segment)
            segment.kv.keys(layer)[:, begin : begin + segment.count] = key[0, :, segment.rows]
        return attend_latent(headstart, layer, query, wanted, rule, indices).unsqueeze(0), None
    if indices is not None:
        raise ModelError(f"{type(module).__name__} chooses keys by an index, which this version serves with latents only")
    plan = (cut, chunk, owns)
    return over(headstart, layer, query, wanted, rule, new=(key, value), plan=plan, keep=owns, sinks=s_aux).unsqueeze(0), None


def over(
    step: Step,
    layer: int,
    query: Tensor,  # [1, heads, rows, width of a key]
    wanted: Sequence[Segment],
    rule: Rule,
    *,
    new: tuple[Tensor, Tensor],  # [1, kv_heads, rows, width]
    plan: Hashable,
    keep: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return [rows, heads, width of a value] for the wanted rows, by the C kernel where there is one for such numbers. New keys
    and values are kept first; without `keep` they are there already, and tell only what they are like. Layers of one
    shape that give an equal `plan` have equal rows wanted, and share the kernel's tables."""
    key, value = new
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    if sum(one.count for one in wanted) < len(out):
        out.zero_()  # rows that nobody wants go on through the layer; they must not be garbage that slows it
    native = kernel()
    if native is not None and rule.softcap is None and native.serves(query, key, value):
        shape = Shape(key.shape[1], query.shape[1] // key.shape[1], key.shape[3], value.shape[3])
        tables = step.plans.get((shape, plan))
        if tables is None:
            tables = step.plans[shape, plan] = Plan(native, grouped(wanted), step.segments if keep else (), shape)
        tables.attend(layer, query[0], key[0], value[0], out, scale=rule.scale, window=rule.window, sinks=sinks)
        return out
    for segment in step.segments if keep else ():
        begin = segment.first - _base(segment)
        segment.kv.keys(layer)[:, begin : begin + segment.count] = key[0, :, segment.rows]
        segment.kv.values(layer)[:, begin : begin + segment.count] = value[0, :, segment.rows]
    if sinks is None and all(one.prefix is None for one in wanted):
        rule = replace(rule, alone=True)
    for prefix, members in grouped(wanted):
        own = [_own(rule, query[:, :, one.rows], one, layer) for one in members]
        part = own[0] if len(own) == 1 else Part(*(torch.cat(tensors, dim=1) for tensors in zip(*own, strict=True)))
        if prefix is not None:
            q, at = torch.cat([query[:, :, one.rows] for one in members], dim=2), members[0].sees_from
            keys, values = prefix.kv.keys(layer)[:, at : prefix.tokens], prefix.kv.values(layer)[:, at : prefix.tokens]
            shared = rule.attend(q, keys, values, runs=[(one.first, one.count) for one in members], at=at)
            part = part if shared is None else merged(part, shared)
        result = part.out
        if sinks is not None:
            result = result * torch.sigmoid(part.lse - sinks.float().view(-1, 1, 1)).to(result.dtype)
        begin = 0
        for one in members:
            out[one.rows] = result[:, begin : begin + one.count].transpose(0, 1)
            begin += one.count
    return out


def _base(segment: Segment) -> int:
    """Return the position of the first key in the segment's own KV."""
    return segment.prefix.tokens if segment.prefix else 0


def _wanted(segments: Sequence[Segment], rows: frozenset[int]) -> list[Segment]:
    """Return what is left of each segment from its first wanted row on."""
    left = []
    for one in segments:
        skipped = next((index for index in range(one.count) if one.start + index in rows), None)
        if skipped is not None:
            left.append(_part(one, skipped, one.count))
    return left


def in_chunks(segments: Sequence[Segment], chunk: int) -> list[Segment]:
    """Return the segments cut where a chunk of the text ends: a row sees no key of a chunk before its own."""
    cut = []
    for one in segments:
        begin = 0
        while begin < one.count:
            sees_from = (one.first + begin) // chunk * chunk
            end = min(one.count, sees_from + chunk - one.first)
            cut.append(replace(_part(one, begin, end), sees_from=sees_from))
            begin = end
    return cut


def _part(one: Segment, begin: int, end: int) -> Segment:
    """Return its rows begin … end-1."""
    return replace(one, start=one.start + begin, count=end - begin, first=one.first + begin)


def grouped(segments: Sequence[Segment]) -> Iterator[tuple[Prefix | None, list[Segment]]]:
    """Yield segments that see the same of a shared prefix together, every other one alone."""
    together: dict[tuple[int, int], list[Segment]] = {}
    for one in segments:
        if one.prefix is None or one.sees_from >= one.prefix.tokens:
            yield None, [one]
        else:
            together.setdefault((id(one.prefix), one.sees_from), []).append(one)
    for members in together.values():
        yield members[0].prefix, members


def _own(rule: Rule, q: Tensor, segment: Segment, layer: int) -> Part:
    """Attend what is in the segment's own KV: what was there before, and the new tokens."""
    base = _base(segment)
    at = max(base, segment.sees_from)
    old, seen = segment.first - at, slice(at - base, segment.first - base + segment.count)
    keys, values = segment.kv.keys(layer)[:, seen], segment.kv.values(layer)[:, seen]
    runs = [(segment.first, segment.count)]
    if segment.count == 1 or old == 0 or not rule.parts(q) or rule.cuts(segment.first + segment.count - 1, at):
        part = rule.attend(q, keys, values, runs=runs, at=at)
        assert part is not None  # a row sees itself
        return part
    square = rule.attend(q, keys[:, old:], values[:, old:], runs=runs, at=segment.first)
    before = rule.attend(q, keys[:, :old], values[:, :old], runs=runs, at=at)
    assert square is not None
    return square if before is None else merged(square, before)


@dataclass(frozen=True, slots=True)
class Rule:
    """What a layer does with scores: their scale, how far back a row sees (itself included), what caps them."""

    scale: float
    window: int | None
    softcap: float | None
    masks: dict[object, Tensor]
    alone: bool = False  # nothing is merged into its parts, no sink scales them: log-sum-exps are not needed

    def cuts(self, position: int, at: int) -> bool:
        """Whether a row at `position` no longer sees a key at `at`."""
        return self.window is not None and position - at >= self.window

    def parts(self, q: Tensor) -> bool:
        """Whether two parts without a mask are cheaper than one with it."""
        return self._flash(q) and self.softcap is None

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, *, runs: Sequence[tuple[int, int]], at: int) -> Part | None:
        """Return rows of `q`, which are at positions given as runs (first, count), against the keys at positions at …;
        None if no row sees any of them."""
        lowest = min(first for first, _ in runs)
        highest = max(first + count - 1 for first, count in runs)
        if self.window is not None and (unseen := lowest - self.window + 1 - at) > 0:
            keys, values, at = keys[:, unseen:], values[:, unseen:], at + unseen
        count = keys.shape[1]
        if count == 0:
            return None
        if keys.shape[2] != values.shape[2] and self._flash(q):  # the kernel has one width for both
            width = values.shape[2]
            q, keys, values = _alike(q, keys, values)
            part = self.attend(q, keys, values, runs=runs, at=at)
            return None if part is None else Part(part.out[:, :, :width], part.lse)
        masked = lowest < at + count - 1 or self.cuts(highest, at)
        if self.softcap is not None:
            return self.written_out(q, keys, values, self._mask(q, runs, at, count) if masked else None)
        if not self._flash(q):
            return self._on_device(q, keys, values, self._mask(q, runs, at, count) if masked else None)
        if not masked:
            return _unmasked(q, keys, values, self.scale)
        if runs == [(at, count)] and not self.cuts(highest, at):
            return _flash(q, keys[None], values[None], self.scale, causal=True)
        return _flash(q, keys[None], values[None], self.scale, mask=self._mask(q, runs, at, count))

    def _flash(self, q: Tensor) -> bool:
        return q.device.type == "cpu" and q.dtype in _FLASH_TYPES

    def _mask(self, q: Tensor, runs: Sequence[tuple[int, int]], at: int, count: int) -> Tensor:
        """Return what is added to scores [rows, count]. Large, not infinite: a row may see nothing of a part, and then counts
        for nothing when parts are merged."""
        name = (tuple(runs), at, count, self.window)
        if name not in self.masks:
            rows = torch.cat([torch.arange(first, first + rows, device=q.device) for first, rows in runs]).unsqueeze(1)
            columns = torch.arange(at, at + count, device=q.device)
            hidden = columns > rows
            if self.window is not None:
                hidden |= columns <= rows - self.window
            mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
            self.masks[name] = mask.masked_fill_(hidden, torch.finfo(q.dtype).min / 2)
        return self.masks[name]

    def _on_device(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Part:
        """By the device's own kernel, which tells no log-sum-exp; where one is needed, the plain way."""
        if not self.alone:
            return self.written_out(q, keys, values, mask)
        group = q.shape[1] // keys.shape[0]
        if group > 1:  # repeated by hand: not every device's kernel groups heads by itself
            keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
        out = functional.scaled_dot_product_attention(q, keys[None], values[None], attn_mask=mask, scale=self.scale)
        return Part(out[0], out.new_empty(0))

    def written_out(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Part:
        """Write the scores out, as many rows at a time as fit."""
        heads, rows, width = q.shape[1:]
        at_once = max(1, _PLAIN_SCORES // (heads * keys.shape[1]))
        transposed = keys.transpose(1, 2).unsqueeze(1)
        outs, lses = [], []
        for begin in range(0, rows, at_once):
            some = q[0, :, begin : begin + at_once].reshape(keys.shape[0], -1, min(at_once, rows - begin), width)
            scores = torch.matmul(some, transposed).float() * self.scale
            if self.softcap is not None:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            if mask is not None:
                scores += mask[begin : begin + at_once].float()
            lse = scores.logsumexp(dim=-1, keepdim=True)
            shares = (scores - lse).exp_().to(q.dtype)
            outs.append(torch.matmul(shares, values.unsqueeze(1)).reshape(heads, -1, values.shape[2]))
            lses.append(lse.reshape(heads, -1, 1))
        return Part(torch.cat(outs, dim=1), torch.cat(lses, dim=1))


def _alike(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with zeros behind their last axis, up to the width of the widest."""
    widest = max(one.shape[-1] for one in tensors)
    for one in tensors:
        yield functional.pad(one, (0, widest - one.shape[-1])) if one.shape[-1] < widest else one


def _unmasked(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Part:
    """Rows that see all of the keys. Long runs of them are cut, so that all threads have as much to do."""
    _, heads, rows, width = q.shape
    kv_heads, count = keys.shape[:2]
    folded = q.reshape(1, kv_heads, -1, width)
    cuts = _cuts(tasks=kv_heads * -(-folded.shape[2] // 64), count=count)
    if cuts == 1:
        part = _flash(folded, keys[None], values[None], scale)
    else:
        run = count // cuts
        k, v = (tensor[:, : cuts * run].view(kv_heads, cuts, run, width).transpose(0, 1) for tensor in (keys, values))
        outs, lses = _op(folded.expand(cuts, -1, -1, -1), k, v, scale)
        lses = lses.unsqueeze(-1)
        lse = lses.logsumexp(dim=0)
        part = Part((outs * (lses - lse).exp().to(outs.dtype)).sum(dim=0), lse)
        if cuts * run < count:
            part = merged(part, _flash(folded, keys[None, :, cuts * run :], values[None, :, cuts * run :], scale))
    return Part(part.out.reshape(heads, rows, width), part.lse.reshape(heads, rows, 1))


def _cuts(*, tasks: int, count: int) -> int:
    """Return into how many runs `count` keys are cut, where the kernel has `tasks` for each."""
    cuts = 1
    while tasks * cuts < 8 * torch.get_num_threads() and count // (2 * cuts) >= _LEAST_RUN:
        cuts *= 2
    return cuts


def merged(a: Part, b: Part) -> Part:
    """Return both parts' keys as one part."""
    return Part(torch.lerp(a.out, b.out, torch.sigmoid(b.lse - a.lse).to(a.out.dtype)), torch.logaddexp(a.lse, b.lse))


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None) -> Part:
    out, lse = _op(q, k, v, scale, causal=causal, mask=mask)
    return Part(out[0], lse[0].unsqueeze(-1))


def _op(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The CPU's flash kernel, which SDPA calls too but without telling log-sum-exps. Causal means from the upper left."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse
