"""What this machine, and the container on it, offers to a torch engine: device, number type, cores, memory."""

from __future__ import annotations

import ctypes

import torch

from headstart.engine.host import free_bytes, physical_cores
from headstart.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES = 1 << 30


def choose_device(asked: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda", "cuda:N" or "mps". Raises ConfigError for one that is not here."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = {"cuda": cuda > 0, "mps": torch.backends.mps.is_available(), "cpu": True}
    if asked == "auto":
        return torch.device(next(name for name, there in here.items() if there))
    kind, _, number = asked.partition(":")
    if not here.get(kind, False) or (number and (kind != "cuda" or int(number) >= cuda)):
        names = ", ".join(name for name, there in here.items() if there)
        names += "".join(f", cuda:{device}" for device in range(cuda))
        raise ConfigError(f"engine.device is {asked!r}, and this machine has: auto, {names}", key="engine.device")
    return torch.device(asked)


def choose_dtype(asked: str, device: torch.device) -> torch.dtype:
    """Return the number type; "auto" is the fastest that the device computes in (on CPUs without bfloat16 units float32)."""
    if asked != "auto":
        if asked not in _DTYPES:
            raise ConfigError(f"engine.dtype is {asked!r}; use auto, {', '.join(_DTYPES)}", key="engine.dtype")
        return _DTYPES[asked]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.float16 if device.type == "mps" else torch.float32


def use_physical_cores() -> int:
    """Let torch use one thread a physical core, fewer if it was told so or the container has less; return how many.
    Siblings only disturb each other."""
    threads = min(physical_cores(), torch.get_num_threads())
    torch.set_num_threads(threads)
    return threads


def keep_freed_memory() -> bool:
    """Let freed memory stay with the process, for the next chunk's activations, and return whether that can be had here.

    The C library gives large blocks back to the kernel, which clears them page by page when they are taken again: a tenth of
    the CPU seconds of a prefill. What is kept is at most what one step used."""
    try:
        adjust = ctypes.CDLL(None).mallopt  # glibc's alone
    except (OSError, AttributeError, TypeError):
        return False
    return all(adjust(parameter, _KEPT_BYTES) == 1 for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


def available_bytes(device: torch.device) -> int:
    """Return the bytes that are free for KV where the model computes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return free_bytes()
