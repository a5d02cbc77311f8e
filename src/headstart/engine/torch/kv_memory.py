"""KV memory of running requests: bounded, counted, one contiguous region a request, seen as tensors and as pieces.

    region ┌ layer 0: K head 0 │ K head 1 … │ V head 0 │ V head 1 … ┬ layer 1 … ┐     each head: [tokens, head_dim]
           └ each layer starts at a multiple of 4 KiB ┘

Head-major, because a decoding step over 7,500 tokens takes half the time that it takes token-major; a chunk of 64 queries
does not care. A piece (64 tokens of a layer) on a medium is K head 0, K head 1 …, V head 0 … of those tokens, so it stands for
itself whatever the region's length was, and `buffers` names its parts where they lie: nothing is copied.

On a GPU or MPS the KV lives there (`DeviceKV`) and host regions of the same shape are only passed through; that path is
exercised on the CPU by the tests, but was never run on such a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.tier.arena import ALIGNMENT, Arena, Region

LAYOUT = "torch/piece-kv-head-token-dim/1"

_PASSAGES = 4  # full contexts that may pass through host memory at once on their way to or from a device
_WARM_CONTEXTS = 2


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of a model: `layers` of `heads` KV heads, `width` numbers a head and token."""

    layers: int
    heads: int
    width: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.head_token_bytes

    @property
    def head_token_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of one layer of a region for `tokens` tokens, up to a multiple of ALIGNMENT."""
        return -(-2 * self.heads * tokens * self.head_token_bytes // ALIGNMENT) * ALIGNMENT

    def region_bytes(self, tokens: int) -> int:
        return self.layers * self.layer_bytes(_whole_blocks(tokens))

    def representation(self, *, query_heads: int) -> Representation:
        """How pieces of this KV are laid down; `query_heads` tells MHA from GQA."""
        piece = 2 * self.heads * BLOCK_TOKENS * self.head_token_bytes
        return Representation(
            kind="mha" if query_heads == self.heads else "gqa",
            layout=LAYOUT,
            dtype=str(self.dtype).removeprefix("torch."),
            layer_bytes=(piece,) * self.layers,
        )


class HostKV:
    """KV of one request in host memory; a `KVView` and the `KV` that attention sees. Counted like its region."""

    def __init__(self, region: Region, shape: KVShape, tokens: int) -> None:
        self.capacity_tokens = tokens
        self._shape = shape
        self._region = region
        self._view = region.view.cast("B")
        stride = shape.layer_bytes(tokens)
        numbers = 2 * shape.heads * tokens * shape.width
        form = (2, shape.heads, tokens, shape.width)
        layers = [
            torch.frombuffer(region.view, dtype=shape.dtype, offset=layer * stride, count=numbers).view(form)
            for layer in range(shape.layers)
        ]
        self._keys = [layer[0] for layer in layers]
        self._values = [layer[1] for layer in layers]

    def keys(self, layer: int) -> Tensor:
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        return self._values[layer]

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:
        """See `KVView`: u8 [pieces, 2 · heads, bytes of 64 tokens of a head]."""
        shape, blocks = self._shape, self.capacity_tokens // BLOCK_TOKENS
        part = shape.head_token_bytes * BLOCK_TOKENS
        if any(size != 2 * shape.heads * part for size in sizes):
            raise ValueError(f"pieces of this KV have {2 * shape.heads * part} bytes, asked for {sorted(set(sizes))}")
        if first + len(sizes) > blocks:
            raise ValueError(f"pieces {first} to {first + len(sizes)} are past the {self.capacity_tokens} tokens of this KV")
        base = layer * shape.layer_bytes(self.capacity_tokens)
        heads = np.frombuffer(self._view, np.uint8, 2 * shape.heads * blocks * part, base).reshape(-1, blocks, part)
        return heads[:, first : first + len(sizes)].transpose(1, 0, 2)

    def retain(self) -> None:
        self._region.retain()

    def release(self) -> None:
        self._region.release()


class DeviceKV:
    """KV of one request on a device, with the memory of its `KVMemory` counted. Loads and saves pass through a `HostKV`."""

    def __init__(self, shape: KVShape, tokens: int, device: torch.device, memory: KVMemory) -> None:
        self.capacity_tokens = tokens
        self._memory = memory
        self._bytes = shape.region_bytes(tokens)
        self._references = 1
        form = (2, shape.heads, tokens, shape.width)
        layers = [torch.empty(form, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self._keys = [layer[0] for layer in layers]
        self._values = [layer[1] for layer in layers]

    def keys(self, layer: int) -> Tensor:
        return self._keys[layer]

    def values(self, layer: int) -> Tensor:
        return self._values[layer]

    def copy_layer(self, layer: int, *, of: HostKV, tokens: int) -> None:
        """Take the first `tokens` tokens of `layer` from host memory."""
        self._keys[layer][:, :tokens].copy_(of.keys(layer)[:, :tokens])
        self._values[layer][:, :tokens].copy_(of.values(layer)[:, :tokens])

    def copy_to(self, host: HostKV, tokens: int) -> None:
        for layer in range(len(self._keys)):
            host.keys(layer)[:, :tokens].copy_(self._keys[layer][:, :tokens])
            host.values(layer)[:, :tokens].copy_(self._values[layer][:, :tokens])

    def retain(self) -> None:
        self._memory._count(self, +1)

    def release(self) -> None:
        self._memory._count(self, -1)


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
        if self._device is not None or nbytes <= 0:
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
                kv._keys, kv._values = [], []


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
