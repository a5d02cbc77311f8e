"""What the numbers of a model object mean: its checkpoint where its weights are that file's, else a digest of every parameter.

A model in a notebook may have been trained on, merged, cast or quantised since it was loaded. So its parameters are compared
with the file, a sample of each; whatever differs, is missing or has another name makes it a model of its own, named by its
content.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import xxhash

from headstart.block.identity import Identity, canonical_architecture
from headstart.engine.checkpoint import identity_of, read_config, weight_files
from headstart.errors import ModelError

_SAMPLES = 257  # of each parameter, spread over it
_PART = 64 << 20  # bytes on their way to be digested


def identity_of_model(model: Any, *, digests: Path | None) -> Identity:
    """Return the identity that `headstart serve` gives the model's folder, if these are its weights and configuration; else one
    that is made of all parameters and buffers, which reads them once."""
    folder = Path(str(getattr(model, "name_or_path", "") or ""))
    try:
        if folder.is_dir() and _is_what_is_in(model, folder):
            return identity_of(folder, digests=digests)
    except (ModelError, OSError):
        pass  # no whole checkpoint: then it is what is in memory that counts
    return Identity(weights=_digest(model), architecture=canonical_architecture(_plain(model.config.to_dict())))


def marks(model: Any) -> tuple[tuple[int, int], ...]:
    """Return what differs after any change to a parameter in place, or its replacement."""
    return tuple((tensor.data_ptr(), _version(tensor)) for tensor in model.parameters())


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_what_is_in(model: Any, folder: Path) -> bool:
    from safetensors import safe_open
    from transformers import AutoConfig

    read_config(folder)
    if _plain(AutoConfig.from_pretrained(folder).to_dict()) != _plain(model.config.to_dict()):
        return False
    left = dict(model.named_parameters())
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                parameter = left.pop(name, None)
                if parameter is None or not parameter.is_floating_point():
                    return False
                shape = tensors.get_slice(name).get_shape()
                if list(parameter.shape) != shape or not _same_sample(parameter, tensors.get_tensor(name)):
                    return False
    return not left


def _same_sample(parameter: torch.Tensor, stored: torch.Tensor) -> bool:
    numbers = parameter.detach().reshape(-1)
    at = torch.linspace(0, numbers.numel() - 1, min(_SAMPLES, numbers.numel()), dtype=torch.float64).round().long()
    theirs = stored.reshape(-1)[at].to(parameter.dtype)
    return bool(torch.equal(numbers[at.to(numbers.device)].cpu(), theirs))


def _digest(model: Any) -> bytes:
    """SHA-256 over name, dtype, shape and the xxh3-128 of the bytes of every parameter and buffer, in the order of names."""
    total = hashlib.sha256(b"headstart parameters 1\0")
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        told = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode()
        content = xxhash.xxh3_128()
        flat = tensor.detach().reshape(-1)
        step = max(1, _PART // max(1, flat.element_size()))
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step].cpu().contiguous()
            content.update(part.view(torch.uint8).numpy())
        total.update(len(told).to_bytes(4, "little") + told + content.digest())
    return total.digest()


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration as JSON knows it, less what says how and where it runs."""
    plain: dict[str, Any] = {}
    for name, value in config.items():
        if name in ("_attn_implementation", "_experts_implementation", "torch_dtype", "dtype", "_name_or_path"):
            continue
        if isinstance(value, dict):
            plain[str(name)] = _plain(value)
        else:
            plain[str(name)] = value if isinstance(value, (str, int, float, bool, list, type(None))) else str(value)
    return plain
