"""Recurrent layers (Mamba, gated delta nets, short convolutions …): their state beside a request's KV, and packed batches.

    rows of the batch │ A: 1 │ B: 64 │ C: 1 │      a mixer is called once a segment, each time with that request's own state

A state stands for all tokens before it and cannot be cut: what it was after fewer tokens is gone unless it was copied then. It
is a few tensors of fixed size a layer, which lie side by side in one run of bytes, so that copying it out or in is one copy:

    conv and recurrent state of the first recurrent layer │ of the second │ …      row-major, in their own dtypes;
                                                                              each starts at a multiple of 64 bytes

Mixers are found by watching who asks transformers' cache for a state during a short run, never by name, and a model is served
so only if its probe then gives the model's own logits.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.engine.torch.facts import name_of_cache, signature

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of the state: of `layer`, which may keep several of a kind, the one with number `index`."""

    layer: int
    index: int
    kind: str  # "conv" or "recurrent"
    form: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # in bytes

    @property
    def nbytes(self) -> int:
        return prod(self.form) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateShape:
    """Where the parts of a model's state lie. `layers` counts all layers of the model, with and without state."""

    parts: tuple[StatePart, ...]
    layers: int

    @property
    def nbytes(self) -> int:
        last = self.parts[-1]
        return _aligned(last.offset + last.nbytes)

    @property
    def memory_bytes(self) -> int:
        """What a request needs: the state, and what it was before the forward pass under way."""
        return 2 * self.nbytes

    @property
    def layout(self) -> str:
        """A name that differs wherever the bytes would be understood otherwise."""
        told = ";".join(f"{one.layer},{one.index},{one.kind},{one.form},{one.dtype},{one.offset}" for one in self.parts)
        return f"torch/state/1-{sha256(told.encode()).hexdigest()[:16]}"


class RecurrentState:
    """The state of one request after its first `tokens` tokens. `memory`: u8 [shape.memory_bytes], the state and,
    behind it, what it was before the forward pass under way, because that may be given up."""

    def __init__(self, shape: StateShape, memory: Tensor) -> None:
        self.shape = shape
        self.tokens = 0
        self._live, self._kept = memory[: shape.nbytes], memory[shape.nbytes : 2 * shape.nbytes]
        self._before: int | None = None  # how many tokens `_kept` stands for
        self._layers, self.cache = _cache_over(shape, self._live)

    def begin(self, first: int, *, keep: bool) -> None:
        """A forward pass is about to go on from token `first`; with `keep` it may be undone. 0 begins anew."""
        if first == 0:
            self._stand_at(0)
        if first != self.tokens:
            raise RuntimeError(f"a recurrent state stands at token {self.tokens}, and is asked to go on from token {first}")
        self._before = self.tokens if keep else None
        if keep and first:
            self._kept.copy_(self._live)

    def advance(self, count: int) -> None:
        """The forward pass is over."""
        self._stand_at(self.tokens + count)

    def undo(self) -> None:
        """The forward pass is given up: be what was there before it, or, where that was not kept, nothing that can be used."""
        if self._before is None:
            self._stand_at(0)
            return
        if self._before:
            self._live.copy_(self._kept)
        self._stand_at(self._before)

    @property
    def bytes(self) -> Tensor:
        """The state as u8 [shape.nbytes], until the next forward pass."""
        return self._live

    def take(self, data: Tensor, tokens: int) -> None:
        """Become what `bytes` were after the first `tokens` tokens. ValueError for another model's."""
        if data.numel() != self.shape.nbytes:
            raise ValueError(f"a state of {data.numel()} bytes is not this model's, which has {self.shape.nbytes}")
        self._live.copy_(data)
        self._stand_at(tokens)

    def _stand_at(self, tokens: int) -> None:
        self.tokens = tokens
        for layer in self._layers:
            for index in layer.has_previous_state:
                layer.has_previous_state[index] = tokens > 0


class Part(NamedTuple):
    """Rows of a batch that go on from token `first` of a request."""

    rows: slice
    first: int
    state: RecurrentState


class Way(enum.Enum):
    """How mixers go on from a state with several rows."""

    SEGMENTS = enum.auto()  # by themselves
    SCAN = enum.auto()  # their scan knows no state to begin with; what that adds is added (`_from_a_state`)
    ROWS = enum.auto()  # not at all: they are given one row at a time


class Mixers:
    """The recurrent layers of a model, whose forward passes this takes over."""

    def __init__(self, modules: Sequence[nn.Module], shape: StateShape) -> None:
        self.shape = shape
        self.way = Way.SEGMENTS
        self._running: Sequence[Part] | None = None
        for module in modules:
            self._take_over(module)

    @contextmanager
    def running(self, parts: Sequence[Part], *, keep: bool) -> Iterator[None]:
        """Within, a forward pass over these parts of a batch goes on from their states; when it ends well, they stand behind
        it. When not, they are with `keep` what they were before, else nothing that could be gone on from."""
        for part in parts:
            part.state.begin(part.first, keep=keep)
        self._running = parts
        try:
            yield
        except BaseException:
            for part in parts:
                part.state.undo()
            raise
        finally:
            self._running = None
        for part in parts:
            part.state.advance(part.rows.stop - part.rows.start)

    def _take_over(self, module: nn.Module) -> None:
        stock: Callable[..., Any] = module.forward
        called = signature(module)
        name = name_of_cache(module)
        if name is None:
            raise TypeError(f"{type(module).__name__} keeps a state and takes no cache")
        spread = next((one.name for one in called.parameters.values() if one.kind is one.VAR_KEYWORD), "")
        initial: list[Tensor | None] = [None]
        scanning = _from_a_state(module, initial)

        def forward(*args: Any, **others: Any) -> Any:
            if self._running is None:
                return stock(*args, **others)
            others.pop("headstart", None)
            given = called.bind(*args, **others).arguments
            given.update(given.pop(spread, {}))
            rows = self._running[-1].rows.stop
            results = []
            for some, state in self._cut(self._running):
                mine = {**{key: _rows(value, some, rows) for key, value in given.items()}, name: state.cache}
                if self.way is Way.SCAN and scanning is not None:
                    initial[0] = state.cache.get_recurrent_state(module.layer_idx)
                    results.append(scanning(**mine))
                    initial[0] = None  # it lies in the request's memory
                else:
                    results.append(stock(**mine))
            return _joined(results)

        module.forward = forward

    def _cut(self, parts: Sequence[Part]) -> Iterator[tuple[slice, RecurrentState]]:
        for part in parts:
            if self.way is Way.ROWS and part.first:
                yield from ((slice(row, row + 1), part.state) for row in range(part.rows.start, part.rows.stop))
            else:
                yield part.rows, part.state


@dataclass(frozen=True, slots=True)
class Found:
    """What a model keeps of a prompt, as its own cache showed it: (layer, KV heads, width of a key, width of a value) of each
    layer with KV, and its recurrent layers."""

    kv: tuple[tuple[int, int, int, int], ...]
    mixers: tuple[nn.Module, ...]
    state: StateShape


def is_recurrent(config: Any) -> bool:
    """Whether transformers gives a model of this configuration a cache with layers that keep a state."""
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    try:
        cache = DynamicCache(config=config)
    except (KeyError, AttributeError, TypeError, ValueError):  # kinds that have no place in this cache
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def find(module: nn.Module, tokens: Sequence[int]) -> Found:
    """Return what a model with recurrent layers keeps, by running `tokens` through it as it is."""
    cache: Any = _watching(module.config)
    calls: list[nn.Module] = []
    hooks = []

    def leave(*_: Any) -> None:
        calls.pop()

    for one in module.modules():
        hooks.append(one.register_forward_pre_hook(lambda inner, _: calls.append(inner)))
        hooks.append(one.register_forward_hook(leave, always_call=True))
    mixers: dict[nn.Module, None] = {}
    cache.asked = lambda: mixers.setdefault(calls[-1])
    ids = torch.tensor([tokens], device=next(module.parameters()).device)
    try:
        module(ids, **{name_of_cache(module) or "cache": cache}, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    kv = tuple(
        (number, layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for number, layer in enumerate(cache.layers)
        if getattr(layer, "keys", None) is not None and layer.keys.numel()
    )
    return Found(kv, tuple(mixers), _shape_of(cache.layers))


def follow_layer_numbers(module: nn.Module) -> None:
    """Let an attention layer that is called in several places of a model, and told where, know its number there."""

    def told(one: nn.Module, _: Any, given: dict[str, Any]) -> None:
        if "layer_idx" in given:
            one.layer_idx = given["layer_idx"]

    for one in module.modules():
        if hasattr(one, "layer_idx") and "layer_idx" in signature(one).parameters:
            one.register_forward_pre_hook(told, with_kwargs=True)


def _from_a_state(module: nn.Module, initial: Sequence[Tensor | None]) -> Callable[..., Any] | None:
    """Return a mixer's forward pass in which a Mamba scan begins with the state `initial[0]`; None where there is no such scan.

    A scan is linear in its state, h(t) = exp(A · dt(t)) · h(t-1) + …, so one that began with nothing lacks only what is left of
    the first one: C(t) · exp(A · (dt(1) + … + dt(t))) · h(0)."""
    whole = inspect.unwrap(type(module).forward)
    name = next((name for name in whole.__code__.co_names if name.endswith("selective_scan")), None)
    if name is None:
        return None
    stock: Callable[..., Any] = whole.__globals__[name]

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **others: Any) -> Any:
        result = stock(x, dt, A, B, C, **others)
        first = initial[0]
        if first is None:
            return result
        steps = dt if others.get("delta_bias") is None else dt + others["delta_bias"].to(dt.dtype)[..., None]
        steps = functional.softplus(steps) if others.get("delta_softplus") else steps
        left = torch.exp(A[None, :, None, :] * steps.float().cumsum(dim=-1)[..., None]) * first.float()[:, :, None, :]
        more = torch.einsum("bdtn,bnt->bdt", left, C.float())  # [batch, channels, rows]
        gate = others.get("z")
        more = more if gate is None else more * functional.silu(gate)
        out, last = result if others.get("return_last_state") else (result, None)
        out = out + more.to(out.dtype)
        return out if last is None else (out, last + left[:, :, -1].to(last.dtype))

    function = FunctionType(
        whole.__code__, {**whole.__globals__, name: scan}, whole.__name__, whole.__defaults__, whole.__closure__
    )
    function.__kwdefaults__ = whole.__kwdefaults__
    return MethodType(function, module)


def _watching(config: Any) -> Any:
    """Return a cache that calls `asked()` whenever a layer asks it for a state."""
    from transformers import DynamicCache

    class Watching(DynamicCache):  # type: ignore[misc]
        def get_conv_state(self, *args: Any, **others: Any) -> Any:
            self.asked()
            return super().get_conv_state(*args, **others)

        def get_recurrent_state(self, *args: Any, **others: Any) -> Any:
            self.asked()
            return super().get_recurrent_state(*args, **others)

        def update_conv_state(self, *args: Any, **others: Any) -> Any:
            self.asked()
            return super().update_conv_state(*args, **others)

        def update_recurrent_state(self, *args: Any, **others: Any) -> Any:
            self.asked()
            return super().update_recurrent_state(*args, **others)

    return Watching(config=config)


def _shape_of(layers: Sequence[Any]) -> StateShape:
    parts: list[StatePart] = []
    offset = 0
    for number, layer in enumerate(layers):
        for index in range(getattr(layer, "number_of_states", 0)):
            for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                tensor = states[index]
                if tensor is not None:
                    parts.append(StatePart(number, index, kind, tuple(tensor.shape), tensor.dtype, offset))
                    offset = _aligned(offset + parts[-1].nbytes)
    if not parts:
        raise ValueError("no layer keeps a state")
    return StateShape(tuple(parts), len(layers))


def _cache_over(shape: StateShape, memory: Tensor) -> tuple[list[Any], Any]:
    """Return the layers that keep state, and the transformers cache they are in, with all tensors in `memory`."""
    from transformers.cache_utils import Cache, DummyLayer, LinearAttentionLayer

    kept: dict[int, Any] = {}
    for part in shape.parts:
        indices = 1 + max(one.index for one in shape.parts if one.layer == part.layer)
        layer = kept.setdefault(part.layer, LinearAttentionLayer(number_of_states=indices))
        tensor = memory[part.offset : part.offset + part.nbytes].view(part.dtype).view(part.form)
        if part.kind == "conv":
            layer.conv_states[part.index] = tensor
            layer.conv_kernel_size[part.index] = part.form[-1]
            layer.is_conv_states_initialized[part.index] = True
        else:
            layer.recurrent_states[part.index] = tensor
            layer.is_recurrent_states_initialized[part.index] = True
        layer.device, layer.dtype = memory.device, layer.dtype or part.dtype
    return list(kept.values()), Cache(layers=[kept.get(number) or DummyLayer() for number in range(shape.layers)])


def _rows(given: Any, part: slice, rows: int) -> Any:
    """Return the part of an argument that belongs to some rows of the batch: whatever has a second axis as long as that."""
    if isinstance(given, Tensor) and given.ndim > 1 and given.shape[1] == rows:
        return given[:, part]
    if isinstance(given, tuple):
        return tuple(_rows(one, part, rows) for one in given)
    return given


def _joined(results: list[Any]) -> Any:
    if len(results) == 1:
        return results[0]
    if isinstance(results[0], tuple):
        return tuple(_joined(list(ones)) for ones in zip(*results, strict=True))
    return torch.cat(results, dim=1) if isinstance(results[0], Tensor) else results[0]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
