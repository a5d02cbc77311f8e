"""vLLM's KV memory as pages of bytes, and copies between them and host memory of ours.

A page is what vLLM calls a block: some tokens of one layer, laid down as its attention wants them. Here it is bytes, never
looked into and never cut. In each page one or more runs of bytes lie apart (heads, in some layouts); a page copied out is those
runs one behind the other, in the order of their addresses.

    layer's memory  [blocks, runs, bytes]  ──copy_out──▶  host [pages, runs · bytes]  ──copy_in──▶  layer's memory

On a CPU a copy is done when the call returns. On a device it goes over a stream of its own through pinned memory: it starts
behind what was computed so far, what is computed later starts behind it, and an event tells when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headstart.tier.arena import ALIGNMENT
from headstart.transfer.buffers import Staging

_KEPT_STAGINGS = 4


@dataclass(frozen=True, slots=True)
class Move:
    """Pages of one layer: `blocks[i]` in vLLM's memory is page `pages[i]` of the region that begins at byte `offset` of the
    host memory."""

    layer: int
    blocks: Sequence[int]
    pages: Sequence[int]
    offset: int


class Memory(Protocol):
    """`page_bytes[layer]`. `host(nbytes)` gives aligned host memory that `copy_out` and `copy_in` know; `copy_out` returns a
    function that returns once the bytes are there; `copy_in` returns once nothing is read from the host memory any more and
    whatever vLLM computes from now on sees the bytes. After `fence`, copies into it come behind what was computed so far.
    `fence` and `copy_out` are for the thread that computes."""

    page_bytes: tuple[int, ...]

    def host(self, nbytes: int) -> Host: ...
    def fence(self) -> None: ...
    def copy_out(self, moves: Sequence[Move], host: Host) -> Callable[[], None]: ...
    def copy_in(self, moves: Sequence[Move], host: Host) -> None: ...


class Host(Protocol):
    """Host memory for one copy. `release` gives it back; twice is fine."""

    bytes: npt.NDArray[np.uint8]

    def release(self) -> None: ...


class UnknownLayout(ValueError):
    """Pages lie in memory in a way that this connector does not know."""


def memory_of(layers: Sequence[torch.Tensor], *, blocks: int) -> Memory:
    """Return the memory of layers that all lie on one device, each a view whose first axis is `blocks` blocks, or a multiple
    of that where each is cut into kernel blocks. Raises UnknownLayout."""
    devices = {layer.device for layer in layers}
    if len(devices) != 1:
        raise UnknownLayout(f"layers lie on {len(devices)} devices: {', '.join(sorted(map(str, devices)))}")
    views = [page_view(layer, blocks=blocks) for layer in layers]
    return HostMemory(views) if devices.pop().type == "cpu" else DeviceMemory(views)


def page_view(layer: torch.Tensor, *, blocks: int) -> torch.Tensor:
    """Return a layer's memory as u8 [blocks, runs, bytes], sharing it. Raises UnknownLayout."""
    if layer.shape[0] != blocks:
        if layer.shape[0] % blocks:
            raise UnknownLayout(f"{layer.shape[0]} kernel blocks are no multiple of {blocks} blocks")
        layer = torch.unflatten(layer, 0, (blocks, -1))
    size = layer.element_size()
    stretches: list[tuple[int, int]] = []  # (how many, bytes from one to the next), outermost first, bytes themselves last
    for count, stride in sorted(zip(layer.shape[1:], layer.stride()[1:], strict=True), key=lambda axis: -axis[1]):
        if count != 1:
            stretches.append((count, stride * size))
    stretches.append((size, 1))
    merged = [stretches[0]]
    for count, stride in stretches[1:]:
        outer, step = merged[-1]
        if step == count * stride:
            merged[-1] = (outer * count, stride)
        else:
            merged.append((count, stride))
    if merged[-1][1] != 1 or len(merged) > 2 or any(stride <= 0 for _, stride in merged):
        raise UnknownLayout(f"a page of shape {tuple(layer.shape[1:])} and strides {layer.stride()[1:]} lies in too many parts")
    (runs, step), (nbytes, _) = merged if len(merged) == 2 else ((1, merged[0][0]), merged[0])
    flat = torch.empty(0, dtype=torch.uint8, device=layer.device).set_(layer.untyped_storage())
    strides = (layer.stride(0) * size, step, 1)
    return torch.as_strided(flat, (blocks, runs, nbytes), strides, layer.storage_offset() * size)


class HostMemory:
    """KV memory on a CPU: a copy is a copy."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.page_bytes = tuple(view.shape[1] * view.shape[2] for view in views)
        self._layers = [view.numpy() for view in views]
        self._lock = Lock()
        self._free: list[Staging] = []

    def host(self, nbytes: int) -> Host:
        with self._lock:
            staging = self._free.pop() if self._free else Staging("connector")
        return _Staged(staging, nbytes, self._give_back)

    def fence(self) -> None:
        """What was computed is there when the call that computed it has returned."""

    def copy_out(self, moves: Sequence[Move], host: Host) -> Callable[[], None]:
        for move, layer, pages in self._each(moves, host):
            for block, page in zip(move.blocks, move.pages, strict=True):
                np.copyto(pages[page], layer[block])
        return _there

    def copy_in(self, moves: Sequence[Move], host: Host) -> None:
        for move, layer, pages in self._each(moves, host):
            for block, page in zip(move.blocks, move.pages, strict=True):
                np.copyto(layer[block], pages[page])

    def _each(self, moves: Sequence[Move], host: Host) -> list[tuple[Move, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        found = []
        for move in moves:
            layer = self._layers[move.layer]
            end = move.offset + (max(move.pages, default=-1) + 1) * self.page_bytes[move.layer]
            found.append((move, layer, host.bytes[move.offset : end].reshape(-1, *layer.shape[1:])))
        return found

    def _give_back(self, staging: Staging) -> None:
        with self._lock:
            if len(self._free) < _KEPT_STAGINGS:
                self._free.append(staging)


class _Staged:
    def __init__(self, staging: Staging, nbytes: int, give_back: Callable[[Staging], None]) -> None:
        self.bytes = np.frombuffer(staging.take(nbytes), np.uint8)
        self._staging: Staging | None = staging
        self._give_back = give_back

    def release(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            self._give_back(staging)


class DeviceMemory:
    """KV memory on a device. torch keeps pinned memory and waits for its events before it gives it to anyone else."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.page_bytes = tuple(view.shape[1] * view.shape[2] for view in views)
        self._layers = list(views)
        self._device = views[0].device
        self._accelerator = torch.get_device_module(self._device)
        self._stream = self._accelerator.Stream(device=self._device)

    def host(self, nbytes: int) -> Host:
        return _Pinned(nbytes)

    def fence(self) -> None:
        self._stream.wait_stream(self._accelerator.current_stream(self._device))

    def copy_out(self, moves: Sequence[Move], host: Host) -> Callable[[], None]:
        computing = self._accelerator.current_stream(self._device)
        self._stream.wait_stream(computing)  # what this step has written comes first
        with self._accelerator.stream(self._stream):
            for move in moves:
                pages = self._layers[move.layer].index_select(0, self._indices(move.blocks)).flatten(1)
                into = self._region(move, host)
                # Pages of one copy lie one behind the other.
                into[move.pages[0] : move.pages[0] + len(move.pages)].copy_(pages, non_blocking=True)
            done = self._accelerator.Event()
            done.record(self._stream)
        computing.wait_stream(self._stream)  # whoever gets these blocks next writes into them behind the copy
        wait: Callable[[], None] = done.synchronize
        return wait

    def copy_in(self, moves: Sequence[Move], host: Host) -> None:
        with self._accelerator.stream(self._stream):
            for move in moves:
                region = self._region(move, host)
                layer = self._layers[move.layer]
                pages = region[torch.as_tensor(list(move.pages))] if len(move.pages) != len(region) else region
                fresh = pages.to(self._device, non_blocking=True).view(len(move.pages), *layer.shape[1:])
                layer.index_copy_(0, self._indices(move.blocks), fresh)
            done = self._accelerator.Event()
            done.record(self._stream)
        done.synchronize()  # vLLM is told only then, so whatever computes with it is queued behind

    def _indices(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(blocks), dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)

    def _region(self, move: Move, host: Host) -> torch.Tensor:
        end = move.offset + (max(move.pages, default=-1) + 1) * self.page_bytes[move.layer]
        return torch.from_numpy(host.bytes[move.offset : end]).view(-1, self.page_bytes[move.layer])


class _Pinned:
    def __init__(self, nbytes: int) -> None:
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
        start = -memory.data_ptr() % ALIGNMENT
        self.bytes = memory.numpy()[start : start + nbytes]
        self._memory: torch.Tensor | None = memory

    def release(self) -> None:
        self._memory = None


def _there() -> None:
    """The copy was complete when it was asked for."""
