"""KV memory of running requests: bounded, counted, one contiguous region a request, seen as tensors and as pieces.

    region ┌ layer 0: K head 0 │ K head 1 … │ V head 0 │ V head 1 … ┬ layer 1 … ┐     each strip: [tokens, width]
           └ each layer starts at a multiple of 4 KiB ┘    behind the last one: the state of recurrent layers, if there are any

Only layers that keep KV are here, under the numbers that they have in the model, and they may differ. Head-major, because a
decoding step over 7,500 tokens takes half the time that it takes token-major; a chunk of 64 queries does not care. A piece (64
tokens of a layer, or some more) on a medium is strip 0, strip 1, … of those tokens, so it stands for itself whatever the length
of the region was, and `buffers` names its parts where they lie: nothing is copied.

On a GPU or MPS the KV lives there (`DeviceKV`) and host regions of the same shape are only passed through; that path is
exercised on the CPU by the tests, but was never run on such a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import KVKind, Representation
from headstart.engine.torch.recurrent import RecurrentState, StateShape
from headstart.tier.arena import ALIGNMENT, Arena, Region

_PLAIN = "torch/piece-kv-head-token-dim/1"
_JOINED = "torch/piece-head-token-key-value/1"
_LATENT = "torch/piece-token-latent-rope/1"

_PASSAGES = 4  # full contexts that may pass through host memory at once on their way to or from a device
_WARM_CONTEXTS = 2


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What layer `number` of a model keeps of each token: `strips` runs of `width` numbers, each a plane [tokens, width].

    A plain layer has a strip for each head's keys, then one for each head's values. With `key_width`, keys and values differ
    in width: a head has one strip, `key_width` numbers of the key and then the value. `latent`: one strip, of which all heads
    make their keys and values (see `mla`); the last `index_width` numbers of it are an index key (see `index`)."""

    number: int
    strips: int
    width: int
    key_width: int | None = None
    latent: bool = False
    index_width: int = 0

    @classmethod
    def of(cls, number: int, heads: int, key_width: int, value_width: int, *, latent: bool, index_width: int = 0) -> Self:
        """Return what is kept of keys and values of these widths; of a latent, all of the key and of an index key, and nothing
        else."""
        if latent:
            return cls(number, 1, key_width + index_width, latent=True, index_width=index_width)
        if key_width == value_width:
            return cls(number, 2 * heads, key_width)
        return cls(number, heads, key_width + value_width, key_width=key_width)

    @property
    def heads(self) -> int:
        """KV heads; 1 for a latent."""
        return self.strips if self.latent or self.key_width is not None else self.strips // 2

    @property
    def layout(self) -> str:
        if self.latent:
            return f"{_LATENT}+index-{self.index_width}" if self.index_width else _LATENT
        return _PLAIN if self.key_width is None else _JOINED

    def keys_and_values(self, planes: Tensor) -> tuple[Tensor, Tensor]:
        """Return views [heads, tokens, width] of `planes` [strips, tokens, width]; the latent as both."""
        if self.latent:
            latents = planes[:, :, : self.width - self.index_width]
            return latents, latents
        if self.key_width is not None:
            return planes[:, :, : self.key_width], planes[:, :, self.key_width :]
        return planes[: self.heads], planes[self.heads :]


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of a model: the layers that keep any, in the order in which the model runs them. `state`: of recurrent layers.

    `piece_tokens`: whole blocks that are checked, read and hit together. `manner`: in what way the numbers were computed, where
    that matters to who reads them; see `deterministic`."""

    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    state: StateShape | None = None
    piece_tokens: int = BLOCK_TOKENS
    manner: str = ""

    @classmethod
    def alike(cls, layers: int, *, heads: int, width: int, dtype: torch.dtype) -> Self:
        """Return the shape of a model of so many equal plain layers."""
        return cls(tuple(LayerKV(number, 2 * heads, width) for number in range(layers)), dtype)

    @property
    def numbers(self) -> list[int]:
        return [layer.number for layer in self.layers]

    @property
    def token_bytes(self) -> int:
        return sum(layer.strips * layer.width for layer in self.layers) * self.dtype.itemsize

    def place(self, number: int) -> int:
        """Return where the model's layer `number` stands among the layers that keep KV, as the cache counts them."""
        return self.numbers.index(number)

    def part_bytes(self, place: int) -> int:
        """Bytes of one strip of one piece."""
        return self.layers[place].width * self.dtype.itemsize * self.piece_tokens

    def piece_bytes(self, place: int) -> int:
        return self.layers[place].strips * self.part_bytes(place)

    def layer_bytes(self, place: int, tokens: int) -> int:
        """Bytes of one layer of a region for `tokens` tokens, whole blocks, up to a multiple of ALIGNMENT."""
        return -(-self.piece_bytes(place) * tokens // self.piece_tokens // ALIGNMENT) * ALIGNMENT

    def region_bytes(self, tokens: int) -> int:
        return self.state_offset(_whole_blocks(tokens)) + (0 if self.state is None else self.state.memory_bytes)

    def state_offset(self, tokens: int) -> int:
        """Where the state lies in a region for `tokens` tokens, whole blocks."""
        return sum(self.layer_bytes(place, tokens) for place in range(len(self.layers)))

    def representation(self, *, query_heads: int) -> Representation:
        """How pieces of this KV are laid down; `query_heads` tells MHA from GQA."""
        kind: KVKind = "mha" if all(layer.heads == query_heads for layer in self.layers) else "gqa"
        if any(layer.latent for layer in self.layers):
            kind = "mla"
        layouts = sorted({layer.layout for layer in self.layers})
        if self.state is not None:
            layouts.append(self.state.layout)
        return Representation(
            kind=kind,
            layout=" + ".join(layouts) + (f", {self.manner}" if self.manner else ""),
            dtype=str(self.dtype).removeprefix("torch."),
            layer_bytes=tuple(self.piece_bytes(place) for place in range(len(self.layers))),
            layer_numbers=tuple(self.numbers),
            piece_tokens=self.piece_tokens,
            state="none" if self.state is None else "required",
        )


class LayerViews:
    """The KV of one request as attention sees it: `planes[i]` [strips, capacity, width] belongs to `shape.layers[i]`; it is
    asked for by the model's number of a layer. `memory`: u8, where the state lies in models with recurrent layers."""

    def __init__(self, shape: KVShape, planes: Sequence[Tensor], memory: Tensor | None = None) -> None:
        self.state = None if shape.state is None or memory is None else RecurrentState(shape.state, memory)
        self.shared_tokens = 0
        self.stock: Any = None  # what a model that is run as it is keeps (see `stock`)
        self._shape = shape
        self._planes = list(planes)
        self._both = {layer.number: layer.keys_and_values(plane) for layer, plane in zip(shape.layers, planes, strict=True)}

    def keys(self, layer: int) -> Tensor:
        """Return [kv_heads, capacity, width]."""
        return self._both[layer][0]

    def values(self, layer: int) -> Tensor:
        return self._both[layer][1]

    def index_keys(self, layer: int) -> Tensor:
        """Return [capacity, width]."""
        place = self._shape.place(layer)
        return self._planes[place][0, :, self._shape.layers[place].width - self._shape.layers[place].index_width :]

    def begin_with(self, of: LayerViews, *, first: int = 0, tokens: int) -> None:
        """Copy `tokens` tokens of all layers of `of`, from `first` on, to the beginning here, and the state."""
        for here, there in zip(self._planes, of._planes, strict=True):
            here[:, :tokens].copy_(there[:, first : first + tokens])
        if self.state is not None and of.state is not None:
            self.state.take(of.state.bytes, of.state.tokens)
        self.stock = of.stock

    def _forget(self) -> None:
        self._planes, self._both, self.state, self.stock = [], {}, None, None


class HostKV(LayerViews):
    """KV of one request in host memory; a `KVView` and the `KV` that attention sees. Counted like its region."""

    def __init__(self, region: Region, shape: KVShape, tokens: int) -> None:
        self.capacity_tokens = tokens
        self._region = region
        self._view = region.view.cast("B")
        self._offsets = [0]
        planes = []
        for place, layer in enumerate(shape.layers):
            form = (layer.strips, tokens, layer.width)
            numbers = layer.strips * tokens * layer.width
            planes.append(torch.frombuffer(region.view, dtype=shape.dtype, offset=self._offsets[-1], count=numbers).view(form))
            self._offsets.append(self._offsets[-1] + shape.layer_bytes(place, tokens))
        memory = None
        if shape.state is not None:
            count = shape.state.memory_bytes
            memory = torch.frombuffer(region.view, dtype=torch.uint8, offset=shape.state_offset(tokens), count=count)
        super().__init__(shape, planes, memory)

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:
        """See `KVView`, which counts the layers that keep KV: u8 [pieces, strips, bytes of a piece of a strip]."""
        pieces, part, piece = (
            self.capacity_tokens // self._shape.piece_tokens,
            self._shape.part_bytes(layer),
            self._shape.piece_bytes(layer),
        )
        if any(size != piece for size in sizes):
            raise ValueError(f"pieces of this KV have {piece} bytes, asked for {sorted(set(sizes))}")
        if first + len(sizes) > pieces:
            raise ValueError(f"pieces {first} to {first + len(sizes)} are past the {self.capacity_tokens} tokens of this KV")
        strip = part // self._shape.piece_tokens * self.capacity_tokens  # which need not be whole pieces
        planes = np.frombuffer(self._view, np.uint8, piece // part * strip, self._offsets[layer]).reshape(-1, strip)
        strips = planes[:, : pieces * part].reshape(piece // part, pieces, part)  # splitting an axis copies nothing
        return strips[:, first : first + len(sizes)].transpose(1, 0, 2)

    def take(self, host: HostKV, first: int, *, at: int, tokens: int) -> None:
        """Copy `tokens` tokens of `host` from `first` on to where `at` is here. All in whole blocks."""
        blocks = tokens // BLOCK_TOKENS
        for place in range(len(self._shape.layers)):
            sizes = [self._shape.piece_bytes(place)] * blocks
            here = self.buffers(place, at // BLOCK_TOKENS, sizes)
            np.copyto(here, host.buffers(place, first // BLOCK_TOKENS, sizes))

    def retain(self) -> None:
        self._region.retain()

    def release(self) -> None:
        self._region.release()


class DeviceKV(LayerViews):
    """KV of one request on a device, with the memory of its `KVMemory` counted. Loads and saves pass through a `HostKV`."""

    def __init__(self, shape: KVShape, tokens: int, device: torch.device, memory: KVMemory) -> None:
        self.capacity_tokens = tokens
        self._memory = memory
        self._bytes = shape.region_bytes(tokens)
        self._references = 1
        super().__init__(
            shape,
            [torch.empty((one.strips, tokens, one.width), dtype=shape.dtype, device=device) for one in shape.layers],
            _state_memory(shape, device),
        )

    def copy_layer(self, place: int, *, of: HostKV, tokens: int) -> None:
        """Take the first `tokens` tokens of the layer at `place` from host memory."""
        self._planes[place][:, :tokens].copy_(of._planes[place][:, :tokens])

    def take(self, host: HostKV, first: int, *, at: int, tokens: int) -> None:
        """As of `HostKV`."""
        for here, there in zip(self._planes, host._planes, strict=True):
            here[:, at : at + tokens].copy_(there[:, first : first + tokens])

    def copy_to(self, host: HostKV, tokens: int) -> None:
        host.begin_with(self, tokens=tokens)

    def retain(self) -> None:
        self._memory._count(self, +1)

    def release(self) -> None:
        self._memory._count(self, -1)


class StateCopy:
    """A copy of a request's recurrent state in host memory, with one reference."""

    def __init__(self, region: Region, state: RecurrentState) -> None:
        self._region = region
        self.data = region.view.cast("B")[: state.shape.nbytes]
        torch.frombuffer(self.data, dtype=torch.uint8).copy_(state.bytes)

    def retain(self) -> None:
        self._region.retain()

    def release(self) -> None:
        self._region.release()


class ScratchKV(LayerViews):
    """KV outside the engine's memory, for probes and reference runs."""

    def __init__(self, shape: KVShape, tokens: int, device: torch.device) -> None:
        super().__init__(
            shape,
            [torch.zeros((one.strips, tokens, one.width), dtype=shape.dtype, device=device) for one in shape.layers],
            _state_memory(shape, device),
        )


class KVMemory:
    """All KV memory of an engine. `allocate` gives a request its own, or None while others hold too much of it.

    `context_tokens` is the longest that a request may become."""

    def __init__(self, shape: KVShape, capacity_bytes: int, *, context_tokens: int, device: torch.device | None = None) -> None:
        self.shape = shape
        self._device = device  # None: host memory is where the model computes
        self._lock = Lock()
        self._device_used = 0
        self._device_capacity = capacity_bytes if device is not None else 0
        context_bytes = shape.region_bytes(context_tokens)
        # Beside a device, the host keeps room for a few passages only: a load or save that finds none is left out.
        host_bytes = capacity_bytes if device is None else min(capacity_bytes, _PASSAGES * context_bytes)
        self._arena = Arena(host_bytes, name="engine KV")
        self._most_used = min(host_bytes, _WARM_CONTEXTS * context_bytes)  # at once so far, or expected soon
        self._touched = 0
        self._spare: Arena | None = None

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes if self._device is None else self._device_capacity

    @property
    def used_bytes(self) -> int:
        """Bytes that requests hold, and loads and saves that still touch them, on host and device; above the capacity while a
        spare is held."""
        spare = self._spare
        with self._lock:
            return self._arena.used_bytes + self._device_used + (0 if spare is None else spare.used_bytes)

    def allocate(self, tokens: int) -> HostKV | DeviceKV | None:
        """Return KV for `tokens` tokens with one reference, or None when it does not fit now. ValueError: it never can."""
        if self._device is None:
            return self.allocate_host(tokens)
        nbytes = self.shape.region_bytes(tokens)
        if nbytes > self._device_capacity:
            raise ValueError(
                f"{tokens} tokens of KV need {nbytes} bytes, more than the {self._device_capacity} there are: it can never fit"
            )
        with self._lock:
            if self._device_used + nbytes > self._device_capacity:
                return None
            self._device_used += nbytes
        try:
            return DeviceKV(self.shape, _whole_blocks(tokens), self._device, self)
        except torch.OutOfMemoryError:
            with self._lock:
                self._device_used -= nbytes
            return None

    def allocate_host(self, tokens: int) -> HostKV | None:
        region = self._arena.allocate(self.shape.region_bytes(tokens))
        if region is None:
            return None
        self._most_used = max(self._most_used, self._arena.used_bytes)
        return HostKV(region, self.shape, _whole_blocks(tokens))

    def copy_state(self, state: RecurrentState) -> StateCopy | None:
        """Return a copy of a request's state, or None where there is no memory for one now."""
        region = self._arena.allocate(state.shape.nbytes)
        return None if region is None else StateCopy(region, state)

    def allocate_spare(self, tokens: int) -> HostKV | None:
        """Return KV in a mapping of its own, beyond the capacity, for when reads that never end hold all of it. One at a time,
        for use without loads and saves. None: it cannot be had, or the KV is on a device, where no read ever holds it."""
        if self._device is not None or (self._spare is not None and self._spare.used_bytes):
            return None
        nbytes = self.shape.region_bytes(tokens)
        try:
            spare = Arena(nbytes, name="spare KV")
        except (OSError, MemoryError):
            return None
        before, self._spare = self._spare, spare
        if before is not None:
            before.close()
        region = spare.allocate(nbytes)
        assert region is not None
        return HostKV(region, self.shape, _whole_blocks(tokens))

    def touch(self, tokens: int) -> bool:
        """Back the next `tokens` tokens of KV with memory before requests need it; returns whether more should be. That is
        as much as was ever used at once, and two contexts from the start: what nobody needs is left to the machine.

        Reading into memory that was never touched takes several times as long. For one thread at a time."""
        nbytes = min(self.shape.region_bytes(tokens), self._most_used - self._touched)
        if self._device is not None or not self.shape.layers or nbytes <= 0:
            return False
        self._touched += nbytes
        return self._arena.touch(nbytes) and self._touched < self._most_used

    def close(self) -> None:
        self._arena.close()
        if self._spare is not None:
            self._spare.close()

    def _count(self, kv: DeviceKV, step: int) -> None:
        with self._lock:
            if kv._references <= 0:
                raise RuntimeError("KV of a request was used after its last release")
            kv._references += step
            if kv._references == 0:
                self._device_used -= kv._bytes
                kv._forget()


def _state_memory(shape: KVShape, device: torch.device) -> Tensor | None:
    return None if shape.state is None else torch.empty(shape.state.memory_bytes, dtype=torch.uint8, device=device)


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
